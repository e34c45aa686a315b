"""Runs as forks of one process that has imported what a run imports: 6 CPU seconds less a run, 14 where no bytecode is
cached.

The process is multiprocessing's fork server, of which the runs are grandchildren: it imports `preload.py` and forks; it
computes nothing, draws no random number, starts no thread and never touches a GPU. A fork becomes what `python -m
vgrout.train` is, in a session of its own, and gets SIGTERM when the sweep dies, however it dies.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Generator, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

PR_SET_PDEATHSIG = 1
SERVER_DIED = 255  # what multiprocessing gives as the exit code then; no run ends with it
THREADS = {"OMP_NUM_THREADS": "1"}  # of a run that shares its machine; read when torch is imported
GROUPS = (signal.SIGINT, signal.SIGTERM)  # of a terminal or scheduler, for all of a group: the sweep's to hand on
_libc = ctypes.CDLL(None)


class CannotFork(Exception):
    """Why there is no process to fork from, in one line."""


class Warm:
    """The process with the imports, started at the first run."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["vgrout.sweep.preload"])
        self._runs: list[BaseProcess] = []

    def start(self, flags: Sequence[str], log: Path) -> BaseProcess:
        """A run in the present folder, its output appended to `log`. The first one waits for the imports.

        Raises:
            CannotFork: the process could not be started, has died, or is not fit to be forked.
            OSError: the log cannot be written.
        """
        log = log.resolve()
        open(log, "ab").close()
        process = self._context.Process(target=run, args=([*flags], str(log)))
        with _environment(THREADS):
            try:
                forkserver.ensure_running()
                process.start()
            except (EOFError, OSError) as e:
                raise CannotFork(f"the process to fork from has ended ({type(e).__name__})") from None
        self._runs.append(process)
        return process

    def close(self) -> None:
        """Ask the runs that are left to save and end, as the kernel would at the sweep's death."""
        for process in self._runs:
            if process.exitcode is None:
                process.terminate()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def die_with(parent: int, by: signal.Signals = signal.SIGTERM) -> None:
    """A signal for this process when its parent dies; it ends at once where that has died already. Linux."""
    _libc.prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def run(flags: list[str], log: str) -> None:
    """What a fork does: `python -m vgrout.train FLAGS`, as a process that was started for it would."""
    preload = sys.modules.get("vgrout.sweep.preload")  # of the server; without it this process imports for itself
    die_with(preload.SERVER if preload else os.getppid())
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUPS)  # what came meanwhile for this process comes now
    multiprocessing.set_start_method(None, force=True)  # the fork server's, else, for whatever the run starts
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as every process has another one; Python's own reseeds itself, torch's begins alike
    sys.argv = ["vgrout.train", *flags]
    try:
        runpy.run_module("vgrout.train", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a process without them
