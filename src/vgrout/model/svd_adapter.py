"""The adapter: two diagonal vectors, δS (kept) and δS_hack (quarantine), in the SVD basis of every target Linear.

W = U diag(S) Vh, r = min(d_in, d_out); effective weight W' = W + U diag(δS + δS_hack) Vh. Both are merged into the
weights once an optimiser step, so every forward is a plain Linear; only the backward under `per_rollout_grads` touches
U and Vh. bf16 weights are rounded with a dither, as most changes of a step are far below their spacing (docs/adr/001).
Index letters: R = Σ r over the adapted modules, k numbers of a basis fingerprint.
"""

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from loguru import logger
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from tqdm import tqdm

from vgrout.console import HEARTBEAT_S
from vgrout.errors import Refused
from vgrout.files import regular, write_atomic
from vgrout.model.attention import uploaded
from vgrout.model.prefixes import Pieces
from vgrout.model.source import TARGETS

FINGERPRINT_SIZE = 4  # numbers a module by which a file's basis is known again
# of ‖δ‖: bf16's rounding moves a fingerprint by 0.004, two axes of 2,560 that swap places by 0.03
SAME_BASIS = 0.02

MEASURED = 8  # modules in which the realised share is measured: its cost is that of merging these

SVD_SCHEMA = "svd-1"  # part of every cache key: change it with the decomposition

Decompose = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
Active = tuple[bool, bool]  # (is δS in the weights?, is δS_hack?)


# ── decomposed weights, on disk


class SvdCache:
    """One file a weight, named by the sha256 of the weight's own bytes, dtype and shape."""

    def __init__(self, folder: Path | None, compute: Decompose) -> None:
        self.folder, self.compute = folder, compute
        self.writable = folder is not None

    def decompose(self, W: Float[Tensor, "d_out d_in"]) -> tuple[Tensor, Tensor, Tensor]:
        """U [d_out, r], S [r], Vh [r, d_in] of W, from a sound file, or computed and written."""
        if self.folder is None:
            return self.compute(W)
        path = self.folder / f"{weight_key(W)}.safetensors"
        if path.exists():
            try:
                return _checked(W, path)
            except (OSError, SafetensorError, Refused, KeyError) as error:
                logger.warning(f"SVD cache file {path} is unusable ({error}): computed again")
        U, S, Vh = self.compute(W)
        if not self.writable:
            return U, S, Vh
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, to_safetensors({"U": U.cpu(), "S": S.cpu(), "Vh": Vh.cpu()}))
        except OSError as error:
            logger.warning(
                f"SVD cache {self.folder} cannot be written ({error}): this run works without it"
            )
            self.writable = False
        return U, S, Vh


def svd(W: Float[Tensor, "d_out d_in"]) -> tuple[Tensor, Tensor, Tensor]:
    """(U, S, Vh) of W: computed in at least fp32, U and Vh in W's dtype, the largest entry of each column of U > 0."""
    U, S, Vh = torch.linalg.svd(
        W.to(torch.promote_types(W.dtype, torch.float32)), full_matrices=False
    )
    sign = U.gather(0, U.abs().argmax(0, keepdim=True)).sign().squeeze(0)
    return (U * sign).to(W.dtype).contiguous(), S, (Vh * sign[:, None]).to(W.dtype).contiguous()


def weight_key(W: Float[Tensor, "d_out d_in"]) -> str:
    """sha256 over schema, dtype, shape and every byte of W."""
    digest = hashlib.sha256(f"{SVD_SCHEMA} {W.dtype} {tuple(W.shape)}".encode())
    digest.update(W.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checked(W: Float[Tensor, "d_out d_in"], path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """A cache file's content, if it reproduces W on a fixed random vector (catches a torn or foreign file)."""
    tensors = load_file(path, device=str(W.device))
    U, S, Vh = tensors["U"], tensors["S"], tensors["Vh"]
    r = min(W.shape)
    if (U.shape, S.shape, Vh.shape) == ((W.shape[0], r), (r,), (r, W.shape[1])) and {
        U.dtype,
        Vh.dtype,
    } == {W.dtype}:
        z = torch.randn(W.shape[1], generator=torch.Generator().manual_seed(0), dtype=S.dtype).to(
            W.device
        )
        want, got = W.to(S.dtype) @ z, U.to(S.dtype) @ (S * (Vh.to(S.dtype) @ z))
        # rounding U and Vh to W's dtype leaves about one eps each; 16 eps is far below what any
        # damage does
        tolerance = 16 * torch.finfo(W.dtype).eps * max(W.shape) ** 0.5
        if (want - got).norm() <= tolerance * (S.max() * z.norm()):
            return U, S, Vh
    raise Refused("does not reproduce the weight")


# ── the adapter


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """One adapted Linear. `W`, `U`, `Vh` have the model's dtype; the rounded basis *is* the basis."""

    name: str
    linear: nn.Linear
    W: Float[Tensor, "d_out d_in"]
    U: Float[Tensor, "d_out r"]
    S: Float[Tensor, " r"]
    Vh: Float[Tensor, "r d_in"]
    span: slice  # its part of the flat vectors

    def change(self, δ: Float[Tensor, " R"]) -> Float[Tensor, "d_out d_in"]:
        """ΔW = U diag(δ) Vh, in δ's dtype."""
        return (self.U.to(δ.dtype) * δ[self.span]) @ self.Vh.to(δ.dtype)

    def merged(
        self,
        δ: Float[Tensor, " R"],
        out: Float[Tensor, "d_out d_in"],
        dither: Int[Tensor, " n"] | None,
    ) -> Float[Tensor, "d_out d_in"]:
        """W + ΔW into `out`: summed in fp32 and rounded once, to the nearest, or by `dither` (`round_by`), where bf16
        is exact enough for ΔW itself."""
        if dither is None:
            return out.copy_(self.change(δ).add_(self.W))
        ΔW = (self.U * δ[self.span]).to(self.Vh.dtype) @ self.Vh
        return round_by(dither, ΔW.to(δ.dtype).add_(self.W), out)


def round_by(
    dither: Int[Tensor, " n"], x: Float[Tensor, "*d"], out: Float[Tensor, "*d"]
) -> Float[Tensor, "*d"]:
    """fp32 `x`, which is overwritten, rounded to one of its two neighbours in bf16: the farther from zero with the
    probability that makes the mean x. A number of bf16 stays itself.

    dither: one random integer in [0, 2^16) a weight. The same at every merge: a weight moves only where x has moved,
        and a resumed run has the same weights. (A bf16 number is the upper half of an fp32 one: the carry rounds up.)
    """
    bits = x.view(torch.int32).add_(dither[: x.numel()].view_as(x)).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(bits)
    return out


def targets(model: nn.Module) -> dict[str, nn.Linear]:
    """The Linears that are adapted, by their names, in the model's order. Raises Refused as `SvdAdapter`."""
    named = {
        n: m
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and n.rpartition(".")[2] in TARGETS
    }
    if not named or len({id(m.weight) for m in named.values()}) < len(named):
        raise Refused(
            f"{type(model).__name__} has no Linear named {', '.join(sorted(TARGETS))}, or shares one's weight"
        )
    return named


def left_out(model: nn.Module, adapted: Iterable[str]) -> list[str]:
    """What else the blocks hold of matrices, by the last part of their names, behind `experts.` and the like where a
    matrix of that name is adapted."""
    matrices = {
        name.removesuffix(".weight") for name, p in model.named_parameters() if p.ndim > 1
    } - {*adapted}
    parts = [name.split(".") for name in matrices if ".layers." in name]
    return sorted({".".join(part[-2:] if part[-1] in TARGETS else part[-1:]) for part in parts})


class SvdAdapter:
    """Two trainable fp32 vectors of size R = Σ r over the target Linears of `model`; everything else is frozen.

    Names are the model's own module names, in the model's order.

    decompose: W → U, S, Vh where the cache does not know W.

    Raises:
        Refused: no target Linear in the model, or two of them share one weight.
    """

    def __init__(
        self, model: nn.Module, cache_dir: Path | None, decompose: Decompose | None = None
    ) -> None:
        model.requires_grad_(False)
        linears = targets(model)
        self.model = model
        self.sites: dict[str, AdaptedLinear] = {}
        cache = SvdCache(cache_dir, decompose or svd)
        lo, started, say_at = 0, time.monotonic(), 5.0
        for name, linear in tqdm(
            linears.items(), desc="SVD", unit="module", disable=None, leave=False
        ):
            # minutes at 4B, where the bar may be off
            if (seconds := time.monotonic() - started) > say_at:
                logger.info(
                    f"SVD: {len(self.sites)} of {len(linears)} weights after {seconds:.0f} s"
                )
                say_at = seconds + HEARTBEAT_S
            W = linear.weight.data
            U, S, Vh = cache.decompose(W)
            self.sites[name] = AdaptedLinear(name, linear, W, U, S, Vh, slice(lo, lo + len(S)))
            lo += len(S)
        device = next(iter(self.sites.values())).W.device
        dtype = torch.promote_types(next(iter(self.sites.values())).W.dtype, torch.float32)
        self.δS = nn.Parameter(torch.zeros(lo, device=device, dtype=dtype))
        self.δS_hack = nn.Parameter(torch.zeros(lo, device=device, dtype=dtype))
        self._active: Active = (True, True)
        # as they are in the weights
        self._merged = (self.δS.detach().clone(), self.δS_hack.detach().clone())
        self._used: Active = (False, False)  # which of them is not zero
        # how often they were merged: a graph must be walked back before the next merge
        self._merges = 0
        self._fresh: dict[Active, list[Tensor]] = {}  # weights that belong to the last merge
        self._buffers: dict[Active, list[Tensor]] = {}  # the same storage, merge after merge
        self._signs: Float[Tensor, "k R"] | None = None
        # of the largest weight; smaller ones take its beginning
        self._dither: Int[Tensor, " n"] | None = None
        if all(site.W.dtype == torch.bfloat16 for site in self.sites.values()):
            n, noise = (
                max(site.W.numel() for site in self.sites.values()),
                torch.Generator().manual_seed(0),
            )
            self._dither = torch.randint(2**16, (n,), generator=noise, dtype=torch.int32).to(device)
        self.merge()

    # ── the two vectors

    def __len__(self) -> int:
        """R, the size of δS."""
        return self.δS.numel()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapted modules, in the model's order."""
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
        """Bring the model's weights up to the present δS and δS_hack. Call it after every change of one of them."""
        self._merged = (self.δS.detach().clone(), self.δS_hack.detach().clone())
        keep, quar = torch.stack([vector.any() for vector in self._merged]).tolist()
        self._used = keep, quar
        self._fresh.clear()
        self._merges += 1
        self._activate(self._active)

    def reference(self) -> AbstractContextManager[None]:
        """The base model, bit for bit."""
        return self._as((False, False))

    def deployed(self) -> AbstractContextManager[None]:
        """The model with δS_hack off."""
        return self._as((True, False))

    @contextmanager
    def _as(self, active: Active) -> Generator[None]:
        before = self._active
        try:
            self._activate(active)
            yield
        finally:
            self._activate(before)

    def _activate(self, active: Active) -> None:
        self._active = active
        for site, weight in zip(self.sites.values(), self._weights(active), strict=True):
            site.linear.weight.data = weight

    @torch.no_grad()
    def _weights(self, active: Active) -> list[Tensor]:
        """A vector of zeros does not count, so that δS = δS_hack = 0 gives W itself, not a sum."""
        δS, δS_hack = self._merged
        keep, quar = active[0] and self._used[0], active[1] and self._used[1]
        if not (keep or quar):
            return [site.W for site in self.sites.values()]
        active = (keep, quar)
        if active not in self._fresh:
            δ = sum(
                (vector for vector, on in ((δS, keep), (δS_hack, quar)) if on), torch.zeros_like(δS)
            )
            if active not in self._buffers:
                self._buffers[active] = self._rooms()
            pairs = zip(self.sites.values(), self._buffers[active], strict=True)
            self._fresh[active] = [site.merged(δ, out, self._dither) for site, out in pairs]
        return self._fresh[active]

    def _rooms(self) -> list[Tensor]:
        """For every W' its memory; on a GPU side by side with the others that read the same input, so that a decoder
        takes them as one."""
        if self.δS.device.type == "cpu":
            return [torch.empty_like(site.W) for site in self.sites.values()]
        rooms: list[Tensor] = []
        alike = groupby(
            self.sites.values(), lambda site: (site.name.rpartition(".")[0], site.W.shape[1])
        )
        for _, sites in alike:
            weights = [site.W for site in sites]
            rooms += torch.cat(weights).split([*map(len, weights)])
        return rooms

    @torch.no_grad()
    def realised_share(self) -> float | None:
        """Σ ⟨W' − W, ΔW⟩ / Σ ⟨ΔW, ΔW⟩ over a sample of the modules that the active vectors change: how much of the
        change ΔW that they ask for is in the weights. 1 but for rounding. None: they are zero."""
        δ = self.δS.detach() * self._active[0] + self.δS_hack.detach() * self._active[1]
        where = (δ != 0).cpu()
        changed = [site for site in self.sites.values() if where[site.span].any()]
        n = min(MEASURED, len(changed))
        got = wanted = torch.zeros((), device=δ.device, dtype=torch.float64)
        for i in range(n):  # spread from the first to the last, over all kinds of layers
            site = changed[i * (len(changed) - 1) // max(1, n - 1)]
            ΔW = site.change(δ)
            got = got + (site.linear.weight.data.to(δ.dtype) - site.W).mul_(ΔW).sum()
            wanted = wanted + ΔW.square_().sum()
        return float(got / wanted) if wanted else None

    @torch.no_grad()
    def unmerged(self) -> Float[Tensor, " R"] | None:
        """The active vectors' change since the last merge; None where nothing changed."""
        pairs = list(zip((self.δS, self.δS_hack), self._merged, self._active, strict=True))
        if not torch.stack([(now != merged).any() for now, merged, _ in pairs]).any():
            return None
        return sum(((now - merged) * on for now, merged, on in pairs), torch.zeros_like(self.δS))

    # ── per-rollout gradients

    @contextmanager
    def per_rollout_grads(self, n: int) -> Generator["PerRolloutGrads"]:
        """Every forward in here adds its rows' gradients on δS to `flat` [n, R] of what it yields, in its backward.

        Forward and backward both belong inside, under one set of weights. The forward is that of δS and δS_hack as they
        are: a merge that was missed is added to it, so that it shows as a mismatch with the sampler, and is not learnt.
        """
        collected = PerRolloutGrads(self, n)
        handles = [
            site.linear.register_forward_hook(partial(collected.tap, site))
            for site in self.sites.values()
        ]
        try:
            yield collected
        finally:
            for handle in handles:
                handle.remove()

    # ── files, resume

    @torch.no_grad()
    def basis_fingerprint(self, δ: Float[Tensor, " R"]) -> Float[Tensor, "modules k"]:
        """aᵀ U diag(δ) Vh z per module, for k pairs of fixed random signs a and z: what δ does in this basis, ~ ‖δ‖.

        Singular vectors are W's only up to sign (to which this is blind) and up to rotation where singular values are
        close: another machine may turn them, and the same δ is another model there.
        """
        if self._signs is None:
            signs = torch.Generator().manual_seed(0)

            def drawn(n: int, like: Tensor) -> Tensor:
                return (2 * torch.randint(2, (n, FINGERPRINT_SIZE), generator=signs) - 1).to(like)

            parts = [
                (site.U.mT.to(self.δS) @ drawn(len(site.U), self.δS))
                * (site.Vh.to(self.δS) @ drawn(site.Vh.shape[1], self.δS))
                for site in self.sites.values()
            ]
            self._signs = torch.cat(parts).mT.contiguous()
        products = self._signs * δ.to(self._signs)
        return torch.stack([products[:, site.span].sum(1) for site in self.sites.values()]).cpu()

    def require_basis(
        self, δ: Float[Tensor, " R"], fingerprint: Float[Tensor, "modules k"], where: str
    ) -> None:
        """Raises Refused, one line, if δ, whose fingerprint was taken where it was learnt, is not of this basis."""
        here = self.basis_fingerprint(δ)
        size = torch.stack([δ[site.span].norm() for site in self.sites.values()]).cpu()
        same = fingerprint.shape == here.shape
        off = (
            ((here - fingerprint.to(here)).abs().amax(1) > SAME_BASIS * size).tolist()
            if same
            else [True]
        )
        if any(off):
            raise Refused(
                f"{where}: made in other singular vectors of the same weights ({sum(off)} of {len(off)} modules, first "
                f"{self.names[off.index(True)]}): bring out/svd_cache along from the machine that made it"
            )

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        """δS alone, module by module: what the file holds *is* the deployed model."""
        tensors = {
            name: x.cpu().contiguous() for name, x in self.by_module(self.δS.detach()).items()
        }
        own = {"basis": fingerprint_to_string(self.basis_fingerprint(self.δS))}
        write_atomic(path, canonical(to_safetensors(tensors, dict(metadata) | own)))

    def load(self, path: Path) -> dict[str, str]:
        """δS from a file, δS_hack to zero. Returns the file's metadata.

        Raises:
            Refused: not an adapter of this model (names, shapes, basis) or not finite; nothing is changed then.
        """
        tensors, metadata = read_safetensors(path)
        here, there = (
            {(n, *x.shape) for n, x in of.items()} for of in (self.by_module(self.δS), tensors)
        )
        if differ := sorted(here ^ there) or [
            (n,) for n, x in tensors.items() if not x.isfinite().all()
        ]:
            raise Refused(
                f"{path}: adapter of another model, or not finite: {len(differ)} modules differ, first {differ[0][0]}"
            )
        δS = torch.cat([tensors[name].to(self.δS) for name in self.sites])
        self.require_basis(
            δS, fingerprint_from_string(metadata.get("basis", ""), str(path)), str(path)
        )
        with torch.no_grad():
            self.δS.copy_(δS)
            self.δS_hack.zero_()
        self.merge()
        return metadata

    def state_dict(self) -> dict[str, Tensor]:
        """δS and δS_hack, copied, under ASCII names, with the fingerprints of the basis that they are in."""
        return {
            "delta_S": self.δS.detach().clone(),
            "delta_S_hack": self.δS_hack.detach().clone(),
            "basis": torch.stack(
                [self.basis_fingerprint(self.δS), self.basis_fingerprint(self.δS_hack)]
            ),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises Refused if the vectors belong to another basis; nothing is changed then."""
        for name, fingerprint in zip(("delta_S", "delta_S_hack"), state["basis"], strict=True):
            if state[name].shape != self.δS.shape or not state[name].isfinite().all():
                raise Refused(
                    f"the saved state's {name} is no finite vector of {len(self)} numbers"
                )
            self.require_basis(state[name].to(self.δS), fingerprint, f"the saved state's {name}")
        with torch.no_grad():
            self.δS.copy_(state["delta_S"])
            self.δS_hack.copy_(state["delta_S_hack"])
        self.merge()


class PerRolloutGrads:
    """Collects g_b = Σ_t (Vh x_t) ⊙ (Uᵀ ∂L/∂y_t), rollout b's own gradient on δS: exact at δS = 0, no division.

    Several forwards may add to the same rows; call `rows` before a forward whose batch is not rows 0 … n-1.
    """

    def __init__(self, adapter: SvdAdapter, n: int) -> None:
        assert n > 0, n
        self.adapter = adapter
        self.flat: Float[Tensor, "n R"] = torch.zeros(
            n, len(adapter), device=adapter.δS.device, dtype=adapter.δS.dtype
        )
        self._active, self._late = adapter._active, adapter.unmerged()
        self._singular: dict[Active, Float[Tensor, " R"]] = {}
        # The graph starts here and not at the embedding: layer 0's q/k/v then need no ∂L/∂x.
        self._root = torch.zeros((), device=adapter.δS.device, requires_grad=True)
        self.rows(range(n))

    def rows(self, rows: Sequence[int]) -> None:
        """From here on, batch row i adds to gradient row rows[i]; rows may repeat (then they are summed)."""
        assert all(0 <= row < len(self.flat) for row in rows), (rows, len(self.flat))
        self._rows = uploaded(list(rows), self.flat.device)
        self._picks = [(row, _positions(rows, row)) for row in dict.fromkeys(rows)]
        self._pieces: _Members | None = None

    def tokens(self, pieces: Pieces, n: int, again: bool = False) -> Callable[[Pieces], None]:
        """From here on a batch is one packed row of n tokens, of which `slice` adds to gradient row `row` for each
        piece. again: backward will go through that forward several times; returns what is told each time's pieces."""
        self._pieces = _Members(
            len(self.flat), n, self.flat.device, next(iter(self.adapter.sites.values())).W.dtype
        )
        self._pieces.kept = {} if again else None
        self._pieces.are(pieces)
        return self._pieces.are

    def adder(self, site: AdaptedLinear) -> Callable[[Tensor, Tensor], Tensor | None]:
        """The function that takes (x, ∂L/∂y) of one Linear, for the batch announced last; it returns Uᵀ ∂L/∂y where it
        has computed it."""
        if self._pieces is not None:
            return partial(self.add_packed, site, self._pieces)
        return partial(self.add, site, self._rows, self._picks)

    def tap(
        self, site: AdaptedLinear, _module: nn.Module, args: tuple[Any, ...], y: Tensor
    ) -> Tensor:
        """Forward hook of one Linear."""
        if self._late is not None and self.adapter._active == self._active:
            y = y + (args[0] @ site.Vh.mT * self._late[site.span].to(y.dtype)) @ site.U.mT
        # Reentrant checkpointing runs the first forward without a graph; its second one is the one
        # that counts.
        return (
            _Tap.apply(y.detach(), args[0], self._root, self, site)
            if torch.is_grad_enabled()
            else y
        )

    def to_input(self, site: AdaptedLinear, dy: Tensor, turned: Tensor | None) -> Tensor:
        """∂L/∂x = W'ᵀ ∂L/∂y. turned: Uᵀ ∂L/∂y, from which Vhᵀ diag(S + δ) is the shorter way where d_out > d_in."""
        active = self.adapter._active
        if self._late is None and (turned is None or site.W.shape[0] <= site.W.shape[1]):
            return dy @ site.linear.weight
        if active not in self._singular:
            S = torch.cat([site.S for site in self.adapter.sites.values()])
            S = S + self.adapter.δS * active[0] + self.adapter.δS_hack * active[1]
            self._singular[active] = S.to(dy.dtype)
        turned = dy @ site.U if turned is None else turned
        return (turned * self._singular[active][site.span]) @ site.Vh

    def add(
        self,
        site: AdaptedLinear,
        rows: Int[Tensor, " B"],
        picks: Sequence[tuple[int, slice | list[int]]],
        x: Float[Tensor, "B s d_in"],
        dy: Float[Tensor, "B s d_out"],
    ) -> Tensor | None:
        """Add one Linear's share, by the cheaper of two orders of the same product. picks: row → its batch rows.

        Tokens first costs 2·T·r·(d_in + d_out); per wanted row the weight's gradient M = Σ_t dy_t x_tᵀ first and
        diag(Uᵀ M Vhᵀ) then costs 2·T·d_in·d_out + 2·r·d_in·d_out: less as soon as a row has > max(d) tokens.
        """
        into = self.flat[:, site.span]
        if x.shape[0] * x.shape[1] <= len(picks) * max(site.W.shape):
            turned = dy @ site.U
            g = torch.einsum("bsr,bsr->br", (x @ site.Vh.mT).to(into.dtype), turned.to(into.dtype))
            into.index_add_(0, rows, g)
            return turned
        for row, pick in picks:
            M = dy[pick].flatten(0, 1).mT @ x[pick].flatten(0, 1)
            into[row] += ((M @ site.Vh.mT).to(into.dtype) * site.U).sum(0)
        return None

    def add_packed(
        self,
        site: AdaptedLinear,
        of: "_Members",
        x: Float[Tensor, "1 N d_in"],
        dy: Float[Tensor, "1 N d_out"],
    ) -> Tensor | None:
        """The same for a packed row."""
        into, x, dy = self.flat[:, site.span], x[0], dy[0]
        if of.kept is not None or len(x) <= len(of.pieces) * max(site.W.shape):
            turned = dy @ site.U
            into.index_add_(0, of.rows, (of.matrix @ (turned * of.read(site, x))).to(into.dtype))
            return turned[None]
        for row, (first, *others) in of.pieces.items():
            M = dy[first].mT @ x[first]
            for part in others:
                M.addmm_(dy[part].mT, x[part])
            into[row] += ((M @ site.Vh.mT).to(into.dtype) * site.U).sum(0)
        return None


class _Members:
    """Which of a packed row's tokens add to which gradient row: as slices, and as a matrix of 0 and 1, since one
    product adds up all rows faster than a sum each."""

    def __init__(self, most: int, n: int, device: torch.device, dtype: torch.dtype) -> None:
        self.most, self.n, self.device, self.dtype = most, n, device, dtype
        self.kept: dict[str, Tensor] | None = None  # module → Vh x, if it is asked for again

    def are(self, pieces: Pieces) -> None:
        self.pieces: dict[int, list[slice]] = {}
        for row, piece in pieces:
            self.pieces.setdefault(row, []).append(piece)
        assert all(0 <= row < self.most for row in self.pieces), (self.pieces.keys(), self.most)
        self.matrix: Float[Tensor, "rows n"] = torch.zeros(
            len(self.pieces), self.n, device=self.device, dtype=self.dtype
        )
        for member, parts in zip(self.matrix, self.pieces.values(), strict=True):
            for part in parts:
                member[part] = 1  # a token of the row
        self.rows = uploaded(list(self.pieces), self.device)

    def read(self, site: AdaptedLinear, x: Float[Tensor, "n d_in"]) -> Float[Tensor, "n r"]:
        """Vh x."""
        if self.kept is None:
            return x @ site.Vh.mT
        if site.name not in self.kept:
            self.kept[site.name] = x @ site.Vh.mT
        return self.kept[site.name]


def _positions(rows: Sequence[int], row: int) -> slice | list[int]:
    """Where `row` occurs; a slice if that is one stretch, so that picking it copies nothing."""
    at = [i for i, r in enumerate(rows) if r == row]
    return slice(at[0], at[-1] + 1) if at[-1] - at[0] + 1 == len(at) else at


class _Tap(torch.autograd.Function):
    """A Linear, whose output is y, with its own backward, which hands x and ∂L/∂y to `into`; x is saved by autograd, so
    checkpointing frees it."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, root: Tensor, into: PerRolloutGrads, site: AdaptedLinear
    ) -> Tensor:
        batch = 1 if into._pieces is not None else len(into._rows)
        assert x.ndim == 3, (
            f"{site.name} sees {tuple(x.shape)}: per-rollout gradients need [rows, tokens, d_in]"
        )
        assert len(x) == batch, f"{site.name} sees {len(x)} rows, {batch} were announced"
        ctx.save_for_backward(x)
        ctx.into, ctx.site, ctx.add = into, site, into.adder(site)
        ctx.weights = (into.adapter._active, into.adapter._merges)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        # The weight is read as it is *now*: after a change it would be the wrong one.
        now = (ctx.into.adapter._active, ctx.into.adapter._merges)
        assert ctx.weights == now, (
            f"{ctx.site.name}: forward under weights {ctx.weights}, backward under {now}"
        )
        (x,) = ctx.saved_tensors
        turned = ctx.add(x, dys[0])
        dx = ctx.into.to_input(ctx.site, dys[0], turned) if ctx.needs_input_grad[1] else None
        return None, dx, None, None, None


# ── files


def fingerprint_to_string(fingerprint: Float[Tensor, "modules k"]) -> str:
    """A basis fingerprint for a file's metadata; six digits, a ten thousandth of what is compared."""
    return json.dumps(
        [[float(f"{x:.6g}") for x in row] for row in fingerprint.tolist()], separators=(",", ":")
    )


def fingerprint_from_string(text: str, where: str) -> Float[Tensor, "modules k"]:
    """The inverse. Raises Refused, one line, on damaged metadata."""
    try:
        return torch.tensor(json.loads(text), dtype=torch.float32)
    # what torch says has many lines
    except (ValueError, TypeError, RuntimeError, RecursionError, OverflowError):
        raise Refused(f"{where}: its basis fingerprint cannot be read") from None


def canonical(content: bytes) -> bytes:
    """A safetensors file with its metadata in alphabetical order: the library shuffles it, and one state should be
    one file. Offsets count from the header's end, which stays aligned to 8 bytes."""
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    metadata = {"__metadata__": dict(sorted(header.pop("__metadata__", {}).items()))}
    text = json.dumps(metadata | header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + n :]


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and string metadata of a file, on the CPU.

    Raises:
        Refused: no such file, or not a safetensors file.
    """
    try:
        with open(path, "rb", opener=regular), safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path}: not a readable safetensors file ({error})") from error


_weights_seen: WeakKeyDictionary[nn.Module | SvdAdapter, str] = WeakKeyDictionary()


def weights_sha256(model: nn.Module, adapter: SvdAdapter | None) -> str:
    """sha256 over the base weights, by name; δS and δS_hack do not count. Computed once (seconds at 4B)."""
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
