"""Starts runs as forks of one process that has imported everything: 6 CPU seconds saved per run, 14 without bytecode.

The process is multiprocessing's fork server: it imports `preload.py` and forks, and computes nothing, draws no random
number, starts no thread and never touches a GPU. A fork then behaves like `python -m vgrout.train`, in its own session,
and gets SIGTERM when the sweep dies, however it dies.
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
SERVER_DIED = 255  # multiprocessing's exit code if the fork server has died; no run ends with it
THREADS = {"OMP_NUM_THREADS": "1"}  # for runs that share a machine; read when torch is imported
GROUPS = (signal.SIGINT, signal.SIGTERM)  # sent to the process group; the sweep passes them on to runs
_libc = ctypes.CDLL(None)


class CannotFork(Exception):
    """There is no process to fork from; says why in one line."""


class Warm:
    """The process to fork from, started with the first run."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["vgrout.sweep.preload"])
        self._runs: list[BaseProcess] = []

    def start(self, flags: Sequence[str], log: Path) -> BaseProcess:
        """Start a run in the current folder, its output appended to `log`. The first one waits for the imports.

        Raises:
            CannotFork: the process could not be started, has died, or cannot be forked safely.
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
        """Ask the remaining runs to save and end."""
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
    """Have the kernel send this process a signal when its parent dies; end at once if it already has. Linux only."""
    _libc.prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def run(flags: list[str], log: str) -> None:
    """What a fork runs: `python -m vgrout.train FLAGS`, as if started as a separate process."""
    preload = sys.modules.get("vgrout.sweep.preload")  # absent where the server has not imported it
    die_with(preload.SERVER if preload else os.getppid())
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUPS)  # signals that were held back arrive now
    multiprocessing.set_start_method(None, force=True)  # else the run's own processes would use the fork server
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a new process; Python's generator reseeds itself, torch's always starts alike
    sys.argv = ["vgrout.train", *flags]
    try:
        runpy.run_module("vgrout.train", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing would skip them
