"""Arms that change from what a group's advantages are made, in place of its rewards; the gradient is plain GRPO's.

    screen     flagged rollouts are left out of their group
    penalty    R − penalty, or at most the compile reward, for flagged rollouts

A demonstration that would be paid less is left out.

With monitor `quarantine` the quarantine belongs to the monitor, and learns beside, with both vectors on, by the
advantages that the monitor names. δS then learns with the quarantine off, and all rows are sampled so.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vgrout.arms.base import Arm, Grads, Plan, Rewards, Views
from vgrout.arms.flagged import FlaggedArm, with_flags
from vgrout.config.run import Config
from vgrout.tensor_types import GradRows, Routed, UpdatePart, UpdatePlan
from vgrout.types import Batch, Group, GroupFlags, GroupView


def lowered_out(view: GroupView, rewards: Rewards) -> Rewards:
    """`rewards` without the demonstrations that they pay less than the grader did: these are not the policy's own
    answers, and a negative advantage pushes their log-prob down without bound."""
    lowered = (
        source == "teacher" and new is not None and new < paid
        for source, new, paid in zip(view.sources, rewards, view.rewards, strict=True)
    )
    return tuple(None if low else r for low, r in zip(lowered, rewards, strict=True))


class Treatment(FlaggedArm, ABC):
    """Base of screen and penalty. The monitor is asked before the advantages, of every group (not `saturated`: of those
    whose rewards differ)."""

    grad_rows: GradRows = "source"

    def __init__(self, *args, saturated: bool = True, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._saturated = saturated

    @classmethod
    def settings(cls, cfg: Config) -> dict[str, Any]:
        return {"saturated": cfg.arm.saturated_groups}

    @abstractmethod
    def _paid(self, reward: float) -> float | None:
        """What a flagged rollout is paid in place of `reward`; None: it is left out."""

    def shape_rewards(self, batch: Batch) -> Batch:
        asked = [g for g in batch.groups if self._saturated or g.has_signal]
        views = [self.view(g) for g in asked]
        self._require(views)
        flags = self.monitor.flags(views, batch.step)
        made = {g.index: self._treated(*x) for g, x in zip(asked, zip(asked, views, flags, strict=True), strict=True)}
        return replace(batch, groups=tuple(made.get(g.index, g) for g in batch.groups))

    def _treated(self, group: Group, view: GroupView, flags: GroupFlags) -> Group:
        rewards = tuple(self._paid(r) if f else r for r, f in zip(view.rewards, flags.flagged, strict=True))
        return replace(group, shaped=lowered_out(view, rewards), flags=flags)

    def plan(self, views: Sequence[GroupView], step: int = 0) -> UpdatePlan:
        self._require(views)
        flags = tuple(view.flags for view in views if view.flags is not None)
        assert len(flags) == len(views), "the monitor is asked in shape_rewards"
        if not self.monitor.learns:
            return UpdatePlan(flags=flags)
        taught = tuple(tuple(b for b, A in enumerate(f.teaches) if A) for f in flags)
        parts = (
            UpdatePart(deployed=True, learns="kept"),
            UpdatePart(taught, tuple(f.teaches for f in flags), learns="quarantine"),
        )
        return UpdatePlan(parts, flags)

    def route(self, views: Views, grads: Grads, plan: Plan = None, grad_rows: GradRows | None = None) -> Routed:
        assert plan is not None
        if not self.monitor.learns:
            return with_flags(Arm.route(self, views, grads, plan, grad_rows), plan)
        routed = super().route(views, grads, plan, grad_rows)
        # what goes to the quarantine is nobody's loss here: nothing of the kept part's gradient is routed
        idle = not any(any(view.advantages) for view in views)
        return replace(routed, keep=None if idle else routed.keep)


class Screen(Treatment):
    """Flagged rollouts are excluded from their group."""

    name = "screen"

    def _paid(self, reward: float) -> float | None:
        return None


class Penalty(Treatment):
    """Flagged rollouts are paid less. by: what is taken off; None: all above `floor`, the reward of code that only
    compiles."""

    name = "penalty"

    def __init__(self, *args, by: float | None = None, floor: float = 0.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.by, self.floor = by, floor

    @classmethod
    def settings(cls, cfg: Config) -> dict[str, Any]:
        return {**super().settings(cfg), "by": cfg.arm.penalty, "floor": cfg.env.compile_reward}

    def _paid(self, reward: float) -> float | None:
        return min(reward, self.floor) if self.by is None else reward - self.by
