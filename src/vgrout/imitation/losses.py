"""Losses of distillation and of preference learning. Pure functions.

They take logits or log-probs and return one number per position, or per pair. q is the student, p
the teacher. Positions are the tokens of completions; those where `mask` is false do not count.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from vgrout.loop.losses import log_ratio

# ── MiniLLM (arXiv 2306.08543)


def reverse_kl(
    student: Float[Tensor, "n Vs"], teacher: Float[Tensor, "n Vt"]
) -> Float[Tensor, " n"]:
    """KL(q ‖ p) at each position, nats, from logits.

    Only the logits that both heads have are of tokens; the wider head's others are padding.
    """
    V = min(student.shape[-1], teacher.shape[-1])
    logq = student[..., :V].log_softmax(-1)
    logp = teacher[..., :V].log_softmax(-1)
    return (logq.exp() * (logq - logp)).sum(-1)


def future(
    r: Float[Tensor, "G T"], mask: Bool[Tensor, "G T"], length_normalize: bool
) -> Float[Tensor, "G T"]:
    """R_{t+1}: the sum of the rewards after token t, with `length_normalize` their mean (eq. 5).

    It is 0 at the last token.
    """
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
    """w (KL_t − R_{t+1} log q) per token, 0 where masked.

    Its gradient is eq. 7 of the paper for one inner step. The single-step part is exact over the
    vocabulary, the long part is a score-function estimate. R and w are detached.

    Args:
        logq: log-probs of the sampled tokens under the student.
        logp: under the teacher.
        sampler: under the mixture α p + (1 − α) q that they were sampled from; w = q / mixture,
            token by token (§2.2).
        kl: `reverse_kl` at each token's position.
        length_normalize: as for `future`.
    """
    own = logq.detach()
    w = log_ratio(own, sampler, mask).exp()
    R = future(log_ratio(logp, own, mask), mask, length_normalize)
    return torch.where(mask, w * (kl - R * torch.where(mask, logq, 0.0)), 0.0)


# ── ULD (arXiv 2402.12030)


def wasserstein(
    student: Float[Tensor, "n Vs"], teacher: Float[Tensor, "n Vt"]
) -> Float[Tensor, " n"]:
    """Σ_i |q_(i) − p_(i)| of the two sorted distributions (eq. 4), from logits.

    The shorter one is padded with zeros.
    """
    q = student.softmax(-1).sort(-1, descending=True).values
    p = teacher.softmax(-1).sort(-1, descending=True).values
    width = max(q.shape[-1], p.shape[-1])
    q = pad(q, (0, width - q.shape[-1]))
    p = pad(p, (0, width - p.shape[-1]))
    return (q - p).abs().sum(-1)


def topk_distance(
    student: Float[Tensor, "n Vs"],
    teacher: Float[Tensor, "n Vt"],
    k: int,
    student_of: Int[Tensor, " Vt"],
) -> Float[Tensor, " n"]:
    """Σ |q − p| over the teacher's k likeliest tokens that the student has too.

    All other tokens count together as one. student_of: for each token of the teacher, the student's
    token of the same text, −1 if it has none; no two may share one.
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
    """Loss and margin of each pair: −log σ(β margin) (eq. 7), and the margin in nats.

    The margin is how much more than the reference the policy prefers the chosen answer. The
    arguments are log-probs of complete answers.
    """
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -logsigmoid(beta * margin), margin
