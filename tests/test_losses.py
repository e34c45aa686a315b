"""Each loss against a reference written from its paper, in loops; then what all of them must survive."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vgrout.config.settings import LossConfig, LossName
from vgrout.loop.losses import LossInput, Norm, log_ratio, policy_loss

G, T = 4, 6
LENGTHS = (6, 3, 1, 4)
NORM = Norm(rollouts=8, max_new=10, tokens=17)
LOSSES = get_args(LossName)
DIVISOR = {"grpo": 8 * 10, "dppo_tv": 17, "icepop": 17}
EVERY = pytest.mark.parametrize("name", LOSSES)


def make(seed=0, spread=0.7, **changes):
    """Random log-probs whose ratios leave every clip range on both sides."""
    noise = torch.Generator().manual_seed(seed)

    def logps():
        return -3 * torch.rand(G, T, generator=noise, dtype=torch.float64)

    logp = logps()

    def near():
        return (logp + spread * torch.randn(G, T, generator=noise, dtype=torch.float64)).clamp(
            max=-1e-3
        )

    x = LossInput(
        logp=logp,
        logp_sampler=near(),
        logp_ref=near(),
        logp_teacher=near(),
        advantages=torch.tensor([1.5, -0.5, 0.25, -1.25], dtype=torch.float64),
        mask=torch.arange(T)[None] < torch.tensor(LENGTHS)[:, None],
        norm=NORM,
    )
    return replace(x, **changes)


def loss(x, **cfg):
    return policy_loss(x, LossConfig(**cfg)).per_rollout


def gradient(x, **cfg):
    logp = x.logp.clone().requires_grad_()
    loss(replace(x, logp=logp), **cfg).sum().backward()
    return logp.grad


def by_token(x, term, divide):
    A = x.advantages.tolist()
    return torch.tensor(
        [sum(term(b, t, A[b]) for t in range(LENGTHS[b])) / divide(b) for b in range(G)],
        dtype=torch.float64,
    )


def ref_grpo(x, divide=lambda _: 8 * 10):
    """PPO's loss where the ratio is 1: no token is clipped."""
    return by_token(x, lambda b, t, A: -A, divide)


def ref_dropped(x, keeps):
    """−A π/π_s of the tokens whose π and π_s are near each other, over the step's tokens."""

    def term(b, t, A):
        π, π_s = (math.exp(float(logp[b, t])) for logp in (x.logp, x.logp_sampler))
        return -A * π / π_s if keeps(π, π_s) else 0.0

    return by_token(x, term, lambda _: 17)


REFERENCES = {
    "grpo": ref_grpo,
    "dppo_tv": lambda x: ref_dropped(x, lambda π, π_s: abs(π - π_s) <= 0.2),
    "icepop": lambda x: ref_dropped(x, lambda π, π_s: 0.2 <= π / π_s <= 5),
}


@pytest.mark.parametrize("name", ["grpo", "icepop"])
def test_the_kls_gradient(name):
    """Summed over every token of a vocabulary, each as often as π samples it: that of KL(ref ‖ π)."""
    noise = torch.Generator().manual_seed(0)
    V = 6
    logits, ref = torch.randn(2, V, generator=noise, dtype=torch.float64)
    logits.requires_grad_()
    logp, logq = logits.log_softmax(0), ref.log_softmax(0)
    x = LossInput(
        logp=logp[:, None],
        logp_sampler=logp.detach()[:, None],
        logp_ref=logq[:, None],
        advantages=torch.zeros(V, dtype=torch.float64),
        mask=torch.ones(V, 1, dtype=torch.bool),
        norm=Norm(rollouts=1, max_new=1, tokens=1),
    )
    per_token = policy_loss(x, LossConfig(loss=name, beta=0.5)).per_rollout
    (got,) = torch.autograd.grad(logp.detach().exp() @ per_token, logits, retain_graph=True)
    (want,) = torch.autograd.grad(0.5 * (logq.exp() * (logq - logp)).sum(), logits)
    assert got.tolist() == pytest.approx(want.tolist())


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
    if name != "grpo":
        assert lows > 0 < highs, "both bounds were visited"


def test_biased_grpo_divides_by_each_rollouts_length():
    x = make()
    assert torch.allclose(
        loss(x, unbiased=False), ref_grpo(x, lambda b: 8 * LENGTHS[b]), rtol=1e-12
    )


@EVERY
def test_gradient_check_in_double(name):
    """Masks of dppo_tv and icepop are constant between their thresholds. grpo's ratio is 1 whatever π is, so its
    value, unlike its gradient, has only the KL's differences."""
    x = make(1)
    beta = 0.7 if name == "grpo" else 0.0
    if name == "grpo":
        x = replace(x, advantages=torch.zeros_like(x.advantages))
    total = torch.autograd.gradcheck(
        lambda logp: loss(replace(x, logp=logp), loss=name, beta=beta),
        x.logp.clone().requires_grad_(),
    )
    assert total


@EVERY
def test_on_policy_gradient_is_plain_reinforce(name):
    """At ratio 1 every loss is −A ∇logπ over its own normaliser."""
    x = make()
    x = replace(x, logp_sampler=x.logp)
    want = torch.where(x.mask, -x.advantages[:, None] / DIVISOR[name], 0.0)
    assert torch.allclose(gradient(x, loss=name), want, rtol=1e-12)


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


def everything(name):
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
    others = ("logp", "logp_sampler", "logp_ref", "logp_teacher")
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
    x = make(logp=a, logp_sampler=c, logp_ref=b, logp_teacher=c)
    x = replace(x, advantages=sign * torch.ones(G, dtype=dtype))
    assert loss(x, **everything(name)).isfinite().all()
    assert gradient(x, **everything(name)).isfinite().all()


def test_adv_tau_and_teacher_tau():
    x = make()
    assert torch.allclose(
        loss(x, adv_tau=0.5), loss(replace(x, advantages=x.advantages / 2)), rtol=1e-12
    )
    # on policy, pure teacher_tau is the reverse-KL gradient −τ (log π_teacher − log π) ∇log π
    x = replace(x, advantages=torch.zeros(G, dtype=torch.float64))
    want = torch.where(x.mask, -0.3 * (x.logp_teacher - x.logp) / 80, 0.0)
    assert torch.allclose(gradient(x, teacher_tau=0.3, teacher_model="t"), want, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dppo_diff_low": 0.1}, "--dppo-diff-low: not read by --loss grpo"),
        ({"loss": "dppo_tv", "beta": 0.1}, "no KL term"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**changes)


def test_a_ratio_is_bounded():
    logp, there = torch.tensor([[50.0, -50.0, 3.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert log_ratio(logp, torch.zeros(1, 3), there).tolist() == [[20, -20, 3]]
