"""Decoders: one token at a time for a whole batch of slots.

Each prompt is read once, slots branch where answers do, and finished rows leave. `HfDecoder` runs
any transformers model; `LeanDecoder` runs Llama-like ones faster.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from vgrout.model.attention import uploaded
from vgrout.model.logprobs import backbone, head_logits


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


# ── caches of keys and values


# ── Llama-like models
