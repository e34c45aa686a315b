"""The command line: every command runs, typing errors get a suggestion."""

import re

import pytest

from vgrout.__main__ import COMMANDS
from vgrout.config.presets import PRESETS, resolve
from vgrout.ground.io import Refused, nearest


def test_the_commands_list_names_every_preset():
    named = re.search(r"PRESET \((.*?)\)", COMMANDS["train"][1])
    assert named[1].split(", ") == list(PRESETS)


def refusal(*argv):
    with pytest.raises(Refused) as refused:
        resolve(["smoke", *argv])
    return str(refused.value)


MEANT = {
    "--stpes 3": "--steps",
    "--stpes 3 --intervention none": "--steps",
    "--temprature=3": "--temperature",
    "--stpes=3": "--steps",
    "--intervention rout2": "did you mean route2?",
    "--intervention=Route2": "did you mean route2?",
    "--monitor labls": "did you mean labels?",
    "--control HAAR": "did you mean haar?",
    "--track wandbb": "did you mean wandb?",
    "--shadow labls": "did you mean labels?",
    "--teacher-modes sentinal": "did you mean sentinel?",
    "--loss grop": "grpo",
    "--guard hlt": "halt",
    "--steps x": "--steps",
    "--nope": "smoke --help",
}


@pytest.mark.parametrize("typed", MEANT)
def test_a_typing_error_is_told_what_was_probably_meant(typed):
    said = refusal(*typed.split())
    assert MEANT[typed] in said
    assert "│" not in said


def test_the_nearest_name():
    assert nearest("Route2", ["route", "route2"]) == "route2"
    assert nearest("zzz", ["route"]) == nearest("", ["route"]) == nearest("x", []) == ""
