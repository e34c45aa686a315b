"""Runs a study: `vgrout sweep STUDY.toml`, resumable, N runs at a time.

Exit codes: 0 every run finished (`--via pueue`: the rest is in the queue) · 1 some did not, each
named with its reason · 2 refused, nothing started · 130 interrupted: the runs under way have saved,
and the same command continues.
"""

from vgrout.config.cli import cli_exit, leave, parse_args
from vgrout.ground import console
from vgrout.sweep.runner import SweepSettings, run_study


def main(argv: list[str] | None = None) -> int:
    console.setup(None)
    return cli_exit(lambda: run_study(parse_args(SweepSettings, argv, "vgrout sweep")))


if __name__ == "__main__":
    leave(main())
