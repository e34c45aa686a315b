"""Decoders: one token at a time for a whole batch; each prompt is read once, finished rows leave."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from loguru import logger
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vgrout.model.logprobs import backbone

# Below this many parameters a step is bound by calls, not by bytes: q, k, v (gate, up) become one product, for
# a copy of these weights per call of the sampler.
FUSE_BELOW = 2**26
LEAN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@runtime_checkable
class Decoder(Protocol):
    """Key/value cache of what is being decoded, on the weights as they were at construction. Slots are 0 … n-1."""

    drop_at: float  # share of slots that nobody reads any more, above which dropping them is cheaper

    def prefill(self, prompts: Sequence[tuple[int, ...]], room: int, max_new: int) -> Float[Tensor, "P V"]:
        """Run each prompt once; slot i then continues prompts[i]. Returns the logits of each one's first token.
        room: the most slots there will be. max_new: the most tokens a slot will be given."""
        ...

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        """Append one token to every slot; logits of the next."""
        ...

    def keep(self, slots: Sequence[int]) -> None:
        """Slot i becomes what slots[i] was: a slot named twice branches, one not named is forgotten."""
        ...


class HfDecoder:
    """Any transformers model, through its own forward and cache: left-padded prompts, an attention mask."""

    drop_at = 0.125  # `keep` copies every key and value

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def prefill(self, prompts: Sequence[tuple[int, ...]], room: int, max_new: int) -> Float[Tensor, "P V"]:
        longest = max(map(len, prompts))
        device = self.model.device
        ids = torch.tensor([[*[0] * (longest - len(p)), *p] for p in prompts], device=device)
        self.mask = torch.tensor([[*[0] * (longest - len(p)), *[1] * len(p)] for p in prompts], device=device)
        self.cache = DynamicCache(config=self.model.config)
        return self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=(self.mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        return self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.mask.sum(1, keepdim=True) - 1,
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]

    def keep(self, slots: Sequence[int]) -> None:
        index = torch.tensor(list(slots), device=self.mask.device)
        self.mask = self.mask[index]
        self.cache.batch_select_indices(index)


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Float[Tensor, "*h D"]  # one, or the query's and the key's stacked over heads
    eps: float
    grown: Float[Tensor, "*h D"]  # weight · √D

    @staticmethod
    def of(weight: Tensor, norm: Any) -> "_Norm":
        return _Norm(weight, norm.variance_epsilon, weight * weight.shape[-1] ** 0.5)

    def __call__(self, x: Float[Tensor, "n *h D"]) -> Float[Tensor, "n *h D"]:
        # On a CPU torch's rms_norm is six operations without a kernel of its own; these take half the time.
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return rms_norm(x, x.shape[-1:], None, self.eps) * self.weight
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * norm.square_().add_(x.shape[-1] * self.eps).rsqrt_() * self.grown


@dataclass(frozen=True, slots=True)
class _Linears:
    """Linears that read the same input, side by side. Weights are [d_in, d_out]."""

    parts: list[tuple[Tensor, Tensor | None]]

    @staticmethod
    def of(linears: Sequence[nn.Linear], fuse: bool) -> "_Linears":
        biased = linears[0].bias is not None
        assert all((m.bias is not None) == biased for m in linears)
        if not fuse:
            return _Linears([(m.weight.mT, m.bias) for m in linears])
        bias = torch.cat([m.bias for m in linears]) if biased else None
        return _Linears([(torch.cat([m.weight for m in linears]).mT.contiguous(), bias)])

    def __call__(self, x: Tensor) -> Tensor:
        ys = [x @ W if b is None else torch.addmm(b, x, W) for W, b in self.parts]
        return ys[0] if len(ys) == 1 else torch.cat(ys, -1)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        ((W, b),) = self.parts
        y = torch.addmm(residual, x, W)
        return y if b is None else y + b


@dataclass(frozen=True, slots=True)
class _Block:
    before: _Norm
    qkv: _Linears
    qk_norm: _Norm | None
    scale: float
    out: _Linears
    after: _Norm
    up: _Linears
    down: _Linears

    @staticmethod
    def of(layer: Any, fuse: bool) -> "_Block":
        a, m = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(a, "q_norm"):
            H, K = a.config.num_attention_heads, a.config.num_key_value_heads
            weight = torch.cat([a.q_norm.weight.expand(H, -1), a.k_norm.weight.expand(K, -1)])
            qk_norm = _Norm.of(weight, a.q_norm)
        return _Block(
            before=_Norm.of(layer.input_layernorm.weight, layer.input_layernorm),
            qkv=_Linears.of([a.q_proj, a.k_proj, a.v_proj], fuse),
            qk_norm=qk_norm,
            scale=a.scaling,
            out=_Linears.of([a.o_proj], fuse),
            after=_Norm.of(layer.post_attention_layernorm.weight, layer.post_attention_layernorm),
            up=_Linears.of([m.gate_proj, m.up_proj], fuse),
            down=_Linears.of([m.down_proj], fuse),
        )


class _Cache:
    """Keys and values of every slot, prompt and answer, in one buffer for all layers."""

    def __init__(self, past: list[tuple[Tensor, Tensor]], pad: Tensor | None, room: int, max_new: int) -> None:
        P, K, self.used, D = past[0][0].shape
        self.kv = past[0][0].new_empty(len(past), 2, max(P, room), K, self.used + max_new, D)
        for of_layer, pair in zip(self.kv, past, strict=True):
            for part, held in zip(of_layer, pair, strict=True):
                part[:P, :, : self.used] = held
        self.pad = None  # [slots, 1, 1, positions]: −inf before a shorter prompt, which ends where the longest does
        if pad is not None:
            self.pad = pad.new_zeros(max(P, room), 1, 1, self.used + max_new)
            self.pad[:P, ..., : self.used] = pad

    def layers(self, n: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each layer: where the next token's keys and values go [n, 2, K, D], and all keys and all values up to it
        [n, K, t, D]. From now on that token counts as there."""
        self.used += 1
        held = self.kv[:, :, :n, :, : self.used]
        new = held[..., -1, :].transpose(1, 2).unbind()
        return [(at, kv[0], kv[1]) for at, kv in zip(new, held.unbind(), strict=True)]

    def mask(self, n: int) -> Tensor | None:
        """What to add to the scores of `layers`."""
        return None if self.pad is None else self.pad[:n, ..., : self.used]

    def keep(self, to: list[int], source: list[int]) -> None:
        """Slots `to` become what slots `source` were."""
        if to:
            for kv in self.kv[..., : self.used, :]:  # by layer: what is copied is there twice
                kv[:, to] = kv[:, source]
            if self.pad is not None:
                self.pad[to] = self.pad[source]


class LeanDecoder:
    """Decoder for Llama-like blocks (Llama, Mistral, Qwen 2 and 3), without transformers' cost per layer and token.

    Prompts go through the model's own forward. After that a step is about 25 tensor operations a layer on static
    key/value buffers, in which a slot that nobody reads any more is overwritten instead of everything being copied.
    """

    drop_at = 0.0

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.core: Any = backbone(model)
        self.heads: int = model.config.num_attention_heads
        self.kv_heads: int = model.config.num_key_value_heads
        small = sum(p.numel() for p in model.parameters()) < FUSE_BELOW
        self.layers = [_Block.of(layer, small) for layer in self.core.layers]
        self.final = _Norm.of(self.core.norm.weight, self.core.norm)
        embeddings: Any = model.get_input_embeddings()
        self.embeddings: Tensor = embeddings.weight
        self.head = _Linears.of([model.get_output_embeddings()], small)

    def prefill(self, prompts: Sequence[tuple[int, ...]], room: int, max_new: int) -> Float[Tensor, "P V"]:
        hf = HfDecoder(self.model)
        logits = hf.prefill(prompts, room, max_new)
        layers = [layer for layer in hf.cache.layers if isinstance(layer, DynamicLayer)]
        past = [(layer.keys, layer.values) for layer in layers if layer.keys is not None and layer.values is not None]
        pad = None
        if not hf.mask.all():
            pad = torch.zeros_like(hf.mask, dtype=logits.dtype).masked_fill(hf.mask == 0, -torch.inf)[:, None, None]
        self.cache = _Cache(past, pad, room, max_new)
        self.position = hf.mask.sum(1)
        every = torch.arange(hf.mask.shape[1] + max_new, device=logits.device)[None]
        cos, sin = self.core.rotary_emb(logits, every)
        # x·cos + rotate_half(x)·sin, with rotate_half(x) = roll(x, D/2) · (−1 … −1, 1 … 1)
        half = torch.ones_like(sin[0, 0])
        half[: len(half) // 2] = -1
        self.cos, self.sin = cos[0], sin[0] * half
        return logits

    @torch.inference_mode()
    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        n, H, K, D = len(tokens), self.heads, self.kv_heads, self.cos.shape[-1]
        cos, sin = self.cos[self.position, None], self.sin[self.position, None]
        cached = self.cache.layers(n)
        mask = self.cache.mask(n)
        x = self.embeddings[tokens]
        for block, (new, keys, values) in zip(self.layers, cached, strict=True):
            qkv = block.qkv(block.before(x)).view(n, H + 2 * K, D)
            qk = qkv[:, : H + K]
            if block.qk_norm is not None:
                qk = block.qk_norm(qk)
            torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin, out=qkv[:, : H + K])
            new.copy_(qkv[:, H:].view(n, 2, K, D))
            q = qkv[:, :H].view(n, K, H // K, D)  # the queries of a key/value head are its rows
            y = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=block.scale)
            x = block.out.add(x, y.reshape(n, H * D))
            gate, up = block.up(block.after(x)).chunk(2, -1)
            x = block.down.add(x, silu(gate).mul_(up))
        self.position = self.position + 1
        return self.head(self.final(x))

    def keep(self, slots: Sequence[int]) -> None:
        moved = [i for i, slot in enumerate(slots) if slot != i]
        self.cache.keep(moved, [slots[i] for i in moved])
        self.position = self.position[list(slots)]


def _three_steps(decoder: Decoder, prompts: Sequence[tuple[int, ...]], tokens: Tensor) -> list[Tensor]:
    """Logits of the prompts and of two steps after them, where one prompt branches."""
    logits = [decoder.prefill(prompts, 3, 2)]
    decoder.keep([0, 1, 1])
    return [*logits, decoder.step(tokens), decoder.step(tokens)]


def lean_fits(model: PreTrainedModel) -> bool:
    """Whether LeanDecoder computes this model: by its class and configuration first, then by its logits."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    known = (
        type(model).__name__ in LEAN
        and config.hidden_act == "silu"
        and rope in ("default", "linear", "llama3", "yarn")  # the others change with the sequence's length
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)  # no sliding window
    )
    if not known:
        return False
    prompts = [tuple(range(1, 9)), tuple(range(3, 6))]  # of two lengths: padding and positions count
    tokens = torch.tensor([5, 6, 7], device=model.device)
    with torch.no_grad():
        got, want = (_three_steps(decoder, prompts, tokens) for decoder in (LeanDecoder(model), HfDecoder(model)))
    # in fp32 both orders of summation agree to about 1e-6 of the largest logit, in bf16 to about 1e-2
    tolerance = 1e-4 if model.dtype.itemsize >= 4 else 5e-2
    if all(bool((g - w).abs().max() <= tolerance * w.abs().max()) for g, w in zip(got, want, strict=True)):
        return True
    logger.warning(f"{type(model).__name__}: the lean decoder disagrees with transformers: sampling without it")
    return False
