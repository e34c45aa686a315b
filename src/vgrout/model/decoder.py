"""Decoders: one token at a time for a whole batch; each prompt is read once, finished rows leave."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from loguru import logger
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vgrout.model.logprobs import backbone

# Below this many parameters a step is bound by calls, not by bytes: q, k, v (gate, up) become one product, for
# a copy of these weights per call of the sampler.
FUSE_BELOW = 2**26
LEAN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@runtime_checkable
class Decoder(Protocol):
    """Key/value cache of the rows being decoded, on the weights as they were at construction. Slots are 0 … n-1."""

    drop_at: float  # share of ended rows above which dropping them pays

    def prefill(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[int], max_new: int) -> Float[Tensor, "n V"]:
        """Run each prompt once; slot i then continues prompts[rows[i]]. Logits of each slot's first token."""
        ...

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        """Append one token to every slot; logits of the next."""
        ...

    def keep(self, slots: Sequence[int]) -> None:
        """Slot i becomes what slot slots[i] was; the others are forgotten. slots[i] is i or lies past the new end."""
        ...


class HfDecoder:
    """Any transformers model, through its own forward and cache: left-padded prompts, an attention mask."""

    drop_at = 0.125  # `keep` copies every key and value

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def prefill(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[int], max_new: int) -> Float[Tensor, "n V"]:
        longest = max(map(len, prompts))
        device = self.model.device
        ids = torch.tensor([[*[0] * (longest - len(p)), *p] for p in prompts], device=device)
        self.mask = torch.tensor([[*[0] * (longest - len(p)), *[1] * len(p)] for p in prompts], device=device)
        self.cache = DynamicCache(config=self.model.config)
        logits = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=(self.mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self.keep(rows)
        return logits[list(rows)]

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
    weight: Tensor
    eps: float

    @staticmethod
    def of(norm: Any) -> "_Norm":
        return _Norm(norm.weight, norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class _HeadNorm:
    """The query's and the key's norm in one call: their weights stacked over heads."""

    weight: Float[Tensor, "h D"]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], None, self.eps) * self.weight


@dataclass(frozen=True, slots=True)
class _Linears:
    """Linears that read the same input, side by side."""

    parts: list[tuple[Tensor, Tensor | None]]

    @staticmethod
    def of(linears: Sequence[nn.Linear], fuse: bool) -> "_Linears":
        biased = linears[0].bias is not None
        assert all((m.bias is not None) == biased for m in linears)
        if not fuse or len(linears) == 1:
            return _Linears([(m.weight, m.bias) for m in linears])
        bias = torch.cat([m.bias for m in linears]) if biased else None
        return _Linears([(torch.cat([m.weight for m in linears]), bias)])

    def __call__(self, x: Tensor) -> Tensor:
        ys = [linear(x, W, b) for W, b in self.parts]
        return ys[0] if len(ys) == 1 else torch.cat(ys, -1)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        ((W, b),) = self.parts
        y = torch.addmm(residual, x, W.mT)
        return y if b is None else y + b


@dataclass(frozen=True, slots=True)
class _Block:
    before: _Norm
    qkv: _Linears
    qk_norm: _HeadNorm | None
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
            qk_norm = _HeadNorm(weight, a.q_norm.variance_epsilon)
        return _Block(
            before=_Norm.of(layer.input_layernorm),
            qkv=_Linears.of([a.q_proj, a.k_proj, a.v_proj], fuse),
            qk_norm=qk_norm,
            scale=a.scaling,
            out=_Linears.of([a.o_proj], fuse),
            after=_Norm.of(layer.post_attention_layernorm),
            up=_Linears.of([m.gate_proj, m.up_proj], fuse),
            down=_Linears.of([m.down_proj], fuse),
        )


class _RowCache:
    """Keys and values of complete rows, the prompt's part copied into each."""

    def __init__(self, past: list[tuple[Tensor, Tensor]], pad: Tensor | None, rows: list[int], max_new: int) -> None:
        self.used = past[0][0].shape[2]
        K, D = past[0][0].shape[1], past[0][0].shape[3]
        self.kv = past[0][0].new_empty(2, len(past), len(rows), K, self.used + max_new, D)
        for l, pair in enumerate(past):
            for part, held in enumerate(pair):
                self.kv[part, l, :, :, : self.used] = held[rows]
        self.pad = None if pad is None else nn.functional.pad(pad[rows], (0, max_new))

    def attend(self, l: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [n K g D], the g queries of each key/value head its rows; k, v [n K D] are written first. → [n K g D]"""
        n, end = len(q), self.used + 1
        keys, values = self.kv[0, l, :n, :, :end], self.kv[1, l, :n, :, :end]
        keys[:, :, -1], values[:, :, -1] = k, v
        pad = None if self.pad is None else self.pad[:n, ..., :end]
        return scaled_dot_product_attention(q, keys, values, attn_mask=pad, scale=scale)

    def keep(self, to: list[int], source: list[int], n: int) -> None:
        if to:
            self.kv[:, :, to, :, : self.used] = self.kv[:, :, source, :, : self.used]
            if self.pad is not None:
                self.pad[to] = self.pad[source]


class _SharedCache:
    """Keys and values of each prompt once, of each row its completion alone.

    A step reads P·L + n·t positions in place of n·(L + t). fp32 only: the scores are stored, and in bf16 their
    rounding (2^-8 of a score of 20) would move the weights by several per cent.
    """

    def __init__(self, past: list[tuple[Tensor, Tensor]], pad: Tensor | None, rows: list[int], max_new: int) -> None:
        self.past, self.pad, self.rows = past, pad, list(rows)
        P, K, _, D = past[0][0].shape
        self.prompts = P
        self.kv = past[0][0].new_empty(2, len(past), len(rows), K, max_new, D)
        self.used = 0
        self._regroup()

    def _regroup(self) -> None:
        """slots[p, j]: slot of prompt p's j-th row (0 where it has fewer); prompt, place: p and j of each slot."""
        slots: list[list[int]] = [[] for _ in range(self.prompts)]
        place = []
        for slot, p in enumerate(self.rows):
            place.append(len(slots[p]))
            slots[p].append(slot)
        widest = max(map(len, slots))
        device = self.kv.device
        self.slots = torch.tensor([[*s, *[0] * (widest - len(s))] for s in slots], device=device)
        self.prompt, self.place = torch.tensor(self.rows, device=device), torch.tensor(place, device=device)

    def attend(self, l: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As in _RowCache: softmax over the prompt's and the row's own scores side by side."""
        n, _, g, _ = q.shape
        keys, values = self.kv[0, l, :n, :, : self.used + 1], self.kv[1, l, :n, :, : self.used + 1]
        keys[:, :, -1], values[:, :, -1] = k, v
        prompt_keys, prompt_values = self.past[l]
        L = prompt_keys.shape[2]
        q = q * scale
        scores = self._by_prompt(q) @ prompt_keys.mT
        if self.pad is not None:
            scores = scores + self.pad
        weights = torch.cat([self._by_slot(scores, g), q @ keys.mT], -1).softmax(-1)
        return self._by_slot(self._by_prompt(weights[..., :L]) @ prompt_values, g) + weights[..., L:] @ values

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[n K g ·] → [P K widest·g ·]"""
        return x[self.slots].transpose(1, 2).flatten(2, 3)

    def _by_slot(self, x: Tensor, g: int) -> Tensor:
        """And back."""
        return x.unflatten(2, (-1, g))[self.prompt, :, self.place]

    def keep(self, to: list[int], source: list[int], n: int) -> None:
        if to:
            self.kv[:, :, to, :, : self.used] = self.kv[:, :, source, :, : self.used]
        for i, slot in zip(to, source, strict=True):
            self.rows[i] = self.rows[slot]
        del self.rows[n:]
        self._regroup()


class LeanDecoder:
    """Decoder for blocks of the Llama kind (Llama, Mistral, Qwen 2 and 3) without transformers' cost a layer and token.

    Prompts go through the model's own forward. After that a step is about 20 tensor operations a layer on static
    key/value buffers, in which a finished row is overwritten by the last one instead of everything being copied.
    """

    drop_at = 0.0

    def __init__(self, model: PreTrainedModel, share_prompts: bool = True) -> None:
        self.model = model
        self.core: Any = backbone(model)
        self.heads: int = model.config.num_attention_heads
        self.kv_heads: int = model.config.num_key_value_heads
        small = sum(p.numel() for p in model.parameters()) < FUSE_BELOW
        self.layers = [_Block.of(layer, small) for layer in self.core.layers]
        self.final = _Norm.of(self.core.norm)
        self.share = share_prompts and model.dtype.itemsize >= 4

    def prefill(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[int], max_new: int) -> Float[Tensor, "n V"]:
        hf = HfDecoder(self.model)
        logits = hf.prefill(prompts, range(len(prompts)), max_new)
        layers = [layer for layer in hf.cache.layers if isinstance(layer, DynamicLayer)]
        past = [(layer.keys, layer.values) for layer in layers if layer.keys is not None and layer.values is not None]
        pad = None
        if not hf.mask.all():
            pad = torch.zeros_like(hf.mask, dtype=logits.dtype).masked_fill(hf.mask == 0, -torch.inf)[:, None, None]
        self.cache = (_SharedCache if self.share else _RowCache)(past, pad, list(rows), max_new)
        self.position = hf.mask.sum(1)[list(rows)]
        every = torch.arange(hf.mask.shape[1] + max_new, device=logits.device)[None]
        cos, sin = self.core.rotary_emb(logits, every)
        # x·cos + rotate_half(x)·sin, with rotate_half(x) = roll(x, D/2) · (−1 … −1, 1 … 1)
        half = torch.ones_like(sin[0, 0])
        half[: len(half) // 2] = -1
        self.cos, self.sin = cos[0], sin[0] * half
        return logits[list(rows)]

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        n, H, K, D = len(tokens), self.heads, self.kv_heads, self.cos.shape[-1]
        cos, sin = self.cos[self.position, None], self.sin[self.position, None]
        x = self.model.get_input_embeddings()(tokens)
        for l, block in enumerate(self.layers):
            qkv = block.qkv(block.before(x)).view(n, H + 2 * K, D)
            qk = qkv[:, : H + K]
            if block.qk_norm is not None:
                qk = block.qk_norm(qk)
            qk = torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin)
            q = qk[:, :H].unflatten(1, (K, H // K))
            y = self.cache.attend(l, q, qk[:, H:], qkv[:, H + K :], block.scale)
            x = block.out.add(x, y.reshape(n, H * D))
            gate, up = block.up(block.after(x)).chunk(2, -1)
            x = block.down.add(x, silu(gate) * up)
        self.cache.used += 1
        self.position = self.position + 1
        return self.model.get_output_embeddings()(self.final(x))

    def keep(self, slots: Sequence[int]) -> None:
        n = len(slots)
        to = [i for i, slot in enumerate(slots) if slot != i]
        source = [slots[i] for i in to]
        assert all(slot >= n for slot in source), slots
        self.cache.keep(to, source, n)
        self.position[to] = self.position[source]
        self.position = self.position[:n]


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
        ours, theirs = LeanDecoder(model), HfDecoder(model)
        got = [ours.prefill(prompts, [0, 1, 1], 2), ours.step(tokens), ours.step(tokens)]
        want = [theirs.prefill(prompts, [0, 1, 1], 2), theirs.step(tokens), theirs.step(tokens)]
    # in fp32 both orders of summation agree to about 1e-6 of the largest logit, in bf16 to about 1e-2
    tolerance = 1e-4 if model.dtype.itemsize >= 4 else 5e-2
    if all(bool((g - w).abs().max() <= tolerance * w.abs().max()) for g, w in zip(got, want, strict=True)):
        return True
    logger.warning(f"{type(model).__name__}: the lean decoder disagrees with transformers: sampling without it")
    return False
