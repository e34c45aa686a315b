"""Where answers lie in a map that does not move: CSI and MOP, both against a cloud of the base policy's own answers.

The map is the base model's last hidden state, averaged over the completion. A map that trained along would drift by
itself, and one fixed map makes recorded answers scorable after the run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vgrout.model.logprobs import backbone, collate
from vgrout.model.policy import Policy

TOKEN_BUDGET = 16_384
MIN_SAMPLES = 5  # DBSCAN's: a point with so many within ε, itself included, is a core of a cluster
QUANTILE = 0.99
MOP_AXES = 8  # at most n/8, so that a covariance of n answers is one


def latents(
    policy: Policy, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
) -> Float[Tensor, "n D"]:
    """Each answer's mean last hidden state under the base model, fp32 on the CPU, in the order given."""

    def last(ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        return backbone(policy.model)(input_ids=ids, use_cache=False).last_hidden_state

    with policy.adapter.reference():
        return pooled(last, prompts, completions, policy.device)


@torch.no_grad()
def pooled(
    hidden: Callable[[Int[Tensor, "B L"]], Float[Tensor, "B L D"]],
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    device: torch.device,
    token_budget: int = TOKEN_BUDGET,
) -> Float[Tensor, "n D"]:
    """Each answer's mean of `hidden` over the positions that predict its tokens, fp32 on the CPU, in the order given.

    token_budget: tokens in one forward, padding included; a longer answer goes alone.
    """
    out: dict[int, Tensor] = {}
    for part in by_length(prompts, completions, token_budget):
        batch = collate([prompts[i] for i in part], [completions[i] for i in part], device)
        rows = hidden(batch.ids)[torch.arange(len(part), device=device)[:, None], batch.at].float()
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


class _Enough(Exception):
    """The block that was asked for has run."""


def _after(policy: Policy, block: torch.nn.Module, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
    states: list[Tensor] = []

    def stop(_module: torch.nn.Module, _args: object, output: object) -> None:
        states.append(output[0] if isinstance(output, tuple) else cast("Tensor", output))
        raise _Enough

    handle = block.register_forward_hook(stop)
    try:
        backbone(policy.model)(input_ids=ids, use_cache=False)
    except _Enough:
        pass
    finally:
        handle.remove()
    return states[0]


def by_length(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]], budget: int = TOKEN_BUDGET
) -> Iterator[list[int]]:
    """Indices, long answers first, in batches of at most `budget` padded tokens (or one answer)."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]) - len(completions[i]))
    while order:
        longest = len(prompts[order[0]]) + len(completions[order[0]])
        part, order = order[: (k := max(1, budget // longest))], order[k:]
        yield part


def dbscan(x: Float[Tensor, "n D"], eps: float, min_samples: int = MIN_SAMPLES) -> Int[Tensor, " n"]:
    """Density clusters (Ester et al. 1996): 0, 1, … by first member, −1 for noise. O(n²): for hundreds of points.

    Cores are points with `min_samples` within `eps`, themselves included; a cluster is a connected set of cores and
    what lies within `eps` of one. A border point between two clusters goes to the one that comes first.
    """
    n = len(x)
    near: Bool[Tensor, "n n"] = torch.cdist(x, x) <= eps
    near.fill_diagonal_(True)
    core = near.sum(1) >= min_samples
    index = torch.where(core, torch.arange(n), n)
    while True:  # every core takes the smallest label among the cores near it, until none changes
        smallest = torch.where(near & core[None], index[None], n).min(1).values
        if torch.equal(new := torch.where(core, smallest, n), index):
            break
        index = new
    label = torch.full((n,), -1)
    for k, root in enumerate(sorted(set(smallest.tolist()) - {n})):
        label[smallest == root] = k
    return label


def chi2_quantile(p: float, k: int) -> float:
    """The value that a χ² variable with k degrees of freedom stays below with probability p."""
    a, low, high = torch.tensor(k / 2, dtype=torch.float64), 0.0, 1000.0 + 100.0 * k
    for _ in range(100):
        middle = (low + high) / 2
        below = torch.special.gammainc(a, torch.tensor(middle / 2, dtype=torch.float64))
        low, high = (middle, high) if below < p else (low, middle)
    return (low + high) / 2


class ReferenceStats:
    """The base policy's answers as a yardstick. Axes are divided by their spread in the cloud before any distance.

    One half of the answers is the cloud; the other, measured against it, is what the base policy reads on both scales.
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
        _, S, Vh = torch.linalg.svd(self.x, full_matrices=False)
        k = max(1, min(MOP_AXES, n // 8, int((1e-6 * S[0] < S).sum())))
        self.axes, self.deviation = Vh[:k], S[:k] / math.sqrt(n - 1)
        self.limit = chi2_quantile(QUANTILE, k)
        rest = reference[1::2]
        self.base_csi, self.base_mop = self.csi(rest) / len(rest), self.mop(rest)

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

    def mop(self, answers: Float[Tensor, "m D"]) -> float:
        """Share of answers whose squared Mahalanobis distance to the cloud exceeds the χ² quantile at .99.

        In the cloud's leading axes (at most 8): the covariance of a few dozen answers has no more.
        """
        x = (_finite(answers).double() - self.mean) / self.spread
        squared = ((x @ self.axes.T) / self.deviation).square().sum(1)
        return float((squared > self.limit).double().mean())


def _finite(x: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
    if not len(x) or not bool(x.isfinite().all()):
        raise ValueError(f"latents: {len(x)} answers, not all finite" if len(x) else "latents: no answers")
    return x
