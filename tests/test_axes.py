"""Arms that read flags, on a tiny model: what each vector learns, under which parameters, where the quarantine lives.

Whole runs of the same pairs are in tests/golden.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vgrout.arms.base import Arm, module_sizes
from vgrout.arms.flagged import SGTM, FlaggedArm, FlaggedRoute2
from vgrout.arms.recontextualise import Recontextualise
from vgrout.arms.reward_shaping import Penalty, Screen
from vgrout.monitors import monitor_class
from vgrout.monitors.base import Monitor
from vgrout.monitors.flag_rates import FlagRates
from vgrout.monitors.labels import Labels
from vgrout.monitors.quarantine import Quarantine

from test_arms import arm_of
from test_grpo import MAX_NEW, groups, relative, shake
from test_monitors import Marked, graded, labelled
from test_monitors import view as seen
from tiny import policy as tiny_policy
from vgrout.config.loss import LossConfig
from vgrout.config.method import MONITORS
from vgrout.config.run import OptConfig
from vgrout.grpo import policy_gradients
from vgrout.model.policy import Policy, modules_of_block
from vgrout.optim import Optimizer
from vgrout.tensor_types import Routed, UpdatePart, UpdatePlan
from vgrout.types import Batch, Grade, Group, GroupFlags, GroupView, Rate, centred

SETTINGS: dict[str, Any] = {"max_new": MAX_NEW, "prompts_per_step": 2}
SIZES = {"a": 3, "b": 2}


class Fixed(Monitor):
    """Flags the rows that it is told to, in every group."""

    def __init__(self, *rows: int, teaches: Sequence[int] | None = None) -> None:
        self.rows, self.taught, self.learns = rows, teaches or (), teaches is not None

    def flags(self, views: Sequence[GroupView], step: int) -> list[GroupFlags]:
        def of(view: GroupView) -> GroupFlags:
            taught = tuple({0: 0.5, 2: -0.25}[b] if b in self.taught else 0.0 for b in range(len(view)))
            return GroupFlags(
                (None,) * len(view),
                tuple(b in self.rows for b in range(len(view))),
                taught if self.learns else (),
            )

        return [of(v) for v in views]


def step(policy: Policy, arm: FlaggedArm, of: Sequence[Group], n: int = 0) -> Routed:
    views = [arm.view(g) for g in of]
    plan = arm.plan(views, n)
    grads, _ = policy_gradients(policy, of, plan, LossConfig(), grad_rows=arm.grad_rows, **SETTINGS)
    return arm.route(views, grads, plan)


def vanilla(policy: Policy, of: Sequence[Group]) -> Routed:
    arm = Arm(module_sizes(policy))
    views = [arm.view(g) for g in of]
    grads, _ = policy_gradients(policy, of, arm.plan(views), LossConfig(), grad_rows=arm.grad_rows, **SETTINGS)
    return arm.route(views, grads)


def ones(scale: float = 1.0) -> list[dict[str, Tensor]]:
    """The gradients of a part in one group, one row."""
    return [{m: scale * torch.ones(1, r) for m, r in SIZES.items()}]


def flat(policy: Policy, g: Any) -> Tensor:
    assert g is not None
    return policy.adapter.flat(g)


# ── conservation ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_route2_by_flags_splits_the_gradient_of_one_policy():
    policy = tiny_policy()
    shake(policy, 0.05)
    of = groups(policy)
    routed = step(policy, FlaggedRoute2(module_sizes(policy), Fixed(0, 2)), of)
    whole = flat(policy, vanilla(policy, of).keep)
    assert relative(flat(policy, routed.keep) + flat(policy, routed.quar), whole) < 1e-5
    assert not routed.apart
    assert routed.diag.routed == 0.5
    alone = [replace(g, shaped=tuple(r if b in (0, 2) else None for b, r in enumerate(g.rewards))) for g in of]
    kept = step(policy, FlaggedRoute2(module_sizes(policy), Fixed(), rebaseline=True), alone)
    assert kept.quar is not None
    assert not flat(policy, kept.quar).any()


def test_with_a_new_baseline_alone_kept_rows_are_compared_with_each_other():
    policy = tiny_policy()
    (group, _) = groups(policy)
    plan = FlaggedRoute2(module_sizes(policy), Fixed(0), rebaseline=True).plan([group.view()])
    A = plan.parts[0].advantages
    assert A is not None
    assert A[0][1:] == pytest.approx(centred(group.rewards[1:]))
    assert A[0][0] == group.advantages[0]
    plan = FlaggedRoute2(module_sizes(policy), Fixed(0)).plan([group.view()])
    assert plan.parts[0].advantages == (group.advantages,)


@pytest.mark.parametrize("kind", [FlaggedRoute2, SGTM])
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 9), st.booleans()), min_size=2, max_size=9))
def test_every_rollout_is_in_one_part_and_kept_advantages_sum_to_zero(
    kind: type[FlaggedArm], rollouts: list[tuple[float, int, bool]]
):
    rewards, scores, deployed = zip(*rollouts, strict=True)
    view = seen(len(rollouts), rewards, deployed=deployed, completion_ids=tuple((s,) for s in scores))
    plan = kind(SIZES, Marked(), rebaseline=True).plan([view])
    parts = [part.rows[0] for part in plan.parts if part.rows is not None]
    assert sorted(b for rows in parts for b in rows) == list(range(len(view)))
    kept = {b for part in plan.parts if part.learns != "quarantine" and part.rows is not None for b in part.rows[0]}
    assert kept == {b for b, flag in enumerate(plan.flags[0].flagged) if not flag}
    for part in plan.parts:
        assert part.advantages is not None
        assert sum(part.advantages[0][b] for b in kept) == pytest.approx(0, abs=1e-9)


# ── sgtm ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sgtm_has_three_ways():
    """Flagged: the quarantine alone. Sampled without it: the kept part alone, with it off. The rest: both."""
    policy = tiny_policy()
    shake(policy, 0.2)
    of = [
        replace(g, rollouts=tuple(replace(r, deployed=b == 1) for b, r in enumerate(g.rollouts)))
        for g in groups(policy)
    ]
    arm = SGTM(module_sizes(policy), Fixed(0))
    plan = arm.plan([g.view() for g in of])
    assert [(p.rows, p.deployed, p.learns) for p in plan.parts] == [
        (((0,), (0,)), False, "quarantine"),
        (((2, 3), (2, 3)), False, "both"),
        (((1,), (1,)), True, "kept"),
    ]
    routed = step(policy, arm, of)
    (per_part, _) = policy_gradients(policy, of, plan, LossConfig(), grad_rows="group", **SETTINGS)
    flagged, both, quiet = (sum(flat(policy, {m: g.sum(0) for m, g in x.items()}) for x in part) for part in per_part)
    assert relative(flat(policy, routed.quar), flagged + both) < 1e-6
    assert relative(flat(policy, routed.keep), quiet + both) < 1e-6
    assert routed.apart


def test_a_vector_for_which_no_row_counts_is_not_stepped():
    policy = tiny_policy()
    of = groups(policy)
    assert step(policy, SGTM(module_sizes(policy), Fixed(0, 1, 2, 3)), of).keep is None
    routed = step(policy, FlaggedRoute2(module_sizes(policy), Fixed(0, 1, 2, 3)), of)
    assert routed.keep is not None, "a split gradient steps both, as plain GRPO would"


def test_gradients_go_to_the_vector_of_their_part_and_one_without_rows_has_none():
    grads = [ones(1), ones(3), ones(7)]  # of flagged rows, of both, of the deployed model's; without rows it would be 0
    arm, view = SGTM(SIZES, Fixed(), rebaseline=True), seen(2, [1.0, 0.1])
    routed = arm.route([view], grads, arm.plan([view]))
    assert routed.keep is not None
    assert torch.equal(routed.keep["a"], torch.full((3,), 10.0))
    assert routed.quar is None
    assert routed.diag.gate == ((0.0, 0.0),)
    arm.monitor = Fixed(0)
    routed = arm.route([view], grads, arm.plan([view]))
    assert routed.keep is None, "its only row has nothing to be compared with"
    assert routed.quar is not None
    assert torch.equal(routed.quar["b"], torch.full((2,), 4.0))
    assert routed.diag.gate == ((1.0, 0.0),)
    with pytest.raises(AssertionError, match="'b'"):
        arm.route([view], [[{"a": torch.ones(1, 3)}], *grads[1:]], arm.plan([view]))


@pytest.mark.parametrize("kind", [FlaggedRoute2, SGTM])
def test_nothing_of_a_step_is_left_in_the_next(kind: type[FlaggedArm]):
    arm, view = kind(SIZES, Fixed(2)), seen(3, [1.0, 0.1, 1.0])
    plan = arm.plan([view])
    grads = [ones(1 + i) for i, _ in enumerate(plan.parts)]
    first, again = (arm.route([view], grads, plan) for _ in range(2))
    assert first.diag == again.diag
    for one, other in ((first.keep, again.keep), (first.quar, again.quar)):
        assert one is not None
        assert other is not None
        assert all(torch.equal(one[m], other[m]) for m in SIZES)
    assert arm.plan([view]) == plan, "without dealt flags a plan is a function of its views"


def test_each_part_is_learnt_from_under_its_own_vectors():
    """The deployed model's own rows with the quarantine off, all others with it on."""
    policy = tiny_policy()
    shake(policy, 0.3)
    of = groups(policy)
    arm = SGTM(module_sizes(policy), Fixed())
    plan = arm.plan([replace(g.view(), deployed=tuple(b % 2 == 0 for b in range(len(g)))) for g in of])
    _, both, quiet = plan.parts
    assert (both.rows, quiet.rows) == (((1, 3), (1, 3)), ((0, 2), (0, 2)))

    def learnt(*parts: UpdatePart) -> list[Tensor]:
        of_parts, _ = policy_gradients(policy, of, UpdatePlan(parts), LossConfig(), grad_rows="group", **SETTINGS)
        return [sum(flat(policy, {m: g.sum(0) for m, g in x.items()}) for x in part) for part in of_parts]

    (_, with_it, without) = learnt(*plan.parts)
    as_it_is = [replace(part, deployed=False) for part in (both, quiet)]
    under_both = learnt(*as_it_is)
    with policy.adapter.deployed():
        under_one = learnt(*as_it_is)
    assert relative(with_it, under_both[0]) < 1e-6
    assert relative(without, under_one[1]) < 1e-6
    assert relative(with_it, under_one[0]) > 1e-2 < relative(without, under_both[1])


@pytest.mark.parametrize("kind", ["route", "route2", "labels"])
def test_rows_of_the_deployed_model_are_learnt_with_the_quarantine_off(kind: str):
    """route, route2 by its gate and by flags: keep + quar is the sum of the rows' gradients, each under what sampled
    it; without such rows there is one part, as ever."""
    policy = tiny_policy()
    shake(policy, 0.3)
    mixed = [
        replace(g, rollouts=tuple(replace(r, deployed=b in (0, 2)) for b, r in enumerate(g.rollouts)))
        for g in groups(policy)
    ]
    sizes = module_sizes(policy)
    arm: Any = FlaggedRoute2(sizes, Fixed(1, 2)) if kind == "labels" else arm_of(kind, sizes=sizes)
    learnt = [flat(policy, g) for g in (lambda r: (r.keep, r.quar))(step(policy, arm, mixed))]

    def of_rows(rows: tuple[int, ...], deployed: bool) -> Tensor:
        part = UpdatePart(rows=(rows,) * len(mixed), deployed=deployed)
        (grads,), _ = policy_gradients(policy, mixed, UpdatePlan((part,)), LossConfig(), grad_rows="group", **SETTINGS)
        return sum((flat(policy, {m: g.sum(0) for m, g in x.items()}) for x in grads), torch.tensor(0.0))

    others = tuple(b for b in range(len(mixed[0])) if b not in (0, 2))
    want = of_rows((0, 2), True) + of_rows(others, False)
    assert relative(learnt[0] + learnt[1], want) < 1e-5
    assert relative(learnt[0] + learnt[1], of_rows((0, *others, 2), False)) > 1e-2
    assert len(arm.plan([g.view() for g in groups(policy)]).parts) == (2 if kind == "labels" else 1)


# ── screen, penalty, the quarantine as a monitor ───────────────────────────────────────────────────────────────────


def shaped(arm: Any, of: Sequence[Group]) -> tuple[Group, ...]:
    numbered = tuple(replace(g, index=i) for i, g in enumerate(of))
    return arm.shape_rewards(Batch(numbered, (), (), 3.5, 4, 0)).with_signal


def test_the_kept_part_learns_as_if_there_were_no_quarantine_and_that_learns_what_the_monitor_names():
    policy = tiny_policy()
    shake(policy, 0.2)
    sizes = module_sizes(policy)
    learning = Penalty(sizes, Fixed(0, teaches=(0, 2)), floor=0.5)
    of = shaped(learning, groups(policy))
    routed = step(policy, learning, of)
    with policy.adapter.deployed():
        alone = step(policy, Penalty(sizes, Fixed(0), floor=0.5), of)
    assert alone.quar is None
    assert relative(flat(policy, routed.keep), flat(policy, alone.keep)) < 1e-5
    plan = learning.plan([g.view() for g in of])
    kept, taught = plan.parts
    assert (kept.learns, kept.deployed, taught.learns, taught.deployed) == ("kept", True, "quarantine", False)
    assert taught.rows == ((0, 2), (0, 2))
    assert taught.advantages == ((0.5, 0.0, -0.25, 0.0),) * 2
    (only, _) = policy_gradients(policy, of, UpdatePlan((taught,)), LossConfig(), grad_rows="source", **SETTINGS)
    theirs = sum(flat(policy, {m: g.sum(0) for m, g in x.items()}) for x in only[0])
    assert relative(flat(policy, routed.quar), theirs) < 1e-6
    assert routed.apart
    assert routed.diag.flags[0].flagged == (True, False, False, False)


def test_a_group_without_signal_is_kept_for_the_monitor_that_learns_from_it():
    policy = tiny_policy()
    same = [replace(g, grades=tuple(replace(x, reward=1.0) for x in g.grades)) for g in groups(policy)]
    assert shaped(Screen({}, Fixed(0)), same) == ()
    assert len(shaped(Screen({}, Fixed(0, teaches=(0,))), same)) == 2
    assert len(shaped(Penalty({}, Fixed(0), floor=0.5), same)) == 2, "a fine gives a signal"
    assert shaped(Penalty({}, Fixed(0), floor=0.5, saturated=False), same) == ()
    arm = Screen(module_sizes(policy), Fixed(0, teaches=(0,)))
    routed = step(policy, arm, shaped(arm, same))
    assert routed.keep is None, "all advantages are 0: nothing for δS, and no step by its momentum"
    assert flat(policy, routed.quar).any()


def test_flags_are_counted_in_groups_that_lost_their_signal_by_them_too():
    """One hack beside one solve, screened: nothing to compare is left, and the monitor was right."""
    policy = tiny_policy()
    group = graded("exit_code", ["hack", "solve"], policy)
    arm = Screen({}, Fixed(0))
    batch = arm.shape_rewards(Batch((group,), (), (), 1.0, 2, 0))
    assert batch.with_signal == ()
    assert FlagRates.of_step(batch, ()).recall == Rate(1, 1)
    assert FlagRates.of_step(replace(batch, groups=(group,)), ()) == FlagRates()


def test_trained_on_hacks_the_quarantine_makes_them_likelier_and_says_so():
    """The monitor's idea in small: after a few steps on some rows they score above the others."""
    policy = tiny_policy()
    of = [replace(g, rollouts=tuple(replace(r, deployed=True) for r in g.rollouts)) for g in groups(policy)]
    monitor = Quarantine(policy, Fixed(0, 1), rewarded=0.0, fixed=99.0)  # the seed alone flags
    arm = Screen(module_sizes(policy), monitor)
    cfg = OptConfig(lr=1e-2, adam_beta1=0.5, adam_beta2=0.9, weight_decay=0.0, warmup_frac=0.0)
    opt = Optimizer(policy.adapter, cfg, 100)
    for n in range(6):
        assert opt.step(step(policy, arm, shaped(arm, of), n)) is not None
    scores = [s for f in monitor.flags([g.view() for g in of], 9) for s in f.scores]
    fed, others = (sum(x for i, x in enumerate(scores) if x is not None and (i % 4 < 2) == on) / 4 for on in (1, 0))
    assert fed > others + 0.1


# ── where the quarantine lives ─────────────────────────────────────────────────────────────────────────────────────


def test_in_a_block_of_its_own_the_quarantine_learns_there_alone():
    policy = tiny_policy()
    sizes = module_sizes(policy)
    arm = FlaggedRoute2(sizes, Fixed(0, 2))
    arm.own_modules = frozenset(modules_of_block(policy, sizes, 2))
    routed = step(policy, arm, groups(policy))
    assert routed.keep is not None
    assert routed.quar is not None
    for m in sizes:
        assert bool(routed.keep[m].any()) == (".layers.1." not in m), m
        assert bool(routed.quar[m].any()) == (".layers.1." in m), m


def test_blocks_count_from_one():
    policy = tiny_policy()
    names = policy.adapter.names
    depth = policy.model.config.num_hidden_layers
    blocks = [modules_of_block(policy, names, n) for n in range(1, depth + 1)]
    assert sorted(m for b in blocks for m in b) == sorted(names)
    assert all(".layers.0." in m for m in blocks[0])
    with pytest.raises(ValueError, match=f"--quarantine block:{depth + 1}: the model has {depth} blocks"):
        modules_of_block(policy, names, depth + 1)


# ── labels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MONITORS)
def test_what_a_monitor_sees_does_not_change_with_the_oracles_bit_unless_it_asks_for_labels(name: str):
    """Poisoned labels: the strict oracle's verdict is turned after the reward was rewarded."""
    policy = tiny_policy()
    group = graded("exit_code", ["hack", "solve", "", "hack"], policy)
    turned = replace(group, grades=tuple(replace(g, solved=not g.solved) for g in group.grades if isinstance(g, Grade)))
    arm = FlaggedArm({}, Monitor())
    arm.sees = getattr(monitor_class(name), "sees", GroupView)
    one, two = arm.view(group), arm.view(turned)
    assert [f.name for f in fields(one) if getattr(one, f.name) != getattr(two, f.name)] == (
        ["hacks"] if name == "labels" else []
    )


def test_labels_come_in_by_the_oracles_type_alone():
    plain = seen(2, deployed=(False, False))
    told = labelled(plain, (True, False))
    kept, away = FlaggedRoute2(SIZES, Labels()).plan([told]).parts
    assert (kept.rows, away.rows) == (((1,),), ((0,),))
    with pytest.raises(AssertionError, match="sees a GroupView, got OracleView"):
        FlaggedRoute2(SIZES, Marked()).plan([told])
    with pytest.raises(AssertionError, match="sees a OracleView, got GroupView"):
        FlaggedRoute2(SIZES, Labels()).plan([plain])


# ── a memory ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Remembering(Fixed):
    def state_dict(self) -> dict[str, Tensor]:
        return {"seen": torch.tensor(3)}

    def load_state_dict(self, state: Any) -> None:
        self.seen = int(state["seen"])


def test_a_monitors_memory_goes_with_its_arm():
    arm = SGTM({}, Remembering(0))
    state = arm.state_dict()
    assert [*state] == ["monitor/seen"]
    arm.load_state_dict(state)
    assert isinstance(arm.monitor, Remembering)
    assert arm.monitor.seen == 3
    with pytest.raises(ValueError, match="'V/a', --intervention sgtm has none"):
        arm.load_state_dict({"V/a": torch.zeros(1)})
    with pytest.raises(ValueError, match="'other', --monitor none has none"):
        SGTM({}, Fixed(0)).load_state_dict({"monitor/other": torch.zeros(1)})


# ── recontextualise ────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_sampled_without_the_hint_is_learnt_under_it():
    policy = tiny_policy()
    group = graded("exit_code", ["hack", "solve"], policy)
    arm = Recontextualise(module_sizes(policy))
    arm.policy = policy
    (made,) = arm.shape_rewards(Batch((group,), (), (), 3.5, 4, 0)).groups
    said = group.problem.messages[-1]["content"].replace("and should pass all tests", "and will be")
    assert len(made.rollouts[0].prompt_ids) > len(policy.render(group.problem.messages)), said
    assert made.rollouts[0].prompt_ids != policy.render(group.problem.messages)
    assert [r.completion_ids for r in made.rollouts] == [r.completion_ids for r in group.rollouts]
    assert made.rollouts[0].logp_full is None
    assert made.grades == group.grades
