"""Monitors that read gradients: per module, the share of each rollout's gradient that goes to the quarantine.

M modules, N rollouts of one step. `cos` holds g_b · v / ‖g_b‖, `nonzero` marks rollouts with a gradient (the rest have
no cosine and are routed nowhere). Gates see cosines and allowed flags only.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class TauGate:
    """Known hacks are always routed, the others when their cosine exceeds τ, the midpoint of two running means.

    The means are of the cosines of known hacks and of the rest, per module: exponential, `decay` per step, corrected
    for their start (as in Adam), so the first step has a threshold too. A module that has not seen both kinds has none.
    """

    def __init__(self, n_modules: int, decay: float = 0.9, device: torch.device | str = "cpu") -> None:
        assert 0 < decay < 1, decay
        self.decay = decay
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
        over = cos > self.tau[:, None].to(
            cos.dtype
        )  # False against NaN: no threshold, nothing but known hacks is routed
        return (nonzero & (known | over)).to(cos.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self._total.clone(), "weight": self._weight.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
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

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
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
