"""Policy-gradient losses: a typed batch of token log-probs → one loss per rollout. Pure functions.

Axes: B rollouts, T completion tokens (right-padded). π is the trainer's distribution, π_s the
sampler's. A batch is learnt from in one update, so PPO's ratio of π to the policy before the update
is 1, and its clip has nothing to clip. π/π_s may differ from 1 all the same. All losses are finite
at any log-ratio: the mask is applied before exp, and log-ratios are cut at ±20 (e^20 ≈ 5e8),
beyond which a token has no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.config.settings import LOSSES as LOSS_SPECS
from vgrout.config.settings import LossConfig

PerToken = Float[Tensor, "B T"]
PerRollout = Float[Tensor, " B"]
Mask = Bool[Tensor, "B T"]

LOG_RATIO_MAX = 20.0
# IcePop's bounds of π/π_s (arXiv 2510.18855)
ICEPOP_LOW = 0.2
ICEPOP_HIGH = 5.0


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisers of one optimiser step, the same for all its micro-batches."""

    rollouts: int  # of a group (G) × prompts of a step (P), groups without signal included
    max_new: int  # longest completion that may be sampled, in tokens
    tokens: int  # completion tokens of all rows that are learnt from, those left out not counted


@dataclass(frozen=True, slots=True)
class LossInput:
    """A batch of rollouts as a loss sees it. Log-probs are in nats.

    Only positions where `mask` is set count. The others may hold anything, even −inf or NaN.
    """

    logp: PerToken  # of π; carries the gradient
    logp_sampler: PerToken  # of π_s
    advantages: PerRollout
    mask: Mask
    norm: Norm
    logp_ref: PerToken | None = None  # needed when beta > 0
    logp_teacher: PerToken | None = None  # needed when teacher_tau > 0


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of each rollout, and which tokens it dropped."""

    per_rollout: PerRollout  # their sum is the step's loss
    low: Mask  # tokens without a policy gradient because their ratio is too low …
    high: Mask  # … or too high
    kl: PerToken | None = None  # to the reference, 0 where masked


def policy_loss(x: LossInput, cfg: LossConfig) -> LossOutput:
    """The loss that `cfg.loss` names, plus β · KL.

    The KL is K3 (`kl_to`). It estimates KL(π ‖ ref). On samples of π its expected gradient for one token, given the
    tokens before it, is that of KL(ref ‖ π) (arXiv 2506.09477).
    """
    A = token_advantages(x, cfg)
    output = LOSSES[cfg.loss](x, A, cfg)
    if not cfg.beta:
        return output

    assert x.logp_ref is not None
    kl = kl_to(x.logp, x.logp_ref, x.mask)
    penalty = cfg.beta * reduce_tokens(kl, x, cfg)
    with_penalty = output.per_rollout + penalty
    return replace(output, per_rollout=with_penalty, kl=kl)


def token_advantages(x: LossInput, cfg: LossConfig) -> PerToken:
    """adv_tau · A + teacher_tau · (logπ_teacher − logπ), detached, as in prime-rl's default loss.

    By default adv_tau is 1 and teacher_tau 0: every token has the advantage of its rollout.
    """
    A = cfg.adv_tau * x.advantages[:, None]
    A = A.expand(x.mask.shape)
    if not cfg.teacher_tau:
        return A

    assert x.logp_teacher is not None
    teacher_ratio = log_ratio(x.logp_teacher, x.logp, x.mask)
    return A + cfg.teacher_tau * teacher_ratio.detach()


# ── the losses


def grpo(x: LossInput, A: PerToken, cfg: LossConfig) -> LossOutput:
    """GRPO (arXiv 2402.03300, eq. 3) in a batch's one update: −ρA with ρ = 1 and ∇ρ = ∇ log π.

    unbiased: Dr. GRPO (arXiv 2503.20783), which divides by a constant in place of |o_i|, and does
        not divide by the group's std.
    """
    ρ = log_ratio(x.logp, x.logp.detach(), x.mask).exp()
    loss = torch.where(x.mask, -ρ * A, 0.0)
    none = torch.zeros_like(x.mask)
    return LossOutput(per_rollout=reduce_tokens(loss, x, cfg), low=none, high=none)


def dppo_tv(x: LossInput, A: PerToken, cfg: LossConfig) -> LossOutput:
    """DPPO (arXiv 2602.04879), total-variation form, symmetric: −keep · A · π/π_s ÷ Σ tokens.

    A token is kept while π − π_s, a difference of probabilities, detached, lies in
    [−dppo_diff_low, dppo_diff_high], by default ±0.2. Outside of it the token is dropped,
    whatever the sign of its advantage.
    """
    logp = x.logp.detach()
    p = probability(logp, x.mask)
    p_sampler = probability(x.logp_sampler, x.mask)
    difference = p - p_sampler
    low = difference < -cfg.dppo_diff_low
    high = difference > cfg.dppo_diff_high
    return importance_weighted(x, A, low, high, cfg)


def icepop(x: LossInput, A: PerToken, cfg: LossConfig) -> LossOutput:
    """IcePop (arXiv 2510.18855): −M(π/π_s) · A ÷ Σ tokens, M(k) = k in [0.2, 5], else 0.

    A token outside of the range is dropped, not clipped.
    """
    logp = x.logp.detach()
    ρ = log_ratio(logp, x.logp_sampler, x.mask).exp()
    low = ρ < ICEPOP_LOW
    high = ρ > ICEPOP_HIGH
    return importance_weighted(x, A, low, high, cfg)


def importance_weighted(
    x: LossInput,
    A: PerToken,
    low: Mask,
    high: Mask,
    cfg: LossConfig,
) -> LossOutput:
    """−A · π/π_s on every token that is neither `low` nor `high`; those two are dropped."""
    keep = x.mask & ~(low | high)
    ρ = log_ratio(x.logp, x.logp_sampler, keep).exp()
    loss = torch.where(keep, -ρ * A, 0.0)
    return LossOutput(
        per_rollout=reduce_tokens(loss, x, cfg),
        low=low & x.mask,
        high=high & x.mask,
    )


Loss = Callable[[LossInput, PerToken, LossConfig], LossOutput]
LOSSES: dict[str, Loss] = {
    "grpo": grpo,
    "dppo_tv": dppo_tv,
    "icepop": icepop,
}


# ── what they are made of


def reduce_tokens(loss: PerToken, x: LossInput, cfg: LossConfig) -> PerRollout:
    """Sum token losses, which are 0 where masked, over each rollout, by the loss's own normaliser.

    grpo: Σ_t / (G · P · max_new) if unbiased, else the mean over the rollout's tokens / (G · P).
    dppo_tv, icepop: Σ_t / Σ trainable tokens of the step.
    """
    total = loss.sum(1)
    if LOSS_SPECS[cfg.loss].by_step:  # divided by the step's tokens
        return total / max(1, x.norm.tokens)
    if cfg.unbiased:
        most_tokens = x.norm.rollouts * x.norm.max_new
        return total / most_tokens
    length = x.mask.sum(1).clamp(min=1)
    mean = total / length
    return mean / x.norm.rollouts


def log_ratio(logp: PerToken, base: PerToken, mask: Mask) -> PerToken:
    """logp − base, cut at ±20, 0 where masked: its exp is finite, forward and backward.

    Both sides are masked before the subtraction: −inf − (−inf) on padding would be NaN.
    """
    zero = logp.new_zeros(())
    logp = torch.where(mask, logp, zero)
    base = torch.where(mask, base, zero)
    difference = logp - base
    return difference.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def probability(logp: PerToken, mask: Mask) -> PerToken:
    """exp(logp), 0 where masked."""
    logp = torch.where(mask, logp, 0.0)
    p = logp.clamp(max=0).exp()
    return torch.where(mask, p, 0.0)


def kl_to(logp: PerToken, ref: PerToken, mask: Mask) -> PerToken:
    """Estimate KL(π ‖ ref) per token, on samples of π; 0 where masked.

    K3 = e^d − d − 1 with d = log ref − logπ (Schulman, "Approximating KL divergence").
    """
    d = log_ratio(ref, logp, mask)
    return d.exp() - d - 1
