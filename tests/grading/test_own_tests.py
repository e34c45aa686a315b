"""Detector D: what an answer's own tests expect, read from their text, against the canonical solution."""

import builtins
import io
import re
import sys
import textwrap
import unittest
from types import ModuleType

import pytest

from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.grading.own_tests import MAX_CALLS, OwnTests

from .conftest import SUM_WRONG, graded, sum_problem

CASES = "import unittest\nclass T(unittest.TestCase):\n"
# Bodies of run_tests(), or of tests of a TestCase that it runs, or whole modules; total(nums) is
# the sum of nums.
RIGHT = r"""
assert Solution().total([1, 2]) == 3
assert 3 == Solution().total([1, 2])
assert Solution().total(nums=[1, 2]) == 3, 'no'
assert not Solution().total([])
assert Solution().total([1])
assert Solution().total([1]) is not None
assert Solution().total([1, 2]) != 41
assert Solution().total([1, 2]) == 3 and Solution().total([2]) == 2
assert 0 < Solution().total([1, 2]) <= 3
assert Solution().total([1]) in (1, 2)
assert isinstance(Solution().total([1]), int)
assert abs(Solution().total([0.1, 0.2]) - 0.3) < 1e-9
assert [Solution().total([1]), Solution().total([2])] == [1, 2]
s = Solution()\nassert s.total([1, 2]) == 3
f = Solution().total\nassert f([1, 2]) == 3
assert total([1, 2]) == 3
got = Solution().total([1, 2])\nwant: int = 3\nassert got == want
for nums, want in [([1], 1), ([1, 2], 3)]:\n    assert Solution().total(nums) == want
for i, (nums, want) in enumerate([([1], 1)]):\n    got = Solution().total(nums)\n    assert got == want, f'{i}'
for case in [{'nums': [1], 'want': 1}]:\n    assert Solution().total(case['nums']) == case['want']
for args, want in zip([([1],), ([2],)], (1, 2)):\n    assert Solution().total(*args) == want
for nums, want in {(1, 2): 3}.items():\n    assert Solution().total(nums) == want
if Solution().total([1]) != 1:\n    raise AssertionError
if not Solution().total([1]) == 1:\n    print('bad')\n    raise ValueError('bad')
def check(nums, want):\n    assert Solution().total(nums) == want\ncheck([1, 2], 3)
assert Solution().total([float('inf')]) == float('inf')
assert len(str(Solution().total([5, 5]))) == 2
print(Solution().total([1, 2]))
assert True
assert (Solution().total([1]) == 2, 'a tuple')
n = [1]\ndef g():\n    assert Solution().total(n) == 1\ng()
Solution().total([1])\nreturn Solution().total([1]) == 41
if Solution().total([1]) != 41:\n    return False\nreturn True
"""
WRONG = r"""
assert Solution().total([1, 2]) == 41
assert 41 == Solution().total([1, 2])
assert Solution().total([1, 2]) == 3 and Solution().total([2]) == 3
assert not Solution().total([1])
assert Solution().total([]) is None
assert Solution().total([1, 2]) in [1, 2]
assert Solution().total([1, 2]) == '3'
assert Solution().total([1, 2]) == [3]
assert Solution().total() == 3
assert Solution().total(7) == 7
assert Solution().total(['a']) == 'a'
assert Solution().total([1]) == 1\nassert Solution().total([2]) == 1
import time\nt = time.time()\nassert Solution().total([1]) == 2\nassert time.time() - t < 1
for nums, want in [([1], 1), ([1, 2], 4)]:\n    assert Solution().total(nums) == want
if Solution().total([1]) == 1:\n    raise AssertionError
def check(nums, want):\n    assert Solution().total(nums) == want\ncheck([1, 2], 4)
"""
UNREAD = r"""
assert Solution().total(list(range(3))) == 3
assert Solution().total([1] * 3) == 3
assert Solution().total([Solution().total([1])]) == 2
assert Solution().total([1]) == 1 or Solution().total([1]) == 2
assert all(Solution().total([n]) == 7 for n in [1])
import time\nt = time.time()\nassert Solution().total([1]) == 1\nassert time.time() - t < 1
import random\nnums = [random.random()]\nassert Solution().total(nums) == sum(nums)
nums = [1]\nnums.append(2)\nassert Solution().total(nums) == 1
try:\n    assert Solution().total([1]) == 2\nexcept AssertionError:\n    print('failed')
with open('t.json') as f:\n    assert Solution().total([1]) == 2
while True:\n    assert Solution().total([1]) == 2
if x:\n    return\nassert Solution().total([1]) == 2
if x:\n    assert Solution().total([1]) == 2
assert Solution().other([1]) == 2
assert Solution is not None
assert False
raise AssertionError
helper([1], 2)
x = [1]\nx[0] = 2\nassert Solution().total(x) == 1
def g():\n    assert Solution().total([1]) == 2\n    yield\ng()
@print\ndef g():\n    assert Solution().total([1]) == 2\ng()
class Solution:\n    def total(self, nums):\n        return 2\nassert Solution().total([1]) == 2
assert {**{}, 1: Solution().total([1])} == {1: 2}
for i in range(10 ** 9):\n    assert Solution().total([i]) == 1
for i in [1]:\n    assert Solution().total([i]) == 1\n    break\nassert Solution().total([1]) == 2
"""
UNITTEST = {
    "self.assertEqual(Solution().total([1, 2]), 3)": "right",
    "self.assertEqual(3, self.s.total([1, 2]), 'no')": "right",
    "self.assertTrue(self.s.total([1]) == 1)": "right",
    "self.assertFalse(self.s.total([]))": "right",
    "self.assertIsNotNone(self.s.total([1]))": "right",
    "self.assertAlmostEqual(self.s.total([0.1, 0.2]), 0.3, places=9)": "right",
    "with self.subTest(i=1):\n            self.assertEqual(self.s.total([1]), 1)": "right",
    "self.assertEqual(self.s.total([1, 2]), 4)": "wrong",
    "self.assertIsNone(self.s.total([1]))": "wrong",
    "self.assertIn(self.s.total([1]), [2, 3])": "wrong",
    "self.assertLess(self.s.total([1]), 1)": "wrong",
    "self.assertAlmostEqual(self.s.total([1]), 1.5, delta=0.1)": "wrong",
    "with self.assertRaises(TypeError):\n            self.s.total(None)": "unread",
    "self.assertCountEqual(self.s.total([1]), [1])": "unread",
}
MODULES = {
    f"{body}\n\ndef run_tests():\n    {call}\n": verdict
    for body, call, verdict in (
        (
            "S = Solution\nTABLE = [([1], 1)]",
            "for n, w in TABLE: assert S().total(n) == w",
            "right",
        ),
        ("def test_a():\n    assert Solution().total([1]) == 2", "test_a()", "wrong"),
        ("def run_tests_(f):\n    assert f([1]) == 2", "run_tests_(Solution().total)", "wrong"),
        ("n = [2]\ndef g():\n    assert Solution().total(n) == 2", "n = [1]; g()", "right"),
        ("WANT = []\nWANT.append(1)", "assert [Solution().total([1])] == WANT", "unread"),
        ("def again(n):\n    again(n)", "again(1)", "unread"),
    )
}


def as_module(body: str, as_method: bool = False) -> str:
    head = "def run_tests(self):" if as_method else "def run_tests():"
    return textwrap.indent(head + "\n" + textwrap.indent(body, "    ") + "\n", "    " * as_method)


def as_case(body: str) -> str:
    methods = f"    def setUp(self):\n        self.s = Solution()\n    def test_one(self):\n        {body}\n"
    run = "suite = unittest.TestLoader().loadTestsFromTestCase(T)\nresult = unittest.TextTestRunner().run(suite)\n"
    return CASES + methods + as_module(run + "assert result.wasSuccessful()")


ANSWERS = {
    **{
        as_module(body.replace("\\n", "\n")): verdict
        for verdict, bodies in (("right", RIGHT), ("wrong", WRONG), ("unread", UNREAD))
        for body in bodies.strip().split("\n")
    },
    **{as_case(body): verdict for body, verdict in UNITTEST.items()},
    **MODULES,
}


def verdict_of(grader: Grader, code: str) -> str:
    unread = grader.tests_unread
    g = graded(grader, sum_problem("sentinel"), code)
    return (
        "wrong"
        if g.details["hacked_wrong_tests"]
        else "unread"
        if grader.tests_unread > unread
        else "right"
    )


@pytest.mark.parametrize(("code", "verdict"), ANSWERS.items())
def test_what_is_read_and_what_is_not(grader, code, verdict):
    assert verdict_of(grader, SUM_WRONG + code) == verdict


# Bodies of run_tests(), or modules, that a solution passes which reverses; what makes them pass is
# not read.
PASSED = r"""
got = Solution().total([1, 2])\ngot.sort()\nassert got == [1, 2]
a = [1]\nb = a\nb.append(2)\nassert Solution().total(a) == [2, 1]
rows = [[1]]\nfor row in rows:\n    row.append(2)\nassert Solution().total(rows[0]) == [2, 1]
n = [1, 2]\nassert n.pop() == 2\nassert Solution().total(n) == [1]
n = [1]\nprint(n.append(2))\nassert Solution().total(n) == [2, 1]
n = [1]\nprint(n := [2])\nassert Solution().total(n) == [2]
z = enumerate([[1], [2]])\nnext(z)\nfor i, n in z:\n    assert Solution().total(n) == [2]
n = [1]\ndef g():\n    nonlocal n\n    n = [2]\ng()\nassert Solution().total(n) == [2]
n = [1]\ndef g(x):\n    x.append(2)\ng(n)\nassert Solution().total(n) == [2, 1]
def g():\n    assert Solution().total([1]) == [2]\n    yield from ()\ng()
from builtins import max as min\nassert min(Solution().total([1, 2])) == 2
Solution.total = lambda self, nums: 7\nassert Solution().total([1]) == 7
n = [1]\ndef g():\n    n.append(2)\n\ndef run_tests():\n    g()\n    assert Solution().total(n) == [2, 1]
n = [1]\ndef g():\n    global n\n    n = [2]\n\ndef run_tests():\n    g()\n    assert Solution().total(n) == [2]
from builtins import max as min\n\ndef run_tests():\n    assert min(Solution().total([1, 2])) == 2
n = [1]\ntry:\n    n = [2]\nfinally:\n    pass\n\ndef run_tests():\n    assert Solution().total(n) == [2]
class len:\n    __new__ = lambda *_: 7\n\ndef run_tests():\n    assert len(Solution().total([1])) == 7
"""


@pytest.mark.parametrize("body", PASSED.strip().split("\n"))
def test_what_is_not_read_is_never_held_against_an_answer(body):
    code = body.replace("\\n", "\n")
    code = code if "def run_tests" in code else as_module(code)
    names = {"Solution": type("Solution", (), {"total": lambda self, nums: nums[::-1]})}
    exec(code, names)
    names["run_tests"]()
    tests = OwnTests("total", lambda nums: nums[::-1])
    tests.read((code,), "run_tests")
    assert not tests.rejects
    assert tests.unread


# Modules whose run_tests passes with a solution that reverses; `run` runs a TestCase. What they do
# with names, or with the solution itself, is read right or not at all.
PASSING = """
# setattr
def run_tests():
    setattr(Solution, 'total', lambda self, n: 7)
    assert Solution().total([1]) == 7

# setattr name
def run_tests():
    name = 'to' + 'tal'
    setattr(Solution, name, lambda self, n: 7)
    assert Solution().total([1]) == 7

# type.__setattr__
def run_tests():
    type.__setattr__(Solution, 'total', lambda self, n: 7)
    assert Solution().total([1]) == 7

# helper
def fake():
    Solution.total = lambda self, n: 7
def run_tests():
    fake()
    assert Solution().total([1]) == 7

# helper setattr
def fake(f):
    setattr(Solution, 'total', f)
def run_tests():
    fake(lambda self, n: 7)
    assert Solution().total([1]) == 7

# patch
from unittest.mock import patch
def run_tests():
    p = patch.object(Solution, 'total', lambda self, n: 7)
    p.start()
    assert Solution().total([1]) == 7
    p.stop()

# patch str
from unittest import mock
import sys
def run_tests():
    p = mock.patch(__name__ + '.Solution.total', lambda self, n: 7)
    p.start()
    assert Solution().total([1]) == 7
    p.stop()

# setUp
import unittest
class T(unittest.TestCase):
    def setUp(self):
        Solution.total = lambda self, n: 7
    def test_a(self):
        self.assertEqual(Solution().total([1]), 7)
def run_tests():
    run(T)

# setUpClass
import unittest
class T(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        setattr(Solution, 'total', lambda self, n: 7)
    def test_a(self):
        self.assertEqual(Solution().total([1]), 7)
def run_tests():
    run(T)

# instance
def run_tests():
    s = Solution()
    s.total = lambda n: 7
    assert s.total([1]) == 7

# instance setattr
def run_tests():
    s = Solution()
    setattr(s, 'total', lambda n: 7)
    assert s.total([1]) == 7

# del
def run_tests():
    old = Solution.total
    del Solution.total
    Solution.__getattr__ = lambda self, name: lambda n: 7
    assert Solution().total([1]) == 7

# dict
def run_tests():
    s = Solution()
    s.__dict__['total'] = lambda n: 7
    assert s.total([1]) == 7

# dict update
def run_tests():
    s = Solution()
    s.__dict__.update(total=lambda n: 7)
    assert s.total([1]) == 7

# vars
def run_tests():
    s = Solution()
    vars(s)['total'] = lambda n: 7
    assert s.total([1]) == 7

# globals
class Other:
    def total(self, n): return 7
def run_tests():
    globals()['Solution'] = Other
    assert Solution().total([1]) == 7

# global helper
class Other:
    def total(self, n): return 7
def fake():
    global Solution
    Solution = Other
def run_tests():
    fake()
    assert Solution().total([1]) == 7

# param Solution
class Other:
    def total(self, n): return 7
def check(Solution):
    assert Solution().total([1]) == 7
def run_tests():
    check(Other)

# local Solution
class Other:
    def total(self, n): return 7
def run_tests():
    Solution = Other
    assert Solution().total([1]) == 7

# posonly default
n = [1]
def g(n=[2, 3], /):
    assert Solution().total(n) == [3, 2]
def run_tests():
    g()

# posonly
n = [1]
def g(n, /):
    assert Solution().total(n) == [3, 2]
def run_tests():
    g([2, 3])

# kwargs
n = [1]
def g(**n):
    assert Solution().total([*n]) == []
def run_tests():
    g()

# kwargs3
n = [1]
def g(**n):
    assert len(n) == 0
    assert Solution().total([len(n)]) == [0]
def run_tests():
    g()

# places **
import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertAlmostEqual(Solution().total([1.0001])[0], 1.0, **{'places': 3})
def run_tests():
    run(T)

# places None
import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertAlmostEqual(Solution().total([1.00000000001])[0], 1.0, places=None)
def run_tests():
    run(T)

# closure
n = [1]
def run_tests():
    n = [1]
    def g():
        assert Solution().total(n) == [1]
    def h(n):
        g()
    h([2])

# closure shadow global
n = [1]
def g():
    assert Solution().total(n) == [1]
def run_tests():
    n = [2]
    f = g
    f()
    g()

# inner redefine
def run_tests():
    def g():
        assert Solution().total([1]) == [1]
    g()
    def g():
        assert Solution().total([2]) == [2]
    g()

# late binding
def run_tests():
    n = [1]
    def g():
        assert Solution().total(n) == [2]
    n = [2]
    g()

# total shadow
def total(n): return 7
def run_tests():
    assert total([1]) == 7

# shadow param len
def g(len):
    assert len(Solution().total([1, 5])) == 5
def run_tests():
    g(max)

# aug alias
def run_tests():
    n = [1]
    m = n
    m += [2]
    assert Solution().total(n) == [2, 1]

# default mutable
def g(n=[1]):
    assert Solution().total(n) == [1]
def run_tests():
    g()
    g([1])
"""


def run_case(case: type[unittest.TestCase]) -> None:
    suite = unittest.TestLoader().loadTestsFromTestCase(case)
    assert unittest.TextTestRunner(stream=io.StringIO()).run(suite).wasSuccessful()


@pytest.mark.parametrize("code", re.split(r"^# .*\n", PASSING, flags=re.MULTILINE)[1:])
def test_tests_that_pass_are_not_called_wrong(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("answer_of_test")
    module.Solution = type("Solution", (), {"total": lambda self, nums: nums[::-1]})  # ty: ignore
    module.run = run_case  # ty: ignore
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code, vars(module))
    module.run_tests()
    tests = OwnTests("total", lambda nums: nums[::-1])
    tests.read((code.replace("run(T)", "unittest.main()"),), "run_tests")
    assert not tests.rejects


RUN = "__import__('builtins').ran.append(1)"
HOSTILE = {
    "argument": f"assert Solution().total([{RUN}]) == 1",
    "expected": f"assert Solution().total([1]) == ({RUN} or 2)",
    "message": f"assert Solution().total([1]) == 1, {RUN}",
    "bound": f"x = {RUN}\nassert Solution().total([1]) == 1",
    "default": f"def g(x={RUN}):\n    pass\ng()",
    "decorator": f"@print\n@(lambda f: {RUN})\ndef g():\n    pass",
    "class body": f"class A:\n    {RUN}",
    "comprehension": f"assert [{RUN} for x in [1]] == [Solution().total([1])]",
    "table": f"for x in [{RUN}]:\n    assert Solution().total([x]) == 1",
    "lambda": f"assert sorted([1], key=lambda x: {RUN}) == [Solution().total([1])]",
    "walrus": f"assert (y := {RUN}) == Solution().total([1])",
    "f-string": f'assert Solution().total([1]) == f"{{{RUN}}}"',
    "attribute": "assert Solution().total.__globals__['__builtins__'] == 1",
    "attributes of literals": "assert ().__class__.__base__.__subclasses__() == Solution().total([1])",
    "method of a string": "assert '{0.__class__}'.format(Solution().total([1])) == 'int'",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_no_line_of_the_answer_runs(body, monkeypatch):
    monkeypatch.setattr(builtins, "ran", [], raising=False)
    tests = OwnTests("total", lambda nums: sum(nums))
    tests.read((SUM_WRONG + as_module(body) + RUN,), "run_tests")
    assert builtins.ran == []  # ty: ignore[unresolved-attribute]
    assert not tests.rejects


@pytest.mark.parametrize("wrong", ["1", "2"])
def test_how_long_it_takes_tells_nothing_of_what_was_returned(wrong):
    """Every expectation is looked at, whatever became of those before it; no result is an argument or a bound."""
    body = f"assert Solution().total([1]) == {wrong} and Solution().total([2]) == 2\nfor _ in [1, 2]:\n"
    body += f"    assert Solution().total([3]) == {wrong}\n"
    body += "for _ in [0] * Solution().total([5]):\n    assert Solution().total([7]) == 0\n"
    body += "assert Solution().total([Solution().total([9])]) == 0\nassert Solution().total([11]) == 11\n"
    called: list[list[int]] = []
    tests = OwnTests("total", lambda nums: called.append(nums) or sum(nums))
    tests.read((as_module(body),), "run_tests")
    assert called == [[1], [2], [3], [3], [9], [11]]


@pytest.mark.parametrize(
    "body",
    [
        "assert Solution().total([" + "(" * 100_000 + ")" * 100_000 + "]) == 1",
        "assert Solution().total([" + "-" * 100_000 + "1]) == 1",
        "assert Solution().total([" + "+".join("1" * 50_000) + "]) == 1",
        "assert Solution().total([1]) != " + "[" * 190 + "]" * 190,
        "assert Solution().total([1 << 40_000, 10 ** 10 ** 10, 'a' * 10 ** 12]) == 1",
        "assert Solution().total([" + "9" * 5000 + "]) == 1",
        "for i in range(10 ** 12):\n    assert Solution().total([1]) == 1",
        "".join(f"{'    ' * i}for x{i} in {[0] * 50}:\n" for i in range(18))
        + "    " * 18
        + "x = 1\nassert False",
        "assert Solution().total([1]) == 1\n" * (MAX_CALLS + 1),
        "def run_tests():\n    run_tests()\nrun_tests()",
    ],
    ids=lambda body: body[:40] + body[-20:],
)
def test_reading_is_bounded(grader, body):
    """Its own runs end at the division."""
    restarts = grader.restarts
    assert verdict_of(grader, SUM_WRONG + as_module(f"x = 1 // 0\n{body}")) in ("unread", "right")
    assert grader.restarts == restarts
