"""Ratios of interleaved runs, peaks of memory, exponents of growth, the machine."""

import ctypes
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.flops import Shape
from benchmarks.rows import Row


@dataclass(frozen=True)
class Times:
    """Seconds of one contestant, round by round: wall, and CPU of this process alone."""

    wall: list[float]
    cpu: list[float]

    @property
    def median(self) -> float:
        """Wall seconds."""
        return statistics.median(self.wall)


def interleaved(contestants: Mapping[str, Callable[[], object]], rounds: int, what: str) -> dict[str, Times]:
    """Each once a round, in turn, after one round that does not count: a busy machine is busy for all of them."""
    times = {name: Times([], []) for name in contestants}
    for round_ in tqdm(range(rounds + 1), desc=what, disable=None, leave=False):
        for name, run in contestants.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if round_:
                times[name].wall.append(time.perf_counter() - wall)
                times[name].cpu.append(time.process_time() - cpu)
    return times


@dataclass(frozen=True)
class Ratio:
    """Of paired measurements: the median and the middle half."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        """Of measurements that were taken in pairs."""
        each = [a / b for a, b in zip(numerators, denominators, strict=True)]
        low, _, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
        return Ratio(statistics.median(each), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} × ({self.low:.2f} – {self.high:.2f})"


def at_least(bench: str, what: str, against: str, ratio: Ratio, goal: float | int) -> Row:
    """A row whose median should reach a goal."""
    return Row(bench, what, against, str(ratio), f"≥ {goal:g} ×", ratio.median >= goal)


def at_most(bench: str, what: str, against: str, ratio: Ratio, goal: float | int) -> Row:
    """A row whose median should stay below a goal."""
    return Row(bench, what, against, str(ratio), f"≤ {goal:g} ×", ratio.median <= goal)


def peak_memory(run: Callable[[], object]) -> int | None:
    """Bytes by which the resident set rose above where it stood, at its highest during `run`; None off Linux.

    The kernel keeps the high-water mark and forgets it on request (proc(5), clear_refs 5).
    """
    if not torch.cuda.is_available():
        try:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what was freed, but kept by malloc, would hide a rise
            Path("/proc/self/clear_refs").write_text("5")
            before = resident("VmRSS")
            run()
            return max(0, resident("VmHWM") - before)
        except (OSError, AttributeError):
            return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def resident(key: str, process: int | str | None = "self") -> int:
    """Bytes that a process holds (VmRSS), or held at most (VmHWM). Raises OSError off Linux."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{process}/status has no {key}")


def slope(xs: Sequence[float | int], ys: Sequence[float | int]) -> float:
    """Exponent p of y ∝ x^p by least squares on logarithms, over the upper half of xs, where constants matter less."""
    half = len(xs) // 2 if len(xs) > 3 else 0
    u, v = [math.log(x) for x in xs[half:]], [math.log(y) for y in ys[half:]]
    mu, mv = statistics.fmean(u), statistics.fmean(v)
    return sum((a - mu) * (b - mv) for a, b in zip(u, v, strict=True)) / sum((a - mu) ** 2 for a in u)


def gemm_rate(dtype: torch.dtype = torch.float32, device: str = "cpu", n: int = 1024) -> float:
    """FLOP/s of one large matrix product, on a CPU a thread's: what an update could reach at best."""
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    best = math.inf
    clock = (
        time.process_time if device == "cpu" else time.perf_counter
    )  # CPU seconds: the load of others does not count
    for _ in range(5):
        if device != "cpu":
            torch.cuda.synchronize()
        start = clock()
        a @ b
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return 2 * n**3 / best


def shapes_rate(shape: Shape, dtype: torch.dtype, tokens: int = 1024) -> float:
    """FLOP/s of the products with a model's weights, on all threads, forward and backward, each as often as it occurs:
    what an update could reach at best."""
    H, inner, heads = shape.hidden, shape.inner, shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    linears = [(heads, H), (kv, H), (kv, H), (H, heads), (inner, H), (inner, H), (H, inner)]
    flops = seconds = 0.0
    for d_out, d_in in linears:
        weights = [torch.randn(d_out, d_in, dtype=dtype) for _ in range(min(shape.layers, 8))]
        x, dy = torch.randn(tokens, d_in, dtype=dtype), torch.randn(tokens, d_out, dtype=dtype)
        for product in (lambda W, x=x: x @ W.mT, lambda W, dy=dy: dy @ W):
            flops += 2 * tokens * d_out * d_in
            seconds += min(_seconds(partial(product, W)) for _ in range(2) for W in weights)
    return flops / seconds


def read_rate() -> float:
    """Bytes a second of reading half a gigabyte once, on all threads."""
    x = torch.ones(2**27)
    return x.nbytes / min(_seconds(x.sum) for _ in range(10))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def machine() -> str:
    """Cores, processor, memory, versions; no names of hosts or folders."""
    lines = [f"- {len(os.sched_getaffinity(0))} cores of {_cpu_model()}, {_memory()}, {platform.system()}"]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        lines.append(f"- {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    packages = ("torch", "transformers", "trl", "peft", "vgrout")
    lines.append("- " + ", ".join([f"Python {platform.python_version()}", *filter(None, map(_version, packages))]))
    load = os.getloadavg()[0]
    quiet = "quiet" if load < 0.5 else "NOT quiet: ratios are interleaved, but single figures suffer"
    lines.append(
        f"- load average at the start {load:.1f} ({quiet}); matrix products of {gemm_rate() / 1e9:.0f} GFLOP/s a thread"
    )
    return "\n".join(lines)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
