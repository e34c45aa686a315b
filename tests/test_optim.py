import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny import policy as tiny_policy
from tiny import relative, tiny
from vgrout.config.settings import OptConfig
from vgrout.ground.tensor_types import Routed
from vgrout.imitation.trainable import AdapterOnly
from vgrout.loop.optim import Optimizer, lr_at
from vgrout.model.svd_adapter import SvdAdapter

HYPER = OptConfig(
    lr=3e-2, adam_beta1=0.5, adam_beta2=0.9, weight_decay=0.1, warmup_frac=0.2, grad_clip=10.0
)
STEPS = 10
IDS = torch.tensor([[3, 14, 15, 92]])
LOSS = {"loss": 0.5}


def make():
    adapter = SvdAdapter(tiny(), None)
    return adapter, Optimizer(adapter, HYPER, STEPS)


def drawn(adapter, seed, scale=1.0):
    return scale * torch.randn(len(adapter), generator=torch.Generator().manual_seed(seed))


def both(adapter, step):
    """A gradient for each vector."""
    return Routed(drawn(adapter, step), drawn(adapter, 100 + step, 0.5))


def state(adapter, optim):
    """Moments and vectors."""
    return repr(optim.state_dict()["adamw"]), repr(
        [x.tolist() for x in adapter.state_dict().values()]
    )


def textbook_adamw(gs, lrs, betas, decay):
    """Loshchilov & Hutter 2019, algorithm 2, from a zero start."""
    w, m, v = torch.zeros_like(gs[0]), torch.zeros_like(gs[0]), torch.zeros_like(gs[0])
    for t, (g, lr) in enumerate(zip(gs, lrs, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        w = w - lr * decay * w
        w = w - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + 1e-8)
    return w


def test_steps_are_textbook_adamw_on_jointly_clipped_gradients():
    adapter, optim = make()
    clipped = ([], [])
    lrs = [lr_at(step, HYPER, STEPS) for step in range(STEPS)]
    for step in range(STEPS):
        routed = both(adapter, step)
        update = optim.step(routed)
        gk, gq = (g.double() for g in (routed.keep, routed.quar) if g is not None)
        gn = float((gk.square().sum() + gq.square().sum()).sqrt())
        assert gn > 10, "or the clip is not tested"
        assert (update.stepped, update.gn, update.lr) == (True, pytest.approx(gn), lrs[step])
        assert update.q_egy == pytest.approx(float(gq.norm() / (gk.norm() + gq.norm())))
        for gs, g in zip(clipped, (gk, gq), strict=True):
            gs.append(g * 10 / gn)
    for vector, gs in zip((adapter.δS, adapter.δS_hack), clipped, strict=True):
        # fp32 against fp64
        assert relative(vector.detach(), textbook_adamw(gs, lrs, (0.5, 0.9), 0.1)) < 1e-5


def test_schedule():
    lrs = [lr_at(step, HYPER, STEPS) for step in range(11)]
    assert lrs[0] == pytest.approx(3e-5)
    assert lrs[1] == pytest.approx(3e-2 * (1e-3 + 0.999 / 2))
    assert lrs[2] == pytest.approx(3e-2), "peak after round(0.2 · 10) steps"
    assert lrs[6] == pytest.approx(1.5e-2), "half way down the cosine"
    assert lrs[10] == pytest.approx(0)
    assert all(a > b for a, b in pairwise(lrs[2:]))


@given(st.just(0.0) | st.floats(1e-12, 1), st.integers(1, 200))
def test_every_schedule_has_a_step_that_learns(frac, steps):
    """No warm-up is the whole run: some step has a tenth of the rate, and none has more than all of it."""
    lrs = [lr_at(step, replace(HYPER, warmup_frac=frac), steps) for step in range(steps)]
    assert HYPER.lr * 0.1 < max(lrs) <= HYPER.lr
    assert all(lr > 0 for lr in lrs)


@pytest.mark.parametrize(
    "bad", ["nothing", "not finite", *product(("keep", "quar"), (math.nan, math.inf))], ids=str
)
def test_nothing_to_learn_or_nothing_finite_moves_the_schedule_on_and_nothing_else(bad):
    adapter, optim = make()
    optim.step(both(adapter, 0))
    before, routed, skipped = (
        state(adapter, optim),
        Routed(finite=bad != "not finite"),
        bad != "nothing",
    )
    if isinstance(bad, tuple):
        one = drawn(adapter, 2).index_fill(0, torch.tensor(1), bad[1])
        routed = replace(both(adapter, 1), **{bad[0]: one})
    update = optim.step(replace(routed, measured={"fired": 0.5}), LOSS)
    assert state(adapter, optim) == before
    assert (update.stepped, update.skipped, update.measured) == (
        False,
        skipped,
        None if skipped else LOSS,
    )
    assert update.columns()["skipped"] == int(skipped)
    assert "fired" not in update.columns(), "nothing was learnt that it could be of"
    assert optim.step(both(adapter, 4)).lr == lr_at(2, HYPER, STEPS)
    # its squares overflow fp32, its norm does not
    update = optim.step(Routed(drawn(adapter, 0, 1e30)))
    assert update.gn > 1e30
    assert adapter.δS.isfinite().all(), "clipped, not skipped"


@pytest.mark.parametrize("idle", ["δS", "δS_hack"])
def test_a_vector_without_gradient_stays_where_it_is(idle):
    """Exactly zero if it never had one; and one that has moved neither decays nor drifts on."""
    adapter, optim = make()
    vector, other = (
        getattr(adapter, name) for name in sorted(("δS", "δS_hack"), key=lambda name: name != idle)
    )

    def alone(step):
        return optim.step(Routed(**{"quar" if idle == "δS" else "keep": drawn(adapter, step)}))

    for step in range(3):
        assert alone(step).q_egy == (1 if idle == "δS" else None)
    assert not vector.any()
    assert other.abs().min() > 0
    optim.step(both(adapter, 3))
    before = vector.clone()
    alone(4)
    assert torch.equal(vector, before)


def test_the_model_is_merged_again_and_the_applied_change_measured():
    """With momentum, a step of δS goes elsewhere than against its own gradient: what counts is what was applied."""
    adapter, optim = make()
    optim.step(Routed(drawn(adapter, 0)))
    before, logits = adapter.δS.detach().clone(), adapter.model(IDS).logits
    V = {
        m: torch.nn.functional.normalize(drawn(adapter, 7)[None, span], dim=1)
        for m, span in adapter.spans.items()
    }
    update = optim.step(Routed(drawn(adapter, 1), directions=V))
    assert adapter.is_merged()
    assert not torch.equal(adapter.model(IDS).logits, logits)
    assert update.realised == pytest.approx(1, abs=1e-3)
    moved = before - adapter.δS.detach()
    cosines = [
        torch.cosine_similarity(moved[span], V[m][0], dim=0).clamp(min=0)
        for m, span in adapter.spans.items()
    ]
    assert update.cos_upd == pytest.approx(float(torch.stack(cosines).mean()), abs=1e-6)
    assert update.cos_upd > 0


def test_a_gradient_of_zero_is_none():
    """A step in which nothing is routed, or everything, leaves the other vector, its moments and its count."""
    (adapter, optim), (alone, other) = make(), make()
    for step in range(STEPS):
        routed = both(adapter, step)
        if step % 3 == 1:
            update = optim.step(replace(routed, quar=torch.zeros_like(routed.quar)))
            other.step(replace(routed, quar=None))
            assert update.q_egy == 0.0
        elif step % 3 == 2:
            update = optim.step(replace(routed, keep=torch.zeros_like(routed.keep)))
            other.step(replace(routed, keep=None))
            assert update.q_egy == 1.0
        else:
            optim.step(routed)
            other.step(routed)
        assert state(adapter, optim) == state(alone, other), step
    before = state(adapter, optim)
    nothing = optim.step(Routed(torch.zeros(len(adapter)), torch.zeros(len(adapter))))
    assert (nothing.stepped, nothing.gn, state(adapter, optim)) == (False, 0.0, before)


def test_a_gradient_of_zero_is_finite():
    """Pairs whose loss has saturated give none; that is no divergence."""
    learner = AdapterOnly(tiny_policy(), HYPER, STEPS)
    nothing = learner.step()
    assert (nothing.stepped, nothing.skipped, nothing.gn) == (False, False, 0.0)
    assert learner.step(finite=False) is None
