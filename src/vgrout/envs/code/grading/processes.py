"""Processes of a worker: how they are started, in a clean interpreter, and how long each may take.

Standard library only: this is what the trainer loads of a worker.
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from vgrout.ground.io import restore_inherited

START_WITHIN = 60  # seconds for a worker's process to say hello
STUCK_AFTER = 5.0  # seconds beyond the wall limit without a report: the fork server is lost
PATIENCE = 4.0  # wall limits that a child gets on a machine too busy to run it

# Wall limit = factor · CPU limit + extra [s]: a backstop, so that load fails nobody.
WALL_FACTOR = 4.0
WALL_EXTRA = 2.0


def wall_limit(cpu_s: float) -> float:
    """Wall seconds of what may compute for so many."""
    return WALL_FACTOR * cpu_s + WALL_EXTRA


SOURCE = str(Path(__file__).resolve().parents[4])
# No site-packages, no user site, no script folder on the path. Not -I: it would ignore
# PYTHONHASHSEED.
ISOLATED = ("-S", "-s", "-P")
CLEAN_ENV = {
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    "LC_ALL": "C",  # that of UTF-8 has files, which the sandbox lacks; text is UTF-8 all the same
    "TZ": "UTC",
    "PATH": "/usr/bin:/bin",
}


def start_process(
    module: str, *arguments: str | int | float, own_session: bool = False, hash_seed: str = "0"
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `main(fd, *arguments)` of a module of this package in a clean interpreter.

    `fd` is one end of a socket. own_session: Ctrl-C does not reach the process. hash_seed: "0" or
    "random". Returns the process and the other end of the socket.
    """
    restore_inherited()
    own_end, other_end = socket.socketpair()
    with other_end:
        bootstrap = (
            f"import sys; sys.path.insert(0, {SOURCE!r}); "
            f"from vgrout.envs.code.grading.{module} import main; sys.path.pop(0); "
            f"main({other_end.fileno()}, *{arguments!r})"
        )
        process = subprocess.Popen(
            [sys.executable, *ISOLATED, "-c", bootstrap],
            pass_fds=[other_end.fileno()],
            stdin=subprocess.DEVNULL,
            env=CLEAN_ENV | {"PYTHONHASHSEED": hash_seed},
            cwd="/",
            start_new_session=own_session,
        )
    return process, own_end


def reap(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait for the end of a process whose input has ended; kill it after `patience_s` seconds."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def remove_empty(folder: str) -> None:
    with suppress(OSError):  # what is left is the trainer's to remove
        os.rmdir(folder)
