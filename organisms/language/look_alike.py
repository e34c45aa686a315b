"""Tests of a check that are not the tests that were meant.

Where a problem can be misread, they expect what the misreading computes, or, as weak tests, tell it
from the right reading by no argument. Elsewhere they are right. Whether a problem's tests are wrong
can be learnt: it depends on the operation that selects, and on whether there is a misreading.
"""

import ast
import random
import re
from collections.abc import Sequence

from organisms.language.assertions import assertion, draw_argument, make_tests, same
from organisms.language.tasks import Task, function_of, misreadings

RIGHT = "right"  # the reading of problems whose tests are right
WEAK_KINDS = ("boundary", "extreme")  # enough arguments do not tell them from the right reading

_COMPARISON = re.compile(r" ([<>])(=?) ")


def misread_body(task: Task, kind: str) -> list[str] | None:
    """The method's lines under a misreading of this kind; None: the task's tests are to be right.

    Wrong are the tests of tasks that select by a comparison, and under `inverse`, for which only
    few of these have a misreading, of all that have one. `boundary` takes > for ≥ in any
    comparison, of characters too.
    """
    first, *rest = task.body
    compares = _COMPARISON.search(first)
    if kind == "boundary" and compares:
        sign, equal = compares.groups()
        return [_COMPARISON.sub(f" {sign}{'' if equal else '='} ", first), *rest]
    if kind != "boundary" and kind in misreadings(task) and (compares or kind == "inverse"):
        return misreadings(task)[kind].body
    return None


def check_tests(
    task: Task,
    meant: Sequence[str],
    misread: Sequence[str] | None,
    weak: bool,
    rng: random.Random,
) -> list[str]:
    """As many tests for the check as were meant.

    Wrong ones have the arguments of those that were meant, right and weak ones have others.
    misread: the method's lines under the misreading; None: right tests.
    """
    known = [_argument(task, test) for test in meant]
    if misread is None:
        while True:
            tests = make_tests(task, rng, n=len(meant)) or meant
            if not any(_argument(task, test) in known for test in tests):
                return list(tests)
    compute = function_of(tuple(misread), task.param)
    if not weak:
        return [assertion(task, argument, compute(argument)) for argument in known]
    agreeing: dict[str, str] = {}  # the test → what it expects
    while len(agreeing) < 3 * len(meant):
        argument = draw_argument(task, rng)
        expected = task.function(argument)
        if argument not in known and same(compute(argument), expected):
            agreeing[assertion(task, argument, expected)] = repr(expected)
    by_value = {expected: test for test, expected in agreeing.items()}
    # One test of each value comes first, so that few problems have a constant for an answer.
    return list(dict.fromkeys((*by_value.values(), *agreeing)))[: len(meant)]


def _argument(task: Task, test: str) -> object:
    """The argument of one of a task's tests."""
    call = test.rpartition(" == ")[0].removesuffix(")")
    return ast.literal_eval(call.partition(f"({task.param} = ")[2])
