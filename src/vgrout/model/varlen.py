"""Attention over token runs of different lengths without padding: flash-attention 2's varlen kernel, where it is there.

Elsewhere packing.py pads the runs and calls torch's SDPA; both are the same function of the same tokens.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

# (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=, causal=) → like q
Kernel = Callable[..., Tensor]


def flash_is_here(device: torch.device, dtype: torch.dtype) -> bool:
    """flash-attention 2 is for CUDA in half precision, where it is installed (extra `gpu`)."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and importlib.util.find_spec("flash_attn") is not None


def flash_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Its varlen function; None where it is not."""
    if not flash_is_here(device, dtype):
        return None
    return cast("Kernel", importlib.import_module("flash_attn").flash_attn_varlen_func)


@dataclass(frozen=True, slots=True)
class Runs:
    """n runs of queries, each against a run of keys that ends where it ends (causal, aligned at the end)."""

    queries: Int[Tensor, " ends"]  # int32: 0, then the cumulated lengths of the n runs
    keys: Int[Tensor, " ends"]
    n: int  # queries in all; not read off the device in every layer
    longest_query: int
    longest_key: int
    take: Int[Tensor, " k"] | None  # the keys' tokens in the packed sequence; None: the queries' own

    @staticmethod
    def of(queries: Sequence[int], keys: Sequence[int], take: Tensor | None, device: torch.device) -> "Runs":
        def cumulated(lengths: Sequence[int]) -> Tensor:
            return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)

        return Runs(cumulated(queries), cumulated(keys), sum(queries), max(queries), max(keys), take)

    def attend(
        self,
        kernel: Kernel,
        q: Float[Tensor, "t H D"],
        k: Float[Tensor, "N K D"],
        v: Float[Tensor, "N K D"],
        scale: float | None,
    ) -> Float[Tensor, "t H D"]:
        """q: the runs' queries; k, v: of the whole packed sequence if `take` says which of them, else the runs' own."""
        if self.take is not None:
            k, v = k.index_select(0, self.take), v.index_select(0, self.take)
        longest = self.longest_query, self.longest_key
        return kernel(q, k, v, self.queries, self.keys, *longest, softmax_scale=scale, causal=True)


@dataclass(frozen=True, slots=True)
class Varlen:
    """A packed sequence's attention: roots (complete rows, and shared prompts), then branches, whose keys are those of
    their root and their own."""

    kernel: Kernel
    roots: Runs
    branches: Runs | None

    @staticmethod
    def of(
        kernel: Kernel, roots: Sequence[int], branches: Sequence[int], parents: Sequence[int], device: torch.device
    ) -> "Varlen":
        """Lengths of roots and branches, and the root of each branch."""
        own = Runs.of(roots, roots, None, device)
        if not branches:
            return Varlen(kernel, own, None)
        lengths = [*roots, *branches]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        take = [
            torch.arange(starts[run], starts[run] + lengths[run], device=device)
            for b, root in enumerate(parents)
            for run in (root, len(roots) + b)
        ]
        keys = [roots[root] + branch for root, branch in zip(parents, branches, strict=True)]
        return Varlen(kernel, own, Runs.of(branches, keys, torch.cat(take), device))

    def attend(
        self,
        q: Float[Tensor, "N H D"],
        k: Float[Tensor, "N K D"],
        v: Float[Tensor, "N K D"],
        scale: float | None,
    ) -> Float[Tensor, "N H D"]:
        """Every token against what it may see of its own row."""
        n = self.roots.n
        y = self.roots.attend(self.kernel, q[:n], k[:n], v[:n], scale)
        if self.branches is None:
            return y
        return torch.cat([y, self.branches.attend(self.kernel, q[n:], k, v, scale)])
