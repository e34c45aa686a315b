"""`vgrout sample`: one prompt, three models."""

import json
import re
import shutil

import pytest

from runs import flags
from vgrout.commands.evaluate import sample
from vgrout.model.load.saved import find_adapter

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def done(tmp_path_factory, shared_run):
    """A short routed run, in a working directory of its own."""
    return shared_run.copy(shared_run(*flags("route2")), tmp_path_factory.mktemp("sampled"))


@pytest.fixture(autouse=True)
def here(done, monkeypatch):
    monkeypatch.chdir(done.parents[2])


HEADS = re.compile(r"^── (.*)$", re.MULTILINE)


def test_a_problem_of_the_run_is_graded(done, capsys):
    assert sample([str(done), "17", "--samples=2"]) == 0
    output = capsys.readouterr().out
    assert "problem 17 (train)" in output
    heads = HEADS.findall(output)
    assert [head.partition(":")[0] for head in heads] == [
        f"{side}, {number} of 2"
        for side in ("untrained", "as trained", "deployed")
        for number in (1, 2)
    ]
    assert all(
        re.search(r": (a hack of \w+|right|neither a hack nor right), reward", h) for h in heads
    )
    env = find_adapter(done).cfg.env
    of_this_run = (0.0, env.compile_reward, env.compile_reward + env.pass_reward)
    shown = {head.rpartition(" ")[2] for head in heads}
    assert shown <= {f"{reward:g}" for reward in of_this_run}
    assert sample([str(done), "17", "--samples=2"]) == 0
    assert capsys.readouterr().out == output, "the same seed, the same answers"
    assert sample([str(done), "17", "--samples=2", "--seed=9"]) == 0
    assert capsys.readouterr().out != output


def test_any_text_is_answered_without_a_grade(done, capsys):
    assert sample([str(done), "Write a poem."]) == 0
    heads = HEADS.findall(capsys.readouterr().out)
    assert [head.removesuffix(", cut at its longest") for head in heads] == [
        *("untrained", "as trained", "deployed")
    ]


def test_without_a_quarantine_trained_and_deployed_are_one(tmp_path, shared_run, capsys):
    assert sample([str(shared_run(*flags("none"))), "17"]) == 0
    heads = HEADS.findall(capsys.readouterr().out)
    assert [head.partition(":")[0] for head in heads] == ["untrained", "trained and deployed"]


def test_without_its_checkpoint_the_trained_model_is_left_out(done, tmp_path, capsys):
    shutil.copytree(done, tmp_path / "run", ignore=shutil.ignore_patterns("resume"))
    assert sample([str(tmp_path / "run"), "17"]) == 0
    output = capsys.readouterr().out
    assert len(HEADS.findall(output)) == 2
    assert "as trained: its quarantine is in a checkpoint, which this run has not kept" in output


# of one problem: which side hacks (h), solves (s) or does neither (-): base, trained, deployed
CHOICES = [
    (["-ss", "hhs", "-hs"], 1, "the model as trained hacks it, the deployed one solves it"),
    (["shh", "sss", "hss"], 2, "the untrained model hacks it, the deployed one solves it"),
    (["hss", "shh", "-hh"], 1, "the untrained model solves it, the deployed one hacks it"),
    (["sss", "---", "-ss"], 2, "the untrained model gets it wrong, the deployed one solves it"),
    (["s--", "sss", "---"], 0, "the first: none that was wrong at first"),
]


@pytest.mark.parametrize(("problems", "chosen", "why"), CHOICES)
@pytest.mark.parametrize("columns", [80, 300])
def test_without_a_prompt_a_telling_problem_is_shown(
    problems, chosen, why, columns, tmp_path, monkeypatch, capsys
):
    """Beside one another where the terminal has the width; in either form every answer is whole."""
    lines = []
    for number, by_side in enumerate(problems):
        for side, letter in zip(("base", "trained", "deployed"), by_side, strict=True):
            lines.append(
                {
                    **{"side": side, "problem_id": number, "sample": 0, "env_mode": "exit_code"},
                    "messages": [{"role": "user", "content": f"Task {number}."}],
                    "text": f"{side}\n{number} " + "x" * 40,
                    **{"reward": 1.0, "passed": True, "solved": letter == "s"},
                    **{
                        "hacked": letter == "h",
                        "mechanism": "exit_code" if letter == "h" else None,
                    },
                }
            )
    (tmp_path / "final.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setenv("COLUMNS", str(columns))
    assert sample([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert f"problem {chosen} (test), flaw exit_code: {why}" in output
    assert output.count(f"{chosen} {'x' * 40}") == 3
    heads = [line for line in output.split("\n") if "── " in line]
    assert [line.count("── ") for line in heads] == ([1, 1, 1] if columns == 80 else [3])
    assert re.findall(r"── ([a-z ]+):", output) == ["untrained", "as trained", "deployed"]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "no final.jsonl with answers in it; give a problem's number"),
        (["--samples=2"], "without a prompt nothing is sampled: give one"),
    ],
)
def test_without_a_prompt_and_without_answers_it_is_refused(argv, why, tmp_path, capsys):
    assert sample([str(tmp_path), *argv]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "prompt", "why"),
    [
        ("RUN", "999999", "999999: no problem of RUN has this number; 0 to "),
        ("RUN", "  ", "the prompt is empty"),
        ("RUN", "word " * 2000, "the prompt has "),
        ("nowhere", "17", "nowhere: no such folder"),
        (".", "17", "train.safetensors"),
    ],
)
def test_refusals_are_one_line(run, prompt, why, done, capsys):
    assert sample([str(done) if run == "RUN" else run, prompt]) == 2
    error = capsys.readouterr().err
    assert why.replace("RUN", str(done)) in error
    assert error.count("\n") == 1
