"""Control directions, which a real direction must beat, and how far each coincides with it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vgrout.ground.rng import torch_stream
from vgrout.ground.tensor_types import Directions


@dataclass(frozen=True, slots=True)
class CosineToReal:
    """|cos| of a control's rows with the real direction's, module by module.

    A control that coincides with the real direction proves little.
    """

    # |cos| by module; of several rows ‖V Wᵀ‖_F / √k, the root mean square over the real rows
    cos: dict[str, float]
    chance: float  # the root mean square that random rows in the control's place would have

    def quantile(self, q: float) -> float:
        """Quantile of |cos| over modules."""
        return torch.quantile(torch.tensor(list(self.cos.values()), dtype=torch.float64), q).item()

    @property
    def rms(self) -> float:
        """Root mean square of |cos| over modules."""
        return math.sqrt(_mean(c * c for c in self.cos.values()))

    def as_json(self) -> dict[str, object]:
        """Median, tail, chance level, and every module's value."""
        return {
            "median": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "max": self.quantile(1.0),
            "rms": self.rms,
            "chance_rms": self.chance,
            "modules": self.cos,
        }


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the direction of an intervention or a monitor comes from, for run.json."""

    # Source of the pairs. A Haar direction has that of the real pairs, from which its shapes and
    # signs come.
    pairs: str
    pairs_sha256: str
    modules: int
    axes: int
    cosine_to_real: CosineToReal | None  # of a control; None for the real direction itself

    def as_json(self) -> dict[str, object]:
        return {
            "pairs": self.pairs,
            "pairs_sha256": self.pairs_sha256,
            "modules": self.modules,
            "axes": self.axes,
            "cos_with_real": self.cosine_to_real.as_json() if self.cosine_to_real else None,
        }


def cosine_to_real(control: Directions, real: Directions) -> CosineToReal | None:
    """|cos| of a control with the real direction; None if they have no module in common."""
    cos: dict[str, float] = {}
    expected: list[float] = []  # mean square of the cosine with random rows
    for module in real:
        if module not in control:
            continue
        V, W = control[module].cpu(), real[module].cpu()
        cos[module] = ((V @ W.T).norm() / math.sqrt(len(W))).item()
        expected.append(len(V) / V.shape[1])
    if not cos:
        return None
    return CosineToReal(cos, math.sqrt(_mean(expected)))


def haar_like(V: Directions, seed: int) -> Directions:
    """Random orthonormal rows of the same shapes as V's, Haar-distributed.

    The draw of a module depends on the seed and its name alone.
    """
    drawn: Directions = {}
    for module, rows in V.items():
        k, r = rows.shape
        stream = torch_stream(seed, "haar", module)
        normal = torch.randn(r, k, generator=stream, dtype=torch.float64)
        Q, R = torch.linalg.qr(normal)
        # The result of QR is unique, and so Haar-distributed, only with the signs of R's diagonal.
        drawn[module] = (Q * R.diagonal().sign()).T.to(rows).contiguous()
    return drawn


def overlap(new: Directions, old: Directions) -> float | None:
    """Mean over old's modules of ‖V_new V_oldᵀ‖²_F / k_old; None if old has none.

    It is 1 for the same span, k_new/r by chance, and 0 for a module that new lacks.
    """
    if not old:
        return None
    shared: list[Tensor] = []
    for module, V in old.items():
        if module in new:
            shared.append(((new[module] @ V.T) ** 2).sum().double() / len(V))
    return float(sum(shared)) / len(old)  # one transfer from the device for all modules


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
