"""The interventions: what is done about hacks, in the gradient or in the rewards.

erase     keep = g − overshoot · c_use V, optionally rescaled to ‖g‖
route     keep = g − c_use V                 quar = c_use V
route2    keep = Σ_b (1 − f_b) g_b           quar = Σ_b f_b g_b
screen    flagged rollouts are left out of their group
penalty   R − penalty, or at most the compile reward, for flagged rollouts

δS learns `keep`, the quarantine δS_hack learns `quar`. erase and route read no flags: they divide g along the hack
directions V.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.run import Config
from vgrout.config.specs import INTERVENTIONS
from vgrout.ground.data import GroupView
from vgrout.ground.tensor_types import Directions, Gradient, Routed, Spans
from vgrout.method.base import Intervention, Rewards
from vgrout.method.gradients import StepGradient
from vgrout.method.live_direction import LiveDirection, Setup, first_axes
from vgrout.method.projection import (
    along,
    assert_conserved,
    assert_in_span,
    assert_no_hackward,
    fraction_of_modules,
    mean_over_modules,
    module_norms,
    rescale,
    split,
)

# Σ g over all rows, over the policy's own, over the demonstrations (`StepGradient.by_source`)
BySource = Float[Tensor, "3 R"]


class Surgery(Intervention):
    """Base of erase and route: divides the gradient along V."""

    def __init__(self, spans: Spans, cfg: Config, *, direction: LiveDirection) -> None:
        super().__init__(spans, cfg)
        self._direction = direction
        self.mode = self.cfg.method.gate_mode

    @property
    def direction(self) -> LiveDirection:
        return self._direction

    @classmethod
    def make(cls, setup: Setup) -> "Surgery":
        direction = LiveDirection.make(setup, first_axes)
        return cls(setup.spans, setup.cfg, direction=direction)

    def _split(
        self,
        step: StepGradient,
        overshoot: float = 1.0,
    ) -> tuple[BySource, BySource]:
        """Return what surgery along V keeps of g, and what it removes. Modules without a direction are kept whole."""
        g = step.by_source
        keep = g.clone()
        removed = torch.zeros_like(g)
        for module, V in self.direction.V.items():
            span = self.spans[module]
            keep[:, span], removed[:, span] = split(g[:, span], V, self.mode, overshoot)
        return keep, removed

    def _fired(self, removed: Gradient) -> float | None:
        """In how many modules something is removed."""
        return fraction_of_modules([removed[self.spans[m]].any() for m in self.direction.V])


class Erase(Surgery):
    """Drops the part of g along V (directional ablation of the gradient)."""

    spec = INTERVENTIONS["erase"]

    def __init__(self, spans: Spans, cfg: Config, *, direction: LiveDirection) -> None:
        super().__init__(spans, cfg, direction=direction)
        self.overshoot = self.cfg.method.project_overshoot
        self.preserves = self.cfg.method.preserve_magnitude
        self.measures = frozenset({"erase"} if self.preserves else ())

    def route(self, step: StepGradient) -> Routed:
        g = step.total
        V = self.direction.V
        keep_by_source, removed = self._split(step, self.overshoot)
        keep = keep_by_source[0]  # of all rows
        if self.mode == "one_sided" and self.overshoot >= 1:
            assert_no_hackward(g, keep, V, self.spans)
        capped: int | None = None
        if self.preserves:
            capped = self._stretch(keep, g)
        measured = self.direction.diagnose(step.by_source, keep_by_source)
        measured["fired"] = self._fired(removed[0])
        measured["capped"] = capped
        return Routed(keep, None, measured, directions=V)

    def _stretch(self, keep: Gradient, g: Gradient) -> int | None:
        """Stretch what is kept, in place, to the length of g in every module with a direction.

        Returns in how many modules the bound was hit; None: there is none with a direction.
        """
        capped: list[Tensor] = []
        for module in self.direction.V:
            span = self.spans[module]
            keep[span], is_capped = rescale(keep[span], g[span].norm())
            capped.append(is_capped)
        return int(torch.stack(capped).sum()) if capped else None


class Route(Surgery):
    """Sends the part of g along V to the quarantine."""

    spec = INTERVENTIONS["route"]

    def route(self, step: StepGradient) -> Routed:
        g = step.total
        V = self.direction.V
        keep_by_source, quar_by_source = self._split(step)
        keep = keep_by_source[0]  # of all rows
        quar = quar_by_source[0]
        norms = module_norms(g, self.spans)
        assert_conserved(g, keep, quar, norms, self.spans)
        assert_in_span(quar, V, self.spans)
        if self.mode == "one_sided":
            assert_no_hackward(g, keep, V, self.spans)
        measured = self.direction.diagnose(step.by_source, keep_by_source)
        measured["fired"] = self._fired(quar)
        return Routed(keep, quar, measured, directions=V)


class Route2(Intervention):
    """Divides the rows between the two vectors.

    Under a gradient monitor f_b is a share of a whole row, or of its part in each module. Under a text monitor it is 1
    for a flagged row, else 0.
    """

    spec = INTERVENTIONS["route2"]

    def advantages(
        self,
        view: GroupView,
        set_apart: Sequence[bool],
    ) -> tuple[float, ...]:
        """The group's own; with a new baseline, rollouts that are not set apart are compared among themselves."""
        if not self.cfg.method.resolved("rebaseline"):
            return view.advantages
        others = [b for b, apart in enumerate(set_apart) if not apart]
        among_others = view.advantages_among(others)
        advantages: list[float] = []
        for b, apart in enumerate(set_apart):
            if apart:
                advantages.append(view.advantages[b])
            else:
                advantages.append(among_others[b])
        return tuple(advantages)

    def route(self, step: StepGradient) -> Routed:
        g = step.g
        f = self._shares(step)
        kept = (1 - f) * g
        keep = kept.sum(0)
        quar = (f * g).sum(0)
        norms = module_norms(g, self.spans).sum(0)
        assert_conserved(step.total, keep, quar, norms, self.spans)
        if step.direction is None:
            if step.flags is not None:
                return Routed(keep, quar, step.flags.measured)
            flagged = sum(bool(row.flagged) for row in step.rows)
            return Routed(keep, quar, {"routed": flagged / len(step.rows)})
        V = step.direction.V
        of_students = (kept * ~step.teacher).sum(0)
        of_teachers = (kept * step.teacher).sum(0)
        by_source = torch.stack((keep, of_students, of_teachers))
        resid: list[Tensor] = []
        for module, v in V.items():  # v [1, r]
            of_module = keep[self.spans[module]]
            c = along(of_module, v)[0]
            resid.append(c / of_module.norm())
        measured = step.direction.diagnose(step.by_source, by_source)
        measured["resid"] = mean_over_modules(resid)
        if step.flags is not None:
            measured |= step.flags.measured
        return Routed(keep, quar, measured, directions=V)

    def _shares(self, step: StepGradient) -> Float[Tensor, "N _R"]:
        """f, the share of each row that is routed: one of the whole row [N, 1], or one at each place [N, R]."""
        if step.flags is None:
            return step.flagged.to(step.g)
        share = step.flags.share
        if share.shape[1] == 1:
            return share
        V: Directions = {}
        if step.direction is not None:
            V = step.direction.V
        return self._spread(share, V)

    def _spread(
        self,
        share: Float[Tensor, "N _M"],
        V: Directions,
    ) -> Float[Tensor, "N R"]:
        """Shares of the modules with a direction, spread over each one's part of R; 0 in the other modules."""
        R = max(span.stop for span in self.spans.values())
        spread = share.new_zeros(len(share), R)
        for module, of_module in zip(V, share.T, strict=True):
            spread[:, self.spans[module]] = of_module[:, None]
        return spread


class Treatment(Intervention):
    """Base of screen and penalty. Every group counts: where all answers earn the same, a flag may give a signal."""

    def reward(self, view: GroupView, flagged: Sequence[bool]) -> Rewards:
        """Rewards after the flags. None leaves a rollout out of its group.

        A flagged demonstration is left out rather than penalised: the policy did not write it, and a negative
        advantage would push its log-probability down without bound.
        """
        rewards: list[float | None] = []
        least = min(view.rewards)
        for source, reward, is_flagged in zip(view.sources, view.rewards, flagged, strict=True):
            if not is_flagged:
                rewards.append(reward)
                continue
            lowered = self.flagged_reward(reward, least)
            if source == "teacher" and lowered is not None and lowered < reward:
                lowered = None
            rewards.append(lowered)
        return tuple(rewards)

    @abstractmethod
    def flagged_reward(self, reward: float, least: float) -> float | None:
        """The reward of a flagged rollout in place of `reward`; None: it is left out. least: the group's lowest."""


class Screen(Treatment):
    """Flagged rollouts are excluded from their group."""

    spec = INTERVENTIONS["screen"]

    def flagged_reward(self, reward: float, least: float) -> float | None:
        return None


class Penalty(Treatment):
    """Flagged rollouts are rewarded less: by --penalty, or down to what a worthless answer earns.

    On a scale that goes below that, down to the lowest reward of the group.
    """

    spec = INTERVENTIONS["penalty"]

    def flagged_reward(self, reward: float, least: float) -> float | None:
        penalty = self.cfg.method.penalty
        if penalty is not None:
            return reward - penalty
        worthless = self.cfg.env.least_reward
        if least < 0:  # the reward is on a scale of somebody's own
            worthless = min(worthless, least)
        return min(reward, worthless)
