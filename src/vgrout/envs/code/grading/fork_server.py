"""The fork server: a small, clean process that forks one child per run and cleans up after it.

It never parses a job: a request is a fixed frame with descriptors (job, connection, evidence), and the child reads the
job itself. It never learns anything about a child either, because the next child inherits its memory, freed parts
included: how a child ended goes from the kernel to the verifier through one buffer that is wiped, what it printed or
wrote is copied by the kernel or by a throw-away process, and the verifier watches its clock. It is started by exec, and
has one thread and no secrets.
"""

import ctypes
import gc
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

from vgrout.envs.code.grading import child, isolation, messages
from vgrout.files import restore_inherited

# Imported once, so that an answer's import is a lookup: what setup code and most answers use. Every
# shared library costs each fork 20 us, so the rarer ones are left to the child, unless it cannot
# open files.
PRELOAD = """
    abc array atexit bisect collections collections.abc contextlib copy copyreg dataclasses datetime decimal enum
    fractions functools heapq inspect io itertools json keyword linecache math numbers operator random re string struct
    sys threading time types typing warnings weakref
"""
RARE = "base64 binascii calendar cmath hashlib logging pprint queue statistics textwrap timeit traceback uuid zlib"

FRAME = struct.Struct("<B7xd64s")  # flags, CPU limit [s], name of the file that is evidence
# the child's pid, with a pidfd where the system has them; on a socket of its own
STARTED = struct.Struct("<q")
# flags: seccomp lets the child open files; the evidence is what it prints
OPEN_ALLOWED, STDOUT_WANTED = 1, 2

# How a child ended: wait status, and the first fields of struct rusage (CPU in s and us, user and
# system).
REPORT = struct.Struct("<i4xqqqq")
NO_STATUS = -1  # in place of one that could not be read
_RUSAGE_BYTES = 144
MAX_RESULT_FILE = 4096  # bytes of a file that is evidence
OUTPUT_END = 1 << 30  # more than RLIMIT_FSIZE lets a child print

_libc = ctypes.CDLL(None, use_errno=True)
# a result would be an object in this process's memory
_libc.wait4.restype = _libc.sendfile.restype = None
_libc.sendfile.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


class Sweeper:
    """Empties a working directory without recursion, whatever a child left there. Lives in a throw-away process."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._serial = 0

    def copy_result(self, name: str, to: int) -> None:
        """A small regular file of this directory, not a link to anything, into a descriptor; else nothing."""
        if not name or "/" in name:
            return
        try:
            fd = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd
            )
        except OSError:
            return
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and info.st_size <= MAX_RESULT_FILE:
            os.pwrite(to, os.read(fd, MAX_RESULT_FILE), 0)

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
        inner = os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd
        )
        try:
            for entry in os.listdir(inner):
                self._serial += 1
                os.rename(entry, f".swept{self._serial}", src_dir_fd=inner, dst_dir_fd=self.fd)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=self.fd)


def _in_throwaway(work: Callable[[], None]) -> None:
    """Handle what a child left in a process that ends at once, with whatever it learned."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    _libc.wait4(pid, None, 0, None)


class ForkServer:
    """Forks and cleans up after one child at a time, as the verifier orders."""

    def __init__(
        self, control: socket.socket, started: socket.socket, enclosure: isolation.Enclosure
    ) -> None:
        self.control, self.started, self.enclosure = control, started, enclosure
        self.in_pid_namespace = os.getpid() == 1
        self._end = ctypes.create_string_buffer(8 + _RUSAGE_BYTES)
        self._forget_end()

    def _forget_end(self) -> None:
        """Zeros, and a status that no child can end with: what the kernel does not write is not taken for an exit."""
        ctypes.memset(self._end, 0, len(self._end))
        ctypes.memset(self._end, 0xFF, 4)

    def serve(self) -> None:
        """Run children until the verifier closes its end."""
        self.enclosure.renew()  # ahead of each child: the verifier does not wait for it
        while True:
            frame, fds, _, _ = socket.recv_fds(self.control, FRAME.size, 3)
            if len(frame) < FRAME.size:
                return
            flags, cpu_limit, name = FRAME.unpack(frame)
            self.run(fds, flags, cpu_limit, name.rstrip(b"\0").decode())

    def run(self, fds: list[int], flags: int, cpu_limit: float, result_name: str) -> None:
        world = self.enclosure
        job_fd, connection_fd, evidence_fd = fds
        stdout_fd = None
        # in the fresh tmpfs, where there is one: a memfd has one of the machine's numbers
        if flags & STDOUT_WANTED:
            stdout_fd = (
                os.open(world.cwd, os.O_TMPFILE | os.O_RDWR, 0o600)
                if world.own_root
                else evidence_fd
            )
        pid = os.fork()
        if pid == 0:
            self._become_child(job_fd, connection_fd, stdout_fd, flags, cpu_limit)
        pidfd = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []
        socket.send_fds(self.started, [STARTED.pack(pid)], pidfd)
        for fd in (job_fd, connection_fd, *pidfd):
            os.close(fd)
        end = self._end
        _libc.wait4(pid, end, 0, ctypes.byref(end, 8))
        if not world.cannot_fork:
            self._kill_relatives(pid)
        if stdout_fd is not None and world.own_root:
            _libc.lseek(stdout_fd, 0, 0)
            _libc.sendfile(evidence_fd, stdout_fd, None, OUTPUT_END)
            os.close(stdout_fd)
        if result_name and os.access(
            os.path.join(world.cwd, result_name), os.F_OK, follow_symlinks=False
        ):
            _in_throwaway(lambda: Sweeper(world.cwd).copy_result(result_name, evidence_fd))
        os.close(evidence_fd)
        self.control.sendall(memoryview(end)[: REPORT.size])
        self._forget_end()
        ctypes.set_errno(0)
        try:
            world.discard()
        except OSError:  # it is no tmpfs, and not empty
            _in_throwaway(lambda: Sweeper(world.cwd).sweep())
            world.discard()
        world.renew()

    def _become_child(
        self, job_fd: int, connection_fd: int, stdout_fd: int | None, flags: int, cpu_limit: float
    ) -> None:
        """Never returns."""
        try:
            os.setsid()
            job = os.pread(job_fd, os.fstat(job_fd).st_size, 0)
            # Opened anew: flags and offsets belong to what was opened, and would outlive this
            # child.
            for fd, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
                os.dup2(
                    stdout_fd if fd == 1 and stdout_fd is not None else os.open(os.devnull, mode),
                    fd,
                )
            os.dup2(connection_fd, isolation.CONNECTION_FD)
            self.enclosure.enter(cpu_limit, bool(flags & OPEN_ALLOWED))
            child.main(job, isolation.CONNECTION_FD)
        finally:
            os._exit(child.HARNESS_EXIT)

    def _kill_relatives(self, pid: int) -> None:
        """Where seccomp could not forbid fork: the whole pid namespace, or at least the child's group."""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL) if self.in_pid_namespace else os.killpg(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while self.in_pid_namespace:
                os.waitpid(-1, 0)


def main(control_fd: int, workdir: str, memory_mb: int, output_bytes: int, forbid: str) -> None:
    """Entry of the exec'd process. Announces its layers, then serves."""
    restore_inherited(messages.RESTORED)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # children inherit it: where memory runs out, they are what the kernel ends
    control = socket.socket(fileno=control_fd)
    # random and threading would run code in every child (a new seed, 0.3 ms): answers get a fixed
    # seed and no threads.
    register = os.register_at_fork
    vars(os)["register_at_fork"] = lambda **hooks: None
    for name in PRELOAD.split():
        __import__(name)
    sys.modules["random"].seed(0)
    child.prepare()

    # its trainer may be killed at any time
    verifier_may_end = suppress(BrokenPipeError, ConnectionResetError)
    try:
        enclosure = isolation.enclose(
            workdir, memory_mb, output_bytes, frozenset(forbid.split(","))
        )
    except isolation.HalfWay as e:
        with verifier_may_end:
            messages.send(control, repr(({}, {"namespaces": str(e)})).encode())
        os._exit(1)
    if "landlock" not in enclosure.active:
        for name in RARE.split():
            __import__(name)
    vars(os)["register_at_fork"] = register
    started, other_end = socket.socketpair()
    fork_server = ForkServer(control, started, enclosure)
    with verifier_may_end:
        messages.send(control, repr((enclosure.active, enclosure.missing)).encode())
        socket.send_fds(control, [b"."], [other_end.fileno()])
        other_end.close()
        gc.collect()
        gc.freeze()  # a collection in the child would write to every inherited page
        fork_server.serve()
    os._exit(0)
