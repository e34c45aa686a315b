"""`vgrout doctor`: the sandbox's layers on this machine, and a self-test of the grader."""

from vgrout.config.cli import cli_exit, parse_args
from vgrout.envs.worlds import code_tools
from vgrout.ground.machine import visible


def examine() -> int:
    """The sandbox's layers on this machine, and a self-test of the grader. Under 10 s."""
    lines, sound = code_tools().examine()
    print("\n".join(lines))
    print(f"GPUs: {', '.join(visible()) or 'none that this process may use'}")
    return 0 if sound else 1


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 all checks hold and the sandbox is complete · 1 they do not, or it is not."""
    return cli_exit(lambda: parse_args(examine, argv, "vgrout doctor"))
