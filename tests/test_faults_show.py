"""In every command a fault shows its traceback, and keeps what was written; a mistake is one line."""

import importlib
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

import vgrout
from fake_runs import fake_run
from quick import first_quick
from runs import only_run, status
from vgrout.__main__ import COMMANDS
from vgrout.config.cli import cli_exit
from vgrout.ground.io import PACKAGE, Refused, is_own
from vgrout.train import main as train

TITLE = "Traceback (most recent call last):"
# as of a file of this package, so that no frame is somebody's own
SLIP_FILE = PACKAGE / "slip.py"
SLIP = "def slip(*_, **__):\n    raise ValueError('slip')\n"
HERE = f'File "{SLIP_FILE}", line 2, in slip'


def slip():
    """A function of this package that has a slip."""
    names = {}
    exec(compile(SLIP, str(SLIP_FILE), "exec"), names)
    return names["slip"]


def call(name, argv, monkeypatch):
    """Exit code of a command in this process."""
    module, _, function = COMMANDS[name][0].partition(":")
    monkeypatch.setattr("sys.argv", [name, *argv])
    return getattr(importlib.import_module(module), function)()


# command: the function of ours with the slip, and a command line that comes to it
WITH_A_SLIP = {
    "train": ("vgrout.runs.launch.preflight", ["smoke"]),
    "evaluate": ("vgrout.commands.evaluate.find_adapter", ["run"]),
    "sample": ("vgrout.commands.evaluate.find_adapter", [".", "17"]),
    "export": ("vgrout.export.__main__.export_run", ["run", "--out", "new"]),
    "sweep": ("vgrout.sweep.runner.load_study_file", ["study.toml"]),
    "report": ("vgrout.report.__main__.require_own", ["."]),
    "scorecard": ("vgrout.scorecard.__main__.plan", []),
    "direction": ("vgrout.direction.__main__._pairs_of", ["--model", "organism"]),
    "teacher": ("vgrout.teacher.__main__.require_new", ["--model", "organism", "--out", "new"]),
    "substrate": ("vgrout.teacher.substrate.require_new", ["--model", "organism", "--out", "new"]),
    "distill": ("vgrout.commands.distill.prepare_distillation", ["--teacher", "organism"]),
    "iterative_dpo": (
        "vgrout.commands.iterative_dpo.prepare_rounds",
        ["--base-model", "organism", "--output-dir", "new"],
    ),
    "problems": ("vgrout.commands.check.code_tools", ["check", "problems.jsonl"]),
    "grade": (
        "vgrout.commands.check.code_tools",
        "answers.jsonl --problems problems.jsonl --out new".split(),
    ),
    "organism": ("organisms.__main__.Files", ["verify"]),
    "download": ("vgrout.commands.download.require_gguf", ["gguf", "x"]),
    "doctor": ("vgrout.commands.doctor.code_tools", []),
}


def test_every_command_is_in_the_table():
    assert WITH_A_SLIP.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_slip_of_ours_shows_file_and_line(
    name,
    here,
    monkeypatch,
    capsys,
):
    Path("answers.jsonl").touch()
    target, argv = WITH_A_SLIP[name]
    module, _, attribute = target.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), attribute, slip())
    assert call(name, argv, monkeypatch) == 1
    shown = capsys.readouterr().err.strip().splitlines()
    assert shown[0] == TITLE
    assert "cli.py" in shown[1], "all of it"
    assert shown[-3].strip() == HERE or shown[-2].strip() == HERE
    assert shown[-1] == "ValueError: slip"


def test_a_slip_in_a_settings_class_is_none_of_the_parsers_errors(here, monkeypatch, capsys):
    monkeypatch.setattr("vgrout.commands.evaluate.check", slip())
    assert call("evaluate", ["run"], monkeypatch) == 1
    assert HERE in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (Refused("--lr 0: too low"), 2, "E --lr 0: too low\n"),
        (KeyboardInterrupt(), 130, "E interrupted\n"),
        (MemoryError(), 1, "E out of memory on the host; take a smaller model or fewer and"),
        (PermissionError(13, "no", "x"), 2, "E x: cannot be opened (no); choose another\n"),
    ],
)
def test_what_is_no_fault_is_one_line(raised, code, says, capsys):
    names = {"raised": raised}
    exec(compile("def ours():\n    raise raised\n", str(SLIP_FILE), "exec"), names)
    assert cli_exit(names["ours"]) == code
    err = capsys.readouterr().err
    assert err.startswith(says)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("slip"),
        SystemExit(0),
        MemoryError(),
        PermissionError(13, "no", "x"),
        OSError(28, "No space left"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_somebodys_own_code_shows_its_traceback_whatever_it_raises(raised, capsys):
    def theirs():
        raise raised

    assert cli_exit(theirs) == 1
    title, *frames = capsys.readouterr().err.splitlines()
    assert title == TITLE
    assert any(frame.startswith(f'  File "{__file__}"') for frame in frames)


@pytest.mark.parametrize("program", ["benchmarks", "organisms", "studies.probe_mixed"])
def test_a_program_beside_the_package_shows_its_help(program, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [program, "--help"])
    for name in (program, f"{program}.__main__"):  # imported by another test
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as exits:
        runpy.run_module(program, run_name="__main__")
    assert exits.value.code == 0
    assert capsys.readouterr().err == ""


# ── classes and functions of somebody's own, in a run

MONITOR = """
from vgrout.method.base import Monitor, flags_of

class Mine(Monitor):
    name = what = "mine"
    {}
    flag = vars().get("flag", lambda self, views, step: flags_of(views, ()))
"""
INTERVENTION = """
from vgrout.method.base import Intervention

class Mine(Intervention):
    name = what = "mine"
    by_rollout = True
    {}
"""
INIT = "def __init__(self):\n        self.low, self.high = map(int, '1,2,3'.split(','))"
MAKE = "@classmethod\n    def make(cls, setup):\n        raise ValueError('slip')"
EXIT = "@classmethod\n    def make(cls, setup):\n        exit(0)"
FLAG = "def flag(self, views, step):\n        return views[99]"
ROUTE = "def route(self, step):\n        raise OSError(28, 'No space left')"
# flags; the module; the line with the slip; what it raises
OWN = {
    "__init__": (["--monitor"], MONITOR.format(INIT), 7, "ValueError: too many values to unpack"),
    "make": (["--monitor"], MONITOR.format(MAKE), 8, "ValueError: slip"),
    "exit": (["--monitor"], MONITOR.format(EXIT), 8, "SystemExit: 0"),
    "flag": (["--monitor"], MONITOR.format(FLAG), 7, "IndexError: "),
    "route": (["--intervention"], INTERVENTION.format(ROUTE), 8, "OSError: [Errno 28] No space"),
}
STARTS = ("flag", "route")


@pytest.fixture
def home(shared_run, tmp_path, monkeypatch):
    """A working directory from which modules are imported."""
    monkeypatch.chdir(shared_run.warm(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def begin(*argv):
    """A run of one step."""
    small = ["--steps=1", "--threads=1", "--n-problems=20", "--eval-ablate-every=0"]
    return train(["smoke", *small, *argv])


def own_module(home, text, request):
    """A module with this text, of a name that no test before it has imported."""
    name = "own_" + re.sub(r"\W", "_", request.node.name)
    (home / f"{name}.py").write_text(text)
    return name


@pytest.mark.parametrize("case", first_quick(sorted(OWN, key=lambda c: c in STARTS)))
def test_a_slip_in_a_class_of_ones_own_shows_their_traceback(
    case,
    home,
    request,
    capsys,
):
    (flag,), text, line, says = OWN[case]
    name = own_module(home, text, request)
    of = [] if flag == "--intervention" else ["--intervention=screen"]
    assert begin(*of, f"{flag}={name}:Mine") == 1
    out, err = capsys.readouterr()
    title, *_, last = err.strip().splitlines()
    assert title == TITLE
    assert f'{name}.py", line {line}, in ' in err
    assert last.startswith(says)
    assert "are kept" in out
    assert status(only_run(home))["state"] == "failed"
    assert status(only_run(home))["reason"].startswith(says)
    (log,) = home.glob("logs/*.log")
    assert f'{name}.py", line {line}, in ' in log.read_text()


# ── while a run is loading


def test_a_fault_while_loading_keeps_folder_and_log(home, monkeypatch, capsys):
    monkeypatch.setattr("vgrout.model.load.load.run_policy", slip())
    assert begin("--intervention=none") == 1
    assert HERE in capsys.readouterr().err
    run = only_run(home)
    assert (run / "run.json").is_file()
    end = status(run)
    assert (end["state"], end["step"], end["reason"]) == ("failed", 0, "ValueError: slip")
    (log,) = home.glob("logs/*.log")
    assert HERE in log.read_text()


def test_a_refusal_while_loading_removes_folder_and_log(home, monkeypatch, capsys):
    def refused(_):
        raise Refused("--model x: has no such thing")

    monkeypatch.setattr("vgrout.model.load.load.run_policy", refused)
    assert begin("--intervention=none") == 2
    assert capsys.readouterr().err == "E --model x: has no such thing\n"
    assert not [*home.glob("out/runs/*")]
    assert not [*home.glob("logs/*")]


# ── functions that are tried before a run, and a judge


@pytest.mark.parametrize(
    ("text", "line", "code", "last"),
    [
        ("def judge(found):\n    return 1 / 0", 2, 1, "ZeroDivisionError: division by zero"),
        ("def judge(found):\n    exit()", 2, 1, "SystemExit: None"),
        ("import sys\nsys.exit(0)", 2, 1, "SystemExit: 0"),
        ("def judge(found):\n    return []\nopen('none')", 3, 1, "FileNotFoundE"),
    ],
)
def test_a_judge_file_shows_where_it_raised(
    text,
    line,
    code,
    last,
    here,
    monkeypatch,
    capsys,
):
    fake_run(here / "runs", "--intervention=none")
    Path("own.py").write_text(text)
    assert call("report", ["runs", "--judge", "own.py"], monkeypatch) == code
    title, *frames, end = capsys.readouterr().err.strip().splitlines()
    assert title == TITLE
    assert f'own.py", line {line}, in ' in "".join(frames)
    assert end.startswith(last)


@pytest.mark.parametrize(
    ("flag", "text", "line", "says"),
    first_quick(
        [
            (
                "--scorer",
                "def f(prompt, answer):\n    raise ValueError('slip')",
                2,
                "raised ValueErr",
            ),
            ("--scorer", "\nraise ValueError('slip')", 2, "cannot be imported (ValueError: slip)"),
            (
                "--rm-ensemble-members",
                "def f(p, a):\n    return {}['x']",
                2,
                "raised KeyError: 'x'",
            ),
            ("--scorer", "def f(prompt):\n    return 1.0", 0, "raised TypeError: f() takes 1 pos"),
            (
                "--scorer",
                "def f(prompt, answer):\n    return 'x'",
                0,
                "returned str, not a number",
            ),
            ("--scorer", "def f(:", 0, "cannot be imported (SyntaxError"),
        ],
        5,
    ),
)
def test_a_function_that_is_tried_first_shows_where_it_raised_above_the_line(
    flag,
    text,
    line,
    says,
    home,
    request,
    monkeypatch,
    capsys,
):
    """line 0: nothing of theirs has raised, and one line says it."""
    name = own_module(home, text, request)
    if flag == "--scorer":
        command, argv = "iterative_dpo", ["--base-model=organism", "--output-dir=new"]
    else:
        members = ["--reward-hack-detector=rm_ensemble", "--rm-ensemble-members=json:dumps"]
        command, argv = "train", ["smoke", "--intervention=none", members[0]]
        name = f"{name}:f,{name}"
    assert call(command, [*argv, f"{flag}={name}:f"], monkeypatch) == 2
    *shown, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith(f"E {flag} ")
    assert says in last
    assert bool(shown) == bool(line)
    if line:
        assert shown[0] == TITLE
        assert f'.py", line {line}, in ' in "".join(shown)
    assert not Path("new").exists()


# ── what is not to be done again


def test_a_library_is_not_somebodys_own():
    assert is_own(__file__)
    for module in (json, os, pytest, vgrout):
        assert not is_own(str(module.__file__)), module.__name__
    assert not is_own("<string>")
