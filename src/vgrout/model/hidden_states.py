"""Hidden states of answers under the base model, and CSI, a distance from the base's own answers.

An answer's latent is the base model's last hidden state, averaged over the completion. Under the
trained model latents would drift by themselves; under the base model recorded answers can be scored
after the run.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from vgrout.model.logprobs import completion_hidden
from vgrout.model.policy import Policy

MIN_SAMPLES = 5  # DBSCAN's: a point with so many within ε, itself included, is a core of a cluster


def latents(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
) -> Float[Tensor, "n D"]:
    """Each answer's mean last hidden state under the base model.

    The mean is over the positions that predict the answer's tokens; fp32 on the CPU, in the order
    given.
    """
    states = _states(policy, prompts, completions)
    return torch.stack([of_answer.float().mean(0) for of_answer in states])


def token_states(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    layer: int,
    *,
    base: bool = True,
) -> list[Float[Tensor, "T D"]]:
    """The base model's state at every completion token, after `layer` blocks (from 1). base=False: the present one's.

    fp64 on the CPU. The blocks above are not run: reading early costs that share of a forward.
    """
    # States are read where they predict a token, the first one at the prompt's last token. One more
    # token, which nothing is read at, moves them to the completion's own tokens.
    longer = [(*completion, policy.pad_id) for completion in completions]
    return [states[1:].double() for states in _states(policy, prompts, longer, layer, base=base)]


@torch.no_grad()
def _states(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    layer: int | None = None,
    *,
    base: bool = True,
) -> list[Float[Tensor, "T D"]]:
    """Each answer's hidden states, on the CPU, as `completion_hidden`."""
    out: dict[int, Tensor] = {}
    with policy.adapter.reference() if base else nullcontext():
        for part, batch in policy.batches(prompts, completions):
            states = completion_hidden(policy.model, batch, layer).cpu()
            lengths = [len(completions[i]) for i in part]
            out |= zip(part, states.split(lengths), strict=True)
    return [out[i] for i in range(len(prompts))]


def dbscan(
    x: Float[Tensor, "n D"],
    eps: float,
    min_samples: int = MIN_SAMPLES,
) -> Int[Tensor, " n"]:
    """Density clusters (Ester et al. 1996): 0, 1, … by first member, −1 for noise.

    Cores are points with `min_samples` within `eps`, themselves included; a cluster is a connected
    set of cores and what lies within `eps` of one. A border point between two clusters goes to the
    one that comes first. O(n²): for hundreds of points.
    """
    n = len(x)
    near: Bool[Tensor, "n n"] = torch.cdist(x, x) <= eps
    near.fill_diagonal_(True)
    is_core = near.sum(1) >= min_samples
    near_cores = near[is_core][:, is_core]
    # numbered by first member
    _, cluster_of_core = connected_components(near_cores.numpy(), directed=False)
    cluster = torch.full((n,), n)  # n: none
    cluster[is_core] = torch.from_numpy(cluster_of_core).long()
    first = torch.where(near & is_core, cluster, n).min(1).values
    return torch.where(first < n, first, -1)


class ReferenceStats:
    """Latents of the base policy's answers, against which others are measured.

    Each axis is divided by its standard deviation before any distance. Every second answer is a
    reference; the others, measured against these, give the base policy's own CSI.
    """

    def __init__(self, reference: Float[Tensor, "n D"]) -> None:
        references = reference[::2].double()
        others = reference[1::2]
        self.mean, self.spread = references.mean(0), references.std(0).clamp_min(1e-6)
        self.x = (references - self.mean) / self.spread
        distances = torch.cdist(self.x, self.x).sort(1).values
        fifth = min(MIN_SAMPLES, len(references) - 1)  # the nearest is the point itself
        self.eps = float(distances[:, fifth].median())  # a typical distance to the fifth neighbour
        self.base_csi = self.csi(others) / len(others)

    def csi(self, answers: Float[Tensor, "m D"]) -> float:
        """Cluster separation index (InfoRM, arXiv 2402.09345): Σ |C_i|·d_i.

        d_i is the distance from a cluster's centroid to the nearest reference answer. The index
        rises with over-optimisation. Noise points count as clusters of one, so that no answer is
        left out.
        """
        x = (answers.double() - self.mean) / self.spread
        label = dbscan(x, self.eps)
        n_clusters = int(label.max()) + 1
        clusters = [x[label == k] for k in range(n_clusters)]
        clusters += [row[None] for row in x[label == -1]]
        centroids = torch.stack([cluster.mean(0) for cluster in clusters])
        sizes = torch.tensor(list(map(len, clusters)), dtype=torch.float64)
        nearest = torch.cdist(centroids, self.x).min(1).values
        return float((nearest * sizes).sum())
