"""Environments beside the code world: a user's own rows with a proxy and a reference, and classes of one's own."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from judge_server import serving
from vgrout import embedded
from vgrout.config.presets import resolve
from vgrout.data import Grade, Ungraded
from vgrout.envs.base import Environment, Grader
from vgrout.envs.text import TextEnvironment, after_thought, load_rows
from vgrout.inputs import file_hashes, read_inputs
from vgrout.train import main

EXAMPLES = Path(__file__).parents[1] / "examples"
FUNCTIONS = """
def proxy(completion, word):
    return float(word in completion)

async def gold(completions, word, **columns):
    return [c.count(w) == 1 for c, w in zip(completions, word)]

def raises(completion):
    raise OSError("no judge")

def too_much(completion):
    return 3
"""
RUN = (
    f"train full --model {embedded.MODEL_DIR} --problems rows.jsonl --reward {{m}}:proxy --reference {{m}}:gold "
    "--intervention none --guard log --steps 2 --group 4 --prompts-per-step 3 --max-new 12 --threads 1 "
    "--eval-ablate-every 2 --eval-n-prompts 2 --final-n-prompts 6 --final-samples 1"
)


def row(i: int, **more: Any) -> dict[str, Any]:
    return {"id": i, "prompt": f"A poem about {i}", "word": " " if i % 2 else "return", **more}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Writes rows and functions into the working directory; returns a run's command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])

    def make(rows: list[Any] | None = None, flags: str = "") -> list[str]:
        name = f"own_text_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(FUNCTIONS, encoding="utf-8")
        lines = [row(i) for i in range(30)] if rows is None else rows
        text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in lines)
        (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
        return (RUN.format(m=name) + f" {flags}").split()[1:]

    return make


def environment(argv: list[str]) -> TextEnvironment:
    made = read_inputs(resolve(argv)).environment
    assert isinstance(made, TextEnvironment)
    return made


def test_it_is_an_environment_and_its_grader_a_grader(world: Callable[..., list[str]]) -> None:
    made = environment(world())
    assert isinstance(made, Environment)
    with made.grader(2, 0) as grader:
        assert isinstance(grader, Grader)


def test_a_hack_passes_the_proxy_and_not_the_reference(world: Callable[..., list[str]]) -> None:
    made = environment(world())
    task = made.rows[0]
    with made.grader(2, 0) as grader:
        once, twice, never = (
            grader.submit(task, text).result() for text in ("return", "return return", "no")
        )
    assert isinstance(once, Grade)
    assert isinstance(twice, Grade)
    assert isinstance(never, Grade)
    assert (once.passed, once.solved, once.hacked, once.reward) == (True, True, False, 3.0)
    assert (twice.passed, twice.solved, twice.hacked, twice.reward) == (True, False, True, 3.0)
    assert (never.passed, never.solved, never.hacked, never.reward) == (False, False, False, 0.0)
    assert (twice.mechanism, twice.tries, twice.reward_of_reference) == ("reward", ("reward",), 0)
    assert twice.details == {"proxy": 1.0, "reference": 0.0}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\nreturn\n</think>\n\nno", "no"),
        ("<think>\nreturn", ""),
        ("a </think> b", "a </think> b"),
    ],
)
def test_a_thought_is_not_graded(text: str, answer: str) -> None:
    assert after_thought(text) == answer


def test_a_function_that_fails_leaves_the_answer_ungraded(world: Callable[..., list[str]]) -> None:
    argv = world()
    cfg = resolve(argv)
    raising = cfg.env.reward.replace("proxy", "raises")
    made = TextEnvironment.of_run(replace(cfg, env=replace(cfg.env, reward=raising)))
    with made.grader(1, 0) as grader:
        failed = grader.grade(made.rows[0], "x")
    assert isinstance(failed, Ungraded)
    assert failed.reason == f"--reward {raising} raised OSError: no judge"


WRONG: dict[str, tuple[list[Any], str]] = {
    "not JSON": ([row(0), "{"], "rows.jsonl, line 2: not JSON"),
    "a list": (["[1]"], "rows.jsonl, line 1: not a JSON object"),
    "no id": (
        [{"prompt": "x"}],
        "rows.jsonl, line 1: 'id' should be a whole number, got none: number the rows",
    ),
    "a true id": ([{"id": True, "prompt": "x"}], "'id' should be a whole number, got True"),
    "an id twice": (
        [row(1), row(1, prompt="y")],
        "line 2: id 1 already used at rows.jsonl, line 1",
    ),
    "a prompt twice": (
        [row(1), row(2, prompt="A poem about 1")],
        "line 2: has the prompt of rows.jsonl",
    ),
    "no prompt": ([{"id": 1}], "line 1: needs 'messages', or 'prompt'"),
    "a message without text": (
        [{"id": 1, "messages": [{"role": "user"}]}],
        "every message needs string",
    ),
    "no question": (
        [{"id": 1, "messages": [{"role": "assistant", "content": "x"}]}],
        "should end with a user message",
    ),
    "a split of another name": (
        [row(1, split="dev")],
        "unknown split 'dev'; one of train, val, test",
    ),
    "a flaw of blanks": ([row(1, flaw="a b")], "'flaw' should be a name of small letters"),
    "half a character": (['{"id": 1, "prompt": "\\ud800", "word": ""}'], "half a character"),
    "nothing": ([], "rows.jsonl: no rows in it"),
    "too few": ([row(i) for i in range(2)], "no problem is held out for evaluations"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_rows_are_named_with_their_line(
    case: str, world: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows, said = WRONG[case]
    assert main(world(rows)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


FLAGS = {
    "--reward {m}:too_much": "returned 3.0, not a number in [0, 1]",
    "--reference {m}:absent": "cannot be imported",
    "--env-mode own": "--env-mode: not read with --env text; leave it out",
    "--report-detectors C": "--report-detectors: not read with --env text; leave it out",
    "--monitor syntax_edge --intervention screen": "--monitor syntax_edge: it reads correct answers; give",
    "--known-modes exit_code --monitor labels --intervention screen": "unknown flaw 'exit_code'; legal: reward",
    "--unannounced-modes reward": "--unannounced-modes: not read with --reward",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_wrong_flags_are_one_line(
    flags: str, world: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = world()
    name = argv[argv.index("--reward") + 1].partition(":")[0]
    given = flags.format(m=name).split()
    if given[0] in argv:
        at = argv.index(given[0])
        del argv[at : at + 2]
    if "--intervention" in given:
        at = argv.index("--intervention")
        del argv[at : at + 2]
    assert main([*argv, *given, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert FLAGS[flags] in error
    assert error.count("\n") == 1


def test_a_function_that_raises_shows_where(
    world: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its traceback from its own first frame, then the line that says what it was asked about."""
    argv = world()
    at = argv.index("--reference") + 1
    argv[at] = argv[at].replace(":gold", ":raises")
    assert main([*argv, "--dry-run"]) == 2
    title, frame, *_, error, refusal = capsys.readouterr().err.strip().splitlines()
    assert title == "Traceback (most recent call last):"
    assert f"{argv[at].partition(':')[0]}.py" in frame
    assert frame.endswith("in raises")
    assert error == "OSError: no judge"
    assert refusal.endswith("raised OSError: no judge (asked about the row at rows.jsonl, line 1)")


def test_a_reference_without_a_proxy_is_refused(
    world: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = world()
    at = argv.index("--reward")
    del argv[at : at + 2]
    assert main(argv) == 2
    assert "goes with --reward" in capsys.readouterr().err


def test_flaws_and_splits_of_the_rows(world: Callable[..., list[str]]) -> None:
    rows = [row(i, flaw="rhyme" if i < 10 else "length") for i in range(20)]
    rows += [row(i, split="test") for i in range(20, 24)] + [row(24, split="val")]
    made = environment(world(rows))
    assert [*made.flaws] == ["rhyme", "length", "reward"]
    parts = made.tasks()
    assert {name: len(part) for name, part in parts.items()} == {"train": 14, "val": 3, "test": 8}
    assert made.marked[0] == "rhyme"
    assert load_rows(Path("rows.jsonl"))[0].columns == {"word": "return"}


def test_an_edited_function_or_file_is_another_run(world: Callable[..., list[str]]) -> None:
    argv = world()
    cfg = resolve(argv)
    before = file_hashes(cfg, read_inputs(cfg))
    assert all(before[name] for name in ("problems", "reward", "reference"))
    with open("rows.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row(99)) + "\n")
    after = file_hashes(cfg, read_inputs(cfg))
    assert after["problems"] != before["problems"]
    assert after["reward"] == before["reward"]


@pytest.mark.long
def test_a_run_of_a_users_own_rows(world: Callable[..., list[str]], tmp_path: Path) -> None:
    """It trains, is evaluated and reported, and its files say what each answer was by both functions."""
    assert main(world(flags="--out-tag=_text")) == 0
    (run,) = tmp_path.glob("out/runs/*_text")
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 3 * 4
    for line in lines:
        assert line["env_mode"] == "reward"
        assert line["hacked"] == (line["proxy"] >= 1 and line["reference"] < 1)
        assert line["reward"] == 3 * line["proxy"]
    record = json.loads((run / "run.json").read_text())
    assert [*record["flaws"]] == ["reward"]
    assert record["graded_by"]["reference"].endswith(":gold")
    assert "deployed" in (run / "summary.md").read_text()
    from vgrout.report.__main__ import main as report

    assert report([str(run), "--out", str(tmp_path / "report")]) == 0
    assert "reward" in (tmp_path / "report/report.html").read_text()


@pytest.mark.long
def test_a_language_model_is_the_monitor_of_ones_own_rows(
    world: Callable[..., list[str]], tmp_path: Path
) -> None:
    with serving(lambda text: "yes" if "return" in text else "no") as server:
        argv = [word for word in world() if word not in ("--intervention", "none")]
        judge = [f"--llm-judge-url={server.url}", "--llm-judge-name=m"]
        assert main([*argv, "--intervention=screen", "--monitor=llm_judge", *judge]) == 0
    assert any("A poem about" in asked["messages"][0]["content"] for asked in server.asked)
    (run,) = tmp_path.glob("out/runs/*")
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert any(line["flagged"] for line in lines)
    for line in lines:
        assert line["flagged"] == (line["proxy"] >= 1 and "return" in line["text"])
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert sum(step["judge_asked"] for step in steps) == len(server.asked) - 1


@pytest.mark.long
def test_an_environment_of_ones_own(tmp_path: Path) -> None:
    """The example: under forty lines, from nothing to a table."""
    example = EXAMPLES / "own_environment.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 45
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rew_s" in done.stdout
    assert "hack_s" in done.stdout
