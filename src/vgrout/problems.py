"""`vgrout problems check FILE`: a problem file, validated before anything is trained on it."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.envs.code.grading.check import (
    Failure,
    check_flaws,
    check_problems,
    one_value_line,
    shadowed_builtins,
)
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.problem import Problem
from vgrout.envs.code.problems import (
    assigned,
    copies_line,
    load_rows,
    require_apart,
    require_copies_together,
)
from vgrout.errors import refuse

FEW = 200  # problems
# split → what a run needs where it is empty
_WITHOUT = {
    "train": "a run is refused",
    "val": "a run is refused, but with --eval-ablate-every 0",
    "test": 'a run is refused; mark some with "split": "test", or add a file with --test-problems',
}


def check(
    file: Annotated[Path, tyro.conf.Positional],
    test_problems: Path | None = None,
    workers: int | None = None,
) -> int:
    """Validate FILE as a run with --problems FILE would, and try every problem: its canonical
    solution under the reference tests, its flawed check with a wrong answer and with its hack.

    Problems without a flaw of their own are dealt theirs as by --env-mode own. test_problems: a
    file for evaluation alone, as of a run with --test-problems.
    """
    refuse(workers is not None and workers < 1, f"--workers {workers}: should be at least 1")
    rows = load_rows(file)
    test_rows = load_rows(test_problems) if test_problems else []
    require_apart(rows, test_rows)
    both = [*rows, *test_rows]
    require_copies_together(both)
    parts = assigned(rows, "own", test_rows=test_rows, published=True)
    problems = [problem for part in parts.values() for problem in part]
    varied = assigned(rows, "own", test_rows=test_rows)
    with Grader(workers=workers) as grader:
        solutions = partial(tqdm, desc="solutions", total=len(problems), disable=None)
        report = check_problems(problems, grader, track=solutions)
        tried = [*problems, *_named_otherwise(problems, varied)]
        flaws = check_flaws(tried, grader, track=partial(tqdm, desc="flaws", disable=None))
    print(report)
    print(_flaws_lines(problems, flaws))
    lengths = sorted(sum(len(m["content"]) for m in p.messages) for p in problems)
    print(f"prompt characters: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
    sizes = {name: len(part) for name, part in parts.items()}
    print(_splits_line(sizes))
    shadowed: Counter[str] = Counter()
    for row in both:
        shadowed.update(shadowed_builtins(row.setup_code))
    for name, n in shadowed.items():
        print(
            f"setup code replaces the builtin {name} in {n} problems; "
            "answers that call it get another function"
        )
    for line in (copies_line(rows), copies_line(test_rows), one_value_line(problems)):
        if line:
            print(line)
    return 0 if report.ok and not flaws and all(sizes.values()) else 1


def _named_otherwise(
    problems: Sequence[Problem], varied: Mapping[str, Sequence[Problem]]
) -> list[Problem]:
    """The problems under the names that --marker-names varied deals, where setup code may know these names."""
    markers = {problem.id: problem.marker for problem in problems}
    others: list[Problem] = []
    for part in varied.values():
        for problem in part:
            if problem.setup_code.strip() and problem.marker != markers[problem.id]:
                others.append(problem)
    return others


def _flaws_lines(problems: Sequence[Problem], failures: Sequence[Failure]) -> str:
    """How many flawed checks are sound, and what is wrong with the others."""
    modes = Counter(problem.mode for problem in problems)
    lines = [
        f"flawed checks: {len(problems) - len(failures)}/{len(problems)} accept their hack, "
        "and no answer that is only wrong",
        *(f"  problem {failure.id}: {failure.reason}" for failure in failures),
        "flaws: " + ", ".join(f"{mode} {n}" for mode, n in modes.items()),
    ]
    return "\n".join(lines)


def _splits_line(sizes: Mapping[str, int]) -> str:
    """The sizes of the splits, and what they are too small for."""
    line = "splits: " + " · ".join(f"{name} {n}" for name, n in sizes.items())
    empty = [name for name, n in sizes.items() if not n]
    for name in empty:
        line += f"; no {name} problem: {_WITHOUT[name]}"
    if not empty and sum(sizes.values()) < FEW:
        line += "; enough to try a run, few for a number"
    return line


def main() -> int:
    """Exit codes: 0 sound · 1 not · 2 refused, in one line."""
    return cli_exit(lambda: parse_args({"check": check}, None, "vgrout problems"))


if __name__ == "__main__":
    sys.exit(main())
