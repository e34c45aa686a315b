"""The fork server: a small, clean process that forks one child per run, watches its clock, and cleans up after it.

It never parses a job: a request is a fixed frame with three file descriptors (job, connection, stdout), and the child
reads the job itself, so no earlier program or input is ever in inherited memory. It is started by exec, has one thread
and no secrets. CPU time decides (the child's own clock, then wait4's account); wall time only ends a child that waits.
"""

import gc
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from contextlib import suppress
from typing import Any

from vgrout.grading import child, isolation

# Imported once, so that an answer's import is a lookup: what setup code and most answers use. Every shared library
# costs each fork 20 us, so the rarer ones are left to the child, unless it cannot open files.
PRELOAD = """
    abc array atexit bisect collections collections.abc contextlib copy copyreg dataclasses datetime decimal enum
    fractions functools heapq inspect io itertools json keyword linecache math numbers operator random re string struct
    sys threading time types typing warnings weakref
"""
RARE = "base64 binascii calendar cmath hashlib logging pprint queue statistics textwrap timeit traceback uuid zlib"

FRAME = struct.Struct("<4sB3xdd64s")  # kind, flags, CPU limit [s], wall limit [s], file to read afterwards
REPORT = struct.Struct("<4sxxxxiiddqq")  # kind, wait status, cause, CPU [s], wall [s], peak [KiB], file bytes or -1
RUN, KILL, DONE = b"run.", b"kill", b"done"
OPEN_ALLOWED = 1  # flag: seccomp lets the child open files (landlock says which)

CAUSE_NONE, CAUSE_CPU, CAUSE_WALL, CAUSE_VERIFIER, CAUSE_FILES = range(5)
MAX_RESULT_FILE = 4096  # bytes read from the file that a mode's evidence is
MAX_ENTRIES = 300  # files in the working directory, where no tmpfs limits them

CONNECTION_FD = 120  # the child's end of its connection; high, so that no low descriptor is in its way


class Sweeper:
    """Empties the working directory without recursion, whatever the child left there."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._serial = 0

    def crowded(self) -> bool:
        with os.scandir(self.fd) as entries:
            return any(i >= MAX_ENTRIES for i, _ in enumerate(entries))

    def read_result(self, name: str) -> bytes | None:
        """A small regular file of this directory, not a link to anything, or None."""
        if not name or "/" in name:
            return None
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError:
            return None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or info.st_size > MAX_RESULT_FILE:
                return None
            return os.read(fd, MAX_RESULT_FILE)
        except OSError:
            return None
        finally:
            os.close(fd)

    def sweep(self) -> None:
        """Raises OSError if something stays. Nested folders are flattened: a deep tree would exhaust the stack."""
        os.fchmod(self.fd, 0o700)
        while names := os.listdir(self.fd):
            for name in names:
                try:
                    os.unlink(name, dir_fd=self.fd)
                except (IsADirectoryError, PermissionError):
                    self._flatten(name)

    def _flatten(self, name: str) -> None:
        os.chmod(name, 0o700, dir_fd=self.fd)
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            for entry in os.listdir(inner):
                self._serial += 1
                os.rename(entry, f".swept{self._serial}", src_dir_fd=inner, dst_dir_fd=self.fd)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=self.fd)


class ForkServer:
    """Forks, watches and cleans up after one child at a time, as the verifier orders."""

    def __init__(self, control: socket.socket, layers: isolation.Layers) -> None:
        self.control = control
        self.sweeper = Sweeper(".")
        self.null = os.open(os.devnull, os.O_RDWR)
        self.filters: dict[bool, isolation.SeccompFilter] = {}
        if "seccomp" in layers.active:
            self.filters = {flag: isolation.SeccompFilter(allow_open=flag) for flag in (False, True)}
        self.cannot_fork = "seccomp" in layers.active  # the children: the filter forbids it
        self.in_pid_namespace = os.getpid() == 1

    def serve(self) -> None:
        """Until the verifier closes its end."""
        while True:
            try:
                frame, fds, _, _ = socket.recv_fds(self.control, FRAME.size, 3)
            except InterruptedError:
                continue
            if len(frame) < FRAME.size:
                return
            kind, flags, cpu_limit, wall_limit, name = FRAME.unpack(frame)
            if kind == KILL:
                continue  # the child it was meant for has just ended by itself
            self.run(fds, bool(flags & OPEN_ALLOWED), cpu_limit, wall_limit, name.rstrip(b"\0").decode())

    def run(self, fds: list[int], allow_open: bool, cpu_limit: float, wall_limit: float, result_name: str) -> None:
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._become_child(fds, allow_open, cpu_limit)
        for fd in fds:
            os.close(fd)
        try:
            cause, status, usage = self._watch(pid, cpu_limit, started + wall_limit)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        cpu = usage.ru_utime + usage.ru_stime
        if cause == CAUSE_NONE and cpu > cpu_limit:
            cause = CAUSE_CPU
        content = self.sweeper.read_result(result_name)
        self.sweeper.sweep()
        size = -1 if content is None else len(content)
        wall = time.monotonic() - started
        report = REPORT.pack(DONE, status, cause, cpu, wall, usage.ru_maxrss, size)
        self.control.sendall(report + (content or b""))

    def _become_child(self, fds: list[int], allow_open: bool, cpu_limit: float) -> None:
        """Never returns."""
        try:
            if not self.in_pid_namespace:  # there the kernel ends a child with its fork server
                isolation.die_with_parent()
            os.setsid()
            job_fd, connection_fd, stdout_fd = fds
            size = os.fstat(job_fd).st_size
            job = os.pread(job_fd, size, 0)
            os.dup2(self.null, 0)
            os.dup2(stdout_fd, 1)
            os.dup2(self.null, 2)
            os.dup2(connection_fd, CONNECTION_FD)
            os.closerange(3, CONNECTION_FD)
            isolation.limit_child(cpu_limit, self.cannot_fork)
            if self.filters:
                self.filters[allow_open].install(os.getpid())
            child.main(job, CONNECTION_FD)
        finally:
            os._exit(child.HARNESS_EXIT)

    def _watch(self, pid: int, cpu_limit: float, deadline: float) -> tuple[int, int, Any]:
        """Wait for the child's end, or bring it about. Returns (cause, wait status, resource usage)."""
        clock = (~pid << 3) | 2  # another process's CPU clock, see clock_getcpuclockid(3)
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        if pidfd is not None:
            poller.register(pidfd, select.POLLIN)
        cause = CAUSE_NONE
        pause = min(cpu_limit, 0.05)
        try:
            while True:
                ready = poller.poll(1000 * pause if pidfd is not None else 2)
                if any(fd == self.control.fileno() for fd, _ in ready):
                    if not self.control.recv(FRAME.size):
                        raise EOFError("the verifier is gone")
                    cause = cause or CAUSE_VERIFIER
                if pidfd is None or any(fd == pidfd for fd, _ in ready):
                    done, status, usage = os.wait4(pid, os.WNOHANG)
                    if done:
                        if not self.cannot_fork:
                            self._kill_relatives(pid)
                        return cause, status, usage
                if not ready and cause == CAUSE_NONE:
                    try:
                        used = time.clock_gettime(clock)
                    except OSError:  # just ended, or no such clock on this system: RLIMIT_CPU and wall time remain
                        used = 0.0
                    now = time.monotonic()
                    if used >= cpu_limit:
                        cause = CAUSE_CPU
                    elif now >= deadline:
                        cause = CAUSE_WALL
                    elif self.sweeper.crowded():
                        cause = CAUSE_FILES
                    pause = max(0.005, min(cpu_limit - used, deadline - now, 0.25))
                if cause != CAUSE_NONE:
                    os.kill(pid, signal.SIGKILL)
        finally:
            if pidfd is not None:
                os.close(pidfd)

    def _kill_relatives(self, pid: int) -> None:
        """Where seccomp could not forbid fork: the whole pid namespace, or at least the child's group."""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL) if self.in_pid_namespace else os.killpg(pid, signal.SIGKILL)


def main(control_fd: int, workdir: str, memory_mb: int, output_bytes: int, forbid: str) -> None:
    """Entry of the exec'd process. Announces its layers, then serves."""
    control = socket.socket(fileno=control_fd)
    # random and threading would run code in every child (a new seed, 0.3 ms): answers get a fixed seed and no threads.
    register = os.register_at_fork
    vars(os)["register_at_fork"] = lambda **hooks: None
    for name in PRELOAD.split():
        __import__(name)
    sys.modules["random"].seed(0)
    child.prepare()
    layers = isolation.enclose(workdir, memory_mb, output_bytes, frozenset(forbid.split(",")))
    if "landlock" not in layers.active:
        for name in RARE.split():
            __import__(name)
    vars(os)["register_at_fork"] = register
    fork_server = ForkServer(control, layers)
    hello = repr((layers.active, layers.missing)).encode()
    control.sendall(len(hello).to_bytes(4, "little") + hello)
    gc.collect()
    gc.freeze()  # a collection in the child would write to every inherited page
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        fork_server.serve()
    os._exit(0)
