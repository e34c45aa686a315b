"""Figures with their goals, ratios of measurements taken in turn, and the machine. Without torch: grading's peers are
forked."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm


@dataclass(frozen=True)
class Figure:
    """One line of a bench's table."""

    what: str
    against: str
    figure: str
    goal: str = ""  # "" where there is none: the line informs
    reached: bool | None = None  # None: no goal, or not measured


def page(figures: Sequence[Figure], *notes: str) -> str:
    """A Markdown table, the machine, the notes."""
    verdict = {True: "reached", False: "missed", None: ""}
    rows = [(f.what, f.against, f.figure, f.goal, verdict[f.reached]) for f in figures]
    head = ("what", "against", "figure", "goal", "")
    return "\n\n".join([tabulate(rows, head, tablefmt="github"), machine(), *notes])


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
        low, _, high = (
            statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
        )
        return Ratio(statistics.median(each), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} × ({self.low:.2f} – {self.high:.2f})"

    def at_least(self, what: str, against: str, goal: float | int) -> Figure:
        """A line whose median should reach a goal."""
        return Figure(what, against, str(self), f"≥ {goal:g} ×", self.median >= goal)


def interleaved(
    contestants: Mapping[str, Callable[[], object]], rounds: int, what: str
) -> dict[str, list[float]]:
    """Wall seconds of each, once a round, in turn, after a round that does not count: a busy machine is busy for all
    of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in tqdm(range(rounds + 1), desc=what, disable=None, leave=False):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_bytes(process: int | str = "self") -> int:
    """The most that a process has held so far. Raises OSError off Linux."""
    (line,) = (
        x
        for x in Path(f"/proc/{process}/status").read_text().splitlines()
        if x.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


def machine() -> str:
    """Cores, processor, load, versions; no names of hosts or folders."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "transformers", "trl", "peft", "vgrout"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return (
        f"{len(os.sched_getaffinity(0))} cores of {_cpu_model()}, load {os.getloadavg()[0]:.1f} at the end; "
        f"{', '.join(versions)}."
    )


def _cpu_model() -> str:
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ()
    ):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
