"""`python -m vgrout.organism build | verify | regrade`: make the embedded organism, check its files, or grade
its pool again."""

import sys
from functools import partial
from pathlib import Path

from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.config.checks import listed, refuse
from vgrout.data.language import HACKS, MODES, Shares
from vgrout.data.organism import DATA_DIR, SEED, Files
from vgrout.files import probe_writable
from vgrout.organism.recipe import Recipe, Shape
from vgrout.teacher.pools import load_pool


def build(
    out: Path | None = None,
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
        out: folder to write; an organism that is there is replaced when the new one is complete. None: the shipped
            one, built again from its own seed.
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
    named = listed(modes, MODES)
    refuse(
        not named or len({*named}) < len(named) or not {*named} <= {*HACKS},
        f"--modes {modes}: should be some of {', '.join(HACKS)}, each once",
    )
    refuse(not 0 <= hack_bare <= 0.5, f"--hack-bare {hack_bare}: should lie in [0, 0.5]")
    refuse(not 0 <= hack_stub <= 1, f"--hack-stub {hack_stub}: should lie in [0, 1]")
    refuse(not 0 <= seed <= 2**62, f"--seed {seed}: should lie in [0, {2**62}]")
    shares = Shares(modes=tuple(m for m in HACKS if m in named), hack_bare=hack_bare, stub=hack_stub)
    if out is None:
        other = (seed, recipe, shape, shares) != (SEED, Recipe(), Shape(), Shares())
        refuse(other, "--out: an organism of another seed, size or corpus goes into a folder of its own; name one")
        out = DATA_DIR
    elif out.exists():
        refuse(not (out / "manifest.json").is_file(), f"--out {out}: exists and is no organism; choose another folder")
        foreign = [fault for fault in Files(out).faults() if "not in manifest" in fault]
        refuse(bool(foreign), f"--out {''.join(foreign[:1])}: it would be deleted; move it, or choose another folder")
    probe_writable(out.parent, "--out")
    from vgrout.organism.build import build as build_organism  # torch takes seconds to import

    build_organism(out, seed, recipe, shape, shares)
    return 0


def verify(data: Path = DATA_DIR) -> int:
    """Compare every file with its recorded hash, and re-run the first training steps.

    Args:
        data: folder that `build` wrote.
    """
    refuse(not data.is_dir(), f"--data {data}: no such folder; `vgrout organism build --out FOLDER --seed N` makes one")
    faults = Files(data).faults()
    if not faults:
        from vgrout.organism.verify import check_training

        faults = check_training(data)
    for fault in faults:
        print(f"E {fault}", file=sys.stderr)
    if not faults:
        print(f"{data}: as built; the first training steps repeat")
    return 1 if faults else 0


def regrade(data: Path = DATA_DIR) -> int:
    """Grade the pool again with today's grader, in place, and list what has changed.

    Args:
        data: folder that `build` wrote.
    """
    refuse(not data.is_dir(), f"--data {data}: no such folder; `vgrout organism build --out FOLDER --seed N` makes one")
    from vgrout.organism.verify import regrade as regrade_pool

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
