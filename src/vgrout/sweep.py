"""`python -m vgrout.sweep STUDY.toml`: every run of a study, planned, resumable, N at a time.

Exit codes: 0 every run finished · 1 some did not, each named with its reason · 2 refused, nothing started · 130
interrupted: the runs under way have saved, the same command goes on.
"""

import sys

import tyro

from vgrout import console
from vgrout.analysis.sweep import Cli, run
from vgrout.launch import refusing


def main(argv: list[str] | None = None) -> int:
    cli = tyro.cli(Cli, args=argv, prog="python -m vgrout.sweep")
    console.setup(None)
    return refusing(lambda: run(cli))


if __name__ == "__main__":
    sys.exit(main())
