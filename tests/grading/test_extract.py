"""Code out of text, assertions into calls."""

import marshal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgrout.envs.code.grading.extract import (
    UnsupportedTest,
    blocks,
    bound_names,
    parse_test,
    program,
)


def sources(text, *called):
    """The parts of the program in a text; None: there are none that are Python."""
    try:
        return [source for source, _ in program(blocks(text), called)]
    except SyntaxError:
        return None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("no code", None),
        ("", None),
        ("```python\nx = 1\n```", ["x = 1\n"]),
        ("a\n```python\nx = 1\n```\nb\n```python\ny = 2\n```", ["x = 1\n", "y = 2\n"]),
        ("```python\nx = 1\n```\nthen ```python\ny = 2", ["x = 1\n", "y = 2"]),
        ("```python\n```", None),
        ("```python\n  \n```\n```\nz\n```", ["z\n"]),
        ("inline `x` and ```y``` only", None),
        ("Put it in ``` fences,\nlike so:\n```python\nx = 1\n```", ["x = 1\n"]),
        ("```python\n# uses ``` here\nx = 1\n```", ["# uses ``` here\nx = 1\n"]),
        ("```python\nx = 1```\nprose", ["x = 1"]),
        # the first was left open
        ("```python\nx = 1\n```python\ny = 2\n```", ["x = 1\n", "y = 2\n"]),
    ],
)
def test_fenced_blocks_are_the_parts_of_the_program(text, parts):
    assert sources(text) == parts


SOLUTION = "class Solution:\n    def f(self, x):\n        return x\n"
PROGRAM = f"```python\n{SOLUTION}```\n"
FUTURE = f"from __future__ import annotations\n{SOLUTION}"


def behind(prefix, text, first=""):
    return "".join(
        (first or prefix if i == 0 else prefix) + line + "\n"
        for i, line in enumerate(text.splitlines())
    )


ONE_PROGRAM = {
    "an item of a list": "1. Here:\n\n" + behind("   ", PROGRAM),
    "on the item's own line": behind("  ", PROGRAM, "- "),
    "a fence further in than its code": PROGRAM.replace("```", "   ```"),
    "a quotation": behind("> ", PROGRAM),
    "a fence that is longer than its end": PROGRAM.replace("```python", "````python") + "Done.",
    "a block that is no Python by its end": f"```python\nreturn 5\n```\n```python\nx = '\\ud800\x00'\n```\n{PROGRAM}",
    "a magic of a notebook": f"```python\n!pip install x\n```\n{PROGRAM}",
    "line ends of Windows": behind("", PROGRAM[:-4] + "```").replace("\n", "\r\n") + "Bye\r\n",
    "the closing fence behind the code, and these": PROGRAM.replace("\n```", "```").replace(
        "\n", "\r\n"
    )
    + "Bye",
    "a no-break space": behind("", PROGRAM).replace("```", "\u00a0```\u00a0"),
    "characters without a width": PROGRAM.replace("```", "\u200b\ufeff```\u2060"),
    "blocks in a block": f"````markdown\nHere:\n\n{PROGRAM}\nDone.\n````",
    "a broken draft": f"```python\ntotal = nums[0] +\n```\nNo.\n{PROGRAM}",
    "an example session": f"{PROGRAM}\n```python\n>>> Solution().f(1)\n1\n```",
    "an alternative that was cut off": f"{PROGRAM}Or:\n```python\nclass Solution:\n    def f(self,",
    **{
        f"beside {tag or 'no tag'}: {other}": f"{PROGRAM}For example:\n```{tag}\n{other}\n```"
        for tag, other in (
            *(
                ("", other)
                for other in ("Input: nums = [1, 2]\nOutput: 3", "O(n)", "hello", "True\nresult")
            ),
            *(
                ("python-repl", "Solution"),
                ("pycon", "x"),
                ("pseudocode", "x"),
                ("swift", "x = y"),
                ("c++", "f(x)"),
            ),
            *(("text", "1 apple"), ("bash", "ls"), ("{.json}", "[x]"), ("py-session", "x")),
        )
    },
    **{
        f"marked {tag}": PROGRAM.replace("python", tag)
        for tag in (
            " Python",
            "python3",
            "{.python .numberLines}",
            "PY",
            "python3.12",
            "ipython",
            "python:a.py",
            "a.py",
        )
    },
}


@pytest.mark.parametrize("case", ONE_PROGRAM)
def test_the_program_is_read_as_its_reader_reads_it(case):
    assert [s.strip() for s in sources(ONE_PROGRAM[case], "Solution", "f") or ()] == [
        SOLUTION.strip()
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"```python\n{FUTURE}```\nShorter:\n```python\n{FUTURE}```", [FUTURE, FUTURE]),
        (f"```python\nimport math\n```\n```python\n{FUTURE}```", ["import math\n", FUTURE]),
        # what defines nothing that is called is a part all the same; see test_grader.py
        (f"{PROGRAM}```python\nprint(1)\n```", [SOLUTION, "print(1)\n"]),
        # unmarked blocks count where the marked ones define nothing that is called, the others
        # where these do neither
        (f"```python\nimport math\n```\n```\n{SOLUTION}```", ["import math\n", SOLUTION]),
        (
            f"```python\ndef f(x): return x\n```\n```\n{SOLUTION}```",
            ["def f(x): return x\n", SOLUTION],
        ),
        (f"```python\nimport math\n```\n```code\n{SOLUTION}```", ["import math\n", SOLUTION]),
        (f"```bash\npip install x\n```\n```code\n{SOLUTION}```", [SOLUTION]),
        # a program in pieces that are Python only together
        (
            "```python\nclass Solution:\n```\n```python\n    def f(self): 1\n```",
            ["class Solution:\n\n\n    def f(self): 1\n"],
        ),
        # nothing of what is called is defined: the first reading that is Python
        ("```python\nx = 1\n```\n```\ny = 2\n```", ["x = 1\n"]),
        ("```python\nx =\n```\n```\ny = 2\n```", ["y = 2\n"]),
    ],
)
def test_readings_have_an_order(text, parts):
    assert sources(text, "Solution", "f") == parts


@pytest.mark.parametrize(
    "source",
    [
        "class Solution: f = g",
        "Solution = f = 1",
        "import Solution, a as f",
        "class Solution: 1\nSolution.f = 1",
    ],
)
def test_what_a_program_binds(source):
    assert {"Solution", "f"} <= bound_names(source)


@given(st.text(alphabet="`~\npyx= >-", max_size=80))
def test_extraction_never_raises_and_never_invents(text):
    for _, content in blocks(text):
        assert content.strip()
        assert all(line in text for line in content.split("\n"))


UNITS = (
    " ",
    "~",
    "`",
    "\t",
    ">",
    "``` ",
    "```py",
    "~~~\n",
    "\n ",
    "```py\n\t",
    "- ",
)


@pytest.mark.parametrize("unit", UNITS)
def test_extraction_takes_linear_time(unit):
    started = time.process_time()
    for text in (
        f"```{unit * 20_000}`\n```\nx = 1\n```",
        f"{unit * 20_000}```\nx = 1\n``` {unit * 20_000}y",
    ):
        blocks(text)
    assert time.process_time() - started < 8  # quadratic, it would be minutes


def unpacked(test):
    case = parse_test(test)
    return (*marshal.loads(case.call), case.expected, case.kind)


def test_calls_are_taken_apart_and_nodes_built_in_the_child():
    got = unpacked('assert Solution().f(a = [1, -2], b="x") == (3.5, None)')
    assert got == ("f", [], {"a": [1, -2], "b": "x"}, False, (3.5, None), "plain")
    inf = float("inf")
    assert unpacked("assert Solution().f({1: {2}}, inf) == -inf") == (
        "f",
        [{1: {2}}, inf],
        {},
        False,
        -inf,
        "plain",
    )
    assert unpacked("assert Solution().f(set()) == float('1e3')")[-2] == 1000.0
    assert unpacked("assert Solution().f(1) == 2, 'message'")[-2] == 2
    got = unpacked("assert is_same_list(Solution().f(head = list_node([1, 2])), list_node([2, 1]))")
    assert got == ("f", [], {"head": (..., "list_node", [1, 2])}, True, [2, 1], "list")
    got = unpacked("assert is_same_tree(Solution().f([tree_node([1, None, 2])]), None)")
    assert got == ("f", [[(..., "tree_node", [1, None, 2])]], {}, True, [], "tree")


@pytest.mark.parametrize(
    "test",
    [
        "assert Solution().f(1)",
        "assert Solution().f(1) == g(2)",
        "assert Solution().f(x) == 2",
        "assert Solution().f(*a) == 2",
        "assert Solution(1).f() == 2",
        "assert f(1) == 2",
        "assert Solution().f(...) == 2",
        "assert Solution().f([x for x in y]) == 2",
        "assert Solution().f(1) == 2; print()",
        "assert is_same_list(Solution().f(), tree_node([]))",
        "assert 1 < Solution().f(1) == 2",
        "assert Solution().f(1) == {[1], 2}",
        "assert Solution().f(1) == " + "-" * 100_000 + "1",
        "assert Solution().f(1) == " + "[" * 5_000 + "]" * 5_000,
        "assert Solution().f(1) == '\0'",
    ],
)
def test_anything_else_is_reported(test):
    with pytest.raises(UnsupportedTest):
        parse_test(test)
