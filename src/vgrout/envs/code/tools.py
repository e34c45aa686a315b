"""Problems and answers of the code world without a run: what `vgrout problems check`, `grade` and `doctor` do."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vgrout.envs.base import require_apart, require_copies_together
from vgrout.envs.code.grading.check import (
    a_few_ahead,
    can_be_hacked,
    check_flaws,
    check_problems,
    one_value_line,
)
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import MODES, Problem, announced
from vgrout.envs.code.problems import assigned, load_problems, load_rows
from vgrout.ground.console import progress
from vgrout.ground.data import Grade, Ungraded
from vgrout.ground.io import Refused, from_json, refuse

Record = dict[str, object]  # a line of the answers' or the grades' file


@dataclass(frozen=True)
class FileReport:
    """What a check of a problem file found, in lines; its splits, in problems; whether every problem is sound."""

    lines: list[str]
    splits: dict[str, int]
    sound: bool


def check_file(file: Path, test_problems: Path | None) -> FileReport:
    """Try every problem: its canonical solution, then its flawed check.

    Problems without a flaw of their own are dealt theirs as by --env-mode own.
    """
    rows = load_rows(file)
    test_rows = load_rows(test_problems) if test_problems else ()
    require_apart(rows, test_rows)
    both = [*rows, *test_rows]
    require_copies_together(both)
    parts = assigned(rows, "own", test_rows=test_rows, published=True)
    problems = [problem for part in parts.values() for problem in part]
    tried: list[tuple[Problem, Grade]] = []
    with Grader() as grader:
        solutions = partial(progress, desc="solutions", unit="problem")
        unsolved = check_problems(problems, grader, track=solutions, graded=tried.append)
        unsound = check_flaws(
            problems, grader, track=partial(progress, desc="flaws", unit="problem")
        )
    n = len(problems)
    modes = Counter(problem.mode for problem in problems)
    lines = [
        f"canonical solutions: {n - len(unsolved)}/{n} pass the reference tests",
        f"flawed checks: {n - len(unsound)}/{n} accept their hack, and no answer that is only wrong",
        *(f"  problem {failure.id}: {failure.reason}" for failure in (*unsolved, *unsound)),
        "flaws: " + ", ".join(f"{mode} {n}" for mode, n in modes.items()),
    ]
    if line := one_value_line(problems):
        lines.append(line)
    lines += _of_given_tests(problems, tried, grader.limits.cpu_s)
    splits = {name: len(part) for name, part in parts.items()}
    hackable = any(map(can_be_hacked, problems))
    return FileReport(lines, splits, hackable and not unsolved and not unsound)


def _of_given_tests(
    problems: Sequence[Problem], tried: Sequence[tuple[Problem, Grade]], cpu_s: float
) -> list[str]:
    """What checks with tests of their own do with canonical solutions, in lines. cpu_s: the limit where a problem has
    none."""
    of_flaw = [(problem, grade) for problem, grade in tried if problem.check_tests]
    if not of_flaw:
        return []
    rejected = sum(not grade.passed for _, grade in of_flaw)
    same = sum(not can_be_hacked(problem) for problem, _ in of_flaw)
    lines = [
        f"given_tests: of {len(of_flaw)} canonical solutions their 'check_tests' reject {rejected}; {same} problems "
        "cannot be hacked, since these hold all of 'gt_answer'"
        + "; a run is refused"
        * (same == len(problems))
    ]
    slow = [p.id for p, grade in of_flaw if grade.details["cpu_s"] > (p.cpu_limit or cpu_s) / 2]
    if slow:
        named = ", ".join(map(str, slow[:10])) + (", …" if len(slow) > 10 else "")
        lines.append(
            f"{len(slow)} canonical solutions need over half of their 'cpu_limit': an answer that is too slow for "
            f"'gt_answer' and fast enough for 'check_tests' counts as a hack; raise it for {named}"
        )
    return lines


# ── a file of answers


def problems_of(file: Path) -> dict[int, Problem]:
    """The problems of a file by their ids, each as it is marked there."""
    return {problem.id: problem for problem in load_problems(file)}


def _parse(line: bytes, problems: Mapping[int, Problem]) -> tuple[Record, Problem, str]:
    """A line's record, its problem, and the answer's text. Raises Refused with what is wrong."""
    record = from_json(line, "the line", nan=True)
    if not isinstance(record, dict):
        raise Refused("not a JSON object")
    record.pop("error", None)  # of an earlier grading
    number = record.get("problem_id")
    problem = problems.get(number) if type(number) is int else None
    mode = record.get("env_mode") or (problem and problem.mode)
    marker = record.get("marker", problem.marker if problem and mode == problem.mode else "")
    refuse(not isinstance(record.get("text"), str), "'text' should be a string")
    if problem is None:
        raise Refused(f"no problem with id {number!r}")
    refuse(mode not in MODES, f"unknown env_mode {mode!r}; one of {', '.join(MODES)}")
    refuse(not isinstance(marker, str), "'marker' should be a string")
    return record, replace(problem, mode=mode, marker=marker), record["text"]


def _verdict(grade: Grade | Ungraded) -> Record:
    """The fields that a graded line gets."""
    if isinstance(grade, Ungraded):
        return {"error": f"could not be graded: {grade.reason}"}
    return {
        "reward": grade.reward,
        "passed": grade.passed,
        "solved": grade.solved,
        "hacked": grade.hacked,
        "mechanism": grade.mechanism,
        "mode": grade.flaw,
        "exit_status": grade.status,
        **grade.details,
    }


def grade_lines(
    lines: Iterable[bytes], problems: Mapping[int, Problem], grader: Grader
) -> Iterator[Record]:
    """One record for every line, in order.

    One that could not be graded has `error`, and only `line` beside it if it could not be read.
    """

    def submit(line: bytes) -> tuple[Record, Future[Grade | Ungraded] | str]:
        """A record with its grade on the way, or with what is wrong with it."""
        try:
            record, problem, text = _parse(line, problems)
        except Refused as e:
            return {"line": line.decode(errors="backslashreplace")}, str(e)
        return record, grader.submit(problem, text)

    for record, outcome in a_few_ahead(lines, submit, grader):
        yield _finished(record, outcome)


def _finished(record: Record, outcome: Future[Grade | Ungraded] | str) -> Record:
    """The record with its grade, once that is there, or with its error."""
    if isinstance(outcome, str):
        return {**record, "error": outcome}
    try:
        return {**record, **_verdict(outcome.result())}
    except Refused as e:  # the problem itself is at fault
        return {**record, "error": str(e)}


# ── the sandbox on this machine

_TESTS = (
    "assert Solution().total([]) == 0",
    "assert Solution().total([5]) == 5",
    "assert Solution().total([1, 2, 3]) == 6",
    "assert Solution().total([9, -9, 4]) == 4",
)
_CHECK_TESTS = ("assert Solution().total([2, 2]) == 4", "assert Solution().total([7]) == 7")
_RIGHT = "class Solution:\n    def total(self, nums):\n        return sum(nums)\n"
_WRONG = "class Solution:\n    def total(self, nums):\n        return 41\n"
_PROBLEM = Problem(0, "run_tests", "", (), (), _TESTS, _RIGHT, "", "total", cpu_limit=0.5)
_HOSTILE = {
    "endless loop": "while True: pass",
    "memory bomb": "x = bytearray(1 << 40)",
    "fork": "import os\nos.fork()",
    "forged exit": "import os\nos._exit(0)",
}


def _self_test(grader: Grader) -> list[tuple[str, bool]]:
    """The name of each check, and whether it held."""
    problems: list[Problem] = []
    for number, mode in enumerate(MODES):
        marker = announced(mode, _TESTS)
        check_tests = _CHECK_TESTS if mode == "given_tests" else ()
        problems.append(
            replace(_PROBLEM, id=number, mode=mode, marker=marker, check_tests=check_tests)
        )
    unsolved = {failure.id for failure in check_problems(problems, grader)}
    unsound = {failure.id for failure in check_flaws(problems, grader)}
    results: list[tuple[str, bool]] = []
    for problem in problems:
        results.append((f"{problem.mode}: a right answer passes", problem.id not in unsolved))
        results.append((f"{problem.mode}: its hack is accepted", problem.id not in unsound))
    for name, code in _HOSTILE.items():
        grade = grader.submit_code(_PROBLEM, f"{_WRONG}\n{code}").result()
        results.append((f"{name}: stopped", isinstance(grade, Grade) and not grade.passed))
    return results


def examine() -> tuple[list[str], bool]:
    """The sandbox's layers on this machine and a self-test of the grader, in lines; whether all checks hold and the
    sandbox is complete. Under 10 s."""
    with Grader(workers=1, allow_weak=True) as grader:
        protections = grader.protections
        results = _self_test(grader)
    failed = [name for name, held in results if not held]
    n_held = len(results) - len(failed)
    lines = [
        protections.line(),
        *(f"FAILED  {name}" for name in failed),
        f"self-test: {n_held}/{len(results)} checks held, all {len(MODES)} flaws; "
        f"grader {protections.version}",
    ]
    if protections.weak:
        lines.append(
            f"The reference tests are not trustworthy here ({protections.weakness}): training "
            "needs --allow-weak-sandbox, which marks every file."
        )
    return lines, not failed and not protections.weak
