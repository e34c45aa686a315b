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
from vgrout.losses import LossInput, Norm, kl_to, policy_loss, teacher_weight

G, T = 4, 6
LENGTHS = (6, 3, 1, 4)
NORM = Norm(rollouts=8, max_new=10, tokens=17)
LOSSES = get_args(LossName)


def make(seed: int = 0, spread: float = 0.7, **changes: Any) -> LossInput:
    """Random log-probs whose ratios leave every clip range on both sides."""
    noise = torch.Generator().manual_seed(seed)

    def logps() -> Tensor:
        return -3 * torch.rand(G, T, generator=noise, dtype=torch.float64)

    logp = logps()

    def near() -> Tensor:
        return (logp + spread * torch.randn(G, T, generator=noise, dtype=torch.float64)).clamp(max=-1e-3)

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
    assert logp.grad is not None
    return logp.grad


# ── references: token losses and normalisers as printed in the papers ───────────────────────────────────────────────


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def by_token(x: LossInput, term: Callable[[int, int, float], float], divide: Callable[[int], float]) -> Tensor:
    A = x.advantages.tolist()
    return torch.tensor(
        [sum(term(b, t, A[b]) for t in range(LENGTHS[b])) / divide(b) for b in range(G)], dtype=torch.float64
    )


def ratio(x: LossInput, base: Tensor, b: int, t: int) -> float:
    return math.exp(float(x.logp[b, t]) - float(base[b, t]))


def ref_ppo(x: LossInput, low: float, high: float, divide: Callable[[int], float]) -> Tensor:
    def term(b: int, t: int, A: float) -> float:
        r = ratio(x, x.logp_old, b, t)
        return -min(r * A, clip(r, 1 - low, 1 + high) * A)

    return by_token(x, term, divide)


def ref_gspo(x: LossInput) -> Tensor:
    out = []
    for b in range(G):
        s = math.prod(ratio(x, x.logp_old, b, t) for t in range(LENGTHS[b])) ** (1 / LENGTHS[b])
        A = float(x.advantages[b])
        out.append(-min(s * A, clip(s, 1 - 3e-4, 1 + 4e-4) * A) / 8)
    return torch.tensor(out, dtype=torch.float64)


def ref_cispo(x: LossInput) -> Tensor:
    return by_token(x, lambda b, t, A: -min(ratio(x, x.logp_old, b, t), 5.0) * A * float(x.logp[b, t]), lambda b: 17)


def ref_dppo(x: LossInput) -> Tensor:
    def term(b: int, t: int, A: float) -> float:
        d = math.exp(float(x.logp[b, t])) - math.exp(float(x.logp_sampler[b, t]))
        return -A * ratio(x, x.logp_sampler, b, t) if -0.2 <= d <= 0.2 else 0.0

    return by_token(x, term, lambda b: 17)


def ref_icepop(x: LossInput) -> Tensor:
    def term(b: int, t: int, A: float) -> float:
        r = ratio(x, x.logp_sampler, b, t)
        return -A * r if 0.2 <= r <= 5 else 0.0

    return by_token(x, term, lambda b: 17)


REFERENCES: dict[str, Callable[[LossInput], Tensor]] = {
    "grpo": lambda x: ref_ppo(x, 0.2, 0.2, lambda b: 8 * 10),
    "dr_grpo": lambda x: ref_ppo(x, 0.2, 0.2, lambda b: 8 * 10),
    "dapo": lambda x: ref_ppo(x, 0.2, 0.28, lambda b: 17),
    "gspo": ref_gspo,
    "cispo": ref_cispo,
    "dppo_tv": ref_dppo,
    "icepop": ref_icepop,
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_its_papers_formula(name: LossName) -> None:
    lows = highs = 0
    for seed in range(8):
        x = make(seed, spread=1.5)
        output = policy_loss(x, LossConfig(loss=name))
        assert torch.allclose(output.per_rollout, REFERENCES[name](x), rtol=1e-12)
        lows, highs = lows + int(output.low.sum()), highs + int(output.high.sum())
        assert not (output.low & output.high).any()
        assert not ((output.low | output.high) & ~x.mask).any()
    assert (lows > 0) == (highs > 0) == (name != "cispo"), "both sides of the clip were visited"


def test_biased_grpo_divides_by_each_rollouts_length() -> None:
    x = make()
    assert torch.allclose(loss(x, unbiased=False), ref_ppo(x, 0.2, 0.2, lambda b: 8 * LENGTHS[b]), rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_are_those_without_gradient(name: LossName) -> None:
    """The `low` and `high` metrics against autograd: they mark exactly the tokens without a policy gradient."""
    x = make(3, spread=1.5)
    output = policy_loss(x, LossConfig(loss=name))
    no_gradient = gradient(x, loss=name) == 0
    assert torch.equal(no_gradient, output.low | output.high | ~x.mask)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_check_in_double(name: LossName) -> None:
    x = make(1)
    if name == "cispo":  # its weight is detached by definition: against the gradient with that weight held
        weight = (x.logp - x.logp_old).exp().clamp(max=5)
        want = torch.where(x.mask, -x.advantages[:, None] * weight / 17, 0.0)
        assert torch.allclose(gradient(x, loss=name), want, rtol=1e-12)
        return
    x = replace(x, weight=0.5 + torch.rand(G, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64))

    def total(logp: Tensor) -> Tensor:  # masks of dppo_tv and icepop are constant between their thresholds
        return loss(replace(x, logp=logp), loss=name)

    assert torch.autograd.gradcheck(total, x.logp.clone().requires_grad_())


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_gradient_check_of_the_kl_in_double(kl: str) -> None:
    x = make(1)

    def total(logp: Tensor) -> Tensor:
        return loss(replace(x, logp=logp), kl=kl, beta=0.7)

    assert torch.autograd.gradcheck(total, x.logp.clone().requires_grad_())


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gradient_is_plain_reinforce(name: LossName) -> None:
    """At ratio 1 every loss is −A ∇logπ over its own normaliser."""
    x = make()
    x = replace(x, logp_old=x.logp, logp_sampler=x.logp)
    divide = {"grpo": 80.0, "dr_grpo": 80.0, "gspo": 8 * torch.tensor(LENGTHS)[:, None]}.get(name, 17.0)
    want = torch.where(x.mask, -x.advantages[:, None] / divide, 0.0)
    assert torch.allclose(gradient(x, loss=name), want, rtol=1e-12)


# ── KL ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_kl_estimators() -> None:
    x = make()
    assert x.logp_ref is not None
    d = x.logp_ref - x.logp
    for name, want in (("k1", -d), ("k2", d**2 / 2), ("k3", d.exp() - d - 1)):
        got = kl_to(x.logp, x.logp_ref, x.mask, LossConfig(kl=name, beta=1.0))
        assert torch.allclose(got, torch.where(x.mask, want, 0.0), rtol=1e-12)


def test_kl_estimators_agree_in_expectation() -> None:
    """Σ_a π(a) k(a) is the KL for k1 and k3, exactly; k2 is close when the two are."""
    noise = torch.Generator().manual_seed(0)
    p = torch.randn(1, 50, generator=noise, dtype=torch.float64).log_softmax(-1)
    q = (p + 0.05 * torch.randn(1, 50, generator=noise, dtype=torch.float64)).log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum())
    every = torch.ones(1, 50, dtype=torch.bool)
    for name, tolerance in (("k1", 1e-12), ("k3", 1e-12), ("k2", 0.1 * kl)):
        got = float((p.exp() * kl_to(p, q, every, LossConfig(kl=name, beta=1.0))).sum())
        assert got == pytest.approx(kl, abs=tolerance)


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "dppo_tv"])
def test_beta_adds_the_kl_with_the_losss_own_normaliser(name: LossName) -> None:
    x = make()
    divide = {"grpo": 80.0, "dr_grpo": 80.0, "gspo": 8 * torch.tensor(LENGTHS, dtype=torch.float64)}.get(name, 17.0)
    assert x.logp_ref is not None
    k3 = kl_to(x.logp, x.logp_ref, x.mask, LossConfig()).sum(1) / divide
    assert torch.allclose(loss(x, loss=name, beta=0.3), loss(x, loss=name) + 0.3 * k3, rtol=1e-12)


# ── invariances ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantage_gives_zero_gradient(name: LossName) -> None:
    x = make(advantages=torch.zeros(G, dtype=torch.float64))
    assert torch.count_nonzero(gradient(x, loss=name)) == 0


@pytest.mark.parametrize("name", LOSSES)
def test_permuting_rollouts_permutes_losses(name: LossName) -> None:
    x = make()
    order = torch.tensor([2, 0, 3, 1])
    tensors = ("logp", "logp_old", "logp_sampler", "logp_ref", "logp_teacher", "advantages", "mask")
    y = replace(x, **{key: getattr(x, key)[order] for key in tensors})
    assert torch.equal(loss(y, loss=name), loss(x, loss=name)[order])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [0.0, -1e3, 1e3, -math.inf, math.inf, math.nan])
def test_padding_content_is_irrelevant(name: str, junk: float) -> None:
    x = make()
    others = ("logp", "logp_old", "logp_sampler", "logp_ref", "logp_teacher", "weight")
    x = replace(x, weight=torch.rand(G, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    y = replace(x, **{key: getattr(x, key).masked_fill(~x.mask, junk) for key in others})
    cfg: dict[str, Any] = {"loss": name, "teacher_tau": 0.5, "beta": 0.0 if name == "dppo_tv" else 0.1}
    assert torch.equal(loss(y, **cfg), loss(x, **cfg))
    assert torch.equal(gradient(y, **cfg), gradient(x, **cfg))


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40, deadline=None)
@given(
    kl=st.sampled_from(["k1", "k2", "k3"]),
    correction=st.sampled_from(["none", "tis", "luffy"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    at=st.lists(st.sampled_from([-1000.0, -90.0, -1e-4, 0.0]), min_size=3 * G * T, max_size=3 * G * T)
    | st.permutations([-1000.0, 0.0, 0.0]).map(lambda ends: [end for end in ends for _ in range(G * T)]),
    sign=st.sampled_from([-1.0, 1.0]),
    padding=st.sampled_from([-math.inf, math.nan, 0.0]),
)
def test_extreme_log_ratios_stay_finite(
    name: str, kl: str, correction: Any, dtype: torch.dtype, at: list[float], sign: float, padding: float
) -> None:
    """Log-ratios of ±1000 on real tokens, alone or all of them, −inf and NaN on padding: value and gradient are
    finite, with every correction of a teacher's rows."""
    correction = "none" if name == "gspo" else correction  # its ratio is one a sequence, a correction one a token
    a, b, c = torch.tensor(at, dtype=dtype).view(3, G, T)
    mask = make().mask
    a, b, c = (v.masked_fill(~mask, padding) for v in (a, b, c))
    weight = teacher_weight(a, c, mask, LossConfig(teacher_correction=correction))
    assert weight.isfinite().all()
    x = make(logp=a, logp_old=b, logp_sampler=c, logp_ref=b, logp_teacher=c, weight=weight)
    x = replace(x, advantages=sign * torch.ones(G, dtype=dtype))
    cfg: dict[str, Any] = {"loss": name, "teacher_tau": 0.1} | ({} if name == "dppo_tv" else {"kl": kl, "beta": 0.1})
    assert loss(x, **cfg).isfinite().all()
    assert gradient(x, **cfg).isfinite().all()


# ── advantages, teacher rows ────────────────────────────────────────────────────────────────────────────────────────


def test_adv_tau_and_teacher_tau() -> None:
    x = make()
    assert torch.allclose(loss(x, adv_tau=0.5), loss(replace(x, advantages=x.advantages / 2)), rtol=1e-12)
    assert torch.count_nonzero(gradient(x, adv_tau=0.0)) == 0
    # on policy, pure teacher_tau is the reverse-KL gradient −τ (log π_teacher − log π) ∇log π
    x = replace(x, logp_old=x.logp, advantages=torch.zeros(G, dtype=torch.float64))
    assert x.logp_teacher is not None
    want = torch.where(x.mask, -0.3 * (x.logp_teacher - x.logp) / 80, 0.0)
    assert torch.allclose(gradient(x, teacher_tau=0.3, teacher_model="t"), want, rtol=1e-12)


def test_teacher_weights_give_the_papers_gradients() -> None:
    x = make(2, spread=2.0)
    logp = x.logp.clone().requires_grad_()
    cut = int(((x.logp - x.logp_sampler).exp() > 2)[x.mask].sum())
    assert 0 < cut < sum(LENGTHS), "tis is visited on both sides of its bound"
    for how, behaviour, shaped in (
        ("none", None, logp),
        ("luffy", None, logp.exp() / (logp.exp() + 0.1)),  # f(π), LUFFY eq. 7
        ("tis", x.logp_sampler, (logp - x.logp_sampler).exp().clamp(max=2).detach() * logp),
    ):
        (want,) = torch.autograd.grad(-(shaped * x.advantages[:, None])[x.mask].sum() / 80, logp)
        cfg = LossConfig(teacher_correction=how)
        weight = teacher_weight(x.logp, behaviour, x.mask, cfg)
        got = gradient(replace(x, logp_old=x.logp, weight=weight), teacher_correction=how)
        assert torch.allclose(got, want, rtol=1e-10), how
    with pytest.raises(ValueError, match="no teacher log-probs"):
        teacher_weight(x.logp, None, x.mask, LossConfig(teacher_correction="tis"))


# ── configuration ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "icepop", "clip_low": -0.1}, "--clip-low -0.1"),
        ({"clip_low": 0.1}, "--clip-low 0.1: not read by --loss grpo with one update a batch"),
        ({"loss": "gspo", "clip_high": 1e-9}, "--clip-high 1e-09: not read by --loss gspo with one update a batch"),
        ({"clip_low": 1.0, "updates_per_batch": 2}, "--clip-low 1.0: no ratio lies below 1 − 1.0"),
        ({"teacher_correction": "luffy", "updates_per_batch": 2}, "luffy with --updates-per-batch 2"),
        ({"kl": "k1"}, "--kl: not read"),
        ({"dppo_diff_low": 0.1, "tis_cap": 3.0}, "--dppo-diff-low, --tis-cap: not read"),
        ({"loss": "cispo", "clip_low": 0.1}, "--loss cispo, which has no such bound"),
        ({"loss": "dppo_tv", "clip_high": 5.0}, "--loss dppo_tv, which has no such bound"),
        ({"beta": -1.0}, "--beta"),
        ({"beta": math.nan}, "finite"),
        ({"loss": "icepop", "clip_low": 6.0}, "--clip-high 5.0: should exceed --clip-low 6.0"),
        ({"loss": "dr_grpo", "unbiased": False}, "say --loss grpo"),
        ({"loss": "dppo_tv", "beta": 0.1}, "no KL term"),
        ({"loss": "gspo", "teacher_correction": "luffy"}, "one a sequence"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**changes)


def test_missing_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="--beta"):
        loss(make(logp_ref=None), beta=0.1)
    with pytest.raises(ValueError, match="--teacher-tau"):
        loss(make(logp_teacher=None), teacher_tau=0.1, teacher_model="t")
