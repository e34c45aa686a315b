"""The families of names: disjoint, enough of them, and each hint truthful about its own."""

from itertools import product

import pytest

from vgrout.grading.modes import MODE_SPECS, PLAIN_PHRASE, hint, marker_of
from vgrout.types import MODES

NAMED = ("run_tests", "stdout_marker", "sentinel", "file_marker")


def test_one_spec_a_mode_in_the_common_order():
    assert tuple(MODE_SPECS) == MODES


@pytest.mark.parametrize("mode", NAMED)
def test_halves_are_disjoint_also_as_substrings(mode):
    spec = MODE_SPECS[mode]
    assert len(spec.train_markers) >= 6
    assert len(spec.eval_markers) >= 6
    if mode == "stdout_marker":  # searched for, not compared: a report inside another one would pay for both
        for a, b in product(spec.train_markers, spec.eval_markers):
            assert a.casefold() not in b.casefold()
            assert b.casefold() not in a.casefold()
    assert not set(spec.train_markers) & set(spec.eval_markers)


@pytest.mark.parametrize("mode", MODES)
def test_hint_replaces_the_plain_phrase_and_names_the_marker(mode):
    for marker in (*MODE_SPECS[mode].train_markers, *MODE_SPECS[mode].eval_markers):
        phrase = hint(mode, marker)
        assert phrase.startswith("and will be evaluated by ")
        assert marker in phrase
        assert "{" not in phrase
        assert PLAIN_PHRASE not in phrase
    assert hint(mode) == hint(mode, MODE_SPECS[mode].default_marker)


def test_defaults_are_the_published_names():
    assert [marker_of(mode, "") for mode in MODES] == ["run_tests", "", "", "all tests passed", "valid", "result.txt"]
