"""The truncated distribution that sampling settings make of a row of logits."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vgrout.config.sampling import Sampling

WIDE, BLOCK = 2**14, 64  # logits of a row


def tempered(logits: Float[Tensor, "*n V"], sampling: Sampling) -> Float[Tensor, "*n V"]:
    """fp32 logits at the sampling temperature; greedy (0) keeps them as they are."""
    logits = logits.float() if logits.dtype != torch.float64 else logits
    return logits / sampling.temperature if sampling.temperature not in (0, 1) else logits


def candidates(
    logits: Float[Tensor, "n V"], sampling: Sampling
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"] | None]:
    """Tempered logits of the tokens that may be sampled (−inf: left out after all) and their ids (None: 0 … V-1)."""
    k = 1 if sampling.temperature == 0 else sampling.top_k
    if 0 < k < logits.shape[-1]:
        values, ids = largest(logits, k)  # exactly k, also among equals
        values = tempered(values, sampling)
    elif sampling.top_p < 1:
        values, ids = torch.sort(tempered(logits, sampling), dim=-1, descending=True)
    else:
        values, ids = tempered(logits, sampling), None
    if sampling.top_p < 1:  # descending here: the token that reaches top_p still counts
        mass = values.softmax(-1)
        values = values.masked_fill(mass.cumsum(-1) - mass >= sampling.top_p, -math.inf)
    return values, ids


def largest(
    logits: Float[Tensor, "n V"], k: int
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest, descending, and where they are. topk copies a row and sorts it in part, which for a real model's
    vocabulary takes longer than a layer of it: there it sees the k blocks with the largest maxima, which hold them."""
    n, V = logits.shape
    if logits.device.type != "cpu" or V < WIDE or V % BLOCK:
        return logits.topk(k)
    blocks = logits.view(n, -1, BLOCK)
    of = blocks.amax(-1).topk(min(k, blocks.shape[1])).indices
    values, at = blocks.gather(1, of[..., None].expand(-1, -1, BLOCK)).flatten(1).topk(k)
    return values, of.gather(1, at // BLOCK) * BLOCK + at % BLOCK


def support(logits: Float[Tensor, "n V"], sampling: Sampling) -> Bool[Tensor, "n V"]:
    """Which tokens may be sampled, as a mask over the vocabulary."""
    values, ids = candidates(logits, sampling)
    inside = values > -math.inf
    return (
        inside
        if ids is None
        else torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, inside)
    )
