"""The hack direction: what tells a hack's gradient from an honest answer's, per module, in the knobs' own space.

For a pair and a side, g = ∂(mean NLL of the completion)/∂δS. With D = G_hack - G_clean [n, r] over the pairs that are
not held out: V = right singular vectors of D, oriented hack-ward by majority vote (erase, route); v_grad = unit mean of
D (route2). The difference of NLL gradients is the GRPO gradient of a batch that pays the hack (advantages ±1), so a
step along -V makes the hack likelier.

`python -m vgrout.direction --model M --pairs F` extracts stand-alone.
"""

import hashlib
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from loguru import logger
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from tqdm import tqdm

from vgrout.flow import Directions
from vgrout.pairs import HANDWRITTEN, Pair, PairSet
from vgrout.policy import Policy
from vgrout.rng import torch_stream
from vgrout.svd_adapter import SvdAdapter, read_safetensors, write_whole

SCHEMA = "v2_with_sv"
N_HELDOUT = 2
TOKENS_PER_BATCH = 4096  # padded tokens of one backward: bounds activations and, with a 150k vocabulary, logits
FOLDER = Path("out/vhack")
_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True)
class Meta:
    """Where a direction comes from. Kept in the file as strings."""

    model: str
    dtype: str
    top_k: int
    tau_axis: float
    pairs_sha256: str
    pairs_source: str
    weights_sha256: str
    n_pairs: int
    n_heldout: int

    def to_strings(self) -> dict[str, str]:
        return {"schema": SCHEMA} | {name: str(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_strings(cls, raw: dict[str, str], where: str) -> "Meta":
        """Raises ValueError naming the entry that is missing or unreadable."""
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"{where}: schema {raw.get('schema')!r}, needs {SCHEMA!r}; extract it again")
        try:
            return cls(
                model=raw["model"],
                dtype=raw["dtype"],
                top_k=int(raw["top_k"]),
                tau_axis=float(raw["tau_axis"]),
                pairs_sha256=raw["pairs_sha256"],
                pairs_source=raw["pairs_source"],
                weights_sha256=raw["weights_sha256"],
                n_pairs=int(raw["n_pairs"]),
                n_heldout=int(raw["n_heldout"]),
            )
        except KeyError as missing:
            raise ValueError(f"{where}: no {missing} in its metadata; extract it again") from None
        except ValueError as e:
            raise ValueError(f"{where}: metadata cannot be read ({e}); extract it again") from None

    def require_pairs(self, pairs: PairSet, where: str) -> None:
        """Raises ValueError if the direction comes from other pairs."""
        if self.pairs_sha256 != pairs.sha256:
            raise ValueError(
                f"{where}: direction of other pairs ({self.pairs_source}, sha256 {self.pairs_sha256[:12]}); "
                f"this run has {pairs.source}, {pairs.sha256[:12]}: extract it again"
            )


@dataclass(frozen=True, slots=True)
class Axes:
    """One module's part of a direction."""

    V: Float[Tensor, "k r"]  # orthonormal rows, hack-ward; a row below tau_axis (or without variance) is zero
    sv: Float[Tensor, " k"]
    mean: Float[Tensor, " r"]  # mean of D
    hack: Float[Tensor, " r"]  # mean over pairs of the hack side's unit gradient: its product with a unit v is the
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
        return torch.where(norms > 0, (self.heldout @ self.V.T).norm(dim=1) / norms, 0.0).mean().item()


# key in the file → field of Axes; the bare module name holds V
_TENSORS = {"": "V", "_sv/": "sv", "_mean/": "mean", "_hack/": "hack", "_clean/": "clean", "_heldout/": "heldout"}


@dataclass(frozen=True, slots=True)
class Direction:
    """What one extraction found, for every adapted module in the model's order: enough for every arm. On the CPU."""

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
        lo, hi = ([(getattr(self.axes[m], side) * v[m][0].cpu()).sum() for m in v] for side in ("clean", "hack"))
        return torch.stack(lo), torch.stack(hi)

    def signed(self, v: Directions) -> Directions:
        """v with the sign that puts the pairs' hack side above the clean side, module by module."""
        lo, hi = self.band(v)
        return {m: rows if up else -rows for (m, rows), up in zip(v.items(), (hi >= lo).tolist(), strict=True)}


def overlap(new: Directions, old: Directions) -> float | None:
    """Mean over old's modules of ‖V_new V_oldᵀ‖²_F / k_old: 1 the same span, k_new/r by chance, 0 for a lost module."""
    if not old:
        return None
    shared = [((new[m] @ V.T) ** 2).sum().item() / len(V) if m in new else 0.0 for m, V in old.items()]
    return sum(shared) / len(shared)


def abs_cosines(a: Directions, b: Directions) -> dict[str, float]:
    """|cos| of two sets of unit vectors (k = 1), module by module: how contaminated a control is."""
    return {m: (a[m][0] * b[m][0]).sum().abs().item() for m in a if m in b}


def haar_like(V: Directions, seed: int) -> Directions:
    """Random orthonormal rows of the same shapes, Haar-distributed; each module's draw depends on its name alone."""
    drawn = {}
    for m, rows in V.items():
        k, r = rows.shape
        normal = torch.randn(r, k, generator=torch_stream(seed, "haar", m), dtype=torch.float64)
        Q, R = torch.linalg.qr(normal)
        drawn[m] = (Q * R.diagonal().sign()).T.to(rows).contiguous()  # the sign makes QR's result unique, hence Haar
    return drawn


# ── extraction ─────────────────────────────────────────────────────────────────────────────────────────────────────


def extract(
    policy: Policy,
    pairs: PairSet,
    top_k: int,
    tau_axis: float,
    *,
    n_heldout: int = N_HELDOUT,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> Direction:
    """A direction of the present model with the quarantine off; leaves all other state as it was.

    Raises:
        ValueError: a pair that is longer than the model's window, or that gives a gradient which is not finite.
    """
    G = {side: _gradients(policy, pairs, side, tokens_per_batch) for side in ("hack", "clean")}
    bad = [i for i in range(len(pairs)) if not (G["hack"][i].isfinite().all() and G["clean"][i].isfinite().all())]
    if bad:
        raise ValueError(f"{pairs.source}: pair {bad[0]}: its gradient is not finite on this model")
    used = len(pairs) - n_heldout
    hack, clean = (policy.adapter.views(G[side]) for side in ("hack", "clean"))
    axes = {m: axes_of(hack[m], clean[m], used, top_k, tau_axis) for m in policy.adapter.names}
    meta = Meta(
        model=_model_name(policy),
        dtype=_DTYPE[next(policy.model.parameters()).dtype],
        top_k=top_k,
        tau_axis=float(tau_axis),
        pairs_sha256=pairs.sha256,
        pairs_source=pairs.source,
        weights_sha256=weights_sha256(policy.model, policy.adapter),
        n_pairs=len(pairs),
        n_heldout=n_heldout,
    )
    return Direction(axes, meta)


def axes_of(hack: Float[Tensor, "n r"], clean: Float[Tensor, "n r"], used: int, top_k: int, tau_axis: float) -> Axes:
    hack, clean = hack.double(), clean.double()  # a few small SVDs: exact and the same on every machine
    D = (hack - clean)[:used]
    _, S, Vh = torch.linalg.svd(D, full_matrices=False)
    k = min(top_k, used, len(S))
    S, V = S[:k], Vh[:k]
    along = D @ V.T  # [n, k]
    votes, mean = along.sign().sum(0), along.mean(0)  # a mean would follow the longest pair; it only breaks ties
    V = V * torch.where(votes != 0, votes, torch.where(mean != 0, mean, 1.0)).sign()[:, None]
    relative = S / S[0].clamp(min=torch.finfo(S.dtype).tiny)
    real = (relative > 1e-9) & (relative >= tau_axis)  # 1e-9: below lies the null space, whose axes are arbitrary
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


def _gradients(policy: Policy, pairs: PairSet, side: str, tokens_per_batch: int) -> Float[Tensor, "n R"]:
    """One row per pair: gradient on δS of the mean NLL over the side's completion tokens. fp32, on the CPU."""
    rows = [
        _tokens(policy, pair, getattr(pair, side), f"{pairs.source}: pair {i}") for i, pair in enumerate(pairs.pairs)
    ]
    grads = torch.zeros(len(rows), len(policy.adapter))
    batches = list(_batches([p + c for p, c in ((len(p), len(c)) for p, c in rows)], tokens_per_batch))
    with policy.adapter.deployed(), _evaluating(policy.model), torch.enable_grad():
        for batch in tqdm(batches, desc=f"direction, {side} side", unit="batch", disable=None, leave=False):
            with policy.adapter.probe(len(batch)) as probe:
                _mean_nll(policy, [rows[i] for i in batch]).sum().backward()
            grads[batch] = probe.flat.float().cpu()
    return grads


def _tokens(policy: Policy, pair: Pair, completion: str, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    prompt, answer = (
        tuple(policy.tok(text, add_special_tokens=False)["input_ids"]) for text in (pair.prompt, completion)
    )
    if len(prompt) + len(answer) > policy.window:
        raise ValueError(f"{where}: {len(prompt) + len(answer)} tokens, the model's window is {policy.window}")
    return prompt, answer


def _batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, each within `budget` padded tokens; a longer row goes alone."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _mean_nll(policy: Policy, rows: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Float[Tensor, " B"]:
    logp, mask = policy.logprobs([p for p, _ in rows], [c for _, c in rows])
    return -torch.where(mask, logp, 0.0).sum(1) / mask.sum(1)


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """Eval mode (no dropout, so no random draw), each submodule's own flag restored."""
    flags = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_weights_seen: WeakKeyDictionary[SvdAdapter, str] = WeakKeyDictionary()


def weights_sha256(model: nn.Module, adapter: SvdAdapter) -> str:
    """sha256 over the base weights, by name; the knobs do not count. Computed once per adapter (seconds at 4B)."""
    if adapter not in _weights_seen:
        base = {name: p.data for name, p in model.named_parameters()}
        base |= {f"{name}.weight": site.W for name, site in adapter.sites.items()}
        digest = hashlib.sha256()
        for name in sorted(base):
            weight = base[name]
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        _weights_seen[adapter] = digest.hexdigest()
    return _weights_seen[adapter]


def _model_name(policy: Policy) -> str:
    return str(policy.model.config.name_or_path) or type(policy.model).__name__


def default_path(pairs: PairSet, meta_key: str, model: str, top_k: int, tau_axis: float, folder: Path = FOLDER) -> Path:
    """Where a direction is looked for: by pair set, or, for the hand-written one, by model slug, k and τ.

    The last part of the name is a hash of all that the content depends on, so nothing stale is ever found there.
    """
    if pairs.source == HANDWRITTEN:
        slug = Path(model).name.lower()
        name = f"v_hack_{slug}_k{top_k}" + (f"_tau{tau_axis:g}" if tau_axis else "")
    else:
        name = f"v_hack_pairset_{pairs.stem}"
    return folder / f"{name}_{meta_key}.safetensors"


def _key(policy: Policy, pairs: PairSet, top_k: int, tau_axis: float) -> str:
    weights = weights_sha256(policy.model, policy.adapter)
    text = f"{SCHEMA} {weights} {pairs.sha256} {top_k} {tau_axis} {N_HELDOUT}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def save(direction: Direction, path: Path) -> None:
    """All of the file or nothing."""
    tensors = {
        prefix + m: getattr(axes, field).contiguous()
        for m, axes in direction.axes.items()
        for prefix, field in _TENSORS.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_safetensors(tensors, direction.meta.to_strings()))


def load(path: Path, policy: Policy, pairs: PairSet | None) -> Direction:
    """A direction file that belongs to this model and, where given, to these pairs.

    Raises:
        ValueError: one line: not readable, another schema, model, pair content, module set or shape, or a NaN.
    """
    tensors, raw = read_safetensors(path)
    meta = Meta.from_strings(raw, str(path))
    if meta.weights_sha256 != (own := weights_sha256(policy.model, policy.adapter)):
        raise ValueError(
            f"{path}: direction of another model ({meta.model}, weights {meta.weights_sha256[:12]}); "
            f"this one is {_model_name(policy)}, {own[:12]}: extract it again"
        )
    if pairs is not None:
        meta.require_pairs(pairs, str(path))
    axes: dict[str, Axes] = {}
    n = meta.n_pairs - meta.n_heldout
    for m, view in policy.adapter.views(policy.adapter.δS.detach()).items():
        r = view.numel()
        k = min(meta.top_k, n, r)
        shapes = {"V": (k, r), "sv": (k,), "mean": (r,), "hack": (r,), "clean": (r,), "heldout": (meta.n_heldout, r)}
        for prefix, field in _TENSORS.items():
            if (tensor := tensors.get(prefix + m)) is None:
                raise ValueError(f"{path}: no tensor {prefix + m!r}; extract it again")
            if tensor.shape != shapes[field]:
                raise ValueError(f"{path}: {prefix + m} has shape {[*tensor.shape]}, needs {[*shapes[field]]}")
            if not tensor.isfinite().all():
                raise ValueError(f"{path}: {prefix + m} holds a NaN or an infinity; extract it again")
        axes[m] = Axes(**{field: tensors[prefix + m].float() for prefix, field in _TENSORS.items()})
    if extra := len(tensors) - len(_TENSORS) * len(axes):
        raise ValueError(f"{path}: {extra} tensors that this model has no module for; extract it again")
    return Direction(axes, meta)


def obtain(
    policy: Policy,
    pairs: PairSet | None,
    path: Path | None,
    top_k: int,
    tau_axis: float,
    folder: Path = FOLDER,
) -> Direction:
    """The direction at `path`; without one, the cached file for these pairs and this model, extracted if it is missing.

    Raises:
        ValueError: as `load`, or neither a path nor pairs.
    """
    if path is not None:
        return load(path, policy, pairs)
    if pairs is None:
        raise ValueError("--v-hack-path: no direction file and no pairs to extract one from; give --vhack-pairs-path")
    key = _key(policy, pairs, top_k, tau_axis)
    path = default_path(pairs, key, _model_name(policy), top_k, tau_axis, folder)
    if path.exists():
        logger.debug(f"direction from {path}")
        return load(path, policy, pairs)
    direction = extract(policy, pairs, top_k, tau_axis)
    try:
        save(direction, path)
    except OSError as error:
        logger.warning(f"direction cannot be kept in {path} ({error}): this run works without the file")
    return direction


def chance_cos(k: int, r: int) -> float:
    """Expected ‖V g‖ / ‖g‖ of a random direction g with k fixed orthonormal rows: ≈ √(k/r)."""
    return math.sqrt(k / r)
