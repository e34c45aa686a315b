"""What a Llama-like block does element by element, as one GPU kernel each, forward and backward.

Transformers computes an RMS norm in eight operations and a rotary embedding in ten, each of which
reads and writes all activations once more. Here an update has three functions and their gradients
in closed form, and torch.compile makes a kernel of each of the six: the norm; a head's norm with its
rotary embedding; and silu(gate) · up. Gradients go to activations alone: the weights of norms are
frozen.

A decoding step needs no gradients, and has three more functions that do more at once.

`vgrout.model.trials` tries the kernels on a model before its packed forwards and its decoder use
them. On a CPU the products are what takes the time, and transformers' own operations stay.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from vgrout.model.autograd import Context
from vgrout.model.source import LLAMAS
from vgrout.tensor_types import at_least_fp32

Rows = Float[Tensor, "*n D"]
Heads = Float[Tensor, "N H D"]
Table = Float[Tensor, "N D"]  # cos or sin at each token's position; in decoding sin is signed

T = TypeVar("T")

KERNEL_CACHE = Path("out/kernels")  # compiled: half a minute a process without it

# Models whose packed forwards and decoding steps use these kernels.
_fused: WeakSet[nn.Module] = WeakSet()


# ── the functions, as formulas


def norm(x: Rows, weight: Float[Tensor, " D"], ε: float) -> Rows:
    """RMS norm of the last dimension."""
    wide = at_least_fp32(x)
    return (wide * _inverse_rms(wide, ε) * at_least_fp32(weight)).to(x.dtype)


def norm_backward(dy: Rows, x: Rows, weight: Float[Tensor, " D"], ε: float) -> Rows:
    """The gradient of `norm` on x."""
    wide = at_least_fp32(x)
    return _norm_gradient(at_least_fp32(dy), wide, at_least_fp32(weight), _inverse_rms(wide, ε)).to(
        x.dtype
    )


def _inverse_rms(x: Rows, ε: float) -> Float[Tensor, "*n 1"]:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + ε)


def _norm_gradient(dy: Rows, x: Rows, weight: Float[Tensor, " D"], inverse: Tensor) -> Rows:
    normed = x * inverse
    dnormed = dy * weight
    along = (dnormed * normed).mean(-1, keepdim=True)
    return inverse * (dnormed - normed * along)


def rotate(x: Heads, cos: Table, sin: Table, weight: Tensor | None, ε: float) -> Heads:
    """The rotary embedding of x, or of its norm where there is a weight."""
    y = at_least_fp32(x)
    if weight is not None:
        y = y * _inverse_rms(y, ε) * at_least_fp32(weight)
    first, second = y.chunk(2, -1)
    cos_first, cos_second = at_least_fp32(cos).unsqueeze(1).chunk(2, -1)
    sin_first, sin_second = at_least_fp32(sin).unsqueeze(1).chunk(2, -1)
    rotated = (first * cos_first - second * sin_first, second * cos_second + first * sin_second)
    return torch.cat(rotated, -1).to(x.dtype)


def rotate_backward(
    dy: Heads, x: Heads, cos: Table, sin: Table, weight: Tensor | None, ε: float
) -> Heads:
    """The gradient of `rotate` on x."""
    first, second = at_least_fp32(dy).chunk(2, -1)
    cos_first, cos_second = at_least_fp32(cos).unsqueeze(1).chunk(2, -1)
    sin_first, sin_second = at_least_fp32(sin).unsqueeze(1).chunk(2, -1)
    turned = (first * cos_first + second * sin_second, second * cos_second - first * sin_first)
    dx = torch.cat(turned, -1)
    if weight is not None:
        wide = at_least_fp32(x)
        dx = _norm_gradient(dx, wide, at_least_fp32(weight), _inverse_rms(wide, ε))
    return dx.to(x.dtype)


def gated(gate: Rows, up: Rows) -> Rows:
    """silu(gate) · up."""
    wide = at_least_fp32(gate)
    return (wide * wide.sigmoid() * at_least_fp32(up)).to(gate.dtype)


def gated_backward(dy: Rows, gate: Rows, up: Rows) -> tuple[Rows, Rows]:
    """The gradients of `gated` on both."""
    wide, dy = at_least_fp32(gate), at_least_fp32(dy)
    share = wide.sigmoid()
    dgate = dy * at_least_fp32(up) * share * (1 + wide * (1 - share))
    dup = dy * wide * share
    return dgate.to(gate.dtype), dup.to(up.dtype)


# ── of a decoding step


def norm_of_sum(x: Rows, y: Rows, weight: Float[Tensor, " D"], ε: float) -> tuple[Rows, Rows]:
    """x + y, and the norm of that: the residual stream, and what the next Linears read."""
    total = x + y
    return total, norm(total, weight, ε)


def rotated_heads(
    qkv: Float[Tensor, "N all D"],
    cos: Table,
    sin: Table,
    weight: Float[Tensor, "heads D"] | None,
    ε: float,
    kv_heads: int,
) -> Float[Tensor, "N all D"]:
    """Queries and keys after norm and rotary embedding, and the values as they are.

    All heads are computed alike, and those of values then put back: that is one kernel, where parts
    of different sizes would be three.

    qkv: the heads of queries, then `kv_heads` of keys and as many of values. sin: its first half is
    negative, so that the embedding is x · cos + (x, its halves swapped) · sin. weight: of the norms
    of queries, then of keys, where there are any.
    """
    heads, D = qkv.shape[1:]
    wide = at_least_fp32(qkv)
    y = wide
    if weight is not None:
        y = wide * _inverse_rms(wide, ε) * pad(at_least_fp32(weight), (0, 0, 0, kv_heads))
    swapped = y.roll(D // 2, -1)
    y = y * at_least_fp32(cos).unsqueeze(1) + swapped * at_least_fp32(sin).unsqueeze(1)
    is_value = torch.arange(heads, device=qkv.device).unsqueeze(1) >= heads - kv_heads
    return torch.where(is_value, wide, y).to(qkv.dtype)


def gated_halves(gate_up: Float[Tensor, "N both"]) -> Float[Tensor, "N half"]:
    """silu of the first half, times the second."""
    return gated(*gate_up.chunk(2, -1))


# ── as kernels


@cache
def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """The function as one kernel, which is made when it is first called, for any number of rows."""
    return torch.compile(function)


def kernel(function: Callable[..., T], *given: object) -> T:
    """Call the function as a kernel.

    Inputs are detached: whether one wants a gradient would be a reason to make another kernel.
    """
    plain = [x.detach() if isinstance(x, Tensor) else x for x in given]
    return compiled(function)(*plain)


# ── with their gradients


class _Norm(torch.autograd.Function):
    """`norm`; its weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Rows, weight: Tensor, ε: float) -> Rows:
        ctx.save_for_backward(x, weight)
        ctx.ε = ε
        return kernel(norm, x, weight, ε)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return kernel(norm_backward, dys[0], x, weight, ctx.ε), None, None


class _Rotate(torch.autograd.Function):
    """`rotate`; its weight is frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Heads, cos: Table, sin: Table, weight: Tensor | None, ε: float
    ) -> Heads:
        # Without a norm the gradient does not depend on x.
        ctx.save_for_backward(*(() if weight is None else (x, weight)), cos, sin)
        ctx.ε = ε
        return kernel(rotate, x, cos, sin, weight, ε)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        *of_norm, cos, sin = ctx.saved_tensors
        x, weight = of_norm or (dys[0], None)  # without a norm x is not read: any tensor will do
        dx = kernel(rotate_backward, dys[0], x, cos, sin, weight, ctx.ε)
        return dx, None, None, None, None


class _Gated(torch.autograd.Function):
    """`gated`."""

    @staticmethod
    def forward(ctx: Context, gate: Rows, up: Rows) -> Rows:
        ctx.save_for_backward(gate, up)
        return kernel(gated, gate, up)

    @staticmethod
    def backward(ctx: Context, *dys: Tensor) -> tuple[Tensor, Tensor]:
        return kernel(gated_backward, dys[0], *ctx.saved_tensors)


# ── in a model's blocks


def _norm_forward(module: Any, x: Rows) -> Rows:
    return _Norm.apply(x, module.weight, module.variance_epsilon)


def _mlp_forward(mlp: Any, x: Rows) -> Rows:
    return mlp.down_proj(_Gated.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def _attention_forward(
    attention: Any,
    hidden_states: Float[Tensor, "1 N d"],
    position_embeddings: tuple[Float[Tensor, "1 N D"], Float[Tensor, "1 N D"]],
    packed_attend: Callable[..., Heads],
    **_: object,
) -> tuple[Float[Tensor, "1 N d"], None]:
    """As transformers calls it in a packed forward.

    packed_attend: handed on by `packed_forward` (attention.py).
    """
    cos, sin = (table.squeeze(0) for table in position_embeddings)

    def heads(linear: nn.Module) -> Heads:
        return linear(hidden_states).view(len(cos), -1, attention.head_dim)

    of_q = _weight_and_ε(getattr(attention, "q_norm", None))
    of_k = _weight_and_ε(getattr(attention, "k_norm", None))
    q = _Rotate.apply(heads(attention.q_proj), cos, sin, *of_q)
    k = _Rotate.apply(heads(attention.k_proj), cos, sin, *of_k)
    y = packed_attend(q, k, heads(attention.v_proj), attention.scaling)
    return attention.o_proj(y.flatten(1).unsqueeze(0)), None


@contextmanager
def fused_blocks(model: PreTrainedModel, core: Any) -> Generator[None]:
    """Within the context the blocks of a model that `fuse` was called with use these kernels.

    Not where the weights of norms are trained. core: the model without its head.
    """
    if model not in _fused or core.norm.weight.requires_grad:
        yield
        return
    forwards: dict[nn.Module, Callable[..., object]] = {core.norm: _norm_forward}
    for block in core.layers:
        forwards[block.input_layernorm] = forwards[block.post_attention_layernorm] = _norm_forward
        forwards[block.self_attn] = _attention_forward
        forwards[block.mlp] = _mlp_forward
    for module, forward in forwards.items():
        vars(module)["forward"] = partial(forward, module)
    try:
        yield
    finally:
        for module in forwards:
            del vars(module)["forward"]


def is_fused(model: PreTrainedModel) -> bool:
    """Whether `fuse` was called with the model."""
    return model in _fused


def fusible(model: PreTrainedModel) -> bool:
    """Whether the model is of a kind whose blocks these are, on a device where they pay."""
    if model.device.type != "cuda" or type(model).__name__ not in LLAMAS:
        return False
    return model.config.hidden_act == "silu"


def kernels_agree(model: PreTrainedModel, core: Any) -> bool:
    """Make the kernels for this model's shapes; whether they compute what the formulas say.

    Two lengths, and the head counts of queries and of keys: torch then makes kernels for any. They
    are called as an update and a decoding step do; on a GPU the gradients' are called by autograd's
    own thread. core: the model without its head.

    Raises:
        Exception: whatever the compiler raises, where it is missing for example.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(KERNEL_CACHE.resolve()))
    noise = _noise_like(model)
    return _updates_agree(model, core, noise) and _decoding_agrees(model, core, noise)


def _noise_like(model: PreTrainedModel) -> Callable[..., Tensor]:
    """Draws random tensors of a shape, of the model's dtype and on its device."""
    draw = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(model.device, model.dtype)

    return noise


def _updates_agree(model: PreTrainedModel, core: Any, noise: Callable[..., Tensor]) -> bool:
    """`kernels_agree` of what an update calls."""
    config: object = model.config
    block = core.layers[0]
    D: int = block.self_attn.head_dim
    of_head = _weight_and_ε(getattr(block.self_attn, "q_norm", None))
    agree = True
    for n, heads in ((3, config.num_attention_heads), (5, config.num_key_value_heads)):
        # each of them a tensor of its own, as in an update: kernels are made anew for views
        hidden, q = noise(1, n, config.hidden_size), noise(n, heads, D)
        gate, up = noise(1, n, config.intermediate_size), noise(1, n, config.intermediate_size)
        tables = noise(n, D), noise(n, D)
        for apply, formula, inputs, others in (
            (_Norm.apply, norm, [hidden], _weight_and_ε(block.input_layernorm)),
            (_Rotate.apply, rotate, [q], (*tables, *of_head)),
            (_Gated.apply, gated, [gate, up], ()),
        ):
            got = _with_gradients(apply, inputs, others)
            want = _with_gradients(formula, inputs, others)
            agree = agree and all(starmap(_close, zip(got, want, strict=True)))
    return agree


@torch.no_grad()
def _decoding_agrees(model: PreTrainedModel, core: Any, noise: Callable[..., Tensor]) -> bool:
    """`kernels_agree` of what a decoding step calls.

    A step runs in inference mode, and its weights were made outside of it. A kernel would be made
    again where either is otherwise.
    """
    config: object = model.config
    block = core.layers[0]
    attention = block.self_attn
    D: int = attention.head_dim
    H: int = config.num_attention_heads
    K: int = config.num_key_value_heads
    of_heads, ε = None, 0.0
    if hasattr(attention, "q_norm"):
        weights = attention.q_norm.weight.expand(H, -1), attention.k_norm.weight.expand(K, -1)
        of_heads, ε = torch.cat(weights), attention.q_norm.variance_epsilon
    of_block = _weight_and_ε(block.input_layernorm)

    def agrees(n: int) -> bool:
        x, y = noise(n, config.hidden_size), noise(n, config.hidden_size)
        qkv, tables = noise(n, H + 2 * K, D), (noise(n, D), noise(n, D))
        gate_up = noise(n, 2 * config.intermediate_size)
        calls: list[tuple[Callable[..., object], tuple[object, ...]]] = [
            (norm, (x, *of_block)),
            (norm_of_sum, (x, y, *of_block)),
            (rotated_heads, (qkv, *tables, of_heads, ε, K)),
            (gated_halves, (gate_up,)),
        ]
        right = True
        for function, given in calls:
            got: Sequence[Tensor] = tree_leaves(kernel(function, *given))
            want: Sequence[Tensor] = tree_leaves(function(*given))
            right = right and all(starmap(_close, zip(got, want, strict=True)))
        return right

    with torch.inference_mode():
        return all([agrees(3), agrees(5)])


def _weight_and_ε(module: Any) -> tuple[Tensor | None, float]:
    """Of a norm; without one, those of no norm."""
    return (None, 0.0) if module is None else (module.weight, module.variance_epsilon)


@torch.enable_grad()
def _with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], others: Sequence[object]
) -> list[Tensor]:
    """The function's value, then its gradients on the inputs from one that is not constant."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves, *others)
    return [y.detach(), *torch.autograd.grad(y, leaves, inputs[0].flip(-1))]


def _close(got: Tensor, want: Tensor) -> bool:
    """Whether both differ by rounding alone."""
    allowed = 1e-5 if got.dtype.itemsize >= 4 else 2e-2
    return bool((got - want).float().norm() <= allowed * want.float().norm())


def fuse(model: PreTrainedModel, on: bool = True) -> None:
    """Let the model's packed forwards and decoding steps use these kernels, or no longer."""
    if on:
        _fused.add(model)
    else:
        _fused.discard(model)
