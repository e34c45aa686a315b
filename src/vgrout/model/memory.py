"""Memory that a run needs, from the model's shapes alone: nothing is loaded, nothing fetched. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgrout.model.budgets import HEAD_BUDGET, KV_BUDGET, TOKEN_BUDGET
from vgrout.model.hub import model_folder

BF16, FP32 = 2, 4  # bytes
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Shapes:
    """A decoder of the Llama family: attention with grouped queries, a gated MLP, no experts."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # the head is the embedding

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """One layer's adapted Linears: name → (d_out, d_in)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.mlp, self.hidden),
            "up_proj": (self.mlp, self.hidden),
            "down_proj": (self.hidden, self.mlp),
        }

    @property
    def adapted(self) -> int:
        """Weights in adapted Linears."""
        return self.layers * sum(a * b for a, b in self.linears.values())

    @property
    def parameters(self) -> int:
        """All weights but norms and biases (under a thousandth)."""
        return self.adapted + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def R(self) -> int:
        """Σ r, the size of δS."""
        return self.layers * sum(map(min, self.linears.values()))

    @property
    def factors(self) -> int:
        """Entries of every U and Vh."""
        return self.layers * sum((a + b) * min(a, b) for a, b in self.linears.values())

    def svd_cache_bytes(self, itemsize: int) -> int:
        """U and Vh in the weights' dtype, S in fp32."""
        return self.factors * itemsize + self.R * FP32

    def kv_bytes(self, itemsize: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def activation_bytes(self, itemsize: int) -> int:
        """What autograd keeps of one token for a backward through frozen weights, the adapted Linears' inputs included.

        Counted from the Qwen3 of transformers: two norms (their input in fp32), the inputs of q/k/v and gate/up;
        queries and keys before their norms (fp32), queries, keys, values, what attention returns, the input of o;
        gate, its silu, up, and the input of down.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = (
            self.hidden * (2 * FP32 + 2 * itemsize)
            + q * (FP32 + 3 * itemsize)
            + kv * (FP32 + 2 * itemsize)
            + self.mlp * 4 * itemsize
        )
        return self.layers * layer


# Public facts, so that a plan needs no download.
KNOWN = {"Qwen/Qwen3-4B": Shapes(36, 2560, 9728, 32, 8, 128, 151_936, tied=True)}


def shapes_of(config: Mapping[str, Any]) -> Shapes | None:
    """Shapes from a config.json; None where it does not name the usual sizes, or has experts."""
    try:
        d, heads = config["hidden_size"], config["num_attention_heads"]
        if config.get("num_experts") or config.get("num_local_experts"):
            return None
        return Shapes(
            layers=config["num_hidden_layers"],
            hidden=d,
            mlp=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or d // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError):
        return None


def find_shapes(model: str | Path) -> Shapes | None:
    """Shapes of a local folder, a downloaded hub id, or a model that is known by name; None of any other."""
    folder = model_folder(model)
    if folder is not None:
        try:
            return shapes_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None
    return KNOWN.get(str(model))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes in use at the same time, where a GPU holds all of it."""

    weights: int
    factors: int  # U and Vh
    merged: int  # W' for each set of weights that training uses: as trained, as deployed
    adapter: int  # δS, δS_hack, their moments, every rollout's gradient
    activations: int  # one micro-batch
    logits: int  # one chunk of the head, with its gradient
    kv: int  # while sampling
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
    shapes: Shapes,
    *,
    device: str,
    group: int,
    prompts: int,
    prompt_tokens: int,
    max_new: int,
    routes: bool,
) -> MemoryPlan:
    """Bytes of a training run. device: "cuda" (bf16) or "cpu" (fp32). prompt_tokens: of a typical prompt. routes: the
    arm has a quarantine, so the model as trained and as deployed are two sets of weights."""
    size = BF16 if device == "cuda" else FP32
    rows, row = group * prompts, prompt_tokens + max_new
    tokens = min(rows * row, max(TOKEN_BUDGET[device], row))
    positions = min(rows * max_new, max(1, HEAD_BUDGET[device] // shapes.vocab))
    weight_sets = 2 if routes else 1
    return MemoryPlan(
        weights=shapes.parameters * size,
        factors=shapes.svd_cache_bytes(size),
        merged=weight_sets * shapes.adapted * size,
        # two vectors with two moments each, their gradients, and one gradient a rollout
        adapter=(6 + 2 + rows) * shapes.R * FP32,
        activations=tokens * shapes.activation_bytes(size),
        # logits in the weights' dtype and in fp32, and the gradient of both
        logits=positions * shapes.vocab * 2 * (size + FP32),
        kv=min(KV_BUDGET[device], rows * row * shapes.kv_bytes(size)),
        weight_sets=weight_sets,
    )
