"""Arms whose monitor decides before the gradient: each part of the plan says which rows are learnt from, with which
advantages, under which parameters, and which of the adapter's vectors learns from them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vgrout import ranks
from vgrout.arms.base import Arm, Grads, Plan, Views, module_sizes, on_policy
from vgrout.config.run import Config
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.monitors import make_monitor
from vgrout.monitors.base import Monitor
from vgrout.tensor_types import ArmDiag, GradRows, ModuleGrads, RolloutGrads, Routed, UpdatePart, UpdatePlan
from vgrout.types import GroupFlags, GroupView, Problem

STATE = "monitor/"  # before the monitor's keys in an arm's state


class FlaggedArm(Arm):
    """Base: holds a monitor, sees what that may see, and sums the parts of its plan.

    clips_apart: the two vectors learn from different rows, and one that learns nothing in a step is not stepped. Off: a
    gradient is split in two, both are clipped by their joint norm, and both are stepped.
    """

    grad_rows: GradRows = "group"
    clips_apart = True

    def __init__(
        self,
        sizes: Mapping[str, int],
        monitor: Monitor,
        *,
        device: torch.device | str = "cpu",
        control: str = "none",
    ) -> None:
        super().__init__(sizes, device, control)
        self.monitor, self.sees, self.provenance = monitor, monitor.sees, monitor.provenance

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]
    ) -> "FlaggedArm":
        assert grader is not None
        return cls(
            module_sizes(policy),
            make_monitor(cfg, policy, inputs, grader, problems),
            device=policy.adapter.δS.device,
            control=cfg.arm.control_name,
            **cls.settings(cfg),
        )

    @classmethod
    def settings(cls, cfg: Config) -> dict[str, Any]:
        """What an arm of this kind is told besides: keyword arguments of its own."""
        del cfg
        return {}

    def route(self, views: Views, grads: Grads, plan: Plan = None, grad_rows: GradRows | None = None) -> Routed:
        self._require(views)
        assert plan is not None
        keep, quar = self.learnt(grads, plan.parts)
        away = [float(flag) for of_group in plan.quarantined for flag in of_group]
        diag = ArmDiag(
            routed=sum(away) / len(away) if away else None,
            gate=tuple(tuple(map(float, of_group)) for of_group in plan.quarantined),
            flags=plan.flags,
        )
        return self._placed(Routed(keep, quar, diag, apart=self.clips_apart))

    def learnt(self, grads: Grads, parts: Sequence[UpdatePart]) -> tuple[ModuleGrads | None, ModuleGrads | None]:
        """Σ over the rows of the parts from which δS learns, and the same for δS_hack. None: no row in them counts."""
        sums: list[ModuleGrads | None] = []
        for vector in ("kept", "quarantine"):
            mine = [(g, part) for g, part in zip(grads, parts, strict=True) if part.learns in (vector, "both")]
            idle = self.clips_apart and not any(counts(part) for _, part in mine)
            sums.append(None if idle else self._sum([of_group for g, _ in mine for of_group in g]))
        return sums[0], sums[1]

    def state_dict(self) -> dict[str, Tensor]:
        return {STATE + key: value for key, value in self.monitor.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if other := [key for key in state if not key.startswith(STATE)]:
            raise ValueError(f"checkpoint has arm state {sorted(other)[0]!r}, --intervention {self.name} has none")
        self.monitor.load_state_dict({key.removeprefix(STATE): value for key, value in state.items()})

    def _sum(self, groups: Sequence[RolloutGrads]) -> ModuleGrads:
        out = {m: torch.zeros(r, device=self.device) for m, r in self.sizes.items()}
        for of_group in groups:
            assert of_group.keys() == self.sizes.keys(), sorted(of_group.keys() ^ self.sizes.keys())
            for m, rows in of_group.items():
                out[m] += rows.sum(0)
        return ranks.total_by_module(out)


class DealtRows(FlaggedArm, ABC):
    """Base of those that deal a step's rows to parts by their flags."""

    def __init__(self, *args, rebaseline: bool = False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._rebaseline = rebaseline

    @classmethod
    def settings(cls, cfg: Config) -> dict[str, Any]:
        return {"rebaseline": cfg.arm.rebaseline}

    def plan(self, views: Sequence[GroupView], step: int = 0) -> UpdatePlan:
        self._require(views)
        flags = self.monitor.flags(views, step)
        return UpdatePlan(self._parts(views, flags), tuple(flags), tuple(f.flagged for f in flags))

    @abstractmethod
    def _parts(self, views: Sequence[GroupView], flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]:
        """What each part of a step learns from."""

    def _advantages(self, views: Sequence[GroupView], flags: Sequence[GroupFlags]) -> tuple[tuple[float, ...], ...]:
        """The groups' own; with a new baseline those of the rows that are not flagged are theirs alone."""
        if not self._rebaseline:
            return tuple(view.advantages for view in views)
        return tuple(
            tuple(view.advantages[b] if flag else among[b] for b, flag in enumerate(of_group.flagged))
            for view, of_group in zip(views, flags, strict=True)
            for among in (view.advantages_among([b for b, flag in enumerate(of_group.flagged) if not flag]),)
        )


class FlaggedRoute2(DealtRows):
    """route2 by flags: keep = Σ_b (1 − f_b) g_b, quar = Σ_b f_b g_b, each row learnt under what sampled it."""

    name = "route2"
    clips_apart = False

    def _parts(self, views: Sequence[GroupView], flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]:
        A = self._advantages(views, flags)
        kept = UpdatePart(chosen(flags, lambda _, __, flag: not flag), A, learns="kept")
        away = UpdatePart(chosen(flags, lambda _, __, flag: flag), A, learns="quarantine")
        return (*on_policy(views, kept), *on_policy(views, away))


class SGTM(DealtRows):
    """Selective Gradient Masking (arXiv 2512.05648) with a policy's own rollouts, three ways: flagged rows train the
    quarantine alone; the others train both vectors, but for those that the deployed model sampled, which train the kept
    one alone, with the quarantine off.

    A row that trains both is learnt twice where they lie in the same modules: its gradient is that of their sum.
    """

    name = "sgtm"

    def _parts(self, views: Sequence[GroupView], flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]:
        A = self._advantages(views, flags)
        quiet = [view.deployed for view in views]
        return (
            UpdatePart(chosen(flags, lambda _, __, flag: flag), A, learns="quarantine"),
            UpdatePart(chosen(flags, lambda i, b, flag: not flag and not quiet[i][b]), A, learns="both"),
            UpdatePart(chosen(flags, lambda i, b, flag: not flag and quiet[i][b]), A, deployed=True, learns="kept"),
        )


def chosen(flags: Sequence[GroupFlags], which) -> tuple[tuple[int, ...], ...]:
    """Of each group the rows for which `which` (group, row, flag) holds."""
    return tuple(
        tuple(b for b, flag in enumerate(of_group.flagged) if which(i, b, flag)) for i, of_group in enumerate(flags)
    )


def counts(part: UpdatePart) -> bool:
    """Whether a part has a gradient at all: one of all zeros would still move a vector, by its momentum."""
    if part.rows is None or part.advantages is None:
        return True
    return any(A[b] for rows, A in zip(part.rows, part.advantages, strict=True) for b in rows)


def with_flags(routed: Routed, plan: UpdatePlan) -> Routed:
    """`routed` with the plan's flags, for the columns and rollouts.jsonl."""
    return replace(routed, diag=replace(routed.diag, flags=plan.flags))
