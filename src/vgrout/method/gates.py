"""Monitors that read gradients: gate and band. What they decide by is in method/thresholds.py."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vgrout.config.method_settings import DirectionSettings, GateSettings, VoteSettings
from vgrout.data import Flags, GroupView
from vgrout.method.base import Monitor, Refresh, Setup, StepGradient, Views

if TYPE_CHECKING:
    from torch import Tensor

    from vgrout.config.run import Config
    from vgrout.method.live_direction import LiveDirection


class GradientMonitor(Monitor):
    """Decides after the backward, by each rollout's gradient and a direction v of one row a module.

    `flag` gives what is known before: demonstrations, and what the weak detector flags.
    """

    Settings = (DirectionSettings, VoteSettings)
    reads = "gradients"
    rounds = True  # a vote of the modules is a majority; else their mean
    gate: Any  # TauGate or BandGate

    def __init__(self, cfg: "Config", direction: "LiveDirection") -> None:
        self.cfg, self.direction = cfg, direction
        self.follow()

    @classmethod
    def make(cls, setup: Setup) -> "GradientMonitor":
        from vgrout.method.live_direction import LiveDirection, mean_axis

        return cls(
            setup.cfg,
            LiveDirection.make(setup, mean_axis, keeps_modules=True, signed=cls.signs_random),
        )

    def flag(self, views: Views, step: int) -> list[Flags]:
        return [Flags(tuple(self._known(view))) for view in views]

    def _known(self, view: GroupView) -> list[bool]:
        """Demonstrations, and students that the weak detector flags (unless --known-hacks-teacher-only)."""
        students_too = not self.cfg.method.known_hacks_teacher_only
        pairs = zip(view.sources, view.detector, strict=True)
        return [source == "teacher" or (flag and students_too) for source, flag in pairs]

    def read(self, step: StepGradient, number: int) -> None:
        """Puts into `step`, in which each rollout has a row, what is flagged of it. number: of the step."""
        import torch

        from vgrout.method.controls import permuted
        from vgrout.method.projection import fraction_of_modules, mean_over_modules
        from vgrout.rng import torch_stream

        V, g = self.direction.V, step.g
        parts = [(g[:, step.spans[m]], rows) for m, rows in V.items()]
        norms = torch.stack([part.norm(dim=1) for part, _ in parts])
        dots = torch.stack([(part * v).sum(1) for part, v in parts])
        nonzero = norms > 0
        cos = torch.where(nonzero, dots / norms, 0.0)
        share = self.gate(
            cos, nonzero, torch.tensor([row.flagged for row in step.firsts], device=g.device)
        )
        if self.cfg.method.random_flags:
            stream = torch_stream(self.cfg.run.seed, "mass-matched", number)
            share = torch.where(nonzero, permuted(share, nonzero.any(0), stream), 0.0)
        of_row = share.sum(0) / nonzero.sum(0).clamp(min=1)
        whole = self.cfg.method.resolved("gate_vote") == "rollout"
        if whole:
            of_row = (of_row > 0.5).to(share) if self.rounds else of_row
            share = torch.where(nonzero, of_row, 0.0)
        step.share, step.of_row = of_row[:, None] if whole else share.T, of_row
        step.measured = {
            "fired": fraction_of_modules([f.any() for f in share]),
            "routed": (share.sum() / nonzero.sum()).item() if nonzero.any() else None,
            **{name: mean_over_modules([*values]) for name, values in self.readings().items()},
        }

    def refresh(self, step: int) -> Refresh:
        before = self.direction.latest
        refreshed = self.direction.refresh(step)
        if self.direction.latest is not before:
            self.follow()
        return refreshed

    def follow(self) -> None:
        """v was extracted, or extracted again."""

    def readings(self) -> "dict[str, Tensor]":
        """What it measured, [M] each, for the columns of these names."""
        return {}

    def state_dict(self) -> "dict[str, Tensor]":
        return self.direction.state_dict() | {
            f"gate/{name}": value for name, value in self.gate.state_dict().items()
        }

    def load_state_dict(self, state: "Mapping[str, Tensor]") -> None:
        self.direction.load_state_dict({k: v for k, v in state.items() if k.startswith("V/")})
        self.gate.load_state_dict(
            {k.removeprefix("gate/"): v for k, v in state.items() if k.startswith("gate/")}
        )


class Gate(GradientMonitor):
    """τ gate: flags known hacks whatever their gradient, the others above a threshold (`TauGate`)."""

    name = "gate"
    what = "cosine of a rollout's gradient above τ, and known hacks"
    Settings = (*GradientMonitor.Settings, GateSettings)
    measures = frozenset({"gate"})

    def __init__(self, cfg: "Config", direction: "LiveDirection") -> None:
        from vgrout.method.thresholds import TauGate

        apart = cfg.method.resolved("gate_modules") == "apart"
        self.gate = TauGate(len(direction.V), device=direction.device, apart=apart)
        super().__init__(cfg, direction)

    def readings(self) -> "dict[str, Tensor]":
        return {"tau": self.gate.tau, "hkgap": self.gate.gap}


class Band(GradientMonitor):
    """Pair band: flags softly, by where the cosine lies between the pairs' sides (`BandGate`). Reads no label."""

    name = "band"
    what = "softly, where that cosine lies between the pairs' clean and hack sides"
    rounds = False
    signs_random = True

    def follow(self) -> None:
        from vgrout.method.thresholds import BandGate

        lo, hi = self.direction.latest.band(self.direction.V)
        self.gate = BandGate(lo.to(self.direction.device), hi.to(self.direction.device))
