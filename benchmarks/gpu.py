"""The update and the sampler at Qwen3-4B's shapes on a GPU, with random weights: model FLOPs used, tokens / s against
the memory's bandwidth, peak memory, flash-attention on and off."""

import importlib.util
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks import rig
from benchmarks.bounds import Load, bandwidth, dense_rate, sampling_figure, update_figure
from benchmarks.measure import Figure, page
from vgrout.data import organism
from vgrout.model.load import as_language_model
from vgrout.model.policy import Policy
from vgrout.model.svd_adapter import SvdAdapter

QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
FAST = Load(group=8, prompts=4, prompt=700, answer=512)
QUICK = Load(group=4, prompts=1, prompt=256, answer=64)


def orthogonal(W: Float[Tensor, "d_out d_in"]) -> tuple[Tensor, Tensor, Tensor]:
    """Bases in the shapes of W's SVD: work and memory are the same, and 252 decompositions of minutes are spared."""
    r = min(W.shape)
    U, Vh = (torch.linalg.qr(torch.randn(d, r, device=W.device))[0].to(W.dtype) for d in W.shape)
    return U, torch.ones(r, device=W.device), Vh.mT.contiguous()


def random_policy(shape: dict[str, Any], device: str, dtype: torch.dtype, attention: str) -> Policy:
    """A policy on random weights."""
    model = rig.random_model(device=device, dtype=dtype, **shape)
    model.set_attn_implementation(attention)
    tokenizer: Any = AutoTokenizer.from_pretrained(organism.MODEL_DIR)
    lm = as_language_model(model, tokenizer)
    return Policy(**vars(lm), adapter=SvdAdapter(model, None, decompose=orthogonal))


def attentions() -> list[str]:
    """flash_attention_2 where the extra `gpu` is installed."""
    return ["sdpa", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]


def measure(shape: dict[str, Any], load: Load, device: str, dtype: torch.dtype, rounds: int) -> list[Figure]:
    """Update and sampling of one load, for every attention that is installed."""
    figures = []
    for attention in attentions():
        policy = random_policy(shape, device, dtype, attention)
        rate = dense_rate(policy)
        figures += [
            update_figure(f"none, {attention}", policy, load, True, rate, rounds, 0.4),
            update_figure(f"route2, {attention}", policy, load, False, rate, rounds, 0.4),
            sampling_figure(attention, policy, load, bandwidth(policy.device), rounds),
        ]
        del policy
    return figures


def run(quick: bool = False) -> str:
    """Raises ValueError, one line, where there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError("gpu: this machine has no CUDA device that torch can use; run this bench on one with 40 GB")
    load, gpu = QUICK if quick else FAST, torch.cuda.get_device_properties(0)
    with rig.workplace():
        figures = measure(QWEN3_4B, load, "cuda", torch.bfloat16, 2 if quick else 5)
    return page(figures, f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB; {load}.")
