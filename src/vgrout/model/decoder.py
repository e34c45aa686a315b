"""Decoders: one token at a time for a whole batch; each prompt is read once, finished rows leave."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from loguru import logger
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vgrout.errors import Refused
from vgrout.model.attention import uploaded
from vgrout.model.logprobs import backbone, head_logits, masked
from vgrout.model.packing import trial_tokens
from vgrout.model.source import LLAMAS

# Below this many parameters a step is bound by calls, not by bytes: q, k, v (gate, up) become one
# product, for a copy of these weights per call of the sampler. Above it, on a CPU, weights are
# copied into the layout of oneDNN's kernels, and a prompt's keys and values are read once for all
# slots that go on from it.
SMALL = 2**26
# tokens of prompts, with their padding, that go through a larger model at once
READ, READ_CPU = 2**15, 2**9


@runtime_checkable
class Decoder(Protocol):
    """Key/value cache of what is being decoded, on the weights as they were at construction. Slots are 0 … n-1."""

    # share of slots that nobody reads any more, above which dropping them is cheaper
    drop_at: float

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], room: int, max_new: int
    ) -> Float[Tensor, "P V"]:
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

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], room: int, max_new: int
    ) -> Float[Tensor, "P V"]:
        return head_logits(self.model, self._read(prompts))

    def _read(self, prompts: Sequence[tuple[int, ...]]) -> Float[Tensor, "P D"]:
        """What the backbone puts out at each prompt's last token; keys and values are kept."""
        longest = max(map(len, prompts))
        device = self.model.device
        ids = uploaded([[*[0] * (longest - len(p)), *p] for p in prompts], device)
        self.mask = uploaded([[*[0] * (longest - len(p)), *[1] * len(p)] for p in prompts], device)
        self.cache = DynamicCache(config=self.model.config)
        return self._run(ids, (self.mask.cumsum(1) - 1).clamp(min=0))

    def _run(self, ids: Int[Tensor, "n L"], positions: Int[Tensor, "n L"]) -> Float[Tensor, "n D"]:
        """Without the head: its product in three dimensions would copy the weight once a row."""
        out = backbone(self.model)(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1]

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        return head_logits(
            self.model, self._run(tokens[:, None], self.mask.sum(1, keepdim=True) - 1)
        )

    def keep(self, slots: Sequence[int]) -> None:
        index: Any = torch.tensor(list(slots), device=self.mask.device)
        self.mask = self.mask[index]
        self.cache.reorder_cache(index)  # attention and recurrent states alike


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Float[Tensor, "*h D"]  # one, or the query's and the key's stacked over heads
    eps: float
    grown: Float[Tensor, "*h D"]  # weight · √D, at least fp32

    @staticmethod
    def of(weight: Tensor, norm: Any) -> "_Norm":
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return _Norm(weight, norm.variance_epsilon, wide * weight.shape[-1] ** 0.5)

    def __call__(self, x: Float[Tensor, "n *h D"]) -> Float[Tensor, "n *h D"]:
        # On a CPU torch's rms_norm is six operations without a kernel of its own; these take half
        # the time.
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
            return rms_norm(x, x.shape[-1:], None, self.eps) * self.weight
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * norm.square_().add_(x.shape[-1] * self.eps).rsqrt_() * self.grown).to(
            x.dtype
        )


ROWS = 32  # of the products that oneDNN's layout is chosen for


@dataclass(frozen=True, slots=True)
class _Plain:
    """Linears that read the same input, side by side, by torch's own products. Weights are [d_in, d_out]."""

    parts: list[tuple[Tensor, Tensor | None]]

    @staticmethod
    def of(linears: Sequence[nn.Linear], fuse: bool) -> "_Plain":
        if (W := _joined(linears)) is not None and not fuse:
            return _Plain([(W.mT, _biases(linears))])
        if not fuse:
            return _Plain([(m.weight.mT, m.bias) for m in linears])
        W, bias = _side_by_side(linears)
        return _Plain([(W.mT.contiguous(), bias)])

    def __call__(self, x: Tensor) -> Tensor:
        ys = [x @ W if b is None else torch.addmm(b, x, W) for W, b in self.parts]
        return ys[0] if len(ys) == 1 else torch.cat(ys, -1)

    def add(
        self, residual: Float[Tensor, "n d_out"], x: Float[Tensor, "n d_in"]
    ) -> Float[Tensor, "n d_out"]:
        """residual + W x."""
        ((W, b),) = self.parts
        y = torch.addmm(residual, x, W)
        return y if b is None else y + b

    def gated(self, x: Float[Tensor, "n d_in"]) -> Float[Tensor, "n d"]:
        """silu of the first Linear's output, times the second's."""
        gate, up = self(x).chunk(2, -1)
        return silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class _Prepacked:
    """The same by oneDNN's products, whose weights are a copy in its own layout: a fifth faster for a few rows, and
    what is done with the result (silu, a product, a sum) is done before it leaves the registers."""

    parts: list[tuple[Tensor, Tensor | None]]

    @staticmethod
    def of(linears: Sequence[nn.Linear], fuse: bool) -> "_Prepacked":
        parts = [_side_by_side(linears)] if fuse else [(m.weight, m.bias) for m in linears]
        return _Prepacked(
            [(torch.ops.mkldnn._reorder_linear_weight(W.detach(), ROWS), b) for W, b in parts]
        )

    def __call__(self, x: Tensor) -> Tensor:
        ((W, b),) = self.parts
        return torch.ops.mkldnn._linear_pointwise(x, W, b, "none", [], "")

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        ((W, b),) = self.parts
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, W, b, "add")

    def gated(self, x: Tensor) -> Tensor:
        (gate, b), (up, c) = self.parts
        silu_of_gate = torch.ops.mkldnn._linear_pointwise(x, gate, b, "swish", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, silu_of_gate, up, c, "mul")


def _side_by_side(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight [d_out, d_in] and bias of all."""
    return torch.cat([m.weight for m in linears]), _biases(linears)


def _biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    biased = linears[0].bias is not None
    assert all((m.bias is not None) == biased for m in linears)
    return torch.cat([m.bias for m in linears]) if biased else None


def _joined(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The weights [d_out, d_in] as one without a copy, where they lie side by side, as merged ones do on a GPU."""
    first, end = linears[0].weight, linears[0].weight.storage_offset()
    for m in linears:
        same = (
            m.weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and m.weight.is_contiguous()
        )
        if not (same and m.weight.storage_offset() == end):
            return None
        end += m.weight.numel()
    return first.detach().as_strided(
        (sum(len(m.weight) for m in linears), first.shape[1]), first.stride()
    )


def _prepacks(model: PreTrainedModel) -> bool:
    """Whether oneDNN has kernels for this model's weights: those that torch.compile calls as well."""
    ops = torch.ops.mkldnn
    # this CPU's word, not the library's
    bf16 = getattr(ops, "_is_mkldnn_bf16_supported", lambda: False)
    kinds = {torch.float32: True, torch.bfloat16: bf16()}
    return (
        model.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(ops, "_reorder_linear_weight")
        and kinds.get(model.dtype, False)
    )


_Linears = _Plain | _Prepacked


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
    def of(layer: Any, kind: type[_Plain] | type[_Prepacked], small: bool) -> "_Block":
        a, m = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(a, "q_norm"):
            H, K = a.config.num_attention_heads, a.config.num_key_value_heads
            weight = torch.cat([a.q_norm.weight.expand(H, -1), a.k_norm.weight.expand(K, -1)])
            qk_norm = _Norm.of(weight, a.q_norm)
        return _Block(
            before=_Norm.of(layer.input_layernorm.weight, layer.input_layernorm),
            qkv=kind.of([a.q_proj, a.k_proj, a.v_proj], small or kind is _Prepacked),
            qk_norm=qk_norm,
            scale=a.scaling,
            out=kind.of([a.o_proj], small),
            after=_Norm.of(layer.post_attention_layernorm.weight, layer.post_attention_layernorm),
            up=kind.of([m.gate_proj, m.up_proj], small),
            down=kind.of([m.down_proj], small),
        )


# keys and values of prompts, by layer
Past = list[tuple[Float[Tensor, "P K T D"], Float[Tensor, "P K T D"]]]
# queries by key/value head [n, K, h, D], scale= → what they read
Attend = Callable[..., Float[Tensor, "n K h D"]]
# the next token's keys and values into the cache
Write = Callable[[Float[Tensor, "n 2 K D"]], object]


class _Cache:
    """Keys and values of every slot, prompt and answer, in one buffer for all layers."""

    def __init__(self, past: Past, pad: Tensor | None, room: int, max_new: int) -> None:
        P, K, self.used, D = past[0][0].shape
        self.kv = past[0][0].new_empty(len(past), 2, max(P, room), K, self.used + max_new, D)
        for of_layer, pair in zip(self.kv, past, strict=True):
            for part, held in zip(of_layer, pair, strict=True):
                part[:P, :, : self.used] = held
        # [slots, 1, 1, positions]: −inf before a shorter prompt, which ends where the longest does
        self.pad = None
        if pad is not None:
            self.pad = pad.new_zeros(max(P, room), 1, 1, self.used + max_new)
            self.pad[:P, ..., : self.used] = pad

    def layers(self, n: int) -> Iterator[tuple[Write, Attend]]:
        """For each layer: what writes the next token's keys and values, and attention to all up to it. From now on that
        token counts as there."""
        self.used += 1
        held = self.kv[:, :, :n, :, : self.used]
        new = held[..., -1, :].transpose(1, 2).unbind()
        mask = None if self.pad is None else self.pad[:n, ..., : self.used]
        for at, kv in zip(new, held.unbind(), strict=True):
            yield (
                at.copy_,
                partial(scaled_dot_product_attention, key=kv[0], value=kv[1], attn_mask=mask),
            )

    def keep(self, slots: Sequence[int]) -> None:
        """Slot i becomes what slots[i] was."""
        to = [i for i, slot in enumerate(slots) if slot != i]
        if to:
            to, source = (uploaded(of, self.kv.device) for of in (to, [slots[i] for i in to]))
            for kv in self.kv[..., : self.used, :]:  # by layer: what is copied is there twice
                kv[:, to] = kv[:, source]
            if self.pad is not None:
                self.pad[to] = self.pad[source]


BLOCK = 128  # positions


class _StaticCache(_Cache):
    """The same for a captured step: at the same addresses whatever is there. Attention is to whole blocks of positions,
    of which a mask hides what is not there yet; the next token's position is a number on the device."""

    def __init__(self, past: Past, pad: Tensor | None, room: int, max_new: int) -> None:
        P, used = past[0][0].shape[0], past[0][0].shape[2]
        super().__init__(
            past, pad, width(max(P, room)), -(-(used + max_new) // BLOCK) * BLOCK - used
        )
        self.kv[..., used:, :] = 0  # hidden, yet a NaN times nothing is a NaN
        self.kv[:, :, P:] = 0
        mask = self.kv.new_full((self.kv.shape[2], 1, 1, self.kv.shape[4]), -torch.inf)
        mask[..., :used] = 0 if self.pad is None else self.pad[..., :used]
        self.pad = mask
        self.next = torch.full((1,), used, device=mask.device)

    @property
    def blocks(self) -> int:
        """That attention of the next token reads."""
        return self.used // BLOCK + 1

    def layers(self, n: int) -> Iterator[tuple[Write, Attend]]:
        """`used` is counted by who replays the step."""
        assert self.pad is not None
        self.pad.index_fill_(3, self.next, 0)
        mask, seen = (
            self.pad[:n, ..., : self.blocks * BLOCK],
            self.kv[:, :, :n, :, : self.blocks * BLOCK],
        )
        for kv in seen.unbind():
            yield (
                partial(self._write, kv),
                partial(scaled_dot_product_attention, key=kv[0], value=kv[1], attn_mask=mask),
            )
        self.next += 1

    def _write(self, kv: Float[Tensor, "2 n K T D"], new: Float[Tensor, "n 2 K D"]) -> None:
        kv.index_copy_(3, self.next, new.transpose(0, 1)[:, :, :, None])


def width(n: int) -> int:
    """Slots of a step that is captured for n of them: few different ones."""
    return 1 << (n - 1).bit_length() if n <= 8 else -(-n // 8) * 8


class _ForkedCache:
    """The same with each prompt's keys and values once, however many slots go on from it, on a CPU. Attention is to
    both parts by themselves, added up by their shares of the softmax's sum."""

    def __init__(self, past: Past, pad: Tensor | None, room: int, max_new: int) -> None:
        P, K, _, D = past[0][0].shape
        self.past, self.pad, self.used = past, pad, 0
        self.kv = past[0][0].new_empty(len(past), 2, max(P, room), K, max_new, D)
        self.prompt_of = list(range(P))
        self._group()

    def _group(self) -> None:
        """Slots prompt by prompt, padded to the prompt with most of them."""
        of = [
            [slot for slot, p in enumerate(self.prompt_of) if p == prompt]
            for prompt in range(len(self.past[0][0]))
        ]
        self.most = max(map(len, of))
        self.slots = torch.tensor(
            [slot for each in of for slot in (each + [0] * self.most)[: self.most]]
        )
        place = {
            slot: i * self.most + j for i, each in enumerate(of) for j, slot in enumerate(each)
        }
        self.place = torch.tensor([place[slot] for slot in range(len(self.prompt_of))])

    def layers(self, n: int) -> Iterator[tuple[Write, Attend]]:
        assert n == len(self.prompt_of), (n, len(self.prompt_of))
        self.used += 1
        held = self.kv[:, :, :n, :, : self.used]
        new = held[..., -1, :].transpose(1, 2).unbind()
        for at, kv, prompt in zip(new, held.unbind(), self.past, strict=True):
            yield at.copy_, partial(self._attend, (kv[0], kv[1]), prompt)

    def _attend(
        self,
        answer: tuple[Tensor, Tensor],
        prompt: tuple[Tensor, Tensor],
        q: Float[Tensor, "n K h D"],
        scale: float,
    ) -> Float[Tensor, "n K h D"]:
        K, h, D = q.shape[1:]
        P = len(prompt[0])
        grouped = (
            q[self.slots]
            .view(P, self.most, K, h, D)
            .transpose(1, 2)
            .reshape(P, K, self.most * h, D)
        )
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        before, log_before = flash(grouped, *prompt, attn_mask=self.pad, scale=scale)
        since, log_since = flash(q, *answer, scale=scale)

        def back(x: Tensor) -> Tensor:
            return (
                x.view(P, K, self.most, h, -1)
                .transpose(1, 2)
                .reshape(P * self.most, K, h, -1)[self.place]
            )

        share = torch.sigmoid(back(log_before) - log_since[..., None])
        return torch.lerp(since, back(before), share.to(q.dtype))

    def keep(self, slots: Sequence[int]) -> None:
        """Slot i becomes what slots[i] was."""
        to = [i for i, slot in enumerate(slots) if slot != i]
        if to and self.used:
            source = [slots[i] for i in to]
            for kv in self.kv[..., : self.used, :]:
                kv[:, to] = kv[:, source]
        self.prompt_of = [self.prompt_of[slot] for slot in slots]
        read = sorted({*self.prompt_of})
        # those of ended rows are read at every step: worth a copy now
        if len(read) <= len(self.past[0][0]) // 2:
            self.past = [(k[read], v[read]) for k, v in self.past]
            self.pad = None if self.pad is None else self.pad[read]
            self.prompt_of = [read.index(p) for p in self.prompt_of]
        self._group()


@dataclass(frozen=True, slots=True)
class _Captured:
    """A step as a CUDA graph, and where it leaves its logits. The graphs of a decoder share their memory: the logits
    are read before another step."""

    graph: Any
    logits: Float[Tensor, "n V"]


class LeanDecoder:
    """Decoder for Llama-like blocks (Llama, Mistral, Qwen 2 and 3), without transformers' cost per layer and token.

    Prompts go through the model's own forward. After that a step is about 25 tensor operations a layer on static
    key/value buffers, in which a slot that nobody reads any more is overwritten instead of everything being copied.

    static: a step reads and writes the same addresses each time, in few different widths. On a GPU each is captured as
    a CUDA graph when it is asked for a third time, and replayed from then on: one call in place of about 900.
    """

    drop_at = 0.0

    def __init__(self, model: PreTrainedModel, static: bool = False) -> None:
        self.model, self.static = model, static
        self.captures = static and model.device.type == "cuda"
        # width and blocks → the graph, or how often it was run
        self.steps: dict[tuple[int, int], _Captured | int] = {}
        self.core: Any = backbone(model)
        self.heads: int = model.config.num_attention_heads
        self.kv_heads: int = model.config.num_key_value_heads
        self.small = small = sum(p.numel() for p in model.parameters()) < SMALL
        kind = _Prepacked if not small and _prepacks(model) else _Plain
        self.layers = [_Block.of(layer, kind, small) for layer in self.core.layers]
        self.final = _Norm.of(self.core.norm.weight, self.core.norm)
        embeddings: Any = model.get_input_embeddings()
        self.embeddings: Tensor = embeddings.weight
        self.head = kind.of([model.get_output_embeddings()], small)

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], room: int, max_new: int
    ) -> Float[Tensor, "P V"]:
        if self.small:
            hf = HfDecoder(self.model)
            logits = hf.prefill(prompts, room, max_new)
            past = _past(hf.cache)
        else:
            logits, past = self._read_in_parts(prompts)
        lengths = uploaded([len(p) for p in prompts], logits.device)
        longest = past[0][0].shape[2]
        before = torch.arange(longest, device=logits.device) < (longest - lengths)[:, None]
        pad = None
        if min(map(len, prompts)) < longest:
            pad = torch.zeros_like(before, dtype=logits.dtype).masked_fill(before, -torch.inf)[
                :, None, None
            ]
        forks = not self.small and logits.device.type == "cpu"
        kind = _StaticCache if self.static else _ForkedCache if forks else _Cache
        self.cache = kind(past, pad, room, max_new)
        self.position = torch.zeros(
            width(max(len(prompts), room)), dtype=torch.long, device=logits.device
        )
        self.position[: len(prompts)] = lengths
        self.tokens = torch.zeros_like(self.position)
        every = torch.arange(longest + max_new, device=logits.device)[None]
        cos, sin = self.core.rotary_emb(logits, every)
        # x·cos + rotate_half(x)·sin, with rotate_half(x) = roll(x, D/2) · (−1 … −1, 1 … 1)
        half = torch.ones_like(sin[0, 0])
        half[: len(half) // 2] = -1
        self.cos, self.sin = cos[0], sin[0] * half
        return logits

    def _read_in_parts(
        self, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[Float[Tensor, "P V"], Past]:
        """The prompts' logits, keys and values, from parts of like lengths: little padding, and on a CPU activations
        that stay in its cache."""
        at_once = READ_CPU if self.model.device.type == "cpu" else READ
        longest = max(map(len, prompts))
        logits, past = torch.empty(0), Past()
        for part in _alike([len(p) for p in prompts], at_once):
            hf = HfDecoder(self.model)
            last = hf._read([prompts[i] for i in part])
            of_part, read = masked(self.model, self.head(last)), _past(hf.cache)
            if not past:
                logits = of_part.new_empty(len(prompts), of_part.shape[-1])
                shape = (len(prompts), read[0][0].shape[1], longest, read[0][0].shape[3])
                past = [(k.new_zeros(shape), v.new_zeros(shape)) for k, v in read]
            at = uploaded(part, logits.device)
            logits[at] = of_part
            for pair, of_layer in zip(past, read, strict=True):
                for kept, held in zip(pair, of_layer, strict=True):
                    kept[at, :, longest - held.shape[2] :] = held
        return logits, past

    @torch.inference_mode()
    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        if not isinstance(self.cache, _StaticCache):
            return self._forward(tokens)
        n = len(tokens)
        self.tokens[:n] = tokens
        key = width(n), self.cache.blocks
        known = self.steps.get(key, 0)
        if self.captures and known == 2:
            known = self.steps[key] = self._captured(key[0])
        if isinstance(known, _Captured):
            known.graph.replay()
            logits = known.logits
        else:
            self.steps[key] = known + 1
            logits = self._forward(self.tokens[: key[0]])
        self.cache.used += 1
        return logits[:n]

    def _captured(self, n: int) -> "_Captured | int":
        """The step of n slots as a graph; nothing is computed. Where it cannot be: all are run as they are."""
        try:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            pool = next(
                (
                    known.graph.pool()
                    for known in self.steps.values()
                    if isinstance(known, _Captured)
                ),
                None,
            )
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    logits = self._forward(self.tokens[:n])
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
            return _Captured(graph, logits)
        except (RuntimeError, AttributeError) as e:
            logger.warning(
                f"a decoding step cannot be captured, and runs as it is: {str(e).partition(chr(10))[0]}"
            )
            self.captures = False
            return 0

    def _forward(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        n, H, K, D = len(tokens), self.heads, self.kv_heads, self.cos.shape[-1]
        position = self.position[:n]
        cos, sin = self.cos[position, None], self.sin[position, None]
        x = self.embeddings[tokens]
        for block, (write, attend) in zip(self.layers, self.cache.layers(n), strict=True):
            qkv = block.qkv(block.before(x)).view(n, H + 2 * K, D)
            qk = qkv[:, : H + K]
            if block.qk_norm is not None:
                qk = block.qk_norm(qk)
            torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin, out=qkv[:, : H + K])
            write(qkv[:, H:].view(n, 2, K, D))
            q = qkv[:, :H].view(n, K, H // K, D)  # the queries of a key/value head are its rows
            x = block.out.add(x, attend(q, scale=block.scale).reshape(n, H * D))
            x = block.down.add(x, block.up.gated(block.after(x)))
        self.position += 1
        return masked(self.model, self.head(self.final(x)))

    def keep(self, slots: Sequence[int]) -> None:
        self.cache.keep(slots)
        self.position[: len(slots)] = self.position[uploaded(list(slots), self.position.device)]


def _past(cache: DynamicCache) -> Past:
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    return [
        (layer.keys, layer.values)
        for layer in layers
        if layer.keys is not None and layer.values is not None
    ]


def _alike(lengths: Sequence[int], at_once: int) -> Iterator[list[int]]:
    """Prompts by length, as many together as take at_once tokens with their padding; one at least."""
    part: list[int] = []
    # the first of a part is its longest
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if part and (len(part) + 1) * lengths[part[0]] > at_once:
            yield part
            part = []
        part.append(i)
    yield part


# ── does a decoder compute the model?


@torch.no_grad()
def _three_steps(
    decoder: Decoder, prompts: Sequence[tuple[int, ...]], tokens: Tensor
) -> Float[Tensor, "8 V"]:
    """Logits of the prompts and of two steps after them, where one prompt branches."""
    logits = [decoder.prefill(prompts, 3, 2)]
    decoder.keep([0, 1, 1])
    return torch.cat([*logits, decoder.step(tokens), decoder.step(tokens)])


def _agree(
    model: PreTrainedModel,
    got: Callable[..., Tensor],
    want: Callable[..., Tensor],
    fp32: float,
    bf16: float,
) -> bool:
    """Whether in one of the trials every row of logits is right but for so much of its norm."""
    bound = fp32 if model.dtype.itemsize >= 4 else bf16
    for first in trial_tokens(model):
        # two prompts, the second shorter: padding and positions count; and the tokens that three
        # slots go on with
        prompts = [tuple(range(first, first + 8)), tuple(range(first + 2, first + 5))]
        tokens = torch.arange(first + 4, first + 7, device=model.device)
        right = want(prompts, tokens).float()
        off = (got(prompts, tokens).float() - right).norm(dim=-1) / right.norm(dim=-1)
        if bool((off <= bound).all()):
            return True
    return False


def require_branching(model: PreTrainedModel) -> None:
    """Raises Refused where HfDecoder, through the model's own cache, is not what the model says of each row by
    itself: a cache that cannot be branched, or one that the model does not read."""

    @torch.no_grad()
    def alone(prompts: Sequence[tuple[int, ...]], tokens: Tensor) -> Float[Tensor, "8 V"]:
        rows = [
            [*prompts[prompt], token, token]
            for prompt, token in zip((0, 1, 1), tokens.tolist(), strict=True)
        ]
        ids = [torch.tensor([row], device=model.device) for row in rows]
        last = torch.stack([model(input_ids=row, use_cache=False).logits[0, -3:] for row in ids], 1)
        # by step: two branches are one row before the first
        return torch.cat([last[0, :2], *last[1:]])

    try:  # recurrences add up in another order: 1e-3 of Nemotron-H
        fits = _agree(model, partial(_three_steps, HfDecoder(model)), alone, 1e-2, 1e-1)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # whatever a model's own code raises
        logger.debug(f"{type(model).__name__}: {type(e).__name__}: {e}")
        fits = False
    if not fits:
        raise Refused(
            f"{type(model).__name__}: keeps a state that sampling cannot branch; not supported"
        )


def lean_fits(model: PreTrainedModel) -> bool:
    """Whether LeanDecoder computes this model: by its class and configuration first, then by its logits."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    known = (
        type(model).__name__ in LLAMAS
        and config.hidden_act == "silu"
        # the others change with the sequence's length
        and rope in ("default", "linear", "llama3", "yarn")
        # no sliding window
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    )
    if not known:
        return False
    got, want = (partial(_three_steps, decoder(model)) for decoder in (LeanDecoder, HfDecoder))
    # In fp32 both orders of summation agree to about 1e-6; in bf16, over 30 layers, to about 4e-2.
    if _agree(model, got, want, 1e-4, 1e-1):
        return True
    logger.warning(
        f"{type(model).__name__}: the lean decoder disagrees with transformers: sampling without it"
    )
    return False
