"""Memory: how much is processed at once, and what a run needs, from the model's shapes alone.

Torch-free: nothing is loaded, nothing fetched.
"""

import sys
from dataclasses import dataclass, replace

from vgrout.config.run import Config
from vgrout.model.load.source import FP32, Shapes, find_shapes

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is processed at once."""

    tokens: int  # in one forward with a graph, padding included
    activations: int  # bytes that autograd keeps while a direction is extracted
    kv: int  # bytes of keys, values and logits while sampling


# A 4B model keeps about 5.6 MB of activations a token. On a CPU a batch of 1,024 takes no more time
# a token than one of 16,384 and holds a fraction of its activations. Qwen3-4B in bf16 has 147 kB of
# keys and values a token: 24 GiB are about 100 rows of 1,700 tokens, while `full` wants 258 a step.
USUAL = {"cpu": Budget(1_024, 2**30, 4 * GIB), "cuda": Budget(4_096, 24 * GIB, 24 * GIB)}
# Most tokens of a forward, on a GPU that holds them. In fewer the GPU waits for the host's calls.
WIDEST = 16_384

# Logit elements held at once. Above it the head runs in chunks that backward computes again: 2^24
# fp32 is 64 MiB. On a GPU a chunk of 110 positions (2^24 of Qwen3's vocabulary) would read the
# head's weights more than it would multiply.
HEAD_BUDGET = {"cpu": 2**24, "cuda": 2**26}

# Bytes of the CUDA driver and its libraries, outside torch's own count.
CONTEXT = {"cpu": 0, "cuda": 600 * 2**20}
# Share of the free memory that is planned with: torch's allocator reserved 1.04 × what was in use
# at the peak of `fast` on an H200.
SPARED = 0.92
PROMPT_TOKENS = 500  # of a LeetCode prompt; real ones have 224 to 841
# Branches of packed rows have copies of the keys and values that lead to them: at most so many
# tokens of copies a token of the budget.
BRANCHES = 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes in use at the same time, if one GPU holds all of it."""

    weights: int  # a teacher's, too
    factors: int  # U and Vh
    merged: int  # W', and of blocks that differ as trained and as deployed both
    # δS, δS_hack, their moments, every rollout's gradient; where all weights learn, what that adds
    adapter: int
    context: int  # the dither of bf16, and the driver's
    activations: int  # one micro-batch, and the copies of prompts that its branches read
    logits: int  # one chunk of the head, with its gradient
    kv: int  # while sampling: as `sampled_row`, of the rows that go at once
    quarantined: int  # so many blocks are held as trained and as deployed
    rows: int  # sampled at once
    budget: Budget

    @property
    def standing(self) -> int:
        """Bytes in use in every phase."""
        return self.weights + self.factors + self.merged + self.adapter + self.context

    @property
    def peak(self) -> int:
        """The most at any time: update and sampling do not happen at once."""
        return self.standing + max(self.activations + self.logits, self.kv)

    def lines(self) -> list[str]:
        """The lines that the dry run prints."""
        blocks = "block" if self.quarantined == 1 else "blocks"
        twice = f" ({self.quarantined} {blocks} twice)" if self.quarantined else ""
        standing = (
            f"weights {_gib(self.weights)} · SVD factors {_gib(self.factors)} · "
            f"merged weights {_gib(self.merged)}{twice} · "
            f"adapter {_gib(self.adapter)} · driver, dither {_gib(self.context)} GiB"
        )
        phases = (
            f"update of {self.budget.tokens:,} tokens: + activations {_gib(self.activations)} · "
            f"logits {_gib(self.logits)} GiB; "
            f"sampling {self.rows} rows at once: + keys and values {_gib(self.kv)} GiB"
        )
        return [
            f"memory        {standing}",
            f"              {phases}",
            f"              peak about {_gib(self.peak)} GiB, from shapes alone",
        ]


def _gib(n: int) -> str:
    return f"{n / GIB:.2f}"


def sampled_row(
    token: int,
    layers: int,
    vocab: int,
    prompt: int,
    max_new: int,
    per_prompt: int,
) -> int:
    """Bytes of one row while it is sampled: keys and values, and logits.

    A row has keys and values of its own, its share of the prompt's as it was first read, and a copy
    of one layer of the prompt's while they are copied. The logits exist as the model gives them, in
    fp32, as log-softmax, and tempered.

    token: bytes of the keys and values of one token.
    prompt, max_new: tokens of the prompt, and of the longest answer.
    per_prompt: answers to a prompt.
    """
    share_of_prompt = -(-prompt // per_prompt)  # rounded up
    own = token * (prompt + max_new + share_of_prompt)
    layer_copy = token // layers * prompt
    return own + layer_copy + vocab * 14


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step: its tokens, and their bytes."""

    shapes: Shapes
    device: str  # "cuda" or "cpu"
    size: int  # bytes of a weight
    group: int
    prompts: int
    max_new: int
    # Blocks in which the model as trained and as deployed has different weights.
    quarantined: int = 0
    # The method needs each rollout's own gradient, and so a copy of its prompt's keys and values
    # for each.
    by_rollout: bool = False
    prompt_tokens: int = PROMPT_TOKENS  # of a typical prompt
    beside: int = 0  # how many numbers a teacher has, its factors and merged weights too
    shards: int = 1  # ranks that hold the model together; the bytes are those of one

    @property
    def part(self) -> Shapes:
        """What a rank has of the model."""
        return self.shapes.part(self.shards)

    @property
    def rows(self) -> int:
        """Rollouts."""
        return self.group * self.prompts

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_tokens + self.max_new

    @property
    def family_tokens(self) -> int:
        """Tokens of a prompt with all its answers, packed."""
        return self.prompt_tokens + self.group * self.max_new

    def token_activations(self) -> int:
        """Bytes that autograd keeps of one token, the copies that branches read included.

        A branch has copies of the keys and values that lead to it: on a CPU they are kept in every
        layer; on a GPU it is one layer's, then their gradients, by query head before they are added
        up. A rollout with a gradient of its own has a copy of its prompt's in every layer.
        """
        queries = self.part.heads * self.shapes.head_dim * self.size
        copy = self.part.kv_bytes(self.size)
        if self.device != "cpu":
            copy = 2 * copy // self.shapes.layers + 2 * queries
        branches = self.group if self.by_rollout else self.group - 1
        copies = min(BRANCHES, branches * self.row_tokens / self.family_tokens)
        return self.part.activation_bytes(self.size) + int(copy * copies)

    def prompt_token_activations(self) -> int:
        """Bytes of one token of a prompt that is read before its answers.

        These are Vh x, and for each rollout a copy of the keys and values, with its gradient. 0 if
        no rollout has a gradient of its own: prompts are then read with their answers.
        """
        if not self.by_rollout:
            return 0
        copies = 2 * self.group * self.part.kv_bytes(self.size)
        return self.shapes.R * self.size + copies

    def activations(self, tokens: int) -> int:
        """Bytes that autograd keeps, `tokens` a forward; prompts are at most half of them."""
        in_rows = min(self.prompts * self.family_tokens, tokens)
        in_prompts = min(self.prompts * self.prompt_tokens, tokens // 2)
        return in_rows * self.token_activations() + in_prompts * self.prompt_token_activations()

    def logits(self) -> int:
        """Bytes of one chunk of logits: in the weights' dtype and in fp32, and both gradients."""
        chunk = max(1, HEAD_BUDGET[self.device] // self.shapes.vocab)
        positions = min(self.rows * self.max_new, chunk)
        return positions * self.shapes.vocab * 2 * (self.size + FP32)

    def sampled_row(self) -> int:
        """Bytes of one row while it is sampled."""
        return sampled_row(
            self.part.kv_bytes(self.size),
            self.shapes.layers,
            self.shapes.vocab,
            self.prompt_tokens,
            self.max_new,
            self.group,
        )

    def adapter_vectors(self) -> int:
        """Vectors of the adapter's size, R, that training holds."""
        merged_and_not = 2 * 2
        gradients = 2
        moments = 2 * 2
        fingerprint_signs = 4
        # each rollout's gradient: collected under one set of weights, and the sum over both sets
        of_rollouts = 2 * self.rows
        return merged_and_not + gradients + moments + fingerprint_signs + of_rollouts

    def dither(self) -> int:
        """Bytes of the random integers by which half precision is rounded."""
        if self.size >= FP32:
            return 0
        return FP32 * max(d_out * d_in for d_out, d_in in self.shapes.linears.values())

    def budget_within(self, spare: int) -> Budget:
        """The budget where `spare` bytes are left beside what stands in every phase."""
        usual = USUAL[self.device]
        token = self.token_activations()
        # Prompts, however long, are at most half of the tokens.
        two_tokens = 2 * token + self.prompt_token_activations()
        fits = 2 * max(0, spare - self.logits()) // two_tokens
        activations = min(usual.activations, fits * token)
        if self.device == "cuda":
            return Budget(max(self.row_tokens, min(WIDEST, fits)), activations, spare)
        tokens = max(self.row_tokens, min(usual.tokens, fits))
        return Budget(tokens, activations, min(usual.kv, spare))

    def plan(self, room: int | None = None, *, full: bool = False) -> MemoryPlan:
        """Bytes of a training run of such steps.

        room: bytes that the run may have, to which its budget is cut, or on a GPU stretched. None:
            the usual budget.
        full: all weights learn, and none is decomposed.
        """
        shapes, part, size = self.shapes, self.part, self.size
        if full:
            factors = merged = 0
            adapter = 3 * shapes.parameters * size  # gradients and two moments
        else:
            factors = shapes.factors // self.shards * size + shapes.R * FP32
            of_block = part.adapted // shapes.layers
            merged = (shapes.layers + self.quarantined) * of_block * size
            adapter = self.adapter_vectors() * shapes.R * FP32
        made = MemoryPlan(
            weights=(part.parameters + self.beside) * size,
            factors=factors,
            merged=merged,
            adapter=adapter,
            context=self.dither() + CONTEXT[self.device],
            activations=0,
            logits=self.logits(),
            kv=0,
            quarantined=0 if full else self.quarantined,
            rows=0,
            budget=USUAL[self.device],
        )
        if room is not None:
            spare = max(0, int(SPARED * room) - made.standing)
            made = replace(made, budget=self.budget_within(spare))
        tokens = max(made.budget.tokens, self.row_tokens)
        rows = min(self.rows, max(1, made.budget.kv // self.sampled_row()))
        activations = self.activations(tokens)
        return replace(made, activations=activations, kv=rows * self.sampled_row(), rows=rows)


def step_of(
    cfg: Config,
    shapes: Shapes,
    *,
    device: str,
    size: int,
    prompt_tokens: int = PROMPT_TOKENS,
    beside: int = 0,
) -> Step:
    """A run's step. The arguments are those of `Step`; a --teacher-model is counted beside it."""
    if cfg.loss.teacher_model:
        teacher = find_shapes(cfg.teacher_model_path)
        if teacher is not None:
            beside += teacher.parameters
    quarantined = 0
    if cfg.method.routes:
        quarantined = shapes.layers if cfg.method.quarantine_block is None else 1
    return Step(
        shapes,
        device=device,
        size=size,
        group=cfg.scale.group,
        prompts=cfg.scale.prompts_per_step,
        max_new=cfg.scale.max_new,
        quarantined=quarantined,
        # each rollout's own gradient, in place of sums
        by_rollout=cfg.method.spec.by_rollout or cfg.method.monitor_spec.reads == "gradients",
        prompt_tokens=prompt_tokens,
        beside=beside,
        shards=cfg.run.tensor_parallel,
    )


def room_of(cfg: Config, free: int | None) -> int | None:
    """Bytes that a run may have: what is free, of which --memory-gib may allow fewer; None: not known."""
    if cfg.run.memory_gib:
        return min(free or sys.maxsize, int(cfg.run.memory_gib * GIB))
    return free
