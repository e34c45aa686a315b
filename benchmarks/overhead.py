"""Cost of checkpoints and detectors beside a step's. One run in one process, so that a busy machine is busy for all.

`python -m benchmarks overhead` prints both tables. A step: sampling, grading, backward, optimiser, evaluation and
refresh where they are due, as `sec` of its row has it; without what watches it and without saving.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from tabulate import tabulate

from vgrout import console
from vgrout.config.presets import parse
from vgrout.grading.grade import Grader
from vgrout.guard.guard import Guard
from vgrout.runs import checkpoint
from vgrout.runs.preflight import preflight
from vgrout.runs.run_context import RunContext
from vgrout.runs.run_dir import RunDir
from vgrout.train import train

WATCHED = ("--reward-hack-detector", "info_rm,advantage", "--echo-trap-enabled")


@dataclass
class Timer:
    """Seconds of each call."""

    seconds: list[float] = field(default_factory=list)

    def around(self, call: Callable[..., Any], apart: Callable[[], float] = float) -> Callable[..., Any]:
        """The same call, timed. apart: seconds that were spent once and count for no call."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter() - apart()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - apart() - start)

        return timed


@dataclass(frozen=True)
class Overhead:
    """Of one run, seconds."""

    steps: list[float]
    saves: list[float]
    save_bytes: int
    adapter_bytes: int
    every: int  # the preset's steps between checkpoints
    detectors: dict[str, float]  # all steps together, without what is rewarded once
    watching: float  # … all of them and the guard
    once: float  # the base policy's own answers, at the start


def measure(preset: str, intervention: str, steps: int) -> Overhead:
    """A run with every detector on and a checkpoint after each step."""
    every = parse([preset]).run.checkpoint_every
    argv = [
        preset,
        "--intervention",
        intervention,
        "--steps",
        str(steps),
        "--checkpoint-every",
        "1",
        "--guard",
        "log",
        *WATCHED,
    ]
    cfg = parse([*argv, "--final-n-prompts", "6", "--final-samples", "1"])
    timers = {name: Timer() for name in ("save", *cfg.detectors.chosen, "echo", "collapse")}
    guards: list[Guard] = []
    detector = Guard._detector

    def timed_detector(guard: Guard, name: str) -> Any:
        tracker, read = detector(guard, name)
        guards[:] = [guard]
        return tracker, timers[name].around(read, lambda: guard.base.seconds)

    with tempfile.TemporaryDirectory(prefix="vgrout-overhead-") as folder, contextlib.chdir(folder):
        inputs, record = preflight(cfg), {"config": cfg.as_dict()}
        with (
            Grader(
                compile_reward=cfg.env.compile_reward,
                pass_reward=cfg.env.pass_reward,
                allow_weak=cfg.env.allow_weak_sandbox,
            ) as grader,
            RunContext(RunDir.create(cfg.run_id), grader, resume_command="", resumes=False, record=record) as run,
            patch.object(checkpoint, "save", timers["save"].around(checkpoint.save)),
            patch.object(Guard, "_detector", timed_detector),
        ):
            console.setup(None, "WARNING")
            rows = train(cfg, run, inputs)
        if run.code:
            raise RuntimeError(f"the run ended with exit code {run.code}")
        (guard,), newest = guards, checkpoint.complete(run.path)[-1]
        return Overhead(
            steps=[row.sec for row in rows],
            saves=timers["save"].seconds,
            save_bytes=sum(p.stat().st_size for p in newest.iterdir()),
            adapter_bytes=(run.path / "train.safetensors").stat().st_size,
            every=every,
            detectors={name: sum(timers[name].seconds) for name in guard.read},
            watching=guard.seconds - guard.base.seconds,
            once=guard.base.seconds,
        )


def table(o: Overhead) -> str:
    """GitHub markdown."""
    step, save, total = statistics.median(o.steps), statistics.median(o.saves), sum(o.steps)
    saving = [
        ["one save, median", f"{1e3 * save:.1f} ms", f"{save / step:.1%} of a step"],
        [f"… at --checkpoint-every {o.every}", f"{1e3 * save / o.every:.2f} ms a step", f"{save / step / o.every:.2%}"],
        ["a checkpoint", f"{o.save_bytes / 1024:.0f} KiB", f"{o.save_bytes / o.adapter_bytes:.1f} x the adapter file"],
        ["a step, median", f"{1e3 * step:.0f} ms", ""],
    ]
    n = len(o.steps)
    watching = [[name, 1e3 * s / n, f"{s / total:.2%}"] for name, s in sorted(o.detectors.items(), key=lambda x: -x[1])]
    watching += [["all, with the guard", 1e3 * o.watching / n, f"{o.watching / total:.2%}"]]
    first = tabulate(saving, headers=("checkpoints", "", ""), tablefmt="github", disable_numparse=True)
    second = tabulate(watching, headers=("detector", "ms a step", "of a step"), tablefmt="github", floatfmt=".2f")
    return f"{first}\n\n{second}\n\nOnce a run, for the base policy's own answers: {o.once / step:.1f} steps."


def run(preset: str, intervention: str, steps: int) -> str:
    """Both tables."""
    return table(measure(preset, intervention, steps))
