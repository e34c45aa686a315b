"""The truncated distribution that sampling settings make of a row of logits."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout.config.groups import Sampling
from vgrout.ground.tensor_types import at_least_fp32

WIDE = 2**14  # logits of a row from which `largest` looks for blocks first
BLOCK = 64  # logits of such a block


def tempered(logits: Float[Tensor, "*n V"], sampling: Sampling) -> Float[Tensor, "*n V"]:
    """Logits at the sampling temperature, in fp32 at least; greedy (0) keeps them as they are."""
    logits = at_least_fp32(logits)
    if sampling.temperature in (0, 1):
        return logits
    return logits / sampling.temperature


def candidates(
    logits: Float[Tensor, "n V"],
    sampling: Sampling,
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"] | None]:
    """Tempered logits of the tokens that may be sampled, and their ids.

    A logit of −inf: this token is left out after all. Ids of None: 0 … V-1.
    """
    k = 1 if sampling.temperature == 0 else sampling.top_k
    if 0 < k < logits.shape[-1]:
        values, ids = largest(logits, k)  # exactly k, also among equals
        values = tempered(values, sampling)
    elif sampling.top_p < 1:
        values, ids = torch.sort(tempered(logits, sampling), dim=-1, descending=True)
    else:
        values, ids = tempered(logits, sampling), None
    if sampling.top_p < 1:  # descending here: the token that reaches top_p still counts
        p = values.softmax(-1)
        mass_before = p.cumsum(-1) - p
        values = values.masked_fill(mass_before >= sampling.top_p, -math.inf)
    return values, ids


def largest(
    logits: Float[Tensor, "n V"],
    k: int,
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest logits of each row, descending, and where they are.

    On a CPU topk copies a row and sorts it in part, which for a real model's vocabulary takes
    longer than a layer of the model. There it is given the k blocks with the largest maxima, which
    hold the k largest logits.
    """
    _, V = logits.shape
    if logits.device.type != "cpu" or V < WIDE or V % BLOCK:
        return logits.topk(k)
    blocks = logits.unflatten(1, (-1, BLOCK))
    chosen = blocks.amax(-1).topk(min(k, blocks.shape[1])).indices
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK))
    values, at = inside.flatten(1).topk(k)
    return values, chosen.gather(1, at // BLOCK) * BLOCK + at % BLOCK
