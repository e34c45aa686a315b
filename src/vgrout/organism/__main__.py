"""`python -m vgrout.organism build | verify`: make the embedded organism, or check the one that is there."""

import sys
from pathlib import Path

import tyro
from loguru import logger

from vgrout.organism import DATA_DIR
from vgrout.organism.build import SEED
from vgrout.organism.build import build as build_organism
from vgrout.organism.verify import check_files, check_training


def build(out: Path = DATA_DIR, seed: int = SEED) -> int:
    """Make problems, tokenizer, weights, pool and pairs from one seed (about ten minutes on two cores).

    Args:
        out: folder to write; an older one is replaced when the new one is complete.
        seed: of everything.
    """
    build_organism(out, seed)
    return 0


def verify(data: Path = DATA_DIR) -> int:
    """Compare every file with its recorded hash, and re-run the first training steps.

    Args:
        data: folder that `build` wrote.
    """
    faults = check_files(data) or check_training(data)
    for fault in faults:
        logger.error(fault)
    if not faults:
        logger.info(f"{data}: as built; the first training steps repeat")
    return 1 if faults else 0


def main() -> int:
    return tyro.extras.subcommand_cli_from_dict({"build": build, "verify": verify}, prog="python -m vgrout.organism")


if __name__ == "__main__":
    sys.exit(main())
