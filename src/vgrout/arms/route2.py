"""route2: whole rollouts to the quarantine, module by module, by the cosine of their gradient with v.

keep = Σ_b (1 − f_b) g_b         quar = Σ_b f_b g_b         f_b from the gate (monitors/gate.py)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout import ranks
from vgrout.arms.base import Grads, Plan, StepGrads, Views
from vgrout.arms.direction_arm import DirectionArm, assert_conserved, fraction_of_modules
from vgrout.arms.projection import along, mean_over_modules
from vgrout.config.arm import ArmConfig
from vgrout.direction.extract import Direction
from vgrout.monitors.gate import BandGate, TauGate, permuted
from vgrout.rng import torch_stream
from vgrout.tensor_types import (
    ArmDiag,
    Directions,
    GradRows,
    ModuleGrads,
    Routed,
    UpdatePart,
    UpdatePlan,
)
from vgrout.types import GroupView, OracleView


class PerRolloutRouting(DirectionArm, ABC):
    """Base of the arms that decide rollout by rollout: f_b of each by `_shares`."""

    name = "route2"
    grad_rows: GradRows = "rollout"

    @classmethod
    def chosen(cls, cfg: ArmConfig) -> Callable[[Direction], Directions]:
        """v alone, k = 1."""
        return Direction.v_grad

    @abstractmethod
    def _shares(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], views: Sequence[GroupView]
    ) -> Float[Tensor, "M N"]:
        """f_b in [0, 1] of every row with a gradient; `cos` holds its cosine with v."""

    def _gate_diag(self, diag: ArmDiag) -> ArmDiag:
        """`diag` with what the gate itself knows."""
        return diag

    def _split(self, step: StepGrads) -> Routed:
        g, views = step.total, step.views
        keep, quar = dict(g), {m: torch.zeros_like(v) for m, v in g.items()}
        keep_s, keep_t = dict(step.students), dict(step.teachers)
        if not views or not self.V:
            return Routed(keep, quar, ArmDiag(), self.V)
        rows = {m: torch.cat([g_b[m] for g_b in step.rows]) for m in self.V}
        norms = torch.stack([rows[m].norm(dim=1) for m in self.V])
        dots = torch.stack([(rows[m] * self.V[m]).sum(1) for m in self.V])
        norms, dots = ranks.total(torch.stack((norms, dots)))  # one rank's number and the others' zeros
        nonzero = norms > 0
        cos = torch.where(nonzero, dots / norms, 0.0)
        share = self._shares(cos, nonzero, views)
        teacher = torch.tensor([s == "teacher" for v in views for s in v.sources], device=self.device)[:, None]
        parts = {}
        for m, f in zip(self.V, share, strict=True):
            kept = (1 - f)[:, None] * rows[m]
            sums = kept.sum(0), (f[:, None] * rows[m]).sum(0), (kept * ~teacher).sum(0), (kept * teacher).sum(0)
            parts[m] = torch.stack(sums)
        for m, sums in ranks.total_by_module(parts).items():
            keep[m], quar[m], keep_s[m], keep_t[m] = sums
        assert_conserved(g, keep, quar, dict(zip(self.V, norms.sum(1), strict=True)))

        per_rollout = share.sum(0) / nonzero.sum(0).clamp(min=1)
        gate = tuple(tuple(part.tolist()) for part in per_rollout.split([len(v) for v in views]))
        diag = replace(
            self._diag(step, keep, keep_s, keep_t),
            fired=fraction_of_modules([f.any() for f in share]),
            resid=mean_over_modules([along(keep[m], v)[0] / keep[m].norm() for m, v in self.V.items()]),
            routed=(share.sum() / nonzero.sum()).item() if nonzero.any() else None,
            gate=gate,
        )
        return Routed(keep, quar, self._gate_diag(diag), self.V)


class Route2(PerRolloutRouting):
    """The gate decides: τ or pair band, of the cosine of each rollout's gradient with v.

    With `cfg.owns` what the quarantine sampled goes there whole, and the gate decides about the rest, learnt with the
    quarantine off; with `cfg.rebases` rows that are not known hacks have a baseline of their own.
    """

    def __init__(self, *args, cfg: ArmConfig, seed: int = 0, **kwargs) -> None:
        self._banded, self._teacher_only = cfg.route2_gate == "pairs", cfg.known_hacks_teacher_only
        self._permute_seed = seed if cfg.control == "random_flags" else None  # deal the shares to rollouts at random
        self._own, self._rebaseline, self._steps = cfg.owns, cfg.rebases, 0
        self._band: BandGate | None = None
        super().__init__(*args, cfg=cfg, seed=seed, **kwargs)
        self._tau = None if self._banded else TauGate(len(self.V), device=self.device)

    def plan(self, views: Sequence[GroupView]) -> UpdatePlan:
        if not (self._own or self._rebaseline):
            return super().plan(views)
        self._require(views)
        rows, away, advantages = [], [], []
        for view in views:
            theirs = [self._own and on for on in view.quarantine_on]
            mine = [b for b in range(len(view)) if not theirs[b]]
            known = self._known_hacks(view)
            kept = [b for b in mine if not known[b]]
            among = view.advantages_among(kept) if self._rebaseline else view.advantages
            advantages.append(tuple(among[b] if b in kept else view.advantages[b] for b in range(len(view))))
            rows.append(tuple(mine))
            away.append(tuple(b for b in range(len(view)) if theirs[b]))
        first = UpdatePart(tuple(rows), tuple(advantages), deployed=self._own)
        return UpdatePlan((first, UpdatePart(tuple(away))) if self._own else (first,))

    def route(self, views: Views, grads: Grads, plan: Plan = None, grad_rows: GradRows | None = None) -> Routed:
        if not self._own:
            return super().route(views, grads, plan, grad_rows)
        mine, theirs = grads
        routed = super().route(views, [mine], plan, grad_rows)
        if routed.quar is None:  # not finite
            return routed
        away: ModuleGrads = {m: torch.zeros(r, device=self.device) for m, r in self.sizes.items()}
        for of_group in theirs:
            for m, g in of_group.items():
                away[m] += g.sum(0)
        away = ranks.total_by_module(away)
        return replace(routed, quar={m: q + away[m] for m, q in routed.quar.items()}, apart=True)

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

    def _take(self, direction: Direction) -> None:
        before = self.V
        super()._take(direction)
        if before:  # the gate's running means are per module, so the set stays: no new v found, the old one goes on
            self.V = {m: self.V.get(m, old) for m, old in before.items()}
        assert all(len(rows) == 1 for rows in self.V.values())
        if self._banded:
            lo, hi = direction.band(self.V)
            self._band = BandGate(lo.to(self.device), hi.to(self.device))

    def _gate_diag(self, diag: ArmDiag) -> ArmDiag:
        if self._tau is None:
            return diag
        tau, gap = (mean_over_modules(list(x)) for x in (self._tau.tau, self._tau.gap))
        return replace(diag, tau=tau, hkgap=gap)

    def _shares(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], views: Sequence[GroupView]
    ) -> Float[Tensor, "M N"]:
        if self._tau is not None:
            known = torch.tensor([hack for view in views for hack in self._known_hacks(view)], device=self.device)
            share = self._tau(cos, nonzero, known)
        else:
            assert self._band is not None
            share = self._band(cos, nonzero)
        if self._permute_seed is not None:
            share = permuted(share, nonzero, torch_stream(self._permute_seed, "mass-matched", self._steps))
        self._steps += 1
        return share

    def _known_hacks(self, view: GroupView) -> list[bool]:
        """Demonstrations, and students that the weak detector flags (unless teacher-only)."""
        return [
            source == "teacher" or (flag and not self._teacher_only)
            for source, flag in zip(view.sources, view.detector, strict=True)
        ]


class OracleRoute2(PerRolloutRouting):
    """The oracle control: rollouts are routed by their true label. An upper bound of what any gate could do, never a
    method; its view is a type of its own, which every other arm refuses."""

    sees = OracleView

    def _shares(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], views: Sequence[GroupView]
    ) -> Float[Tensor, "M N"]:
        labels = [label for v in views if isinstance(v, OracleView) for label in v.exploited]
        return (nonzero & torch.tensor(labels, device=self.device)).to(cos.dtype)
