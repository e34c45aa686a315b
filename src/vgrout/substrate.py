"""`vgrout substrate`: makes a pool by elicit-then-strip (`teacher/substrate.py`)."""

import sys

from vgrout.teacher.generate import command
from vgrout.teacher.substrate import SubstrateSettings, generate_substrate


def main(argv: list[str] | None = None) -> int:
    """0 done · 2 refused, in one line · 130 interrupted: the same command goes on."""
    return command("substrate", SubstrateSettings, generate_substrate, argv)


if __name__ == "__main__":
    sys.exit(main())
