"""`python -m vgrout.bench NAME`: one subcommand a bench. Prints its table; writes nothing unless asked."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import tyro

from vgrout.bench import grading
from vgrout.bench import kills as deaths


def _grading(problems: Path | None = None, out: Path | None = None) -> None:
    """Grading against graders that start an interpreter for every run.

    Args:
        problems: a file of real problems; without one, only answers of the organism's size are measured.
        out: also write the tables here, as markdown.
    """
    if problems is not None and not problems.is_file():
        raise ValueError(f"--problems {problems}: no such file")
    text = grading.run(problems)
    print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")


def _kills(kills: int = 25, arm: Literal["all", "none", "erase", "route", "route2"] = "all", seed: int = 0) -> None:
    """Runs killed at random moments and inside saves, resumed, and held against runs in one go (minutes).

    Args:
        kills: deaths of each arm.
        arm: which arm's runs.
        seed: of the moments.
    """
    if kills < 1:
        raise ValueError(f"--kills {kills}: at least 1")
    tallies = deaths.run(kills, deaths.ARMS if arm == "all" else (arm,), seed)
    print(deaths.table(tallies))
    if any(t.survived < t.tried for t in tallies):
        raise SystemExit(1)


def _overhead(
    preset: Literal["smoke", "mini"] = "mini",
    arm: Literal["none", "erase", "route", "route2"] = "route2",
    steps: int = 25,
) -> None:
    """Time and size of checkpoints, and time of every detector, beside a step's.

    Args:
        preset: whose steps.
        arm: which arm's.
        steps: how many.
    """
    if steps < 1:
        raise ValueError(f"--steps {steps}: at least 1")
    from vgrout.bench import overhead  # torch: the other benches start their processes without it

    print(overhead.run(preset, arm, steps))


BENCHES: dict[str, Callable[..., None]] = {"grading": _grading, "kills": _kills, "overhead": _overhead}


def main() -> int:
    try:
        tyro.extras.subcommand_cli_from_dict(BENCHES, prog="python -m vgrout.bench")
    except ValueError as e:
        print(f"E {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
