"""What a run is asked for at its start is what its files can say and its reports can read: numbers of tasks, names of
flaws, in every world."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pandas import DataFrame

from test_table import row
from vgrout.envs import worlds
from vgrout.envs.base import MOST_ID, OTHER_COLUMNS, require_recordable
from vgrout.envs.code.modes import MODE_SPECS
from vgrout.ground.data import Flaw
from vgrout.ground.io import Refused
from vgrout.ground.metrics import Rate
from vgrout.ground.table import StepRow
from vgrout.report.tables import _flag_columns, _scores


def world(flaws=(), numbers=(1,), codes=None):
    """An environment of one's own, and its tasks."""
    named = {}
    for name, code in zip(flaws, codes or flaws, strict=True):
        named[name] = Flaw(name=name, code=code, should="")
    environment = SimpleNamespace(name="own:Own", source="own:Own", flaws=named)
    return environment, [SimpleNamespace(id=number) for number in numbers]


def refusal(*given, **more):
    try:
        require_recordable(*world(*given, **more))
    except Refused as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((), "has no problems"),
        ((1, 2, 1), "problem 1: its id 1 is there already"),
        *(((wrong,), "whole number") for wrong in (-1, MOST_ID, 2**70, 1.0, True, "1", None)),
        ((0, MOST_ID - 1, 1_700_000_000_000_000), ""),
    ],
)
def test_numbers_of_tasks(numbers, said):
    found = refusal(numbers=numbers)
    assert said in found
    assert "\n" not in found
    assert bool(said) == bool(found)


NAMES = st.lists(
    st.sampled_from(["a", "a_k", "a_n", "a_k_k", "a_k_n", "ab", "top", "top_k", *OTHER_COLUMNS]),
    unique=True, min_size=1, max_size=5,
)  # fmt: skip


@given(NAMES)
@example(["a", "b"])
@example(["a_k"])
@example(["solved"])
def test_names_that_are_taken_are_columns_of_their_own(names):
    """In steps.jsonl, in runs.csv and on the page."""
    if refusal(names):
        stems = {re.sub(r"(_[kn])+$", "", name) for name in names}
        assert len(stems) < len(names) or {*names} & {*OTHER_COLUMNS}
        return
    hacks = {name: Rate(i, 10 + i) for i, name in enumerate(names)}
    step = row(hk=hacks)
    assert StepRow.from_json(step.as_json()).hk == hacks
    flags = DataFrame(
        [[None, True, 0.5], *([name, False, 0.5] for name in names)],
        columns=["flaw", "flagged", "score"],
    )
    columns = _flag_columns(flags, names)
    assert columns == {"flagged_solved": "1/1", **{f"flagged_{name}": "0/1" for name in names}}
    by_name = _scores(flags, names)
    assert by_name["recall"] == f"0.0 ({len(names)})"
    assert [by_name[name] for name in names] == ["0.0 (1)"] * len(names)
    low_and_high = {"hack_deploy_low", "hack_deploy_high"}
    assert not low_and_high & {f"hack_deploy_{name}" for name in names}


@pytest.mark.parametrize("name", ["", "A", "a b", "1a", "a,b", "é", "a" * 32, "_a"])
def test_names_of_flaws_have_a_form(name):
    assert "small letters" in refusal([name])


def test_codes_are_columns_too():
    assert "columns of the flaws a and b would be called alike" in refusal(
        ["a", "b"], codes=["x", "x"]
    )


def test_a_flaw_of_ones_own_may_have_the_name_of_one_of_the_code_world():
    """Its column is what its run has written."""
    facts = {"code": "sentinel", "should": "s", "pattern": ""}
    flaws = worlds.flaws_of({"flaws": {"sentinel": facts}})
    assert flaws["sentinel"].code == "sentinel"
    recorded = {"code": "se", "should": "s", "pattern": ""}
    assert worlds.flaws_of({"flaws": {"sentinel": recorded}})["sentinel"] is MODE_SPECS["sentinel"]
