"""The hack direction: how a hack's gradient differs from an honest answer's, in the space of δS.

For each side of a pair, g = ∂(mean NLL of the completion)/∂δS, module by module. With
D = G_hack - G_clean [n, r] over the pairs that are not held out:

- V: the right singular vectors of D, each with the sign that most pairs vote for, towards the hack
  (for erase and route).
- v_grad: the unit mean of D (for route2).

The difference of the NLL gradients is the GRPO gradient of a batch that rewards the hack
(advantages ±1), so a step along -V makes the hack likelier.

`vgrout direction --model M --pairs F` extracts a direction without a run.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from loguru import logger
from safetensors.torch import save as to_safetensors
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from vgrout.direction.pairs import DIRECTIONS, HANDWRITTEN, SHARED_SCHEMA, Meta, PairSet
from vgrout.ground import ranks
from vgrout.ground.io import Refused, make_folder, text_sha256, write_atomic
from vgrout.ground.tensor_types import Directions
from vgrout.model.layout import Packed
from vgrout.model.load.source import shapes_of
from vgrout.model.logprobs import PaddedBatch, completion_logprobs, pieces_of
from vgrout.model.policy import DTYPE_NAMES, Policy
from vgrout.model.rollout_grads import per_rollout_grads
from vgrout.model.svd_adapter import SvdAdapter, weights_sha256
from vgrout.model.svd_files import (
    fingerprint_from_string,
    fingerprint_to_string,
    read_safetensors,
)

N_HELDOUT = 2  # pairs kept out of an extraction, to examine it
TOKENS_PER_BATCH = 4096  # of one backward pass, padding included, where memory allows


@dataclass(frozen=True, slots=True)
class Axes:
    """One module's part of a direction."""

    # Orthonormal rows that point towards the hack; a row below tau_axis, or without variance, is 0.
    V: Float[Tensor, "k r"]
    sv: Float[Tensor, " k"]  # singular values of D
    mean: Float[Tensor, " r"]  # mean of D's rows
    # Mean over the pairs of either side's unit gradient. Its product with any unit v is the pairs'
    # mean cosine with v.
    hack: Float[Tensor, " r"]
    clean: Float[Tensor, " r"]
    heldout: Float[Tensor, "h r"]  # rows of D that were kept out

    @property
    def heldout_cos(self) -> float:
        """Mean cosine of the held-out differences with the mean of the others.

        A random direction has 0 ± √(1/r).
        """
        norms = self.heldout.norm(dim=1) * self.mean.norm()
        return torch.where(norms > 0, self.heldout @ self.mean / norms, 0.0).mean().item()

    @property
    def heldout_inside(self) -> float:
        """Mean ‖V d‖ / ‖d‖ of the held-out differences d. A random span of k rows has √(k/r)."""
        norms = self.heldout.norm(dim=1)
        inside = (self.heldout @ self.V.T).norm(dim=1)
        return torch.where(norms > 0, inside / norms, 0.0).mean().item()


@dataclass(frozen=True, slots=True)
class Direction:
    """The result of an extraction, on the CPU: the axes of every adapted module, in order."""

    axes: dict[str, Axes]
    meta: Meta

    def select(self, k: int, drop_bottom_frac: float) -> Directions:
        """V for erase and route: the first k axes of each module that are above the noise floor.

        The floor is the `drop_bottom_frac` quantile of the singular values of these axes over all
        modules. A module with no row left is missing from the result.
        """
        nonzero: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}  # their singular values
        for module, axes in self.axes.items():
            V = axes.V[:k]
            there = V.any(1)
            nonzero[module] = V[there]
            values[module] = axes.sv[:k][there]
        all_values = torch.cat(list(values.values()))
        if not len(all_values):
            return {}
        floor = torch.quantile(all_values, drop_bottom_frac)
        selected: Directions = {}
        for module, V in nonzero.items():
            rows = V[values[module] >= floor]
            if len(rows):
                selected[module] = rows
        return selected

    def v_grad(self) -> Directions:
        """The unit mean of D [1, r], for route2; a module whose mean is zero is missing."""
        unit: Directions = {}
        for module, axes in self.axes.items():
            if axes.mean.any():
                unit[module] = (axes.mean / axes.mean.norm())[None]
        return unit

    def band(self, v: Directions) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Mean cosine with v [1, r] of the pairs' clean sides, and of their hack sides.

        The modules are in v's order.
        """
        clean: list[Tensor] = []
        hack: list[Tensor] = []
        for module, rows in v.items():
            on_host = rows[0].cpu()
            clean.append((self.axes[module].clean * on_host).sum())
            hack.append((self.axes[module].hack * on_host).sum())
        return torch.stack(clean), torch.stack(hack)

    def signed(self, v: Directions) -> Directions:
        """v with the sign that puts the pairs' hack side above the clean side, module by module."""
        clean, hack = self.band(v)
        upward = (hack >= clean).tolist()
        signed: Directions = {}
        for (module, rows), up in zip(v.items(), upward, strict=True):
            signed[module] = rows if up else -rows
        return signed


# ── extraction


def extract(policy: Policy, pairs: PairSet, top_k: int, tau_axis: float) -> Direction:
    """Extract a direction of the present model with its quarantine off; no other state changes.

    top_k: axes kept per module. tau_axis: axes with S_i/S_0 below this are zero.

    Raises:
        Refused: a pair that is longer than the model's window, or whose gradient is not finite.
    """
    G_hack = gradients(policy, pairs, "hack")
    G_clean = gradients(policy, pairs, "clean")
    for i in range(len(pairs)):
        if not (G_hack[i].isfinite().all() and G_clean[i].isfinite().all()):
            raise Refused(f"{pairs.source}: pair {i}: its gradient is not finite on this model")
    used = len(pairs) - N_HELDOUT
    hack, clean = policy.adapter.by_module(G_hack), policy.adapter.by_module(G_clean)
    axes = {m: axes_of(hack[m], clean[m], used, top_k, tau_axis) for m in policy.adapter.names}
    fingerprint = policy.adapter.basis_fingerprint(mean_of(axes, policy.adapter))
    meta = Meta(
        model=model_name(policy),
        dtype=DTYPE_NAMES[policy.model.dtype],
        top_k=top_k,
        tau_axis=float(tau_axis),
        pairs_sha256=pairs.sha256,
        pairs_source=pairs.source,
        weights_sha256=weights_sha256(policy.model, policy.adapter),
        n_pairs=len(pairs),
        n_heldout=N_HELDOUT,
        basis=fingerprint_to_string(fingerprint),
    )
    return Direction(axes, meta)


def mean_of(axes: dict[str, Axes], adapter: SvdAdapter) -> Float[Tensor, " R"]:
    """D's mean, all modules in one vector, whose basis fingerprint is kept with the direction."""
    return torch.cat([axes[m].mean for m in adapter.names]).to(adapter.δS)


def axes_of(
    hack: Float[Tensor, "n r"],
    clean: Float[Tensor, "n r"],
    used: int,
    top_k: int,
    tau_axis: float,
) -> Axes:
    """One module's axes from both sides' gradients.

    used: how many pairs are not held out; they are the first ones.
    """
    # In fp64 these few small SVDs are exact enough to be the same on every machine.
    hack, clean = hack.double(), clean.double()
    D = (hack - clean)[:used]
    _, S, Vh = torch.linalg.svd(D, full_matrices=False)
    k = min(top_k, used, len(S))
    S, V = S[:k], Vh[:k]
    # An axis gets the sign that most pairs vote for. The mean would follow the pair with the
    # largest difference; it only breaks ties.
    along = D @ V.T  # [n, k]
    votes, mean = along.sign().sum(0), along.mean(0)
    tie_break = torch.where(mean != 0, mean, 1.0)
    V = V * torch.where(votes != 0, votes, tie_break).sign()[:, None]
    relative = S / S[0].clamp(min=torch.finfo(S.dtype).tiny)
    # Axes below 1e-9 span D's null space and are arbitrary.
    real = (relative > 1e-9) & (relative >= tau_axis)
    return Axes(
        V=(V * real[:, None]).float(),
        sv=S.float(),
        mean=D.mean(0).float(),
        hack=_mean_unit(hack[:used]).float(),
        clean=_mean_unit(clean[:used]).float(),
        heldout=(hack - clean)[used:].float(),
    )


def _mean_unit(g: Float[Tensor, "n r"]) -> Float[Tensor, " r"]:
    """The mean of the rows' unit vectors; a zero row counts as zero."""
    norms = g.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, g / norms, 0.0).mean(0)


def gradients(policy: Policy, pairs: PairSet, side: str) -> Float[Tensor, "n R"]:
    """Gradient on δS of the mean NLL over one side's completion tokens, one row per pair.

    It is in fp32 on the CPU. side: "hack" or "clean". Each rank computes some of the rows and gets
    all of them.

    Raises:
        Refused: a pair that is longer than the model's window.
    """
    prompts = [policy.encode(pair.prompt) for pair in pairs.pairs]
    answers = [policy.encode(getattr(pair, side)) for pair in pairs.pairs]
    lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
    for i, n in enumerate(lengths):
        if n > policy.window:
            raise Refused(
                f"{pairs.source}: pair {i}: {n} tokens, the model's window is {policy.window}"
            )
    own = ranks.own(lengths)
    rows, n = slice(own.start, own.stop), len(own)
    parts = policy.batches(prompts[rows], answers[rows], range(n), tokens_per_batch(policy))
    bar = tqdm(parts, desc=f"direction, {side} side", unit="batch", disable=None, leave=False)
    adapter = policy.adapter
    with adapter.deployed(), torch.enable_grad(), per_rollout_grads(adapter, n) as collected:
        for part, batch in bar:
            collected.announce(pieces_of(batch, part), batch.tokens)
            mean_nll(policy, batch).sum().backward()
    grads = torch.zeros(len(lengths), len(adapter))
    grads[rows] = collected.flat.cpu()
    return ranks.total(grads)


def tokens_per_batch(policy: Policy) -> int:
    """How many tokens one backward pass may have: TOKENS_PER_BATCH, or fewer if memory is short."""
    shapes = shapes_of(policy.model.config.to_dict())
    if shapes is None:
        return TOKENS_PER_BATCH
    bytes_per_token = shapes.activation_bytes(policy.model.dtype.itemsize)
    return min(TOKENS_PER_BATCH, policy.budget.activations // bytes_per_token)


def mean_nll(policy: Policy, batch: PaddedBatch | Packed) -> Float[Tensor, " B"]:
    """Mean NLL of each row's completion, nats per token; it carries a gradient."""
    logp = completion_logprobs(policy.model, batch)
    return -torch.where(batch.mask, logp, 0.0).sum(1) / batch.mask.sum(1)


def model_name(policy: Policy) -> str:
    """The model's name by its configuration, else its class."""
    return str(policy.model.config.name_or_path) or type(policy.model).__name__


# ── files: safetensors, with the hashes of all that a direction depends on in the metadata

# Prefix of a module's tensor in the file → field of Axes. V stands under the bare module name.
_TENSORS = {
    "": "V",
    "_sv/": "sv",
    "_mean/": "mean",
    "_hack/": "hack",
    "_clean/": "clean",
    "_heldout/": "heldout",
}


def default_path(policy: Policy, pairs: PairSet, top_k: int, tau_axis: float) -> Path:
    """Where a direction is cached.

    The name has the pair set in it, or for the hand-written set the model, k and τ; then ten digits
    of a hash of all that the direction depends on, so that a stale one is never found.
    """
    if pairs.source == HANDWRITTEN:
        slug = Path(model_name(policy)).name.lower()
        name = f"v_hack_{slug}_k{top_k}"
        if tau_axis:
            name += f"_tau{tau_axis:g}"
    else:
        name = f"v_hack_pairset_{pairs.stem}"
    weights = weights_sha256(policy.model, policy.adapter)
    # not SCHEMA: files that were written before it had a name of its own are found as well
    text = f"{SHARED_SCHEMA} {weights} {pairs.sha256} {top_k} {tau_axis} {N_HELDOUT}"
    return DIRECTIONS / f"{name}_{text_sha256(text)[:10]}.safetensors"


def save(direction: Direction, path: Path) -> None:
    """Write a direction file, atomically."""
    tensors: dict[str, Tensor] = {}
    for module, axes in direction.axes.items():
        for prefix, field in _TENSORS.items():
            tensors[prefix + module] = getattr(axes, field).contiguous()
    make_folder(path.parent)
    write_atomic(path, to_safetensors(tensors, direction.meta.to_strings()))


def load(path: Path, policy: Policy, pairs: PairSet | None) -> Direction:
    """Read a direction file that belongs to this model and, where given, to these pairs.

    Raises:
        Refused: one line: the file cannot be read, or is of another schema, model, basis or pair
            content.
    """
    tensors, raw = read_safetensors(path)
    meta = Meta.from_strings(raw, str(path))
    own = weights_sha256(policy.model, policy.adapter)
    if meta.weights_sha256 != own:
        raise Refused(
            f"{path}: direction of another model ({meta.model}, weights "
            f"{meta.weights_sha256[:12]}); this one is {model_name(policy)}, {own[:12]}: "
            "extract it again"
        )
    if pairs is not None:
        meta.require_pairs(pairs, str(path))
    axes: dict[str, Axes] = {}
    for module in policy.adapter.names:
        of_module = {field: tensors[prefix + module].float() for prefix, field in _TENSORS.items()}
        axes[module] = Axes(**of_module)
    fingerprint = fingerprint_from_string(meta.basis, str(path))
    policy.adapter.require_basis(mean_of(axes, policy.adapter), fingerprint, str(path))
    return Direction(axes, meta)


def obtain(
    policy: Policy,
    pairs: PairSet | None,
    path: Path | None,
    top_k: int,
    tau_axis: float,
) -> Direction:
    """The direction in the file `path`; without a path, that of these pairs on this model.

    The latter is cached: it is extracted if its file is missing.

    Raises:
        Refused: as `load` and `extract` do.
    """
    assert not policy.adapter.δS.any(), (
        "a direction on file belongs to the base model: obtain it before training"
    )
    if path is not None:
        return load(path, policy, pairs)
    assert pairs is not None, "neither a direction nor pairs to extract one from"
    path = default_path(policy, pairs, top_k, tau_axis)
    if path.exists():
        logger.debug(f"direction from {path}")
        return load(path, policy, pairs)
    direction = extract(policy, pairs, top_k, tau_axis)
    try:
        save(direction, path)
    except OSError as error:
        logger.warning(
            f"direction cannot be kept in {path} ({error}): this run works without the file"
        )
    return direction


# ── what it is worth


def module_table(direction: Direction, k: int) -> str:
    """Each module's spectrum and held-out checks, with what a random direction would show.

    k: how many singular values are shown.
    """
    rows: list[dict[str, Any]] = []
    for module, axes in direction.axes.items():
        relative = (axes.sv[1:k] / axes.sv[0]).tolist()
        rows.append(
            {
                "module": module,
                "r": len(axes.mean),
                "S_1": axes.sv[0].item(),
                "S_i / S_1": " ".join(f"{s:.2f}" for s in relative),
                "held-out cos": axes.heldout_cos,
                "held-out inside V": axes.heldout_inside,
                # for a random difference
                "by chance": math.sqrt(len(axes.V) / len(axes.mean)),
            }
        )
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f")
    mean = {name: fmean(row[name] for row in rows) for name in [*rows[0]][4:]}
    positive = sum(row["held-out cos"] > 0 for row in rows)
    cos_by_chance = fmean(1 / math.sqrt(row["r"]) for row in rows)
    meta = direction.meta
    lines = [
        table,
        f"pairs {meta.pairs_source} ({meta.n_pairs}, {meta.n_heldout} held out, "
        f"sha256 {meta.pairs_sha256[:12]})",
        f"held-out difference with v_grad: mean cos {mean['held-out cos']:+.3f}, "
        f"> 0 in {positive}/{len(rows)} modules. "
        f"SHOULD be well above chance (0 ± {cos_by_chance:.3f}); ELSE the pairs share no direction",
        f"held-out difference inside V: mean {mean['held-out inside V']:.3f}, "
        f"by chance √(k/r) = {mean['by chance']:.3f}",
    ]
    return "\n".join(lines)
