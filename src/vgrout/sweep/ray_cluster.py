"""Runs a sweep as tasks of a Ray cluster.

The cluster's machines share this folder under the same path, and have vgrout installed. Ray picks a
machine for each run, and another one if that is lost: there the run goes on from its last
checkpoint.
"""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from vgrout.ground.cli import not_installed
from vgrout.ground.errors import Refused
from vgrout.runs.context import FAILED, FINISHED, INTERRUPTED
from vgrout.sweep.entry import FINAL, Entry
from vgrout.sweep.ledger import Ledger
from vgrout.sweep.workers import spawn

RETRIES = 3  # of a run whose machine was lost
POLL_S = 0.2
CONNECT_S = 10.0


class Ray:
    """Workers on a cluster: one run per GPU where it has any, else one per core."""

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

    def send_signal(self, number: int) -> None:
        """Ask it to save and end; a second call: to end at once. number: of the signal, which Ray does not hand on."""
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
    number = signal.SIGTERM
    while True:
        try:
            while (code := process.poll()) is None:
                time.sleep(POLL_S)
            return code
        except KeyboardInterrupt:  # the task was cancelled; once more: it should end at once
            process.send_signal(number)
            number = signal.SIGINT
