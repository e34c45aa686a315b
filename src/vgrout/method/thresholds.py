"""The thresholds of gates: they decide, per module, which share of each rollout's gradient is flagged.

They see cosines and known hacks only. Shapes: M modules, N rollouts of one step.

cos      [M, N]  g_b · v / ‖g_b‖
nonzero  [M, N]  where a rollout has a gradient; elsewhere it has no cosine, and is not flagged
known    [N]     known hacks
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

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
    band and flags nothing. No label of any rollout is used.
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
