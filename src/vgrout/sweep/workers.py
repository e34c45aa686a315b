"""Workers that run a sweep's commands: local processes, a Ray cluster, or a pueue queue."""

import ctypes
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

PR_SET_PDEATHSIG = 1
POLL_S = 0.2
CONNECT_S = 10.0
_libc = ctypes.CDLL(None)


@runtime_checkable
class Job(Protocol):
    """A command that has been started."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def stop(self) -> None:
        """Ask it to save and end; a second call asks it to end at once."""
        ...


@runtime_checkable
class Workers(Protocol):
    slots: int  # commands at a time

    def start(self, argv: Sequence[str], log: Path) -> Job: ...
    def close(self) -> None: ...


# ── this machine ───────────────────────────────────────────────────────────────────────────────────────────────────


class Local:
    """Processes of this machine."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def start(self, argv: Sequence[str], log: Path) -> "LocalJob":
        return LocalJob(spawn(argv, log, threads=1 if self.slots > 1 else None))

    def close(self) -> None:
        pass


class LocalJob:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.terminate()


def spawn(argv: Sequence[str], log: Path, threads: int | None) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that a terminal's Ctrl-C reaches it once, through the sweep. The
    kernel sends it SIGTERM when this process dies, however it dies."""
    env = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    with open(log, "ab") as out:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=_dies_with(os.getpid()),
        )


def _dies_with(parent: int) -> Callable[[], None] | None:
    if sys.platform != "linux":  # elsewhere it runs on; the next sweep sees its lock and waits for it
        return None

    def tie() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tie


# ── Ray ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ray:
    """Tasks of a Ray cluster, each a process on one of its machines. They share this folder: a network file system,
    unless the cluster is this machine."""

    def __init__(self, address: str, slots: int | None, folder: Path) -> None:
        """address: "" starts a local cluster that ends with the sweep. Raises ValueError where none can be reached."""
        try:
            self._ray: Any = importlib.import_module("ray")  # an extra, and seconds to import
        except ImportError:
            raise ValueError("--via ray: ray is not installed; `uv sync --extra ray`, or leave --via out") from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers over the network
        own = {} if address else {"num_cpus": slots or os.cpu_count(), "include_dashboard": False}
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if host and port.isdecimal():  # where nobody listens, Ray would go on asking for minutes
                socket.create_connection((host, int(port)), CONNECT_S).close()
            self._ray.init(address=address or "local", log_to_driver=False, logging_level="warning", **own)
        except (ConnectionError, OSError, RuntimeError, ValueError) as e:
            raise ValueError(f"--ray-address {address!r}: no cluster can be reached there ({e})") from None
        has = self._ray.cluster_resources()
        gpus = 1 if has.get("GPU") else 0  # Ray hides the GPUs from a task that asks for none
        self.slots = slots or int(has.get("GPU") or has.get("CPU", 1))
        self._task = self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(supervised)
        self._marks = folder
        self._started = 0

    def start(self, argv: Sequence[str], log: Path) -> "RayJob":
        self._started += 1
        mark = self._marks / f".stop.{os.getpid()}.{self._started}"
        mark.unlink(missing_ok=True)
        return RayJob(self._ray, self._task.remote([*argv], str(Path.cwd()), str(log), str(mark.resolve())), mark)

    def close(self) -> None:
        self._ray.shutdown()
        for mark in self._marks.glob(f".stop.{os.getpid()}.*"):
            mark.unlink()


class RayJob:
    def __init__(self, ray: Any, ref: Any, mark: Path) -> None:
        self._ray, self._ref, self._mark = ray, ref, mark

    def poll(self) -> int | None:
        done, _ = self._ray.wait([self._ref], timeout=0)
        if not done:
            return None
        try:
            return int(self._ray.get(self._ref))
        except self._ray.exceptions.RayError:  # the machine or its worker died
            return 1

    def stop(self) -> None:
        """Through a file in the shared folder: a cancelled Ray task would not wait for the process it started."""
        with open(self._mark, "ab") as mark:
            mark.write(b"x")


def supervised(argv: Sequence[str], folder: str, log: str, mark: str) -> int:
    """Run a command in `folder`, one thread, until it ends; each byte in the file `mark` sends it a SIGTERM."""
    os.chdir(folder)
    process, sent = spawn(argv, Path(log), threads=1), 0
    while (code := process.poll()) is None:
        if sent < (asked := Path(mark).stat().st_size if Path(mark).exists() else 0):
            process.terminate()
            sent = asked
        time.sleep(POLL_S)
    return code


# ── pueue ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Pueue:
    """A pueue queue, which outlives the sweep: takes commands, and lists those it has by label and folder."""

    def __init__(self) -> None:
        """Raises ValueError where the client is missing or no daemon answers."""
        if shutil.which("pueue") is None:
            raise ValueError("--via pueue: no `pueue` on PATH; install it, or leave --via out")
        self.open = {
            (task.get("label"), task.get("path")) for task in self._tasks().values() if _stage(task["status"]) != "Done"
        }

    def add(self, argv: Sequence[str], label: str) -> None:
        """Add a command. Raises ValueError with the client's message where it refuses."""
        self._ask("add", "--escape", "--label", label, "--", *argv)

    def _tasks(self) -> Mapping[str, Any]:
        answer = self._ask("status", "--json")
        try:
            return json.loads(answer)["tasks"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--via pueue: `pueue status --json` printed {answer[:80]!r}; another version?") from None

    def _ask(self, *words: str) -> str:
        done = subprocess.run(["pueue", *words], capture_output=True, text=True)
        if done.returncode:
            why = " ".join((done.stderr or done.stdout).split())
            raise ValueError(f"--via pueue: `pueue {words[0]}` failed ({why}); is its daemon running (pueued -d)?")
        return done.stdout


def _stage(status: Any) -> str:
    """Older clients write "Queued", newer ones {"Queued": {…}}."""
    return status if isinstance(status, str) else next(iter(status))
