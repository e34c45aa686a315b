"""The organism's weights: a small Qwen3 trained from scratch on the language's corpus, in fp32 on a CPU."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from vgrout.organism.language import Sample
from vgrout.organism.tokenizer import WINDOW, render
from vgrout.rng import stream_seed


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the base is trained."""

    steps: int = 800
    batch: int = 64
    lr: float = 4e-3
    warmup: int = 40
    floor: float = 0.02  # of the peak rate, at the last step
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    clip: float = 1.0
    prompt_weight: float = 0.1  # of a prompt token's loss: reading the prompt helps to copy from it

    def rate(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Fresh weights: 4 layers, hidden 128, about a million parameters, embeddings tied."""
    torch.manual_seed(stream_seed(seed, "organism-init"))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
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
    """Batches of fresh documents without end; four at a time are sorted by length, to pad little."""
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
    model: Qwen3ForCausalLM, stream: Iterator[Batch], recipe: Recipe, stop_after: int | None = None, label: str = "weights"
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
            group["lr"] = recipe.rate(step)
        loss = corpus_loss(model, next(stream))
        optim.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optim.step()
        losses.append(float(loss.detach()))
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    model.eval()
    return losses


def quick_sample(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    seed: int,
    max_new: int,
    temperature: float = 0.7,
    top_k: int = 20,
    batch: int = 192,
    label: str = "sampling",
) -> list[tuple[list[int], str]]:
    """One answer per prompt: token ids (with EOS where it ended) and text. Own random stream; rows of one length together."""
    generator = torch.Generator().manual_seed(stream_seed(seed, "organism-sample"))
    ids = [tokenizer(p, add_special_tokens=False).input_ids for p in prompts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    out: list[tuple[list[int], str]] = [([], "")] * len(ids)
    for start in (bar := tqdm(range(0, len(order), batch), desc=label, unit="batch", disable=None)):
        del bar
        rows = order[start : start + batch]
        for i, made in zip(rows, _decode(model, [ids[i] for i in rows], generator, max_new, temperature, top_k), strict=True):
            out[i] = (made, tokenizer.decode([t for t in made if t != tokenizer.eos_token_id]))
    return out


@torch.no_grad()
def _decode(
    model: Qwen3ForCausalLM, prompts: list[list[int]], generator: torch.Generator, max_new: int, temperature: float, top_k: int
) -> list[list[int]]:
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    position = (mask.cumsum(1) - 1).clamp(min=0)
    live = list(range(len(prompts)))
    made: list[list[int]] = [[] for _ in prompts]
    cache = None
    for _ in range(max_new):
        step = model(input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        top, index = (step.logits[:, -1] / temperature).topk(top_k)
        pick = torch.multinomial(top.softmax(-1), 1, generator=generator)
        new = index.gather(1, pick).squeeze(1)
        for row, token in zip(live, new.tolist(), strict=True):
            made[row].append(token)
        going = new != eos
        if not going.any():
            break
        if not going.all():
            cache.batch_select_indices(going.nonzero().squeeze(1))
            live = [row for row, go in zip(live, going.tolist(), strict=True) if go]
            new, mask, position = new[going], mask[going], position[going]
        ids = new[:, None]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        position = position[:, -1:] + 1
    return made
