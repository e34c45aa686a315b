"""Monitors that read gradients: per module, the share of each rollout's gradient that goes to the quarantine.

M modules, N rollouts of one step. `cos` holds g_b · v / ‖g_b‖, `nonzero` marks rollouts with a gradient (the rest have
no cosine and are routed nowhere). Gates see cosines and allowed flags only.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.config.arm import ArmConfig
from vgrout.direction.extract import Direction
from vgrout.tensor_types import Directions
from vgrout.types import GroupView


class GradientMonitor(ABC):
    """Decides after the backward, for the arm that holds the direction v."""

    name: str

    def __init__(self, cfg: ArmConfig, v: Directions, direction: Direction, device: torch.device | str = "cpu") -> None:
        self.device = device

    def follow(self, direction: Direction, v: Directions) -> None:
        """v was extracted again."""
        del direction, v  # most have no reference that would have to move along

    @abstractmethod
    def shares(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], views: Sequence[GroupView]
    ) -> Float[Tensor, "M N"]:
        """Of every row with a gradient the share in [0, 1] that is flagged; `cos` holds its cosine with v."""

    def readings(self) -> dict[str, Float[Tensor, " M"]]:
        """What it measured, for the columns of these names."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` has other modules, KeyError where it is another monitor's."""


class Gate(GradientMonitor):
    """τ gate: known hacks are flagged whatever their gradient, the others above a threshold (`TauGate`)."""

    name = "gate"

    def __init__(self, cfg: ArmConfig, v: Directions, direction: Direction, device: torch.device | str = "cpu") -> None:
        super().__init__(cfg, v, direction, device)
        self._teacher_only = cfg.known_hacks_teacher_only
        self.tau = TauGate(len(v), device=device, apart=cfg.gate_modules == "apart")

    def shares(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], views: Sequence[GroupView]
    ) -> Float[Tensor, "M N"]:
        known = torch.tensor([hack for v in views for hack in known_hacks(v, self._teacher_only)], device=self.device)
        return self.tau(cos, nonzero, known)

    def readings(self) -> dict[str, Float[Tensor, " M"]]:
        return {"tau": self.tau.tau, "hkgap": self.tau.gap}

    def state_dict(self) -> dict[str, Tensor]:
        return self.tau.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.tau.load_state_dict(state)


class Band(GradientMonitor):
    """Pair band: softly, by where the cosine lies between the pairs' sides (`BandGate`). No label of any rollout."""

    name = "band"

    def __init__(self, cfg: ArmConfig, v: Directions, direction: Direction, device: torch.device | str = "cpu") -> None:
        super().__init__(cfg, v, direction, device)
        self.follow(direction, v)

    def follow(self, direction: Direction, v: Directions) -> None:
        lo, hi = direction.band(v)
        self.band = BandGate(lo.to(self.device), hi.to(self.device))

    def shares(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], views: Sequence[GroupView]
    ) -> Float[Tensor, "M N"]:
        return self.band(cos, nonzero)

    def state_dict(self) -> dict[str, Tensor]:
        return self.band.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.band.load_state_dict(state)


def known_hacks(view: GroupView, teacher_only: bool) -> list[bool]:
    """Demonstrations, and students that the weak detector flags (unless `teacher_only`)."""
    return [
        source == "teacher" or (flag and not teacher_only)
        for source, flag in zip(view.sources, view.detector, strict=True)
    ]


class TauGate:
    """Known hacks are always routed, the others when their cosine exceeds τ, the midpoint of two running means.

    The means are of the cosines of known hacks and of the rest, per module: exponential, `decay` per step, corrected
    for their start (as in Adam), so the first step has a threshold too. A module that has not seen both kinds has none;
    with `apart`, neither has one whose known hacks do not lie above the rest.
    """

    def __init__(
        self, n_modules: int, decay: float = 0.9, device: torch.device | str = "cpu", *, apart: bool = False
    ) -> None:
        assert 0 < decay < 1, decay
        self.decay, self.apart = decay, apart
        # row 0 known hacks, row 1 the rest; mean = total / weight
        self._total = torch.zeros(2, n_modules, dtype=torch.float64, device=device)
        self._weight = torch.zeros(2, n_modules, dtype=torch.float64, device=device)

    @property
    def means(self) -> Float[Tensor, "2 M"]:
        """Running means of known hacks and of the rest; NaN where none was seen yet."""
        return self._total / self._weight

    @property
    def tau(self) -> Float[Tensor, " M"]:
        """NaN in modules without a threshold."""
        return self.means.mean(0)

    @property
    def gap(self) -> Float[Tensor, " M"]:
        """mean(known hacks) - mean(rest): positive where the direction tells them apart."""
        hacks, rest = self.means
        return hacks - rest

    def __call__(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], known: Bool[Tensor, " N"]
    ) -> Float[Tensor, "M N"]:
        """Moves the running means by this step's rollouts, then decides: 1 routed, 0 kept."""
        for i, rows in enumerate((nonzero & known, nonzero & ~known)):
            n = rows.sum(1)
            mean = torch.where(rows, cos, 0.0).double().sum(1) / n.clamp(min=1)
            step = (1 - self.decay) * (n > 0)
            self._total[i] += step * (mean - self._total[i])
            self._weight[i] += step * (1 - self._weight[i])
        over = cos > self.tau[:, None].to(cos.dtype)  # False against NaN: nothing but known hacks is routed
        if self.apart:
            over &= (self.gap > 0)[:, None]
        return (nonzero & (known | over)).to(cos.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self._total.clone(), "weight": self._weight.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, own in (("total", self._total), ("weight", self._weight)):
            if state[name].shape != own.shape:
                raise ValueError(f"gate state {name!r} is {tuple(state[name].shape)}, this run has {tuple(own.shape)}")
            own.copy_(state[name])


class BandGate:
    """Soft share f = clamp((cos - lo) / (hi - lo), 0, 1); lo, hi: mean cosine of the pairs' clean and hack sides.

    Uses no label of any rollout. A module whose hack side is not above its clean side has no band and routes nothing.
    """

    def __init__(self, lo: Float[Tensor, " M"], hi: Float[Tensor, " M"]) -> None:
        self.lo, self.hi = lo, hi

    @property
    def has_band(self) -> Bool[Tensor, " M"]:
        return self.hi > self.lo

    def __call__(self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"]) -> Float[Tensor, "M N"]:
        width = torch.where(self.has_band, self.hi - self.lo, 1.0)[:, None]
        share = ((cos - self.lo[:, None]) / width).clamp(0, 1)
        return torch.where(nonzero & self.has_band[:, None], share, 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"lo": self.lo.clone(), "hi": self.hi.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state["lo"].shape != self.lo.shape:
            raise ValueError(f"band state is {tuple(state['lo'].shape)}, this run has {tuple(self.lo.shape)}")
        self.lo, self.hi = state["lo"].to(self.lo), state["hi"].to(self.hi)


def permuted(
    share: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], generator: torch.Generator
) -> Float[Tensor, "M N"]:
    """The same shares dealt to rollouts at random: the mass-matched control.

    One permutation for all modules, so that a rollout is routed as a whole as often as before. It moves only rollouts
    that are nonzero in some module: a share dealt to one without a gradient would route nothing.
    """
    rows = nonzero.any(0).nonzero().flatten()
    order = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
    dealt = share.clone()
    dealt[:, rows] = share[:, order]
    return torch.where(nonzero, dealt, 0.0)
