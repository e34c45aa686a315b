"""The hack direction: what tells a hack's gradient from an honest answer's, per module, in the space of δS.

For a pair and a side, g = ∂(mean NLL of the completion)/∂δS. With D = G_hack - G_clean [n, r] over the pairs that are
not held out: V = right singular vectors of D, oriented hack-ward by majority vote (erase, route); v_grad = unit mean of
D (route2). The difference of NLL gradients is the GRPO gradient of a batch that rewards the hack (advantages ±1), so a
step along -V makes the hack likelier.

`vgrout direction --model M --pairs F` extracts stand-alone.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from loguru import logger
from safetensors.torch import save as to_safetensors
from torch import Tensor
from tqdm import tqdm

from vgrout import ranks
from vgrout.direction.pairs import DIRECTIONS, HANDWRITTEN, SCHEMA, Meta, PairSet
from vgrout.errors import Refused
from vgrout.files import write_atomic
from vgrout.model.layout import Packed, batches, pack, padded_batches
from vgrout.model.logprobs import PaddedBatch, collate, completion_logprobs
from vgrout.model.policy import DTYPE_NAMES, Policy
from vgrout.model.source import shapes_of
from vgrout.model.svd_adapter import (
    SvdAdapter,
    fingerprint_from_string,
    fingerprint_to_string,
    read_safetensors,
    weights_sha256,
)
from vgrout.tensor_types import Directions

N_HELDOUT = 2
TOKENS_PER_BATCH = 4096  # of one backward, padding included, where memory allows


@dataclass(frozen=True, slots=True)
class Axes:
    """One module's part of a direction."""

    # orthonormal rows, hack-ward; a row below tau_axis (or without variance) is zero
    V: Float[Tensor, "k r"]
    sv: Float[Tensor, " k"]
    mean: Float[Tensor, " r"]  # mean of D
    # mean over pairs of the hack side's unit gradient: its product with a unit v is the
    hack: Float[Tensor, " r"]
    clean: Float[Tensor, " r"]  # pairs' mean cosine with v, for any v
    heldout: Float[Tensor, "h r"]  # rows of D that were kept out

    @property
    def heldout_cos(self) -> float:
        """Mean cosine of the held-out differences with the mean of the others. A random direction has 0 ± √(1/r)."""
        norms = self.heldout.norm(dim=1) * self.mean.norm()
        return torch.where(norms > 0, self.heldout @ self.mean / norms, 0.0).mean().item()

    @property
    def heldout_inside(self) -> float:
        """Mean ‖V d‖ / ‖d‖ of the held-out differences. A random k-dimensional span has √(k/r)."""
        norms = self.heldout.norm(dim=1)
        return (
            torch.where(norms > 0, (self.heldout @ self.V.T).norm(dim=1) / norms, 0.0).mean().item()
        )


@dataclass(frozen=True, slots=True)
class Direction:
    """Result of one extraction, for every adapted module in the model's order: enough for every method. On the CPU."""

    axes: dict[str, Axes]
    meta: Meta

    def select(self, k: int, drop_bottom_frac: float) -> Directions:
        """V for erase and route: the first k axes per module, without those below the global noise floor.

        The floor is the `drop_bottom_frac` quantile of the singular values of these axes over all modules. A module
        with no row left is missing from the result.
        """
        first = {m: (a.V[:k], a.sv[:k]) for m, a in self.axes.items()}
        alive = {m: (V[V.any(1)], sv[V.any(1)]) for m, (V, sv) in first.items()}
        values = torch.cat([sv for _, sv in alive.values()])
        if not len(values):
            return {}
        floor = torch.quantile(values, drop_bottom_frac)
        kept = {m: V[sv >= floor] for m, (V, sv) in alive.items()}
        return {m: V for m, V in kept.items() if len(V)}

    def v_grad(self) -> Directions:
        """Unit mean of D [1, r], for route2; a module whose mean is zero is missing."""
        return {m: (a.mean / a.mean.norm())[None] for m, a in self.axes.items() if a.mean.any()}

    def band(self, v: Directions) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Mean cosine with v [1, r] of the pairs' clean and of their hack sides, in v's order of modules."""
        on_host = {m: rows[0].cpu() for m, rows in v.items()}
        lo, hi = (
            [(getattr(self.axes[m], side) * on_host[m]).sum() for m in v]
            for side in ("clean", "hack")
        )
        return torch.stack(lo), torch.stack(hi)

    def signed(self, v: Directions) -> Directions:
        """v with the sign that puts the pairs' hack side above the clean side, module by module."""
        lo, hi = self.band(v)
        return {
            m: rows if up else -rows
            for (m, rows), up in zip(v.items(), (hi >= lo).tolist(), strict=True)
        }


# ── extraction


def extract(policy: Policy, pairs: PairSet, top_k: int, tau_axis: float) -> Direction:
    """A direction of the present model with the quarantine off; all other state stays as it was.

    top_k: axes kept a module. tau_axis: axes with S_i/S_0 below this are zero.

    Raises:
        Refused: a pair that is longer than the model's window, or that gives a gradient which is not finite.
    """
    G = {side: gradients(policy, pairs, side) for side in ("hack", "clean")}
    bad = [
        i
        for i in range(len(pairs))
        if not (G["hack"][i].isfinite().all() and G["clean"][i].isfinite().all())
    ]
    if bad:
        raise Refused(f"{pairs.source}: pair {bad[0]}: its gradient is not finite on this model")
    used = len(pairs) - N_HELDOUT
    hack, clean = (policy.adapter.by_module(G[side]) for side in ("hack", "clean"))
    axes = {m: axes_of(hack[m], clean[m], used, top_k, tau_axis) for m in policy.adapter.names}
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
        basis=fingerprint_to_string(
            policy.adapter.basis_fingerprint(mean_of(axes, policy.adapter))
        ),
    )
    return Direction(axes, meta)


def mean_of(axes: dict[str, Axes], adapter: SvdAdapter) -> Float[Tensor, " R"]:
    """D's mean over all modules, whose basis fingerprint is kept with the direction."""
    return torch.cat([axes[m].mean for m in adapter.names]).to(adapter.δS)


def axes_of(
    hack: Float[Tensor, "n r"], clean: Float[Tensor, "n r"], used: int, top_k: int, tau_axis: float
) -> Axes:
    """One module's axes from both sides' gradients. used: pairs that are not held out, the first ones."""
    # a few small SVDs: exact and the same on every machine
    hack, clean = hack.double(), clean.double()
    D = (hack - clean)[:used]
    _, S, Vh = torch.linalg.svd(D, full_matrices=False)
    k = min(top_k, used, len(S))
    S, V = S[:k], Vh[:k]
    along = D @ V.T  # [n, k]
    # a mean would follow the longest pair; it only breaks ties
    votes, mean = along.sign().sum(0), along.mean(0)
    V = V * torch.where(votes != 0, votes, torch.where(mean != 0, mean, 1.0)).sign()[:, None]
    relative = S / S[0].clamp(min=torch.finfo(S.dtype).tiny)
    # 1e-9: below lies the null space, whose axes are arbitrary
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
    """Mean of the rows' unit vectors; a zero row counts as zero."""
    norms = g.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, g / norms, 0.0).mean(0)


def gradients(policy: Policy, pairs: PairSet, side: str) -> Float[Tensor, "n R"]:
    """Gradient on δS of the mean NLL over one side's completion tokens, a row a pair. fp32, on the CPU.

    side: "hack" or "clean". Raises Refused on a pair that is longer than the model's window.
    """
    texts = [
        (policy.encode(pair.prompt), policy.encode(getattr(pair, side))) for pair in pairs.pairs
    ]
    lengths = [len(prompt) + len(answer) for prompt, answer in texts]
    for i, n in enumerate(lengths):
        if n > policy.window:
            raise Refused(
                f"{pairs.source}: pair {i}: {n} tokens, the model's window is {policy.window}"
            )
    own = ranks.own(lengths)
    rows, lengths = texts[own.start : own.stop], lengths[own.start : own.stop]
    grads, budget = torch.zeros(len(rows), len(policy.adapter)), TOKENS_PER_BATCH
    if (shapes := shapes_of(policy.model.config.to_dict())) is not None:
        budget = min(
            budget,
            policy.budget.activations // shapes.activation_bytes(policy.model.dtype.itemsize),
        )
    if policy.packs:
        parts = batches(range(len(rows)), [p for p, _ in rows], [c for _, c in rows], budget)
    else:
        parts = padded_batches(lengths, budget, longest_first=False)
    with policy.adapter.deployed(), torch.enable_grad():
        for part in tqdm(
            parts, desc=f"direction, {side} side", unit="batch", disable=None, leave=False
        ):
            given = [rows[i][0] for i in part], [rows[i][1] for i in part]
            with policy.adapter.per_rollout_grads(len(part)) as collected:
                batch: PaddedBatch | Packed
                if policy.packs:
                    batch = pack(range(len(part)), *given, policy.device, policy.model.dtype)
                    collected.tokens(batch.pieces, batch.tokens)
                else:
                    batch = collate(*given, policy.device)
                mean_nll(policy, batch).sum().backward()
            grads[part] = collected.flat.float().cpu()
    return torch.cat(ranks.gather(lambda: grads))


def mean_nll(policy: Policy, batch: PaddedBatch | Packed) -> Float[Tensor, " B"]:
    """Mean NLL of each row's completion, nats a token; carries a gradient."""
    logp = completion_logprobs(policy.model, batch).full
    return -torch.where(batch.mask, logp, 0.0).sum(1) / batch.mask.sum(1)


def model_name(policy: Policy) -> str:
    """As its configuration has it, else its class."""
    return str(policy.model.config.name_or_path) or type(policy.model).__name__


# ── files: safetensors with the hashes of all that a direction depends on

# key in the file → field of Axes; the bare module name holds V
_TENSORS = {
    "": "V",
    "_sv/": "sv",
    "_mean/": "mean",
    "_hack/": "hack",
    "_clean/": "clean",
    "_heldout/": "heldout",
}


def default_path(policy: Policy, pairs: PairSet, top_k: int, tau_axis: float) -> Path:
    """Where a direction is cached: by pair set, or, for the hand-written one, by model slug, k and τ. Then ten digits
    of a hash of all that it depends on, so that nothing stale is ever found there."""
    if pairs.source == HANDWRITTEN:
        slug = Path(model_name(policy)).name.lower()
        name = f"v_hack_{slug}_k{top_k}" + (f"_tau{tau_axis:g}" if tau_axis else "")
    else:
        name = f"v_hack_pairset_{pairs.stem}"
    weights = weights_sha256(policy.model, policy.adapter)
    text = f"{SCHEMA} {weights} {pairs.sha256} {top_k} {tau_axis} {N_HELDOUT}"
    return DIRECTIONS / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:10]}.safetensors"


def save(direction: Direction, path: Path) -> None:
    """Write a direction file, atomically."""
    tensors = {
        prefix + m: getattr(axes, field).contiguous()
        for m, axes in direction.axes.items()
        for prefix, field in _TENSORS.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, to_safetensors(tensors, direction.meta.to_strings()))


def load(path: Path, policy: Policy, pairs: PairSet | None) -> Direction:
    """A direction file that belongs to this model and, where given, to these pairs.

    Raises:
        Refused: one line: not readable, another schema, model, basis, pair content, module set or shape, or a NaN.
    """
    tensors, raw = read_safetensors(path)
    meta = Meta.from_strings(raw, str(path))
    if meta.weights_sha256 != (own := weights_sha256(policy.model, policy.adapter)):
        raise Refused(
            f"{path}: direction of another model ({meta.model}, weights {meta.weights_sha256[:12]}); "
            f"this one is {model_name(policy)}, {own[:12]}: extract it again"
        )
    if pairs is not None:
        meta.require_pairs(pairs, str(path))
    wanted = set[tuple[str, tuple[int, ...]]]()
    for m, δ in policy.adapter.by_module(policy.adapter.δS.detach()).items():
        r = δ.numel()
        k = min(meta.top_k, meta.n_pairs - meta.n_heldout, r)
        shapes = {
            "V": (k, r),
            "sv": (k,),
            "mean": (r,),
            "hack": (r,),
            "clean": (r,),
            "heldout": (meta.n_heldout, r),
        }
        wanted |= {(prefix + m, shapes[field]) for prefix, field in _TENSORS.items()}
    there = {(name, (*x.shape,)) for name, x in tensors.items() if x.isfinite().all()}
    if differ := sorted(wanted ^ there):
        raise Refused(
            f"{path}: {len(differ)} tensors are missing, too many, of another shape or not finite, first "
            f"{differ[0][0]!r}; extract it again"
        )
    axes = {
        m: Axes(**{field: tensors[prefix + m].float() for prefix, field in _TENSORS.items()})
        for m in policy.adapter.names
    }
    fingerprint = fingerprint_from_string(meta.basis, str(path))
    policy.adapter.require_basis(mean_of(axes, policy.adapter), fingerprint, str(path))
    return Direction(axes, meta)


def obtain(
    policy: Policy, pairs: PairSet | None, path: Path | None, top_k: int, tau_axis: float
) -> Direction:
    """The direction at `path`; without one, the cached file for these pairs and this model, extracted if it is missing.

    Raises:
        Refused: as `load` and `extract`.
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
