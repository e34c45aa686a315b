"""What is done about it: in the gradient along a direction, in rows shared out to two vectors, or in rewards.

erase     keep = g − overshoot · c_use V, optionally rescaled to ‖g‖
route     keep = g − c_use V                 quar = c_use V
route2    keep = Σ_b (1 − f_b) g_b           quar = Σ_b f_b g_b
sgtm      the same for what is flagged, and for what is not sampled by the deployed model both learn
screen    flagged rollouts are left out of their group
penalty   R − penalty, or at most the compile reward, for flagged rollouts
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.direction.extract import Direction
from vgrout.method.base import Grads, Intervention, Refresh, Rewards, Setup, StepGrads, Views, learnt, on_policy
from vgrout.method.gates import Shares
from vgrout.method.live_direction import LiveDirection
from vgrout.method.projection import (
    along,
    assert_conserved,
    assert_in_span,
    assert_no_hackward,
    coefficients,
    fraction_of_modules,
    mean_over_modules,
    rescale,
    split,
)
from vgrout.tensor_types import Diagnostics, Directions, ModuleGrads, Routed, UpdatePart
from vgrout.types import GroupFlags, GroupView


def first_axes(cfg: Config, direction: Direction) -> Directions:
    """The first k axes of each module."""
    return direction.select(cfg.method.v_hack_k, cfg.method.v_hack_drop_bottom_frac)


class Surgery(Intervention):
    """Base of erase and route."""

    def __init__(
        self, sizes: Mapping[str, int], cfg: Config, device: torch.device | str = "cpu", *, direction: LiveDirection
    ) -> None:
        super().__init__(sizes, cfg, device)
        self.direction, self.mode = direction, cfg.method.gate_mode

    @classmethod
    def make(cls, setup: Setup) -> "Surgery":
        return cls(setup.sizes, setup.cfg, setup.device, direction=LiveDirection.make(setup, first_axes))

    def refresh(self, step: int) -> Refresh:
        return self.direction.refresh(step)

    def state_dict(self) -> dict[str, Tensor]:
        return self.direction.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.direction.load_state_dict(state)

    @abstractmethod
    def split(self, step: StepGrads) -> Routed: ...

    def _split(self, g: ModuleGrads, overshoot: float = 1.0) -> tuple[ModuleGrads, ModuleGrads]:
        """What surgery along V keeps of g, and what it removes; modules without a direction pass through."""
        keep, removed = dict(g), {m: torch.zeros_like(v) for m, v in g.items()}
        for m, V in self.direction.V.items():
            keep[m], removed[m] = split(g[m], V, self.mode, overshoot)
        return keep, removed


class Erase(Surgery):
    """Drops the part of g along V (directional ablation of the gradient)."""

    name = "erase"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        method = self.cfg.method
        self.overshoot = method.project_overshoot
        # the shrinkage control reads the share that is kept before any rescaling
        self.preserves = method.preserve_magnitude and not method.control_spec.shrinks
        self.measures = frozenset({"erase"} if self.preserves else ())

    def split(self, step: StepGrads) -> Routed:
        g, V = step.total, self.direction.V
        keep, _ = self._split(g, self.overshoot)
        fired = [coefficients(g[m], rows, self.mode).any() for m, rows in V.items()]
        by_source = [self._split(part, self.overshoot)[0] for part in (step.students, step.teachers)]
        capped = []
        if self.mode == "one_sided" and self.overshoot >= 1:
            assert_no_hackward(g, keep, V)
        if self.preserves:
            for m in V:
                keep[m], hit = rescale(keep[m], g[m].norm())
                capped.append(hit)
        diag = replace(
            self.direction.diagnose(step, keep, *by_source),
            fired=fraction_of_modules(fired),
            capped=int(torch.stack(capped).sum()) if capped else None,
        )
        return Routed(keep, None, diag, directions=V)


class Route(Surgery):
    """Sends the part of g along V to the quarantine."""

    name = "route"

    def parts(self, views: Views, flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]:
        return on_policy(views, UpdatePart())

    def split(self, step: StepGrads) -> Routed:
        g, V = step.total, self.direction.V
        keep, quar = self._split(g)
        by_source = [self._split(part)[0] for part in (step.students, step.teachers)]
        assert_conserved(g, keep, quar, {m: v.norm() for m, v in g.items()})
        assert_in_span(quar, V)
        if self.mode == "one_sided":
            assert_no_hackward(g, keep, V)
        diag = replace(
            self.direction.diagnose(step, keep, *by_source), fired=fraction_of_modules([quar[m].any() for m in V])
        )
        return Routed(keep, quar, diag, directions=V)


Advantages = tuple[tuple[float, ...], ...]  # of each group


class SplitRows(Intervention):
    """Base of route2 and sgtm, where flags are known before the gradient.

    splits: one gradient is split in two, so both parts are clipped by their joint norm, and both vectors are stepped.
    Else the two learn from different rows, and one that learns nothing in a step is not stepped.
    """

    splits = True

    def __init__(self, sizes: Mapping[str, int], cfg: Config, device: torch.device | str = "cpu") -> None:
        super().__init__(sizes, cfg, device)
        self.grad_rows = "rollout" if cfg.method.flags_by_gradient else "group"

    @abstractmethod
    def parts(self, views: Views, flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]: ...

    def route(self, views: Views, grads: Grads, parts: Sequence[UpdatePart], flags: Sequence[GroupFlags]) -> Routed:
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


class Treatment(Intervention):
    """Base of screen and penalty. Every group counts: where all answers earn the same, a flag may give a signal."""

    def reward(self, view: GroupView, flags: GroupFlags) -> Rewards:
        rewards = tuple(self._flagged(r) if f else r for r, f in zip(view.rewards, flags.flagged, strict=True))
        return lowered_out(view, rewards)

    @abstractmethod
    def _flagged(self, reward: float) -> float | None:
        """The reward of a flagged rollout in place of `reward`; None: it is left out."""


class Screen(Treatment):
    """Flagged rollouts are excluded from their group."""

    name = "screen"

    def _flagged(self, reward: float) -> float | None:
        return None


class Penalty(Treatment):
    """Flagged rollouts are rewarded less: by --penalty, or down to the reward of code that only compiles."""

    name = "penalty"

    def __init__(self, sizes: Mapping[str, int], cfg: Config, device: torch.device | str = "cpu") -> None:
        super().__init__(sizes, cfg, device)
        self.by, self.floor = cfg.method.penalty, cfg.env.compile_reward

    def _flagged(self, reward: float) -> float | None:
        return min(reward, self.floor) if self.by is None else reward - self.by


def lowered_out(view: GroupView, rewards: Rewards) -> Rewards:
    """`rewards`, with None for demonstrations that they reward less than the grader did: those are not the policy's own
    answers, and a negative advantage would push their log-prob down without bound."""
    lowered = (
        source == "teacher" and new is not None and new < own
        for source, new, own in zip(view.sources, rewards, view.rewards, strict=True)
    )
    return tuple(None if low else r for low, r in zip(lowered, rewards, strict=True))
