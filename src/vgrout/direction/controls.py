"""Control directions, which a real one must beat, and how far each coincides with it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vgrout.rng import torch_stream
from vgrout.tensor_types import Directions

CONTROL_SEEDS = (41, 42, 43)


@dataclass(frozen=True, slots=True)
class CosineToReal:
    """|cos| of a control's rows with the real ones, module by module: a contaminated control proves little."""

    # |cos|; of several rows ‖V Wᵀ‖_F / √k, the root mean square over the real ones
    cos: dict[str, float]
    chance: float  # root mean square that random rows in the control's place would read

    def quantile(self, q: float) -> float:
        """Quantile of |cos| over modules."""
        return torch.quantile(torch.tensor(list(self.cos.values()), dtype=torch.float64), q).item()

    @property
    def rms(self) -> float:
        """Root mean square of |cos| over modules."""
        return math.sqrt(_mean(c * c for c in self.cos.values()))

    def as_json(self) -> dict[str, Any]:
        """Median, tail, chance, and every module's value."""
        return {
            "median": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "max": self.quantile(1.0),
            "rms": self.rms,
            "chance_rms": self.chance,
            "modules": self.cos,
        }

    def line(self) -> str:
        """For the log."""
        return (
            f"|cos| with the real direction over {len(self.cos)} modules: median {self.quantile(0.5):.3f}, "
            f"95 % {self.quantile(0.95):.3f}, max {self.quantile(1.0):.3f}; "
            f"root mean square {self.rms:.3f}, by chance {self.chance:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the direction of an intervention or a monitor comes from, for run.json."""

    pairs: str  # source of the pairs; the true ones' under Haar, whose shapes and signs they give
    pairs_sha256: str
    modules: int
    axes: int
    cosine_to_real: CosineToReal | None  # of a control's direction; None where it *is* the real one

    def as_json(self) -> dict[str, Any]:
        return {
            "pairs": self.pairs,
            "pairs_sha256": self.pairs_sha256,
            "modules": self.modules,
            "axes": self.axes,
            "cos_with_real": self.cosine_to_real.as_json() if self.cosine_to_real else None,
        }


def cosine_to_real(control: Directions, real: Directions) -> CosineToReal | None:
    """|cos| of a control with the real direction; None where the two have no module in common."""
    cos, expected = {}, []
    for m in real:
        if m in control:
            V, W = control[m].cpu(), real[m].cpu()
            cos[m] = ((V @ W.T).norm() / math.sqrt(len(W))).item()
            expected.append(len(V) / V.shape[1])
    return CosineToReal(cos, math.sqrt(_mean(expected))) if cos else None


def haar_like(V: Directions, seed: int) -> Directions:
    """Random orthonormal rows of the same shapes, Haar-distributed; each module's draw depends on its name alone."""
    drawn = {}
    for m, rows in V.items():
        k, r = rows.shape
        normal = torch.randn(r, k, generator=torch_stream(seed, "haar", m), dtype=torch.float64)
        Q, R = torch.linalg.qr(normal)
        # the sign makes QR's result unique, hence Haar
        drawn[m] = (Q * R.diagonal().sign()).T.to(rows).contiguous()
    return drawn


def overlap(new: Directions, old: Directions) -> float | None:
    """Mean over old's modules of ‖V_new V_oldᵀ‖²_F / k_old: 1 the same span, k_new/r by chance, 0 for a lost module."""
    if not old:
        return None
    shared = [((new[m] @ V.T) ** 2).sum().double() / len(V) for m, V in old.items() if m in new]
    return float(sum(shared)) / len(old)  # one transfer from the device for all modules


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
