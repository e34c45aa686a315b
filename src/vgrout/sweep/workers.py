"""Where a sweep's runs are started: as processes on this machine, on a Ray cluster, or in a pueue queue."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vgrout.ground.io import Refused, not_installed
from vgrout.ground.machine import cores
from vgrout.runs.context import FAILED, FINISHED, INTERRUPTED
from vgrout.sweep.entry import FINAL, Entry, Ledger

POLL_S = 0.2
PR_SET_PDEATHSIG = 1
RETRIES = 3  # of a run whose machine Ray has lost
CONNECT_S = 10.0
Process = subprocess.Popen[bytes]

# ── processes


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
        free = [
            gpu for gpu, last in self._latest.items() if last is None or last.poll() is not None
        ]
        process = spawn(entry.argv, log, {"CUDA_VISIBLE_DEVICES": free[0]})
        self._latest[free[0]] = process
        return process

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


# ── Ray


class Ray:
    """Tasks of a Ray cluster: one run per GPU where it has any, else one per core.

    The cluster's machines share this folder under the same path, and have vgrout installed. Ray
    picks a machine for each run, and another one if that is lost: there the run goes on from its
    last checkpoint.
    """

    def __init__(self, address: str, most: int | None) -> None:
        """Connect to a cluster, or start one on this machine that ends with the sweep.

        address: the cluster's; "" starts one. most: runs at a time.

        Raises:
            Refused: Ray is not installed, or no cluster can be reached; one line.
        """
        try:
            import ray
        except ImportError:
            raise not_installed("ray") from None
        # else Ray reports to its makers over the network
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if not address:
            settings |= {"num_cpus": most or os.cpu_count(), "include_dashboard": False}
        try:
            _require_listener(address)
            ray.init(address=address or "local", **settings)
        except (ConnectionError, OSError, RuntimeError, ValueError) as e:
            raise Refused(
                f"--ray-address {address!r}: no cluster can be reached there ({e})"
            ) from None
        self._ray = ray
        self._most = most
        self._unit = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        gpus = 1 if self._unit == "GPU" else 0
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(_carry_out)

    @property
    def slots(self) -> int:
        """GPUs, or else cores, of the machines that are there now, at most those asked for."""
        there = int(self._ray.cluster_resources().get(self._unit, 0))
        return min(there, self._most or there)

    def start(self, entry: Entry, log: Path) -> "RayJob":
        """Start a run, or go on with it; its output is appended to `log`."""
        return RayJob(self._ray, self._task.remote(Path.cwd(), entry, log), log)

    def close(self) -> None:
        self._ray.shutdown()


def _require_listener(address: str) -> None:
    """Raises OSError if nobody listens at HOST:PORT: Ray would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_S).close()


class RayJob:
    """A run as a task of the cluster. It has the methods of a process that a sweep uses."""

    def __init__(self, ray: Any, task: Any, log: Path) -> None:
        self._ray, self._task, self._log = ray, task, log

    def poll(self) -> int | None:
        """Its exit code; None while it runs or waits."""
        if not self._ray.wait([self._task], timeout=0)[0]:
            return None
        try:
            return self._ray.get(self._task)
        except self._ray.exceptions.TaskCancelledError:  # before a machine had begun it
            return INTERRUPTED
        # its machine was lost once too often, or cannot run it
        except self._ray.exceptions.RayError as e:
            with contextlib.suppress(OSError), open(self._log, "a") as log:
                log.write(f"E {str(e).strip().splitlines()[-1]}\n")
            return FAILED

    def terminate(self) -> None:
        """Ask it to save and end."""
        self._ray.cancel(self._task)


def _carry_out(folder: Path, entry: Entry, log: Path) -> int:
    """Start a run or go on with it, in a process of Ray's on any machine; returns its exit code.

    Ray calls it again on another machine if this one is lost.
    """
    os.chdir(folder)
    ledger = Ledger()
    ledger.refresh()
    entry.look(ledger)
    # on a machine that was lost the process is still saving, or its lock is still held
    while entry.state == "running":
        time.sleep(POLL_S)
        entry.look(ledger)
    if entry.state in FINAL:
        return FINISHED
    process = spawn(entry.argv, log, {"OMP_NUM_THREADS": "1"})
    while True:
        try:
            while (code := process.poll()) is None:
                time.sleep(POLL_S)
            return code
        except KeyboardInterrupt:  # the task was cancelled
            process.terminate()


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
