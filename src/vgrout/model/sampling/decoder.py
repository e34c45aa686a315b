"""Decoders: one token at a time for a whole batch of slots.

Each prompt is read once, slots branch where answers do, and finished rows leave. `HfDecoder` runs
any transformers model; `LeanDecoder` runs Llama-like ones faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from loguru import logger
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vgrout.model.attention import uploaded
from vgrout.model.logprobs import backbone, head_logits, masked
from vgrout.model.sampling.kv_cache import ForkedCache, KVCache, LayerPast, Past, StaticCache, width
from vgrout.model.sampling.lean_layers import (
    Block,
    Norm,
    PlainLinears,
    PrepackedLinears,
    can_prepack,
    heads_of,
)

# Below this many parameters a step is bound by calls, not by bytes: q, k, v (gate, up) become one
# product, for a copy of these weights per call of the sampler. Above it, on a CPU, weights are
# copied into the layout of oneDNN's kernels, and a prompt's keys and values are read once for all
# slots that go on from it.
FUSE_BELOW = 2**26
# Tokens of prompts, with their padding, that go through a larger model at once.
PROMPT_TOKENS, PROMPT_TOKENS_CPU = 2**15, 2**9


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
        on: one call in place of hundreds.
    """

    drop_at = 0.0

    def __init__(self, model: PreTrainedModel, static: bool = False) -> None:
        self.model, self.static = model, static
        # (width, blocks) → the step's graph, or how often the step was run so far: a graph is made
        # when it has run twice, and whatever is loaded at a first call has been loaded
        self.steps: dict[tuple[int, int], _Captured | int] = {}
        self.core: Any = backbone(model)
        self.heads, self.kv_heads = heads_of(self.core.layers[0].self_attn)
        parameters = sum(p.numel() for p in model.parameters())
        self.small = parameters < FUSE_BELOW
        prepacks = not self.small and can_prepack(model)
        kind = PrepackedLinears if prepacks else PlainLinears
        self.layers = [Block.of(layer, kind, self.small) for layer in self.core.layers]
        # a graph of a step in which ranks exchange was never tried
        self.captures = static and model.device.type == "cuda" and not self.layers[0].shared
        self.final_norm = Norm.of(self.core.norm.weight, self.core.norm)
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
            past = past_of(hf.cache)
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

    def _cache_kind(self, branches: bool) -> type[KVCache] | type[ForkedCache]:
        """branches: several slots may go on from one prompt. Else nothing is read for many at once,
        and attention in two parts takes a tenth more time than in one."""
        if self.static:
            return StaticCache
        if branches and not self.small and self.model.device.type == "cpu":
            return ForkedCache
        return KVCache

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
        at_once = PROMPT_TOKENS_CPU if self.model.device.type == "cpu" else PROMPT_TOKENS
        lengths = list(map(len, prompts))
        longest = max(lengths)
        logits = torch.empty(0)
        past: Past = []
        for part in _parts_of_like_length(lengths, at_once):
            hf = HfDecoder(self.model)
            last = hf.read([prompts[i] for i in part])
            part_logits = masked(self.model, self.head(last))
            part_past = past_of(hf.cache)
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
        if isinstance(self.cache, StaticCache):
            logits = self._static_step(tokens, self.cache.blocks)
        else:
            logits = self._forward(tokens)
        self.cache.used += 1
        return logits

    def _static_step(self, tokens: Int[Tensor, " n"], blocks: int) -> Float[Tensor, "n V"]:
        """A step at fixed addresses, replayed from a graph where there is one.

        blocks: of positions that attention reads.
        """
        n = len(tokens)
        self.tokens[:n] = tokens
        slots = width(n)
        key = (slots, blocks)
        known = self.steps.get(key, 0)
        if self.captures and known == 2:
            known = self.steps[key] = self._captured(slots)
        if isinstance(known, _Captured):
            known.graph.replay()
            logits = known.logits
        else:
            self.steps[key] = known + 1
            logits = self._forward(self.tokens[:slots])
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
            x = block.add(block.out, x, y.reshape(n, H * D))
            gated = block.up.gated(block.mlp_norm(x))
            x = block.add(block.down, x, gated)
        self.position += 1
        return masked(self.model, self.head(self.final_norm(x)))

    def keep(self, slots: Sequence[int]) -> None:
        self.cache.keep(slots)
        source = uploaded(list(slots), self.position.device)
        self.position[: len(slots)] = self.position[source]


def past_of(cache: DynamicCache) -> Past:
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
