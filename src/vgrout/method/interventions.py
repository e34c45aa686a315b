"""What is done about it: in the gradient along a direction, by sharing rows out to two vectors, or in rewards.

erase     keep = g − overshoot · c_use V, optionally rescaled to ‖g‖
route     keep = g − c_use V                 quar = c_use V
route2    keep = Σ_b (1 − f_b) g_b           quar = Σ_b f_b g_b
screen    flagged rollouts are left out of their group
penalty   R − penalty, or at most the compile reward, for flagged rollouts
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vgrout.config.method_settings import (
    DirectionSettings,
    EraseSettings,
    PenaltySettings,
    PlaceSettings,
    QuarantineSettings,
    SurgerySettings,
)
from vgrout.data import GroupView, Source
from vgrout.method.base import Intervention, Rewards, Setup, StepGradient

if TYPE_CHECKING:
    from torch import Tensor

    from vgrout.method.live_direction import LiveDirection
    from vgrout.tensor_types import Routed


class Surgery(Intervention):
    """Base of erase and route."""

    Settings = (DirectionSettings, SurgerySettings)
    acts_on = "gradient"
    has_direction = True

    def __init__(self, *args: Any, direction: "LiveDirection") -> None:
        super().__init__(*args)
        self.direction, self.mode = direction, self.cfg.method.gate_mode

    @classmethod
    def make(cls, setup: Setup) -> "Surgery":
        from vgrout.method.live_direction import LiveDirection, first_axes

        return cls(
            setup.spans, setup.cfg, setup.device, direction=LiveDirection.make(setup, first_axes)
        )

    def _split(self, step: StepGradient, overshoot: float = 1.0) -> "tuple[Tensor, Tensor]":
        """What surgery along V keeps and removes of all rows' g, the students' and the demonstrations', [3, R] each;
        modules without a direction pass through."""
        import torch

        from vgrout.method.projection import split

        g = torch.stack((step.total, step.students, step.teachers))
        keep, removed = g.clone(), torch.zeros_like(g)
        for m, V in self.direction.V.items():
            span = self.spans[m]
            keep[:, span], removed[:, span] = split(g[:, span], V, self.mode, overshoot)
        return keep, removed


class Erase(Surgery):
    """Drops the part of g along V (directional ablation of the gradient)."""

    name = "erase"
    what = "drop the hack-ward part of the gradient"
    Settings = (*Surgery.Settings, EraseSettings)

    def __init__(self, *args: Any, direction: "LiveDirection") -> None:
        super().__init__(*args, direction=direction)
        self.overshoot, self.preserves = (
            self.cfg.method.project_overshoot,
            self.cfg.method.preserve_magnitude,
        )
        self.measures = frozenset({"erase"} if self.preserves else ())

    def route(self, step: StepGradient) -> "Routed":
        import torch

        from vgrout.method.projection import (
            assert_no_hackward,
            coefficients,
            fraction_of_modules,
            rescale,
        )
        from vgrout.tensor_types import Routed

        g, V, spans = step.total, self.direction.V, self.spans
        keep, _ = self._split(step, self.overshoot)
        if self.mode == "one_sided" and self.overshoot >= 1:
            assert_no_hackward(g, keep[0], V, spans)
        capped = []
        if self.preserves:
            for m in V:
                keep[0, spans[m]], hit = rescale(keep[0, spans[m]], g[spans[m]].norm())
                capped.append(hit)
        diag = replace(
            self.direction.diagnose(step, keep),
            fired=fraction_of_modules(
                [coefficients(g[spans[m]], rows, self.mode).any() for m, rows in V.items()]
            ),
            capped=int(torch.stack(capped).sum()) if capped else None,
        )
        return Routed(keep[0], None, diag, directions=V)


class Route(Surgery):
    """Sends the part of g along V to the quarantine."""

    name = "route"
    what = "quarantine that part"
    Settings = (*Surgery.Settings, QuarantineSettings)
    routes = True

    def route(self, step: StepGradient) -> "Routed":
        from vgrout.method.projection import (
            assert_conserved,
            assert_in_span,
            assert_no_hackward,
            fraction_of_modules,
            module_norms,
        )
        from vgrout.tensor_types import Routed

        g, V, spans = step.total, self.direction.V, self.spans
        keep, quar = self._split(step)
        assert_conserved(g, keep[0], quar[0], module_norms(g, spans), spans)
        assert_in_span(quar[0], V, spans)
        if self.mode == "one_sided":
            assert_no_hackward(g, keep[0], V, spans)
        fired = fraction_of_modules([quar[0, spans[m]].any() for m in V])
        return Routed(
            keep[0],
            quar[0],
            replace(self.direction.diagnose(step, keep), fired=fired),
            directions=V,
        )


class Route2(Intervention):
    """Divides the rows between the two vectors: f_b is a share of each module's part, or of a whole row, where
    gradients decide; else 1 for what is flagged, and 0."""

    name = "route2"
    what = "quarantine flagged gradients"
    Settings = (QuarantineSettings, PlaceSettings)
    acts_on = "gradient"
    reads_flags = True
    usual_monitor = "gate"
    routes = True
    usual = {  # noqa: RUF012 as declared in the base class
        **Intervention.usual,
        "quarantine": "block:-2",
        "rollout_ablate_frac": 1.0,
        "rebaseline": True,
        "vhack_refresh_every": 0,
    }
    documents = {  # noqa: RUF012
        **Intervention.usual,
        "gate_vote": "module",
        "gate_modules": "all",
    }

    def advantages(self, view: GroupView, flagged: Sequence[bool]) -> tuple[float, ...]:
        """The group's own; with a new baseline, rows that are not flagged are compared among themselves."""
        if not self.cfg.method.resolved("rebaseline"):
            return view.advantages
        among = view.advantages_among([b for b, flag in enumerate(flagged) if not flag])
        return tuple(
            A if flag else own for flag, A, own in zip(flagged, view.advantages, among, strict=True)
        )

    def route(self, step: StepGradient) -> "Routed":
        import torch

        from vgrout.method.projection import (
            along,
            assert_conserved,
            mean_over_modules,
            module_norms,
        )
        from vgrout.tensor_types import Diagnostics, Routed

        g, V = step.g, step.direction.V if step.direction else {}
        f = step.flagged.to(g) if step.share is None else step.share
        if f.shape[1] > 1:  # of every module with a direction: spread over its part of R
            of_module = dict(zip(V, f.T, strict=True))
            nothing = torch.zeros_like(f[:, 0])
            parts = [
                (of_module.get(m, nothing), span.stop - span.start)
                for m, span in self.spans.items()
            ]
            f = torch.cat([share[:, None].expand(-1, r) for share, r in parts], dim=1)
        kept = (1 - f) * g
        keep, quar = kept.sum(0), (f * g).sum(0)
        assert_conserved(step.total, keep, quar, module_norms(g, self.spans).sum(0), self.spans)
        if step.direction is None:
            flagged = sum(row.flagged for row in step.rows)
            return Routed(keep, quar, Diagnostics(routed=flagged / len(step.rows)))
        by_source = torch.stack((keep, (kept * ~step.teacher).sum(0), (kept * step.teacher).sum(0)))
        resid = [
            along(keep[s], v)[0] / keep[s].norm()
            for s, v in ((self.spans[m], v) for m, v in V.items())
        ]
        diag = replace(
            step.direction.diagnose(step, by_source),
            resid=mean_over_modules(resid),
            **step.measured,
        )
        return Routed(keep, quar, diag, directions=V)


class Treatment(Intervention):
    """Base of screen and penalty. Every group counts: where all answers earn the same, a flag may give a signal."""

    acts_on = "rewards"
    reads_flags = True
    usual_monitor = ""

    def reward(self, view: GroupView, flagged: Sequence[bool]) -> Rewards:
        """None for demonstrations that earn less than the grader gave: those are not the policy's own answers, and a
        negative advantage would push their log-prob down without bound."""

        def earned(source: Source, own: float, flag: bool) -> float | None:
            new = self._flagged(own) if flag else own
            return None if source == "teacher" and new is not None and new < own else new

        return tuple(earned(*of) for of in zip(view.sources, view.rewards, flagged, strict=True))

    @abstractmethod
    def _flagged(self, reward: float) -> float | None:
        """The reward of a flagged rollout in place of `reward`; None: it is left out."""


class Screen(Treatment):
    """Flagged rollouts are excluded from their group."""

    name = "screen"
    what = "leave flagged rollouts out of their group"

    def _flagged(self, reward: float) -> float | None:
        return None


class Penalty(Treatment):
    """Flagged rollouts are rewarded less: by --penalty, or down to the reward of code that only compiles."""

    name = "penalty"
    what = "reward flagged rollouts less"
    Settings = (PenaltySettings,)

    def _flagged(self, reward: float) -> float | None:
        by, floor = self.cfg.method.penalty, self.cfg.env.compile_reward
        return min(reward, floor) if by is None else reward - by
