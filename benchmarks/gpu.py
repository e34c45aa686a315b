"""The update and the sampler at Qwen3-4B's shapes on a GPU, with random weights: model FLOPs used, tokens / s against
the memory's bandwidth, peak memory, flash-attention on and off."""

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks import rig
from benchmarks.flops import Lengths, Shape, decode_bytes, update_flops
from benchmarks.report import gemm_rate, peak_memory
from benchmarks.rows import Report, Row
from benchmarks.update import gradients
from vgrout.model.policy import Policy, as_language_model
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.rng import torch_stream

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
# dense bf16 FLOP/s by the makers' data sheets; another device is measured by its own matrix products
DENSE = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


@dataclass(frozen=True)
class Load:
    """What is sampled and learnt from: P prompts of `prompt` tokens, G answers of `answer` tokens each."""

    group: int
    prompts: int
    prompt: int
    answer: int

    @property
    def lengths(self) -> list[Lengths]:
        """Of each prompt and its answers."""
        return [(self.prompt, [self.answer] * self.group)] * self.prompts


FAST = Load(group=8, prompts=4, prompt=700, answer=512)
QUICK = Load(group=4, prompts=1, prompt=256, answer=64)


def orthogonal(W: Float[Tensor, "d_out d_in"]) -> tuple[Tensor, Tensor, Tensor]:
    """Bases in the shapes of W's SVD: work and memory are the same, and 252 decompositions of minutes are spared."""
    r = min(W.shape)
    U, Vh = (torch.linalg.qr(torch.randn(d, r, device=W.device))[0].to(W.dtype) for d in W.shape)
    return U, torch.ones(r, device=W.device), Vh.mT.contiguous()


def policy(shape: dict[str, Any], device: str, dtype: torch.dtype, attention: str) -> Policy:
    """A policy on random weights, whose answers run to their full length."""
    model = rig.random_model(device=device, dtype=dtype, **shape)
    model.set_attn_implementation(attention)
    lm = replace(as_language_model(model, rig.tokenizer()), eos_ids=frozenset())
    return Policy(**vars(lm), adapter=SvdAdapter(model, None, decompose=orthogonal))


def dense_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of matrix products: by the data sheet where the device is known, else measured."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        for part, rate in DENSE.items():
            if part in name:
                return rate
    return gemm_rate(dtype, device, 8192 if device == "cuda" else 512)


def bandwidth(device: str, n: int) -> float:
    """Bytes / s of copying n bytes, read and write counted."""
    a = torch.empty(n, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * n / best_of(lambda: b.copy_(a), 5)


def best_of(run: Callable[[], object], n: int) -> float:
    """Seconds of the fastest of n calls."""
    return min(timed(run) for _ in range(n))


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def update_row(name: str, subject: Policy, load: Load, share: bool, rate: float, rounds: int) -> Row:
    """Model FLOPs used: what the update must compute (prompts once where shared), over time and the device's rate."""
    groups = rig.noise_groups(subject.model.config.vocab_size, load.group, load.prompts, load.prompt, load.answer)
    run = partial(gradients, subject, groups, "source" if share else "rollout", "shared", load.answer)
    run()
    seconds = statistics.median(timed(run) for _ in range(rounds))
    used = update_flops(Shape.of(subject.model), load.lengths, share) / seconds / rate
    tokens = load.prompts * load.group * (load.prompt + load.answer)
    peak = peak_memory(run)
    figure = (
        f"{used:.0%} of the dense rate, {tokens / seconds:.0f} tokens / s, {seconds:.2f} s, {_gib(peak)} above weights"
    )
    return Row("gpu", f"update, {name}", "dense rate of the dtype", figure, "≥ 40 %", used >= 0.4)


def sampling_row(name: str, subject: Policy, load: Load, rate: float, rounds: int) -> Row:
    """Tokens / s against what the memory could feed: every weight once a step, keys and values of every row."""
    groups = rig.noise_groups(subject.model.config.vocab_size, 1, load.prompts, load.prompt, 1)
    prompts = [g.rollouts[0].prompt_ids for g in groups]

    def run() -> None:
        sample(subject, prompts, load.group, Sampling(), load.answer, torch_stream(rig.SEED, "bench"))

    run()
    seconds = statistics.median(timed(run) for _ in range(rounds))
    rows = load.prompts * load.group
    limit = rows * rate / decode_bytes(Shape.of(subject.model), rows, load.prompt + load.answer // 2)
    reached = rows * load.answer / seconds
    figure = f"{reached:.0f} tokens / s, {reached / limit:.0%} of the bound, {_gib(peak_memory(run))} above weights"
    return Row("gpu", f"sampling, {name}", f"bandwidth bound {limit:.0f} tokens / s", figure)


def _gib(n: int | None) -> str:
    return "memory not measurable" if n is None else f"{n / 2**30:.2f} GiB"


def attentions() -> list[str]:
    """flash_attention_2 where the extra `gpu` is installed."""
    return ["sdpa", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]


def measure(shape: dict[str, Any], load: Load, device: str, dtype: torch.dtype, rounds: int) -> Report:
    """Update and sampling of one load, for every attention that is installed."""
    rate = dense_rate(device, dtype)
    memory = bandwidth(device, 2**30 if device == "cuda" else 2**22)
    rows, notes = [], []
    for attention in attentions():
        subject = policy(shape, device, dtype, attention)
        weights = sum(p.numel() * p.element_size() for p in subject.model.parameters())
        basis = sum(
            s.U.numel() * s.U.element_size() + s.Vh.numel() * s.Vh.element_size()
            for s in subject.adapter.sites.values()
        )
        rows += [
            update_row(f"none, {attention}", subject, load, True, rate, rounds),
            update_row(f"route2, {attention}", subject, load, False, rate, rounds),
            sampling_row(attention, subject, load, memory, rounds),
        ]
        notes = [
            f"Random weights of {weights / 2**30:.1f} GiB and bases U, Vh of {basis / 2**30:.1f} GiB; "
            f"P {load.prompts}, G {load.group}, prompts of {load.prompt}, answers of {load.answer} tokens; "
            f"dense rate {rate / 1e12:.3g} TFLOP/s, bandwidth {memory / 1e9:.0f} GB/s measured by copying."
        ]
        del subject
    if "flash_attention_2" not in attentions():
        notes.append("flash-attention is not installed (extra `gpu`): its rows are left out.")
    return Report(rows, notes)


def run(quick: bool = False) -> Report:
    """Raises ValueError, one line, where there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError("gpu: this machine has no CUDA device that torch can use; run this bench on one with 40 GB")
    with rig.workplace():
        return measure(QWEN3_4B, QUICK if quick else FAST, "cuda", torch.bfloat16, 2 if quick else 5)
