"""Where a sweep's runs are started: as processes on this machine, or in a pueue queue."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vgrout.ground.io import Refused, refuse
from vgrout.ground.machine import cores
from vgrout.sweep.entry import Entry

POLL_S = 0.2
PR_SET_PDEATHSIG = 1
Process = subprocess.Popen[bytes]

# ── processes


class Local:
    """Processes on this machine: each on a GPU of its own, or on cores if there are no GPUs."""

    def __init__(self, jobs: int | None, gpus: Sequence[str]) -> None:
        """jobs: runs at a time; None: as many as GPUs, or else cores.

        Raises:
            Refused: one line: there are fewer GPUs.
        """
        refuse(
            len(gpus) > 0 and (jobs or 0) > len(gpus),
            f"--jobs {jobs}: GPUs {', '.join(gpus)} are here; give at most {len(gpus)}",
        )
        self.slots = jobs or len(gpus) or cores()
        # GPU → the process that last had it
        self._latest: dict[str, Process | None] = dict.fromkeys(gpus[: self.slots])

    def start(self, entry: Entry, log: Path) -> Process:
        """Start a run, or go on with it; its output is appended to `log`."""
        if not self._latest:
            # several runs on cores have one thread each
            environment = {"OMP_NUM_THREADS": "1"} if self.slots > 1 else {}
            return spawn(entry.argv, log, environment)
        free = [
            gpu for gpu, last in self._latest.items() if last is None or last.poll() is not None
        ]
        process = spawn(entry.argv, log, {"CUDA_VISIBLE_DEVICES": free[0]})
        self._latest[free[0]] = process
        return process


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


# ── pueue


class Pueue:
    """A pueue queue, which outlives the sweep.

    Each GPU has a group, in which one run goes at a time; without GPUs the runs are in the default
    group. `open` has the label and folder of every task that is not done.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        """Raises Refused where the client is missing or no daemon answers."""
        status = json.loads(_ask_pueue("status", "--json"))
        # older clients write a status as a word, "Done", newer ones as an object, {"Done": {…}}
        tasks = [task for task in status["tasks"].values() if "Done" not in task["status"]]
        self.open = {(task["label"], task["path"]) for task in tasks}
        self._groups = set(status["groups"])
        groups = [task["group"] for task in tasks]
        self._load = {gpu: groups.count(f"gpu-{gpu}") for gpu in gpus}  # GPU → its open tasks

    def add(self, argv: Sequence[str], label: str) -> None:
        """Add a command, on the GPU that has the fewest.

        Raises:
            Refused: the client refused it; with its message.
        """
        if not self._load:
            _ask_pueue("add", "--escape", "--label", label, "--", *argv)
            return
        gpu = min(self._load, key=lambda name: self._load[name])
        self._load[gpu] += 1
        group = f"gpu-{gpu}"
        if group not in self._groups:
            _ask_pueue("group", "add", "--parallel", "1", group)
            self._groups.add(group)
        on_gpu = ["env", f"CUDA_VISIBLE_DEVICES={gpu}", *argv]
        _ask_pueue("add", "--escape", "--label", label, "--group", group, "--", *on_gpu)


def _ask_pueue(*words: str) -> str:
    """What `pueue WORDS` prints."""
    try:
        done = subprocess.run(["pueue", *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        why = " ".join((getattr(e, "stderr", "") or str(e)).split())
        raise Refused(
            f"--via pueue: `pueue {words[0]}` failed ({why}); is `pueued -d` running?"
        ) from None
    return done.stdout
