"""One grader for this folder, and the small problem that it grades."""

from collections.abc import Iterator

import pytest

from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import Mode, Problem
from vgrout.ground.data import Grade

from . import attacks

SUM_TESTS, SUM_WRONG = attacks.TESTS, attacks.WRONG
SUM_SETUP = "import math\nfrom typing import *\nfrom collections import *\n"
SUM_RIGHT = (
    "class Solution:\n    def total(self, nums: List[int]) -> int:\n        return sum(nums)\n"
)


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def sum_problem(
    mode: Mode = "run_tests", marker: str = "", cpu_limit: float | None = 1.0
) -> Problem:
    return Problem(7, mode, marker, (), (), SUM_TESTS, SUM_RIGHT, SUM_SETUP, "total", cpu_limit)


def graded(grader: Grader, problem: Problem, code: str) -> Grade:
    grade = grader.grade(problem, fenced(code))
    assert isinstance(grade, Grade), grade
    return grade


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    with Grader(workers=1) as g:
        yield g
