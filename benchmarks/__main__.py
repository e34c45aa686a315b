"""`python -m benchmarks [NAME]`: every bench of the page notes/benchmarks.md, which it writes; or one bench by name.

A bench is a function whose parameters are its flags; it returns a Report, or prints its own table. Torch is imported by
those that need it: the others start their processes without it.
"""

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks import kills as deaths
from vgrout.cli import cli_exit, parse_args
from vgrout.model.source import require_model

OUT = Path("notes/benchmarks.md")


def _measured(module: str, function: str, summary: str) -> Callable[..., Any]:
    """A bench of the page."""

    def bench(quick: bool = False, figures: tyro.conf.Suppress[Path | None] = None) -> Any:
        where = {"figures": figures} if figures else {}
        return getattr(importlib.import_module(f"benchmarks.{module}"), function)(quick, **where)

    bench.__doc__ = f"{summary}\n\nArgs:\n    quick: few rounds and small sizes."
    return bench


def _grading(quick: bool = False, problems: Path | None = None) -> Any:
    """Grading against graders that start an interpreter for every run.

    Args:
        quick: fewer rounds.
        problems: a file of real problems; without one, only answers of the organism's size are measured.
    """
    _require_file(problems)
    return importlib.import_module("benchmarks.grading").report(quick, problems)


def _kills(
    kills: int = 25, arm: Literal["all", "none", "erase", "route", "route2", "screen"] = "all", seed: int = 0
) -> None:
    """Runs killed at random moments and inside saves, resumed, and compared with an unbroken run (minutes).

    Args:
        kills: kills of each method's runs.
        arm: the intervention; screen runs with the monitor pmi.
        seed: of the moments.
    """
    if kills < 1:
        raise ValueError(f"--kills {kills}: at least 1")
    tallies = deaths.run(kills, deaths.ARMS if arm == "all" else (arm,), seed)
    print(deaths.table(tallies))
    if any(t.survived < t.tried for t in tallies):
        raise SystemExit(1)


def _real(model: Path, dtype: Literal["auto", "fp32", "bf16"] = "bf16", quick: bool = False) -> Any:
    """A real model on this machine: a step and its memory against TRL's in the same dtype, sampling and update against
    the machine's bounds (ten minutes).

    Args:
        model: its folder.
        dtype: of all contestants' weights; auto: of each its default, which for TRL is fp32.
        quick: one round of each.
    """
    require_model(model)
    return importlib.import_module("benchmarks.real").run(model.resolve(), dtype, quick)


def _overhead(
    preset: Literal["smoke", "mini"] = "mini",
    arm: Literal["none", "erase", "route", "route2"] = "route2",
    steps: int = 25,
) -> None:
    """Time and size of checkpoints, and time of every detector, beside a step's.

    Args:
        preset: of the run.
        arm: its intervention.
        steps: how many.
    """
    if steps < 1:
        raise ValueError(f"--steps {steps}: at least 1")
    print(importlib.import_module("benchmarks.overhead").run(preset, arm, steps))


def _cost(write: bool = False) -> None:
    """GPU-hours of a study of Qwen3-4B on paper: where they go, what each lever saves, what fits where.

    Args:
        write: put the tables into notes/cost.md.
    """
    cost, page = importlib.import_module("benchmarks.cost"), Path("notes/cost.md")
    if write:
        if not page.is_file():
            raise ValueError(f"--write: no {page} here; start from the repository")
        page.write_text(cost.filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(table() for table in cost.TABLES.values()))


def _svd() -> None:
    """Time and size of the SVD cache for Qwen3-4B's shapes, extrapolated from modules measured here."""
    print(importlib.import_module("benchmarks.svd").run())


PAGE: dict[str, Callable[..., Any]] = {
    "step": _measured("step", "run", "A whole training step against TRL's."),
    "update": _measured("update", "phase", "Forward, backward and routing against the plain model's."),
    "sampling": _measured("sampling", "run", "Tokens a second against the bare model, and against transformers."),
    "grading": _grading,
    "direction": _measured("direction", "run", "A direction of 24 pairs against one backward per completion."),
    "memory": _measured("update", "memory", "The update's peak against full logits of all rows."),
    "sharing": _measured("update", "sharing", "A prompt read once against a copy for each of its rollouts."),
    "levers": _measured("levers", "run", "Every lever on against off."),
    "growth": _measured("growth", "run", "Time and memory against G, P, the answers' length, the hidden size."),
}
BENCHES: dict[str, Callable[..., Any]] = PAGE | {
    "arms": _measured("arms", "run", "A step of every method against one of plain GRPO."),
    "cost": _cost,
    "distill": _measured("distill", "run", "Tokens a second of distillation against the plain student and teacher."),
    "gpu": _measured("gpu", "run", "Update and sampling at Qwen3-4B's shapes; needs a GPU."),
    "kills": _kills,
    "overhead": _overhead,
    "real": _real,
    "svd": _svd,
}

HEADER = """# Benchmarks

{how} Figures are ratios of runs that took turns in one process: the median of paired rounds, in brackets
their middle half.

{machine}
"""


def everything(quick: bool = False, problems: Path | None = None, out: Path = OUT) -> None:
    """Speed and memory as ratios, each against a peer, in one run on one machine, and the page. With a NAME, that one.

    Args:
        quick: few rounds and small sizes, under three minutes on two quiet cores.
        problems: a file of real problems for `grading`; without one it takes answers of the organism's size.
        out: the page; its figures go into figures/ beside it.
    """
    _require_file(problems)
    out = out.resolve()  # benches run in a folder of their own
    if not out.parent.is_dir():
        raise ValueError(f"--out {out.name}: no folder {out.parent.name}/ here; start from the repository")
    growth, report = (importlib.import_module(f"benchmarks.{m}") for m in ("growth", "report"))
    flags = {"growth": {"figures": out.parent / "figures"}}
    about, start, parts = report.machine(), time.perf_counter(), []
    for name, run in PAGE.items():
        text = _apart(quick, problems) if name == "grading" else run(quick=quick, **flags.get(name, {})).markdown()
        print(f"\n{text}", flush=True)
        parts.append(f"## {name}\n\n{text}\n")
    parts += [f"![{axis}](figures/growth-{axis}.png)\n" for axis in growth.AXES]
    minutes = (time.perf_counter() - start) / 60
    how = f"`python -m benchmarks{' --quick' if quick else ''}`, {minutes:.0f} minutes."
    out.write_text("\n".join([HEADER.format(how=how, machine=about), *parts]), encoding="utf-8")


def _apart(quick: bool, problems: Path | None) -> str:
    """Grading in a process of its own: a fork of this one, with torch in it, would slow its peers down."""
    flags = [*(["--quick"] if quick else []), *(["--problems", str(problems)] if problems else [])]
    done = subprocess.run([sys.executable, "-m", "benchmarks", "grading", *flags], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().strip()


def _require_file(problems: Path | None) -> None:
    if problems is not None and not problems.is_file():
        raise ValueError(f"--problems {problems}: no such file")


def main(argv: list[str]) -> int:
    def command() -> int:
        if not argv or (argv[0].startswith("--") and argv[0] != "--help"):
            parse_args(everything, argv, "python -m benchmarks")
        elif report := parse_args(BENCHES, argv, "python -m benchmarks"):
            print(report.markdown())
        return 0

    return cli_exit(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
