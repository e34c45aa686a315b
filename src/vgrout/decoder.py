"""One decoding step at a time, for a whole batch: prompts in once, rows out as they finish."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@runtime_checkable
class Decoder(Protocol):
    """Keys and values of the rows being decoded. Rows are addressed by slot, 0 … n-1."""

    def prefill(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[int], max_new: int) -> Float[Tensor, "n V"]:
        """Run each prompt once; slot i then continues prompts[rows[i]]. Logits of each slot's first token."""
        ...

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        """Append one token to every slot; logits of the next."""
        ...

    def keep(self, slots: Sequence[int]) -> None:
        """Slot i becomes what slot slots[i] was; the others are forgotten."""
        ...


class HfDecoder:
    """Any transformers model, through its own forward and cache: left-padded prompts, an attention mask."""

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
