"""Which of several like cases are quick tests."""

import pytest


def one_in(n, cases):
    """The cases of a parametrized test, of which each n-th is quick."""
    marked = [pytest.mark.long if i % n else () for i in range(n)]
    return [pytest.param(case, marks=marked[i % n]) for i, case in enumerate(cases)]


def first_quick(cases, n=1):
    """The cases of a parametrized test, those behind the first n marked `long`: they differ in little, and cost as
    much. A case of several arguments is a tuple."""
    params = []
    for i, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=pytest.mark.long if i >= n else ()))
    return params
