"""Losses of distillation and preference: logits or log-probs in, one number per position or pair out. Pure functions.

q is the student, p the teacher; positions are the tokens of a completion, and count only where `mask` holds.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from vgrout.losses import log_ratio

# ── MiniLLM (arXiv 2306.08543)


def reverse_kl(
    student: Float[Tensor, "n Vs"], teacher: Float[Tensor, "n Vt"]
) -> Float[Tensor, " n"]:
    """KL(q ‖ p) at each position, nats, from logits; what one head has more of are no tokens."""
    logq, logp = (
        x[..., : min(student.shape[-1], teacher.shape[-1])].log_softmax(-1)
        for x in (student, teacher)
    )
    return (logq.exp() * (logq - logp)).sum(-1)


def future(
    r: Float[Tensor, "G T"], mask: Bool[Tensor, "G T"], length_normalize: bool
) -> Float[Tensor, "G T"]:
    """R_{t+1}: the sum of the rewards after token t, or with `length_normalize` their mean (eq. 5); 0 at the last."""
    r = torch.where(mask, r, 0.0)
    total = r.flip(1).cumsum(1).flip(1) - r
    if not length_normalize:
        return total
    left = mask.long().flip(1).cumsum(1).flip(1) - 1
    return total / left.clamp(min=1)


def minillm(
    logq: Float[Tensor, "G T"],
    logp: Float[Tensor, "G T"],
    sampler: Float[Tensor, "G T"],
    kl: Float[Tensor, "G T"],
    mask: Bool[Tensor, "G T"],
    length_normalize: bool,
) -> Float[Tensor, "G T"]:
    """w (KL_t − R_{t+1} log q) per token, 0 where masked; its gradient is eq. 7 of the paper for one inner step.

    The single-step part is exact over the vocabulary, the long part a score function. R and w are detached.

    logq, logp: log-probs of the sampled tokens. sampler: those under the mixture α p + (1 − α) q that was sampled from;
        w = q / mixture, token by token (§2.2). kl: `reverse_kl` at each token's position.
    """
    own = logq.detach()
    w = log_ratio(own, sampler, mask).exp()
    R = future(log_ratio(logp, own, mask), mask, length_normalize)
    return torch.where(mask, w * (kl - R * torch.where(mask, logq, 0.0)), 0.0)


# ── ULD (arXiv 2402.12030)


def wasserstein(
    student: Float[Tensor, "n Vs"], teacher: Float[Tensor, "n Vt"]
) -> Float[Tensor, " n"]:
    """Σ_i |q_(i) − p_(i)| of both distributions sorted, the shorter padded with zeros (eq. 4), from logits."""
    q, p = (x.softmax(-1).sort(-1, descending=True).values for x in (student, teacher))
    width = max(q.shape[-1], p.shape[-1])
    return (pad(q, (0, width - q.shape[-1])) - pad(p, (0, width - p.shape[-1]))).abs().sum(-1)


def topk_distance(
    student: Float[Tensor, "n Vs"],
    teacher: Float[Tensor, "n Vt"],
    k: int,
    student_of: Int[Tensor, " Vt"],
) -> Float[Tensor, " n"]:
    """Σ |q − p| over the teacher's k likeliest tokens that the student has too, and all other tokens as one.

    student_of: for each teacher token the student's of the same text, −1 for none; no two may share one.
    """
    p, ids = teacher.softmax(-1).topk(min(k, teacher.shape[-1]))
    own = student_of[ids]
    known = own >= 0
    q = torch.where(known, student.softmax(-1).gather(-1, own.clamp(min=0)), 0.0)
    p = torch.where(known, p, 0.0)
    return (q - p).abs().sum(-1) + (q.sum(-1) - p.sum(-1)).abs()


# ── DPO (arXiv 2305.18290)


def dpo(
    chosen: Float[Tensor, " n"],
    rejected: Float[Tensor, " n"],
    ref_chosen: Float[Tensor, " n"],
    ref_rejected: Float[Tensor, " n"],
    beta: float,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """−log σ(β margin) of each pair (eq. 7), and the margin: how much more than the reference the policy prefers the
    chosen answer, nats. The arguments are log-probs of complete answers."""
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -logsigmoid(beta * margin), margin
