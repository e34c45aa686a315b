"""The table of rows that is learnt from: which rollouts, at which advantage, under what, and in which row of g."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods import Fixed, batch, flat, gradient, group, step, toy, watched_by
from tiny import policy as tiny_policy
from tiny import relative, shake
from vgrout.ground.data import Batch, centred


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


ANSWER = st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.booleans(), st.booleans())


@given(st.lists(ANSWER, min_size=2, max_size=9))
def test_every_rollout_is_a_row_and_kept_advantages_sum_to_zero(answers):
    """Rollouts of one source that are learnt alike are one row of g."""
    rewards, flagged, deployed = zip(*answers, strict=True)
    seen = group(len(answers), teachers=1)
    rollouts = tuple(replace(r, deployed=d) for r, d in zip(seen.rollouts, deployed, strict=True))
    grades = tuple(
        replace(g, reward=reward) for g, reward in zip(seen.grades, rewards, strict=True)
    )
    method = toy("route2", monitor="labels")
    method.monitor = Fixed(*(b for b, flag in enumerate(flagged) if flag))
    method.view = lambda of, _=None: of.view()
    of = method.flag(Batch((replace(seen, rollouts=rollouts, grades=grades),), (), (), 9, 0))
    if len({*rewards}) == 1:
        assert of.rows == ()
        return
    assert [row.rollout for row in of.rows] == [*rollouts]
    assert [row.flagged for row in of.rows] == [*flagged]
    assert sum(row.advantage for row in of.rows if not row.flagged) == pytest.approx(0, abs=1e-9)
    alike = {(row.rollout.source, row.flagged): row.row_of_g for row in of.rows}
    assert [alike[row.rollout.source, row.flagged] for row in of.rows] == [
        row.row_of_g for row in of.rows
    ]
    assert sorted(alike.values()) == [*range(len(alike))]


@pytest.mark.parametrize("rebaseline", [True, False])
def test_a_new_baseline_compares_kept_rows_among_themselves(policy, rebaseline):
    of, learnt = step(
        policy, watched_by(Fixed(0), policy, "route2", rebaseline=rebaseline), batch()
    )
    own, A = of.groups[0].advantages, [row.advantage for row in of.rows if row.group == 0]
    assert A[0] == own[0]
    assert A[1:] == pytest.approx(centred(of.groups[0].rewards[1:]) if rebaseline else own[1:])
    assert learnt.measured["routed"] == 0.25
    assert learnt.flags[0].shares == (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("rebaseline", [True, False])
def test_under_a_gate_rows_other_than_known_hacks_are_compared_among_themselves(rebaseline):
    """… and every rollout has a row of g to itself."""
    of = group(6, 1, caught=(2,))
    rows = toy("route2", rebaseline=rebaseline).flag(Batch((of,), (), (), 6, 0)).rows
    own = iter(centred([r for b, r in enumerate(of.rewards) if b not in (2, 5)]))
    among = tuple(of.advantages[b] if b in (2, 5) else next(own) for b in range(6))
    assert tuple(row.advantage for row in rows) == (among if rebaseline else of.advantages)
    assert [row.row_of_g for row in rows] == [*range(6)]
    assert [row.known_hack for row in rows] == [b in (2, 5) for b in range(6)]


def test_each_row_is_learnt_from_under_what_sampled_it(policy):
    """The deployed model's own rows with the quarantine off, all others with it on."""
    shake(policy.adapter, 0.3)
    with_it, mixed = (batch(deployed=deployed).groups for deployed in ((), (0, 2)))
    with policy.adapter.deployed():
        without = gradient(policy, with_it, (0, 2))
    assert relative(gradient(policy, mixed, (0, 2)), without) < 1e-6
    assert relative(gradient(policy, mixed, (1, 3)), gradient(policy, with_it, (1, 3))) < 1e-6
    assert relative(gradient(policy, with_it, (0, 2)), without) > 1e-2, (
        "or there would be nothing to see"
    )


def test_all_rows_flagged_leave_nothing_for_the_kept_part(policy):
    _, learnt = step(
        policy, watched_by(Fixed(0, 1, 2, 3), policy, "route2", quarantine="shared"), batch()
    )
    assert learnt.keep is not None, "a split gradient steps both, as plain GRPO would"
    assert not learnt.keep.any()
    assert relative(flat(policy, learnt.quar), gradient(policy, batch().groups)) < 1e-5


@pytest.mark.parametrize(
    ("place", "block"), [("block:2", ".layers.1."), ("block:-2", ".layers.0.")]
)
def test_in_a_block_of_its_own_the_quarantine_learns_there_alone(policy, place, block):
    method = watched_by(Fixed(0, 2), policy, "route2", quarantine=place)
    _, learnt = step(policy, method, batch())
    for m, span in method.spans.items():
        assert bool(learnt.keep[span].any()) == (block not in m), m
        assert bool(learnt.quar[span].any()) == (block in m), m
