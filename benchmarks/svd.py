"""Cost of decomposing Qwen3-4B's weights: time extrapolated from modules measured here, size exact from the shapes.

The larger shapes take a minute and more each, so every shape is measured at a few small scales and
t = c · (d_out · d_in · r)^a is fitted to all of them. The module of the smallest shape is measured in full and not used
in the fit: how well the fit predicts it tells how far to trust the rest.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from vgrout.model.source import KNOWN, Shapes
from vgrout.model.svd_adapter import SvdAdapter, svd

SCALES = (1 / 4, 1 / 3, 1 / 2)
GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """seconds = exp(log_c) · (d_out · d_in · r)^a"""

    log_c: float
    a: float

    def seconds(self, shape: tuple[int, int]) -> float:
        """Of one module."""
        return math.exp(self.log_c + self.a * math.log(work(shape)))


def work(shape: tuple[int, int]) -> float:
    """d_out · d_in · r: the operations of a dense SVD but for a constant."""
    return float(shape[0] * shape[1] * min(shape))


def fitted(points: Sequence[tuple[tuple[int, int], float]]) -> Fit:
    """Least squares in logarithms."""
    x, y = [math.log(work(s)) for s, _ in points], [math.log(t) for _, t in points]
    mx, my = statistics.fmean(x), statistics.fmean(y)
    a = sum((p - mx) * (q - my) for p, q in zip(x, y, strict=True)) / sum((p - mx) ** 2 for p in x)
    return Fit(my - a * mx, a)


def seconds(shape: tuple[int, int], repeats: int) -> float:
    """CPU seconds of one SVD of a random weight of this shape, as the adapter does it; the best of `repeats`. On one
    thread, and not by the clock: a busy machine takes longer, it does not do more."""
    W = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    best, threads = math.inf, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(repeats):
            start = time.process_time()
            svd(W)
            best = min(best, time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return best


def warm_seconds(shape: tuple[int, int]) -> float:
    """CPU seconds of one module from the cache: the weight's hash, the file, and the check that it gives the weight."""

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(shape[1], shape[0], bias=False)

    torch.manual_seed(0)
    model = One()
    with tempfile.TemporaryDirectory(prefix="vgrout-bench-") as folder:
        SvdAdapter(model, Path(folder))
        start = time.process_time()
        SvdAdapter(model, Path(folder))
        return time.process_time() - start


def measure(shapes: Shapes, scales: Sequence[float] = SCALES, repeats: int = 1) -> str:
    """The tables as GitHub markdown."""
    kinds: dict[tuple[int, int], list[str]] = {}
    for name, shape in shapes.linears.items():
        kinds.setdefault(shape, []).append(name)
    smallest = min(kinds, key=work)
    points: list[tuple[tuple[int, int], float]] = []
    todo = [(k, s) for s in scales for k in kinds]
    for kind, scale in tqdm(todo, desc="SVD", unit="module", disable=None, leave=False):
        small = (max(8, round(kind[0] * scale)), max(8, round(kind[1] * scale)))
        points.append((small, seconds(small, repeats)))
    fit = fitted(points)
    measured = seconds(smallest, 1)
    rows, total = [], 0.0
    for shape, names in kinds.items():
        n = shapes.layers * len(names)
        each = measured if shape == smallest else fit.seconds(shape)
        total += n * each
        bytes_each = sum(shape) * min(shape)
        rows.append(
            (
                ", ".join(names),
                f"{shape[0]} x {shape[1]}",
                n,
                f"{each:.1f}",
                f"{n * each / 60:.0f}",
                f"{bytes_each * 2 / 2**20:.0f}",
                "measured" if shape == smallest else f"fit, from up to 1/{round(1 / max(scales))} of each side",
            )
        )
    head = ("modules", "shape", "number", "one [CPU s]", "all [CPU min]", "bf16 file [MiB]", "time is")
    warm = warm_seconds(smallest) / (sum(smallest) * min(smallest))  # a factor's entry
    bf16, fp32 = shapes.svd_cache_bytes(2), shapes.svd_cache_bytes(4)
    return "\n".join(
        (
            tabulate(rows, headers=head, tablefmt="github", disable_numparse=True),
            "",
            f"fit over {len(points)} modules: seconds = {math.exp(fit.log_c):.2e} * (d_out * d_in * r)^{fit.a:.3f}; "
            f"of the {smallest[0]} x {smallest[1]} module it predicts {fit.seconds(smallest):.1f} s, "
            f"measured {measured:.1f} s ({fit.seconds(smallest) / measured - 1:+.0%})",
            f"all of it: {total / 60:.0f} core-minutes once, in fp32 on this CPU",
            f"cache on disk: {bf16 / GIB:.2f} GiB for bf16 weights, {fp32 / GIB:.2f} GiB for fp32 (exact); "
            f"{bf16 / (2 * shapes.adapted):.2f} times the adapted weights",
            f"from a warm cache: {warm * shapes.factors:.0f} CPU seconds (hash, file, check), extrapolated",
        )
    )


def run() -> str:
    """For Qwen3-4B."""
    return measure(KNOWN["Qwen/Qwen3-4B"])
