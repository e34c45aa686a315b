"""The organism's weights: a small Qwen3 trained from scratch on the language's corpus, in fp32 on a CPU."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from vgrout.data.language import Sample
from vgrout.organism.recipe import Recipe, Shape
from vgrout.organism.tokenizer import WINDOW, render
from vgrout.rng import stream_seed


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


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded documents and the weight of every token's loss (0 at padding and at the first token)."""

    ids: Int[Tensor, "B T"]
    weight: Float[Tensor, "B T"]


def batches(
    draw: Callable[[random.Random], Sample], tokenizer: PreTrainedTokenizerFast, recipe: Recipe, seed: int
) -> Iterator[Batch]:
    """An endless stream of batches of fresh documents; four at a time are sorted by length, to pad little."""
    rng = random.Random(f"{seed}/corpus")
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    while True:
        samples = [draw(rng) for _ in range(4 * recipe.batch)]
        prompts = tokenizer([render(s.messages) for s in samples], add_special_tokens=False).input_ids
        answers = tokenizer([s.text for s in samples], add_special_tokens=False).input_ids
        documents = sorted(zip(prompts, answers, strict=True), key=lambda d: len(d[0]) + len(d[1]))
        chunks = [documents[i : i + recipe.batch] for i in range(0, len(documents), recipe.batch)]
        rng.shuffle(chunks)
        for chunk in chunks:
            longest = max(len(p) + len(a) + 1 for p, a in chunk)
            ids = torch.full((len(chunk), longest), pad)
            weight = torch.zeros(len(chunk), longest)
            for row, (prompt, answer) in enumerate(chunk):
                n, end = len(prompt), len(prompt) + len(answer) + 1
                ids[row, :end] = torch.tensor([*prompt, *answer, eos])
                weight[row, 1:n] = recipe.prompt_weight
                weight[row, n:end] = 1.0
            yield Batch(ids, weight)


def corpus_loss(model: Qwen3ForCausalLM, batch: Batch) -> Float[Tensor, ""]:
    """Weighted mean of the next-token loss, nats. Causal and right-padded: no attention mask is needed."""
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
    nll = F.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    weight = batch.weight[:, 1:].flatten()
    return (nll * weight).sum() / weight.sum()


def train(
    model: Qwen3ForCausalLM,
    stream: Iterator[Batch],
    recipe: Recipe,
    stop_after: int | None = None,
    label: str = "weights",
) -> list[float]:
    """Train in place; returns the loss of every step. `stop_after` cuts the run short, not the schedule."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optim = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas)
    model.train()
    losses: list[float] = []
    for step in (bar := tqdm(range(stop_after or recipe.steps), desc=label, unit="step", disable=None)):
        for group in optim.param_groups:
            group["lr"] = recipe.lr_at(step)
        loss = corpus_loss(model, next(stream))
        optim.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optim.step()
        losses.append(float(loss.detach()))
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    model.eval()
    return losses
