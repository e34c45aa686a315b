"""What the tests of the organism share."""

import pytest

from vgrout.envs.code.grading.grade import Grader


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=2, detectors=False) as grader:
        yield grader
