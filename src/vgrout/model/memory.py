"""Memory: how much is processed at once, and what a run needs, from the model's shapes alone. Torch-free: nothing is
loaded, nothing fetched."""

import sys
from dataclasses import dataclass, replace
from typing import Any

from vgrout.config.run import Config
from vgrout.model.source import FP32, Shapes, find_shapes

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is processed at once."""

    tokens: int  # in one forward with a graph, padding included
    activations: int  # bytes that autograd keeps while a direction is extracted
    kv: int  # bytes while sampling: of the keys and values, and of the logits


# A 4B model keeps about 5.6 MB of activations a token. On a CPU a batch of 1,024 takes no more time
# a token than one of 16,384 and holds a fraction of its activations. Qwen3-4B in bf16 has 147 kB of
# keys and values a token: 24 GiB are about 100 rows of 1,700 tokens, while `full` wants 258 a step.
USUAL = {"cpu": Budget(1_024, 2**30, 4 * GIB), "cuda": Budget(4_096, 24 * GIB, 24 * GIB)}
# tokens of a forward on a GPU that holds them: in narrower ones the GPU waits for the host's calls
WIDEST = 16_384

# Logit elements held at once. Above it the head runs in chunks that backward computes again: 2^24
# fp32 is 64 MiB. On a GPU a chunk of 110 positions (2^24 of Qwen3's vocabulary) would read the
# head's weights more than it would multiply.
HEAD_BUDGET = {"cpu": 2**24, "cuda": 2**26}

# of the CUDA driver and its libraries, outside torch's own count
CONTEXT = {"cpu": 0, "cuda": 600 * 2**20}
# of what is free: torch's allocator reserved 1.04 × what was in use at the peak of `fast` on an
# H200
SPARED = 0.92
CARDS = (24, 48, 80, 141)  # GB
PROMPT_TOKENS = 500  # of a LeetCode prompt; real ones have 224 to 841
# tokens of the copies that branches of packed rows may have of what leads to them, a token of the
# budget
BRANCHES = 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes in use at the same time, if one GPU holds all of it."""

    weights: int  # a teacher's, too
    factors: int  # U and Vh
    merged: int  # W' for each set of weights that training uses: as trained, as deployed
    # δS, δS_hack, their moments, every rollout's gradient; where all weights learn, what that adds
    adapter: int
    context: int  # the dither of bf16, and the driver's
    activations: int  # one micro-batch, and the copies of prompts that its branches read
    logits: int  # one chunk of the head, with its gradient
    # while sampling: of the rows that go at once, again of their prompts, which are read apart,
    # their logits
    kv: int
    weight_sets: int
    rows: int  # sampled at once
    budget: Budget

    @property
    def standing(self) -> int:
        """What is there in every phase."""
        return self.weights + self.factors + self.merged + self.adapter + self.context

    @property
    def peak(self) -> int:
        """The most at any time: update and sampling do not happen at once."""
        return self.standing + max(self.activations + self.logits, self.kv)

    def lines(self) -> list[str]:
        """As the dry run prints it."""

        def g(n: int) -> str:
            return f"{n / GIB:.2f}"

        return [
            f"memory        weights {g(self.weights)} · SVD factors {g(self.factors)} · merged weights "
            f"{g(self.merged)} ({self.weight_sets} set{'s' if self.weight_sets > 1 else ''}) · adapter "
            f"{g(self.adapter)} · driver, dither {g(self.context)} GiB",
            f"              update of {self.budget.tokens:,} tokens: + activations {g(self.activations)} · logits "
            f"{g(self.logits)} GiB; sampling {self.rows} rows at once: + keys and values {g(self.kv)} GiB",
            f"              peak about {g(self.peak)} GiB, from shapes alone",
        ]


def sampled_row(
    token: int, layers: int, vocab: int, prompt: int, max_new: int, per_prompt: int
) -> int:
    """Bytes of a row while it is sampled. token: of its keys and values. The prompt is there once more for its
    `per_prompt` answers, as it was read, and of one layer when it is copied to them; logits as the model gives them,
    in fp32, their log-softmax, and tempered."""
    return (
        token * (prompt + max_new + -(-prompt // per_prompt))
        + token // layers * prompt
        + vocab * 14
    )


def plan(
    shapes: Shapes,
    *,
    device: str,
    size: int,
    group: int,
    prompts: int,
    max_new: int,
    routes: bool,
    by_rollout: bool = False,
    prompt_tokens: int = PROMPT_TOKENS,
    room: int | None = None,
    beside: int = 0,
    full: bool = False,
) -> MemoryPlan:
    """Bytes of a training run. device: "cuda" or "cpu". size: bytes of a weight. prompt_tokens: of a typical prompt.
    routes: the method has a quarantine, so the model as trained and as deployed are two sets of weights. by_rollout: it
    needs each rollout's own gradient, and so a copy of its prompt's keys and values for each. room: bytes that the run
    may have, to which its budget is cut, or on a GPU stretched; None: the usual budget. beside: numbers of a teacher,
    its factors and merged weights too. full: all weights learn, and none is decomposed."""
    rows, row, usual = group * prompts, prompt_tokens + max_new, USUAL[device]
    kept, token_kv = shapes.activation_bytes(size), shapes.kv_bytes(size)
    # A branch's copies of keys and values: on a CPU kept in every layer; on a GPU one layer's, then
    # their gradients, by query head before they are added up. A rollout with a gradient of its own
    # has one of its prompt's in every layer.
    q = shapes.heads * shapes.head_dim * size
    copied = token_kv if device == "cpu" else 2 * token_kv // shapes.layers + 2 * q
    family = prompt_tokens + group * max_new
    branches = group if by_rollout else group - 1
    kept += int(copied * min(BRANCHES, branches * row / family))
    # Of prompts that are read before their answers: Vh x, and for each rollout a copy of the keys
    # and values, with its gradient.
    apart = shapes.R * size + 2 * group * token_kv if by_rollout else 0
    positions = min(rows * max_new, max(1, HEAD_BUDGET[device] // shapes.vocab))
    weight_sets = 2 if routes else 1
    dither = FP32 * max(a * b for a, b in shapes.linears.values()) if size < FP32 else 0
    of_row = sampled_row(token_kv, shapes.layers, shapes.vocab, prompt_tokens, max_new, group)
    made = MemoryPlan(
        weights=(shapes.parameters + beside) * size,
        factors=0 if full else shapes.svd_cache_bytes(size),
        merged=0 if full else weight_sets * shapes.adapted * size,
        # two vectors, as they are and as merged, two moments each, their gradients; fingerprints; a
        # rollout's gradient, of a view and of both; of all weights, gradients and two moments
        adapter=3 * shapes.parameters * size if full else (6 + 2 + 6 + 2 * rows) * shapes.R * FP32,
        context=dither + CONTEXT[device],
        activations=0,
        # logits in the weights' dtype and in fp32, and the gradient of both
        logits=positions * shapes.vocab * 2 * (size + FP32),
        kv=0,
        weight_sets=weight_sets,
        rows=0,
        budget=usual,
    )
    if room is not None:
        spare = max(0, int(SPARED * room) - made.standing)
        # prompts, however long, are at most half of it
        fits = 2 * max(0, spare - made.logits) // (2 * kept + apart)
        kv, widest = (spare, WIDEST) if device == "cuda" else (min(usual.kv, spare), usual.tokens)
        made = replace(
            made,
            budget=Budget(max(row, min(widest, fits)), min(usual.activations, fits * kept), kv),
        )
    tokens, at_once = max(made.budget.tokens, row), min(rows, max(1, made.budget.kv // of_row))
    activations = (
        min(prompts * family, tokens) * kept + min(prompts * prompt_tokens, tokens // 2) * apart
    )
    return replace(made, activations=activations, kv=at_once * of_row, rows=at_once)


def plan_of(
    cfg: Config, shapes: Shapes, *, room: int | None, beside: int = 0, **more: Any
) -> MemoryPlan:
    """A run's plan. room: bytes that are free for it; --memory-gib may allow fewer. Others: as `plan`."""
    teacher = find_shapes(cfg.teacher_model_path) if cfg.loss.teacher_model else None
    if cfg.run.memory_gib:
        room = min(room or sys.maxsize, int(cfg.run.memory_gib * GIB))
    return plan(
        shapes,
        group=cfg.scale.group,
        prompts=cfg.scale.prompts_per_step,
        max_new=cfg.scale.max_new,
        routes=cfg.method.routes,
        by_rollout=cfg.method.spec.by_rollout or cfg.method.monitor_spec.reads == "gradients",
        room=room,
        beside=beside + (teacher.parameters if teacher else 0),
        **more,
    )
