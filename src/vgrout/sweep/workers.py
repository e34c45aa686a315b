"""What runs a sweep's commands: the protocol, and processes of this machine."""

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

POLL_S = 0.2


@dataclass(frozen=True)
class Attempt:
    """A run to start or to go on with."""

    flags: Sequence[str]  # what follows `python -m vgrout.train`
    log: Path  # takes what it prints, behind what is there
    resumes: Path | None = None  # the run directory that it goes on with
    cfg: Config | None = None  # what the flags mean

    @property
    def argv(self) -> list[str]:
        """The command."""
        return [sys.executable, "-m", "vgrout.train", *self.flags]


class Lost(Exception):
    """What ran an attempt is gone, and its exit code with it: the run may go on elsewhere."""


@runtime_checkable
class Job(Protocol):
    """An attempt that has been started: a `subprocess.Popen`, or what behaves like one."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs. Raises Lost."""
        ...

    def terminate(self) -> None:
        """Ask it to save and end; a second call asks it to end at once."""
        ...


@runtime_checkable
class Workers(Protocol):
    @property
    def slots(self) -> int:
        """Attempts at a time, at present."""
        ...

    def start(self, attempt: Attempt) -> Job: ...
    def close(self) -> None: ...


class Local:
    """Processes of this machine; where several share it, each has one thread."""

    def __init__(self, slots: int, *, forks: bool = False) -> None:
        """forks: of one process that has the imports, where `warm.refusal` has nothing against it."""
        self.slots = slots
        self._warm = warm.Warm() if forks else None

    def start(self, attempt: Attempt) -> Job:
        if self._warm:
            try:
                return ForkedJob(self._warm.start(attempt.flags, attempt.log))
            except warm.CannotFork as e:
                logger.warning(f"every run imports for itself, seconds of CPU time each: {e}")
                self._warm = None
        return spawn(attempt.argv, attempt.log, threads=1 if self.slots > 1 else None)

    def close(self) -> None:
        if self._warm:
            self._warm.close()


class ForkedJob:
    """A fork of the warm process."""

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
    return lambda: warm.die_with(parent)
