"""The SVD adapter: two vectors, δS (kept) and δS_hack (quarantine), in the basis of every weight.

Every target Linear is decomposed once: W = U diag(S) Vh, r = min(d_in, d_out). Its effective weight
is W' = W + U diag(δS + δS_hack) Vh. Both vectors are merged into the weights once an optimiser
step, so every forward is a plain Linear; only the backward of `model/rollout_grads.py` touches U
and Vh. In bf16 most changes of a step are far below the weights' spacing, so they are rounded with
a dither (docs/adr/001).

Index letters: R = Σ r over the adapted modules, k numbers of a basis fingerprint.
"""

import hashlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

from vgrout.ground import ranks
from vgrout.ground.console import progress
from vgrout.ground.io import Refused, write_atomic
from vgrout.model.load.source import TARGETS
from vgrout.model.svd_files import (
    Decompose,
    Fingerprint,
    SvdCache,
    Weight,
    bytes_of,
    canonical,
    fingerprint_from_string,
    fingerprint_to_string,
    read_safetensors,
    svd,
)

Vector = Float[Tensor, " R"]  # δS, δS_hack or their sum; a module is a slice of it
Dither = Int[Tensor, " n_weights"]

FINGERPRINT_SIZE = 4  # k: numbers a module by which a file's basis is recognised
# How far a fingerprint may be off, as a share of ‖δ‖. bf16's rounding moves it by 0.004, two axes
# of 2,560 that swap places by 0.03.
SAME_BASIS = 0.02

# In how many modules the realised share is measured: it costs as much as merging these.
MODULES_MEASURED = 8


class Active(NamedTuple):
    """Which of the two vectors are in the model's weights."""

    δS: bool
    δS_hack: bool


AS_TRAINED = Active(δS=True, δS_hack=True)
DEPLOYED = Active(δS=True, δS_hack=False)
REFERENCE = Active(δS=False, δS_hack=False)


# ── one adapted Linear


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """One adapted Linear and its decomposition.

    `W`, `U` and `Vh` have the model's dtype. In bf16 the rounded U and Vh *are* the basis.

    Under tensor parallelism `W`, and one of `U` and `Vh`, are this rank's part (`Shard`); of the
    other factor it holds some singular vectors, and every access to it is an exchange.
    """

    name: str
    linear: nn.Linear
    W: Weight
    held_U: Float[Tensor, "d_out r"]
    S: Float[Tensor, " r"]
    held_Vh: Float[Tensor, "r d_in"]
    signs: Float[Tensor, "k r"]  # (Uᵀ a) ⊙ (Vh z) for k pairs of fixed random signs a and z
    span: slice  # its part of the flat vectors
    shard: "Shard | None"

    @property
    def U(self) -> Float[Tensor, "d_out r"]:
        """The left singular vectors, one a column."""
        rowwise = self.shard is not None and self.shard.dim == 1
        return ranks.join_shards(self.held_U.mT).mT if rowwise else self.held_U

    @property
    def Vh(self) -> Float[Tensor, "r d_in"]:
        """The right singular vectors, one a row."""
        colwise = self.shard is not None and self.shard.dim == 0
        return ranks.join_shards(self.held_Vh) if colwise else self.held_Vh

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole weight."""
        return self.W.shape if self.shard is None else self.shard.shape

    def change(self, δ: Vector) -> Weight:
        """ΔW = U diag(δ) Vh, in δ's dtype."""
        U = self.U.to(δ.dtype)
        Vh = self.Vh.to(δ.dtype)
        return (U * δ[self.span]) @ Vh

    def merge_into(self, out: Weight, δ: Vector, dither: Dither | None) -> None:
        """Write W + ΔW into `out`: summed in fp32 and rounded once.

        Rounding is to the nearest without a dither, else by `round_by`. With a dither the model is
        in bf16, which is exact enough for ΔW itself.
        """
        if dither is None:
            ΔW = self.change(δ)
            out.copy_(ΔW.add_(self.W))
            return
        Uδ = (self.U * δ[self.span]).to(self.W.dtype)
        ΔW = (Uδ @ self.Vh).to(δ.dtype)
        if self.shard is not None:
            whole = dither[: self.shape.numel()].view(self.shape)
            dither = self.shard.of(whole).flatten()
        round_by(dither, ΔW.add_(self.W), out)


def round_by(
    dither: Dither, x: Float[Tensor, "*d"], out: Float[Tensor, "*d"]
) -> Float[Tensor, "*d"]:
    """Round fp32 `x` at random to one of its two neighbours in bf16, without bias. Overwrites x.

    The neighbour farther from zero is taken with the probability that makes the mean x. A number of
    bf16 stays itself.

    dither: one random integer in [0, 2^16) a weight, the same at every merge: a weight moves only
        where x has moved, and a resumed run has the same weights. A bf16 number is the upper half
        of an fp32 one, so the carry of this sum rounds up.
    """
    noise = dither[: x.numel()].view_as(x)
    bits = x.view(torch.int32).add_(noise).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(bits)
    return out


def _input_of(site: AdaptedLinear) -> tuple[str, int]:
    """Equal for neighbours that read the same input."""
    return site.name.rpartition(".")[0], site.W.shape[1]


def targets(model: nn.Module) -> dict[str, nn.Linear]:
    """The Linears that are adapted, by name, in the model's order. Raises as `SvdAdapter`."""
    named: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS:
            named[name] = module
    distinct = {id(linear.weight) for linear in named.values()}
    if not named or len(distinct) < len(named):
        raise Refused(
            f"{type(model).__name__} has no Linear named {', '.join(sorted(TARGETS))}, "
            "or shares one's weight"
        )
    return named


def left_out(model: nn.Module, adapted: Iterable[str]) -> list[str]:
    """Names of the matrices in the model's blocks that are not adapted, each kind once.

    A matrix is named by the last part of its name; by the last two, as in `experts.up_proj`, where
    that part is the name of an adapted one.
    """
    known = set(adapted)
    kinds: set[str] = set()
    for parameter_name, parameter in model.named_parameters():
        name = parameter_name.removesuffix(".weight")
        if parameter.ndim < 2 or ".layers." not in name or name in known:
            continue
        parts = name.split(".")
        shown = parts[-2:] if parts[-1] in TARGETS else parts[-1:]
        kinds.add(".".join(shown))
    return sorted(kinds)


# ── tensor parallelism


# By a model's plan, the dimension of W that is cut; None: the module is held whole.
CUT = {"colwise": 0, "rowwise": 1, "replicated_with_grad_allreduce": None}


@dataclass(slots=True)
class Shard:
    """The part of a Linear that this rank holds, where several hold one model together.

    The plan is the one that transformers has for the model (`base_model_tp_plan`), its layout that
    of Megatron-LM (arXiv 1909.08053):

    | plan | W and W' [d_out, d_in] | U [d_out, r] | Vh [r, d_in] | summed over the ranks |
    |---|---|---|---|---|
    | colwise | some rows | the same rows | some rows | ∂L/∂x |
    | rowwise | some columns | some columns | the same columns | y |

    What a rank collects of g = Σ_t (Vh x_t) ⊙ (Uᵀ ∂L/∂y_t) with its part is a summand of g, which
    `ranks.total` adds up with other rows' gradients. All else of the model is held whole.
    """

    dim: int  # of W: 0, some rows; 1, some columns
    shape: torch.Size  # of the whole W
    whole: Weight | None  # W on the host, until it has been decomposed

    def of(self, matrix: Tensor) -> Tensor:
        """The part of a whole W, U, Vh or bias."""
        return matrix.chunk(ranks.shards(), self.dim)[ranks.shard()]

    def copy_of(self, matrix: Tensor) -> Tensor:
        """The same, without the rest."""
        return self.of(matrix).clone(memory_format=torch.contiguous_format)


def cuts(model: PreTrainedModel, n: int) -> dict[str, int]:
    """The dimension along which each adapted Linear is cut for n ranks. No weight is read.

    Raises:
        Refused: one line: the model has no plan, or one that does more.
    """
    kind = type(model).__name__
    plan: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    linears = targets(model)
    dims: dict[str, int] = {}
    for name in linears:
        pattern = replace_layer_number_by_wildcard(name)
        style = plan.get(pattern.removeprefix(f"{model.base_model_prefix}."))
        dim = CUT.get(style or "")
        if dim is not None:
            dims[name] = dim
    if len(dims) < len(linears) or not CUT.keys() >= set(plan.values()):
        raise Refused(
            f"--tensor-parallel {n}: transformers has no plan for {kind} that divides exactly the "
            "adapted layers; leave it out"
        )
    return dims


def cut(model: PreTrainedModel) -> None:
    """Leave in each adapted Linear this rank's part, and sum the outputs where each has a share.

    The whole weight stays on the host until the adapter has decomposed it.

    Raises:
        Refused: as `cuts`.
    """
    weights_sha256(model, None)  # which is not to be had of parts
    for name, dim in cuts(model, ranks.shards()).items():
        linear: Any = model.get_submodule(name)
        W = linear.weight.data
        shard = Shard(dim, W.shape, W)
        linear.weight.data = shard.copy_of(W)
        linear.out_features, linear.in_features = linear.weight.shape
        linear.shard = shard
        bias = linear.bias
        if bias is not None and dim == 0:
            bias.data = shard.copy_of(bias.data)
        if dim == 1:
            if bias is not None and ranks.shard():
                bias.data.zero_()  # it is in the sum once
            linear.register_forward_hook(_sum_outputs)


def _sum_outputs(_module: nn.Module, _args: object, y: Tensor) -> None:
    ranks.sum_shards(y.detach())


def shard_of(linear: nn.Linear) -> Shard | None:
    """This rank's part; None: it has all of it."""
    return getattr(linear, "shard", None)


def _whole(linear: nn.Linear) -> Weight:
    """The weight, all of it where this rank's Linear has a part."""
    shard = shard_of(linear)
    W = linear.weight.data
    if shard is None:
        return W
    assert shard.whole is not None, "it was decomposed before"
    return shard.whole.to(W.device)


# ── the adapter


@dataclass(slots=True)
class _Merge:
    """One call of `SvdAdapter.merge`: the vectors as they were then."""

    number: int  # merges are counted from 1
    δS: Vector
    δS_hack: Vector
    # Which of the two is not all zero, in each group of modules.
    nonzero: Sequence[Active]
    # The groups and choices of vectors whose weights have been computed since. The others hold
    # older weights.
    computed: set[tuple[int, Active]] = field(default_factory=set)


class SvdAdapter:
    """Two trainable fp32 vectors of size R over the target Linears of `model`; all else is frozen.

    Modules have the model's own names, in the model's order.

    decompose: computes U, S, Vh of a weight that the cache does not have.

    Raises:
        Refused: no target Linear in the model, or two of them share one weight.
    """

    def __init__(
        self,
        model: nn.Module,
        cache_dir: Path | None,
        decompose: Decompose | None = None,
    ) -> None:
        model.requires_grad_(False)
        self.model = model
        cache = SvdCache(cache_dir, decompose or svd)
        self.sites: dict[str, AdaptedLinear] = _decomposed(targets(model), cache)
        self._linears = tuple(self.sites.values())
        # Modules that read the same input, as q, k and v do.
        self._groups = [tuple(sites) for _, sites in groupby(self._linears, _input_of)]

        last = self._linears[-1]
        dtype = torch.promote_types(last.W.dtype, torch.float32)
        zeros = last.W.new_zeros(last.span.stop, dtype=dtype)
        self.δS = nn.Parameter(zeros)
        self.δS_hack = nn.Parameter(zeros.clone())

        # Which vectors are in the weights now. The contexts `deployed` and `reference` change it.
        self.active = AS_TRAINED
        # Merged weights of a group's modules for each choice of vectors. Each choice costs a copy
        # of the group, which later merges overwrite in place. A vector that is zero in a group is
        # no choice there: with the quarantine in one block all others are held once.
        self._weights: dict[tuple[int, Active], list[Tensor]] = {}
        self._dither = self._draw_dither()
        self._merge = self._snapshot(number=1)
        self._activate(self.active)

    def _draw_dither(self) -> Dither | None:
        """Random integers for `round_by`, as many as the largest weight has numbers.

        Smaller weights take the first ones. None: not all weights are bf16.
        """
        if any(site.W.dtype != torch.bfloat16 for site in self._linears):
            return None
        largest = max(site.shape.numel() for site in self._linears)
        generator = torch.Generator().manual_seed(0)
        dither = torch.randint(2**16, (largest,), generator=generator, dtype=torch.int32)
        return dither.to(self.δS.device)

    # ── the two vectors

    def __len__(self) -> int:
        """R, the size of δS."""
        return self.δS.numel()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapted modules, in the model's order."""
        return tuple(self.sites)

    @property
    def spans(self) -> dict[str, slice]:
        """Module → its part of R."""
        return {name: site.span for name, site in self.sites.items()}

    def by_module(self, flat: Float[Tensor, "*n R"]) -> dict[str, Float[Tensor, "*n r"]]:
        """`flat` cut into modules, without a copy: module → [..., r]."""
        return {name: flat[..., site.span] for name, site in self.sites.items()}

    # ── merged weights

    def merge(self) -> None:
        """Bring the model's weights up to the present δS and δS_hack.

        Call it after every change of one of them.
        """
        self._merge = self._snapshot(self._merge.number + 1)
        self._activate(self.active)

    def reference(self) -> AbstractContextManager[None]:
        """Within the context the model is the base, bit for bit."""
        return self._as(REFERENCE)

    def deployed(self) -> AbstractContextManager[None]:
        """Within the context δS_hack is off."""
        return self._as(DEPLOYED)

    @property
    def weights_id(self) -> tuple[Active, int]:
        """Identifies the present weights: the active vectors, and the merge that they come from."""
        return self.active, self._merge.number

    @contextmanager
    def _as(self, active: Active) -> Generator[None]:
        before = self.active
        try:
            self._activate(active)
            yield
        finally:
            self._activate(before)

    def _snapshot(self, number: int) -> _Merge:
        δS = self.δS.detach().clone()
        δS_hack = self.δS_hack.detach().clone()
        # one transfer from the device for both
        is_nonzero = torch.stack([δS != 0, δS_hack != 0]).cpu()
        nonzero: list[Active] = []
        for sites in self._groups:
            of_group = is_nonzero[:, sites[0].span.start : sites[-1].span.stop]
            nonzero.append(Active(*of_group.any(1).tolist()))
        return _Merge(number, δS, δS_hack, nonzero)

    def _activate(self, active: Active) -> None:
        """Give every Linear its weight with these vectors in it."""
        self.active = active
        δ = torch.zeros_like(self._merge.δS)
        if active.δS:
            δ += self._merge.δS
        if active.δS_hack:
            δ += self._merge.δS_hack
        for group, sites in enumerate(self._groups):
            weights = self._weights_with(active, group, δ)
            for site, weight in zip(sites, weights, strict=True):
                site.linear.weight.data = weight

    @torch.no_grad()
    def _weights_with(self, active: Active, group: int, δ: Vector) -> list[Tensor]:
        """The weights of a group's modules with these vectors, computed at most once a merge.

        A vector of zeros counts as off, so that δS = δS_hack = 0 gives W itself, not a sum.
        """
        merge, sites = self._merge, self._groups[group]
        nonzero = merge.nonzero[group]
        active = Active(active.δS and nonzero.δS, active.δS_hack and nonzero.δS_hack)
        if active == REFERENCE:
            return [site.W for site in sites]
        key = group, active
        if key not in self._weights:
            self._weights[key] = self._allocate(sites)
        if key not in merge.computed:
            for site, weight in zip(sites, self._weights[key], strict=True):
                site.merge_into(weight, δ, self._dither)
            merge.computed.add(key)
        return self._weights[key]

    def _allocate(self, sites: Sequence[AdaptedLinear]) -> list[Tensor]:
        """Memory for the merged weights of a group's modules.

        On a GPU they lie side by side: a decoder then multiplies by them as by one matrix.
        """
        weights = [site.W for site in sites]
        if self.δS.device.type == "cpu":
            return [torch.empty_like(W) for W in weights]
        return [*torch.cat(weights).split([len(W) for W in weights])]

    @torch.no_grad()
    def realised_share(self) -> float | None:
        """How much of the change that the active vectors ask for is in the weights.

        Σ ⟨W' − W, ΔW⟩ / Σ ⟨ΔW, ΔW⟩ over a sample of the modules that they change: 1 but for
        rounding. None: they are zero.
        """
        δ = self.δS.detach() * self.active.δS + self.δS_hack.detach() * self.active.δS_hack
        is_changed = (δ != 0).cpu()
        changed = [site for site in self._linears if is_changed[site.span].any()]
        sums = δ.new_zeros(2, dtype=torch.float64)
        got, wanted = sums
        for i in _spread(len(changed), MODULES_MEASURED):
            site = changed[i]
            ΔW = site.change(δ)
            merged = site.linear.weight.data.to(δ.dtype)
            got += (merged - site.W).mul_(ΔW).sum()
            wanted += ΔW.square_().sum()
        if self._linears[0].shard is not None:
            ranks.sum_shards(sums)
        return float(got / wanted) if wanted else None

    @torch.no_grad()
    def is_merged(self) -> bool:
        """Whether the vectors are those of the last merge."""
        merge = self._merge
        moved = (self.δS != merge.δS) | (self.δS_hack != merge.δS_hack)
        return not bool(moved.any())

    # ── files, resume

    @torch.no_grad()
    def basis_fingerprint(self, δ: Vector) -> Fingerprint:
        """What δ does in this basis: k numbers a module, of about the size of ‖δ‖, on the CPU.

        They are aᵀ U diag(δ) Vh z for k pairs of fixed random signs a and z. W fixes its singular
        vectors up to sign, which changes none of these numbers, and up to rotation among those
        whose singular values are close, which does: another machine may turn them, and the same δ
        is another model there.
        """
        δ = δ.to(self.δS)
        sums = [(site.signs * δ[site.span]).sum(1) for site in self._linears]
        return torch.stack(sums).cpu()

    def require_basis(self, δ: Vector, fingerprint: Fingerprint, where: str) -> None:
        """Raises Refused, one line, if δ was learnt in another basis than this one.

        fingerprint: δ's `basis_fingerprint` where it was learnt.
        """
        here = self.basis_fingerprint(δ)
        norms = [δ[site.span].norm() for site in self._linears]
        turned = [True]
        if fingerprint.shape == here.shape:
            distance = (here - fingerprint.to(here)).abs().amax(1)
            allowed = SAME_BASIS * torch.stack(norms).cpu()
            same = distance <= allowed  # of a NaN it is False
            turned = (~same).tolist()
        if any(turned):
            first = self.names[turned.index(True)]
            raise Refused(
                f"{where}: made in other singular vectors of the same weights "
                f"({sum(turned)} of {len(turned)} modules, first {first}): "
                "bring out/svd_cache along from the machine that made it"
            )

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Save δS alone, module by module: what the file holds *is* the deployed model."""
        tensors: dict[str, Tensor] = {}
        for name, part in self.by_module(self.δS.detach()).items():
            tensors[name] = part.cpu().contiguous()
        basis = fingerprint_to_string(self.basis_fingerprint(self.δS))
        content = to_safetensors(tensors, dict(metadata) | {"basis": basis})
        write_atomic(path, canonical(content))

    def load(self, path: Path) -> dict[str, str]:
        """Read δS from a file, and set δS_hack to zero. Returns the file's metadata.

        Raises:
            Refused: not an adapter of this model (names, shapes, basis); nothing is changed then.
        """
        tensors, metadata = read_safetensors(path)
        here = {(name, *part.shape) for name, part in self.by_module(self.δS).items()}
        there = {(name, *x.shape) for name, x in tensors.items()}
        differ = [name for name, *_ in sorted(here ^ there)]
        if differ:
            raise Refused(
                f"{path}: adapter of another model: {len(differ)} modules differ, first {differ[0]}"
            )
        δS = torch.cat([tensors[name].to(self.δS) for name in self.sites])
        fingerprint = fingerprint_from_string(metadata.get("basis", ""), str(path))
        self.require_basis(δS, fingerprint, str(path))
        with torch.no_grad():
            self.δS.copy_(δS)
            self.δS_hack.zero_()
        self.merge()
        return metadata

    def state_dict(self) -> dict[str, Tensor]:
        """δS and δS_hack, copied, under ASCII names, with the fingerprints of their basis."""
        basis = [self.basis_fingerprint(self.δS), self.basis_fingerprint(self.δS_hack)]
        return {
            "delta_S": self.δS.detach().clone(),
            "delta_S_hack": self.δS_hack.detach().clone(),
            "basis": torch.stack(basis),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises Refused if the vectors belong to another basis; nothing is changed then."""
        for name, fingerprint in zip(("delta_S", "delta_S_hack"), state["basis"], strict=True):
            self.require_basis(state[name].to(self.δS), fingerprint, f"the saved state's {name}")
        with torch.no_grad():
            self.δS.copy_(state["delta_S"])
            self.δS_hack.copy_(state["delta_S_hack"])
        self.merge()


def _decomposed(linears: Mapping[str, nn.Linear], cache: SvdCache) -> dict[str, AdaptedLinear]:
    """Decompose every Linear, and give each the next part of the flat vectors.

    The ranks of a machine divide the work, through the cache.
    """
    if ranks.size() > 1:
        costs = [linear.in_features * linear.out_features for linear in linears.values()]
        own = ranks.own_here(costs)
        for linear in progress([*linears.values()][own.start : own.stop], "SVD", "module"):
            cache.fill(_whole(linear))
        ranks.gather(lambda: None)  # all have written theirs
    generator = torch.Generator().manual_seed(0)
    sites: dict[str, AdaptedLinear] = {}
    start = 0
    for name, linear in progress(linears.items(), "SVD", "module"):  # minutes at 4B
        shard = shard_of(linear)
        U, S, Vh = cache.decompose(_whole(linear))
        signs = _fingerprint_signs(U, Vh, generator)
        if shard is not None:
            shard.whole = None
            U, Vh = shard.copy_of(U), shard.copy_of(Vh)
        span = slice(start, start + len(S))
        sites[name] = AdaptedLinear(name, linear, linear.weight.data, U, S, Vh, signs, span, shard)
        start = span.stop
    return sites


def _fingerprint_signs(
    U: Float[Tensor, "d_out r"], Vh: Float[Tensor, "r d_in"], generator: torch.Generator
) -> Float[Tensor, "k r"]:
    """(Uᵀ a) ⊙ (Vh z) for k pairs of random signs a and z."""
    dtype = torch.promote_types(U.dtype, torch.float32)

    def draw_signs(length: int) -> Tensor:
        bits = torch.randint(2, (length, FINGERPRINT_SIZE), generator=generator)
        return (2 * bits - 1).to(U.device, dtype)

    a = U.mT.to(dtype) @ draw_signs(len(U))
    z = Vh.to(dtype) @ draw_signs(Vh.shape[1])
    return (a * z).mT.contiguous()


def _spread(total: int, most: int) -> list[int]:
    """At most `most` of the indices 0 … total − 1, evenly from the first to the last."""
    n = min(most, total)
    return [i * (total - 1) // max(1, n - 1) for i in range(n)]


# ── identity


_weights_seen: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def weights_sha256(model: nn.Module, adapter: SvdAdapter | None) -> str:
    """sha256 over the base weights, by name; δS and δS_hack do not count.

    Computed once, since it takes seconds at 4B.
    """
    if model not in _weights_seen:
        base = {name: p.data for name, p in model.named_parameters()}
        if adapter is not None:
            for name, site in adapter.sites.items():
                base[f"{name}.weight"] = site.W
        digest = hashlib.sha256()
        for name in sorted(base):
            weight = base[name]
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
            digest.update(bytes_of(weight))
        _weights_seen[model] = digest.hexdigest()
    return _weights_seen[model]
