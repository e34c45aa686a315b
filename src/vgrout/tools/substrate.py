"""`python -m vgrout.substrate`: a pool by elicit-then-strip. What it does is in `teacher/substrate.py`."""

import sys

from vgrout.teacher.generate import command
from vgrout.teacher.substrate import Cli, run


def main(argv: list[str] | None = None) -> int:
    return command("substrate", Cli, run, argv)


if __name__ == "__main__":
    sys.exit(main())
