"""`vgrout problems check FILE`: a problem file, validated before anything is trained on it."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from vgrout.cli import cli_exit
from vgrout.config.names import parse_command
from vgrout.envs.code.grading.check import check_problems, shadowed_builtins
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.problems import ProblemRow, as_marked, load_rows, split_sizes
from vgrout.errors import refuse

FEW = 200  # problems


def check(file: Annotated[Path, tyro.conf.Positional], workers: int | None = None) -> int:
    """Validate FILE: schema, hint, every canonical solution under the reference tests, prompt
    lengths, splits."""
    refuse(workers is not None and workers < 1, f"--workers {workers}: should be at least 1")
    rows = load_rows(file)
    problems = [as_marked(row) for row in rows]
    track = partial(tqdm, total=len(problems), disable=None, unit="problem")
    with Grader(workers=workers) as grader:
        report = check_problems(problems, grader, track=track)
    print(report)
    lengths = sorted(sum(len(m["content"]) for m in p.messages) for p in problems)
    print(f"prompt characters: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
    print(_splits_line(rows))
    shadowed: Counter[str] = Counter()
    for row in rows:
        shadowed.update(shadowed_builtins(row.setup_code))
    for name, n in shadowed.items():
        print(
            f"setup code replaces the builtin {name} in {n} problems; "
            "answers that call it get another function"
        )
    modes = Counter(p.mode for p in problems)
    print("flaws: " + ", ".join(f"{mode} {n}" for mode, n in modes.items()))
    return 0 if report.ok else 1


def _splits_line(rows: Sequence[ProblemRow]) -> str:
    """The sizes of the splits, and what they are too small for."""
    sizes = split_sizes(rows)
    line = "splits: " + " · ".join(f"{name} {n}" for name, n in sizes.items())
    empty = [name for name, n in sizes.items() if not n]
    for name in empty:
        line += f"; no {name} problem: a run needs one of each"
    if not empty and len(rows) < FEW:
        line += "; enough to try a run, few for a number"
    return line


def main() -> int:
    """Exit codes: 0 sound · 1 not · 2 refused, in one line."""
    return cli_exit(lambda: parse_command({"check": check}, None, "vgrout problems"))
