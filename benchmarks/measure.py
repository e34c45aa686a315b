"""Figures with their goals, ratios of measurements taken in turn, and the machine.

Nothing here imports torch: grading's peers are forked, and would be slower.
"""

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
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        if len(ratios) == 1:
            return Ratio(ratios[0], ratios[0], ratios[0])
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return Ratio(statistics.median(ratios), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} × ({self.low:.2f} – {self.high:.2f})"

    def at_least(self, what: str, against: str, goal: float | int) -> Figure:
        """A line whose median should reach a goal."""
        return Figure(what, against, str(self), f"≥ {goal:g} ×", self.median >= goal)


def interleaved(
    contestants: Mapping[str, Callable[[], object]], rounds: int, what: str
) -> dict[str, list[float]]:
    """Wall seconds of each contestant, once a round, after a round that does not count.

    They take turns, so that a busy machine is busy for all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in tqdm(range(rounds + 1), desc=what, disable=None, leave=False):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_bytes(process: int | str = "self") -> int:
    """The most memory that a process has held so far. Raises OSError off Linux."""
    return _of_status(process, "VmHWM")


def held_bytes(process: int | str = "self") -> int:
    """The memory that a process holds. Raises OSError off Linux."""
    return _of_status(process, "VmRSS")


def _of_status(process: int | str, name: str) -> int:
    """Bytes of one line of /proc/PID/status."""
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def machine() -> str:
    """Cores, processor, load, versions; no names of hosts or folders."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "transformers", "trl", "peft", "vgrout"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return f"{cores} cores of {_cpu_model()}, load {load:.1f} at the end; {', '.join(versions)}."


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
