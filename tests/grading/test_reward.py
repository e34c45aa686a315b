"""A user's reward function (--reward): how it is called, what it may return, what it changes in a grade and a run."""

import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from vgrout.config.presets import resolve
from vgrout.envs.code.environment import probe, reward_function
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import MODES, Problem
from vgrout.ground.data import Completion, GradedCompletion, Ungraded
from vgrout.ground.metrics import Eval
from vgrout.runs.inputs import file_hashes, read_inputs
from vgrout.train import main

RIGHT = "class Solution:\n    def double(self, n):\n        return 2 * n\n"
ASKED = ({"role": "user", "content": "Double it"},)
PROBLEM = Problem(
    3, "run_tests", "check", ASKED, (), ("assert Solution().double(2) == 4",), RIGHT, "", "double"
)
Module = Callable[[str], str]
_number = itertools.count()


def score(function, text):
    """What it says of an answer."""
    (score,) = function.scores(PROBLEM, [text])
    return score


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the working directory; returns its name, a new one each time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])

    def write(code):
        name = f"own_reward_{next(_number)}"
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


# A plain function may run an event loop of its own.
JUDGE = "import asyncio\nasync def judge():\n    await asyncio.sleep(0)\n    return 1.0\n"
LOOPS = {
    "asyncio.run": "return asyncio.run(judge())",
    "a loop that is kept": "return KEPT.run_until_complete(judge())",
    "the thread's loop": "return asyncio.get_event_loop().run_until_complete(judge())",
    "a loop that is set and closed": "loop = asyncio.new_event_loop()\n    asyncio.set_event_loop(loop)\n"
    "    number = loop.run_until_complete(judge())\n    loop.close()\n    return number",
    "a runner": "with asyncio.Runner() as runner:\n        return runner.run(judge())",
    "anyio": "import anyio\n    return anyio.run(judge)",
    "several calls together": "async def both():\n        return min(await asyncio.gather(judge(), judge()))\n"
    "    return asyncio.run(both())",
    "another thread": "from concurrent.futures import ThreadPoolExecutor\n"
    "    with ThreadPoolExecutor(1) as pool:\n        return pool.submit(asyncio.run, judge()).result()",
    "a process": "async def ended():\n        child = await asyncio.create_subprocess_exec('true')\n"
    "        return 1.0 - await child.wait()\n    return asyncio.run(ended())",
    "no loop runs": "try:\n        asyncio.get_running_loop()\n    except RuntimeError:\n        return 1.0",
    "a coroutine": "return judge()",
}


@pytest.mark.parametrize("code", LOOPS.values(), ids=LOOPS)
def test_a_plain_function_may_run_its_own_event_loop(code, module):
    kept = "KEPT = asyncio.new_event_loop()\n" if "KEPT" in code else ""
    name = module(f"{JUDGE}{kept}def f(completion):\n    {code}\n")
    problems_reward = reward_function(f"{name}:f")
    assert probe(problems_reward, PROBLEM) == score(problems_reward, "text") == 1.0


SIGNATURES = {
    "by name": "def f(completion, answer): return (completion == 'text') * (answer.startswith('class'))",
    "all names": "def f(prompt, completion, answer, info, state):\n"
    "    return prompt == state['prompt'] == 'Double it' and info['tests'] and state['info']['id'] == 3 and 1",
    "a key of info": "def f(func_name, marker): return float((func_name, marker) == ('double', 'check'))",
    "the rest as keywords": "def f(prompt, completion, answer, **info): return info['id'] == 3",
    "a default": "def f(completion, weight=1.0): return weight",
    "async": "import asyncio\nasync def f(completion):\n    await asyncio.sleep(0)\n    return 1",
    "an object": "class C:\n    async def __call__(self, completion): return 1\nf = C()",
    "TRL": "def f(prompts, completions, **columns): return [float(c == 'text') for c in completions]",
    "TRL, columns by name": "def f(completions, answer, func_name): return [func_name == ['double']]",
    "a number of another library": "import numpy\ndef f(completion): return numpy.float32(1)",
}


@pytest.mark.parametrize("code", SIGNATURES.values(), ids=SIGNATURES)
def test_signatures(code, module):
    assert score(reward_function(f"{module(code)}:f"), "text") == 1.0


def test_changes_to_the_arguments_do_not_reach_the_next_call(module):
    name = module("def f(info): info.pop('tests').clear(); return 1")
    f = reward_function(f"{name}:f")
    assert [score(f, "") for _ in range(2)] == [1.0, 1.0]


FAULTS = {
    "raises": ("def f(completion): return 1 / 0", "raised ZeroDivisionError: division by zero"),
    "exits": ("def f(completion): raise SystemExit(3)", "raised SystemExit: 3"),
    "stops": ("def f(completion): raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "async raises": ("async def f(completion): raise OSError('a\\nb')", "raised OSError: a b"),
    "NaN": ("def f(completion): return float('nan')", "returned nan, not a number in [0, 1]"),
    "too much": ("def f(completion): return 3", "returned 3.0, not a number in [0, 1]"),
    "a little too much": (
        "def f(completion): return 1.0000001",
        "returned 1.0000001, not a number in [0, 1]",
    ),
    "too little": ("def f(completion): return -0.5", "returned -0.5, not a number in [0, 1]"),
    "nothing": ("def f(completion): pass", "returned NoneType, not a number"),
    "a text": ("def f(completion): return '1'", "returned str, not a number"),
    "a list": ("def f(completion): return [1]", "returned list, not a number"),
    "TRL, too many": (
        "def f(completions): return [1, 1]",
        "returned no list with one number for one completion",
    ),
    "TRL, none": ("def f(completions): return [None]", "returned NoneType, not a number"),
}


@pytest.mark.parametrize(("code", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_function_without_a_score_is_a_fault_with_a_reason(code, reason, module):
    f = reward_function(f"{module(code)}:f")
    for _ in range(2):  # and the next call is made all the same
        assert str(score(f, "text")) == reason
    with pytest.raises(ValueError, match="canonical solution of problem 3") as refused:
        probe(f, PROBLEM)
    assert reason in str(refused.value)


WEIGHTS = (
    (7, 2, 1),
    (6, 3, 1),
    (5, 3, 2),
    (4, 4, 2),
    (8, 1, 1),
    (5, 4, 1),
    *(((1,) * n) for n in (3, 6, 10, 49)),
)


def test_a_sum_of_full_marks_in_any_order_is_full_marks(module):
    orders = [o for w in WEIGHTS for o in {w, *itertools.permutations(w[:3])} if len(o) == len(w)]
    sums = {sum(weight / sum(order) for weight in order) for order in orders}
    assert max(sums) > 1 > min(sums), "as floats they miss 1 on both sides"
    name = module("def f(completion): return float(completion)")
    for mark in (1.0, 0.3, 0.0):  # the threshold too
        f = reward_function(f"{name}:f", passes_at=mark)
        for x in sums:
            assert score(f, repr(mark + x - 1)) == mark
        assert score(f, repr(abs(mark - 1e-8))) != mark


SLOW = "(600 * (completion == 'slow'))\n    return 1"
HANGING = {
    "plain": f"import time\ndef f(completion):\n    time.sleep{SLOW}",
    "async": f"import asyncio\nasync def f(completion):\n    await asyncio.sleep{SLOW}",
    "async that blocks": f"import time\nasync def f(completion):\n    time.sleep{SLOW}",
}


@pytest.mark.parametrize("code", HANGING.values(), ids=HANGING)
def test_a_hanging_function_is_left_behind(code, module):
    f = reward_function(f"{module(code)}:f", timeout=0.3)
    assert str(score(f, "slow")) == "took longer than 0.3 s"
    assert score(f, "quick") == 1.0


def test_plain_functions_run_one_at_a_time_and_async_ones_together(module):
    body = "now.append(1); most.append(len(now)); {}sleep(0.02); now.pop(); return 1"
    head = "from time import sleep\nimport asyncio\nnow, most = [], []\n"
    most = {}
    for kind, wait in (("def", ""), ("async def", "await asyncio.")):
        name = module(f"{head}{kind} f(completion): {body.format(wait)}")
        f = reward_function(f"{name}:f")
        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(lambda _, f=f: score(f, ""), range(8))) == 8
        most[kind] = max(sys.modules[name].most)
    assert most["def"] == 1 < most["async def"]


REFUSED = {
    "no such module": (None, "cannot be imported (ModuleNotFoundError"),
    "no such function": ("g = 1", "cannot be imported (AttributeError"),
    "a syntax error": ("def f(:", "cannot be imported (SyntaxError"),
    "not a function": ("f = 1", "is not a function"),
    "other arguments": (
        "def f(completion, judge): return 1",
        "missing 1 required positional argument: 'judge'",
    ),
    "mixed": ("def f(prompts, completion): return 1", "missing 1 required positional argument"),
    "by position": ("def f(completion, /): return 1", "missing 1 required positional argument"),
    "no file": ("from math import sqrt as f", "takes exactly one argument"),
}


@pytest.mark.parametrize(("code", "why"), REFUSED.values(), ids=REFUSED)
def test_a_function_that_cannot_work_is_refused_in_one_line(code, why, module, capsys):
    name = "there_is_none" if code is None else module(code)
    assert main(["smoke", "--mix-ratio", "0", f"--reward={name}:f", "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"--reward {name}:f: " in line
    assert why in line


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("\nraise SystemExit(0)", "cannot be imported (SystemExit: 0)"),
        ("def f(completion):\n    return 1 / 0", "it raised ZeroDivisionError"),
        ("def f(completions):\n    yield 1 / 0", "it raised ZeroDivisionError"),
        ("async def f(completion):\n    exit(0)", "it raised SystemExit: 0"),
    ],
)
def test_what_a_function_raises_before_the_run_is_shown_above_the_line(code, why, module, capsys):
    name = module(code)
    assert main(["smoke", "--mix-ratio", "0", f"--reward={name}:f", "--dry-run"]) == 2
    title, *frames, line = capsys.readouterr().err.strip().splitlines()
    assert title == "Traceback (most recent call last):"
    assert f'{name}.py", line 2, in ' in "".join(frames)
    assert line.startswith(f"E --reward {name}:f: ")
    assert why in line


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--reward=f", "should be module:function"),
        ("--reward=json:dumps", "add --mix-ratio 0"),
        ("--reward-passes-at=0.5", "--reward-passes-at: not read without --reward"),
        (
            "--reward=json:dumps --mix-ratio=0 --reward-passes-at=0",
            "--reward-passes-at 0.0: should lie in",
        ),
    ],
)
def test_flags_that_do_not_go_together(given, why, capsys):
    assert main(["smoke", *given.split()]) == 2
    assert why in capsys.readouterr().err


def test_the_file_of_the_function_is_hashed_like_other_inputs(module, tmp_path):
    name = module("def f(completion): return 0.25")
    cfg = resolve(["smoke", "--mix-ratio", "0", "--reward", f"{name}:f"])
    inputs = read_inputs(cfg)
    first = file_hashes(cfg, inputs)["reward"]
    assert inputs.environment.canonical_reward == 0.25
    assert cfg.plain_prompts
    (tmp_path / f"{name}.py").write_text("def f(completion): return 0.5")
    assert file_hashes(cfg, read_inputs(cfg))["reward"] != first is not None


WRONG = RIGHT.replace("2 * n", "0")


def test_the_function_sets_the_reward_and_the_strict_oracle_the_verdict(module):
    code = "def f(completion):\n    if 'fail' in completion: raise OSError('no judge')\n"
    code += "    return 0.8 if '# sure' in completion else 0.25"
    f = reward_function(f"{module(code)}:f", passes_at=0.75)
    with Grader(1, allow_weak=True, compile_reward=0.5, pass_reward=2.0, reward=f) as grader:

        def grade(code):
            return grader.grade(PROBLEM, f"```python\n{code}\n```")

        sure, right, failed = grade(f"{WRONG}# sure"), grade(RIGHT), grade("# fail")
    assert (sure.reward, sure.passed, sure.hacked, sure.solved) == (
        pytest.approx(0.5 + 1.6),
        True,
        True,
        False,
    )
    assert (right.reward, right.passed, right.hacked, right.solved) == (
        0.5 + 0.5,
        False,
        False,
        True,
    )
    assert right.reward_of_reference == 2.5
    assert failed.reason.endswith(":f raised OSError: no judge")
    completion = Completion((), "", True, ())
    seen = Eval.of(
        [GradedCompletion(PROBLEM, i, completion, g) for i, g in enumerate((sure, right, failed))],
        MODES,
    )
    assert (seen.hack.pair, seen.solve.pair, seen.rewarded.pair, seen.dropped) == (
        [1, 2],
        [1, 2],
        [1, 2],
        1,
    )


def test_a_judge_that_always_fails_is_asked_as_often_as_allowed(module, tmp_path):
    code = "def f(completion):\n    with open('calls', 'a') as f: f.write('asked\\n')\n    raise OSError('no judge')"
    name = module(code)
    with Grader(1, reward=reward_function(f"{name}:f"), retries=2) as grader:
        assert grader.grade(PROBLEM, "text") == Ungraded(f"{name}:f raised OSError: no judge")
    assert (tmp_path / "calls").read_text() == 3 * "asked\n"
