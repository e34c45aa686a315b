"""The update and the sampler on random tokens against what the machine's arithmetic and memory allow."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch.nn import Linear

from benchmarks import rig
from benchmarks.flops import Lengths, Shape, decode_bytes, update_flops
from benchmarks.measure import Figure
from vgrout.data import Completion
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.rng import torch_stream

# dense bf16 FLOP/s by the makers' data sheets; another device is measured by its own matrix
# products
DENSE = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}


@dataclass(frozen=True)
class Load:
    """What is sampled and learnt from: prompts of `prompt` tokens, to each `group` answers of `answer` tokens."""

    group: int
    prompts: int
    prompt: int
    answer: int

    @property
    def lengths(self) -> list[Lengths]:
        """Of each prompt and its answers."""
        return [(self.prompt, [self.answer] * self.group)] * self.prompts


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call, the device's work included."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else int
    wait()
    start = perf_counter()
    run()
    wait()
    return perf_counter() - start


def above_weights(run: Callable[[], object]) -> str:
    """By how much a call raises what the GPU holds, at its highest; "" without a GPU."""
    if not torch.cuda.is_available():
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return f", {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB above weights"


def dense_rate(policy: Policy, tokens: int = 1024) -> float:
    """FLOP/s of matrix products: by the data sheet where the device is known, else of products with the model's own
    weights, forward and backward."""
    if policy.device.type == "cuda":
        for part, rate in DENSE.items():
            if part in torch.cuda.get_device_name():
                return rate
    flops = seconds = 0.0
    for name, layer in policy.model.named_modules():
        if isinstance(layer, Linear) and name in policy.adapter.sites:
            (d_out, d_in), like = layer.weight.shape, layer.weight
            x, dy = (
                torch.randn(tokens, d, dtype=like.dtype, device=like.device) for d in (d_in, d_out)
            )
            flops += 4 * tokens * d_out * d_in
            seconds += min(timed(lambda x=x, W=like: x @ W.mT) for _ in range(2))
            seconds += min(timed(lambda dy=dy, W=like: dy @ W) for _ in range(2))
    return flops / seconds


def bandwidth(device: torch.device) -> float:
    """Bytes / s: of copying on a GPU, read and write counted; of reading half a gigabyte on a CPU, on all threads."""
    if device.type == "cpu":
        x = torch.ones(2**27)
        return x.nbytes / min(timed(x.sum) for _ in range(10))
    a = torch.empty(2**30, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / min(timed(lambda: b.copy_(a)) for _ in range(5))


def update_figure(
    name: str, policy: Policy, load: Load, share: bool, rate: float, rounds: int, goal: float
) -> Figure:
    """Model FLOPs used: what the update must compute over time and the device's rate. share: each prompt is read once,
    and its answers have one gradient. Products with the adapter's U and Vh are not counted."""
    groups = rig.noise_groups(
        policy.model.config.vocab_size, load.group, load.prompts, load.prompt, load.answer
    )
    run = rig.update(policy, groups, by_rollout=not share)
    run()
    seconds = statistics.median(timed(run) for _ in range(rounds))
    used = update_flops(Shape.of(policy.model), load.lengths, share) / seconds / rate
    tokens = load.prompts * load.group * (load.prompt + load.answer)
    figure = f"{used:.0%}, {tokens / seconds:.0f} tokens / s, {seconds:.2f} s{above_weights(run)}"
    return Figure(
        f"update, {name}",
        f"products at {rate / 1e12:.3g} TFLOP/s",
        figure,
        f"≥ {goal:.0%}",
        used >= goal,
    )


def sampler(policy: Policy, load: Load) -> Callable[[], list[list[Completion]]]:
    """Answers of exactly `load.answer` tokens to random prompts."""
    groups = rig.noise_groups(policy.model.config.vocab_size, 1, load.prompts, load.prompt, 1)
    prompts = [g.rollouts[0].prompt_ids for g in groups]
    endless = replace(policy, eos_ids=frozenset())
    return lambda: sample(
        endless, prompts, load.group, Sampling(), load.answer, torch_stream(rig.SEED, "bench")
    )


def sampling_figure(name: str, policy: Policy, load: Load, rate: float, rounds: int) -> Figure:
    """Tokens / s against what the memory could feed: every weight once a step, keys and values of every row."""
    run = sampler(policy, load)
    run()
    seconds = statistics.median(timed(run) for _ in range(rounds))
    rows = load.prompts * load.group
    limit = rows * rate / decode_bytes(Shape.of(policy.model), rows, load.prompt + load.answer // 2)
    reached = rows * load.answer / seconds
    token_ms = seconds / load.answer * 1e3
    figure = (
        f"{reached / limit:.0%}, {reached:.0f} tokens / s, {token_ms:.1f} ms a token of each row"
    )
    figure += above_weights(run)
    return Figure(
        f"sampling, {name}", f"memory at {rate / 1e9:.0f} GB/s: {limit:.0f} tokens / s", figure
    )
