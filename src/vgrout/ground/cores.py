"""How many processor cores this process may use. Standard library only."""

import math
import os
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """How many cores this process may use: those that it may run on, at most its control groups' quota of time."""
    there = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(there, math.ceil(_quota())))


def _quota() -> float:
    """The smallest quota of the control groups of this process and of those around them, in cores, by version 2
    (cpu.max) or version 1 (cfs); without one, so many as there can be."""
    quotas = [float(os.cpu_count() or 1)]
    with suppress(OSError):
        for line in OWN_CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" not in (controllers or "cpu").split(","):
                continue
            of = (CGROUPS / "cpu" if controllers else CGROUPS) / path.lstrip("/")
            for folder in (of, *of.parents):
                # no such file; the word for no quota
                with suppress(OSError, ValueError, ZeroDivisionError):
                    files = (
                        ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                    )
                    quota, period = map(
                        int, " ".join((folder / file).read_text() for file in files).split()
                    )
                    quotas += [quota / period] * (quota > 0)
    return min(quotas)
