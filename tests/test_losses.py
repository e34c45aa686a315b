"""Each loss against a reference written from its paper, in loops; then what all of them must survive."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgrout.config.loss import LossConfig, LossName
from vgrout.losses import LossInput, Norm, kl_to, log_ratio, policy_loss

G, T = 4, 6
LENGTHS = (6, 3, 1, 4)
NORM = Norm(rollouts=8, max_new=10, tokens=17)
LOSSES = get_args(LossName)
DIVISOR = {"grpo": 8 * 10, "dppo_tv": 17, "icepop": 17}
EVERY = pytest.mark.parametrize("name", LOSSES)


def make(seed: int = 0, spread: float = 0.7, **changes: Any) -> LossInput:
    """Random log-probs whose ratios leave every clip range on both sides."""
    noise = torch.Generator().manual_seed(seed)

    def logps() -> Tensor:
        return -3 * torch.rand(G, T, generator=noise, dtype=torch.float64)

    logp = logps()

    def near() -> Tensor:
        return (logp + spread * torch.randn(G, T, generator=noise, dtype=torch.float64)).clamp(
            max=-1e-3
        )

    x = LossInput(
        logp=logp,
        logp_old=near(),
        logp_sampler=near(),
        logp_ref=near(),
        logp_teacher=near(),
        advantages=torch.tensor([1.5, -0.5, 0.25, -1.25], dtype=torch.float64),
        mask=torch.arange(T)[None] < torch.tensor(LENGTHS)[:, None],
        norm=NORM,
    )
    return replace(x, **changes)


def loss(x: LossInput, **cfg: Any) -> Tensor:
    return policy_loss(x, LossConfig(**cfg)).per_rollout


def gradient(x: LossInput, **cfg: Any) -> Tensor:
    logp = x.logp.clone().requires_grad_()
    loss(replace(x, logp=logp), **cfg).sum().backward()
    return logp.grad


def by_token(
    x: LossInput, term: Callable[[int, int, float], float], divide: Callable[[int], float]
) -> Tensor:
    A = x.advantages.tolist()
    return torch.tensor(
        [sum(term(b, t, A[b]) for t in range(LENGTHS[b])) / divide(b) for b in range(G)],
        dtype=torch.float64,
    )


def ref_ppo(x: LossInput, divide: Callable[[int], float] = lambda _: 8 * 10) -> Tensor:
    def term(b: int, t: int, A: float) -> float:
        r = math.exp(float(x.logp[b, t] - x.logp_old[b, t]))
        return -min(r * A, max(0.8, min(1.2, r)) * A)

    return by_token(x, term, divide)


def ref_dropped(x: LossInput, keeps: Callable[[float, float], bool]) -> Tensor:
    """−A π/π_s of the tokens whose π and π_s are near each other, over the step's tokens."""

    def term(b: int, t: int, A: float) -> float:
        π, π_s = (math.exp(float(logp[b, t])) for logp in (x.logp, x.logp_sampler))
        return -A * π / π_s if keeps(π, π_s) else 0.0

    return by_token(x, term, lambda _: 17)


REFERENCES: dict[str, Callable[[LossInput], Tensor]] = {
    "grpo": ref_ppo,
    "dppo_tv": lambda x: ref_dropped(x, lambda π, π_s: abs(π - π_s) <= 0.2),
    "icepop": lambda x: ref_dropped(x, lambda π, π_s: 0.2 <= π / π_s <= 5),
}


@pytest.mark.parametrize("moved", [0.0, 0.8])
@pytest.mark.parametrize("name", ["grpo", "icepop"])
def test_the_kls_gradient(name: str, moved: float) -> None:
    """Summed over every token of a vocabulary, each as often as π_old samples it: without the correction that of
    KL(ref ‖ π), while π is π_old; with --kl-bias-correction that of KL(π ‖ ref), after further updates too."""
    noise = torch.Generator().manual_seed(0)
    V = 6
    logits, ref, step = torch.randn(3, V, generator=noise, dtype=torch.float64)
    logits.requires_grad_()
    logp, logq = logits.log_softmax(0), ref.log_softmax(0)
    old = (logits.detach() + moved * step).log_softmax(0)
    x = LossInput(
        logp=logp[:, None],
        logp_old=old[:, None],
        logp_sampler=old[:, None],
        logp_ref=logq[:, None],
        advantages=torch.zeros(V, dtype=torch.float64),
        mask=torch.ones(V, 1, dtype=torch.bool),
        norm=Norm(rollouts=1, max_new=1, tokens=1),
    )

    def of(value: Tensor) -> list[float]:
        return torch.autograd.grad(value, logits, retain_graph=True)[0].tolist()

    def of_loss(corrected: bool) -> list[float]:
        cfg = LossConfig(loss=name, beta=0.5, kl_bias_correction=corrected)
        return of((old.exp() * policy_loss(x, cfg).per_rollout).sum())

    reverse = of(0.5 * (logp.exp() * (logp - logq)).sum())
    forward = of(0.5 * (logq.exp() * (logq - logp)).sum())
    assert of_loss(corrected=True) == pytest.approx(reverse)
    assert reverse != pytest.approx(forward, rel=0.1)
    if not moved:
        assert of_loss(corrected=False) == pytest.approx(forward)


def test_a_corrected_kl_is_finite_and_zero_on_padding() -> None:
    wild = torch.where(make().mask, torch.tensor(-400.0), -math.inf)
    x = make(logp_ref=wild, logp_old=wild)
    assert loss(x, beta=0.1, kl_bias_correction=True).isfinite().all()
    got = gradient(x, beta=0.1, kl_bias_correction=True)
    assert got.isfinite().all()
    assert not got[~x.mask].any()


@EVERY
def test_loss_is_its_papers_formula(name):
    """`low` and `high` mark exactly the tokens without a policy gradient, by autograd."""
    lows = highs = 0
    for seed in range(8):
        x = make(seed, spread=1.5)
        output = policy_loss(x, LossConfig(loss=name))
        assert torch.allclose(output.per_rollout, REFERENCES[name](x), rtol=1e-12)
        assert not (output.low & output.high).any()
        assert torch.equal(gradient(x, loss=name) == 0, output.low | output.high | ~x.mask)
        lows, highs = (
            lows + int((output.low & x.mask).sum()),
            highs + int((output.high & x.mask).sum()),
        )
    assert lows > 0 < highs, "both sides of the clip were visited"


def test_biased_grpo_divides_by_each_rollouts_length():
    x = make()
    assert torch.allclose(loss(x, unbiased=False), ref_ppo(x, lambda b: 8 * LENGTHS[b]), rtol=1e-12)


@EVERY
def test_gradient_check_in_double(name):
    """Masks of dppo_tv and icepop are constant between their thresholds; grpo with a KL."""
    x, beta = make(1), 0.7 if name == "grpo" else 0.0
    total = torch.autograd.gradcheck(
        lambda logp: loss(replace(x, logp=logp), loss=name, beta=beta),
        x.logp.clone().requires_grad_(),
    )
    assert total


@EVERY
def test_on_policy_gradient_is_plain_reinforce(name):
    """At ratio 1 every loss is −A ∇logπ over its own normaliser."""
    x = make()
    x = replace(x, logp_old=x.logp, logp_sampler=x.logp)
    want = torch.where(x.mask, -x.advantages[:, None] / DIVISOR[name], 0.0)
    assert torch.allclose(gradient(x, loss=name), want, rtol=1e-12)


def test_k3_is_the_kl_in_expectation():
    """Σ_a π(a) k(a), exactly."""
    noise = torch.Generator().manual_seed(0)
    p, q = (
        torch.randn(1, 50, generator=noise, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    got = (p.exp() * kl_to(p, q, torch.ones(1, 50, dtype=torch.bool))).sum()
    assert float(got) == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "icepop"])
def test_beta_adds_k3_with_the_losss_own_normaliser(name):
    x = make()
    d = x.logp_ref - x.logp
    k3 = torch.where(x.mask, d.exp() - d - 1, 0.0)
    output = policy_loss(x, LossConfig(loss=name, beta=0.3))
    assert torch.allclose(output.kl, k3, rtol=1e-12)
    assert torch.allclose(
        output.per_rollout, loss(x, loss=name) + 0.3 * k3.sum(1) / DIVISOR[name], rtol=1e-12
    )


def everything(name: LossName) -> dict[str, Any]:
    """A loss with all that can be added to it."""
    return {
        "loss": name,
        "teacher_tau": 0.5,
        "teacher_model": "t",
        "beta": 0.0 if name == "dppo_tv" else 0.1,
    }


@EVERY
@pytest.mark.parametrize("junk", [0.0, -1e3, 1e3, -math.inf, math.inf, math.nan])
def test_padding_content_is_irrelevant(name, junk):
    x, cfg = make(), everything(name)
    others = ("logp", "logp_old", "logp_sampler", "logp_ref", "logp_teacher")
    y = replace(x, **{key: getattr(x, key).masked_fill(~x.mask, junk) for key in others})
    assert torch.equal(loss(y, **cfg), loss(x, **cfg))
    assert torch.equal(gradient(y, **cfg), gradient(x, **cfg))


@EVERY
@settings(max_examples=40)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    at=st.lists(
        st.sampled_from([-1000.0, -90.0, -1e-4, 0.0]), min_size=3 * G * T, max_size=3 * G * T
    )
    | st.permutations([-1000.0, 0.0, 0.0]).map(
        lambda ends: [end for end in ends for _ in range(G * T)]
    ),
    sign=st.sampled_from([-1.0, 1.0]),
)
def test_extreme_log_ratios_stay_finite(name, dtype, at, sign):
    """Log-ratios of ±1000 on real tokens, alone or all of them: value and gradient are finite."""
    a, b, c = torch.tensor(at, dtype=dtype).view(3, G, T)
    x = make(logp=a, logp_old=b, logp_sampler=c, logp_ref=b, logp_teacher=c)
    x = replace(x, advantages=sign * torch.ones(G, dtype=dtype))
    assert loss(x, **everything(name)).isfinite().all()
    assert gradient(x, **everything(name)).isfinite().all()


def test_adv_tau_and_teacher_tau():
    x = make()
    assert torch.allclose(
        loss(x, adv_tau=0.5), loss(replace(x, advantages=x.advantages / 2)), rtol=1e-12
    )
    # on policy, pure teacher_tau is the reverse-KL gradient −τ (log π_teacher − log π) ∇log π
    x = replace(x, logp_old=x.logp, advantages=torch.zeros(G, dtype=torch.float64))
    want = torch.where(x.mask, -0.3 * (x.logp_teacher - x.logp) / 80, 0.0)
    assert torch.allclose(gradient(x, teacher_tau=0.3, teacher_model="t"), want, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "icepop", "clip_low": -0.1}, "--clip-low -0.1"),
        ({"clip_low": 0.1}, "--clip-low: not read by --loss grpo with --updates-per-batch 1"),
        ({"clip_low": 1.0, "updates_per_batch": 2}, "--clip-low 1.0: should be less than 1.0"),
        ({"dppo_diff_low": 0.1}, "--dppo-diff-low: not read by --loss grpo"),
        ({"loss": "dppo_tv", "clip_high": 5.0}, "--clip-high: not read by --loss dppo_tv"),
        ({"beta": -1.0}, "--beta"),
        ({"adv_tau": 0.0}, "--adv-tau 0.0"),
        ({"beta": math.nan}, "finite"),
        ({"loss": "icepop", "clip_low": 6.0}, "--clip-low 6.0: should be less than 5.0"),
        ({"loss": "dppo_tv", "beta": 0.1}, "no KL term"),
        ({"kl_bias_correction": True}, "not read without --beta"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**changes)


def test_a_token_of_advantage_0_loses_nothing_to_a_clip() -> None:
    logp = torch.tensor([[-5.0, 5.0]])
    zero, there = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    x = LossInput(logp, zero, zero, torch.zeros(1), there, Norm(1, 2, 2))
    output = policy_loss(x, LossConfig(loss="grpo"))
    assert not output.low.any()
    assert not output.high.any()


def test_a_ratio_is_bounded() -> None:
    logp, there = torch.tensor([[50.0, -50.0, 3.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert log_ratio(logp, torch.zeros(1, 3), there).tolist() == [[20, -20, 3]]
