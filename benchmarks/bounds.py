"""Update and sampler on random tokens, against what the machine's arithmetic and memory allow."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch.nn import Linear

from benchmarks import rig
from benchmarks.measure import Figure
from vgrout.data import Completion
from vgrout.model.flops import decode_bytes, update_flops
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.model.shapes import Shapes, shapes_of
from vgrout.model.step_time import BY_CLIENT_NAME, Load
from vgrout.torch_rng import torch_stream


def known_shapes(policy: Policy) -> Shapes:
    """The shapes of a policy's model, a decoder of the Llama kind."""
    shapes = shapes_of(policy.model.config.to_dict())
    assert shapes is not None
    return shapes


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
    """FLOP/s of matrix products, by the data sheet if the device is known.

    Else they are measured on products with the model's own weights, forward and backward.
    """
    if policy.device.type == "cuda":
        card = BY_CLIENT_NAME.get(torch.cuda.get_device_name())
        if card is not None:
            return card.products
    flops = seconds = 0.0
    for name, layer in policy.model.named_modules():
        if not isinstance(layer, Linear) or name not in policy.adapter.sites:
            continue
        W = layer.weight
        d_out, d_in = W.shape
        x = torch.randn(tokens, d_in, dtype=W.dtype, device=W.device)
        dy = torch.randn(tokens, d_out, dtype=W.dtype, device=W.device)
        flops += 4 * tokens * d_out * d_in
        seconds += fastest(partial(torch.matmul, x, W.mT), 2)
        seconds += fastest(partial(torch.matmul, dy, W), 2)
    return flops / seconds


def fastest(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several calls."""
    return min(timed(run) for _ in range(times))


def bandwidth(device: torch.device) -> float:
    """Bytes / s of the device's memory.

    On a GPU a copy is timed, whose reads and writes count; on a CPU reading half a gigabyte, on all
    threads.
    """
    if device.type == "cpu":
        x = torch.ones(2**27)
        return x.nbytes / fastest(x.sum, 10)
    a = torch.empty(2**30, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / fastest(lambda: b.copy_(a), 5)


def update_figure(
    name: str, policy: Policy, load: Load, share: bool, rate: float, rounds: int, goal: float
) -> Figure:
    """Model FLOPs used: what the update must compute, over its time and the device's rate.

    Products with the adapter's U and Vh are not counted. share: each prompt is read once, and its
    answers have one gradient.
    """
    groups = rig.noise_groups(
        policy.model.config.vocab_size, load.group, load.prompts, load.prompt, load.answer
    )
    run = rig.update(policy, groups, by_rollout=not share)
    run()
    seconds = statistics.median(timed(run) for _ in range(rounds))
    used = update_flops(known_shapes(policy), load.lengths, share) / seconds / rate
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


def sampling_figure(
    name: str, policy: Policy, load: Load, rate: float, rounds: int, goal: float | None = None
) -> Figure:
    """Tokens / s against what the memory could feed.

    A step reads every weight once, and the keys and values of every row.
    """
    run = sampler(policy, load)
    run()
    seconds = statistics.median(timed(run) for _ in range(rounds))
    rows = load.prompts * load.group
    context = load.prompt + load.answer // 2
    itemsize = policy.model.dtype.itemsize
    limit = rows * rate / decode_bytes(known_shapes(policy), itemsize, rows, context)
    reached = rows * load.answer / seconds
    token_ms = seconds / load.answer * 1e3
    figure = (
        f"{reached / limit:.0%}, {reached:.0f} tokens / s, {token_ms:.1f} ms a token of each row"
    )
    figure += above_weights(run)
    against = f"memory at {rate / 1e9:.0f} GB/s: {limit:.0f} tokens / s"
    if goal is None:
        return Figure(f"sampling, {name}", against, figure)
    reaches = reached / limit >= goal
    return Figure(f"sampling, {name}", against, figure, f"≥ {goal:.0%}", reaches)
