"""Policy-gradient losses: a typed batch of token log-probs → one loss per rollout. Pure functions.

Axes: G rollouts, T completion tokens (right-padded). π is the trainer's distribution now, π_old the trainer's before
this step's first update, π_s the sampler's. All losses are finite at any log-ratio: the mask is applied before exp,
and log-ratios are cut at ±20 (e^20 ≈ 5e8), beyond which a token has no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.config.loss import LOSSES as SPECS
from vgrout.config.loss import LossConfig

LOG_RATIO_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisers of one optimiser step, the same for all its micro-batches."""

    rollouts: int  # G · P, groups without signal included
    max_new: int
    tokens: int  # completion tokens of all groups with signal


@dataclass(frozen=True, slots=True)
class LossInput:
    """A batch of rollouts as a loss sees it. Log-probs in nats; only positions where `mask` holds count, the others may
    hold anything, even −inf or NaN."""

    logp: Float[Tensor, "G T"]  # of π; carries the gradient
    logp_old: Float[Tensor, "G T"]
    logp_sampler: Float[Tensor, "G T"]
    advantages: Float[Tensor, " G"]
    mask: Bool[Tensor, "G T"]
    norm: Norm
    logp_ref: Float[Tensor, "G T"] | None = None  # needed when beta > 0
    logp_teacher: Float[Tensor, "G T"] | None = None  # needed when teacher_tau > 0


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss with what its clip or mask left out."""

    per_rollout: Float[Tensor, " G"]  # their sum is the step's loss
    low: Bool[Tensor, "G T"]  # tokens without a policy gradient because their ratio is too low …
    high: Bool[Tensor, "G T"]  # … or too high
    kl: Float[Tensor, "G T"] | None  # to the reference, 0 where masked


def policy_loss(x: LossInput, cfg: LossConfig) -> LossOutput:
    """The loss that `cfg.loss` names, plus β · KL."""
    A = token_advantages(x, cfg)
    output = LOSSES[cfg.loss](x, A, cfg)
    if not cfg.beta:
        return output
    assert x.logp_ref is not None
    kl = kl_to(x.logp, x.logp_ref, x.mask)
    total = output.per_rollout + cfg.beta * reduce_tokens(kl, x, cfg)
    return replace(output, per_rollout=total, kl=kl)


def token_advantages(x: LossInput, cfg: LossConfig) -> Float[Tensor, "G T"]:
    """adv_tau · A + teacher_tau · (logπ_teacher − logπ), detached (prime-rl's default loss); 1 and 0 by default."""
    A = (cfg.adv_tau * x.advantages[:, None]).expand(x.mask.shape)
    if cfg.teacher_tau:
        assert x.logp_teacher is not None
        A = A + cfg.teacher_tau * log_ratio(x.logp_teacher, x.logp, x.mask).detach()
    return A


def log_ratio(
    logp: Float[Tensor, "G T"], base: Float[Tensor, "G T"], mask: Bool[Tensor, "G T"]
) -> Float[Tensor, "G T"]:
    """logp − base in ±20, 0 where masked: exp of it, forward and backward, is finite.

    Both sides are replaced before the subtraction: −inf − (−inf) on padding would be NaN.
    """
    zero = logp.new_zeros(())
    difference = torch.where(mask, logp, zero) - torch.where(mask, base, zero)
    return difference.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def reduce_tokens(loss: Float[Tensor, "G T"], x: LossInput, cfg: LossConfig) -> Float[Tensor, " G"]:
    """Token losses (0 where masked) → per-rollout loss, by the loss's own normaliser.

    grpo: Σ_t / (G · max_new · P) if unbiased, else mean over the rollout's tokens / (G · P).
    dppo_tv, icepop: Σ_t / Σ trainable tokens of the step.
    """
    if SPECS[cfg.loss].by_step:
        return loss.sum(1) / max(1, x.norm.tokens)
    if cfg.unbiased:
        return loss.sum(1) / (x.norm.rollouts * x.norm.max_new)
    return loss.sum(1) / x.mask.sum(1).clamp(min=1) / x.norm.rollouts


def grpo(x: LossInput, A: Float[Tensor, "G T"], cfg: LossConfig) -> LossOutput:
    """GRPO (arXiv 2402.03300, eq. 3): −min(ρA, clip(ρ, 1−ε, 1+ε)A), ρ = π/π_old, ε = 0.2.

    unbiased: Dr. GRPO (arXiv 2503.20783): a constant in place of 1/|o_i|, and no division by the group's std.
    The minimum is PPO's clip (arXiv 1707.06347, eq. 7): a token whose ratio has left the bounds on the side to which
    its advantage pushes loses its gradient.
    """
    ρ = log_ratio(x.logp, x.logp_old, x.mask).exp()
    loss = -torch.minimum(ρ * A, ρ.clamp(1 - cfg.low, 1 + cfg.high) * A)
    low, high = (A < 0) & (ρ < 1 - cfg.low), (A > 0) & (ρ > 1 + cfg.high)
    loss = torch.where(x.mask, loss, 0.0)
    return LossOutput(reduce_tokens(loss, x, cfg), low & x.mask, high & x.mask, None)


def dppo_tv(x: LossInput, A: Float[Tensor, "G T"], cfg: LossConfig) -> LossOutput:
    """DPPO (arXiv 2602.04879), total-variation form, symmetric: −keep · A · π/π_s ÷ Σ tokens.

    keep: π − π_s in [−0.2, 0.2] (probabilities, detached); outside, a token is dropped whatever its advantage's sign.
    """
    d = (probability(x.logp, x.mask) - probability(x.logp_sampler, x.mask)).detach()
    low, high = d < -cfg.dppo_diff_low, d > cfg.dppo_diff_high
    return _kept_ratio(x, A, low, high, cfg)


def icepop(x: LossInput, A: Float[Tensor, "G T"], cfg: LossConfig) -> LossOutput:
    """IcePop (arXiv 2510.18855): −M(π/π_s) · A ÷ Σ tokens, M(k) = k in [0.2, 5], else 0: dropped, not clipped."""
    ρ = log_ratio(x.logp, x.logp_sampler, x.mask).exp().detach()
    return _kept_ratio(x, A, ρ < cfg.low, ρ > cfg.high, cfg)


def _kept_ratio(
    x: LossInput,
    A: Float[Tensor, "G T"],
    low: Bool[Tensor, "G T"],
    high: Bool[Tensor, "G T"],
    cfg: LossConfig,
) -> LossOutput:
    keep = x.mask & ~(low | high)
    ρ = log_ratio(x.logp, x.logp_sampler, keep).exp()
    loss = torch.where(keep, -ρ * A, 0.0)
    return LossOutput(reduce_tokens(loss, x, cfg), low & x.mask, high & x.mask, None)


def probability(logp: Float[Tensor, "G T"], mask: Bool[Tensor, "G T"]) -> Float[Tensor, "G T"]:
    """exp(logp), 0 where masked."""
    return torch.where(mask, torch.where(mask, logp, 0.0).clamp(max=0).exp(), 0.0)


LOSSES: dict[str, Callable[[LossInput, Float[Tensor, "G T"], LossConfig], LossOutput]] = {
    "grpo": grpo,
    "dppo_tv": dppo_tv,
    "icepop": icepop,
}


def kl_to(
    logp: Float[Tensor, "G T"], ref: Float[Tensor, "G T"], mask: Bool[Tensor, "G T"]
) -> Float[Tensor, "G T"]:
    """K3, the per-token estimator e^d − d − 1, d = log ref − logπ, of KL(π ‖ ref) on π's samples (Schulman,
    "Approximating KL divergence"); 0 where masked."""
    d = log_ratio(ref, logp, mask)
    return d.exp() - d - 1
