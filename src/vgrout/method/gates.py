"""Monitors that read gradients: gate and band.

They compute each rollout's cosine with v in each module. A threshold, `TauGate` or `BandGate`, decides by it which
share of each rollout's gradient is flagged; it sees cosines and known hacks only. M modules, N rollouts of one step:

cos      [M, N]  g_b · v / ‖g_b‖
nonzero  [M, N]  where a rollout has a gradient; elsewhere it has no cosine, and is not flagged
known    [N]     known hacks
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.config.run import Config
from vgrout.config.specs import MONITORS
from vgrout.ground.data import Flags, GroupView, Refresh
from vgrout.ground.rng import torch_stream
from vgrout.method.base import Monitor, under
from vgrout.method.gradients import GradientFlags, StepGradient
from vgrout.method.live_direction import LiveDirection, Setup, mean_axis
from vgrout.method.projection import fraction_of_modules, mean_over_modules

DECAY = 0.9  # of the running means of a τ gate, per step

Shares = Float[Tensor, "M N"]
Cosines = Float[Tensor, "M N"]
Mask = Bool[Tensor, "M N"]
OfModules = Float[Tensor, " M"]
OfRollouts = Bool[Tensor, " N"]


class TauGate:
    """Flags known hacks always, and the others where their cosine exceeds τ, the midpoint of two running means.

    The means are of the cosines of known hacks and of the rest, per module: exponential, DECAY per step, corrected
    for their start (as in Adam), so the first step has a threshold too.

    A module that has not seen both kinds has no threshold. absent_is_zero: there the mean of what it has not seen
    counts as 0. apart: a module whose known hacks do not lie above the rest has no threshold either.
    """

    def __init__(
        self,
        n_modules: int,
        device: torch.device | str = "cpu",
        *,
        apart: bool = False,
        absent_is_zero: bool = False,
    ) -> None:
        self.apart = apart
        self.absent_is_zero = absent_is_zero
        # row 0 known hacks, row 1 the rest; mean = total / weight
        self._total = torch.zeros(2, n_modules, dtype=torch.float64, device=device)
        self._weight = torch.zeros_like(self._total)

    @property
    def means(self) -> Float[Tensor, "2 M"]:
        """Running means of known hacks and of the rest; NaN where none was seen yet."""
        return self._total / self._weight

    @property
    def tau(self) -> OfModules:
        """τ of each module; NaN where it has not seen both kinds."""
        if not self.absent_is_zero:
            return self.means.mean(0)
        seen_any = (self._weight > 0).any(0)
        midpoint = self.means.nan_to_num(nan=0.0).mean(0)
        return torch.where(seen_any, midpoint, torch.nan)

    @property
    def voters(self) -> Bool[Tensor, " M"]:
        """The modules with a threshold, which can flag more than known hacks."""
        has_threshold = ~self.tau.isnan()
        return has_threshold & (self.gap > 0) if self.apart else has_threshold

    @property
    def gap(self) -> OfModules:
        """mean(known hacks) - mean(rest): positive where the direction tells them apart."""
        hacks, rest = self.means
        return hacks - rest

    def __call__(self, cos: Cosines, nonzero: Mask, known: OfRollouts) -> Shares:
        """Move the running means by this step's rollouts, then decide: 1 flagged, 0 not."""
        self._follow(0, cos, nonzero & known)
        self._follow(1, cos, nonzero & ~known)
        tau = self.tau[:, None].to(cos.dtype)
        over = (cos > tau) & self.voters[:, None]
        flagged = nonzero & (known | over)
        return flagged.to(cos.dtype)

    def _follow(self, kind: int, cos: Cosines, members: Mask) -> None:
        """Move the running means of one kind, 0 or 1, by the cosines of its members in this step."""
        n = members.sum(1)
        of_members = torch.where(members, cos, 0.0)
        total = of_members.double().sum(1)
        mean = total / n.clamp(min=1)
        step = (1 - DECAY) * (n > 0)
        self._total[kind] += step * (mean - self._total[kind])
        self._weight[kind] += step * (1 - self._weight[kind])

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "total": self._total.clone(),
            "weight": self._weight.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError where `state` has other modules, KeyError where it is another monitor's."""
        self._total.copy_(state["total"])
        self._weight.copy_(state["weight"])


class BandGate:
    """Flags softly, a share f = clamp((cos - lo) / (hi - lo), 0, 1).

    lo, hi: mean cosines of the pairs' clean and hack sides. A module whose hack side is not above its clean side has no
    band and flags nothing. It reads no label of any rollout.
    """

    def __init__(self, lo: OfModules, hi: OfModules) -> None:
        self.lo = lo
        self.hi = hi

    @property
    def voters(self) -> Bool[Tensor, " M"]:
        """The modules with a band."""
        return self.hi > self.lo

    def __call__(
        self,
        cos: Cosines,
        nonzero: Mask,
        known: OfRollouts | None = None,
    ) -> Shares:
        """The share of each rollout that is flagged, from 0 to 1. known: not read."""
        lo = self.lo[:, None]  # [M, 1]
        hi = self.hi[:, None]
        has_band = self.voters[:, None]
        width = torch.where(has_band, hi - lo, 1.0)
        share = (cos - lo) / width
        return torch.where(
            nonzero & has_band,
            share.clamp(0, 1),
            0.0,
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "lo": self.lo.clone(),
            "hi": self.hi.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.lo.copy_(state["lo"])
        self.hi.copy_(state["hi"])


class GradientMonitor(Monitor):
    """Base of monitors that decide after the backward. Only interventions with a `route` can use them."""

    reads = "gradients"

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    @classmethod
    def make(cls, setup: Setup) -> "GradientMonitor":
        return cls(setup.cfg)

    def known_hacks(self, view: GroupView) -> list[bool]:
        """What is known of a group before any gradient: demonstrations, and students that the weak detector flags
        (unless --known-hacks-teacher-only)."""
        students_too = not self.cfg.method.known_hacks_teacher_only
        known: list[bool] = []
        for source, detected in zip(view.sources, view.detector, strict=True):
            if source == "teacher":
                known.append(True)
            else:
                known.append(detected and students_too)
        return known

    @abstractmethod
    def flag_gradients(self, step: StepGradient, number: int) -> GradientFlags:
        """Return what is flagged of a step in which each rollout has a row of its own. number: of the step."""


class DirectionMonitor(GradientMonitor):
    """Base of gate and band: flags by each rollout's gradient and a direction v, which has one row in each module."""

    # where a rollout is decided about as a whole: by the majority of its modules; False: to their mean share
    majority = True
    threshold: TauGate | BandGate

    def __init__(self, cfg: Config, direction: LiveDirection) -> None:
        super().__init__(cfg)
        self._direction = direction

    @property
    def direction(self) -> LiveDirection:
        return self._direction

    @classmethod
    def make(cls, setup: Setup) -> "DirectionMonitor":
        signed = cls.spec.signs_random
        direction = LiveDirection.make(
            setup,
            mean_axis,
            keeps_modules=True,
            signed=signed,
        )
        return cls(setup.cfg, direction)

    def flag_gradients(self, step: StepGradient, number: int) -> GradientFlags:
        cos, nonzero = self._cosines(step)
        is_known = [row.known_hack for row in step.first_rows]
        known = torch.tensor(is_known, device=step.g.device)
        share = self.threshold(cos, nonzero, known)  # [M, N]
        if self.cfg.method.random_flags:
            stream = torch_stream(self.cfg.run.seed, "mass-matched", number)
            has_gradient = nonzero.any(0)
            moved = permuted(share, has_gradient, stream)
            share = torch.where(nonzero, moved, 0.0)
        vote = self.cfg.method.resolved("gate_vote")
        asked = self._voting(nonzero) if vote == "abstain" else nonzero
        of_asked = torch.where(asked, share, 0.0)
        of_row = of_asked.sum(0) / asked.sum(0).clamp(min=1)
        by_rollout = vote != "module"
        if by_rollout:
            if self.majority:
                is_flagged = of_row > 0.5
                of_row = is_flagged.to(share)
            share = torch.where(nonzero, of_row, 0.0)
        measured = self._measured(share, nonzero)
        if by_rollout:
            return GradientFlags(of_row[:, None], of_row, measured)
        return GradientFlags(share.T, of_row, measured)

    def _voting(self, nonzero: Mask) -> Mask:
        """The modules that decide about each rollout: those that can. All of its modules where none can, so that
        known hacks are flagged."""
        voting = nonzero & self.threshold.voters[:, None]
        return torch.where(voting.any(0), voting, nonzero)

    def _measured(self, share: Shares, nonzero: Mask) -> dict[str, float | None]:
        """The step's columns: in how many modules something is flagged, how much of all, and the monitor's readings."""
        any_flagged = [of_module.any() for of_module in share]
        routed = None
        if nonzero.any():
            mean_share = share.sum() / nonzero.sum()
            routed = mean_share.item()
        measured = {
            "fired": fraction_of_modules(any_flagged),
            "routed": routed,
        }
        for name, values in self.readings().items():
            measured[name] = mean_over_modules([*values])
        return measured

    def _cosines(self, step: StepGradient) -> tuple[Cosines, Mask]:
        """Compute each row's cosine with v in each module, 0 without a gradient; and where it has one."""
        norms: list[Tensor] = []
        dots: list[Tensor] = []
        for module, v in self.direction.V.items():  # v [1, r]
            of_module = step.g[:, step.spans[module]]  # [N, r]
            products = of_module * v
            norms.append(of_module.norm(dim=1))
            dots.append(products.sum(1))
        norm = torch.stack(norms)
        nonzero = norm > 0
        cos = torch.stack(dots) / norm
        return torch.where(nonzero, cos, 0.0), nonzero

    def refresh(self, step: int) -> Refresh:
        before = self.direction.latest
        refreshed = self.direction.refresh(step)
        if self.direction.latest is not before:
            self.follow()
        return refreshed

    def follow(self) -> None:
        """Adapt to a v that was extracted again; here nothing depends on it."""

    def readings(self) -> dict[str, Tensor]:
        """Return what it measured, [M] each, for the columns of these names."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        state = dict(self.direction.state_dict())
        for name, value in self.threshold.state_dict().items():
            state[f"gate/{name}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.direction.load_state_dict(state)
        self.threshold.load_state_dict(under(state, "gate/"))


class Gate(DirectionMonitor):
    """τ gate: flags known hacks whatever their gradient, the others above a threshold (`TauGate`)."""

    spec = MONITORS["gate"]
    measures = frozenset({"gate"})

    def __init__(self, cfg: Config, direction: LiveDirection) -> None:
        super().__init__(cfg, direction)
        self.gate = TauGate(
            len(direction.V),
            device=direction.device,
            apart=cfg.method.resolved("gate_modules") == "apart",
            absent_is_zero=cfg.method.gate_as_documented,
        )
        self.threshold = self.gate

    def readings(self) -> dict[str, Tensor]:
        voting = self.gate.voters.to(self.gate.tau)
        return {"tau": self.gate.tau, "hkgap": self.gate.gap, "voting": voting}


class Band(DirectionMonitor):
    """Pair band: flags softly, by where the cosine lies between the pairs' sides (`BandGate`).

    What it flags depends on no label; `--rebaseline` sets known hacks apart, as under the gate.
    """

    spec = MONITORS["band"]
    majority = False

    def __init__(self, cfg: Config, direction: LiveDirection) -> None:
        super().__init__(cfg, direction)
        self.follow()

    def follow(self) -> None:
        direction = self.direction
        lo, hi = direction.latest.band(direction.V)
        self.threshold = BandGate(
            lo.to(direction.device),
            hi.to(direction.device),
        )


# ── the control --random-flags: as many flags, moved at random to other rollouts


def permuted(
    share: Float[Tensor, "M N"],
    movable: Bool[Tensor, " N"],
    generator: torch.Generator,
) -> Float[Tensor, "M N"]:
    """Move the shares among the movable rollouts at random, by one permutation for all M modules."""
    rollouts = movable.nonzero().flatten()
    permutation = torch.randperm(len(rollouts), generator=generator)
    taken_from = rollouts[permutation.to(rollouts.device)]
    moved = share.clone()
    moved[:, rollouts] = share[:, taken_from]
    return moved


def shuffled(
    flags: Sequence[Flags],
    movable: Sequence[Sequence[bool]],
    generator: torch.Generator,
) -> list[Flags]:
    """Move a step's flags at random among its rollouts that are movable or were flagged. flags, movable: by group."""
    flagged: list[bool] = []
    could_move: list[bool] = []
    sizes: list[int] = []
    for of_group, movable_of_group in zip(flags, movable, strict=True):
        flagged += of_group.acted_on
        could_move += movable_of_group
        sizes.append(len(of_group.flagged))
    mask = torch.tensor(flagged)
    takes_part = torch.tensor(could_move) | mask
    share = mask.float()[None]  # [1, N]: one module
    moved = permuted(share, takes_part, generator)[0] > 0
    shuffled_flags: list[Flags] = []
    for of_group, part in zip(flags, moved.split(sizes), strict=True):
        new = tuple(part.tolist())
        shuffled_flags.append(replace(of_group, flagged=new))
    return shuffled_flags
