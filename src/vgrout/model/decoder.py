"""Decoders: one token at a time for a whole batch of slots.

Each prompt is read once, slots branch where answers do, and finished rows leave. `HfDecoder` runs
any transformers model; `LeanDecoder` runs Llama-like ones faster.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from loguru import logger
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vgrout.model.attention import uploaded
from vgrout.model.fused import (
    gated_halves,
    is_fused,
    kernel,
    norm,
    norm_of_sum,
    rotated_heads,
)
from vgrout.model.logprobs import backbone, head_logits, masked
from vgrout.tensor_types import at_least_fp32

# Below this many parameters a step is bound by calls, not by bytes: q, k, v (gate, up) become one
# product, for a copy of these weights per call of the sampler. Above it, on a CPU, weights are
# copied into the layout of oneDNN's kernels, and a prompt's keys and values are read once for all
# slots that go on from it.
FUSE_BELOW = 2**26
# Tokens of prompts, with their padding, that go through a larger model at once.
READ, READ_CPU = 2**15, 2**9
BLOCK = 128  # positions by which the static cache's attention grows


@runtime_checkable
class Decoder(Protocol):
    """Key/value cache of what is being decoded, on the weights as they were at construction.

    Slots are numbered 0 … n-1.
    """

    # share of slots that nobody reads any more, above which dropping them is cheaper
    drop_at: float

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        room: int,
        max_new: int,
    ) -> Float[Tensor, "P V"]:
        """Run each prompt once; slot i then continues prompts[i].

        Returns the logits of each one's first token. room: the most slots there will be. max_new:
        the most tokens a slot will be given.
        """
        ...

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        """Append one token to every slot; logits of the next."""
        ...

    def keep(self, slots: Sequence[int]) -> None:
        """Slot i becomes what slots[i] was.

        A slot that is named twice branches; one that is not named is forgotten.
        """
        ...


# ── any transformers model


class HfDecoder:
    """Any transformers model, through its own forward and cache.

    Prompts are padded on the left and hidden by an attention mask.
    """

    drop_at = 0.125  # `keep` copies every key and value

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        # Transformers 5.24 renamed the argument; 5.40 forgets its older name.
        takes = signature(backbone(model).forward).parameters
        self.cache_argument = "cache" if "cache" in takes else "past_key_values"

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        room: int,
        max_new: int,
    ) -> Float[Tensor, "P V"]:
        return head_logits(self.model, self.read(prompts))

    def read(self, prompts: Sequence[tuple[int, ...]]) -> Float[Tensor, "P D"]:
        """Fill the cache; returns the backbone's output at each prompt's last token."""
        longest = max(map(len, prompts))
        padded_ids: list[list[int]] = []
        mask: list[list[int]] = []
        for prompt in prompts:
            padding = [0] * (longest - len(prompt))
            padded_ids.append([*padding, *prompt])
            mask.append([*padding, *[1] * len(prompt)])
        ids = uploaded(padded_ids, self.model.device)
        self.mask = uploaded(mask, self.model.device)
        self.cache = DynamicCache(config=self.model.config)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        return self._run(ids, positions)

    def _run(self, ids: Int[Tensor, "n L"], positions: Int[Tensor, "n L"]) -> Float[Tensor, "n D"]:
        """The backbone's output at the last token.

        The head comes after: in three dimensions its product would copy the weight once a row.
        """
        out = backbone(self.model)(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            use_cache=True,
            **{self.cache_argument: self.cache},
        )
        return out.last_hidden_state[:, -1]

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        new = self.mask.new_ones(len(tokens), 1)
        self.mask = torch.cat([self.mask, new], 1)
        positions = self.mask.sum(1, keepdim=True) - 1
        return head_logits(self.model, self._run(tokens[:, None], positions))

    def keep(self, slots: Sequence[int]) -> None:
        index: Any = torch.tensor(list(slots), device=self.mask.device)
        self.mask = self.mask[index]
        self.cache.reorder_cache(index)  # attention and recurrent states alike


# ── parts of a Llama-like block


@dataclass(frozen=True, slots=True)
class _Norm:
    """RMS norm of the last dimension."""

    weight: Float[Tensor, "*h D"]  # one, or the query's and the key's stacked over heads
    eps: float
    scaled_weight: Float[Tensor, "*h D"]  # weight · √D, at least fp32

    @staticmethod
    def of(weight: Tensor, norm: Any) -> "_Norm":
        """norm: the model's own, whose ε is taken."""
        wide = at_least_fp32(weight)
        return _Norm(weight, norm.variance_epsilon, wide * weight.shape[-1] ** 0.5)

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


# One product's weight and bias. `_Plain` holds the weight as [d_in, d_out], `_Prepacked` in the
# layout of oneDNN.
Product = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Plain:
    """Linears that read the same input, side by side, by torch's own products."""

    parts: list[Product]

    @staticmethod
    def of(linears: Sequence[nn.Linear], fuse: bool) -> "_Plain":
        """fuse: one product for all of them, at the price of a copy of their weights."""
        if fuse:
            W, bias = _side_by_side(linears)
            return _Plain([(W.mT.contiguous(), bias)])
        W = _joined(linears)
        if W is not None:
            return _Plain([(W.mT, _biases(linears))])
        return _Plain([(linear.weight.mT, linear.bias) for linear in linears])

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
class _Prepacked:
    """The same by oneDNN's products, a fifth faster for a few rows.

    Weights are a copy in oneDNN's own layout. What is done with a result (silu, a product, a sum)
    is done before it leaves the registers.
    """

    parts: list[Product]

    @staticmethod
    def of(linears: Sequence[nn.Linear], fuse: bool) -> "_Prepacked":
        """fuse: one product for all of them."""
        products = [(linear.weight, linear.bias) for linear in linears]
        if fuse:
            products = [_side_by_side(linears)]
        reorder = torch.ops.mkldnn._reorder_linear_weight
        return _Prepacked([(reorder(W.detach(), PREPACKED_ROWS), b) for W, b in products])

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


def _prepacks(model: PreTrainedModel) -> bool:
    """Whether oneDNN has kernels for this model's weights: those that torch.compile calls too."""
    ops = torch.ops.mkldnn
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(ops, "_reorder_linear_weight"):
        return False
    if model.dtype == torch.bfloat16:
        # whether this CPU has them, not whether the library does
        return hasattr(ops, "_is_mkldnn_bf16_supported") and ops._is_mkldnn_bf16_supported()
    return model.dtype == torch.float32


_Linears = _Plain | _Prepacked


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of a Llama-like model."""

    attention_norm: _Norm
    qkv: _Linears
    qk_norm: _Norm | None
    scale: float
    out: _Linears
    mlp_norm: _Norm
    up: _Linears  # gate and up
    down: _Linears

    @staticmethod
    def of(layer: Any, kind: type[_Plain] | type[_Prepacked], small: bool) -> "_Block":
        """layer: the model's own block. small: the model is below `FUSE_BELOW`."""
        attention, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(attention, "q_norm"):
            config = attention.config
            of_queries = attention.q_norm.weight.expand(config.num_attention_heads, -1)
            of_keys = attention.k_norm.weight.expand(config.num_key_value_heads, -1)
            qk_norm = _Norm.of(torch.cat([of_queries, of_keys]), attention.q_norm)
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        return _Block(
            attention_norm=_Norm.of(before.weight, before),
            qkv=kind.of(qkv, fuse=small or kind is _Prepacked),
            qk_norm=qk_norm,
            scale=attention.scaling,
            out=kind.of([attention.o_proj], fuse=small),
            mlp_norm=_Norm.of(after.weight, after),
            up=kind.of([mlp.gate_proj, mlp.up_proj], fuse=small),
            down=kind.of([mlp.down_proj], fuse=small),
        )


# ── caches of keys and values


class LayerPast(NamedTuple):
    """Keys and values of prompts in one layer."""

    keys: Float[Tensor, "P K T D"]
    values: Float[Tensor, "P K T D"]


Past = list[LayerPast]
# queries by key/value head [n, K, h, D], scale= → what they read
Attend = Callable[..., Float[Tensor, "n K h D"]]
# the next token's keys and values into the cache
Write = Callable[[Float[Tensor, "n 2 K D"]], object]


class _Cache:
    """Keys and values of every slot, prompt and answer, in one buffer for all layers.

    pad: 0, and −inf before a shorter prompt, which ends where the longest one does; [slots, 1, 1,
    positions]. None where all prompts are as long.
    """

    def __init__(
        self,
        past: Past,
        pad: Float[Tensor, "P 1 1 T"] | None,
        room: int,
        max_new: int,
    ) -> None:
        like = past[0].keys
        P, K, self.used, D = like.shape
        slots, positions = max(P, room), self.used + max_new
        # [layers, keys and values, slots, K, positions, D]
        self.kv = like.new_empty(len(past), 2, slots, K, positions, D)
        for of_layer, (keys, values) in zip(self.kv, past, strict=True):
            of_layer[0, :P, :, : self.used] = keys
            of_layer[1, :P, :, : self.used] = values
        self.pad = None
        if pad is not None:
            self.pad = pad.new_zeros(slots, 1, 1, positions)
            self.pad[:P, ..., : self.used] = pad

    def layers(self, n: int) -> Iterator[tuple[Write, Attend]]:
        """Yields, for each layer, what writes the next token's keys and values, and attention up to it.

        From the first one on, that token is counted in `used`.
        """
        self.used += 1
        held = self.kv[:, :, :n, :, : self.used]
        new = held[..., -1, :].transpose(1, 2).unbind()
        mask = None if self.pad is None else self.pad[:n, ..., : self.used]
        for place, kv in zip(new, held.unbind(), strict=True):
            attend = partial(scaled_dot_product_attention, key=kv[0], value=kv[1], attn_mask=mask)
            yield place.copy_, attend

    def keep(self, slots: Sequence[int]) -> None:
        """Slot i becomes what slots[i] was."""
        changed, sources = _moves(slots)
        if not changed:
            return
        to = uploaded(changed, self.kv.device)
        source = uploaded(sources, self.kv.device)
        for kv in self.kv[..., : self.used, :]:  # by layer: what is copied is there twice
            kv[:, to] = kv[:, source]
        if self.pad is not None:
            self.pad[to] = self.pad[source]


def _moves(slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """The slots that `keep` changes, and what each of them becomes."""
    changed: list[int] = []
    sources: list[int] = []
    for i, slot in enumerate(slots):
        if slot != i:
            changed.append(i)
            sources.append(slot)
    return changed, sources


class _StaticCache(_Cache):
    """A cache for CUDA graphs: a step's tensors have the same addresses and shapes each time.

    Attention is to whole blocks of positions, of which a mask hides what is not there yet. The next
    token's position is a number on the device.
    """

    def __init__(
        self,
        past: Past,
        pad: Float[Tensor, "P 1 1 T"] | None,
        room: int,
        max_new: int,
    ) -> None:
        P, _, used, _ = past[0].keys.shape
        blocks = -(-(used + max_new) // BLOCK)
        super().__init__(past, pad, width(max(P, room)), blocks * BLOCK - used)
        self.kv[..., used:, :] = 0  # hidden, yet a NaN times nothing is a NaN
        self.kv[:, :, P:] = 0
        slots, positions = self.kv.shape[2], self.kv.shape[4]
        mask = self.kv.new_full((slots, 1, 1, positions), -torch.inf)
        mask[..., :used] = 0 if self.pad is None else self.pad[..., :used]
        self.pad = mask
        self.next = torch.full((1,), used, device=mask.device)

    @property
    def blocks(self) -> int:
        """How many blocks attention of the next token reads."""
        return self.used // BLOCK + 1

    def layers(self, n: int) -> Iterator[tuple[Write, Attend]]:
        """As in `_Cache`, but whoever replays the step counts `used`."""
        assert self.pad is not None
        self.pad.index_fill_(3, self.next, 0)
        positions = self.blocks * BLOCK
        mask = self.pad[:n, ..., :positions]
        held = self.kv[:, :, :n, :, :positions]
        for kv in held.unbind():
            write = partial(self._write, kv)
            attend = partial(scaled_dot_product_attention, key=kv[0], value=kv[1], attn_mask=mask)
            yield write, attend
        self.next += 1

    def _write(self, kv: Float[Tensor, "2 n K T D"], new: Float[Tensor, "n 2 K D"]) -> None:
        kv.index_copy_(3, self.next, new.transpose(0, 1)[:, :, :, None])


def width(n: int) -> int:
    """Slots of the step that is captured for n of them: few different numbers.

    At least two, since a compiler makes kernels of their own for one row.
    """
    if n <= 8:
        return max(2, 1 << (n - 1).bit_length())  # the next power of two
    return -(-n // 8) * 8


class _ForkedCache:
    """For a CPU: each prompt's keys and values once, however many slots go on from it.

    Attention is to prompt and answer by themselves; the two results are added up by their shares of
    the softmax's sum.
    """

    def __init__(
        self,
        past: Past,
        pad: Float[Tensor, "P 1 1 T"] | None,
        room: int,
        max_new: int,
    ) -> None:
        like = past[0].keys
        P, K, _, D = like.shape
        self.past, self.pad = past, pad
        self.used = 0  # positions of answers
        self.kv = like.new_empty(len(past), 2, max(P, room), K, max_new, D)
        self.prompt_of = list(range(P))  # slot → its prompt
        self._group()

    def _group(self) -> None:
        """Arrange slots prompt by prompt, each padded to the prompt with most of them."""
        slots_of: list[list[int]] = [[] for _ in self.past[0].keys]
        for slot, prompt in enumerate(self.prompt_of):
            slots_of[prompt].append(slot)
        self.most = max(map(len, slots_of))
        grouped: list[int] = []
        place = [0] * len(self.prompt_of)
        for slots in slots_of:
            for slot in slots:
                place[slot] = len(grouped)
                grouped.append(slot)
            grouped += [0] * (self.most - len(slots))
        self.slots = torch.tensor(grouped)  # [prompts · most]; 0 on padding
        self.place = torch.tensor(place)  # where each slot stands in it

    def layers(self, n: int) -> Iterator[tuple[Write, Attend]]:
        """As in `_Cache`."""
        assert n == len(self.prompt_of), (n, len(self.prompt_of))
        self.used += 1
        held = self.kv[:, :, :n, :, : self.used]
        new = held[..., -1, :].transpose(1, 2).unbind()
        for place, kv, prompt in zip(new, held.unbind(), self.past, strict=True):
            yield place.copy_, partial(self._attend, LayerPast(kv[0], kv[1]), prompt)

    def _attend(
        self,
        answer: LayerPast,
        prompt: LayerPast,
        q: Float[Tensor, "n K h D"],
        scale: float,
    ) -> Float[Tensor, "n K h D"]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        of_prompt, log_of_prompt = flash(
            self._by_prompt(q), prompt.keys, prompt.values, attn_mask=self.pad, scale=scale
        )
        of_answer, log_of_answer = flash(q, answer.keys, answer.values, scale=scale)
        h = q.shape[2]
        share = torch.sigmoid(self._by_slot(log_of_prompt, h) - log_of_answer[..., None])
        return torch.lerp(of_answer, self._by_slot(of_prompt, h), share.to(q.dtype))

    def _by_prompt(self, q: Float[Tensor, "n K h D"]) -> Float[Tensor, "P K m D"]:
        """The queries of all slots of a prompt as the rows of one."""
        _, K, h, D = q.shape
        grouped = q[self.slots].view(-1, self.most, K, h, D)
        return grouped.transpose(1, 2).reshape(-1, K, self.most * h, D)

    def _by_slot(self, x: Tensor, h: int) -> Float[Tensor, "n K h _"]:
        """Back from `_by_prompt`. x: [P, K, most · h, D] or [P, K, most · h]."""
        P, K = x.shape[:2]
        by_slot = x.view(P, K, self.most, h, -1).transpose(1, 2)
        return by_slot.reshape(P * self.most, K, h, -1)[self.place]

    def keep(self, slots: Sequence[int]) -> None:
        """Slot i becomes what slots[i] was."""
        changed, sources = _moves(slots)
        if changed and self.used > 0:
            for kv in self.kv[..., : self.used, :]:
                kv[:, changed] = kv[:, sources]
        self.prompt_of = [self.prompt_of[slot] for slot in slots]
        read = sorted(set(self.prompt_of))
        # Prompts of ended rows are read at every step: once they are half, a copy is worth it.
        if len(read) <= len(self.past[0].keys) // 2:
            self.past = [LayerPast(keys[read], values[read]) for keys, values in self.past]
            self.pad = None if self.pad is None else self.pad[read]
            self.prompt_of = [read.index(prompt) for prompt in self.prompt_of]
        self._group()


# ── Llama-like models


@dataclass(frozen=True, slots=True)
class _Captured:
    """A step as a CUDA graph, and where it leaves its logits.

    The graphs of a decoder share their memory: the logits are read before another step.
    """

    graph: Any  # a torch.cuda.CUDAGraph; in tests one that stands in for it
    logits: Float[Tensor, "n V"]


class LeanDecoder:
    """Decoder for Llama-like blocks (Llama, Mistral, Qwen 2 and 3).

    It does without transformers' cost per layer and token. Prompts go through the model's own
    forward. After that a step is 15 tensor operations a layer on static key/value buffers, in
    which a slot that nobody reads any more is overwritten instead of everything being copied.

    static: a step reads and writes the same addresses each time, in few different widths. On a GPU
        each is captured as a CUDA graph when it is asked for a third time, and replayed from then
        on: one call in place of hundreds. Of a model that `vgrout.model.fused` has kernels for, a
        static step uses them.
    """

    drop_at = 0.0

    def __init__(self, model: PreTrainedModel, static: bool = False) -> None:
        self.model, self.static = model, static
        self.captures = static and model.device.type == "cuda"
        self.fused = static and is_fused(model)
        # (width, blocks) → the step's graph, or how often the step was run so far: a graph is made
        # when it has run twice, and whatever is loaded at a first call has been loaded
        self.steps: dict[tuple[int, int], _Captured | int] = {}
        self.core: Any = backbone(model)
        self.heads: int = model.config.num_attention_heads
        self.kv_heads: int = model.config.num_key_value_heads
        parameters = sum(p.numel() for p in model.parameters())
        self.small = parameters < FUSE_BELOW
        prepacks = not (self.small or self.fused) and _prepacks(model)
        kind = _Prepacked if prepacks else _Plain
        self.layers = [_Block.of(layer, kind, self.small) for layer in self.core.layers]
        self.final_norm = _Norm.of(self.core.norm.weight, self.core.norm)
        embeddings: Any = model.get_input_embeddings()
        self.embeddings: Tensor = embeddings.weight
        self.head = kind.of([model.get_output_embeddings()], fuse=self.small)

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        room: int,
        max_new: int,
    ) -> Float[Tensor, "P V"]:
        if self.small:
            hf = HfDecoder(self.model)
            logits = hf.prefill(prompts, room, max_new)
            past = _past(hf.cache)
        else:
            logits, past = self._read_in_parts(prompts)
        device = logits.device
        lengths = uploaded(list(map(len, prompts)), device)
        longest = past[0].keys.shape[2]
        before = torch.arange(longest, device=device) < (longest - lengths)[:, None]
        pad = None
        if min(map(len, prompts)) < longest:
            zeros = torch.zeros_like(before, dtype=logits.dtype)
            pad = zeros.masked_fill(before, -torch.inf)[:, None, None]
        kind = self._cache_kind(branches=room > len(prompts))
        self.cache = kind(past, pad, room, max_new)
        self.steps.clear()  # graphs read and write the buffers that they were captured with
        slots = width(max(len(prompts), room))
        self.position = torch.zeros(slots, dtype=torch.long, device=device)
        self.position[: len(prompts)] = lengths
        self.tokens = torch.zeros_like(self.position)
        self._set_rotary(logits, longest + max_new)
        return logits

    def _cache_kind(self, branches: bool) -> type[_Cache] | type[_ForkedCache]:
        """branches: several slots may go on from one prompt. Else nothing is read for many at once,
        and attention in two parts takes a tenth more time than in one."""
        if self.static:
            return _StaticCache
        if branches and not self.small and self.model.device.type == "cpu":
            return _ForkedCache
        return _Cache

    def _set_rotary(self, like: Tensor, positions: int) -> None:
        """Tables of the rotary embedding for these positions, of the dtype and device of `like`."""
        every = torch.arange(positions, device=like.device)[None]
        cos, sin = self.core.rotary_emb(like, every)
        # x·cos + rotate_half(x)·sin, with rotate_half(x) = roll(x, D/2) · (−1 … −1, 1 … 1)
        sign = torch.ones_like(sin[0, 0])
        sign[: len(sign) // 2] = -1
        self.cos, self.sin = cos[0], sin[0] * sign

    def _read_in_parts(
        self, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[Float[Tensor, "P V"], Past]:
        """The prompts' logits, keys and values, from parts of like lengths.

        That is little padding, and on a CPU activations that stay in its cache.
        """
        at_once = READ_CPU if self.model.device.type == "cpu" else READ
        lengths = list(map(len, prompts))
        longest = max(lengths)
        logits = torch.empty(0)
        past: Past = []
        for part in _parts_of_like_length(lengths, at_once):
            hf = HfDecoder(self.model)
            last = hf.read([prompts[i] for i in part])
            part_logits = masked(self.model, self.head(last))
            part_past = _past(hf.cache)
            if not past:
                logits = part_logits.new_empty(len(prompts), part_logits.shape[-1])
                _, K, _, D = part_past[0].keys.shape
                shape = (len(prompts), K, longest, D)
                for keys, values in part_past:
                    past.append(LayerPast(keys.new_zeros(shape), values.new_zeros(shape)))
            at = uploaded(part, logits.device)
            logits[at] = part_logits
            for whole, read in zip(past, part_past, strict=True):
                start = longest - read.keys.shape[2]
                whole.keys[at, :, start:] = read.keys
                whole.values[at, :, start:] = read.values
        return logits, past

    @torch.inference_mode()
    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        if not isinstance(self.cache, _StaticCache):
            return self._forward(tokens)
        n = len(tokens)
        self.tokens[:n] = tokens
        slots = width(n)
        key = (slots, self.cache.blocks)
        known = self.steps.get(key, 0)
        if self.captures and known == 2:
            known = self.steps[key] = self._captured(slots)
        if isinstance(known, _Captured):
            known.graph.replay()
            logits = known.logits
        else:
            self.steps[key] = known + 1
            logits = self._forward(self.tokens[:slots])
        self.cache.used += 1  # not in the cache, since a replay runs none of its Python
        return logits[:n]

    def _captured(self, n: int) -> "_Captured | int":
        """The step of n slots as a graph; nothing is computed.

        0 where it cannot be captured: then all steps run as they are.
        """
        try:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool(), capture_error_mode="thread_local")
                try:
                    logits = self._forward(self.tokens[:n])
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
            return _Captured(graph, logits)
        except (RuntimeError, AttributeError) as e:
            why = str(e).partition("\n")[0]
            logger.warning(f"a decoding step cannot be captured, and runs as it is: {why}")
            self.captures = False
            return 0

    def _pool(self) -> Any:
        """The memory of the graphs so far; None for the first one."""
        for known in self.steps.values():
            if isinstance(known, _Captured):
                return known.graph.pool()
        return None

    def _forward(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        if self.fused:
            return self._fused_forward(tokens)
        n, H, K, D = len(tokens), self.heads, self.kv_heads, self.cos.shape[-1]
        position = self.position[:n]
        cos, sin = self.cos[position, None], self.sin[position, None]
        x = self.embeddings[tokens]
        for block, (write, attend) in zip(self.layers, self.cache.layers(n), strict=True):
            qkv = block.qkv(block.attention_norm(x)).view(n, H + 2 * K, D)
            rotated = qkv[:, : H + K]  # queries and keys, in place
            qk = rotated if block.qk_norm is None else block.qk_norm(rotated)
            torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin, out=rotated)
            write(qkv[:, H:].view(n, 2, K, D))
            q = qkv[:, :H].view(n, K, H // K, D)  # the queries of a key/value head are its rows
            y = attend(q, scale=block.scale)
            x = block.out.add(x, y.reshape(n, H * D))
            gated = block.up.gated(block.mlp_norm(x))
            x = block.down.add(x, gated)
        self.position += 1
        return masked(self.model, self.head(self.final_norm(x)))

    def _fused_forward(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        """The same in ten kernels a layer, of which four are products and one is attention."""
        n, H, K, D = len(tokens), self.heads, self.kv_heads, self.cos.shape[-1]
        position = self.position[:n]
        cos, sin = self.cos[position], self.sin[position]
        x = self.embeddings[tokens]
        first = self.layers[0].attention_norm
        normed = kernel(norm, x, first.weight, first.eps)
        # the norm that the sum of residuals goes through where a block ends
        ends = [*(block.attention_norm for block in self.layers[1:]), self.final_norm]
        of_layers = self.cache.layers(n)
        for block, end, (write, attend) in zip(self.layers, ends, of_layers, strict=True):
            weight, eps = None, 0.0
            if block.qk_norm is not None:
                weight, eps = block.qk_norm.weight, block.qk_norm.eps
            qkv = block.qkv(normed).view(n, H + 2 * K, D)
            heads = kernel(rotated_heads, qkv, cos, sin, weight, eps, K)
            write(heads[:, H:].view(n, 2, K, D))
            q = heads[:, :H].view(n, K, H // K, D)
            y = attend(q, scale=block.scale).reshape(n, H * D)
            middle = block.mlp_norm
            x, normed = kernel(norm_of_sum, x, block.out(y), middle.weight, middle.eps)
            gated = kernel(gated_halves, block.up(normed))
            x, normed = kernel(norm_of_sum, x, block.down(gated), end.weight, end.eps)
        self.position += 1
        return masked(self.model, self.head(normed))

    def keep(self, slots: Sequence[int]) -> None:
        self.cache.keep(slots)
        source = uploaded(list(slots), self.position.device)
        self.position[: len(slots)] = self.position[source]


def _past(cache: DynamicCache) -> Past:
    """The keys and values in a transformers cache."""
    past: Past = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer):
            continue
        if layer.keys is not None and layer.values is not None:
            past.append(LayerPast(layer.keys, layer.values))
    return past


def _parts_of_like_length(lengths: Sequence[int], at_once: int) -> Iterator[list[int]]:
    """Prompts, long ones first, as many together as take at_once tokens with their padding.

    A part has at least one prompt.
    """
    part: list[int] = []
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for i in longest_first:
        # the first of a part is its longest
        if part and (len(part) + 1) * lengths[part[0]] > at_once:
            yield part
            part = []
        part.append(i)
    yield part
