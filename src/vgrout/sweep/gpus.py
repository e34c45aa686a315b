"""This machine's GPUs."""

import os
import re
import subprocess
from itertools import takewhile
from pathlib import Path


def visible() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; of a GPU that is divided into MIG
    instances, these. No torch is loaded."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    n = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE)) or len([*Path("/dev").glob("nvidia[0-9]*")])
    here = re.findall(r"UUID: (MIG-[^)]+)\)", listed) or [str(i) for i in range(n)]
    if here and (allowed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        # as CUDA reads it: what follows a name that is none, such as -1, does not count
        names = takewhile(
            lambda name: name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < len(here)),
            map(str.strip, allowed.split(",")),
        )
        here = dict.fromkeys(names)
    return tuple(here)
