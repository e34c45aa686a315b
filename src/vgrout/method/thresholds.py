"""The thresholds of gates: per module, the share of each rollout's gradient that is flagged.

M modules, N rollouts of one step. `cos` holds g_b · v / ‖g_b‖, `nonzero` marks rollouts with a gradient (the rest have
no cosine and are flagged nowhere). They see cosines and known hacks only.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

DECAY = 0.9  # of the running means of a τ gate, per step


class TauGate:
    """Known hacks are always routed, the others when their cosine exceeds τ, the midpoint of two running means.

    The means are of the cosines of known hacks and of the rest, per module: exponential, DECAY per step, corrected
    for their start (as in Adam), so the first step has a threshold too. A module that has not seen both kinds has none,
    or, with `absent_is_zero`, one for which the mean of what it has not seen counts as 0; with `apart`, neither has one
    whose known hacks do not lie above the rest.
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
    def tau(self) -> Float[Tensor, " M"]:
        """NaN in modules without a threshold."""
        if not self.absent_is_zero:
            return self.means.mean(0)
        seen_any = (self._weight > 0).any(0)
        midpoint = self.means.nan_to_num(nan=0.0).mean(0)
        return torch.where(seen_any, midpoint, torch.nan)

    @property
    def gap(self) -> Float[Tensor, " M"]:
        """mean(known hacks) - mean(rest): positive where the direction tells them apart."""
        hacks, rest = self.means
        return hacks - rest

    def __call__(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], known: Bool[Tensor, " N"]
    ) -> Float[Tensor, "M N"]:
        """Moves the running means by this step's rollouts, then decides: 1 routed, 0 kept. cos: with v, in rows that
        have a gradient. known: known hacks."""
        self._follow(0, cos, nonzero & known)
        self._follow(1, cos, nonzero & ~known)
        # False against NaN: nothing but known hacks is routed
        over = cos > self.tau[:, None].to(cos.dtype)
        if self.apart:
            over &= (self.gap > 0)[:, None]
        routed = nonzero & (known | over)
        return routed.to(cos.dtype)

    def _follow(self, kind: int, cos: Float[Tensor, "M N"], rows: Bool[Tensor, "M N"]) -> None:
        """Move the running means of one kind, 0 or 1, by the cosines of these rows."""
        n = rows.sum(1)
        mean = torch.where(rows, cos, 0.0).double().sum(1) / n.clamp(min=1)
        step = (1 - DECAY) * (n > 0)
        self._total[kind] += step * (mean - self._total[kind])
        self._weight[kind] += step * (1 - self._weight[kind])

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self._total.clone(), "weight": self._weight.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError where `state` has other modules, KeyError where it is another monitor's."""
        self._total.copy_(state["total"])
        self._weight.copy_(state["weight"])


class BandGate:
    """Soft share f = clamp((cos - lo) / (hi - lo), 0, 1); lo, hi: mean cosine of the pairs' clean and hack sides.

    Uses no label of any rollout. A module whose hack side is not above its clean side has no band and routes nothing.
    """

    def __init__(self, lo: Float[Tensor, " M"], hi: Float[Tensor, " M"]) -> None:
        self.lo = lo
        self.hi = hi

    @property
    def has_band(self) -> Bool[Tensor, " M"]:
        return self.hi > self.lo

    def __call__(
        self,
        cos: Float[Tensor, "M N"],
        nonzero: Bool[Tensor, "M N"],
        known: Bool[Tensor, " N"] | None = None,
    ) -> Float[Tensor, "M N"]:
        """The share of each row, from 0 to 1."""
        width = torch.where(self.has_band, self.hi - self.lo, 1.0)[:, None]
        share = ((cos - self.lo[:, None]) / width).clamp(0, 1)
        return torch.where(nonzero & self.has_band[:, None], share, 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"lo": self.lo.clone(), "hi": self.hi.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.lo.copy_(state["lo"])
        self.hi.copy_(state["hi"])
