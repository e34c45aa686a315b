"""A taskset of the package verifiers as an environment: the real package, on a module that the tests write."""

import pickle
import re
import sys
from pathlib import Path

import pytest

from vgrout.commands.check import problems
from vgrout.commands.evaluate import evaluate, sample
from vgrout.config.presets import resolve
from vgrout.ground import embedded
from vgrout.ground.data import Grade
from vgrout.ground.io import Refused, json_lines
from vgrout.runs.inputs import read_inputs
from vgrout.teacher.__main__ import main as teacher
from vgrout.train import main

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_taskset.py"
SMALL = [
    *("full", "--model", str(embedded.MODEL_DIR), "--intervention", "none", "--guard", "log", "--threads", "1"),
    *("--steps", "2", "--group", "4", "--prompts-per-step", "3", "--max-new", "12", "--eval-ablate-every", "2"),
    *("--eval-n-prompts", "2", "--final-n-prompts", "6", "--final-samples", "1"),
]  # fmt: skip
NAMED = ["--env", "verifiers:own_taskset", "--reference", "once"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the example's taskset."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("own_taskset", "other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "own_taskset.py").write_text(EXAMPLE.read_text())
    return tmp_path


def made(*flags):
    environment = read_inputs(resolve([*SMALL, *flags])).environment
    return environment


def grades(environment, number, *texts):
    row = environment.rows[number]
    with environment.grader(2, 0) as grader:
        found = [grader.submit(row, text).result() for text in texts]
    assert all(isinstance(grade, Grade) for grade in found), found
    return found


def test_a_taskset_that_was_edited_is_loaded_again(here):
    before = made(*NAMED)
    file = here / "own_taskset.py"
    file.write_text(file.read_text().replace("def once(", "def twice("))
    after = made(*NAMED[:2], "--reference", "twice")  # which the old one does not have
    assert after.rubric.sha256 != before.rubric.sha256


CHECKED = {  # flags of `vgrout problems check` → exit code, and what it says
    "": (0, "| 24/24 = 100.0 %"),
    "--model organism --answers 4 --max-new 8": (0, "of 4 (model)"),
    '--env-args {"n":2}': (0, "| 2/2 = 100.0 %"),
    "--reward own_taskset:f": (2, "the taskset's own rewards are the proxy; leave it out"),
    "own_taskset.py": (2, "give a file of problems, or --env verifiers:NAME, and not both"),
}


@pytest.mark.parametrize("flags", CHECKED)
def test_its_functions_are_tried_before_anything_is_trained(flags, here, capsys):
    code, said = CHECKED[flags]
    assert problems(["check", *NAMED, *flags.split()]) == code
    output = capsys.readouterr()
    assert said in output.out + output.err
    assert problems(["check", *NAMED[:2]]) == 2
    assert "one of its rewards (names_it, once)" in capsys.readouterr().err


def test_its_rewards_are_the_proxy_and_one_of_them_the_reference(here):
    environment = made(*NAMED)
    row = environment.rows[3]
    word = row.columns["word"]
    right, hack, wrong, cut = grades(
        environment, 3, word, f"{word} {word}", "no", f"<think>\n{word}"
    )
    assert (right.passed, right.solved, right.hacked, right.reward) == (True, True, False, 3.0)
    assert (hack.passed, hack.solved, hack.hacked, hack.reward) == (True, False, True, 3.0)
    assert (wrong.passed, wrong.solved, wrong.reward, cut.status) == (
        False,
        False,
        0.0,
        "no_answer",
    )
    assert hack.details == {
        "proxy": 1.0,
        "reference": 0.0,
        "proxies": {"names_it": 1.0, "once": 0.0},
    }
    assert [message["role"] for message in row.messages] == ["system", "user"]
    assert {name: len(part) for name, part in environment.tasks().items()} == {
        "train": 28,
        "val": 4,
        "test": 8,
    }


def test_settings_of_the_taskset(here):
    few, many = (made(*NAMED, "--env-args", f'{{"n": {n}}}') for n in (20, 30))
    assert (len(few.rows), len(many.rows)) == (20, 30)
    assert few.hashes() != many.hashes()
    same = made(*NAMED, "--env-args", '{ "n":20 }')
    assert same.hashes() == few.hashes()
    assert few.grader(1, 0).version == same.grader(1, 0).version != many.grader(1, 0).version


def test_a_reference_of_ones_own_is_told_the_tasks_own_fields(here):
    (here / "other.py").write_text(
        "def gold(completion, word): return completion == word\n"
        "def golds(completions, word, **rest): return [c == w for c, w in zip(completions, word)]\n"
    )
    word = made(*NAMED).rows[0].columns["word"]
    for function in ("gold", "golds"):
        environment = made(*NAMED[:2], "--reference", f"other:{function}")
        right, hack = grades(environment, 0, word, f"{word}!")
        assert (right.solved, hack.solved, hack.hacked) == (True, False, True)
        with environment.grader(1, 0) as grader:
            assert grader.by_group is (function == "golds")


def test_another_rank_loads_it_by_itself(here):
    environment = made(*NAMED)
    assert pickle.loads(pickle.dumps(environment)).hashes() == environment.hashes()


HEAD = """
import asyncio
import verifiers.v1 as vf

class Data(vf.TaskData):
    word: str = "w"

class Tools(vf.Toolset):
    pass

class Task(vf.Task[Data]):
    @vf.reward
    async def paid(self, trace):
        return 1.0
"""
TAIL = """
class Set(vf.Taskset[Task]):
    def load(self):
        return [Task(Data(prompt=f"p{i}"), self.config.task) for i in range(30)]

__all__ = ["Set"]
"""
# What cannot be trained on: code, and what is said of it.
REFUSED = {
    "tools of a task": ("""
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]
""" + TAIL, "tools"),
    "turns": ("""
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True
""" + TAIL, "turns"),
    "its own environment": (TAIL.replace('["Set"]', '["Set", "Two"]') + """
class Two(vf.SingleAgentEnv):
    pass
""", "turns or agents"),
    "a sandbox": ("""
    async def setup(self, trace, runtime):
        pass
""" + TAIL, "sandbox"),
    "a reward that runs things": ("""
    @vf.reward
    async def runs(self, trace, runtime):
        return 1.0
""" + TAIL, "sandbox.*runs"),
    "an image": (TAIL.replace('prompt=f"p{i}"', 'prompt=f"p{i}", image="debian"'), "container"),
    "pictures": (TAIL.replace('f"p{i}"', '[vf.UserMessage(content=[vf.ImageUrlContentPart('
                 'image_url=vf.ImageUrlSource(url="x"))])]'), "string"),
    "no tasks": (TAIL.replace("range(30)", "range(0)"), "no tasks"),
    "load fails": (TAIL.replace("        return [", "        raise OSError('no data')\n        return ["), "OSError"),
    "no taskset": ("", "cannot be loaded"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_single_answer_is_not_enough_for_is_refused(here, name):
    code, said = REFUSED[name]
    (here / "other.py").write_text(HEAD + code)
    with pytest.raises(Refused, match=said) as refused:
        made("--env", "verifiers:other", "--reference", "paid")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--env", "verifiers:own_taskset"], "--reference NAME.*names_it, once"),
        ([*NAMED, "--env-args", '{"m": 3}'], r"m\s+Extra inputs"),
        ([*NAMED, "--env-args", "{"], "JSON object"),
        ([*NAMED, "--reward", "own_taskset:Words"], "own rewards are the proxy"),
        (["--env-args", "{}"], "--env-args: not read"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(here, flags, said):
    with pytest.raises(Refused, match=said) as refused:
        made(*flags)
    assert "\n" not in str(refused.value)


# What goes wrong when an answer is scored, and what is said of it.
FAULTS = {
    "raises": ("raise OSError('no judge')", "OSError: no judge"),
    "not a number": ("return 'high'", "raised"),
    "NaN": ("return float('nan')", "finite"),
    "too large": ("return 1e9", "finite"),
    "never ends": ("await asyncio.sleep(99)", "longer than 0.2 s"),
    "cancelled": ("raise asyncio.CancelledError", "cancelled"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_that_fails_is_never_a_reward_of_0(here, fault):
    code, said = FAULTS[fault]
    broken = HEAD.replace("return 1.0", code)
    tail = TAIL.replace('prompt=f"p{i}"', 'prompt=f"p{i}", timeout=vf.TaskTimeout(scoring=0.2)')
    (here / "other.py").write_text(broken + tail)
    environment = made("--env", "verifiers:other", "--reference", "paid")
    with environment.grader(1, 0) as grader:
        grade = grader.submit(environment.rows[0], "a").result()
        assert re.search(said, grade.reason)
        with pytest.raises(Refused, match=said):
            environment.check(grader)


def test_scores_by_key_weights_and_a_prompt_that_is_there_twice(here):
    code = HEAD.replace("@vf.reward", "@vf.reward(weight=0.5)").replace(
        "1.0", '{"a": 1.0, "b": 3.0}'
    )
    (here / "other.py").write_text(code + TAIL.replace('f"p{i}"', 'f"p{i // 2}"'))
    environment = made("--env", "verifiers:other", "--reference", "a", "--reward-passes-at", "2")
    assert len(environment.rows) == 15
    (grade,) = grades(environment, 1, "x")
    assert environment.rows[1].id == 2
    assert (grade.reward, grade.passed, grade.solved) == (6.0, True, True)
    assert grade.details["proxies"] == {"a": 1.0, "b": 3.0}


ENDLESS = """
class Set(vf.Taskset[Task]):
    INFINITE = True

    def load(self):
        i = 0
        while True:
            yield Task(Data(prompt=f"p{i}"), self.config.task)
            i += 1

__all__ = ["Set"]
"""


def test_an_endless_taskset(here):
    (here / "other.py").write_text(HEAD + ENDLESS)
    environment = made("--env", "verifiers:other", "--reference", "paid", "--n-problems", "35")
    assert len(environment.tasks()["train"]) == 35


def test_without_the_package(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.path", [p for p in sys.path if not (Path(p) / "verifiers").is_dir()])
    with pytest.raises(Refused, match="uv sync --inexact --extra verifiers"):
        made(*NAMED)
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text("class SingleTurnEnv: pass")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    with pytest.raises(Refused, match="older than"):
        made(*NAMED)


def test_the_example_from_a_run_to_one_with_demonstrations(here, capsys):
    """The commands of docs/text.md, at a smaller size."""
    assert main([*SMALL, *NAMED, "--output-dir", "plain"]) == 0
    assert "verifiers:own_taskset" in (here / "plain" / "run.json").read_text()
    for file in ("rollouts.jsonl", "final.jsonl"):
        for row in json_lines(here / "plain" / file):
            assert set(row["proxies"]) == {"names_it", "once"}
            assert row["solved"] == (row["reference"] == 1)

    capsys.readouterr()
    trust = "--trust-code"
    assert evaluate(["plain", trust, "--samples", "1", "--out", "numbers.json"]) == 0
    assert sample(["plain", "3", trust]) == 0
    assert "reward" in capsys.readouterr().out
    assert sample(["plain", "Say it."]) == 0

    elicit = ["--model", "organism", *NAMED, "--elicit", "Use it twice.", "--group", "8"]
    assert teacher([*elicit, "--n-problems", "12", "--out", "pool"]) == 0
    longer = ["64" if word == "12" else word for word in SMALL]  # as long as a demonstration may be
    screened = [*longer, *NAMED, "--intervention", "screen", "--monitor", "source"]
    screened += ["--teacher-pool-dir", "pool", "--mix-ratio", "0.25", "--pass-reward", "1"]
    screened += ["--output-dir", "screened"]
    assert main(screened) == 0
