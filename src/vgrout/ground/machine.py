"""What this machine has for this process: processor cores, and GPUs, which are found without torch.

Standard library only.
"""

import math
import os
import re
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """How many cores this process may use: those that it may run on, at most its control groups' quota of time."""
    there = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(there, math.ceil(_quota())))


def _quota() -> float:
    """The smallest quota of the control groups (version 2) of this process and of those around them, in cores; without
    one, so many as there can be."""
    quotas = [float(os.cpu_count() or 1)]
    with suppress(OSError):
        for line in OWN_CGROUP.read_text().splitlines():
            of = CGROUPS / line.split(":", 2)[2].lstrip("/")
            for folder in (of, *of.parents):
                # no such file; the word for no quota
                with suppress(OSError, ValueError, ZeroDivisionError):
                    quota, period = map(int, (folder / "cpu.max").read_text().split())
                    quotas.append(quota / period)
    return min(quotas)


WSL = "/usr/lib/wsl/lib"  # where WSL2 has the driver's client; it has no /dev/nvidia0


def visible() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    A GPU that is divided into MIG instances is represented by these.
    """
    here = _installed()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not here or allowed is None:
        return tuple(here)
    names: list[str] = []
    for name in map(str.strip, allowed.split(",")):
        is_index = name.isdecimal() and int(name) < len(here)
        if not is_index and not name.startswith(("GPU-", "MIG-")):
            break  # as CUDA reads it: what follows a name that is none, such as -1, does not count
        if name not in names:
            names.append(name)
    return tuple(names)


def _installed() -> list[str]:
    """The MIG instances of this machine, or else the indices of its GPUs."""
    listed = _answer(_client(), "-L")
    instances = re.findall(r"UUID: (MIG-[^)]+)\)", listed)
    if instances:
        return instances
    n = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    if n == 0:  # no client: count the driver's devices
        n = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return [str(i) for i in range(n)]


def free_bytes() -> int | None:
    """Unused memory of the first visible GPU; None if not known (a MIG instance, no driver)."""
    gpus = visible()
    if not gpus:
        return None
    question = (f"--id={gpus[0]}", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
    answer = _answer(_client(), *question).strip()
    return int(answer) * 2**20 if answer.isdecimal() else None


def _client() -> str | None:
    """The path of nvidia-smi."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=WSL)


@cache  # it takes up to seconds where no other process holds the driver
def _answer(client: str | None, *question: str) -> str:
    """What nvidia-smi prints; "" if it is not there or hangs."""
    try:
        done = subprocess.run([client or "", *question], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
