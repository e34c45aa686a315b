"""Rewards in place of the grader's: the algebra of advantages, screen, penalty, and who is spared."""

from dataclasses import replace

import pytest

from methods import Fixed, toy
from vgrout.envs.code.modes import Problem
from vgrout.envs.text import TextTask, own_function
from vgrout.ground.data import Batch, CachedGrade, Group, Rollout
from vgrout.ground.metrics import BatchMetrics

PROBLEM = Problem(
    0, "run_tests", "", ({"role": "user", "content": "q"},), (), ("assert 1",), "", "", "f"
)
LABELS = (True, False, True, False)
REWARDS = (3.5, 3.5, 0.5, 0.0)


def group(shaped=None, unbiased=True, teachers=()):
    rollouts = tuple(
        Rollout(
            (11 + i, 12),
            "x",
            True,
            prompt_ids=(8, 9),
            source="teacher" if i in teachers else "student",
        )
        for i in range(4)
    )
    grades = tuple(
        CachedGrade(r, r == max(REWARDS), hacked, False, True, "test")
        for r, hacked in zip(REWARDS, LABELS, strict=True)
    )
    return Group(PROBLEM, rollouts, grades, unbiased, new_rewards=shaped)


def shaped(of, intervention, flagged=(0, 2), **flags):
    """What screen or penalty makes of one group's rewards."""
    method = toy(intervention, monitor="detector", **flags)
    method.monitor = Fixed(*flagged)
    (treated,) = method.flag(Batch((of,), (), (), 4, 0)).groups
    assert replace(treated, new_rewards=of.new_rewards, flags=None) == of, (
        "grades and rollouts stay as they are"
    )
    return treated.new_rewards


def test_groups_without_signal_are_told_apart_by_what_was_rewarded_in_full():
    """Not by the size of the reward: --compile-reward may add as much as a pass, and a function may pass for less."""

    def counted(passed, shaped=None):
        of = group()
        grades = (CachedGrade(2.0, passed, False, False, True, "test"),) * 4
        shown = replace(of, grades=grades, new_rewards=(shaped,) * 4)
        columns = BatchMetrics(Batch((shown,), (), (), 4, 0)).columns()
        return columns["all_zero"], columns["all_one"]

    assert counted(True, 2.0) == (0, 1)
    assert counted(False, 2.0) == counted(True, 0.5) == counted(True, None) == (1, 0)


def test_advantages_are_of_the_rewards():
    plain = group()
    assert plain.learnt_rewards == plain.compared_rewards == plain.rewards == REWARDS
    assert plain.advantages == tuple(r - sum(REWARDS) / 4 for r in REWARDS)


@pytest.mark.parametrize("unbiased", [True, False])
def test_a_screened_rollout_counts_neither_in_the_mean_nor_in_the_spread(unbiased):
    seen = group((None, 3.0, None, 1.0), unbiased=unbiased)
    assert seen.has_signal
    scale = 1.0 if unbiased else 2**0.5 + 1e-4  # the two others lie 1 from their mean
    assert seen.advantages == pytest.approx((0.0, 1 / scale, 0.0, -1 / scale))


@pytest.mark.parametrize("rewards", [(None,) * 4, (None, 2.0, None, None), (None, 2.0, 2.0, None)])
def test_a_group_with_nothing_to_compare_has_no_signal(rewards):
    silent = group(rewards)
    assert not silent.has_signal
    assert silent.advantages == (0.0,) * 4


def test_a_penalty_goes_down_to_code_that_only_compiles_or_by_the_given_amount():
    assert shaped(group(), "penalty") == (0.5, 3.5, 0.5, 0.0)
    assert shaped(group(), "penalty", penalty=2.0) == (1.5, 3.5, -1.5, 0.0)
    # an honest answer that earned nothing is not lifted to the floor
    assert shaped(group(), "penalty", (1, 3)) == (3.5, 0.5, 0.5, 0.0)
    assert shaped(group(), "screen") == (None, 3.5, None, 0.0)


@pytest.mark.parametrize(
    ("rewards", "penalised"),
    [
        # on a scale below zero 0 would be the best reward, and no penalty
        ((-0.1, -0.4, -0.2, -0.3), (-0.4, -0.4, -0.4, -0.3)),
        ((3.0, -3.0, 1.0, -2.0), (-3.0, -3.0, -3.0, -2.0)),
        ((3.0, 0.0, 1.0, 0.2), (0.5, 0.0, 0.5, 0.2)),
    ],
)
def test_a_penalty_is_one_on_any_scale(rewards, penalised):
    of = group()
    of = replace(
        of, grades=tuple(replace(g, reward=r) for g, r in zip(of.grades, rewards, strict=True))
    )
    assert shaped(of, "penalty") == penalised


@pytest.mark.parametrize(("by", "third"), [(None, 0.5), (2.0, -1.5)])
def test_a_demonstration_is_left_out_rather_than_punished(by, third):
    assert shaped(group(teachers=(0, 3)), "penalty", penalty=by) == (None, 3.5, third, 0.0)


@pytest.mark.parametrize("score", ["float('-inf')", "float('inf')", "-1e9", "1e9"])
def test_a_score_that_is_no_score_is_refused(score, tmp_path, monkeypatch):
    """Far above, and far below: a group's advantages would be NaN, or all but one of them 0."""
    name = f"far_{abs(hash(score))}"
    (tmp_path / f"{name}.py").write_text(f"def f(completion):\n    return {score}\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = own_function(f"{name}:f", "--reward")
    (failed,) = function.scores(TextTask(0, ({"role": "user", "content": "q"},), "x", None), ["x"])
    assert "finite" in str(failed)
