"""The arms: what each of the two knobs learns from a step's rollouts, behind plan · observe · route · refresh.

An arm sees gradients and a GroupView, on which no oracle bit exists. g = Σ_b g_b over the step; per module:

    none    keep = g
    erase   keep = g - overshoot·c_use V, optionally rescaled to ‖g‖
    route   keep = g - c_use V               quar = c_use V
    route2  keep = Σ_b (1 - f_b) g_b         quar = Σ_b f_b g_b       f_b from the gate

A new arm is a subclass of `Arm` (or `Directed`) with its `_split`, and a line in `directed`. Controls are arms too:
`Shrink` wraps one, `OracleRoute2` is the one class that accepts true labels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.arms.base import Arm, Provenance, Refresh
from vgrout.arms.projection import GateMode, along, coefficients, cos_pre, mean_over_modules, rescale, split
from vgrout.config.run import ArmConfig
from vgrout.direction.controls import cosine_to_real, haar_like, overlap
from vgrout.direction.extract import Direction, extract
from vgrout.direction.files import obtain
from vgrout.direction.pairs import PairSet
from vgrout.model.policy import Policy
from vgrout.monitors.gate import BandGate, TauGate, permuted
from vgrout.rng import torch_stream
from vgrout.tensor_types import WHOLE, ArmDiag, Directions, ModuleGrads, Per, RolloutGrads, Routed, Stream
from vgrout.types import GroupView, OracleView

TOLERANCE = 1e-4  # of the invariants, relative to the norms that went in: fp32 sums of some hundred rows


class DirectionArm(Arm):
    """An arm with orthonormal hack-ward rows V [k, r] for some modules; the others pass through.

    Args of the constructor: `pick` chooses V from a direction, `every` is the refresh interval in steps (0: frozen),
    `again` extracts on the present model.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        direction: Direction,
        pick: Callable[[Direction], Directions],
        *,
        again: Callable[[], Direction] | None = None,
        every: int = 0,
        device: torch.device | str = "cpu",
        control: str = "none",
    ) -> None:
        super().__init__(sizes, device, control)
        self._pick, self._again, self._every = pick, again, every if again else 0
        self.V: Directions = {}
        self._take(direction)

    def _take(self, direction: Direction) -> None:
        V = {m: rows.to(self.device) for m, rows in self._pick(direction).items()}
        for m, rows in V.items():
            if m not in self.sizes or rows.shape[1] != self.sizes[m]:
                raise ValueError(f"direction has {m} {[*rows.shape]}, this model has r = {self.sizes.get(m)}")
        self.V = {m: V[m] for m in self.sizes if m in V}  # the model's order, whatever the file's

    def refresh(self, step: int) -> Refresh:
        done = step + 1
        age = done % self._every if self._every else done
        shared = None
        if self._again and age == 0:
            before = self.V
            self._take(self._again())
            shared = overlap(self.V, before)
        return Refresh(age, shared, len(self.V), sum(len(rows) for rows in self.V.values()))

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {f"V/{m}": rows.clone() for m, rows in self.V.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        V = {key.removeprefix("V/"): rows for key, rows in state.items() if key.startswith("V/")}
        for m, rows in V.items():
            if m not in self.sizes or rows.shape[1] != self.sizes[m]:
                raise ValueError(f"checkpoint's direction has {m} {[*rows.shape]}, r is {self.sizes.get(m)} here")
        self.V = {m: V[m].to(self.device) for m in self.sizes if m in V}

    def _by_source(self) -> tuple[ModuleGrads, ModuleGrads]:
        """The step's gradient of student rows and of teacher rows."""
        students, teachers = ({m: both[i] for m, both in self._sums.items()} for i in (0, 1))
        return students, teachers

    def _diag(self, keep: ModuleGrads, keep_s: ModuleGrads, keep_t: ModuleGrads) -> ArmDiag:
        """What can be read off g and the kept part; keep_s, keep_t: what each source's rows alone would leave."""
        students, teachers = self._by_source()
        return ArmDiag(
            cos_pre=cos_pre({m: both.sum(0) for m, both in self._sums.items()}, self.V),
            cos_pre_s=cos_pre(students, self.V),
            cos_pre_t=cos_pre(teachers, self.V),
            cos_post=cos_pre(keep, self.V),
            cos_post_s=cos_pre(keep_s, self.V),
            cos_post_t=cos_pre(keep_t, self.V),
        )

    def _parts(self, g: ModuleGrads, mode: GateMode, overshoot: float = 1.0) -> tuple[ModuleGrads, ModuleGrads]:
        """What surgery along V keeps of g, and what it removes; modules without a direction pass through."""
        keep, removed = dict(g), {m: torch.zeros_like(v) for m, v in g.items()}
        for m, V in self.V.items():
            keep[m], removed[m] = split(g[m], V, mode, overshoot)
        return keep, removed


class Erase(DirectionArm):
    """Drops the part of g along V (directional ablation of the gradient)."""

    name = "erase"

    def __init__(self, *args, cfg: ArmConfig, **kwargs) -> None:
        self._mode, self._overshoot, self._preserve = cfg.gate_mode, cfg.project_overshoot, cfg.preserve_magnitude
        super().__init__(*args, **kwargs)

    def _split(self, g: ModuleGrads) -> Routed:
        keep, _ = self._parts(g, self._mode, self._overshoot)
        fired = [coefficients(g[m], V, self._mode).any() for m, V in self.V.items()]
        by_source = [self._parts(part, self._mode, self._overshoot)[0] for part in self._by_source()]
        capped = []
        if self._mode == "one_sided" and self._overshoot >= 1:
            _assert_no_hackward(g, keep, self.V)
        if self._preserve:
            for m in self.V:
                keep[m], hit = rescale(keep[m], g[m].norm())
                capped.append(hit)
        diag = replace(
            self._diag(keep, *by_source),
            fired=_share(fired),
            rescale_capped=int(torch.stack(capped).sum()) if capped else None,
        )
        return Routed(keep, None, diag, self.V)


class Route(DirectionArm):
    """Sends the part of g along V to the quarantine knob."""

    name = "route"

    def __init__(self, *args, cfg: ArmConfig, **kwargs) -> None:
        self._mode = cfg.gate_mode
        super().__init__(*args, **kwargs)

    def _split(self, g: ModuleGrads) -> Routed:
        keep, quar = self._parts(g, self._mode)
        by_source = [self._parts(part, self._mode)[0] for part in self._by_source()]
        _assert_conserved(g, keep, quar, {m: v.norm() for m, v in g.items()})
        _assert_in_span(quar, self.V)
        if self._mode == "one_sided":
            _assert_no_hackward(g, keep, self.V)
        diag = replace(self._diag(keep, *by_source), fired=_share([quar[m].any() for m in self.V]))
        return Routed(keep, quar, diag, self.V)


class PerRolloutRouting(DirectionArm, ABC):
    """Base of the arms that send whole rollouts to the quarantine, module by module: f_b of each by `_shares`."""

    name = "route2"
    per: Per = "rollout"

    def reset(self) -> None:
        super().reset()
        self._rows: list[RolloutGrads] = []

    @abstractmethod
    def _shares(self, cos: Float[Tensor, "M N"], live: Bool[Tensor, "M N"]) -> Float[Tensor, "M N"]:
        """f_b in [0, 1] of every live row; `cos` holds its cosine with v (k = 1)."""

    def _gate_diag(self, diag: ArmDiag) -> ArmDiag:
        """`diag` with what the gate itself knows."""
        return diag

    def observe(self, g_b: RolloutGrads, view: GroupView, per: Per = "rollout", stream: int = 0) -> None:
        super().observe(g_b, view, per, stream)
        self._rows.append(g_b)

    def _split(self, g: ModuleGrads) -> Routed:
        keep, quar = dict(g), {m: torch.zeros_like(v) for m, v in g.items()}
        keep_s, keep_t = ({**part} for part in self._by_source())
        if not self._views or not self.V:
            return Routed(keep, quar, ArmDiag(), self.V)
        rows = {m: torch.cat([g_b[m] for g_b in self._rows]) for m in self.V}
        norms = torch.stack([rows[m].norm(dim=1) for m in self.V])
        dots = torch.stack([(rows[m] * self.V[m]).sum(1) for m in self.V])
        live = norms > 0
        cos = torch.where(live, dots / norms, 0.0)
        share = self._shares(cos, live)
        teacher = torch.tensor([s == "teacher" for v in self._views for s in v.sources], device=self.device)[:, None]
        for m, f in zip(self.V, share, strict=True):
            kept = (1 - f)[:, None] * rows[m]
            keep[m], quar[m] = kept.sum(0), (f[:, None] * rows[m]).sum(0)
            keep_s[m], keep_t[m] = (kept * ~teacher).sum(0), (kept * teacher).sum(0)
        _assert_conserved(g, keep, quar, dict(zip(self.V, norms.sum(1), strict=True)))

        per_rollout = share.sum(0) / live.sum(0).clamp(min=1)
        gate = tuple(tuple(part.tolist()) for part in per_rollout.split([len(v) for v in self._views]))
        diag = replace(
            self._diag(keep, keep_s, keep_t),
            fired=_share([f.any() for f in share]),
            resid=mean_over_modules([along(keep[m], v)[0] / keep[m].norm() for m, v in self.V.items()]),
            routed_share=(share.sum() / live.sum()).item() if live.any() else None,
            gate=gate,
        )
        return Routed(keep, quar, self._gate_diag(diag), self.V)


class Route2(PerRolloutRouting):
    """The gate decides: τ or pair band, of the cosine of each rollout's gradient with v.

    Args of the constructor: `cfg` gate settings; `permute_seed` deals the gate's shares to rollouts at random.
    With `cfg.owns` what the quarantine sampled goes there whole, and the gate decides about the rest, learnt with the
    quarantine off; with `cfg.rebases` rows that are no anchors have a baseline of their own.
    """

    def __init__(
        self, sizes: Mapping[str, int], direction: Direction, *args, cfg: ArmConfig, permute_seed: int | None, **kwargs
    ) -> None:
        self._banded, self._teacher_only = cfg.route2_gate == "pairs", cfg.gate_anchor_teacher_only
        self._permute_seed, self._steps = permute_seed, 0
        self._own, self._rebaseline = cfg.owns, cfg.rebases
        self._band: BandGate | None = None
        super().__init__(sizes, direction, *args, **kwargs)
        self._tau = None if self._banded else TauGate(len(self.V), device=self.device)

    def _take(self, direction: Direction) -> None:
        before = self.V
        super()._take(direction)
        if before:  # the gate's running means are per module, so the set stays: no new v found, the old one goes on
            self.V = {m: self.V.get(m, old) for m, old in before.items()}
        assert all(len(rows) == 1 for rows in self.V.values())
        if self._banded:
            lo, hi = direction.band(self.V)
            self._band = BandGate(lo.to(self.device), hi.to(self.device))

    def reset(self) -> None:
        super().reset()
        self._away: ModuleGrads = {m: torch.zeros(r, device=self.device) for m, r in self.sizes.items()}

    def plan(self, views: Sequence[GroupView]) -> Sequence[Stream]:
        if not (self._own or self._rebaseline):
            return WHOLE
        rows, away, advantages = [], [], []
        for view in views:
            theirs = [self._own and on for on in view.quarantine_on]
            mine = [b for b in range(len(view)) if not theirs[b]]
            anchor = self._known(view)
            kept = [b for b in mine if not anchor[b]]
            among = view.advantages_among(kept) if self._rebaseline else view.advantages
            advantages.append(tuple(among[b] if b in kept else view.advantages[b] for b in range(len(view))))
            rows.append(tuple(mine))
            away.append(tuple(b for b in range(len(view)) if theirs[b]))
        first = Stream(tuple(rows), tuple(advantages), deployed=self._own)
        return (first, Stream(tuple(away))) if self._own else (first,)

    def observe(self, g_b: RolloutGrads, view: GroupView, per: Per = "rollout", stream: int = 0) -> None:
        if stream == 0:
            super().observe(g_b, view, per)
            return
        assert self._own, stream
        for m, g in g_b.items():
            self._away[m] += g.sum(0)

    def _split(self, g: ModuleGrads) -> Routed:
        away = self._away
        routed = super()._split(g)
        if not self._own:
            return routed
        assert routed.quar is not None
        return replace(routed, quar={m: q + away[m] for m, q in routed.quar.items()}, apart=True)

    def _gate_diag(self, diag: ArmDiag) -> ArmDiag:
        if self._tau is None:
            return diag
        tau, gap = (mean_over_modules(list(x)) for x in (self._tau.tau, self._tau.gap))
        return replace(diag, tau=tau, hkgap=gap)

    def _shares(self, cos: Float[Tensor, "M N"], live: Bool[Tensor, "M N"]) -> Float[Tensor, "M N"]:
        if self._tau is not None:
            share = self._tau(cos, live, self._anchors())
        else:
            assert self._band is not None
            share = self._band(cos, live)
        if self._permute_seed is not None:
            share = permuted(share, live, torch_stream(self._permute_seed, "mass-matched", self._steps))
        self._steps += 1
        return share

    def _anchors(self) -> Bool[Tensor, " N"]:
        """Rows known to be hacks: demonstrations, and students that the weak detector flags (unless teacher-only)."""
        return torch.tensor([known for view in self._views for known in self._known(view)], device=self.device)

    def _known(self, view: GroupView) -> list[bool]:
        return [
            source == "teacher" or (flag and not self._teacher_only)
            for source, flag in zip(view.sources, view.detector, strict=True)
        ]

    def state_dict(self) -> dict[str, Tensor]:
        gate = self._tau or self._band
        assert gate is not None
        own = {"gate/" + key: value for key, value in gate.state_dict().items()} | {"steps": torch.tensor(self._steps)}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        gate = self._tau or self._band
        assert gate is not None
        try:
            gate.load_state_dict({k.removeprefix("gate/"): v for k, v in state.items() if k.startswith("gate/")})
            self._steps = int(state["steps"])
        except KeyError as missing:
            raise ValueError(f"checkpoint has no gate state {missing} for --intervention route2") from None


class OracleRoute2(PerRolloutRouting):
    """The oracle control: rollouts are routed by their true label. An upper bound of what any gate could do, never a
    method; its view is a type of its own, which every other arm refuses."""

    sees = OracleView

    def _shares(self, cos: Float[Tensor, "M N"], live: Bool[Tensor, "M N"]) -> Float[Tensor, "M N"]:
        views = [v for v in self._views if isinstance(v, OracleView)]
        hack = torch.tensor([label for v in views for label in v.exploited], device=self.device)
        return (live & hack).to(cos.dtype)


class ShrinkageControl(Arm):
    """The shrinkage control: the vanilla gradient, its *update* scaled by the share that `inner` would have kept.

    The gradient is not scaled, since AdamW would undo that: the optimiser multiplies δS's change by `Routed.scale`.
    Kept share: 1 - routed share for route2, else ‖keep‖ / ‖g‖ over all modules, before any rescaling.
    """

    def __init__(self, inner: DirectionArm) -> None:
        self.inner, self.name, self.per = inner, inner.name, inner.per
        super().__init__(inner.sizes, inner.device, "shrinkage")

    def observe(self, g_b: RolloutGrads, view: GroupView, per: Per = "rollout", stream: int = 0) -> None:
        super().observe(g_b, view, per, stream)
        self.inner.observe(g_b, view, per, stream)

    def reset(self) -> None:
        super().reset()
        self.inner.reset()

    def route(self) -> Routed:
        self._hypothetical = self.inner.route()
        return super().route()

    def _split(self, g: ModuleGrads) -> Routed:
        would = self._hypothetical
        assert would.keep is not None
        if would.diag.routed_share is not None:
            kept = 1 - would.diag.routed_share
        else:
            whole = _joint_norm(g)
            kept = min(_joint_norm(would.keep) / whole, 1.0) if whole else 1.0
        diag = replace(would.diag, cos_post=would.diag.cos_pre, resid=None)
        return Routed(g, None, diag, would.directions, scale=kept)

    def refresh(self, step: int) -> Refresh:
        return self.inner.refresh(step)

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.inner.load_state_dict(state)


def make_arm(cfg: ArmConfig, policy: Policy, pairs: PairSet | None, placebo: PairSet | None, seed: int) -> Arm:
    """The arm that `cfg` names, on `policy`'s modules; its direction is loaded, or extracted on the spot.

    `pairs` are the true ones, `placebo` those of a placebo control. Under a control whose direction is not the real
    one, the real one is obtained too, to say in `Arm.origin` how far they coincide.

    Raises:
        ValueError: no pairs where they are needed, or a direction of other pairs or another model.
    """
    adapter = policy.adapter
    sizes = {m: part.numel() for m, part in adapter.by_module(adapter.δS.detach()).items()}
    if cfg.intervention == "none":
        return Arm(sizes, adapter.δS.device, cfg.control_name)
    if pairs is None and cfg.other_pairs:
        raise ValueError(f"--control {cfg.control}: needs the pairs; give --vhack-pairs-path")
    if pairs is None and cfg.vhack_refresh_every and not cfg.haar:
        raise ValueError("--vhack-refresh-every: needs the pairs; give --vhack-pairs-path, or 0 for a frozen direction")
    top_k, tau_axis = cfg.v_hack_extract_top_k, cfg.v_hack_tau_axis
    real = direction = obtain(policy, pairs, cfg.v_hack_path, top_k, tau_axis)
    if pairs is not None and cfg.other_pairs:
        pairs = pairs.shuffled(seed) if cfg.control == "shuffled" else placebo
        assert pairs is not None, cfg.control
        direction = obtain(policy, pairs, None, top_k, tau_axis)
    again = partial(extract, policy, pairs, top_k, tau_axis) if pairs is not None else None
    arm = directed(cfg, sizes, direction, seed, device=adapter.δS.device, again=again)
    V = (arm.inner if isinstance(arm, ShrinkageControl) else arm).V
    arm.origin = Provenance(
        pairs=direction.meta.pairs_source,
        pairs_sha256=direction.meta.pairs_sha256,
        modules=len(V),
        axes=sum(map(len, V.values())),
        cosine_to_real=cosine_to_real(V, _picker(cfg)(real)) if cfg.haar or cfg.other_pairs else None,
    )
    return arm


def directed(
    cfg: ArmConfig,
    sizes: Mapping[str, int],
    direction: Direction,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    again: Callable[[], Direction] | None = None,
) -> DirectionArm | ShrinkageControl:
    """The arm that `cfg` names, with this direction; `again` extracts on the present model, None: frozen.

    Haar: random rows in the shape of the extracted ones. They stay as they are; only the pair band around them follows
    the model, and there each is signed so that the pairs' hack side lies above, which favours the control.
    """
    pick = _picker(cfg)
    banded = cfg.route2_gate == "pairs"
    if cfg.haar:
        drawn = haar_like(pick(direction), seed if cfg.route2_random_v_seed is None else cfg.route2_random_v_seed)
        pick, again = _always(direction.signed(drawn) if banded else drawn), again if banded else None
    common = {"again": again, "every": cfg.vhack_refresh_every, "device": device, "control": cfg.control_name}
    shrinks = cfg.control == "shrinkage"
    if cfg.control == "oracle":
        return OracleRoute2(sizes, direction, pick, **common)
    if cfg.intervention == "erase":
        # the share that erase keeps is read before any rescaling
        arm = Erase(
            sizes,
            direction,
            pick,
            cfg=replace(cfg, preserve_magnitude=False, control="none") if shrinks else cfg,
            **common,
        )
    elif cfg.intervention == "route":
        arm = Route(sizes, direction, pick, cfg=cfg, **common)
    else:
        permute_seed = seed if cfg.control == "mass_matched" else None
        arm = Route2(sizes, direction, pick, cfg=cfg, permute_seed=permute_seed, **common)
    return ShrinkageControl(arm) if shrinks else arm


def _picker(cfg: ArmConfig) -> Callable[[Direction], Directions]:
    """What the arm uses of a direction."""
    if cfg.intervention == "route2":
        return Direction.v_grad
    return lambda d: d.select(cfg.v_hack_k, cfg.v_hack_drop_bottom_frac)


def _always(V: Directions) -> Callable[[Direction], Directions]:
    return lambda _: V


def _share(flags: list[Tensor]) -> float | None:
    return torch.stack(flags).float().mean().item() if flags else None


def _joint_norm(grads: ModuleGrads) -> float:
    return torch.cat(list(grads.values())).norm().item()


def _assert_conserved(g: ModuleGrads, keep: ModuleGrads, quar: ModuleGrads, scale: dict[str, Tensor]) -> None:
    """keep + quar = g in every module of `scale`, which holds Σ_b ‖g_b‖: rows may cancel in the sum."""
    for_each = [((keep[m] + quar[m] - g[m]).norm(), s) for m, s in scale.items()]
    _assert_small(for_each, "keep + quar - g")


def _assert_in_span(quar: ModuleGrads, V: Directions) -> None:
    for_each = [
        ((quar[m] - (along(quar[m], rows)[:, None] * rows).sum(0)).norm(), quar[m].norm()) for m, rows in V.items()
    ]
    _assert_small(for_each, "quarantine outside span(V)")


def _assert_no_hackward(g: ModuleGrads, keep: ModuleGrads, V: Directions) -> None:
    for_each = [(along(keep[m], rows).max().relu(), g[m].norm()) for m, rows in V.items()]
    _assert_small(for_each, "V·keep above 0")


def _assert_small(errors: list[tuple[Tensor, Tensor]], what: str) -> None:
    """error ≤ TOLERANCE · scale for each pair; one transfer from the device for all."""
    if not errors:
        return
    error, scale = torch.stack([torch.stack(pair) for pair in errors]).T.tolist()
    worst = max(range(len(error)), key=lambda i: error[i] - TOLERANCE * scale[i])
    assert error[worst] <= TOLERANCE * scale[worst], f"{what}: {error[worst]:.3e} against {scale[worst]:.3e}"
