"""This machine's GPUs, without torch: as `doctor`, a run's plan, the run itself and a sweep see them."""

import os
import re
import shutil
import subprocess
from functools import cache
from itertools import takewhile
from pathlib import Path

WSL = "/usr/lib/wsl/lib"  # where WSL2 has the driver's client; it has no /dev/nvidia0


def visible() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; of a GPU that is divided into MIG
    instances, these."""
    listed = _said(_client(), "-L")
    n = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE)) or len(
        [*Path("/dev").glob("nvidia[0-9]*")]
    )
    here = re.findall(r"UUID: (MIG-[^)]+)\)", listed) or [str(i) for i in range(n)]
    if here and (allowed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        # as CUDA reads it: what follows a name that is none, such as -1, does not count
        names = takewhile(
            lambda name: (
                name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < len(here))
            ),
            map(str.strip, allowed.split(",")),
        )
        here = dict.fromkeys(names)
    return tuple(here)


def free_bytes() -> int | None:
    """Memory that nobody uses on the first of them; None where that is not said (a MIG instance, no driver)."""
    if not (gpus := visible()):
        return None
    said = _said(
        _client(), f"--id={gpus[0]}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"
    )
    return int(said) * 2**20 if said.strip().isdecimal() else None


def _client() -> str | None:
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=WSL)


@cache  # it takes up to seconds where no other process holds the driver
def _said(client: str | None, *question: str) -> str:
    try:
        return subprocess.run(
            [client or "", *question], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
