"""The families of names: disjoint, enough of them, and each hint truthful about its own."""

from itertools import product

import pytest

from vgrout.envs.code.modes import (
    MODE_SPECS,
    MODES,
    PLAIN_PHRASE,
    hint,
)

from .test_matrix import NAMED


def test_the_order_decides_the_flaw_of_a_problem_without_one():
    """As in recorded runs."""
    assert [spec.code for spec in MODE_SPECS.values()][:6] == ["rt", "eq", "xc", "so", "se", "fm"]


@pytest.mark.parametrize("mode", NAMED)
def test_the_halves_of_a_family_are_disjoint_even_as_substrings(mode):
    spec = MODE_SPECS[mode]
    assert len(spec.train_markers) >= 6
    assert len(spec.eval_markers) >= 6
    # searched for, not compared: a phrase inside another would be accepted for both
    if spec.marker_form == "phrase":
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
