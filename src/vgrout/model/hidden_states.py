"""Hidden states of answers under the base model, and CSI, a measure of how far they lie from the base's own answers.

An answer's latent is the base model's last hidden state, averaged over the completion. Under the trained model latents
would drift by themselves; under the base model recorded answers can be scored after the run.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from vgrout.errors import Refused
from vgrout.model.logprobs import completion_hidden
from vgrout.model.policy import Policy

MIN_SAMPLES = 5  # DBSCAN's: a point with so many within ε, itself included, is a core of a cluster


def latents(
    policy: Policy, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
) -> Float[Tensor, "n D"]:
    """Each answer's mean last hidden state under the base model, over the positions that predict its tokens; fp32 on
    the CPU, in the order given."""
    return torch.stack(_of_base(policy, prompts, completions, lambda row: row.float().mean(0)))


def token_states(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    layer: int,
) -> list[Float[Tensor, "T D"]]:
    """The base model's state at every completion token, after `layer` blocks (from 1); fp64 on the CPU.

    The blocks above are not run: reading early costs that share of a forward.
    """
    # the last token of a completion predicts nothing: not read
    longer = [(*c, policy.pad_id) for c in completions]
    return _of_base(policy, prompts, longer, lambda row: row[1:].double(), layer)


@torch.no_grad()
def _of_base(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    read: Callable[[Float[Tensor, "T D"]], Tensor],
    layer: int | None = None,
) -> list[Tensor]:
    """`read` of each answer's hidden states under the base model, as `completion_hidden` has them, on the CPU."""
    out: dict[int, Tensor] = {}
    with policy.adapter.reference():
        for part, batch in policy.batches(prompts, completions):
            rows = completion_hidden(policy.model, batch, layer).cpu()
            out |= dict(
                zip(part, map(read, rows.split([len(completions[i]) for i in part])), strict=True)
            )
    return [out[i] for i in range(len(prompts))]


def dbscan(
    x: Float[Tensor, "n D"], eps: float, min_samples: int = MIN_SAMPLES
) -> Int[Tensor, " n"]:
    """Density clusters (Ester et al. 1996): 0, 1, … by first member, −1 for noise. O(n²): for hundreds of points.

    Cores are points with `min_samples` within `eps`, themselves included; a cluster is a connected set of cores and
    what lies within `eps` of one. A border point between two clusters goes to the one that comes first.
    """
    near: Bool[Tensor, "n n"] = torch.cdist(x, x) <= eps
    near.fill_diagonal_(True)
    core = near.sum(1) >= min_samples
    # numbered by first member
    _, of_cores = connected_components(near[core][:, core].numpy(), directed=False)
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
        """Raises Refused on fewer than 32 answers, or on a number that is not finite."""
        x = _finite(reference, 32)[::2].double()
        self.mean, self.spread = x.mean(0), x.std(0).clamp_min(1e-6)
        self.x = (x - self.mean) / self.spread
        n = len(x)
        distances = torch.cdist(self.x, self.x).sort(1).values
        # a typical distance to the fifth neighbour
        self.eps = float(distances[:, min(MIN_SAMPLES, n - 1)].median())
        rest = reference[1::2]
        self.base_csi = self.csi(rest) / len(rest)

    def csi(self, answers: Float[Tensor, "m D"]) -> float:
        """Cluster separation index (InfoRM, arXiv 2402.09345): Σ |C_i|·d_i, with d_i from a cluster's centroid to the
        nearest reference answer. It rises with over-optimisation. Noise points count as clusters of one, so that no
        answer is left out."""
        x = (_finite(answers).double() - self.mean) / self.spread
        label = dbscan(x, self.eps)
        groups = [x[label == k] for k in range(int(label.max()) + 1)] + [
            row[None] for row in x[label == -1]
        ]
        centroids = torch.stack([g.mean(0) for g in groups])
        nearest = torch.cdist(centroids, self.x).min(1).values
        return float((nearest * torch.tensor([len(g) for g in groups], dtype=torch.float64)).sum())


def _finite(x: Float[Tensor, "n D"], least: int = 1) -> Float[Tensor, "n D"]:
    if len(x) < least or not bool(x.isfinite().all()):
        raise Refused(f"latents: {len(x)} answers; at least {least} are needed, all finite")
    return x
