"""Hidden states of answers under the base model, and CSI, a measure of how far they lie from the base's own answers.

An answer's latent is the base model's last hidden state, averaged over the completion. Under the trained model latents
would drift by themselves; under the base model recorded answers can be scored after the run.
"""

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from vgrout.model.logprobs import backbone, collate
from vgrout.model.packing import padded_batches
from vgrout.model.policy import Policy

TOKEN_BUDGET = 16_384
MIN_SAMPLES = 5  # DBSCAN's: a point with so many within ε, itself included, is a core of a cluster


@torch.no_grad()
def latents(
    policy: Policy, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
) -> Float[Tensor, "n D"]:
    """Each answer's mean last hidden state under the base model, over the positions that predict its tokens; fp32 on
    the CPU, in the order given."""
    out: dict[int, Tensor] = {}
    with policy.adapter.reference():
        for part in by_length(prompts, completions):
            batch = collate([prompts[i] for i in part], [completions[i] for i in part], policy.device)
            hidden = backbone(policy.model)(input_ids=batch.ids, use_cache=False).last_hidden_state
            rows = hidden[torch.arange(len(part), device=policy.device)[:, None], batch.at].float()
            weight = batch.mask[..., None].float()
            means = (rows * weight).sum(1) / weight.sum(1)
            out |= dict(zip(part, means.cpu(), strict=True))
    return torch.stack([out[i] for i in range(len(prompts))])


@torch.no_grad()
def token_states(
    policy: Policy, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]], layer: int
) -> list[Float[Tensor, "T D"]]:
    """The base model's state at every completion token, after `layer` blocks (from 1); fp64 on the CPU.

    The blocks above are not run: reading early costs that share of a forward.
    """
    blocks = backbone(policy.model).layers
    assert isinstance(blocks, torch.nn.ModuleList), type(blocks)
    assert 1 <= layer <= len(blocks), (layer, len(blocks))
    out: dict[int, Tensor] = {}
    with policy.adapter.reference():
        for part in by_length(prompts, completions):
            ids = [torch.tensor(prompts[i] + completions[i]) for i in part]
            batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=policy.pad_id)
            hidden = _after(policy, blocks[layer - 1], batch.to(policy.device))
            for row, i in zip(hidden, part, strict=True):  # padding is on the right: causal attention never sees it
                start = len(prompts[i])
                out[i] = row[start : start + len(completions[i])].double().cpu()
    return [out[i] for i in range(len(prompts))]


class _LayerReached(Exception):
    """Ends a forward after the requested block."""


def _after(policy: Policy, block: torch.nn.Module, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
    states: list[Tensor] = []

    def stop(_module: torch.nn.Module, _args: object, output: object) -> None:
        states.append(output[0] if isinstance(output, tuple) else cast("Tensor", output))
        raise _LayerReached

    handle = block.register_forward_hook(stop)
    try:
        backbone(policy.model)(input_ids=ids, use_cache=False)
    except _LayerReached:
        pass
    finally:
        handle.remove()
    return states[0]


def by_length(prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Indices, long answers first, in batches of at most TOKEN_BUDGET padded tokens (or one answer)."""
    return padded_batches([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)], TOKEN_BUDGET)


def dbscan(x: Float[Tensor, "n D"], eps: float, min_samples: int = MIN_SAMPLES) -> Int[Tensor, " n"]:
    """Density clusters (Ester et al. 1996): 0, 1, … by first member, −1 for noise. O(n²): for hundreds of points.

    Cores are points with `min_samples` within `eps`, themselves included; a cluster is a connected set of cores and
    what lies within `eps` of one. A border point between two clusters goes to the one that comes first.
    """
    near: Bool[Tensor, "n n"] = torch.cdist(x, x) <= eps
    near.fill_diagonal_(True)
    core = near.sum(1) >= min_samples
    _, of_cores = connected_components(near[core][:, core].numpy(), directed=False)  # numbered by first member
    cluster = torch.full((len(x),), len(x))
    cluster[core] = torch.from_numpy(of_cores).long()
    first = torch.where(near & core, cluster, len(x)).min(1).values
    return torch.where(first < len(x), first, -1)


class ReferenceStats:
    """Latents of the base policy's answers, against which others are measured. Each axis is divided by its standard
    deviation before any distance.

    Every second answer is a reference; the others, measured against these, give the base policy's own CSI.
    """

    def __init__(self, reference: Float[Tensor, "n D"]) -> None:
        """Raises ValueError on fewer than 32 answers, or on a number that is not finite."""
        if len(reference) < 32:
            raise ValueError(f"latents: {len(reference)} reference answers, at least 32 are needed")
        x = _finite(reference)[::2].double()
        self.mean, self.spread = x.mean(0), x.std(0).clamp_min(1e-6)
        self.x = (x - self.mean) / self.spread
        n = len(x)
        distances = torch.cdist(self.x, self.x).sort(1).values
        self.eps = float(distances[:, min(MIN_SAMPLES, n - 1)].median())  # a typical distance to the fifth neighbour
        rest = reference[1::2]
        self.base_csi = self.csi(rest) / len(rest)

    def csi(self, answers: Float[Tensor, "m D"]) -> float:
        """Cluster separation index (InfoRM, arXiv 2402.09345): Σ |C_i|·d_i, with d_i from a cluster's centroid to the
        nearest reference answer. It rises with over-optimisation. Noise points count as clusters of one, so that no
        answer is left out."""
        x = (_finite(answers).double() - self.mean) / self.spread
        label = dbscan(x, self.eps)
        groups = [x[label == k] for k in range(int(label.max()) + 1)] + [row[None] for row in x[label == -1]]
        centroids = torch.stack([g.mean(0) for g in groups])
        nearest = torch.cdist(centroids, self.x).min(1).values
        return float((nearest * torch.tensor([len(g) for g in groups], dtype=torch.float64)).sum())


def _finite(x: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
    if not len(x) or not bool(x.isfinite().all()):
        raise ValueError(f"latents: {len(x)} answers, not all finite" if len(x) else "latents: no answers")
    return x
