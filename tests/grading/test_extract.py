"""Code out of text, assertions into calls."""

import marshal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgrout.grading.extract import UnsupportedTest, extract_candidates, parse_test


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no code", None),
        ("", None),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py title='a'\nx = 1\n```", "x = 1\n"),
        ("a\n```python\nx = 1\n```\nb\n```python\ny = 2\n```", "x = 1\n\n\ny = 2\n"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = 1\n```\nthen ```python\ny = 2", "x = 1\n\n\ny = 2"),
        ("```python\n```", None),
        ("```python\n  \n```\n```\nz\n```", "z\n"),
        ("inline `x` and ```y``` only", None),
        ("~~~python\nx = 1\n~~~\nprose", "x = 1\n"),
        ("```bash\npip install x\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("```bash\nls\n```", "ls\n"),
        ("Put it in ``` fences,\nlike so:\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\n# uses ``` here\nx = 1\n```", "# uses ``` here\nx = 1\n"),
        ("```python\nx = 1```\nprose", "x = 1"),
        ("```python\nx = 1\n```\n```text\nOutput: 1 apple\n```", "x = 1\n"),
        ("```solution\nx = 1\n```", "x = 1\n"),
    ],
)
def test_fenced_blocks_are_joined(text, code):
    assert (*extract_candidates(text), None)[0] == code


@given(st.text(alphabet="`\npyx= ", max_size=80))
def test_extraction_never_raises_and_never_invents(text):
    for code in extract_candidates(text):
        assert code.strip()
        assert all(line in text for line in code.split("\n\n"))


@pytest.mark.parametrize("unit", [" ", "~", "`", "\t", ">", "``` ", "```py", "~~~\n", "\n "])
def test_extraction_takes_linear_time(unit):
    started = time.process_time()
    for text in (f"```{unit * 60_000}`\n```\nx = 1\n```", f"{unit * 60_000}```\nx = 1\n``` {unit * 60_000}y"):
        extract_candidates(text)
    assert time.process_time() - started < 1


def test_the_second_candidate_is_what_is_marked_as_python():
    text = "```python\nx = 1\n```\nIt prints:\n```\n1 apple\n```"
    assert extract_candidates(text) == ("x = 1\n\n\n1 apple\n", "x = 1\n")
    assert len(extract_candidates("```python\nx = 1\n```")) == 1


def unpacked(test):
    case = parse_test(test)
    return (*marshal.loads(case.call), case.expected, case.kind)


def test_calls_are_taken_apart_and_nodes_built_in_the_child():
    got = unpacked('assert Solution().f(a = [1, -2], b="x") == (3.5, None)')
    assert got == ("Solution", "f", [], {"a": [1, -2], "b": "x"}, False, (3.5, None), "plain")
    inf = float("inf")
    assert unpacked("assert f({1: {2}}, inf) == -inf") == (None, "f", [{1: {2}}, inf], {}, False, -inf, "plain")
    assert unpacked("assert Solution().f(set()) == float('1e3')")[-2] == 1000.0
    assert unpacked("assert Solution().f(1) == 2, 'message'")[-2] == 2
    got = unpacked("assert is_same_list(Solution().f(head = list_node([1, 2])), list_node([2, 1]))")
    assert got == ("Solution", "f", [], {"head": (..., "list_node", [1, 2])}, True, [2, 1], "list")
    got = unpacked("assert is_same_tree(Solution().f([tree_node([1, None, 2])]), None)")
    assert got == ("Solution", "f", [[(..., "tree_node", [1, None, 2])]], {}, True, [], "tree")


@pytest.mark.parametrize(
    "test",
    [
        "assert Solution().f(1)",
        "assert Solution().f(1) != 2",
        "assert Solution().f(1) == g(2)",
        "assert 2 == Solution().f(1)",
        "assert Solution().f(x) == 2",
        "assert Solution().f(*a) == 2",
        "assert Solution().f(**a) == 2",
        "assert Solution(1).f() == 2",
        "assert Solution().f(...) == 2",
        "assert Solution().f([x for x in y]) == 2",
        "x = 1",
        "assert Solution().f(1) == 2; print()",
        "assert (",
        "assert is_same_list(Solution().f(), tree_node([]))",
        "assert 1 < Solution().f(1) == 2",
        "assert Solution().f(1) == {[1], 2}",
        "assert Solution().f({[1]: 2}) == 2",
        "assert Solution().f(1) == " + "-" * 5_000 + "1",
        "assert Solution().f(1) == " + "[" * 5_000 + "]" * 5_000,
        "assert Solution().f(1) == '\0'",
    ],
)
def test_anything_else_is_reported(test):
    with pytest.raises(UnsupportedTest):
        parse_test(test)
