"""One grader for this folder, and the small problem that it grades."""

from dataclasses import replace

import pytest

from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import Problem
from vgrout.ground.data import Grade

from . import attacks

SUM_TESTS, SUM_WRONG = attacks.TESTS, attacks.WRONG
SUM_SETUP = "import math\nfrom typing import *\nfrom collections import *\n"
SUM_RIGHT = (
    "class Solution:\n    def total(self, nums: List[int]) -> int:\n        return sum(nums)\n"
)


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\nDone."


def sum_problem(mode="run_tests", marker="", cpu_limit=1.0):
    bare = Problem(7, mode, marker, (), (), SUM_TESTS, SUM_RIGHT, SUM_SETUP, "total", cpu_limit)
    return replace(bare, check_tests=attacks.checked(mode))


def graded(grader, problem, code):
    grade = grader.grade(problem, fenced(code))
    assert isinstance(grade, Grade), grade
    return grade


@pytest.fixture(scope="session")
def grader():
    with Grader(workers=1) as g:
        yield g
