"""A run's folder and a study of somebody else run no code, unless --trust-code is given."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fake_runs import fake_run
from quick import first_quick
from vgrout.commands.evaluate import evaluate, sample
from vgrout.export.__main__ import main as export
from vgrout.ground.io import Refused
from vgrout.report.__main__ import main as report
from vgrout.sweep.__main__ import main as sweep
from vgrout.train import main as train

PLAIN = {"intervention": "none", "mix_ratio": 0.0, "teacher_pool_dir": ""}
# where a file can name code → the settings that do
WORLDS = {
    "reward": {"reward": "theirs:f"},
    "reference": {"reward": "theirs:f", "reference": "theirs:g", "problems": "rows.jsonl"},
    "env": {"env": "theirs:Env"},
}
METHODS = {
    "members": {"reward_hack_detector": "rm_ensemble", "rm_ensemble_members": "theirs:f,theirs:g"},
    "intervention": {"intervention": "theirs:Own"},
    "monitor": {"intervention": "penalty", "monitor": "theirs:Own"},
    "seed_monitor": {
        "intervention": "penalty",
        "monitor": "online_probe",
        "seed_monitor": "theirs:Own",
    },
    "shadow": {"shadow": "labels,theirs:Own"},
}
PLACES = WORLDS | METHODS
TASKSET = {"env": "verifiers:theirs", "reference": "once"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a module that leaves a file where it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("theirs", None)
    (tmp_path / "theirs.py").write_text("open('imported', 'w').close()\n")
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "prompt": "Sing."}\n')
    return tmp_path


def their_run(folder, settings):
    """An interrupted run with a saved adapter, whose files name code."""
    path = fake_run(folder, "--intervention=none", state="interrupted")
    record = json.loads((path / "run.json").read_text())
    config = record["config"]
    for name, value in (PLAIN | settings).items():
        (group,) = (of for of in config.values() if isinstance(of, dict) and name in of)
        group[name] = value
    (path / "run.json").write_text(json.dumps(record))
    metadata = {"cfg": json.dumps(config), "step": "1"}
    save_file({"δS": torch.zeros(1)}, path / "train.safetensors", metadata)
    return str(path)


def their_study(folder, settings):
    file = folder / "study.toml"
    flags = [
        f"{name.replace('_', '-')} = {json.dumps(value)}"
        for name, value in (PLAIN | settings).items()
    ]
    file.write_text('preset = "mini"\nseeds = [1]\n[[arms]]\n' + "\n".join(flags) + "\n")
    return str(file)


def call(command, folder, settings, *more):
    """The exit code of a command on these settings."""
    if command == "sweep":
        return sweep([their_study(folder, settings), "--dry-run", *more])
    run = their_run(folder, settings)
    if command == "resume":
        return train(["mini", f"--resume={run}", *more])
    if command == "evaluate":
        return evaluate([run, *more])
    return sample([run, "1", *more])


CASES = [(command, place) for command in ("sweep", "resume") for place in PLACES]
CASES += [(command, place) for command in ("evaluate", "sample") for place in WORLDS]


@pytest.mark.parametrize(("command", "place"), CASES)
def test_what_a_file_names_is_imported_where_it_is_trusted_alone(command, place, folder, capsys):
    assert call(command, folder, PLACES[place]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "=theirs:" in line
    assert line.endswith("; if you trust it, add --trust-code")
    assert not Path("imported").exists()
    assert call(command, folder, PLACES[place], "--trust-code") == 2
    assert "cannot be imported" in capsys.readouterr().err, "theirs has nothing in it"
    assert Path("imported").exists()


@pytest.mark.parametrize("command", ["sweep", "resume", "evaluate", "sample"])
def test_a_taskset_is_code(command, folder, capsys):
    assert call(command, folder, TASKSET) == 2
    assert "names code, --env=verifiers:theirs; if you" in capsys.readouterr().err
    assert not Path("imported").exists()


@pytest.mark.parametrize("place", first_quick(PLACES, 2))
def test_what_is_read_without_its_code_needs_no_trust(place, folder, monkeypatch):
    """Monitors and interventions are of training alone; an export, a report and a text to answer ask for no code."""
    loaded = []

    def load(saved, *_, **__):
        loaded.append(saved)
        raise Refused("as far as the model")

    monkeypatch.setattr("vgrout.loop.heldout.policy_of", load)
    monkeypatch.setattr("vgrout.model.load.load.load_saved", load)
    run = their_run(folder, PLACES[place])
    assert sample([run, "Sing."]) == export([run, "--out", "model"]) == 2
    if place in METHODS:
        assert evaluate([run, "--allow-weak-sandbox"]) == 2
    assert len(loaded) == 2 + (place in METHODS)
    assert report([run, "--out", "page"]) == 2, "it did not finish"
    assert not Path("imported").exists()


def test_a_study_cannot_trust_itself(folder):
    assert sweep([their_study(folder, PLACES["env"] | {"trust_code": True}), "--dry-run"]) == 2
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [(sweep, "--shadow"), (sweep, "--reward"), (sample, "--env"), (evaluate, "--env")],
)
def test_a_flag_that_named_it_once_more_is_answered(command, name, capsys):
    assert command(["x", *(["y"] if command is sample else []), f"{name}=own:X"]) == 2
    assert capsys.readouterr().err == f"E {name}: not here; the files name it; say --trust-code\n"
