"""Monitors that read gradients: gate and band. What they decide by is in method/thresholds.py."""

from collections.abc import Mapping
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.config.run import Config
from vgrout.config.specs import MONITORS
from vgrout.data import GroupView
from vgrout.method.base import GradientFlags, Monitor, Refresh, Setup, StepGradient
from vgrout.method.controls import permuted
from vgrout.method.live_direction import LiveDirection, mean_axis
from vgrout.method.projection import fraction_of_modules, mean_over_modules
from vgrout.method.thresholds import BandGate, TauGate
from vgrout.rng import torch_stream


class Threshold(Protocol):
    """Decides, per module, which share of each row's gradient is flagged."""

    def __call__(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], known: Bool[Tensor, " N"]
    ) -> Float[Tensor, "M N"]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class GradientMonitor(Monitor):
    """Decides after the backward, by each rollout's gradient and a direction v of one row a module."""

    majority = True  # a vote of the modules is a majority; else their mean
    threshold: Threshold

    def __init__(self, cfg: Config, direction: LiveDirection) -> None:
        self.cfg = cfg
        self._direction = direction

    @property
    def direction(self) -> LiveDirection:
        return self._direction

    @classmethod
    def make(cls, setup: Setup) -> "GradientMonitor":
        signed = cls.spec.signs_random
        direction = LiveDirection.make(setup, mean_axis, keeps_modules=True, signed=signed)
        return cls(setup.cfg, direction)

    def known_hacks(self, view: GroupView) -> list[bool]:
        """What is known of a group before any gradient: demonstrations, and students that the weak detector flags
        (unless --known-hacks-teacher-only)."""
        students_too = not self.cfg.method.known_hacks_teacher_only
        known: list[bool] = []
        for source, detected in zip(view.sources, view.detector, strict=True):
            known.append(source == "teacher" or (detected and students_too))
        return known

    def flag_gradients(self, step: StepGradient, number: int) -> GradientFlags:
        """What is flagged of a step in which each rollout has a row of its own. number: of the step."""
        cos, nonzero = self._cosines(step)
        known = torch.tensor([row.known_hack for row in step.firsts], device=step.g.device)
        share = self.threshold(cos, nonzero, known)
        if self.cfg.method.random_flags:
            stream = torch_stream(self.cfg.run.seed, "mass-matched", number)
            share = torch.where(nonzero, permuted(share, nonzero.any(0), stream), 0.0)
        of_row = share.sum(0) / nonzero.sum(0).clamp(min=1)
        by_rollout = self.cfg.method.resolved("gate_vote") == "rollout"
        if by_rollout:
            if self.majority:
                of_row = (of_row > 0.5).to(share)
            share = torch.where(nonzero, of_row, 0.0)
        routed = (share.sum() / nonzero.sum()).item() if nonzero.any() else None
        measured = {
            "fired": fraction_of_modules([flags.any() for flags in share]),
            "routed": routed,
        }
        for name, values in self.readings().items():
            measured[name] = mean_over_modules([*values])
        return GradientFlags(of_row[:, None] if by_rollout else share.T, of_row, measured)

    def _cosines(self, step: StepGradient) -> tuple[Float[Tensor, "M N"], Bool[Tensor, "M N"]]:
        """Each row's cosine with v in each module, 0 without a gradient; and where it has one."""
        norms: list[Tensor] = []
        dots: list[Tensor] = []
        for module, v in self.direction.V.items():
            part = step.g[:, step.spans[module]]
            norms.append(part.norm(dim=1))
            dots.append((part * v).sum(1))
        norm = torch.stack(norms)
        nonzero = norm > 0
        return torch.where(nonzero, torch.stack(dots) / norm, 0.0), nonzero

    def refresh(self, step: int) -> Refresh:
        before = self.direction.latest
        refreshed = self.direction.refresh(step)
        if self.direction.latest is not before:
            self.follow()
        return refreshed

    def follow(self) -> None:
        """v was extracted again."""

    def readings(self) -> dict[str, Tensor]:
        """What it measured, [M] each, for the columns of these names."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        state = dict(self.direction.state_dict())
        for name, value in self.threshold.state_dict().items():
            state[f"gate/{name}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        of_direction: dict[str, Tensor] = {}
        of_gate: dict[str, Tensor] = {}
        for key, value in state.items():
            if key.startswith("V/"):
                of_direction[key] = value
            elif key.startswith("gate/"):
                of_gate[key.removeprefix("gate/")] = value
        self.direction.load_state_dict(of_direction)
        self.threshold.load_state_dict(of_gate)


class Gate(GradientMonitor):
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
        return {"tau": self.gate.tau, "hkgap": self.gate.gap}


class Band(GradientMonitor):
    """Pair band: flags softly, by where the cosine lies between the pairs' sides (`BandGate`). Reads no label."""

    spec = MONITORS["band"]
    majority = False

    def __init__(self, cfg: Config, direction: LiveDirection) -> None:
        super().__init__(cfg, direction)
        self.follow()

    def follow(self) -> None:
        lo, hi = self.direction.latest.band(self.direction.V)
        self.threshold = BandGate(lo.to(self.direction.device), hi.to(self.direction.device))
