"""The fork server: a small, clean process that forks one child per run and cleans up after it.

It never parses a job: a request is a fixed frame with descriptors (job, connection, evidence), and
the child reads the job itself. It never learns anything about a child either, because the next
child inherits its memory, freed parts included. How a child ended goes from the kernel to the
verifier through one buffer, which is wiped. What a child printed or wrote is copied by the kernel
or by a throw-away process. The verifier watches the child's clock. The fork server is started by
exec, and has one thread and no secrets.
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
from typing import NamedTuple

from vgrout.envs.code.grading import child, isolation, messages, namespaces, stdlib
from vgrout.ground.io import restore_inherited

# Imported once, so that an answer's import is a lookup: what setup code and most answers use. Every
# shared library costs each fork 20 us, so the others are left to the child, unless it finds no file
# of the library.
PRELOAD = """
    abc array atexit bisect collections collections.abc contextlib copy copyreg dataclasses datetime
    decimal enum fractions functools heapq inspect io itertools json keyword linecache math numbers
    operator random re string struct sys threading time types typing warnings weakref
"""

# A request: flags, CPU limit [s], name of the file that is evidence. Its three descriptors come
# along.
FRAME = struct.Struct("<B7xd64s")
OPEN_ALLOWED = 1  # flag: seccomp lets the child open files
STDOUT_WANTED = 2  # flag: what the child prints is the evidence

# The child's pid, with a pidfd where the system has them; on a socket of its own.
STARTED = struct.Struct("<q")

# How a child ended: wait status, and the first fields of struct rusage (CPU in s and us, user and
# system).
REPORT = struct.Struct("<i4xqqqq")
NO_STATUS = -1  # in place of one that could not be read
_RUSAGE_OFFSET = 8
_RUSAGE_BYTES = 144

MAX_RESULT_FILE = 4096  # bytes of a file that is evidence
OUTPUT_END = 1 << 30  # more than RLIMIT_FSIZE lets a child print

_libc = ctypes.CDLL(None, use_errno=True)
# a result would be an object in this process's memory
_libc.wait4.restype = _libc.sendfile.restype = None
_libc.sendfile.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


class Sweeper:
    """Empties a working directory without recursion, whatever a child left there.

    It lives in a throw-away process.
    """

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._serial = 0

    def copy_result(self, name: str, to: int) -> None:
        """Copy a small regular file of this directory, no link to anything, into a descriptor."""
        if not name or "/" in name:
            return
        # A FIFO would block, a symbolic link lead elsewhere.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except OSError:
            return
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and info.st_size <= MAX_RESULT_FILE:
            os.pwrite(to, os.read(fd, MAX_RESULT_FILE), 0)

    def sweep(self) -> None:
        """Remove everything. Raises OSError if something stays.

        Nested folders are flattened: a deep tree would exhaust the stack.
        """
        os.fchmod(self.fd, 0o700)
        while names := os.listdir(self.fd):
            for name in names:
                try:
                    os.unlink(name, dir_fd=self.fd)
                except (IsADirectoryError, PermissionError):
                    self._flatten(name)

    def _flatten(self, name: str) -> None:
        """Move what is in a folder beside it, and remove the folder."""
        os.chmod(name, 0o700, dir_fd=self.fd)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        inner = os.open(name, flags, dir_fd=self.fd)
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


def _pidfds(pid: int) -> list[int]:
    """A descriptor of a process, where there are such (Linux 5.3); else its pid has to do."""
    try:
        return [os.pidfd_open(pid)]
    except (OSError, AttributeError):
        return []


class _Request(NamedTuple):
    """One child to run: what a frame says, and the descriptors that came with it."""

    job_fd: int
    connection_fd: int
    evidence_fd: int
    flags: int
    cpu_limit: float  # seconds
    result_name: str  # of the file that is evidence; "" for none


class ForkServer:
    """Forks and cleans up after one child at a time, as the verifier orders."""

    def __init__(
        self, control: socket.socket, started: socket.socket, enclosure: isolation.Enclosure
    ) -> None:
        self.control, self.started, self.enclosure = control, started, enclosure
        self.in_pid_namespace = os.getpid() == 1
        self._end = ctypes.create_string_buffer(_RUSAGE_OFFSET + _RUSAGE_BYTES)
        self._forget_end()

    def _forget_end(self) -> None:
        """Wipe how the last child ended: zeros, and a status that no child can end with.

        So what the kernel does not write is not taken for an exit.
        """
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
            self.run(_Request(*fds, flags, cpu_limit, name.rstrip(b"\0").decode()))

    def run(self, request: _Request) -> None:
        """Fork one child, report how it ended, and clean up after it."""
        stdout_fd = self._open_stdout(request)
        pid = os.fork()
        if pid == 0:
            self._become_child(request, stdout_fd)
        pidfd = _pidfds(pid)
        socket.send_fds(self.started, [STARTED.pack(pid)], pidfd)
        for fd in (request.job_fd, request.connection_fd, *pidfd):
            os.close(fd)
        end = self._end
        _libc.wait4(pid, end, 0, ctypes.byref(end, _RUSAGE_OFFSET))
        if not self.enclosure.cannot_fork:
            self._kill_relatives(pid)
        self._collect_evidence(request, stdout_fd)
        self.control.sendall(memoryview(end)[: REPORT.size])
        self._forget_end()
        ctypes.set_errno(0)
        self._clean_up()

    def _open_stdout(self, request: _Request) -> int | None:
        """Where the child prints to; None if nobody wants that.

        Where there is a fresh tmpfs it is a file in there: the evidence is a memory file, whose
        inode number comes from a counter of the machine.
        """
        if not request.flags & STDOUT_WANTED:
            return None
        if self.enclosure.own_root:
            return os.open(self.enclosure.cwd, os.O_TMPFILE | os.O_RDWR, 0o600)
        return request.evidence_fd

    def _collect_evidence(self, request: _Request, stdout_fd: int | None) -> None:
        """Copy what the child printed or wrote into the verifier's descriptor, and close it."""
        evidence_fd = request.evidence_fd
        if stdout_fd is not None and stdout_fd != evidence_fd:
            _libc.lseek(stdout_fd, 0, 0)
            _libc.sendfile(evidence_fd, stdout_fd, None, OUTPUT_END)
            os.close(stdout_fd)
        if request.result_name:
            cwd, name = self.enclosure.cwd, request.result_name
            if os.access(os.path.join(cwd, name), os.F_OK, follow_symlinks=False):
                _in_throwaway(lambda: Sweeper(cwd).copy_result(name, evidence_fd))
        os.close(evidence_fd)

    def _clean_up(self) -> None:
        """Discard the child's working directory, and make the next child's."""
        try:
            self.enclosure.discard()
        except OSError:  # it is no tmpfs, and not empty
            _in_throwaway(lambda: Sweeper(self.enclosure.cwd).sweep())
            self.enclosure.discard()
        self.enclosure.renew()

    def _become_child(self, request: _Request, stdout_fd: int | None) -> None:
        """Confine this process and do the job in it. Never returns.

        If it cannot be confined, it ends before it has sent anything: no verdict is made of that.
        """
        try:
            os.setsid()
            job = os.pread(request.job_fd, os.fstat(request.job_fd).st_size, 0)
            # Opened anew: flags and offsets belong to what was opened, and would outlive this
            # child.
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if stdout_fd is None:
                stdout_fd = os.open(os.devnull, os.O_WRONLY)
            os.dup2(stdout_fd, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.dup2(request.connection_fd, messages.CONNECTION_FD)
            self.enclosure.enter(request.cpu_limit, bool(request.flags & OPEN_ALLOWED))
            child.main(job, messages.CONNECTION_FD)
        finally:
            os._exit(child.HARNESS_EXIT)

    def _kill_relatives(self, pid: int) -> None:
        """Where seccomp could not forbid fork, kill what the child left.

        That is the whole pid namespace, or at least the child's process group.
        """
        with suppress(ProcessLookupError, PermissionError):
            if self.in_pid_namespace:
                os.kill(-1, signal.SIGKILL)
            else:
                os.killpg(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while self.in_pid_namespace:
                os.waitpid(-1, 0)


class Hello(NamedTuple):
    """What a fork server tells the verifier first."""

    active: dict[str, str]  # layer → detail
    missing: dict[str, str]  # layer → reason
    half_way: str = ""  # why it ends and is to be started again, without namespaces
    unusable: str = ""  # why it ends, and no other would do better


def _announce(control: socket.socket, hello: Hello) -> None:
    messages.send(control, repr(tuple(hello)).encode())


def main(control_fd: int, workdir: str, memory_mb: int, output_bytes: int, forbid: str) -> None:
    """Entry of the exec'd process. Announces its layers, then serves.

    Whatever the machine refuses while it starts ends it with an announcement of that. A refusal
    later on ends it too, and the verifier has lost it.
    """
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

    # The verifier's trainer may be killed at any time.
    verifier_may_end = suppress(BrokenPipeError, ConnectionResetError)
    layers_off = frozenset(forbid.split(","))
    try:
        enclosure = isolation.enclose(workdir, memory_mb, output_bytes, layers_off)
        if not {"namespaces", "landlock"} & enclosure.active.keys():
            stdlib.import_library()
            sys.modules["random"].seed(0)
        started, other_end = socket.socketpair()
    except (namespaces.HalfWay, isolation.Unusable, OSError, ValueError) as e:
        reason = messages.refusal(e)
        half_way = isinstance(e, namespaces.HalfWay)
        with verifier_may_end:
            _announce(control, Hello({}, {}, half_way=reason if half_way else "", unusable=reason))
        os._exit(1)
    vars(os)["register_at_fork"] = register
    fork_server = ForkServer(control, started, enclosure)
    try:
        with verifier_may_end:
            _announce(control, Hello(enclosure.active, enclosure.missing))
            socket.send_fds(control, [b"."], [other_end.fileno()])
            other_end.close()
            gc.collect()
            gc.freeze()  # a collection in the child would write to every inherited page
            fork_server.serve()
    except OSError as e:
        line = f"E a fork server of the grading sandbox has ended: {messages.refusal(e)}\n"
        os.write(2, line.encode(errors="backslashreplace"))
        os._exit(1)
    os._exit(0)
