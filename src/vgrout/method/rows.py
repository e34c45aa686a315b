"""Interventions that split a step's gradient by rollouts: flagged ones to the quarantine, with share f_b.

route2    keep = Σ_b (1 − f_b) g_b         quar = Σ_b f_b g_b
sgtm      the same for what is flagged, and for what is not sampled by the deployed model both learn
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.method.base import Grads, Intervention, StepGrads, Views, learnt, on_policy
from vgrout.method.gates import Shares
from vgrout.method.live_direction import LiveDirection
from vgrout.method.projection import along, assert_conserved, mean_over_modules
from vgrout.tensor_types import Diagnostics, Routed, UpdatePart
from vgrout.types import GroupFlags, GroupView

Advantages = tuple[tuple[float, ...], ...]  # of each group


class SplitRows(Intervention):
    """Base of both, where flags are known before the gradient.

    splits: one gradient is split in two, so both parts are clipped by their joint norm, and both vectors are stepped.
    Else the two learn from different rows, and one that learns nothing in a step is not stepped.
    """

    splits = True

    def __init__(self, sizes: Mapping[str, int], cfg: Config, device: torch.device | str = "cpu") -> None:
        super().__init__(sizes, cfg, device)
        self.grad_rows = "rollout" if cfg.method.flags_by_gradient else "group"

    @abstractmethod
    def parts(self, views: Views, flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]: ...

    def route(
        self, views: Views, grads: Grads, parts: Sequence[UpdatePart], flags: Sequence[GroupFlags], step: int = 0
    ) -> Routed:
        keep, quar = learnt(grads, parts, self.sizes, self.device, both=self.splits)
        acted = [replace(of, shares=tuple(map(float, of.flagged))) for of in flags]
        away = [share for of in acted for share in of.shares]
        diag = Diagnostics(routed=sum(away) / len(away) if away else None)
        by_group = {view.index: of for view, of in zip(views, acted, strict=True)}
        return Routed(keep, quar, diag, by_group, apart=not self.splits)

    def advantages(self, views: Views, flags: Sequence[GroupFlags]) -> Advantages:
        """The groups' own; with a new baseline, rows that are not flagged are compared among themselves."""
        if not self.cfg.method.rebaseline:
            return tuple(view.advantages for view in views)
        return tuple(_among_kept(view, of.flagged) for view, of in zip(views, flags, strict=True))


class Route2(SplitRows):
    """Each row is learnt under what sampled it. Where gradients decide, f_b is a share, module by module."""

    name = "route2"

    def parts(self, views: Views, flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]:
        """flags: where gradients decide, those known before them, for the baseline."""
        A = self.advantages(views, flags)
        if self.cfg.method.flags_by_gradient:
            every = tuple(tuple(range(len(view))) for view in views)
            return on_policy(views, UpdatePart(every, A) if self.cfg.method.rebaseline else UpdatePart())
        kept = UpdatePart(chosen(flags, lambda _, __, flag: not flag), A, learns="kept")
        away = UpdatePart(chosen(flags, lambda _, __, flag: flag), A, learns="quarantine")
        return (*on_policy(views, kept), *on_policy(views, away))

    def divide(self, step: StepGrads, shares: Shares, direction: LiveDirection) -> Routed:
        """The split by a monitor of gradients."""
        g, V = step.total, direction.V
        keep, quar = dict(g), {m: torch.zeros_like(v) for m, v in g.items()}
        keep_s, keep_t = dict(step.students), dict(step.teachers)
        teacher = torch.tensor([s == "teacher" for v in step.views for s in v.sources], device=self.device)[:, None]
        parts: dict[str, Tensor] = {}
        for m, f in shares.of.items():
            kept = (1 - f)[:, None] * shares.rows[m]
            away = (f[:, None] * shares.rows[m]).sum(0)
            parts[m] = torch.stack((kept.sum(0), away, (kept * ~teacher).sum(0), (kept * teacher).sum(0)))
        for m, sums in ranks.total_by_module(parts).items():
            keep[m], quar[m], keep_s[m], keep_t[m] = sums
        assert_conserved(g, keep, quar, {m: shares.length[m].sum() for m in shares.of})
        flags = [replace(of, shares=tuple(s for s in of.scores if s is not None)) for of in shares.flags]
        diag = replace(
            direction.diagnose(step, keep, keep_s, keep_t),
            fired=shares.fired,
            resid=mean_over_modules([along(keep[m], v)[0] / keep[m].norm() for m, v in V.items()]),
            routed=shares.overall,
            **shares.readings,
        )
        return Routed(keep, quar, diag, {v.index: of for v, of in zip(step.views, flags, strict=True)}, directions=V)


class SGTM(SplitRows):
    """Selective Gradient Masking (arXiv 2512.05648) on a policy's rollouts: flagged rows train the quarantine alone;
    rows that the deployed model sampled train the kept vector alone, with the quarantine off; the rest train both.

    Where the two lie in the same modules, a row that trains both is learnt twice: its gradient is that of their sum.
    """

    name = "sgtm"
    splits = False

    def parts(self, views: Views, flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]:
        A = self.advantages(views, flags)
        quiet = [view.deployed for view in views]
        return (
            UpdatePart(chosen(flags, lambda _, __, flag: flag), A, learns="quarantine"),
            UpdatePart(chosen(flags, lambda i, b, flag: not flag and not quiet[i][b]), A, learns="both"),
            UpdatePart(chosen(flags, lambda i, b, flag: not flag and quiet[i][b]), A, deployed=True, learns="kept"),
        )


def chosen(flags: Sequence[GroupFlags], which) -> tuple[tuple[int, ...], ...]:
    """The rows of each group for which `which` (group, row, flag) holds."""
    return tuple(tuple(b for b, flag in enumerate(of.flagged) if which(i, b, flag)) for i, of in enumerate(flags))


def _among_kept(view: GroupView, flagged: Sequence[bool]) -> tuple[float, ...]:
    among = view.advantages_among([b for b, flag in enumerate(flagged) if not flag])
    return tuple(A if flag else own for flag, A, own in zip(flagged, view.advantages, among, strict=True))
