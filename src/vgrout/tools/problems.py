"""`vgrout problems check FILE`: a problem file, validated before anything is trained on it."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.grading.check import check_problems
from vgrout.grading.grade import Grader
from vgrout.problems import assigned, load_problems, load_rows

FEW = 20  # test problems, below which intervals are as wide as what they should tell


def check(file: Annotated[Path, tyro.conf.Positional], workers: int | None = None) -> int:
    """Validate FILE: schema, the hint phrase, every canonical solution under the reference tests, prompt lengths."""
    problems = load_problems(file)
    with Grader(workers=workers) as grader:
        report = check_problems(
            problems, grader, track=lambda items: tqdm(items, total=len(problems), disable=None, unit="problem")
        )
    print(report)
    lengths = sorted(sum(len(m["content"]) for m in p.messages) for p in problems)
    print(f"prompt characters: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
    print("flaws: " + ", ".join(f"{m} {n}" for m, n in Counter(p.mode for p in problems).items()))
    sizes = {name: len(part) for name, part in assigned(load_rows(file), "own").items()}
    few = f"; {sizes['test']} to test: too few for a number" if sizes["test"] < FEW else ""
    print(f"splits: {' · '.join(f'{name} {n}' for name, n in sizes.items())}{few}")
    return 0 if report.ok else 1


def main() -> int:
    return cli_exit(lambda: parse_args({"check": check}, None, "vgrout problems"))
