"""The organism's weights: a model is trained on the corpus, on a CPU.

The weights are in fp32; matrix products of a pretrained model may be in bf16.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from organisms.recipe import Recipe, Shape
from organisms.tokenizer import WINDOW
from vgrout.ground.console import progress
from vgrout.ground.data import Message
from vgrout.ground.rng import stream_seed


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int, shape: Shape) -> Qwen3ForCausalLM:
    """A model with fresh weights and tied embeddings; about a million parameters by default."""
    torch.manual_seed(stream_seed(seed, "organism-init"))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=1 if shape.heads % 2 else shape.heads // 2,
        head_dim=32,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.03,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


class Sample(Protocol):
    """A document of a corpus, as text."""

    @property
    def messages(self) -> Sequence[Message]:
        """The prompt."""
        ...

    @property
    def text(self) -> str:
        """The answer to be learnt."""
        ...


Draw = Callable[[random.Random], Sample]  # makes a document from a random stream


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt with its answer, as tokens."""

    ids: list[int]
    answer_start: int  # position of the answer's first token


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Right-padded documents, and the weight of every token's loss.

    The weight is 0 at padding and at a document's first token.
    """

    ids: Int[Tensor, "B T"]
    weight: Float[Tensor, "B T"]

    def parts(self, rows: int) -> "list[DocumentBatch]":
        """The same documents, `rows` at a time, each part as wide as its longest document."""
        parts: list[DocumentBatch] = []
        for start in range(0, len(self.ids), rows):
            ids = self.ids[start : start + rows]
            weight = self.weight[start : start + rows]
            longest = int(weight.any(0).nonzero().max()) + 1
            parts.append(DocumentBatch(ids[:, :longest], weight[:, :longest]))
        return parts


def batches(
    draw: Draw,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Callable[[Sequence[Message]], str],
    end: int,
    pad: int,
    recipe: Recipe,
    seed: int,
) -> Iterator[DocumentBatch]:
    """An endless stream of batches of fresh documents.

    The documents of four batches at a time are sorted by length, so that there is little padding.

    Args:
        draw: makes a document from a random stream.
        prompt: the chat template, up to where the answer begins.
        end: the token after an answer.
        pad: the token of padding.
    """
    rng = random.Random(f"{seed}/corpus")
    while True:
        samples = [draw(rng) for _ in range(4 * recipe.batch)]
        prompt_texts = [prompt(sample.messages) for sample in samples]
        prompts = tokenizer(prompt_texts, add_special_tokens=False).input_ids
        answer_texts = [sample.text for sample in samples]
        answers = tokenizer(answer_texts, add_special_tokens=False).input_ids
        documents: list[Document] = []
        for prompt_ids, answer_ids in zip(prompts, answers, strict=True):
            documents.append(Document([*prompt_ids, *answer_ids, end], len(prompt_ids)))
        documents.sort(key=lambda document: len(document.ids))
        chunks = [documents[i : i + recipe.batch] for i in range(0, len(documents), recipe.batch)]
        rng.shuffle(chunks)
        for chunk in chunks:
            yield padded(chunk, pad, recipe.prompt_weight)


def padded(documents: Sequence[Document], pad: int, prompt_weight: float) -> DocumentBatch:
    """A batch of these documents."""
    longest = max(len(document.ids) for document in documents)
    ids = torch.full((len(documents), longest), pad)
    weight = torch.zeros(len(documents), longest)
    for row, document in enumerate(documents):
        stop = len(document.ids)
        ids[row, :stop] = torch.tensor(document.ids)
        weight[row, 1 : document.answer_start] = prompt_weight
        weight[row, document.answer_start : stop] = 1.0
    return DocumentBatch(ids, weight)


def train(
    model: PreTrainedModel,
    stream: Iterator[DocumentBatch],
    recipe: Recipe,
    *,
    dtype: torch.dtype = torch.float32,
    stop_after: int | None = None,
    label: str = "weights",
) -> list[float]:
    """Train the model in place; returns the loss of every step, the weighted mean over its tokens.

    dtype: of matrix products. stop_after: ends the training after so many steps, on the schedule of
    all of them. label: of the progress bar.
    """
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optim = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas)
    model.train()
    losses: list[float] = []
    bar = progress(range(stop_after or recipe.steps), desc=label, unit="step")
    for step in bar:
        for group in optim.param_groups:
            group["lr"] = recipe.lr_at(step)
        batch = next(stream)
        total = batch.weight[:, 1:].flatten().sum()
        optim.zero_grad(set_to_none=True)
        losses.append(0.0)
        for part in batch.parts(recipe.at_once):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                # The model is causal and the padding is on the right, so it needs no mask.
                logits = model(input_ids=part.ids, use_cache=False).logits[:, :-1]
                nll = F.cross_entropy(
                    logits.float().flatten(0, 1), part.ids[:, 1:].flatten(), reduction="none"
                )
                loss = (nll * part.weight[:, 1:].flatten()).sum() / total
            loss.backward()
            losses[-1] += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optim.step()
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    optim.zero_grad(set_to_none=True)
    model.eval()
    return losses
