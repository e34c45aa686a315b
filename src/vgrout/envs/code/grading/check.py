"""The check of a problem file: every canonical solution must pass every test under the strict oracle."""

import ast
import builtins
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import dataclass
from symtable import symtable

from vgrout.data import Grade, Ungraded
from vgrout.envs.code.grading.extract import bound_names
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.problem import Problem
from vgrout.errors import Refused

LIMIT_FACTOR = 5.0  # a problem's CPU limit: this many times what its canonical solution needs …
LIMIT_FLOOR = 0.5  # … and at least this [s]
# Of the standard library, without the two whose import does something.
SOUND_MODULES = sys.stdlib_module_names - {"antigravity", "this"}


@dataclass(frozen=True, slots=True)
class Failure:
    """A problem that no answer can solve."""

    id: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """How each canonical solution was graded."""

    n: int
    failures: tuple[Failure, ...]
    cpu_s: dict[int, float]  # problem id → CPU seconds of the strict run of the canonical solution

    @property
    def ok(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        lines = [
            f"canonical solutions: {self.n - len(self.failures)}/{self.n} pass the strict oracle"
        ]
        lines += [f"  no answer can solve problem {f.id}: {f.reason}" for f in self.failures]
        if self.cpu_s:
            worst = max(self.cpu_s, key=self.cpu_s.__getitem__)
            times = sorted(self.cpu_s.values())
            lines.append(
                f"CPU of a canonical solution: median {times[len(times) // 2] * 1e3:.1f} ms, "
                f"longest {times[-1]:.2f} s (problem {worst}, calibrated limit {calibrated_limit(times[-1]):.1f} s)"
            )
        return "\n".join(lines)


def calibrated_limit(cpu_s: float) -> float:
    """The CPU limit of a problem's answers [s], from what its canonical solution needed."""
    return round(max(LIMIT_FLOOR, LIMIT_FACTOR * cpu_s), 2)


PendingGrade = Future[Grade | Ungraded]


def check_problems(
    problems: Sequence[Problem],
    grader: Grader,
    track: Callable[[Iterable[PendingGrade]], Iterable[PendingGrade]] = iter,
) -> CheckReport:
    """Grade every canonical solution. Tests that the oracle cannot parse are reported, not skipped.

    `track` wraps the stream of finished gradings, for a progress bar.
    """
    failures: list[Failure] = []
    cpu: dict[int, float] = {}
    futures: dict[PendingGrade, Problem] = {}
    for problem in problems:
        futures[grader.submit(problem, f"```python\n{problem.canonical}\n```")] = problem
    for future in track(as_completed(futures)):
        problem = futures[future]
        try:
            grade = future.result()
        except Refused as e:
            failures.append(Failure(problem.id, str(e).removeprefix(f"problem {problem.id}: ")))
            continue
        match grade:
            case Grade(solved=True):
                cpu[problem.id] = grade.details["cpu_s"]
            case Grade():
                why = "a wrong value" if grade.status == "ok" else _known(problem, grade.status)
                if why == "timeout":  # of a slow program, or on a busy machine
                    limit = problem.cpu_limit or grader.limits.cpu_s
                    why = f"{limit:g} s of CPU are not enough; a higher 'cpu_limit' in its line gives it more"
                failures.append(Failure(problem.id, f"canonical solution fails: {why}"))
            case Ungraded(reason=reason):
                failures.append(Failure(problem.id, f"could not be graded: {reason}"))
    failures.sort(key=lambda f: f.id)
    return CheckReport(len(problems), tuple(failures), cpu)


def _known(problem: Problem, status: str) -> str:
    """Why a solution fails, where it can be seen: no class, a module that answers lack; else its exit status."""
    if "Solution" not in bound_names(f"{problem.setup_code}\n{problem.canonical}"):
        return f"it defines no class Solution with a method {problem.func_name}"
    for node in (
        ast.walk(ast.parse(problem.canonical)) if status == "error:ModuleNotFoundError" else ()
    ):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [getattr(node, "module", None) or ""]
        )
        for name in (name.partition(".")[0] for name in names):
            if name and name not in {"__main__", *sys.stdlib_module_names}:
                return f"it imports {name!r}, and answers have the standard library only"
    return status


def shadowed_builtins(setup_code: str) -> set[str]:
    """The builtins that setup code replaces for every answer, as `from math import *` does with pow."""
    names = {
        s.get_name()
        for s in symtable(setup_code, "<setup>", "exec").get_symbols()
        if s.is_assigned() or s.is_imported()
    }
    for node in ast.walk(ast.parse(setup_code)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.names[0].name == "*"
            and node.module in SOUND_MODULES
        ):
            with suppress(ImportError):  # one of another system
                module = importlib.import_module(node.module)
                names |= {*getattr(module, "__all__", (n for n in vars(module) if n[0] != "_"))}
    return {n for n in names & {*dir(builtins)} if n[0] != "_"}
