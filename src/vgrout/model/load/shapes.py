"""Sizes of a model from its config.json, before it is loaded, and the dtype that it is loaded in."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vgrout.config.checks import Dtype
from vgrout.ground.errors import Refused
from vgrout.ground.files import Json, once
from vgrout.model.load.source import configuration, model_folder

BF16, FP32 = 2, 4  # bytes
ITEMSIZE = {"bf16": BF16, "fp32": FP32}


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
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
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
        return self.layers * sum(d_out * d_in for d_out, d_in in self.linears.values())

    @property
    def parameters(self) -> int:
        """All weights but norms and biases (under a thousandth)."""
        embedding = self.vocab * self.hidden
        head = 0 if self.tied else embedding
        return self.adapted + embedding + head

    @property
    def R(self) -> int:
        """Σ r, the size of δS."""
        return self.layers * sum(map(min, self.linears.values()))

    @property
    def factors(self) -> int:
        """Entries of every U and Vh."""
        of_layer = 0
        for d_out, d_in in self.linears.values():
            of_layer += (d_out + d_in) * min(d_out, d_in)
        return self.layers * of_layer

    def svd_cache_bytes(self, itemsize: int) -> int:
        """Bytes of U and Vh in the weights' dtype, and of S in fp32."""
        return self.factors * itemsize + self.R * FP32

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def activation_bytes(self, itemsize: int) -> int:
        """Bytes that autograd keeps of one token for a backward through frozen weights.

        The inputs of the adapted Linears are included. Counted from the Qwen3 of transformers: two
        norms (their input in fp32), the inputs of q/k/v and gate/up; queries and keys before their
        norms (fp32), queries, keys, values, what attention returns, the input of o; gate, its silu,
        up, and the input of down.
        """
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        layer = (
            self.hidden * (2 * FP32 + 2 * itemsize)
            + q * (FP32 + 3 * itemsize)
            + kv * (FP32 + 2 * itemsize)
            + self.mlp * 4 * itemsize
        )
        return self.layers * layer


# Keys of a config.json that give the first sizes of `Shapes`; two more may be left out.
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


# Public facts, so that a plan needs no download.
KNOWN = {"Qwen/Qwen3-4B": Shapes(36, 2560, 9728, 32, 8, 128, 151_936, tied=True)}


def shapes_of(config: Mapping[str, Json]) -> Shapes | None:
    """Shapes from a config.json; None where it does not name the usual sizes, or has experts."""
    if config.get("num_experts") or config.get("num_local_experts"):
        return None
    sizes: list[Json] = [config.get(name) for name in SIZES]
    layers, hidden, mlp, heads, vocab = sizes
    kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    for size in (*sizes, kv_heads or 1, head_dim or 1):
        if type(size) is not int or size <= 0:
            return None
    return Shapes(
        layers=layers,
        hidden=hidden,
        mlp=mlp,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim or hidden // heads,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


@once
def find_shapes(model: str | Path) -> Shapes | None:
    """Shapes of a local folder, a downloaded hub id, or a model known by name. None: of another."""
    folder = model_folder(model)
    try:
        if folder is not None:
            return shapes_of(configuration(folder))
    except (OSError, Refused):
        return None
    return KNOWN.get(str(model))


CPUINFO = Path("/proc/cpuinfo")


# A model with fewer weights is a miniature: it has other defaults, and a second thread only costs.
MINIATURE_BELOW = 2**24


def is_small(model: str | Path) -> bool:
    """Whether a folder or hub id is a miniature; False where its shapes are not known."""
    shapes = find_shapes(model)
    return shapes is not None and shapes.parameters < MINIATURE_BELOW


def resolved_dtype(dtype: Dtype, model: str | Path, *, gpu: bool) -> Literal["fp32", "bf16"]:
    """What --dtype means for this model here.

    On a CPU a miniature keeps fp32, whose numbers are exact.
    """
    if dtype != "auto":
        return dtype
    if gpu or (cpu_multiplies_bf16() and not is_small(model)):
        return "bf16"
    return "fp32"


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has AVX-512 BF16 or AMX; without them bf16 is slower than fp32.

    Only Linux says so.
    """
    if not CPUINFO.is_file():
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16)\b", CPUINFO.read_text()) is not None
