"""Arms that read: rollouts are flagged by their text before any gradient, and each adapter vector learns from its own
policy's rollouts.

    flagged     paid, and its score above the scorer's threshold
    quarantine  flagged, or sampled with the quarantine on;  learns with it on,   A = R − mean over the group
    kept        the rest;  learns with the quarantine off,   A = R − mean over the group's kept rows

Rollouts sampled with the quarantine on are another policy's as far as δS is concerned: learnt from with it off, they
would be off-policy without a ratio, and their negative advantages push without bound.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vgrout.arms.base import module_sizes
from vgrout.arms.flagged import FlaggedArm
from vgrout.config.run import Config
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.monitors import make_monitor
from vgrout.monitors.base import Monitor
from vgrout.tensor_types import UpdatePart, UpdatePlan
from vgrout.types import GroupView, Problem


class TextRouting(FlaggedArm):
    """reader, surprise, pmi: they differ in their usual monitor. With none, the control: nothing is flagged (no_gate).

    rebaseline: off: kept rows keep the group's advantages. own: off: rows sampled with the quarantine on that are not
    flagged are kept rows too. Both are there to be ablated.
    penalty: what a flagged row that the deployed model wrote costs there: kept, with advantage −penalty.
    """

    name = "reader"

    def __init__(
        self,
        sizes: Mapping[str, int],
        monitor: Monitor,
        *,
        rebaseline: bool = True,
        own: bool = True,
        penalty: float = 0.0,
        device: torch.device | str = "cpu",
        control: str = "none",
    ) -> None:
        super().__init__(sizes, monitor, rebaseline=rebaseline, device=device, control=control)
        self._own, self._penalty = own, penalty

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]
    ) -> "TextRouting":
        assert grader is not None
        arm = cfg.arm
        made = cls(
            module_sizes(policy),
            make_monitor(cfg, policy, inputs, grader, problems),
            rebaseline=arm.rebases,
            own=arm.owns,
            penalty=arm.flagged_penalty,
            device=policy.adapter.δS.device,
            control=arm.control_name,
        )
        made.name = arm.intervention
        return made

    def plan(self, views: Sequence[GroupView], step: int = 0) -> UpdatePlan:
        self._require(views)
        flags = self.monitor.flags(views, step)
        kept_rows: list[tuple[int, ...]] = []
        kept_A: list[tuple[float, ...]] = []
        away_rows: list[tuple[int, ...]] = []
        quarantined: list[tuple[bool, ...]] = []
        for view, of_group in zip(views, flags, strict=True):
            flagged = of_group.flagged
            away = tuple(f or (self._own and on) for f, on in zip(flagged, view.quarantine_on, strict=True))
            kept = [b for b in range(len(view)) if not away[b]]
            A = view.advantages_among(kept) if self._rebaseline else view.advantages
            if self._penalty:
                fined = [b for b in range(len(view)) if flagged[b] and view.deployed[b]]
                A = tuple(-self._penalty if b in fined else a for b, a in enumerate(A))
                kept = sorted([*kept, *fined])
            kept_rows.append(tuple(kept))
            kept_A.append(A)
            away_rows.append(tuple(b for b in range(len(view)) if away[b]))
            quarantined.append(away)
        parts = (
            UpdatePart(tuple(kept_rows), tuple(kept_A), deployed=True, learns="kept"),
            UpdatePart(tuple(away_rows), tuple(v.advantages for v in views), learns="quarantine"),
        )
        return UpdatePlan(parts, tuple(flags), tuple(quarantined))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Earlier versions counted their steps here; today a step's draws follow from its number."""
        super().load_state_dict({key: value for key, value in state.items() if key != "steps"})
