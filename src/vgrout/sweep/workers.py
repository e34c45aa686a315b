"""Workers that run a sweep's commands: the protocol, and processes on this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, runtime_checkable

from loguru import logger

from vgrout.config.run import Config
from vgrout.sweep import warm
from vgrout.sweep.gpus import Share


@dataclass(frozen=True)
class Attempt:
    """A run to start or resume."""

    flags: Sequence[str]  # after `python -m vgrout.train`
    log: Path  # its output is appended here
    resumes: Path | None = None  # the directory of the run to resume
    cfg: Config | None = None  # the flags, parsed

    @property
    def argv(self) -> list[str]:
        """The command."""
        return [sys.executable, "-m", "vgrout.train", *self.flags]


class Lost(Exception):
    """The process or machine of an attempt is lost, without an exit code: the run may continue elsewhere."""


@runtime_checkable
class Job(Protocol):
    """A started attempt: a `subprocess.Popen`, or something that behaves like one."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs. Raises Lost."""
        ...

    def terminate(self) -> None:
        """Ask it to save and end; a second call: to end at once."""
        ...


@runtime_checkable
class Workers(Protocol):
    @property
    def slots(self) -> int:
        """How many attempts can run at a time now."""
        ...

    def start(self, attempt: Attempt) -> Job: ...
    def close(self) -> None: ...


class Local:
    """Processes on this machine. Several on the CPU have one thread each, and are forked from one process that has the
    imports, as long as that works."""

    def __init__(self, share: Share) -> None:
        self._share, self.slots = share, share.jobs
        self._several = share.jobs > 1 and not share.gpus
        self._warm = warm.Warm() if self._several and sys.platform == "linux" else None

    def start(self, attempt: Attempt) -> Job:
        if self._warm:
            try:
                return ForkedJob(self._warm.start(attempt.flags, attempt.log))
            except warm.CannotFork as e:
                logger.warning(f"every run imports for itself, seconds of CPU time each: {e}")
                self._warm = None
        return spawn(self._share.command(attempt.argv), attempt.log, threads=1 if self._several else None)

    def close(self) -> None:
        if self._warm:
            self._warm.close()


class ForkedJob:
    """A run forked from the warm process."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        code = self._process.exitcode
        if code == warm.SERVER_DIED:
            raise Lost("the process that it was forked from has died")
        return code

    def terminate(self) -> None:
        self._process.terminate()


def spawn(argv: Sequence[str], log: Path, threads: int | None) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that a terminal's Ctrl-C reaches it only once, through the sweep. The
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
    if sys.platform != "linux":  # elsewhere it goes on; the next sweep sees its lock and waits
        return None
    return lambda: warm.die_with(parent)
