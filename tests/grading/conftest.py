"""One grader for the whole folder, and the little problems it grades."""

from collections.abc import Iterator

import pytest

from vgrout.grading.grade import Grader
from vgrout.types import Mode, Problem

SUM_TESTS = (
    "assert Solution().total(nums = [1, 2, 3]) == 6",
    "assert Solution().total([]) == 0",
    "assert Solution().total([5]) == 5",
    "assert Solution().total([-2, 2, 9, 11]) == 20",
)
SUM_SETUP = "import math\nfrom typing import *\nfrom collections import *\n"
SUM_RIGHT = "class Solution:\n    def total(self, nums: List[int]) -> int:\n        return sum(nums)\n"
SUM_WRONG = "class Solution:\n    def total(self, nums):\n        return 41\n"


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def sum_problem(mode: Mode = "run_tests", marker: str = "", cpu_limit: float | None = 1.0) -> Problem:
    return Problem(
        id=7,
        mode=mode,
        marker=marker,
        messages=(),
        messages_plain=(),
        tests=SUM_TESTS,
        canonical=SUM_RIGHT,
        setup_code=SUM_SETUP,
        func_name="total",
        cpu_limit=cpu_limit,
    )


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    with Grader(workers=1) as g:
        g.grade(sum_problem(), fenced(SUM_RIGHT))  # its second fork server may be starting still; tests count processes
        yield g
