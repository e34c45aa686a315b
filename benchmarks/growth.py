"""Step time and peak memory against G, P, the answers' length and the hidden size, with a figure for each."""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks import rig
from benchmarks.report import interleaved, peak_memory, slope
from benchmarks.rows import Report, Row
from benchmarks.update import gradients
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.rng import torch_stream

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PROMPT = 64
USUAL: dict[str, int] = {"G": 8, "P": 4, "answer": 48, "hidden": 128}
AXES: dict[str, tuple[str, Sequence[int]]] = {
    "G": ("answers a prompt, G", (4, 8, 16, 32, 64)),
    "P": ("prompts a step, P", (1, 2, 4, 8, 16)),
    "answer": ("tokens of an answer", (32, 64, 128, 256, 512)),
    "hidden": ("hidden size", (64, 128, 256, 512)),
}
SHORT = {"G": 2, "P": 2, "answer": 2, "hidden": 2}  # how many of them with --quick


def shape(hidden: int) -> dict[str, Any]:
    """Of a model with heads 32 wide."""
    return {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": hidden // 32}


def step(policy: Policy, G: int, P: int, answer: int, part: str) -> None:
    """Sampling P·G answers of full length, or the update of none (shared prompts) or of route2 (a gradient each)."""
    if part == "sampling":
        prompts = [g.rollouts[0].prompt_ids for g in rig.noise_groups(1024, 1, P, PROMPT, 1)]
        sample(policy, prompts, G, Sampling(), answer, torch_stream(rig.SEED, "bench"))
        return
    groups = rig.noise_groups(1024, G, P, PROMPT, answer)
    gradients(policy, groups, "source" if part == "update, none" else "rollout", "shared", answer)


PARTS = ("sampling", "update, none", "update, route2")


def measure(axis: str, quick: bool) -> dict[str, list[tuple[int, float, int | None]]]:
    """part → (value of the axis, seconds, bytes)."""
    values = AXES[axis][1][: SHORT[axis]] if quick else AXES[axis][1]
    found: dict[str, list[tuple[int, float, int | None]]] = {part: [] for part in PARTS}
    policy = rig.random_policy(**shape(USUAL["hidden"]))
    for value in values:
        at = USUAL | {axis: value}
        if axis == "hidden":
            policy = rig.random_policy(**shape(value))
        runs = {part: partial(step, policy, at["G"], at["P"], at["answer"], part) for part in PARTS}
        times = interleaved(runs, 1 if quick else 5, f"{axis} {value}")
        for part, run in runs.items():
            found[part].append((value, statistics.median(times[part].cpu), peak_memory(run)))
    return found


def run(quick: bool = False, figures: Path | None = None) -> Report:
    """Exponents along every axis; with `figures`, a png each there."""
    rows = []
    with rig.workplace():
        for axis, (label, _) in AXES.items():
            found = measure(axis, quick)
            for part, points in found.items():
                rows.append(_row(axis, part, points))
            if figures is not None:
                figure(figures / f"growth-{axis}.png", label, found)
    return Report(rows)


def _row(axis: str, part: str, points: list[tuple[int, float, int | None]]) -> Row:
    """Exponents over the axis' upper half. Attention alone is quadratic in an answer's length, weights in the width."""
    xs = [x for x, _, _ in points]
    p = slope(xs, [s for _, s, _ in points])
    held = [b for _, _, b in points]
    q = slope(xs, [b for b in held if b]) if all(held) else None
    figure = f"time ~ {axis}^{p:.2f}" + (f", peak memory ~ {axis}^{q:.2f}" if q is not None else "")
    bound = {"G": 1.1, "P": 1.1, "answer": 1.5, "hidden": 2.1}[axis]
    return Row("growth", f"{part}, {axis} {xs[0]} … {xs[-1]}", "itself", figure, f"time ≤ ^{bound:g}", p <= bound)


def figure(path: Path, label: str, found: dict[str, list[tuple[int, float, int | None]]]) -> None:
    """Time and peak memory along one axis, as a png."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    for part, points in found.items():
        xs = [x for x, _, _ in points]
        left.plot(xs, [s for _, s, _ in points], "o-", ms=3, label=part)
        if all(b for _, _, b in points):
            right.plot(xs, [(b or 0) / 2**20 for _, _, b in points], "o-", ms=3, label=part)
    for axes, what in ((left, "CPU seconds"), (right, "peak above the start [MiB]")):
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel=what, xticks=xs, xticklabels=[str(x) for x in xs])
        axes.minorticks_off()
        lo = min(min(line.get_ydata()) for line in axes.lines) if axes.lines else 1.0
        axes.plot(xs, [lo * x / xs[0] for x in xs], ":", color="grey", lw=1, label="linear")
        axes.grid(alpha=0.3)
    left.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)
