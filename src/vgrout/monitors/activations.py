"""A monitor that reads activations: their projection on a concept direction from contrastive pairs."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout.direction.extract import N_HELDOUT, tokens_of
from vgrout.direction.pairs import PairSet
from vgrout.model.hidden_states import pooled
from vgrout.model.logprobs import backbone
from vgrout.model.policy import Policy

DEPTH = (0.60, 0.75)  # share of the layers between which the concept is read
TOKEN_BUDGET = 4096  # of one forward that keeps every layer's output: 0.8 GB in bf16 at Qwen3-4B's shape


def concept_layers(n: int) -> list[int]:
    """Of a model with n layers: those from 60 to 75 % of its depth, at least one; 1 is the first layer's output."""
    low, high = (max(1, math.floor(share * n)) for share in DEPTH)
    return [*range(min(low + 1, high), high + 1)]


def activations(
    policy: Policy, layers: Sequence[int], prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
) -> Float[Tensor, "n D"]:
    """Each answer's mean activation under the present weights, the layers one after the other."""

    def chosen(ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        states = backbone(policy.model)(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] for layer in layers], -1)

    return pooled(chosen, prompts, completions, policy.device, TOKEN_BUDGET)


def concept_direction(policy: Policy, pairs: PairSet, layers: Sequence[int]) -> tuple[Float[Tensor, " D"], list[float]]:
    """A direction for `activations`, and the pairs' differences along it, the held-out ones last.

    Per layer the unit mean of hack - clean under the base model, over all pairs but the last two; a score is the mean
    over layers.

    Raises:
        ValueError: a pair longer than the model's window, or pairs that differ by nothing here.
    """
    sides = []
    with policy.adapter.reference():
        for side in ("hack", "clean"):
            rows = [
                tokens_of(policy, pair, getattr(pair, side), f"{pairs.source}: pair {i}")
                for i, pair in enumerate(pairs.pairs)
            ]
            sides.append(activations(policy, layers, [p for p, _ in rows], [c for _, c in rows]))
    difference = sides[0] - sides[1]
    mean = difference[: len(pairs) - N_HELDOUT].mean(0).view(len(layers), -1)
    norms = mean.norm(dim=1, keepdim=True)
    if not (norms > 0).all():
        raise ValueError(f"{pairs.source}: hack and clean have the same activations; advantage_mod needs other pairs")
    concept = (mean / norms / len(layers)).flatten()
    return concept, (difference @ concept).tolist()
