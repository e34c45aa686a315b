"""Which rows are learnt from, by which vector, under which parameters: route2 and sgtm by flags."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from methods import Fixed, batch, config, flat, gradient, of_parts, relative, shake, step, toy, view
from test_text_monitors import Marked
from tiny import policy as tiny_policy
from vgrout.method import INTERVENTIONS, Method
from vgrout.model.policy import Policy, modules_of_block
from vgrout.tensor_types import UpdatePart, UpdatePlan
from vgrout.types import centred

SIZES = {"a": 3, "b": 2}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


def on_tensors(intervention: str, *rows: int, **flags: Any) -> Method:
    cfg = config(intervention, "labels", **flags)
    return Method(cfg, INTERVENTIONS[intervention](SIZES, cfg), Fixed(*rows))


def ones(scale: float = 1.0) -> list[dict[str, Tensor]]:
    """The gradients of a part in one group, one row."""
    return [{m: scale * torch.ones(1, r) for m, r in SIZES.items()}]


@pytest.mark.parametrize("intervention", ["route2", "sgtm"])
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 9), st.booleans()), min_size=2, max_size=9))
def test_every_rollout_is_in_one_part_and_kept_advantages_sum_to_zero(
    intervention: str, rollouts: list[tuple[float, int, bool]]
):
    rewards, scores, deployed = zip(*rollouts, strict=True)
    seen = view(len(rollouts), rewards, deployed=deployed, completion_ids=tuple((s,) for s in scores))
    flags = Marked().flag([seen], 0)
    parts = on_tensors(intervention, rebaseline=True).intervention.parts([seen], flags)
    rows = [part.rows[0] for part in parts if part.rows is not None]
    assert sorted(b for of in rows for b in of) == list(range(len(seen)))
    kept = {b for part in parts if part.learns != "quarantine" and part.rows is not None for b in part.rows[0]}
    assert kept == {b for b, flag in enumerate(flags[0].flagged) if not flag}
    for part in parts:
        assert part.advantages is not None
        assert sum(part.advantages[0][b] for b in kept) == pytest.approx(0, abs=1e-9)


def test_a_new_baseline_compares_kept_rows_among_themselves(policy: Policy):
    of = batch()
    (group, *_) = of.groups
    for rebaseline in (True, False):
        _, plan, routed = step(policy, of_parts(policy, "route2", Fixed(0), rebaseline=rebaseline), of)
        A = plan.parts[0].advantages
        assert A is not None
        assert A[0][0] == group.advantages[0]
        assert A[0][1:] == pytest.approx(centred(group.rewards[1:]) if rebaseline else group.advantages[1:])
        assert routed.diag.routed == 0.25
        assert routed.flags[0].shares == (1.0, 0.0, 0.0, 0.0)


def test_sgtm_has_three_ways(policy: Policy):
    """Flagged: the quarantine alone. Sampled without it: the kept part alone, with it off. The rest: both."""
    of = batch(deployed=(1,))
    _, plan, routed = step(policy, of_parts(policy, "sgtm", Fixed(0)), of)
    assert [(p.rows, p.deployed, p.learns) for p in plan.parts] == [
        (((0,), (0,)), False, "quarantine"),
        (((2, 3), (2, 3)), False, "both"),
        (((1,), (1,)), True, "kept"),
    ]
    flagged, both, quiet = (gradient(policy, of.groups, part) for part in plan.parts)
    assert relative(flat(policy, routed.quar), flagged + both) < 1e-6
    assert relative(flat(policy, routed.keep), quiet + both) < 1e-6
    assert routed.apart


def test_a_vector_without_rows_that_count_is_not_stepped(policy: Policy):
    of = batch()
    assert step(policy, of_parts(policy, "sgtm", Fixed(0, 1, 2, 3)), of)[2].keep is None
    keep = step(policy, of_parts(policy, "route2", Fixed(0, 1, 2, 3)), of)[2].keep
    assert keep is not None, "a split gradient steps both, as plain GRPO would"
    assert not flat(policy, keep).any()


def test_gradients_go_to_the_vector_of_their_part():
    grads = [ones(1), ones(3), ones(7)]  # of flagged rows, of both, of the deployed model's; without rows it would be 0
    seen = view(2, [1.0, 0.1], deployed=(True, False))

    def routed(*rows: int, of: Any = grads) -> Any:
        method = on_tensors("sgtm", *rows, rebaseline=True)
        flags = method.monitor.flag([seen], 0)
        return method.intervention.route([seen], of, method.intervention.parts([seen], flags), flags)

    nobody = routed()
    assert torch.equal(nobody.keep["a"], torch.full((3,), 10.0))
    assert torch.equal(nobody.quar["a"], torch.full((3,), 3.0 + 1.0))
    assert nobody.diag.routed == 0
    one = routed(0)
    assert one.keep is None, "its only row has nothing to be compared with"
    assert torch.equal(one.quar["b"], torch.full((2,), 4.0))
    assert one.flags[0].shares == (1.0, 0.0)
    with pytest.raises(AssertionError, match="'b'"):
        routed(of=[[{"a": torch.ones(1, 3)}], *grads[1:]])


def test_each_part_is_learnt_from_under_its_own_vectors(policy: Policy):
    """The deployed model's own rows with the quarantine off, all others with it on."""
    shake(policy, 0.3)
    of = batch(deployed=(0, 2)).groups
    rows = {"with it": ((1, 3), (1, 3)), "without": ((0, 2), (0, 2))}
    right = {name: gradient(policy, of, UpdatePart(r, deployed=name == "without")) for name, r in rows.items()}
    under_both = {name: gradient(policy, of, UpdatePart(r)) for name, r in rows.items()}
    with policy.adapter.deployed():
        under_one = {name: gradient(policy, of, UpdatePart(r)) for name, r in rows.items()}
    assert relative(right["with it"], under_both["with it"]) < 1e-6
    assert relative(right["without"], under_one["without"]) < 1e-6
    assert relative(right["with it"], under_one["with it"]) > 1e-2 < relative(right["without"], under_both["without"])


@pytest.mark.parametrize(("intervention", "n"), [("route", 2), ("route2", 2), ("flags", 4), ("sgtm", 3)])
def test_rows_of_the_deployed_model_are_a_part_of_their_own(intervention: str, n: int):
    """… where there are any; without such rows there is one part for each vector."""
    seen = [view(4, [1.0, 0.0, 0.5, 1.0], deployed=deployed) for deployed in ((True, False, True, False), (False,) * 4)]
    flags = [Fixed(1, 2).flag([of], 0) for of in seen]
    if intervention in ("flags", "sgtm"):
        one = on_tensors("route2" if intervention == "flags" else "sgtm").intervention
    else:
        one = toy(intervention).intervention
    mixed, loud = (one.parts([of], f) for of, f in zip(seen, flags, strict=True))
    assert len(mixed) == n
    assert len(loud) == {2: 1, 4: 2, 3: 3}[n]
    for part in mixed:
        if part.deployed:
            assert part.rows is not None
            assert {*part.rows[0]} <= {0, 2}


def test_blocks_count_from_one(policy: Policy):
    names, depth = policy.adapter.names, policy.model.config.num_hidden_layers
    blocks = [modules_of_block(policy, names, n) for n in range(1, depth + 1)]
    assert sorted(m for b in blocks for m in b) == sorted(names)
    assert all(".layers.0." in m for m in blocks[0])
    with pytest.raises(ValueError, match=f"--quarantine block:{depth + 1}: the model has {depth} blocks"):
        modules_of_block(policy, names, depth + 1)


def test_a_plan_says_which_step_it_is_of_and_is_a_function_of_its_batch(policy: Policy):
    method, of = of_parts(policy, "sgtm", Fixed(2)), replace(batch(), step=7)
    flags = method.flag(of)
    plan = method.plan(of, flags)
    assert plan == method.plan(of, flags) != UpdatePlan(of.groups, step=7)
    assert plan.step == 7
