"""Attention of an update: n runs of queries, each against a run of keys that ends where it ends.

By a varlen kernel of flash-attention or of torch where there is one, else with runs padded for torch's SDPA: the same
function. On a CPU in half precision its backward is our own.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, chain
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence


def uploaded(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of these numbers, for which the host does not wait: from pageable memory it would."""
    x = torch.tensor(values, dtype=dtype)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


# (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale) → like q; causal, aligned
# at each run's end
Kernel = Callable[..., Tensor]


def kernel_name(device: torch.device, dtype: torch.dtype) -> str:
    """Of the update's attention. The package flash-attn is used where it is installed: it is no condition of speed."""
    # flash-attention has no other
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa"
    if torch.cuda.get_device_capability()[0] < 8:  # it begins with sm_80
        return "sdpa"
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash_attn"
    with suppress(ImportError):  # of torch before 2.10
        from torch.nn.attention.varlen import varlen_attn

        if "enable_gqa" in signature(varlen_attn).parameters:  # of 2.13, not of 2.11
            return "varlen_attn"
    return "sdpa"


def varlen_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Attention of runs without padding, mask or copies of keys for grouped queries; None: SDPA."""
    name = kernel_name(device, dtype)
    if name == "flash_attn":
        kernel = importlib.import_module("flash_attn").flash_attn_varlen_func
        return lambda *runs: kernel(*runs[:-1], softmax_scale=runs[-1], causal=True)
    if name == "varlen_attn":
        from torch.nn.attention.varlen import varlen_attn

        return lambda *runs: cast(
            Tensor, varlen_attn(*runs[:-1], scale=runs[-1], window_size=(-1, 0), enable_gqa=True)
        )
    return None


@dataclass(frozen=True, slots=True)
class _VarlenRuns:
    """n runs of queries, each against a run of keys that ends where it ends (causal, aligned at the end)."""

    kernel: Kernel
    queries: Int[Tensor, " ends"]  # int32: 0, then the cumulated lengths of the n runs
    keys: Int[Tensor, " ends"]
    longest_query: int
    longest_key: int
    # the keys' tokens in the packed sequence; None: the queries' own
    take: Int[Tensor, " k"] | None

    @staticmethod
    def of(
        kernel: Kernel,
        lengths: Sequence[int],
        paths: Sequence[list[int]] | None,
        device: torch.device,
    ) -> "Runs":
        def cumulated(lengths: Sequence[int]) -> Tensor:
            return uploaded([*accumulate(lengths, initial=0)], device, torch.int32)

        keys = lengths if paths is None else [*map(len, paths)]
        take = None if paths is None else uploaded([*chain(*paths)], device)
        return _VarlenRuns(
            kernel, cumulated(lengths), cumulated(keys), max(lengths), max(keys), take
        )

    def attend(
        self,
        q: Float[Tensor, "t H D"],
        k: Float[Tensor, "N K D"],
        v: Float[Tensor, "N K D"],
        scale: float | None,
    ) -> Float[Tensor, "t H D"]:
        runs = self.queries, self.keys, self.longest_query, self.longest_key, scale
        if self.take is None:
            return self.kernel(q, k, v, *runs)
        # Each branch's copy of what leads to it is made again for backward, so that one layer's are
        # there at a time. Merging prompt and answer by their log-sum-exp would need none, but
        # varlen_attn has no gradient of it.
        copies = [_Gather.apply(x, self.take) for x in (k, v)]
        with _copied_again(
            self.take, dict(zip(map(_storage, copies), (k.detach(), v.detach()), strict=True))
        ):
            return self.kernel(q, *copies, *runs)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _copied_again(
    take: Int[Tensor, " k"], copies: dict[int, Float[Tensor, "N K D"]]
) -> saved_tensors_hooks:
    """Of x[take], autograd keeps x. copies: storage of x[take] → x."""

    def pack(t: Tensor) -> Any:
        x = copies.get(_storage(t))
        return t if x is None else (x, t.shape, t.stride(), t.storage_offset())

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        x, *view = kept
        return x.index_select(0, take).as_strided(*view)

    return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True, slots=True)
class _PaddedRuns:
    """The same, runs of queries and of keys padded on the right. A padded query's result is not read; a padded key is
    later than any query, so that neither has a gradient."""

    queries: Int[Tensor, "n q"]  # tokens, 0 on padding
    keys: Int[Tensor, "n k"]
    back: Int[Tensor, " t"]  # of each query in `queries`
    bias: Float[Tensor, "n 1 q k"] | None  # 0 or −inf; None: causal, the keys are the queries' own

    @staticmethod
    def of(
        lengths: Sequence[int],
        paths: Sequence[list[int]] | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "Runs":
        size = torch.tensor(lengths)[:, None]
        steps = torch.arange(max(lengths))
        queries = torch.where(steps < size, steps + size.cumsum(0) - size, 0)
        back = (steps < size).flatten().nonzero().squeeze(1)
        # keys that even the first query sees
        keys, bias, before = queries, None, torch.zeros_like(size)
        if paths is not None:
            before = torch.tensor([*map(len, paths)])[:, None] - size
            keys = pad_sequence([torch.tensor(path) for path in paths], batch_first=True)
        if paths is not None or (device.type == "cpu" and dtype.itemsize < 4):
            later = torch.arange(keys.shape[1]) > (before + steps)[:, None, :, None]
            bias = torch.zeros(later.shape, dtype=dtype).masked_fill(later, -torch.inf).to(device)
        return _PaddedRuns(queries.to(device), keys.to(device), back.to(device), bias)

    def attend(
        self,
        q: Float[Tensor, "t H D"],
        k: Float[Tensor, "N K D"],
        v: Float[Tensor, "N K D"],
        scale: float | None,
    ) -> Float[Tensor, "t H D"]:
        grouped = q.shape[1] // k.shape[1]
        q, k, v = (
            _Gather.apply(x, at.flatten()).unflatten(0, at.shape).transpose(1, 2)
            for x, at in ((q, self.queries), (k, self.keys), (v, self.keys))
        )
        if q.device.type == "cpu" and q.dtype.itemsize < 4:
            y = _SmallAttention.apply(q, k, v, self.bias, scale)
            return _Gather.apply(y.transpose(1, 2).flatten(0, 1), self.back)
        # no fused kernel of CUDA takes the pair
        if self.bias is not None and grouped > 1 and q.device.type != "cpu":
            k, v, grouped = k.repeat_interleave(grouped, 1), v.repeat_interleave(grouped, 1), 1
        how: dict[str, Any] = {
            "attn_mask": self.bias,
            "is_causal": self.bias is None,
            "scale": scale,
        }
        y = scaled_dot_product_attention(q, k, v, enable_gqa=grouped > 1, **how)
        return _Gather.apply(y.transpose(1, 2).flatten(0, 1), self.back)


Runs = _VarlenRuns | _PaddedRuns


def runs_of(
    lengths: Sequence[int],
    paths: Sequence[list[int]] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Runs:
    """Of queries, each run against its own keys, or against those that lead to it (`paths`)."""
    if (kernel := varlen_kernel(device, dtype)) is not None:
        return _VarlenRuns.of(kernel, lengths, paths, device)
    return _PaddedRuns.of(lengths, paths, device, dtype)


class _SmallAttention(torch.autograd.Function):
    """Attention in half precision on a CPU: forward by SDPA's kernel, backward by products of this dtype, in a quarter
    of the time of that kernel's. The weights are computed again from rounded scores: in bf16 gradients are within 0.8 %
    of exact ones, by the kernel within 0.5 %."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "n H q D"],
        k: Float[Tensor, "n K k D"],
        v: Float[Tensor, "n K k D"],
        bias: Float[Tensor, "n 1 q k"],
        scale: float | None,
    ) -> Float[Tensor, "n H q D"]:
        grouped = q.shape[1] // k.shape[1]  # the queries of a key/value head are its rows
        rows, bias = q.unflatten(1, (-1, grouped)).flatten(2, 3), bias.repeat(1, 1, grouped, 1)
        ctx.scale = q.shape[-1] ** -0.5 if scale is None else scale
        y = scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=ctx.scale)
        ctx.save_for_backward(rows, k, v, bias, y)
        return y.view_as(q)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, y = ctx.saved_tensors
        dy, q = dys[0].reshape(q.shape), q * ctx.scale
        weights = torch.softmax((q @ k.mT).add_(bias), -1)
        slope = (dy @ v.mT).sub_((dy * y).sum(-1, keepdim=True)).mul_(weights)
        return (
            (slope @ k).mul_(ctx.scale).view_as(dys[0]),
            slope.mT @ q,
            weights.mT @ dy,
            None,
            None,
        )


class _Gather(torch.autograd.Function):
    """x[at]. Backward adds up by scatter_add, which on a CPU takes a tenth of the time of autograd's own index_add."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "n H D"], at: Int[Tensor, " m"]
    ) -> Float[Tensor, "m H D"]:
        ctx.save_for_backward(at)
        ctx.shape = x.shape
        return x.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors
        dy = dys[0].flatten(1)
        dx = dy.new_zeros(ctx.shape[0], dy.shape[1])
        return dx.scatter_add_(0, at[:, None].expand_as(dy), dy).view(ctx.shape), None
