"""`python -m vgrout.bench NAME`: one subcommand a bench. Prints its table; writes nothing unless asked."""

import sys
from collections.abc import Callable
from pathlib import Path

import tyro

from vgrout.bench import grading


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


BENCHES: dict[str, Callable[..., None]] = {"grading": _grading}


def main() -> int:
    try:
        tyro.extras.subcommand_cli_from_dict(BENCHES, prog="python -m vgrout.bench")
    except ValueError as e:
        print(f"E {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
