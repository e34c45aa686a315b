"""`import vgrout` in a notebook: light, typed, and the scripts of examples/ as they stand."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vgrout
from fake_runs import fake_run
from quick import first_quick
from runs import SMALL
from vgrout.config.cli import argv_of
from vgrout.ground.io import Diverged, Halted, Refused
from vgrout.runs.run_dir import STATES

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


def test_importing_loads_nothing_heavy():
    heavy = "{'torch', 'numpy', 'tyro', 'pandas'}"
    code = f"import sys, vgrout; print(len({{m.split('.')[0] for m in sys.modules}} & {heavy}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "0\n"


def test_public_names():
    for name in vgrout.__all__:
        assert getattr(vgrout, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'train_model'"):
        _ = vgrout.train_model


@pytest.mark.long
def test_a_run_as_frames(shared_run, tmp_path):
    small = [*SMALL, "--threads=1", "--steps=2", "--eval-ablate-every=1"]
    run = vgrout.load_run(shared_run("smoke", "--intervention=route", *small))
    assert run.status["state"] == "finished"
    assert run.config.method.intervention == "route"
    assert list(run.steps["step"]) == [0, 1]
    student = run.rollouts.groupby("step")["hacked"]
    assert list(student.sum()) == list(run.steps["hack_s_k"])
    assert list(student.mean()) == pytest.approx(list(run.steps["hack_s"]))
    assert run.answers.groupby("side")["hacked"].mean()["deployed"] == pytest.approx(
        run.final["hack_deploy"]
    )
    assert run.plot()._repr_png_() == (run.path / "dynamics.png").read_bytes()
    (verdict,) = (line for line in repr(run).splitlines() if line.startswith("verdict: "))
    title = (run.path / "summary.md").read_text().partition("\n")[0]
    assert verdict.removeprefix("verdict: ") in title
    with pytest.raises(ValueError, match=r"no run\.json in it"):
        vgrout.load_run(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lr": -1}, "--lr -1"),
        ({"dry_run": True}, "makes no run"),
        ({"seed": ["1", "2"]}, "--seed"),
        ({"steps": np.arange(2)}, "--steps"),
        (
            {"model": "organism", "problems": "x.jsonl"},
            "--problems x.jsonl: no such file",
        ),
    ],
)
def test_a_refused_call_starts_nothing(flags, message, here):
    with pytest.raises(ValueError, match=message) as refused:
        vgrout.train_run("smoke", **flags)
    assert "\n" not in str(refused.value)
    assert not list(here.glob("out/runs/*"))


def test_keywords_are_a_command_line():
    flags = {"intervention": "route2", "random_flags": True, "rebaseline": False, "resume": None}
    assert argv_of(flags) == ["--intervention=route2", "--random-flags", "--no-rebaseline"]
    given = {"seed": np.int64(3), "lr": np.float64(0.5), "steps": torch.tensor(4), "group": True}
    given |= {"teacher_modes": ["a", "b"], "reward": (Path("x"), "y"), "out_tag": None}
    assert argv_of(given) == [
        *("--seed=3", "--lr=0.5", "--steps=4", "--group"),
        *("--teacher-modes=a,b", "--reward=x,y"),
    ]
    assert argv_of({"teacher_modes": []}) == ["--teacher-modes="]


@pytest.mark.parametrize(
    ("code", "raised"),
    first_quick(
        [
            (1, ZeroDivisionError("division by zero")),
            (3, Halted("the guard")),
            (4, Diverged("a NaN")),
            (130, KeyboardInterrupt()),
        ],
        2,
    ),
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else str(x),
)
def test_a_run_that_failed_says_why(code, raised, here, monkeypatch):
    """Whatever ended the run is the cause of RunFailed, and its code that of the command."""

    def fails(*_):
        raise raised

    monkeypatch.setattr("vgrout.train.train", fails)
    with pytest.raises(vgrout.RunFailed) as failed:
        vgrout.train_run("smoke", intervention="none", quiet=True)
    assert failed.value.__cause__ is raised
    assert failed.value.code == code
    assert failed.value.run.status["state"] in STATES


def test_a_resume_that_is_refused_is_a_wrong_call_and_no_run_that_failed(tmp_path, monkeypatch):
    def launch(train, cfg, on_run, named):
        on_run(SimpleNamespace(path=tmp_path, error=Refused("changed since: problems")))
        return 2

    monkeypatch.setattr("vgrout.api.launch", launch)
    with pytest.raises(
        ValueError, match=r"\Asmoke: refused while it was loaded: changed since: problems\Z"
    ):
        vgrout.train_run("smoke", quiet=True, resume=tmp_path)


@pytest.mark.long
def test_a_quiet_run_prints_nothing(tmp_path, monkeypatch, capfd, shared_run):
    monkeypatch.chdir(shared_run.warm(tmp_path))
    small = {
        name.removeprefix("--").replace("-", "_"): int(n)
        for name, n in zip(SMALL[::2], SMALL[1::2], strict=True)
    }
    run = vgrout.train_run(
        "smoke", quiet=True, intervention="none", threads=1, **(small | {"steps": 1})
    )
    assert capfd.readouterr() == ("", "")
    (log,) = Path("logs").iterdir()
    assert "verdict: " in log.read_text()
    assert run.status["state"] == "finished"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("status.json", None, "no status.json"),
        ("status.json", '{"state": "running", "step": 4, "next": "go"}', "stopped at step 4"),
        ("status.json", '{"state": "failed", "step": 4, "reason": "a\\n\\u001b<i>"}', "4 steps: a"),
        ("per_mode_deploy.json", '{"hack_base": "<i>", "solve_base": 1}', "finished"),
        ("summary.md", "\x1b<i>\u202e", "finished"),
    ],
)
def test_a_run_is_shown_whatever_its_files_say(file, text, said, tmp_path):
    path = fake_run(tmp_path, "--intervention=none")
    if text is None:
        (path / file).unlink()
    else:
        (path / file).write_text(text)
    shown = repr(vgrout.load_run(path))
    assert said in shown
    assert not {"\x1b", "\u202e"} & set(shown)


def test_a_plot_needs_steps_and_no_final_evaluation(tmp_path):
    path = fake_run(tmp_path, "--intervention=route2", onset=4)
    curves = len(vgrout.load_run(path).plot().axes[0].lines)
    for name in ("per_mode_deploy.json", "final.jsonl"):
        (path / name).unlink()
    run = vgrout.load_run(path)
    figure = run.plot()
    (axes,) = figure.axes
    hacks, _ = axes.lines[:2]
    assert list(hacks.get_ydata())[:2] == [0.0] * 2, "a mean over two steps on either side"
    assert hacks.get_ydata()[-1] == 1.0
    assert 2 <= len(axes.lines) < curves
    assert "no final evaluation" in axes.get_title(loc="left")
    assert figure._repr_png_().startswith(b"\x89PNG")
    (path / "steps.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"steps\.jsonl"):
        vgrout.load_run(path).plot()


def test_the_example_reads_a_sweep_whose_runs_lie_elsewhere(here, monkeypatch, capsys):
    run = fake_run(Path("out/runs"), "--intervention=none")
    Path("out/sweeps/two").mkdir(parents=True)
    runs = [
        {"name": "a", "state": "finished", "run": str(run)},
        {"name": "b", "state": "to do", "run": None},
    ]
    Path("out/sweeps/two/runs.json").write_text(json.dumps(runs))
    (script,) = (p for p in EXAMPLES if p.stem == "read_a_study")
    monkeypatch.setattr(sys, "argv", [str(script), "out/sweeps/two"])
    runpy.run_path(str(script))
    assert "30 of 60 deployed answers hack the flaw." in capsys.readouterr().out


OWN = ("own_intervention", "own_monitor")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(p, marks=pytest.mark.long if p.stem in OWN else pytest.mark.slow, id=p.stem)
        for p in EXAMPLES
        if p.stem != "own_taskset"  # needs verifiers: tests/test_verifiers.py
    ],
)
def test_examples_run(script, tmp_path):
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
