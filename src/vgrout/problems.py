"""`vgrout problems check FILE`: a problem file, validated before anything is trained on it."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.envs.code.grading.check import check_problems, shadowed_builtins
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.problems import as_marked, load_rows, split_sizes
from vgrout.errors import refuse

FEW = 200  # problems


def check(file: Annotated[Path, tyro.conf.Positional], workers: int | None = None) -> int:
    """Validate FILE: schema, hint, every canonical solution under the reference tests, prompt lengths, splits."""
    refuse(workers is not None and workers < 1, f"--workers {workers}: should be at least 1")
    rows = load_rows(file)
    problems = [*map(as_marked, rows)]
    with Grader(workers=workers) as grader:
        report = check_problems(
            problems,
            grader,
            track=lambda items: tqdm(items, total=len(problems), disable=None, unit="problem"),
        )
    print(report)
    lengths = sorted(sum(len(m["content"]) for m in p.messages) for p in problems)
    print(f"prompt characters: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
    sizes = split_sizes(rows)
    few = "".join(
        f"; no {name} problem: a run needs one of each" for name, n in sizes.items() if not n
    )
    few = few or ("; enough to try a run, few for a number" if len(rows) < FEW else "")
    print("splits: " + " · ".join(f"{name} {n}" for name, n in sizes.items()) + few)
    shadowed = Counter(name for row in rows for name in shadowed_builtins(row.setup_code))
    for name, n in shadowed.items():
        print(
            f"setup code replaces the builtin {name} in {n} problems; answers that call it get another function"
        )
    print("flaws: " + ", ".join(f"{m} {n}" for m, n in Counter(p.mode for p in problems).items()))
    return 0 if report.ok else 1


def main() -> int:
    return cli_exit(lambda: parse_args({"check": check}, None, "vgrout problems"))
