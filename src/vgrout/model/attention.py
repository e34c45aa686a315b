"""Attention of packed sequences, in which rows lie one after the other without padding.

A packed sequence is cut into runs of queries. Each run attends, causally, to a run of keys that
ends at the same token: to its own tokens, or also to the tokens that lead to it. `runs_of` chooses
between two implementations of the same function: torch's varlen kernel where the device has it,
otherwise torch's SDPA on padded runs. On a CPU in half precision the
backward pass is our own.

`packed_forward` runs a transformers model with this attention, through the interface that the
library has for attention functions of others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel

ATTENTION = "vgrout_packed"  # our name in transformers' list of attention functions

# Attention of a packed sequence: (q [N, H, D], k [M, K, D], v [M, K, D], scale) → [N, H, D]
Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def uploaded(
    values: Sequence[object],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of these numbers on `device`, copied without making the host wait.

    A copy from pageable memory to a GPU would block the host until the GPU is done.
    """
    x = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x


# ── kernels


def kernel_name(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel of the update's attention: "varlen_attn" or "sdpa"."""
    # flash-attention 2, which torch has under this name, begins with sm_80 and has no other dtypes
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa"
    return "varlen_attn" if torch.cuda.get_device_capability()[0] >= 8 else "sdpa"


def varlen_kernel() -> Callable[..., Any]:
    """torch's attention of runs without padding, mask or copies of keys for grouped queries."""
    from torch.nn.attention.varlen import varlen_attn  # for a GPU alone

    # the window: causal, aligned at each run's end
    return partial(varlen_attn, window_size=(-1, 0), enable_gqa=True)


# ── runs of queries and keys


@dataclass(frozen=True, slots=True)
class _VarlenRuns:
    """n runs of queries, each against a run of keys that ends where it ends, by a varlen kernel."""

    queries: Int[Tensor, " ends"]  # int32: 0, then the cumulated lengths of the n runs
    keys: Int[Tensor, " ends"]
    longest_query: int
    longest_key: int
    # the keys' tokens in the packed sequence; None: the queries' own
    take: Int[Tensor, " k"] | None

    @staticmethod
    def of(
        lengths: Sequence[int],
        paths: Sequence[list[int]] | None,
        device: torch.device,
    ) -> "Runs":
        """Upload the runs' ends; arguments as in `runs_of`."""
        key_lengths = lengths
        take = None
        if paths is not None:
            key_lengths = list(map(len, paths))
            take = uploaded(list(chain(*paths)), device)
        return _VarlenRuns(
            queries=_cumulated(lengths, device),
            keys=_cumulated(key_lengths, device),
            longest_query=max(lengths),
            longest_key=max(key_lengths),
            take=take,
        )

    def attend(
        self,
        q: Float[Tensor, "t H D"],
        k: Float[Tensor, "N K D"],
        v: Float[Tensor, "N K D"],
        scale: float | None,
    ) -> Float[Tensor, "t H D"]:
        """Attention of the runs' queries; k and v are those of the whole packed sequence."""
        if self.take is None:
            return self._kernel(q, k, v, scale)
        # Every branch has its own copy of the keys and values that lead to it. Backward makes the
        # copies again, so that only one layer's exist at a time. Merging prompt and answer by their
        # log-sum-exp would need no copies, but varlen_attn has no gradient of it.
        key_copies = _Gather.apply(k, self.take)
        value_copies = _Gather.apply(v, self.take)
        originals = {_storage(key_copies): k.detach(), _storage(value_copies): v.detach()}
        with _copied_again(self.take, originals):
            return self._kernel(q, key_copies, value_copies, scale)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return varlen_kernel()(
            q,
            k,
            v,
            self.queries,
            self.keys,
            self.longest_query,
            self.longest_key,
            scale=scale,
        )


def _cumulated(lengths: Sequence[int], device: torch.device) -> Int[Tensor, " ends"]:
    return uploaded(list(accumulate(lengths, initial=0)), device, torch.int32)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class _Copy:
    """What backward makes a saved copy from again: x, and the view of x[take] that was saved."""

    x: Float[Tensor, "N K D"]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _copied_again(
    take: Int[Tensor, " k"],
    originals: dict[int, Float[Tensor, "N K D"]],
) -> saved_tensors_hooks:
    """Autograd saves x in place of x[take], and indexes again in the backward pass.

    originals: storage of x[take] → x.
    """

    def pack(saved: Tensor) -> Tensor | _Copy:
        x = originals.get(_storage(saved))
        if x is None:
            return saved
        return _Copy(x, saved.shape, saved.stride(), int(saved.storage_offset()))

    def unpack(packed: Tensor | _Copy) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        copy = packed.x.index_select(0, take)
        return copy.as_strided(packed.shape, packed.stride, packed.offset)

    return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True, slots=True)
class _PaddedRuns:
    """The same by SDPA, with runs of queries and of keys padded on the right.

    The result of a padded query is not read, and a padded key is later than any query, so neither
    has a gradient.
    """

    queries: Int[Tensor, "n q"]  # tokens, 0 on padding
    keys: Int[Tensor, "n k"]
    back: Int[Tensor, " t"]  # place of each query in `queries`, flattened
    bias: Float[Tensor, "n 1 q k"] | None  # 0 or −inf; None: causal, the keys are the queries' own

    @staticmethod
    def of(
        lengths: Sequence[int],
        paths: Sequence[list[int]] | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "Runs":
        """Index tensors and mask of the padded runs; arguments as in `runs_of`."""
        length = torch.tensor(lengths)[:, None]
        first = length.cumsum(0) - length  # each run's first query in the packed sequence
        steps = torch.arange(max(lengths))
        is_query = steps < length
        queries = torch.where(is_query, first + steps, 0)
        back = is_query.flatten().nonzero().squeeze(1)
        if paths is None:
            keys = queries
            keys_before = torch.zeros_like(length)  # keys that even the first query sees
        else:
            keys = pad_sequence([torch.tensor(path) for path in paths], batch_first=True)
            keys_before = torch.tensor(list(map(len, paths)))[:, None] - length
        bias = None
        if paths is not None or _is_half_on_cpu(device, dtype):
            later = torch.arange(keys.shape[1]) > (keys_before + steps)[:, None, :, None]
            bias = torch.zeros(later.shape, dtype=dtype).masked_fill(later, -torch.inf).to(device)
        return _PaddedRuns(queries.to(device), keys.to(device), back.to(device), bias)

    def attend(
        self,
        q: Float[Tensor, "t H D"],
        k: Float[Tensor, "N K D"],
        v: Float[Tensor, "N K D"],
        scale: float | None,
    ) -> Float[Tensor, "t H D"]:
        """Attention of the runs' queries; k and v are those of the whole packed sequence."""
        q, k, v = _padded(q, self.queries), _padded(k, self.keys), _padded(v, self.keys)
        if _is_half_on_cpu(q.device, q.dtype):
            y = _HalfPrecisionAttention.apply(q, k, v, self.bias, scale)
        else:
            y = self._sdpa(q, k, v, scale)
        return _Gather.apply(y.transpose(1, 2).flatten(0, 1), self.back)

    def _sdpa(
        self,
        q: Float[Tensor, "n H q D"],
        k: Float[Tensor, "n K k D"],
        v: Float[Tensor, "n K k D"],
        scale: float | None,
    ) -> Float[Tensor, "n H q D"]:
        group = q.shape[1] // k.shape[1]  # queries of a key/value head
        # no fused kernel of CUDA takes a mask together with grouped queries
        if self.bias is not None and group > 1 and q.device.type != "cpu":
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            group = 1
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self.bias,
            is_causal=self.bias is None,
            scale=scale,
            enable_gqa=group > 1,
        )


def _is_half_on_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `_HalfPrecisionAttention` computes the attention, which needs a mask as a bias."""
    return device.type == "cpu" and dtype.itemsize < 4


def _padded(x: Float[Tensor, "N h D"], at: Int[Tensor, "n L"]) -> Float[Tensor, "n h L D"]:
    """x at these tokens, in the order of dimensions that SDPA expects."""
    return _Gather.apply(x, at.flatten()).unflatten(0, at.shape).transpose(1, 2)


Runs = _VarlenRuns | _PaddedRuns


def runs_of(
    lengths: Sequence[int],
    paths: Sequence[list[int]] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Runs:
    """Runs of queries with these lengths, in the order of the packed sequence.

    paths: each run's keys, as tokens of the packed sequence: those that lead to the run, and its
        own. None: a run attends to its own tokens alone.
    """
    if kernel_name(device, dtype) == "varlen_attn":
        return _VarlenRuns.of(lengths, paths, device)
    return _PaddedRuns.of(lengths, paths, device, dtype)


class _HalfPrecisionAttention(torch.autograd.Function):
    """Attention in half precision on a CPU, with a backward four times as fast as SDPA's.

    Forward is SDPA's kernel; backward is products in this dtype. It computes the attention weights
    again from rounded scores: gradients in bf16 are within 0.8 % of exact ones, where those of
    SDPA's kernel are within 0.5 %.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "n H q D"],
        k: Float[Tensor, "n K k D"],
        v: Float[Tensor, "n K k D"],
        bias: Float[Tensor, "n 1 q k"],
        scale: float | None,
    ) -> Float[Tensor, "n H q D"]:
        group = q.shape[1] // k.shape[1]
        # the queries of a key/value head become its rows
        rows = q.unflatten(1, (-1, group)).flatten(2, 3)
        bias = bias.repeat(1, 1, group, 1)
        ctx.scale = q.shape[-1] ** -0.5 if scale is None else scale
        y = scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=ctx.scale)
        ctx.save_for_backward(rows, k, v, bias, y)
        return y.view_as(q)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, y = ctx.saved_tensors
        dy = dys[0].reshape(q.shape)
        q = q * ctx.scale
        weights = torch.softmax((q @ k.mT).add_(bias), -1)
        dscores = (dy @ v.mT).sub_((dy * y).sum(-1, keepdim=True)).mul_(weights)
        dq = (dscores @ k).mul_(ctx.scale).view_as(dys[0])
        dk = dscores.mT @ q
        dv = weights.mT @ dy
        return dq, dk, dv, None, None


class _Gather(torch.autograd.Function):
    """x[at], with a backward by scatter_add.

    On a CPU that takes a tenth of the time of autograd's own index_add.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "n H D"],
        at: Int[Tensor, " m"],
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


# ── a packed sequence as a whole


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention of a packed sequence: first its roots, then its branches.

    Roots are complete rows, which attend to their own tokens. A branch attends to the tokens that
    lead to it, and to its own.
    """

    root_tokens: int  # how many of the sequence's tokens, the first ones, belong to roots
    roots: Runs | None
    branches: Runs | None

    def attend(
        self,
        q: Float[Tensor, "N H D"],
        k: Float[Tensor, "M K D"],
        v: Float[Tensor, "M K D"],
        scale: float | None,
    ) -> Float[Tensor, "N H D"]:
        """Attention in one layer. k and v may begin with copies that have no query here."""
        # The gradient of a slice is a tensor of zeros and a copy, of one that is all of it too.
        if self.roots is None:
            assert self.branches is not None, "an empty sequence"
            return self.branches.attend(q, k, v, scale)
        if self.branches is None:
            return self.roots.attend(q, k, v, scale)
        n = self.root_tokens
        of_roots = self.roots.attend(q[:n], k[:n], v[:n], scale)
        of_branches = self.branches.attend(q[n:], k, v, scale)
        return torch.cat([of_roots, of_branches])


def _attention(
    _module: torch.nn.Module,
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 K N D"],
    value: Float[Tensor, "1 K N D"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_attend: Attend | None = None,
    **_: object,
) -> tuple[Float[Tensor, "1 N H D"], None]:
    """The attention function that a transformers model calls in each layer."""
    assert packed_attend is not None, (
        "the model does not hand its keyword arguments on to attention"
    )
    assert attention_mask is None, "a packed sequence has no attention mask"
    # squeeze, not [0]: the gradient of an index fills a tensor of zeros
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return packed_attend(q, k, v, scaling).unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)


def packed_forward(
    model: PreTrainedModel,
    core: torch.nn.Module,
    ids: Int[Tensor, "1 N"],
    positions: Int[Tensor, "1 N"],
    attend: Attend,
) -> Float[Tensor, "1 N D"]:
    """The backbone's output on a packed sequence, with `attend` in place of its attention.

    core: the model without its head.
    """
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        return core(
            input_ids=ids, position_ids=positions, use_cache=False, packed_attend=attend
        ).last_hidden_state
    finally:
        config._attn_implementation = before
