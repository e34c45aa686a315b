import io
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tiny import tiny
from vgrout.config.run import OptConfig
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.optim import Optimizer, lr_at
from vgrout.tensor_types import ModuleGrads, Routed

HYPER = OptConfig(lr=3e-2, adam_beta1=0.5, adam_beta2=0.9, weight_decay=0.1, warmup_frac=0.2, grad_clip=10.0)
STEPS = 10
IDS = torch.tensor([[3, 14, 15, 92]])


def make() -> tuple[SvdAdapter, Optimizer]:
    adapter = SvdAdapter(tiny(), None)
    return adapter, Optimizer(adapter, HYPER, STEPS)


def grads(adapter: SvdAdapter, seed: int, scale: float = 1.0) -> ModuleGrads:
    flat = scale * torch.randn(len(adapter), generator=torch.Generator().manual_seed(seed))
    return adapter.by_module(flat)


def textbook_adamw(gs: list[Tensor], lrs: list[float], betas: tuple[float, float], decay: float) -> Tensor:
    """Loshchilov & Hutter 2019, algorithm 2, from a zero start."""
    w, m, v = torch.zeros_like(gs[0]), torch.zeros_like(gs[0]), torch.zeros_like(gs[0])
    for t, (g, lr) in enumerate(zip(gs, lrs, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        w = w - lr * decay * w
        w = w - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + 1e-8)
    return w


def test_steps_are_textbook_adamw_on_jointly_clipped_gradients() -> None:
    adapter, optim = make()
    kept: list[Tensor] = []
    parked: list[Tensor] = []
    lrs: list[float] = []
    for step in range(10):
        keep, quar = grads(adapter, step), grads(adapter, 100 + step, 0.5)
        update = optim.step(Routed(keep, quar))
        assert update is not None
        gk, gq = adapter.flat(keep).double(), adapter.flat(quar).double()
        gn = float((gk.square().sum() + gq.square().sum()).sqrt())
        assert gn > 10, "or the clip is not tested"
        assert update.gn == pytest.approx(gn)
        assert update.q_egy == pytest.approx(float(gq.norm() / (gk.norm() + gq.norm())))
        kept.append(gk * 10 / gn)
        parked.append(gq * 10 / gn)
        lrs.append(update.lr)
    for vector, gs in ((adapter.δS, kept), (adapter.δS_hack, parked)):
        want = textbook_adamw(gs, lrs, (0.5, 0.9), 0.1)
        assert (vector - want).norm() / want.norm() < 1e-5  # fp32 against fp64


def test_schedule() -> None:
    lrs = [lr_at(step, HYPER, STEPS) for step in range(11)]
    assert lrs[0] == pytest.approx(3e-5)
    assert lrs[1] == pytest.approx(3e-2 * (1e-3 + 0.999 / 2))
    assert lrs[2] == pytest.approx(3e-2), "peak after round(0.2 · 10) steps"
    assert lrs[6] == pytest.approx(1.5e-2), "half way down the cosine"
    assert lrs[10] == pytest.approx(0)
    assert all(a > b for a, b in pairwise(lrs[2:]))
    assert lr_at(0, replace(HYPER, warmup_frac=0.0), STEPS) == pytest.approx(3e-5), "at least one step of warm-up"


def test_a_step_with_nothing_to_learn_moves_the_schedule_on_and_nothing_else() -> None:
    adapter, optim = make()
    optim.step(Routed(grads(adapter, 0), grads(adapter, 1)))
    state, vectors = repr(optim.state_dict()["adamw"]), adapter.state_dict()
    assert optim.step(None) is None
    assert repr(optim.state_dict()["adamw"]) == state
    assert all(torch.equal(vectors[k], v) for k, v in adapter.state_dict().items())
    update = optim.step(Routed(grads(adapter, 2)))
    assert update is not None
    assert update.lr == lr_at(2, HYPER, STEPS)


def test_no_quarantine_gradient_leaves_it_exactly_zero() -> None:
    adapter, optim = make()
    for step in range(3):
        update = optim.step(Routed(grads(adapter, step)))
        assert update is not None
        assert update.gn_quar == update.q_egy == 0
    assert adapter.δS.abs().min() > 0
    assert torch.count_nonzero(adapter.δS_hack) == 0
    # and one that has moved already neither decays nor drifts on
    optim.step(Routed(grads(adapter, 3), grads(adapter, 4)))
    before = adapter.δS_hack.clone()
    optim.step(Routed(grads(adapter, 5)))
    assert torch.equal(adapter.δS_hack, before)


def test_a_vector_without_gradient_stays_whichever_it_is() -> None:
    adapter, optim = make()
    optim.step(Routed(grads(adapter, 0)))
    before = adapter.δS.clone()
    update = optim.step(Routed(keep=None, quar=grads(adapter, 1), apart=True))
    assert update is not None
    assert update.q_egy == 1
    assert torch.equal(adapter.δS, before)
    assert adapter.δS_hack.any()


def test_vectors_that_learn_apart_are_clipped_apart() -> None:
    hyper = OptConfig(lr=1e-3, adam_beta1=0.0, adam_beta2=0.0, weight_decay=0.0, warmup_frac=0.0, grad_clip=1e-7)

    def stepped(apart: bool) -> tuple[Tensor, Tensor]:
        adapter = SvdAdapter(tiny(), None)
        same, larger = (adapter.by_module(scale * torch.ones(len(adapter))) for scale in (1.0, 1000.0))
        Optimizer(adapter, hyper, 1).step(Routed(keep=same, quar=larger, apart=apart))
        return adapter.δS.detach(), adapter.δS_hack.detach()

    keep, quar = stepped(apart=True)
    assert torch.allclose(keep, quar)  # each at its own norm: equal directions, equal steps
    keep, quar = stepped(apart=False)  # 1e-10 of gradient against Adam's epsilon of 1e-8: next to no step
    assert keep.abs().max() < 0.5 * quar.abs().max()


def test_delta_is_the_applied_change_and_the_model_is_merged_again() -> None:
    adapter, optim = make()
    optim.step(Routed(grads(adapter, 0)))
    before, logits = adapter.δS.clone(), adapter.model(IDS).logits
    update = optim.step(Routed(grads(adapter, 1)))
    assert update is not None
    assert torch.equal(adapter.flat(update.delta), adapter.δS - before)
    assert not torch.equal(adapter.model(IDS).logits, logits)


def test_scale_shrinks_the_applied_change_and_nothing_else() -> None:
    (whole, a), (part, b) = make(), make()
    for step in range(3):
        full, shrunk = a.step(Routed(grads(whole, step))), b.step(replace(Routed(grads(part, step)), scale=0.25))
        assert full is not None
        assert shrunk is not None
        part.load_state_dict(whole.state_dict())  # the same point again: weight decay looks at it
        assert torch.allclose(part.flat(shrunk.delta), 0.25 * whole.flat(full.delta), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["keep", "quar"])
def test_non_finite_gradients_never_reach_the_optimiser(value: float, where: str) -> None:
    adapter, optim = make()
    optim.step(Routed(grads(adapter, 0), grads(adapter, 1)))
    state, vectors = repr(optim.state_dict()["adamw"]), adapter.state_dict()
    bad = {"keep": grads(adapter, 2), "quar": grads(adapter, 3)}
    bad[where][adapter.names[3]][1] = value
    assert optim.step(Routed(**bad)) is None
    assert repr(optim.state_dict()["adamw"]) == state
    assert all(torch.equal(vectors[k], v) for k, v in adapter.state_dict().items())
    assert optim.step(Routed(grads(adapter, 4), grads(adapter, 5))) is not None


def test_a_huge_finite_gradient_is_clipped_not_skipped() -> None:
    adapter, optim = make()
    update = optim.step(Routed(grads(adapter, 0, 1e30)))
    assert update is not None, "its squares overflow fp32, its norm does not"
    assert update.gn > 1e30
    assert adapter.δS.isfinite().all()


def test_resume_is_bit_exact() -> None:
    whole, optim = make()
    for step in range(6):
        optim.step(Routed(grads(whole, step), grads(whole, 50 + step) if step % 2 else None))
    half, first = make()
    for step in range(3):
        first.step(Routed(grads(half, step), grads(half, 50 + step) if step % 2 else None))
    file = io.BytesIO()
    torch.save({"optim": first.state_dict(), "adapter": half.state_dict()}, file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again, second = make()
    again.load_state_dict(state["adapter"])
    second.load_state_dict(state["optim"])
    for step in range(3, 6):
        second.step(Routed(grads(again, step), grads(again, 50 + step) if step % 2 else None))
    assert torch.equal(again.δS, whole.δS)
    assert torch.equal(again.δS_hack, whole.δS_hack)


def test_a_missing_module_is_an_error_not_a_zero() -> None:
    adapter, optim = make()
    keep = dict(list(grads(adapter, 0).items())[1:])
    with pytest.raises(AssertionError, match=r"layers\.0\.self_attn\.q_proj"):
        optim.step(Routed(keep))
