"""Memory: how much is processed at once, and what a run needs, from the model's shapes alone. Torch-free: nothing is
loaded, nothing fetched."""

from dataclasses import dataclass

from vgrout.model.source import FP32, Shapes

GIB = 2**30

# Tokens (padding included) in one forward with a graph. A 4B model keeps about 5.6 MB of activations a token.
# On a CPU a batch of 1,024 takes no more time a token than one of 16,384 and holds a fraction of its activations.
TOKEN_BUDGET = {"cpu": 1_024, "cuda": 4_096}

# Bytes that autograd keeps at once while a direction is extracted: no more than the update's batches do.
ACTIVATION_BUDGET = {"cpu": 2**30, "cuda": 24 * 2**30}

# Logit elements held at once. Above it the head runs in chunks that backward computes again: 2^24 fp32 is 64 MiB. On a
# GPU a chunk of 110 positions (2^24 of Qwen3's vocabulary) would read the head's weights more than it would multiply.
HEAD_BUDGET = {"cpu": 2**24, "cuda": 2**26}

# Bytes of keys and values held at once. Qwen3-4B in bf16 has 147 kB a token: about 100 rows of 1,700 tokens fit,
# while `full` wants 258 a step.
KV_BUDGET = {"cuda": 24 * 2**30, "cpu": 4 * 2**30}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes in use at the same time, if one GPU holds all of it."""

    weights: int
    factors: int  # U and Vh
    merged: int  # W' for each set of weights that training uses: as trained, as deployed
    adapter: int  # δS, δS_hack, their moments, every rollout's gradient
    activations: int  # one micro-batch
    logits: int  # one chunk of the head, with its gradient
    kv: int  # while sampling: of the rows that go at once, and again of their prompts, which are read apart
    weight_sets: int

    @property
    def standing(self) -> int:
        """What is there in every phase."""
        return self.weights + self.factors + self.merged + self.adapter

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
            f"{g(self.adapter)} GiB",
            f"              update: + activations {g(self.activations)} · logits {g(self.logits)} GiB; "
            f"sampling: + keys and values {g(self.kv)} GiB",
            f"              peak about {g(self.peak)} GiB, from shapes alone",
        ]


def plan(
    shapes: Shapes, *, device: str, size: int, group: int, prompts: int, prompt_tokens: int, max_new: int, routes: bool
) -> MemoryPlan:
    """Bytes of a training run. device: "cuda" or "cpu". size: bytes of a weight. prompt_tokens: of a typical prompt.
    routes: the method has a quarantine, so the model as trained and as deployed are two sets of weights."""
    rows, row = group * prompts, prompt_tokens + max_new
    tokens = min(rows * row, max(TOKEN_BUDGET[device], row))
    positions = min(rows * max_new, max(1, HEAD_BUDGET[device] // shapes.vocab))
    weight_sets = 2 if routes else 1
    token_kv = shapes.kv_bytes(size)
    at_once = min(rows, max(1, KV_BUDGET[device] // (row * token_kv)))
    # twice: the prompts of these rows, a group's once, and of one layer every row's copy of its prompt
    twice = prompt_tokens * (token_kv * -(-at_once // group) + token_kv // shapes.layers * at_once)
    return MemoryPlan(
        weights=shapes.parameters * size,
        factors=shapes.svd_cache_bytes(size),
        merged=weight_sets * shapes.adapted * size,
        # two vectors with two moments each, their gradients, and one gradient a rollout
        adapter=(6 + 2 + rows) * shapes.R * FP32,
        activations=tokens * shapes.activation_bytes(size),
        # logits in the weights' dtype and in fp32, and the gradient of both
        logits=positions * shapes.vocab * 2 * (size + FP32),
        kv=at_once * row * token_kv + twice,
        weight_sets=weight_sets,
    )
