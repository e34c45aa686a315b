"""Keys and values of what is being decoded, in the layouts that devices are fast with."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vgrout.model.attention import uploaded

BLOCK = 128  # positions by which the static cache's attention grows


class LayerPast(NamedTuple):
    """Keys and values of prompts in one layer."""

    keys: Float[Tensor, "P K T D"]
    values: Float[Tensor, "P K T D"]


Past = list[LayerPast]
# queries by key/value head [n, K, h, D], scale= → what they read
Attend = Callable[..., Float[Tensor, "n K h D"]]
# the next token's keys and values into the cache
Write = Callable[[Float[Tensor, "n 2 K D"]], object]


class KVCache:
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

        The caller counts that token in `used` when all layers have written it.
        """
        with_next = self.used + 1
        held = self.kv[:, :, :n, :, :with_next]
        new = held[..., -1, :].transpose(1, 2).unbind()
        mask = None if self.pad is None else self.pad[:n, ..., :with_next]
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


class StaticCache(KVCache):
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
        """As in `KVCache`."""
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


class ForkedCache:
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
        """As in `KVCache`."""
        assert n == len(self.prompt_of), (n, len(self.prompt_of))
        held = self.kv[:, :, :n, :, : self.used + 1]
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
