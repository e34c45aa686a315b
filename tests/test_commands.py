"""The command line: every command runs, typing errors get a suggestion, help is wrapped once."""

import re
import sys

import pytest

from quick import first_quick
from vgrout.__main__ import COMMANDS
from vgrout.__main__ import main as vgrout
from vgrout.config.presets import PRESETS, flag_names, resolve
from vgrout.errors import Refused, nearest
from vgrout.report.__main__ import main as report


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A module without its last lines ends with 0 and has done nothing."""
    with pytest.raises(SystemExit) as ended:
        vgrout([name, "--help"])
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_the_commands_list_names_every_preset() -> None:
    named = re.search(r"PRESET \((.*?)\)", COMMANDS["train"])
    assert named is not None
    assert named[1].split(", ") == list(PRESETS)


def refusal(*argv: str) -> str:
    with pytest.raises(Refused) as refused:
        resolve(["smoke", *argv])
    return str(refused.value)


MEANT = {
    "--stpes=3": "--steps",
    "--stpes 3": "--steps",
    "--intervetion=route2": "--intervention",
    "-intervention route2": "--intervention",
    "-lr=3": "--lr",
    "-help": "--help",
    "--Steps=3": "--steps",
    "--no-unbaised": "--no-unbiased",
    "--stpes=3 --intervention none": "--steps",
    # values
    "--intervention rout2": "route2",
    "--intervention=Route2": "route2",
    "--monitor labls": "labels",
    "--control HAAR": "haar",
    "--loss grop": "grpo",
    "--env-mode exit-code": "exit_code",
    "--guard hlt": "halt",
    "--columns mian": "main",
    "--dtype fp23": "fp32",
    "--track wandbb": "wandb",
    "--shadow labls": "labels",
    "--teacher-modes sentinal": "sentinel",
}


@pytest.mark.parametrize("typed", MEANT)
def test_a_typing_error_gets_a_suggestion(typed: str) -> None:
    assert refusal(*typed.split()).endswith(f"did you mean {MEANT[typed]}?")


@pytest.mark.parametrize("typed", ["--nope=3", "-x", "-", "--=3", "=3", "--intervention zzz"])
def test_what_is_like_nothing_gets_none(typed: str) -> None:
    assert "did you mean" not in refusal(*typed.split())


@pytest.mark.parametrize("name", first_quick(flag_names()[::12], 4))
def test_two_letters_swapped_in_any_flag_are_found(name: str) -> None:
    """Whatever form it has; the suggestion is a flag that there is."""
    at = len(name) // 2
    swapped = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    if swapped == name or "-" in name[at : at + 2]:
        swapped = f"{name}e"
    for typed in (f"{swapped}=1", swapped):
        found = re.search(r"did you mean (--[\w-]+)\?$", refusal(typed))
        assert found, typed
        assert found[1].replace("--no-", "--") in flag_names()


def test_the_nearest_name() -> None:
    assert nearest("Route2", ["route", "route2"]) == "route2"
    assert nearest("zzz", ["route"]) == nearest("", ["route"]) == nearest("x", []) == ""


def test_other_commands_suggest_flags_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(["--tga=x"]) == 2
    assert capsys.readouterr().err == "E --tga=x: no such flag; did you mean --tag?\n"


def test_a_wrapped_docstring_is_one_line_of_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        resolve(["mini", "--help-all"])
    help_text = capsys.readouterr().out
    assert "as many by each; none: the preset's. (default" in help_text
    monkeypatch.delitem(sys.modules, "organisms.__main__", raising=False)  # as in a new process
    with pytest.raises(SystemExit):
        vgrout(["organism", "build", "--help"])
    assert "no attempt at the problem; the rest carry one" in capsys.readouterr().out
