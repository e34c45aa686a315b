"""Arms that route by text: what is flagged, what each adapter vector learns from, and what a step's row says of it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from test_arms import arm_of, rows
from test_arms import view as arms_view
from test_grpo import MAX_NEW, groups, relative
from tiny import policy as tiny_policy
from vgrout.arms.base import module_sizes, modules_of_block
from vgrout.arms.text_routing import TextRouting
from vgrout.config.arm import ArmConfig
from vgrout.config.loss import LossConfig
from vgrout.config.run import OptConfig
from vgrout.grpo import policy_gradients
from vgrout.monitors.base import Monitor, RandomFlags
from vgrout.monitors.flag_rates import FlagRates
from vgrout.monitors.labels import Labels
from vgrout.monitors.text_scores import Text, TextScorer
from vgrout.optim import Optimizer
from vgrout.tensor_types import ArmDiag, Routed, UpdatePart, UpdatePlan
from vgrout.types import GroupView, OracleView, Rate, centred

SIZES = {"a": 3, "b": 2}
KEPT, QUARANTINE = 0, 1  # the parts of the plan, in this order


class Marked(TextScorer):
    """Scores an answer by its first token."""

    def __init__(self) -> None:
        self.threshold, self.paid = 5.0, 1.0

    def texts(self, view: GroupView) -> list[Text]:
        return [Text(view.prompt_ids, ids) for ids in view.completion_ids]

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        return torch.tensor([float(t.completion[0]) for t in texts], dtype=torch.float64)


def view(rewards: list[float], scores: list[int], deployed: list[bool] | None = None, teachers: int = 0) -> GroupView:
    n = len(rewards)
    return GroupView(
        sources=("student",) * (n - teachers) + ("teacher",) * teachers,
        deployed=tuple(deployed or [True] * (n - teachers) + [False] * teachers),
        rewards=tuple(rewards),
        advantages=centred(rewards),
        detector=(False,) * n,
        texts=("x",) * n,
        prompt_ids=(1,),
        completion_ids=tuple((s,) for s in scores),
    )


def arm(deal: int | None = None, **kw: Any) -> TextRouting:
    """deal: the seed under which flags are dealt at random; None: they are not."""
    return TextRouting(SIZES, Marked() if deal is None else RandomFlags(Marked(), 1.0, deal), **kw)


def parts(a: TextRouting, view: GroupView) -> tuple[UpdatePart, UpdatePart]:
    kept, quarantine = a.plan([view]).parts
    return kept, quarantine


def ones(n: int, scale: float = 1.0) -> dict[str, Tensor]:
    return {m: scale * torch.ones(n, r) for m, r in SIZES.items()}


def test_a_rollout_is_flagged_when_it_is_paid_and_scores_above_the_threshold():
    v = view([1.0, 1.0, 0.1, 1.0], [9, 2, 9, 6], deployed=[True, True, True, False])
    a = arm()
    plan = a.plan([v])
    kept, quar = plan.parts
    assert plan.flags[0].scores == (9.0, 2.0, None, 6.0)  # what is not paid is not read
    assert plan.flags[0].flagged == (True, False, False, True)
    # row 2 scores high but is not paid; row 3 is flagged, and was sampled with the quarantine on
    assert (kept.rows, quar.rows) == (((1, 2),), ((0, 3),))
    assert plan.quarantined == ((True, False, False, True),)
    assert a.route([v], [[ones(1)], [ones(1)]], plan).diag.flags == plan.flags
    assert kept.deployed
    assert not quar.deployed
    assert kept.advantages[0] == pytest.approx((0.0, 0.45, -0.45, 0.0))  # R − mean over 1.0 and 0.1
    assert quar.advantages == (v.advantages,)


def test_what_the_quarantine_sampled_is_not_learnt_by_the_kept_vector_demonstrations_are():
    v = view([1.0, 0.1, 1.0], [0, 0, 0], deployed=[False, True, False], teachers=1)
    kept, quar = parts(arm(), v)
    assert (kept.rows, quar.rows) == (((1, 2),), ((0,),))
    kept, quar = parts(arm(own=False), v)
    assert (kept.rows, quar.rows) == (((0, 1, 2),), ((),))


def test_without_a_new_baseline_kept_rows_keep_the_groups_advantages():
    v = view([1.0, 1.0, 0.1], [9, 2, 2])
    assert parts(arm(rebaseline=False), v)[KEPT].advantages == (v.advantages,)


def test_a_fine_keeps_flagged_rows_of_the_deployed_model_and_pushes_them_down():
    v = view([1.0, 1.0, 0.1, 1.0], [9, 2, 2, 9], deployed=[True, True, True, False])
    kept, quar = parts(arm(penalty=0.5), v)
    assert kept.rows == ((0, 1, 2),)
    assert kept.advantages[0] == pytest.approx((-0.5, 0.45, -0.45, 0.0))
    assert quar.rows == ((0, 3),)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 9), st.booleans()), min_size=2, max_size=9))
def test_every_rollout_is_in_one_part_and_kept_advantages_sum_to_zero(rollouts: list[tuple[float, int, bool]]):
    rewards, scores, deployed = (list(x) for x in zip(*rollouts, strict=True))
    kept, quar = parts(arm(), view(rewards, scores, deployed))
    assert kept.rows
    assert quar.rows
    assert kept.advantages
    assert sorted(kept.rows[0] + quar.rows[0]) == list(range(len(rollouts)))
    assert math.isclose(sum(kept.advantages[0]), 0.0, abs_tol=1e-9)


def test_a_quarantine_in_its_own_block_learns_there_alone_and_the_kept_vector_elsewhere():
    a = arm()
    a.own_modules = frozenset(["b"])
    v = view([1.0, 0.1, 1.0], [2, 2, 9])
    routed = a.route([v], [[ones(1, 2.0)], [ones(1)]], a.plan([v]))
    assert routed.keep is not None
    assert routed.quar is not None
    for vector, here, elsewhere, n in ((routed.keep, "a", "b", 2.0), (routed.quar, "b", "a", 1.0)):
        assert torch.equal(vector[here], torch.full((SIZES[here],), n))
        assert not vector[elsewhere].any()


def test_blocks_count_from_one():
    policy = tiny_policy()
    names = policy.adapter.names
    depth = policy.model.config.num_hidden_layers
    blocks = [modules_of_block(policy, names, n) for n in range(1, depth + 1)]
    assert sorted(m for b in blocks for m in b) == sorted(names)
    assert all(".layers.0." in m for m in blocks[0])
    with pytest.raises(ValueError, match=f"--quarantine block:{depth + 1}: the model has {depth} blocks"):
        modules_of_block(policy, names, depth + 1)


def test_gradients_go_to_the_vector_of_their_part_and_a_vector_without_rows_is_not_stepped():
    a = arm()
    v = view([1.0, 0.1], [2, 2])
    routed = a.route([v], [[ones(1)], [ones(1, 7.0)]], a.plan([v]))  # of a part without rows: would be 0
    assert routed.keep is not None
    assert torch.equal(routed.keep["a"], torch.ones(3))
    assert routed.quar is None
    assert routed.apart
    assert routed.diag.gate == ((0.0, 0.0),)
    v = view([1.0, 0.1], [9, 2], deployed=[True, False])
    routed = a.route([v], [[ones(1)], [ones(1, 7.0)]], a.plan([v]))
    assert routed.keep is None  # its only row is not paid: no spread among kept rows, nothing to learn
    assert routed.quar is not None
    assert torch.equal(routed.quar["b"], torch.full((2,), 7.0))


def test_nothing_of_a_step_is_left_in_the_next():
    a = arm()
    v = view([1.0, 0.1, 1.0], [2, 2, 9])
    plan, grads = a.plan([v]), [[ones(1)], [ones(1, 7.0)]]
    first, again = a.route([v], grads, plan), a.route([v], grads, plan)
    assert first.diag == again.diag
    assert first.keep is not None
    assert again.keep is not None
    for m in SIZES:
        assert torch.equal(first.keep[m], again.keep[m])
    assert a.plan([v]) == plan, "without dealt flags a plan is a function of its views"


def test_gradients_of_other_modules_are_refused():
    a = arm()
    v = view([1.0, 0.1], [2, 2])
    with pytest.raises(AssertionError, match="'b'"):
        a.route([v], [[{"a": torch.ones(1, 3)}], [ones(1)]], a.plan([v]))


def test_random_flags_flags_as_many_of_the_paid_rollouts():
    v = view([1.0] * 6 + [0.1] * 2, [9, 9, 2, 2, 2, 2, 9, 9])
    real = arm().plan([v]).flags[0].flagged
    seen = set()
    for seed in range(8):
        flags = arm(deal=seed).plan([v]).flags[0].flagged
        assert sum(flags) == sum(real) == 2
        assert not any(flags[6:])
        seen.add(flags)
    assert len(seen) > 3


def test_labels_come_in_by_the_oracles_type_alone():
    v = view([1.0, 1.0], [0, 0])
    labelled = OracleView(**{f: getattr(v, f) for f in GroupView.__dataclass_fields__}, exploited=(True, False))
    kept, quar = parts(TextRouting(SIZES, Labels()), labelled)
    assert (kept.rows, quar.rows) == (((1,),), ((0,),))
    with pytest.raises(AssertionError, match="sees a GroupView"):
        arm().plan([labelled])
    with pytest.raises(AssertionError, match="sees a OracleView"):
        TextRouting(SIZES, Labels()).plan([v])


def test_no_gate_flags_nothing():
    v = view([1.0, 0.1, 1.0], [9, 9, 9], deployed=[True, True, False])
    kept, quar = parts(TextRouting(SIZES, Monitor()), v)
    assert (kept.rows, quar.rows) == (((0, 1),), ((2,),))


def test_a_resumed_arm_deals_the_same_flags():
    v = view([1.0] * 6, [9, 9, 9, 2, 2, 2])
    one, two = arm(deal=1), arm(deal=1)
    plans = [one.plan([v], step) for step in range(4)]
    two.load_state_dict({"steps": torch.tensor(3)})  # as earlier versions wrote it
    assert two.plan([v], 3) == plans[3], "a function of seed and step, whatever was dealt before"
    assert len({plan.flags for plan in plans}) > 1
    with pytest.raises(ValueError, match="'V/a'"):
        two.load_state_dict({"V/a": torch.zeros(1)})


def test_route2_can_learn_in_two_parts_too():
    cfg = {"rollout_ablate_frac": 0.5, "own_streams": "on", "rebaseline": "on"}
    a = arm_of("route2", **cfg)
    v = replace(
        arms_view(6, 1, flagged=(2,)),
        deployed=(True, True, True, False, False, False),
        rewards=(1.0, 0.0, 1.0, 1.0, 0.0, 1.0),
        advantages=centred([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
    )
    plan = a.plan([v])
    kept, away = plan.parts
    assert (kept.rows, away.rows) == (((0, 1, 2, 5),), ((3, 4),))
    assert kept.advantages is not None
    assert kept.advantages[0][:3] == pytest.approx((0.5, -0.5, 1 / 3))  # 2 is a known hack: the group's own
    g = rows(6, 4, hackward=(0, 2, 5))
    alive = torch.tensor([1.0, 1, 1, 0, 0, 1])[:, None]
    grads = [[{m: x * of_part for m, x in g.items()}] for of_part in (alive, 1 - alive)]
    routed = a.route([v], grads, plan)
    assert routed.apart
    assert routed.keep is not None
    assert routed.quar is not None
    for m in g:  # nothing lost: both parts together are the whole gradient; what the quarantine sampled is its own
        assert torch.allclose(routed.keep[m] + routed.quar[m], g[m].sum(0), atol=1e-5)
    assert arm_of("route2").plan([v]) == UpdatePlan()


# ── the loop's side ────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_part_is_learnt_from_under_its_own_vectors():
    policy = tiny_policy()
    with torch.no_grad():
        policy.adapter.δS_hack.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    policy.adapter.merge()
    of = groups(policy)
    a = TextRouting(module_sizes(policy), Monitor())
    settings: dict[str, Any] = {"max_new": MAX_NEW, "prompts_per_step": 2}
    plan = a.plan([replace(g.view(), deployed=tuple(b % 2 == 0 for b in range(len(g)))) for g in of])
    (kept, quar), _ = policy_gradients(policy, of, plan, LossConfig(), **settings)
    as_it_is = UpdatePlan((replace(plan.parts[KEPT], deployed=False),))
    with policy.adapter.deployed():
        ((alone,), _) = policy_gradients(policy, of, as_it_is, LossConfig(), **settings)
    assert relative(_flat(kept), _flat(alone)) <= 1e-6
    ((under_both,), _) = policy_gradients(policy, of, as_it_is, LossConfig(), **settings)
    assert relative(_flat(kept), _flat(under_both)) > 1e-2
    assert plan.parts[QUARANTINE].rows != plan.parts[KEPT].rows
    assert _flat(quar).any()


def _flat(grads: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([g.flatten() for of in grads for g in of.values()])


def test_the_vectors_are_clipped_apart_where_they_learn_apart():
    policy = tiny_policy()
    g = {m: torch.ones_like(x) for m, x in policy.adapter.by_module(policy.adapter.δS.detach()).items()}
    big = {m: 1000 * x for m, x in g.items()}

    def stepped(apart: bool) -> tuple[torch.Tensor, torch.Tensor]:
        p = tiny_policy()
        cfg = OptConfig(lr=1e-3, adam_beta1=0.0, adam_beta2=0.0, weight_decay=0.0, warmup_frac=0.0, grad_clip=1e-7)
        Optimizer(p.adapter, cfg, 1).step(Routed(keep=g, quar=big, diag=ArmDiag(), apart=apart))
        return p.adapter.δS.detach(), p.adapter.δS_hack.detach()

    keep, quar = stepped(apart=True)
    assert torch.allclose(keep, quar)  # each at its own norm: equal directions, equal steps
    keep, quar = stepped(apart=False)  # 1e-10 of gradient against Adam's epsilon of 1e-8: next to no step
    assert keep.abs().max() < 0.5 * quar.abs().max()


def test_a_vector_without_gradient_stays_whichever_it_is():
    policy = tiny_policy()
    g = {m: torch.ones_like(x) for m, x in policy.adapter.by_module(policy.adapter.δS.detach()).items()}
    cfg = OptConfig(lr=1e-3, adam_beta2=0.9, warmup_frac=0.0, grad_clip=1.0)
    opt = Optimizer(policy.adapter, cfg, 9)
    opt.step(Routed(keep=g, quar=None, diag=ArmDiag()))
    before = policy.adapter.δS.detach().clone()
    update = opt.step(Routed(keep=None, quar=g, diag=ArmDiag(), apart=True))
    assert torch.equal(policy.adapter.δS, before)
    assert policy.adapter.δS_hack.any()
    assert update is not None
    assert update.q_egy == 1.0


def test_flags_are_counted_against_the_true_labels():
    policy = tiny_policy()
    (group, *_) = groups(policy)
    plan = TextRouting(SIZES, Monitor()).plan([group.view()])
    rates = FlagRates.of([group], plan.flags)
    assert rates.recall == rates.false_flags == Rate(0, 0), "these grades are cached: no student has a label"
    assert rates.flag_t == Rate(0, len(group))
    flagged = replace(plan.flags[0], flagged=(True, False, False, True))
    assert FlagRates.of([group], (flagged,)).flag_t == Rate(2, len(group))
    assert FlagRates.of([group], ()) == FlagRates()


# ── settings ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"intervention": "surprise", "probe_k": 4}, "--probe-k: goes with --monitor probe"),
        ({"intervention": "pmi", "control": "haar"}, "--control haar: needs --intervention"),
        ({"intervention": "reader", "control": "shrinkage"}, "needs --intervention"),
        ({"intervention": "reader", "monitor": "labels", "probe_k": 4}, "--probe-k: goes with --monitor probe"),
        ({"intervention": "route2", "own_streams": "on"}, "--own-streams: needs --rollout-ablate-frac"),
        ({"intervention": "route", "own_streams": "on"}, "--own-streams: not read by --intervention route"),
        ({"intervention": "route", "quarantine": "block:1"}, "--quarantine: not read by --intervention route"),
        ({"intervention": "pmi", "quarantine": "block:0"}, "--quarantine block:0: should be one of"),
        ({"intervention": "reader", "monitor_quantile": 0.2}, "--monitor-quantile 0.2"),
        ({"intervention": "route2", "monitor_threshold": "known_correct"}, "--monitor-threshold: goes with"),
        ({"intervention": "reader", "v_hack_k": 3}, "--v-hack-k: not read by --intervention reader"),
    ],
)
def test_settings_that_are_not_read_are_refused(settings: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        ArmConfig(**settings)


def test_half_of_the_students_are_the_deployed_models_by_default():
    assert ArmConfig(intervention="reader").ablate_frac == 0.5
    assert ArmConfig(intervention="route2").ablate_frac == 0.0
    assert ArmConfig(intervention="pmi", rollout_ablate_frac=0.0).ablate_frac == 0.0
