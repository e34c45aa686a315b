"""This machine's GPUs, and how a sweep's runs share them: `python -m vgrout.sweep.gpus N GPU,GPU,… COMMAND …`
runs a command on N of these GPUs that no other such command has, and waits while too few are free.

A GPU is held by a record lock of the run's own process: kept over exec, not inherited by its sandboxes, and gone with
the process, however that ends. So sweeps beside one another, queued runs and runs that outlive their sweep share, too.
"""

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

POLL_S = 0.2
LOCKS = Path(tempfile.gettempdir()) / f"vgrout-{os.getuid()}" / "gpus"


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


@dataclass(frozen=True)
class Share:
    """How many runs go at a time, and on what."""

    jobs: int
    gpus: tuple[str, ...] = ()  # (): the runs are on the CPU
    each: int = 1  # GPUs of a run, and its ranks

    @classmethod
    def of(cls, jobs: int | None, each: int, cores: int) -> "Share":
        """jobs: None for as many as there is room for. Raises ValueError, one line, where there is no such room."""
        gpus = visible()
        if not gpus:
            if each > 1:
                raise ValueError(f"--gpus-per-run {each}: there is no GPU here; leave it out")
            return cls(jobs or cores)
        most, here = len(gpus) // each, f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} here ({', '.join(gpus)})"
        if each > 1 and any(name.startswith("MIG-") for name in gpus):
            raise ValueError(f"--gpus-per-run {each}: a process can use one MIG instance; leave it out")
        if not most:
            raise ValueError(f"--gpus-per-run {each}: {here}; give at most {len(gpus)}")
        if jobs is None and len(gpus) % each:
            fits = ", ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
            raise ValueError(
                f"--gpus-per-run {each}: {here}, some would idle; give one of {fits}, or add --jobs {most}"
            )
        if jobs and jobs > most:
            raise ValueError(f"--jobs {jobs}: {here}, {each} a run; give at most {most}")
        return cls(jobs or most, gpus, each)

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command of a run that on the CPU is `argv`."""
        if not self.gpus:
            return [*argv]
        ranks = [f"--ranks={self.each}"] if self.each > 1 and not any(a.startswith("--ranks") for a in argv) else []
        return [sys.executable, "-m", "vgrout.sweep.gpus", str(self.each), ",".join(self.gpus), *argv, *ranks]

    def lines(self) -> list[str]:
        """What the plan says of GPUs."""
        own = "one of its own" if self.each == 1 else f"{self.each} of its own, a rank on each"
        return [f"GPUs {', '.join(self.gpus)}: each run has {own}"] if self.gpus else []


def take(n: int, gpus: list[str]) -> list[str] | None:
    """Lock n of the GPUs until this process ends; None, and nothing locked, where fewer are free."""
    LOCKS.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(LOCKS / "door", "w") as door:  # one process at a time: two that want two GPUs could each have one
        fcntl.lockf(door, fcntl.LOCK_EX)
        mine: dict[str, int] = {}
        for gpu in gpus:
            lock = os.open(LOCKS / gpu.replace("/", "_"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine[gpu] = lock
            except OSError:
                os.close(lock)
            if len(mine) == n:
                for lock in mine.values():
                    os.set_inheritable(lock, True)  # over exec
                return [*mine]
        for lock in mine.values():
            os.close(lock)
    return None


def main(n: str, among: str, *command: str) -> None:
    """Run the command on n GPUs of those named."""
    gpus = among.split(",")
    if (mine := take(int(n), gpus)) is None:
        print(f"I waiting until {n} of the GPUs {', '.join(gpus)} are free", flush=True)
        while (mine := take(int(n), gpus)) is None:
            time.sleep(POLL_S)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
