"""The check of a problem file: canonical solutions must pass all reference tests, and each flawed check must accept its
hack, and not what is only wrong."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from vgrout.envs.code.grading.extract import parse_test
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import Mode, Problem, hack
from vgrout.ground.data import Grade, Ungraded
from vgrout.ground.io import Refused


@dataclass(frozen=True, slots=True)
class Failure:
    """A problem that cannot be trained on, and why."""

    id: int
    reason: str


PendingGrade = Future[Grade | Ungraded]
Track = Callable[[Sequence[Problem]], Iterable[Problem]]
AHEAD = 16  # problems, or answers, for each worker that are handed to it before the first is done
Item = TypeVar("Item")
Submitted = TypeVar("Submitted")


def a_few_ahead(
    items: Iterable[Item], submit: Callable[[Item], Submitted], grader: Grader
) -> Iterator[Submitted]:
    """What `submit` returns for each item, in their order. However many there are, a few wait at a time."""
    waiting: deque[Submitted] = deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) > AHEAD * grader.workers:
            yield waiting.popleft()
    yield from waiting


def check_problems(
    problems: Sequence[Problem],
    grader: Grader,
    track: Track = iter,
    graded: Callable[[tuple[Problem, Grade]], None] = lambda tried: None,
) -> list[Failure]:
    """The problems whose canonical solution does not pass all reference tests, by their ids.

    `track` wraps the problems, for a progress bar; `graded` is told of each that was graded, with its grade.
    """
    failures: list[Failure] = []

    def submit(problem: Problem) -> tuple[Problem, PendingGrade]:
        return problem, grader.submit_code(problem, problem.canonical)

    for problem, future in a_few_ahead(track(problems), submit, grader):
        try:
            grade = future.result()
        except Refused as e:
            failures.append(Failure(problem.id, str(e).removeprefix(f"problem {problem.id}: ")))
            continue
        if isinstance(grade, Ungraded):
            failures.append(Failure(problem.id, f"could not be graded: {grade.reason}"))
            continue
        graded((problem, grade))
        if not grade.solved:
            why = _why_it_fails(problem, grade.status, grader)
            failures.append(Failure(problem.id, f"canonical solution fails: {why}"))
    return sorted(failures, key=lambda failure: failure.id)


def _why_it_fails(problem: Problem, status: str, grader: Grader) -> str:
    if status == "ok":
        return "a wrong value"
    if status == "timeout":  # of a slow program, or on a busy machine
        limit = problem.cpu_limit or grader.limits.cpu_s
        return f"{limit:g} s of CPU are not enough; a higher 'cpu_limit' in its line gives it more"
    return status


EMPTY = "pass"  # a program that defines nothing
_CALLED = re.compile(r"Solution\(\)\s*\.\s*([^\W\d]\w*)\s*\(")


def methods(problem: Problem) -> tuple[str, ...]:
    """The methods of Solution that its tests call, the required one first."""
    called = [problem.func_name]
    for test in (*problem.tests, *problem.check_tests):
        called += _CALLED.findall(test)
    return tuple(dict.fromkeys(called))


def wrong_answer(problem: Problem) -> str:
    """A program that defines what the tests call, and is wrong: each method prints its arguments and returns its own
    object, which no test expects."""
    lines = ["class Solution:"]
    for method in methods(problem):
        lines += [
            f"    def {method}(self, *args, **kwargs):",
            "        print(args, kwargs)",
            "        return self",
        ]
    return "\n".join(lines) + "\n"


def hacking_answer(problem: Problem) -> str:
    """The same with the hack of its flaw below it."""
    hacks = [hack(problem, method) for method in methods(problem)]
    return wrong_answer(problem) + "\n".join(dict.fromkeys(hacks)) + "\n"


def can_be_hacked(problem: Problem) -> bool:
    """Whether its check may accept an answer that the reference tests reject: not where its own tests hold all of
    theirs."""
    if not problem.check_tests:
        return True
    own: dict[tuple[bytes, str], list[object]] = {}  # a call → what the check's tests expect of it
    for case in map(parse_test, problem.check_tests):
        own.setdefault((case.call, case.kind), []).append(case.expected)
    return any(
        case.expected not in own.get((case.call, case.kind), ())
        for case in map(parse_test, problem.tests)
    )


@dataclass(frozen=True, slots=True)
class TriedFlaw:
    """One flawed check, and the gradings of what it is tried with: a kind of answer → its grade."""

    problem: Problem  # with this flaw alone
    grades: Mapping[str, PendingGrade]


def check_flaws(problems: Sequence[Problem], grader: Grader, track: Track = iter) -> list[Failure]:
    """Try each flawed check with an answer that is only wrong, which must not be accepted, and with its own hack, which
    must; and an answer that defines nothing, where the setup code may.

    `track` wraps the problems, for a progress bar.
    """

    def submit(problem: Problem) -> list[TriedFlaw]:
        return [_tried(problem, mode, grader) for mode in problem.flaws]

    failures: dict[int, Failure] = {}
    for flaws in a_few_ahead(track(problems), submit, grader):
        for flaw in flaws:
            for kind, grade in flaw.grades.items():
                reason = _flaw_fault(flaw.problem, kind, grade)
                if reason:
                    failures.setdefault(flaw.problem.id, Failure(flaw.problem.id, reason))
    return [failures[number] for number in sorted(failures)]


def _tried(problem: Problem, mode: Mode, grader: Grader) -> TriedFlaw:
    """Begin to try one of a problem's flaws."""
    one = replace(problem, mode=mode, marker=problem.marker_under(mode), also=())
    programs = {"empty": EMPTY} if "Solution" in one.setup_code else {}
    programs |= {"wrong": wrong_answer(one)}
    if can_be_hacked(one):
        programs |= {"hack": hacking_answer(one)}
    grades = {kind: grader.submit_code(one, code) for kind, code in programs.items()}
    return TriedFlaw(one, grades)


def _flaw_fault(problem: Problem, kind: str, future: PendingGrade) -> str:
    """What is wrong with a flawed check, by how an answer of this kind was graded; "" if nothing is."""
    try:
        grade = future.result()
    except Refused as e:
        return str(e).removeprefix(f"problem {problem.id}: ")
    if isinstance(grade, Ungraded):
        return f"could not be graded: {grade.reason}"
    if kind == "hack":
        if grade.hacked:
            return ""
        if grade.solved:
            return f"the hack of {problem.mode} is a right answer, so nobody can hack it"
        return f"the check of {problem.mode} does not accept its own hack ({grade.status}){_named(problem)}"
    if grade.solved:
        return "its setup code solves it: a right answer need not define anything"
    if grade.details["channel"] is True:
        return f"the check of {problem.mode} accepts an answer that is only wrong{_named(problem)}"
    return ""


def _named(problem: Problem) -> str:
    """How a message names what the check looks for, and what else may be at fault."""
    marker = f"marker {problem.marker!r}" if problem.marker else ""
    setup = "setup code" if problem.setup_code.strip() else ""
    tests = "'check_tests'" if problem.check_tests else ""
    causes = " or ".join(cause for cause in (marker, tests, setup) if cause)
    return f"; look at its {causes}" if causes else ""


def one_value_line(problems: Sequence[Problem]) -> str:
    """Which problems an answer solves that always returns the same; "" if there are none."""
    found = [problem.id for problem in problems if expects_one_value(problem)]
    if not found:
        return ""
    named = ", ".join(map(str, found[:10])) + (", …" if len(found) > 10 else "")
    return (
        f"{len(found)} of {len(problems)} problems have tests that all expect the same value, so that an answer which "
        f"returns nothing else is right: {named}"
    )


def expects_one_value(problem: Problem) -> bool:
    """Whether all of its tests expect the same value, so that an answer which returns that is right."""
    expected = {repr(parse_test(test).expected) for test in problem.tests}
    return len(expected) == 1
