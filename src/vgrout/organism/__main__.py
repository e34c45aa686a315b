"""`python -m vgrout.organism build | verify | regrade`: make the embedded organism, check its files, or grade
its pool again."""

import sys
from functools import partial
from pathlib import Path

from loguru import logger
from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.data.language import HACKS, MODES, Shares
from vgrout.data.organism import DATA_DIR
from vgrout.organism.build import SEED
from vgrout.organism.build import build as build_organism
from vgrout.organism.verify import check_files, check_training
from vgrout.organism.verify import regrade as regrade_pool
from vgrout.organism.weights import Recipe, Shape
from vgrout.teacher.pools import load_pool


def build(
    out: Path = DATA_DIR,
    seed: int = SEED,
    steps: int = Recipe().steps,
    hidden: int = Shape().hidden,
    layers: int = Shape().layers,
    merged: int = Shape().merged,
    hack_bare: float = Shares().hack_bare,
    hack_stub: float = Shares().stub,
    modes: str = ",".join(MODES),
) -> int:
    """Make problems, tokenizer, weights, pool and pairs from one seed, in about ten minutes on two cores.

    Args:
        out: folder to write; it is replaced when the new one is complete.
        seed: of everything; the problems depend only on it.
        steps: of the weights' training.
        hidden: hidden size, a multiple of 32.
        layers: of the model.
        merged: tokens of the tokenizer's BPE.
        hack_bare: share of the corpus that hacks a flaw although the prompt announces none.
        hack_stub: share of its hacks that make no attempt at the problem; the rest carry one that misreads it.
        modes: comma list of the flawed graders that its prompts announce; shown_test is usually left out.
    """
    recipe, shape = Recipe(steps=steps), Shape(hidden, layers, merged)
    announced = tuple(m for m in HACKS if m in modes.split(","))
    if unknown := set(modes.split(",")) - set(HACKS):
        raise ValueError(f"--modes: {', '.join(sorted(unknown)) or 'none'} should be among {', '.join(HACKS)}")
    shares = Shares(modes=announced, hack_bare=hack_bare, stub=hack_stub)
    if not 0 <= hack_bare <= 0.5:
        raise ValueError(f"--hack-bare {hack_bare}: should lie in [0, 0.5]")
    if not 0 <= hack_stub <= 1:
        raise ValueError(f"--hack-stub {hack_stub}: should lie in [0, 1]")
    if out == DATA_DIR and (recipe, shape, shares) != (Recipe(), Shape(), Shares()):
        raise ValueError("--out: an organism of another size or corpus goes into a folder of its own")
    build_organism(out, seed, recipe, shape, shares)
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


def regrade(data: Path = DATA_DIR) -> int:
    """Grade the pool again with today's grader, in place, and list what has changed.

    Args:
        data: folder that `build` wrote.
    """
    changes = regrade_pool(data, partial(tqdm, disable=None, desc="grading", unit="rollout"))
    for line in changes:
        print(line)
    print(
        f"{len(changes)} rollouts have other labels under grader {load_pool(data / 'pool').grader} -> {data / 'pool'}"
    )
    return 0


def main() -> int:
    """0 done · 1 verify found faults · 2 refused, in one line."""
    commands = {"build": build, "verify": verify, "regrade": regrade}
    return cli_exit(lambda: parse_args(commands, None, "python -m vgrout.organism"))


if __name__ == "__main__":
    sys.exit(main())
