"""A sweep's runs as processes on this machine."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vgrout.ground.cores import cores
from vgrout.sweep.entry import Entry

PR_SET_PDEATHSIG = 1
Process = subprocess.Popen[bytes]


class Local:
    """Processes on this machine: each on a GPU of its own, or on cores if there are no GPUs."""

    def __init__(self, jobs: int | None, gpus: Sequence[str]) -> None:
        """jobs: runs at a time; None: as many as GPUs, or else cores."""
        self.slots = jobs or len(gpus) or cores()
        # GPU → the process that last had it
        self._latest: dict[str, Process | None] = dict.fromkeys(gpus[: self.slots])

    def start(self, entry: Entry, log: Path) -> Process:
        """Start a run, or go on with it; its output is appended to `log`."""
        if not self._latest:
            # several runs on cores have one thread each
            environment = {"OMP_NUM_THREADS": "1"} if self.slots > 1 else {}
            return spawn(entry.argv, log, environment)
        gpu = self._free_gpu()
        process = spawn(entry.argv, log, {"CUDA_VISIBLE_DEVICES": gpu})
        self._latest[gpu] = process
        return process

    def _free_gpu(self) -> str:
        for gpu, process in self._latest.items():
            if process is None or process.poll() is not None:
                return gpu
        raise AssertionError("no GPU is free")

    def close(self) -> None:
        pass


def spawn(argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start a process whose output is appended to `log`.

    It has a session of its own, so that a terminal's Ctrl-C reaches it only once, through the
    sweep. The kernel sends it SIGTERM when this process dies, however it dies.
    """
    with open(log, "ab") as out:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_dies_with(os.getpid()),
        )


def _dies_with(parent: int) -> Callable[[], None] | None:
    """What a child runs before its program starts, so that it ends with its parent."""
    if sys.platform != "linux":  # elsewhere it goes on; the next sweep sees its lock and waits
        return None
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
