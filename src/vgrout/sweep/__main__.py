"""`python -m vgrout.sweep STUDY.toml`: every run of a study, planned, resumable, N at a time.

Exit codes: 0 every run finished (`--via pueue`: whatever was left is in the queue) · 1 some did not, each named with
its reason · 2 refused, nothing started · 130 interrupted: the runs under way have saved, the same command goes on.
"""

import sys

from vgrout import console
from vgrout.cli import cli_exit, parse_args
from vgrout.sweep.runner import Cli, run


def main(argv: list[str] | None = None) -> int:
    console.setup(None)
    return cli_exit(lambda: run(parse_args(Cli, argv, "python -m vgrout.sweep")))


if __name__ == "__main__":
    sys.exit(main())
