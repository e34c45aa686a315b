"""Parts of a Llama-like block, for one token of each slot.

Norms, and Linears that read the same input, by the products that a device is fast with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel

from vgrout.ground import ranks
from vgrout.ground.tensor_types import at_least_fp32


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm of the last dimension."""

    weight: Float[Tensor, "*h D"]  # one, or the query's and the key's stacked over heads
    eps: float
    scaled_weight: Float[Tensor, "*h D"]  # weight · √D, at least fp32

    @staticmethod
    def of(weight: Tensor, norm: Any) -> "Norm":
        """norm: the model's own, whose ε is taken."""
        wide = at_least_fp32(weight)
        return Norm(weight, norm.variance_epsilon, wide * weight.shape[-1] ** 0.5)

    def __call__(self, x: Float[Tensor, "n *h D"]) -> Float[Tensor, "n *h D"]:
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
            if self.weight.ndim == 1:
                return rms_norm(x, x.shape[-1:], self.weight, self.eps)
            return rms_norm(x, x.shape[-1:], None, self.eps) * self.weight
        # On a CPU torch's rms_norm is six operations without a kernel of its own; these take half
        # the time.
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().add_(x.shape[-1] * self.eps).rsqrt_()
        return (wide * inverse * self.scaled_weight).to(x.dtype)


# One product's weight and bias. `PlainLinears` holds the weight as [d_in, d_out], `PrepackedLinears` in the
# layout of oneDNN.
Product = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class PlainLinears:
    """Linears that read the same input, side by side, by torch's own products."""

    parts: list[Product]

    @staticmethod
    def of(linears: Sequence[nn.Linear], fuse: bool) -> "PlainLinears":
        """fuse: one product for all of them, at the price of a copy of their weights."""
        if fuse:
            W, bias = _side_by_side(linears)
            return PlainLinears([(W.mT.contiguous(), bias)])
        W = _joined(linears)
        if W is not None:
            return PlainLinears([(W.mT, _biases(linears))])
        return PlainLinears([(linear.weight.mT, linear.bias) for linear in linears])

    def __call__(self, x: Float[Tensor, "n d_in"]) -> Float[Tensor, "n d_out"]:
        ys = [x @ W if b is None else torch.addmm(b, x, W) for W, b in self.parts]
        return ys[0] if len(ys) == 1 else torch.cat(ys, -1)

    def add(
        self,
        residual: Float[Tensor, "n d_out"],
        x: Float[Tensor, "n d_in"],
    ) -> Float[Tensor, "n d_out"]:
        """residual + W x."""
        ((W, b),) = self.parts
        y = torch.addmm(residual, x, W)
        return y if b is None else y + b

    def gated(self, x: Float[Tensor, "n d_in"]) -> Float[Tensor, "n d"]:
        """silu of the first Linear's output, times the second's."""
        gate, up = self(x).chunk(2, -1)
        return silu(gate).mul_(up)


PREPACKED_ROWS = 32  # rows of the products that oneDNN's layout is chosen for


@dataclass(frozen=True, slots=True)
class PrepackedLinears:
    """The same by oneDNN's products, a fifth faster for a few rows.

    Weights are a copy in oneDNN's own layout. What is done with a result (silu, a product, a sum)
    is done before it leaves the registers.
    """

    parts: list[Product]

    @staticmethod
    def of(linears: Sequence[nn.Linear], fuse: bool) -> "PrepackedLinears":
        """fuse: one product for all of them."""
        products = [(linear.weight, linear.bias) for linear in linears]
        if fuse:
            products = [_side_by_side(linears)]
        reorder = torch.ops.mkldnn._reorder_linear_weight
        return PrepackedLinears([(reorder(W.detach(), PREPACKED_ROWS), b) for W, b in products])

    def __call__(self, x: Float[Tensor, "n d_in"]) -> Float[Tensor, "n d_out"]:
        ((W, b),) = self.parts
        return torch.ops.mkldnn._linear_pointwise(x, W, b, "none", [], "")

    def add(
        self,
        residual: Float[Tensor, "n d_out"],
        x: Float[Tensor, "n d_in"],
    ) -> Float[Tensor, "n d_out"]:
        """residual + W x."""
        ((W, b),) = self.parts
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, W, b, "add")

    def gated(self, x: Float[Tensor, "n d_in"]) -> Float[Tensor, "n d"]:
        """silu of the first Linear's output, times the second's."""
        (gate, gate_bias), (up, up_bias) = self.parts
        silu_of_gate = torch.ops.mkldnn._linear_pointwise(x, gate, gate_bias, "swish", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, silu_of_gate, up, up_bias, "mul")


def _side_by_side(linears: Sequence[nn.Linear]) -> Product:
    """One weight [d_out, d_in] and bias of all."""
    return torch.cat([linear.weight for linear in linears]), _biases(linears)


def _biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    biased = linears[0].bias is not None
    assert all((linear.bias is not None) == biased for linear in linears)
    return torch.cat([linear.bias for linear in linears]) if biased else None


def _joined(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The weights [d_out, d_in] as one without a copy; None where they do not lie side by side.

    Merged weights do on a GPU.
    """
    first = linears[0].weight
    storage = first.untyped_storage().data_ptr()
    end = first.storage_offset()
    d_out = 0
    for linear in linears:
        W = linear.weight
        if W.untyped_storage().data_ptr() != storage or not W.is_contiguous():
            return None
        if W.storage_offset() != end:
            return None
        end += W.numel()
        d_out += len(W)
    return first.detach().as_strided((d_out, first.shape[1]), first.stride())


def can_prepack(model: PreTrainedModel) -> bool:
    """Whether oneDNN has kernels for this model's weights: those that torch.compile calls too."""
    ops = torch.ops.mkldnn
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if model.dtype == torch.bfloat16:
        # whether this CPU has them, not whether the library does
        return ops._is_mkldnn_bf16_supported()
    return model.dtype == torch.float32


Linears = PlainLinears | PrepackedLinears


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a Llama-like model."""

    attention_norm: Norm
    qkv: Linears
    qk_norm: Norm | None
    scale: float
    out: Linears
    mlp_norm: Norm
    up: Linears  # gate and up
    down: Linears
    shared: bool  # of `out` and `down` this rank has a part

    @staticmethod
    def of(layer: Any, kind: type[PlainLinears] | type[PrepackedLinears], small: bool) -> "Block":
        """layer: the model's own block. small: one product for Linears that read the same input."""
        attention, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(attention, "q_norm"):
            heads, kv_heads = heads_of(attention)
            of_queries = attention.q_norm.weight.expand(heads, -1)
            of_keys = attention.k_norm.weight.expand(kv_heads, -1)
            qk_norm = Norm.of(torch.cat([of_queries, of_keys]), attention.q_norm)
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        return Block(
            attention_norm=Norm.of(before.weight, before),
            qkv=kind.of(qkv, fuse=small or kind is PrepackedLinears),
            qk_norm=qk_norm,
            scale=attention.scaling,
            out=kind.of([attention.o_proj], fuse=small),
            mlp_norm=Norm.of(after.weight, after),
            up=kind.of([mlp.gate_proj, mlp.up_proj], fuse=small),
            down=kind.of([mlp.down_proj], fuse=small),
            shared=hasattr(mlp.down_proj, "shard"),
        )

    def add(
        self, linears: Linears, residual: Float[Tensor, "n d"], x: Float[Tensor, "n d_in"]
    ) -> Float[Tensor, "n d"]:
        """residual + W x, where W is `out` or `down`."""
        if not self.shared:
            return linears.add(residual, x)
        return residual + ranks.sum_shards(linears(x))


def heads_of(attention: Any) -> tuple[int, int]:
    """How many heads of queries, and of keys and values, an attention has on this rank."""
    q, k = attention.q_proj.out_features, attention.k_proj.out_features
    return q // attention.head_dim, k // attention.head_dim
