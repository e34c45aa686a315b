"""route2: whole rollouts to the quarantine, module by module, by the cosine of their gradient with v.

keep = Σ_b (1 − f_b) g_b         quar = Σ_b f_b g_b         f_b from the gate (monitors/gate.py)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout import ranks
from vgrout.arms.base import Grads, Plan, StepGrads, Views, on_policy
from vgrout.arms.direction_arm import DirectionArm, assert_conserved, fraction_of_modules
from vgrout.arms.projection import along, mean_over_modules
from vgrout.config.arm import ArmConfig
from vgrout.direction.extract import Direction
from vgrout.monitors import monitor_class
from vgrout.monitors.gate import GradientMonitor, known_hacks, permuted
from vgrout.rng import torch_stream
from vgrout.tensor_types import (
    ArmDiag,
    Directions,
    GradRows,
    Routed,
    UpdatePart,
    UpdatePlan,
)
from vgrout.types import GroupFlags, GroupView


class Route2(DirectionArm):
    """Decides rollout by rollout: f_b by its monitor, of the cosine of the rollout's gradient with v.

    With `cfg.rebaseline` rows that are not known hacks have a baseline of their own. Under `gate_vote` rollout the
    modules' shares become one, which holds in every module.
    """

    name = "route2"
    routes = True
    grad_rows: GradRows = "rollout"

    def __init__(self, *args, cfg: ArmConfig, seed: int = 0, **kwargs) -> None:
        self._cfg, self._teacher_only = cfg, cfg.known_hacks_teacher_only
        self._permute_seed = seed if cfg.random_flags else None  # deal the shares to rollouts at random
        self._steps = 0
        self.monitor: GradientMonitor | None = None
        super().__init__(*args, cfg=cfg, seed=seed, **kwargs)

    @classmethod
    def chosen(cls, cfg: ArmConfig) -> Callable[[Direction], Directions]:
        """v alone, k = 1."""
        return Direction.v_grad

    def plan(self, views: Sequence[GroupView], step: int = 0) -> UpdatePlan:
        if not self._cfg.rebaseline:
            return super().plan(views, step)
        self._require(views)
        advantages = []
        for view in views:
            known = known_hacks(view, self._teacher_only)
            among = view.advantages_among([b for b, hack in enumerate(known) if not hack])
            advantages.append(
                tuple(A if hack else own for hack, A, own in zip(known, view.advantages, among, strict=True))
            )
        rows = tuple(tuple(range(len(view))) for view in views)
        return UpdatePlan(on_policy(views, UpdatePart(rows, tuple(advantages))))

    def route(self, views: Views, grads: Grads, plan: Plan = None, grad_rows: GradRows | None = None) -> Routed:
        return self._placed(super().route(views, grads, plan, grad_rows))

    def state_dict(self) -> dict[str, Tensor]:
        assert self.monitor is not None
        own = {"gate/" + key: value for key, value in self.monitor.state_dict().items()}
        return super().state_dict() | own | {"steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        assert self.monitor is not None
        try:
            self.monitor.load_state_dict(
                {k.removeprefix("gate/"): v for k, v in state.items() if k.startswith("gate/")}
            )
            self._steps = int(state["steps"])
        except KeyError as missing:
            raise ValueError(f"checkpoint has no gate state {missing} for --intervention route2") from None

    def _take(self, direction: Direction) -> None:
        before = self.V
        super()._take(direction)
        if before:  # the gate's running means are per module, so the set stays: no new v found, the old one goes on
            self.V = {m: self.V.get(m, old) for m, old in before.items()}
        assert all(len(rows) == 1 for rows in self.V.values())
        if self.monitor is None:
            made = monitor_class(self._cfg.monitor_name)
            assert issubclass(made, GradientMonitor), made
            self.monitor = made(self._cfg, self.V, direction, self.device)
        else:
            self.monitor.follow(direction, self.V)

    def _split(self, step: StepGrads) -> Routed:
        g, views = step.total, step.views
        keep, quar = dict(g), {m: torch.zeros_like(v) for m, v in g.items()}
        keep_s, keep_t = dict(step.students), dict(step.teachers)
        if not views or not self.V:
            return Routed(keep, quar, ArmDiag(), self.V)
        whole = self._cfg.gate_vote == "rollout"
        rows = {m: torch.cat([g_b[m] for g_b in step.rows]) for m in (self.sizes if whole else self.V)}
        norms = torch.stack([rows[m].norm(dim=1) for m in rows])
        dots = torch.stack([(rows[m] * self.V[m]).sum(1) for m in self.V])
        norms, dots = ranks.total(norms), ranks.total(dots)  # one rank's numbers and the others' zeros
        length = dict(zip(rows, norms, strict=True))
        norms = torch.stack([length[m] for m in self.V])
        nonzero = norms > 0
        cos = torch.where(nonzero, dots / norms, 0.0)
        share = self._shares(cos, nonzero, views)
        per_rollout = share.sum(0) / nonzero.sum(0).clamp(min=1)
        if whole:
            per_rollout = per_rollout if self._cfg.monitor_name == "band" else (per_rollout > 0.5).to(share)
            share = torch.where(nonzero, per_rollout, 0.0)
        teacher = torch.tensor([s == "teacher" for v in views for s in v.sources], device=self.device)[:, None]
        shares = dict.fromkeys(rows, per_rollout) if whole else dict(zip(self.V, share, strict=True))
        parts = {}
        for m, f in shares.items():
            kept = (1 - f)[:, None] * rows[m]
            sums = kept.sum(0), (f[:, None] * rows[m]).sum(0), (kept * ~teacher).sum(0), (kept * teacher).sum(0)
            parts[m] = torch.stack(sums)
        for m, sums in ranks.total_by_module(parts).items():
            keep[m], quar[m], keep_s[m], keep_t[m] = sums
        assert_conserved(g, keep, quar, {m: length[m].sum() for m in shares})

        gate = tuple(tuple(part.tolist()) for part in per_rollout.split([len(v) for v in views]))
        readings = self.monitor.readings() if self.monitor else {}
        diag = replace(
            self._diag(step, keep, keep_s, keep_t),
            fired=fraction_of_modules([f.any() for f in share]),
            resid=mean_over_modules([along(keep[m], v)[0] / keep[m].norm() for m, v in self.V.items()]),
            routed=(share.sum() / nonzero.sum()).item() if nonzero.any() else None,
            gate=gate,
            flags=tuple(GroupFlags(f, tuple(x > 0.5 for x in f)) for f in gate),
            **{name: mean_over_modules(list(values)) for name, values in readings.items()},
        )
        return Routed(keep, quar, diag, self.V)

    def _shares(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], views: Sequence[GroupView]
    ) -> Float[Tensor, "M N"]:
        assert self.monitor is not None
        share = self.monitor.shares(cos, nonzero, views)
        if self._permute_seed is not None:
            share = permuted(share, nonzero, torch_stream(self._permute_seed, "mass-matched", self._steps))
        self._steps += 1
        return share
