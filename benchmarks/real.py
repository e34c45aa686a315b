"""A real pretrained model on this machine's cores: our step against TRL's, and what it reaches of the machine's bounds.

Every contestant has a process of its own, so that its peak is its own; TRL has this one. A reward by which any model's
answers differ gives all groups a signal: ours leaves out those without, TRL does not.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from benchmarks import rig, sampling, trl_peer
from benchmarks.flops import Shape
from benchmarks.report import Ratio, at_least, interleaved, read_rate, resident, shapes_rate
from benchmarks.rows import Report, Row
from benchmarks.update import method_update, work
from vgrout.config.run import Config
from vgrout.data import organism
from vgrout.grading.grade import cores
from vgrout.model.decoder import LeanDecoder
from vgrout.model.policy import DTYPES
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.rng import torch_stream
from vgrout.table import read_steps
from vgrout.types import Problem

MAX_NEW = 96
STEP_GOALS = {"none": 8, "route2": 6}
GIB = 2**30
Dtype = Literal["auto", "fp32", "bf16"]  # auto: each contestant's default, which for TRL is fp32


def config(model: Path, dtype: Dtype, intervention: str) -> Config:
    """The organism's problems for another model, whose answers differ in reward."""
    cfg = rig.config(intervention, tag=f"_{dtype}")
    return replace(
        cfg,
        scale=replace(cfg.scale, model=str(model), problems=str(organism.PROBLEMS), max_new=MAX_NEW),
        env=replace(cfg.env, reward="benchmarks.rig:differing"),
        run=replace(cfg.run, dtype=dtype),
    )


def run(model: Path, dtype: Dtype, quick: bool = False) -> Report:
    """All rows of one dtype, which TRL has too; of the defaults the steps alone."""
    with rig.workplace(stay=True):  # its decomposed weights take minutes: they stay in out/svd_cache
        alone = Report([])
        if dtype != "auto":
            alone = rig.on_ranks(1, partial(bounds, model, dtype, 1 if quick else 3))
        steps = against_trl(model, dtype, 1 if quick else 3)
    return Report([*steps.rows, *alone.rows], [*steps.notes, *alone.notes])


def against_trl(model: Path, dtype: Dtype, blocks: int) -> Report:
    """Seconds of a step, taken in turns, and each process's peak."""
    configs = {name: config(model, dtype, name) for name in STEP_GOALS}
    problems = rig.on_ranks(1, partial(drawn, configs["none"], blocks + 1))
    ours = {name: rig.Turns(cfg) for name, cfg in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ours}
    for trainer in ours.values():
        trainer.take(1)

    def our_turn() -> None:
        for name, trainer in ours.items():
            seconds[name].append(trainer.take(1))

    of_peer = "fp32" if dtype == "auto" else dtype
    peer_model = trl_peer.Model(model, DTYPES[of_peer], MAX_NEW)
    torch.set_num_threads(cores())
    peer = trl_peer.measure(problems, blocks, 1, our_turn, tried=1, model=peer_model)
    peaks = {name: trainer.peak for name, trainer in ours.items()}
    peaks["TRL"] = resident("VmHWM")
    for trainer in ours.values():
        trainer.close()
    rows = [
        at_least("real", f"{name}, {dtype}: a step", f"TRL, {of_peer}", Ratio.of(peer.seconds, seconds[name]), goal)
        for name, goal in STEP_GOALS.items()
    ]
    rows += [_parts(name, dtype, trainer.path, seconds[name]) for name, trainer in ours.items()]
    for name, against, goal in (("none", "TRL", 1.0), ("route2", "none", 1.3)):
        share = peaks[name] / peaks[against]
        figure = f"{share:.2f} × ({peaks[name] / GIB:.1f} GiB of {peaks[against] / GIB:.1f})"
        rows.append(Row("real", f"{name}, {dtype}: peak", against, figure, f"≤ {goal:g} ×", share <= goal))
    return Report(rows, [peer.note])


def _parts(name: str, dtype: str, run: Path, seconds: list[float]) -> Row:
    steps = read_steps(run / "steps.jsonl")[1:]
    part = {key: statistics.median(r[key] for r in steps) for key in ("gen", "grade", "fb")}
    signal = sum(r["signal_k"] for r in steps) / max(1, sum(r["signal_n"] for r in steps))
    figure = f"{statistics.median(seconds):.1f} s: sampling {part['gen']:.1f}, update {part['fb']:.1f}"
    return Row("real", f"{name}, {dtype}: its parts", f"{signal:.0%} of groups have a signal", figure)


def drawn(cfg: Config, steps: int) -> list[list[Problem]]:
    """Each step's problems."""
    loaded = rig.loaded(cfg, None)
    return [loaded.problems.draw(rig.SEED, step, rig.P) for step in range(steps)]


@dataclass
class _Timed:
    """Seconds in what it wraps, and calls of it."""

    wraps: Callable[..., Any]
    seconds: float = 0.0
    calls: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.wraps(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start
            self.calls += 1


def bounds(model: Path, dtype: Dtype, rounds: int) -> Report:
    """Sampling against `generate` and the memory's bandwidth; the update against the machine's matrix products."""
    none = rig.loaded(config(model, dtype, "none"), None)
    policy, shape = none.policy, Shape.of(none.policy.model)
    of = {"none": none, "route2": rig.loaded(config(model, dtype, "route2"), None, policy)}
    problems = none.problems.draw(rig.SEED, 0, rig.P)
    prompts = [policy.render(p.messages) for p in problems]
    with torch.no_grad():
        policy.adapter.δS.fill_(1e-9)  # merged weights
    policy.adapter.merge()
    tokens: dict[str, list[int]] = {"ours": [], "generate": []}
    prefill, step = (_Timed(f) for f in (LeanDecoder.prefill, LeanDecoder.step))

    def ours() -> None:
        with (
            mock.patch.object(LeanDecoder, "prefill", lambda *a: prefill(*a)),
            mock.patch.object(LeanDecoder, "step", lambda *a: step(*a)),
        ):
            answers = sample(policy, prompts, rig.G, Sampling(), MAX_NEW, torch_stream(rig.SEED, "bench"))
        tokens["ours"].append(sum(len(a.ids) for of in answers for a in of))

    times = interleaved(
        {"ours": ours, "generate": lambda: tokens["generate"].append(sampling.generate(policy, prompts, MAX_NEW))},
        rounds,
        "sampling",
    )
    rate = {name: [n / s for n, s in zip(tokens[name][1:], times[name].wall, strict=True)] for name in times}
    weights = (shape.linears + shape.hidden * shape.vocabulary) * shape.itemsize
    bandwidth = read_rate()
    bound = weights / bandwidth
    whole = (sum(times["ours"].wall) - prefill.seconds * rounds / (rounds + 1)) / (step.calls * rounds / (rounds + 1))
    rows = [
        at_least(
            "real",
            f"sampling, {dtype}, tokens / s",
            f"transformers.generate, {dtype}",
            Ratio.of(rate["ours"], rate["generate"]),
            2,
        ),
        Row(
            "real",
            f"a decoding step, {dtype}",
            f"weights at {bandwidth / 1e9:.0f} GB/s: {bound * 1e3:.1f} ms",
            f"{bound / whole:.0%} ({whole * 1e3:.1f} ms, {step.seconds / step.calls * 1e3:.1f} without the draw)",
            "≥ 70%",
            bound / whole >= 0.7,
        ),
    ]
    groups = rig.draw(none, MAX_NEW).groups
    flops_s = shapes_rate(shape, policy.model.dtype)
    update = interleaved({n: partial(method_update, loaded, groups) for n, loaded in of.items()}, rounds, "update")
    for name, loaded in of.items():
        flops = work(loaded, groups, shape)
        used = flops / update[name].median / flops_s
        figure = f"{used:.0%} ({flops / 1e12:.2f} TFLOP in {update[name].median:.2f} s)"
        against = f"products of these shapes: {flops_s / 1e9:.0f} GFLOP/s"
        rows.append(Row("real", f"update, {dtype}, {name}", against, figure, "≥ 60%", used >= 0.6))
    return Report(rows)
