"""A quarantine of its own parameters: matrices of rank R beside the frozen ones (LoRA, arXiv 2106.09685).

W' = W + … + B (A₀ + A), with A₀ fixed, drawn from a seed and not stored; A and B begin at 0 and are the part of δS_hack
that lies behind the singular values of all modules. At A = B = 0 nothing is added, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

SUFFIX = ".lora"  # behind a module's name: its matrices, as a module of their own


@dataclass(frozen=True, slots=True)
class LowRank:
    """One module's matrices. `span`: their place in the flat vectors, B [d_out, R] first, then A [R, d_in]."""

    name: str
    A0: Float[Tensor, "rank d_in"]
    d_out: int
    span: slice

    @classmethod
    def drawn(cls, name: str, shape: tuple[int, int], rank: int, lo: int, like: Tensor, seed: int) -> "LowRank":
        """A₀ ~ N(0, 1/d_in), so that A₀ x has about x's length a row. like: its dtype and device."""
        d_out, d_in = shape
        noise = torch.randn(rank, d_in, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        A0 = (noise / d_in**0.5).to(like)
        return cls(name + SUFFIX, A0, d_out, slice(lo, lo + rank * (d_out + d_in)))

    def matrices(self, δ: Float[Tensor, " R"]) -> tuple[Float[Tensor, "d_out rank"], Float[Tensor, "rank d_in"]]:
        """B and A₀ + A."""
        rank, d_in = self.A0.shape
        part = δ[self.span]
        cut = self.d_out * rank
        return part[:cut].view(self.d_out, rank), self.A0 + part[cut:].view(rank, d_in)

    def product(self, δ: Float[Tensor, " R"]) -> Float[Tensor, "d_out d_in"]:
        """B (A₀ + A)."""
        B, A = self.matrices(δ)
        return B @ A

    def gradient(
        self, δ: Float[Tensor, " R"], x: Float[Tensor, "t d_in"], dy: Float[Tensor, "t d_out"]
    ) -> Float[Tensor, " n"]:
        """∂L/∂B = Σ_t dy_t ((A₀ + A) x_t)ᵀ and ∂L/∂A = Σ_t (Bᵀ dy_t) x_tᵀ, flat as in `span`."""
        B, A = (m.to(x.dtype) for m in self.matrices(δ))
        dB = dy.mT @ (x @ A.mT)
        dA = (dy @ B).mT @ x
        return torch.cat((dB.flatten(), dA.flatten())).to(δ.dtype)


def low_rank(shapes: Sequence[tuple[str, tuple[int, int]]], rank: int, lo: int, like: Tensor) -> dict[str, LowRank]:
    """Matrices for modules of these names and shapes (d_out, d_in), from place `lo` of the vectors on."""
    out: dict[str, LowRank] = {}
    for i, (name, shape) in enumerate(shapes):
        out[name] = LowRank.drawn(name, shape, rank, lo, like, seed=i)
        lo = out[name].span.stop
    return out
