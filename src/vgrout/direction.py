"""The hack direction: what tells a hack's gradient from an honest answer's, per module, in the knobs' own space.

For a pair and a side, g = ∂(mean NLL of the completion)/∂δS. With D = G_hack - G_clean [n, r] over the pairs that are
not held out: V = right singular vectors of D, oriented hack-ward by majority vote (erase, route); v_grad = unit mean of
D (route2). The difference of NLL gradients is the GRPO gradient of a batch that pays the hack (advantages ±1), so a
step along -V makes the hack likelier.

`python -m vgrout.direction --model M --pairs F` extracts stand-alone.
"""

import hashlib
import math
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from loguru import logger
from safetensors.torch import save as to_safetensors
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from vgrout import organism
from vgrout.cli import given, refusing
from vgrout.files import write_atomic
from vgrout.flow import Directions
from vgrout.pairs import (
    HANDWRITTEN,
    Detector,
    Pair,
    PairSet,
    handwritten,
    handwritten_placebo,
    load_pairs,
    pairs_from_pool,
)
from vgrout.pairs_leetcode import PLACEBOS
from vgrout.policy import Policy, load_policy
from vgrout.rng import torch_stream
from vgrout.svd_adapter import SvdAdapter, marks_from_string, marks_to_string, read_safetensors

SCHEMA = "v2_with_sv"
N_HELDOUT = 2
TOKENS_PER_BATCH = 4096  # padded tokens of one backward: bounds activations and, with a 150k vocabulary, logits
FOLDER = Path("out/vhack")
CONTROL_SEEDS = (41, 42, 43)
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
    basis: str = ""  # marks of the singular vectors that D is written in, taken of its mean; "": an older file

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
                basis=raw.get("basis", ""),
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
                f"this run has {pairs.source}, {pairs.sha256[:12]}: "
                "give --vhack-pairs-path the pairs it was made of, or extract it again"
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


@dataclass(frozen=True, slots=True)
class Likeness:
    """How far a control's rows coincide with the real ones, module by module: a contaminated control proves little."""

    cos: dict[str, float]  # |cos|; of several rows ‖V Wᵀ‖_F / √k, the root mean square over the real ones
    chance: float  # root mean square that random rows in the control's place would read

    def quantile(self, q: float) -> float:
        """Over modules."""
        return torch.quantile(torch.tensor(list(self.cos.values()), dtype=torch.float64), q).item()

    @property
    def rms(self) -> float:
        return math.sqrt(_mean(c * c for c in self.cos.values()))

    def as_json(self) -> dict[str, Any]:
        """Median, tail, chance, and every module's value."""
        return {
            "median": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "max": self.quantile(1.0),
            "rms": self.rms,
            "chance_rms": self.chance,
            "modules": self.cos,
        }

    def line(self) -> str:
        return (
            f"|cos| with the real direction over {len(self.cos)} modules: median {self.quantile(0.5):.3f}, "
            f"95 % {self.quantile(0.95):.3f}, max {self.quantile(1.0):.3f}; "
            f"root mean square {self.rms:.3f}, by chance {self.chance:.3f}"
        )


def likeness(control: Directions, real: Directions) -> Likeness | None:
    """None where the two have no module in common."""
    cos, expected = {}, []
    for m in real:
        if m in control:
            V, W = control[m].cpu(), real[m].cpu()
            cos[m] = ((V @ W.T).norm() / math.sqrt(len(W))).item()
            expected.append(len(V) / V.shape[1])
    return Likeness(cos, math.sqrt(_mean(expected))) if cos else None


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
    G = {side: gradients(policy, pairs, side, tokens_per_batch) for side in ("hack", "clean")}
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
        basis=marks_to_string(policy.adapter.marks(_mean_of(axes, policy.adapter))),
    )
    return Direction(axes, meta)


def _mean_of(axes: dict[str, Axes], adapter: SvdAdapter) -> Float[Tensor, " R"]:
    return adapter.flat({m: a.mean for m, a in axes.items()}).to(adapter.δS)


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


def gradients(policy: Policy, pairs: PairSet, side: str, tokens_per_batch: int) -> Float[Tensor, "n R"]:
    """One row per pair: gradient on δS of the mean NLL over the side's completion tokens. fp32, on the CPU."""
    rows = [
        tokens_of(policy, pair, getattr(pair, side), f"{pairs.source}: pair {i}") for i, pair in enumerate(pairs.pairs)
    ]
    grads = torch.zeros(len(rows), len(policy.adapter))
    batches = list(_batches([p + c for p, c in ((len(p), len(c)) for p, c in rows)], tokens_per_batch))
    with policy.adapter.deployed(), _evaluating(policy.model), torch.enable_grad():
        for batch in tqdm(batches, desc=f"direction, {side} side", unit="batch", disable=None, leave=False):
            with policy.adapter.probe(len(batch)) as probe:
                mean_nll(policy, [rows[i] for i in batch]).sum().backward()
            grads[batch] = probe.flat.float().cpu()
    return grads


def tokens_of(policy: Policy, pair: Pair, completion: str, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and completion. Raises ValueError if they do not fit the model's window."""
    prompt, answer = policy.encode(pair.prompt), policy.encode(completion)
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


def mean_nll(policy: Policy, rows: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Float[Tensor, " B"]:
    """Of each row's completion, in nats a token."""
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

_weights_seen: WeakKeyDictionary[nn.Module | SvdAdapter, str] = WeakKeyDictionary()


def weights_sha256(model: nn.Module, adapter: SvdAdapter | None) -> str:
    """sha256 over the base weights, by name; the knobs do not count. Computed once (seconds at 4B)."""
    key = model if adapter is None else adapter
    if key not in _weights_seen:
        base = {name: p.data for name, p in model.named_parameters()}
        if adapter is not None:
            base |= {f"{name}.weight": site.W for name, site in adapter.sites.items()}
        digest = hashlib.sha256()
        for name in sorted(base):
            weight = base[name]
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        _weights_seen[key] = digest.hexdigest()
    return _weights_seen[key]


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
    write_atomic(path, to_safetensors(tensors, direction.meta.to_strings()))


def load(path: Path, policy: Policy, pairs: PairSet | None) -> Direction:
    """A direction file that belongs to this model and, where given, to these pairs.

    Raises:
        ValueError: one line: not readable, another schema, model, basis, pair content, module set or shape, or a NaN.
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
    if meta.basis:
        marks = marks_from_string(meta.basis, str(path))
        policy.adapter.require_basis(_mean_of(axes, policy.adapter), marks, str(path))
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
    assert not policy.adapter.δS.any(), "a direction on file belongs to the base model: obtain it before training"
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
    """‖V g‖ / ‖g‖ that a random g has with k orthonormal rows: ≈ √(k/r)."""
    return math.sqrt(k / r)


# ── the command ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Cli:
    """Extract a hack direction from contrastive pairs and say how good it is."""

    model: str
    """Hub id, local model folder, or 'organism'."""
    pairs: Path | None = None
    """Pair file (JSON); none: the organism's run_tests pairs, or the hand-written set."""
    rollouts: Path | None = None
    """Take the pairs from this rollouts.jsonl instead; needs --detector."""
    detector: Detector | None = None
    """Who says which rollout is a hack: C, D or E, or 'oracle' (true labels: an upper bound)."""
    shuffle_seed: int | None = None
    """The control: exchange hack and clean in half of the pairs."""
    top_k: int = 12
    """Axes per module kept in the file."""
    tau_axis: float = 0.0
    """Axes with S_i/S_0 below this are zeroed."""
    k: int = 5
    """Axes per module that a run would use, for the table."""
    drop_bottom_frac: float = 0.25
    """Noise floor that a run would use, for the table."""
    compare: tuple[Path, ...] = ()
    """Other direction files of this model: their |cos| with this one is printed."""
    controls: bool = False
    """Extract the placebo and shuffled sets too, draw Haar directions, and print and plot their |cos| with this one."""
    pairs_out: Path | None = None
    """Write the pairs here (JSON), for --vhack-pairs-path: those of --rollouts or --shuffle-seed have no file."""
    out: Path | None = None
    """Where the direction goes; none: where a run with these pairs looks for it."""
    figure: Path | None = None
    """Where the figure (png) goes; none: beside the direction."""
    svd_cache: Path = Path("out/svd_cache")
    """Decomposed weights."""

    def __post_init__(self) -> None:
        def refuse(condition: bool, message: str) -> None:
            if condition:
                raise ValueError(message)

        refuse(self.top_k < 1, f"--top-k {self.top_k}: should be 1 or more")
        refuse(not 1 <= self.k <= self.top_k, f"--k {self.k}: should lie in [1, --top-k {self.top_k}]")
        refuse(not 0 <= self.tau_axis <= 1, f"--tau-axis {self.tau_axis}: should lie in [0, 1]")
        refuse(not 0 <= self.drop_bottom_frac < 1, f"--drop-bottom-frac {self.drop_bottom_frac}: should lie in [0, 1)")
        refuse(self.pairs is not None and self.rollouts is not None, "--rollouts: not together with --pairs")
        refuse(
            (self.rollouts is None) != (self.detector is None), "--detector: goes with --rollouts, give both or neither"
        )
        local = self.model.startswith((".", "/")) or self.model.count("/") > 1
        refuse(
            local and not (Path(self.model) / "config.json").is_file(),
            f"--model {self.model}: no config.json there; give a Hugging Face model folder or a hub id",
        )
        for path in self.compare:
            refuse(not path.is_file(), f"--compare {path}: no such file")
        refuse(
            self.pairs_out is not None and self.pairs_out.suffix != ".json",
            f"--pairs-out {self.pairs_out}: should end in .json",
        )
        refuse(self.figure is not None and self.figure.suffix != ".png", f"--figure {self.figure}: should end in .png")
        refuse(
            self.out is not None and self.out.suffix != ".safetensors", f"--out {self.out}: should end in .safetensors"
        )


def main(argv: list[str] | None = None) -> int:
    """0: done. 2: refused, in one line on stderr."""
    return refusing(lambda: _command(given(Cli, argv, "python -m vgrout.direction")))


def _command(cli: Cli) -> int:
    pairs = _pairs_of(cli)  # a wrong file is refused before the model is loaded
    model = str(organism.MODEL_DIR) if cli.model == "organism" else cli.model
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    policy = load_policy(model, device=device, dtype=dtype, cache_dir=cli.svd_cache)
    if cli.rollouts is not None and cli.detector is not None:
        pairs = pairs_from_pool(cli.rollouts, cli.detector, policy.prompt_text)
    assert pairs is not None
    if cli.shuffle_seed is not None:
        pairs = pairs.shuffled(cli.shuffle_seed)
    if cli.pairs_out is not None:
        # a pair set is known by content and source: the run that loads this file finds the direction by its name
        cli.pairs_out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cli.pairs_out, pairs.to_file().encode())
        pairs = load_pairs(cli.pairs_out)
    direction = extract(policy, pairs, cli.top_k, cli.tau_axis)
    key = _key(policy, pairs, cli.top_k, cli.tau_axis)
    out = cli.out or default_path(pairs, key, _model_name(policy), cli.top_k, cli.tau_axis)
    save(direction, out)
    print(report(direction, cli.k, cli.drop_bottom_frac))
    for path in cli.compare:
        if (close := likeness(load(path, policy, None).v_grad(), direction.v_grad())) is not None:
            print(f"{path}: {close.line()}")
    controls = compare_controls(policy, pairs, direction, cli) if cli.controls else {}
    if controls:
        print(control_table(controls))
    figure = cli.figure or out.with_suffix(".png")
    draw(direction, cli.k, figure, {name: close[0] for name, close in controls.items()})
    print(f"direction {out}\nfigure    {figure}")
    if cli.pairs_out is not None:
        print(f"pairs     {cli.pairs_out}")
    return 0


def compare_controls(
    policy: Policy, pairs: PairSet, direction: Direction, cli: Cli
) -> dict[str, tuple[Likeness, Likeness]]:
    """Of each control of the direction, the likeness of v_grad and of the rows V that erase and route would use."""

    def used(d: Direction) -> tuple[Any, Any]:  # Directions of 1 and of up to k rows: one k in the type would tie them
        return d.v_grad(), d.select(cli.k, cli.drop_bottom_frac)

    real, found = used(direction), {}
    sets = {f"placebo, {contrast}": made for contrast, made in _placebos(cli).items()}
    sets |= {f"shuffled, seed {seed}": pairs.shuffled(seed) for seed in CONTROL_SEEDS}
    drawn = {f"Haar, seed {seed}": tuple(haar_like(V, seed) for V in real) for seed in CONTROL_SEEDS}
    made = {name: used(extract(policy, other, cli.top_k, cli.tau_axis)) for name, other in sets.items()}
    for name, rows in (made | drawn).items():
        v, V = (likeness(a, b) for a, b in zip(rows, real, strict=True))
        if v is not None and V is not None:
            found[name] = (v, V)
    return found


def control_table(controls: dict[str, tuple[Likeness, Likeness]]) -> str:
    rows = [
        {
            "control": name,
            "|cos| of v: median": v.quantile(0.5),
            "95 %": v.quantile(0.95),
            "max": v.quantile(1.0),
            "rms": v.rms,
            "by chance": v.chance,
            "of V: rms": V.rms,
            "by chance ": V.chance,
        }
        for name, (v, V) in controls.items()
    ]
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f")
    return f"|cos| with the real direction, over modules\n{table}"


def _placebos(cli: Cli) -> dict[str, PairSet]:
    """The sets that `--control placebo_…` would use on this model."""
    if cli.model == "organism":
        return {c: load_pairs(organism.PAIRS_DIR / f"placebo_{c}.json") for c in PLACEBOS}
    return {c: handwritten_placebo(c) for c in PLACEBOS}


def _pairs_of(cli: Cli) -> PairSet | None:
    """None: they come from a rollout log and need the tokenizer's chat template."""
    if cli.rollouts is not None:
        if not cli.rollouts.is_file():
            raise ValueError(f"--rollouts {cli.rollouts}: no such file")
        return None
    if cli.pairs is not None:
        return load_pairs(cli.pairs)
    return load_pairs(organism.PAIRS_DIR / "run_tests.json") if cli.model == "organism" else handwritten()


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def report(direction: Direction, k: int, drop_bottom_frac: float) -> str:
    """Per-module spectra and held-out checks, then what a random direction would show."""
    kept = direction.select(k, drop_bottom_frac)
    lo, hi = direction.band(v := direction.v_grad())
    band = dict(zip(v, (hi - lo).tolist(), strict=True))
    rows: list[dict[str, Any]] = []
    for m, a in direction.axes.items():
        power = a.sv**2 / (a.sv**2).sum()
        rows.append(
            {
                "module": m,
                "r": len(a.mean),
                "S_1": a.sv[0].item(),
                "S_i / S_1": " ".join(f"{s:.2f}" for s in (a.sv[1:k] / a.sv[0]).tolist()),
                "power of S_1": power[0].item(),
                "axes used": len(kept.get(m, ())),
                "held-out cos": a.heldout_cos,
                "held-out inside V": a.heldout_inside,
                "by chance": chance_cos(len(a.V), len(a.mean)),
                "band": band.get(m, 0.0),
            }
        )
    meta, n = direction.meta, len(rows)
    axes = sum(map(len, kept.values()))
    one = _mean(1 / math.sqrt(row["r"]) for row in rows)
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f")
    return "\n".join(
        (
            table,
            f"pairs {meta.pairs_source} ({meta.n_pairs}, {meta.n_heldout} held out, sha256 {meta.pairs_sha256[:12]})",
            f"a run uses {axes} axes in {len(kept)} of {n} modules (--v-hack-k {k}, noise floor {drop_bottom_frac:g})",
            f"held-out difference with v_grad: mean cos {_mean(r['held-out cos'] for r in rows):+.3f}, "
            f"> 0 in {sum(r['held-out cos'] > 0 for r in rows)}/{n} modules. "
            f"SHOULD be well above chance (0 ± {one:.3f}); ELSE the pairs share no direction",
            f"held-out difference inside V: mean {_mean(r['held-out inside V'] for r in rows):.3f}, "
            f"by chance √(k/r) = {_mean(r['by chance'] for r in rows):.3f} "
            "(gradients are not isotropic: --shuffle-seed gives the fairer bar)",
            f"pair band hi − lo: mean {_mean(band.values()):+.3f}, "
            f"positive in {sum(b > 0 for b in band.values())}/{n} modules",
        )
    )


def draw(direction: Direction, k: int, path: Path, controls: dict[str, Likeness] | None = None) -> None:
    """Spectra and held-out cosines of all modules as a png, and the |cos| of controls with the real direction."""
    # matplotlib takes half a second to import, and the trainer imports this module
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15 if controls else 10, 4), layout="constrained")
    left, right, *third = figure.subplots(1, 3 if controls else 2)
    kinds = {"attention": ("C0", "o", "-"), "MLP": ("C1", "^", "--")}
    names = list(direction.axes)
    for kind, (colour, marker, style) in kinds.items():
        own = [m for m in names if m.endswith(("gate_proj", "up_proj", "down_proj")) == (kind == "MLP")]
        if not own:
            continue
        spectra = torch.stack([direction.axes[m].sv / direction.axes[m].sv[0] for m in own])
        x = range(1, spectra.shape[1] + 1)
        left.plot(x, spectra.T, style, color=colour, alpha=0.15, linewidth=0.8)
        left.plot(x, spectra.median(0).values, style, color=colour, linewidth=2, label=f"{kind}, median of {len(own)}")
        right.plot(
            [names.index(m) for m in own],
            [direction.axes[m].heldout_cos for m in own],
            marker,
            color=colour,
            markersize=4,
            label=kind,
        )
    left.axvline(k + 0.5, color="0.4", linewidth=0.8, linestyle=":", label=f"a run uses the first {k}")
    left.set(xlabel="axis i", ylabel="S_i / S_1", ylim=(0, 1.02), title="Singular values of the pairs' differences")
    chance = torch.tensor([1 / math.sqrt(len(a.mean)) for a in direction.axes.values()])
    right.fill_between(
        range(len(names)), -2 * chance, 2 * chance, step="mid", color="0.85", linewidth=0, label="chance, ± 2/√r"
    )
    right.axhline(0, color="0.4", linewidth=0.8)
    right.set(xlabel="module, in the model's order", ylabel="cosine with v_grad", title="Pairs that were held out")
    for axis in third:
        for row, close in enumerate(reversed((controls or {}).values())):
            cos, chance = sorted(close.cos.values()), close.chance
            axis.plot(cos, [row] * len(cos), "|", color="C0", markersize=9, alpha=0.6, label="a module" * (not row))
            axis.plot(close.quantile(0.5), row, "D", color="black", markersize=5, label="median" * (not row))
            axis.plot([chance] * 2, [row - 0.4, row + 0.4], ":", color="C3", label="chance (rms)" * (not row))
        axis.set_yticks(range(len(controls or {})), list(reversed(controls or {})))
        axis.set(xlabel="|cos| with the real direction", xlim=(-0.02, 1.02), title="How contaminated are the controls?")
    for axis in (left, right, *third):
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    sys.exit(main())
