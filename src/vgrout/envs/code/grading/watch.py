"""Processes of a worker, started in a clean interpreter, and the watch over an answer's child.

The verifier's half of a fork server: it has one child at a time forked, answers its messages,
watches its clock, and ends it if it makes no progress. What the messages mean is the caller's
business (`verdict`); how much a child may claim is bounded here, before it is read.
"""

import ast
import marshal
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Literal

from vgrout.envs.code.grading import fork_server as fs
from vgrout.envs.code.grading import messages
from vgrout.envs.code.grading.child import HARNESS_EXIT
from vgrout.envs.code.grading.isolation import FILE_LAYERS
from vgrout.envs.code.grading.messages import WorkerSettings
from vgrout.envs.code.grading.namespaces import ROOT_CWD
from vgrout.envs.code.grading.processes import (
    PATIENCE,
    START_WITHIN,
    STUCK_AFTER,
    reap,
    remove_empty,
    start_process,
    wall_limit,
)
from vgrout.envs.code.grading.values import BadClaim, decode_line

MAX_RECEIVED = 16 << 20  # bytes of messages from one child
# Bytes of one message, where the expected values do not need more: what is longer is not read.
MAX_LINE = 1 << 20
TICK = 0.05  # seconds between two looks at a child
MAX_ENTRIES = 300  # files in the working directory, where no tmpfs limits them

# A child that sleeps or is stopped is ended, as nothing will wake it, after so many seconds …
IDLE_AFTER = 1.0
# … of which it has used no larger share in CPU time …
BUSY = 0.2
# … and asleep at so many looks in a row: on a busy machine they come late.
IDLE_LOOKS = 10

# Why the verifier has ended a child: it has not, its time is over, no more is wanted of it.
Cause = Literal["", "timeout", "enough"]


class ForkServerLost(Exception):
    """The fork server died or fell silent: nothing is known about the answer."""


@dataclass(slots=True)
class ExitInfo:
    """How a child ended, as its fork server saw it."""

    status: int  # wait status
    cause: Cause
    cpu_s: float
    wall_s: float  # of its wall limit

    @property
    def exit_code(self) -> int | None:
        return os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None

    @property
    def left_by_itself(self) -> bool:
        """It has ended as our harness ends, or an answer that has chosen the same status.

        What it has sent tells these two apart.
        """
        return not self.cause and self.exit_code == HARNESS_EXIT

    def name(self) -> str:
        """One of "timeout", "signal:N", "exit:N"; "" if the child ended as it should.

        That is by our own exit, or because no more was wanted of it.
        """
        killed_by = os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else 0
        if self.cause == "timeout" or killed_by == signal.SIGXCPU:
            return "timeout"
        if self.cause == "enough" or self.exit_code == HARNESS_EXIT:
            return ""
        return f"signal:{killed_by}" if killed_by else f"exit:{self.exit_code}"


# --- One child -----------------------------------------------------------------------------------

Reply = Callable[[Mapping[str, object]], bytes | None]
"""What to answer a child's message with: bytes if it waits for some, else None.

It may raise EndSession.
"""


class EndSession(Exception):
    """Nothing more is wanted of the child: end it."""


class _BadMessage(Exception):
    """Something that our own harness would not have sent."""


class Watch:
    """The time limits of one child. Its own CPU clock decides; wall time ends one that waits.

    started: the socket on which the fork server says who the child is. cpu_limit, wall_limit:
    seconds. sleepers_wait: a child that sleeps waits for something that will not come.
    """

    def __init__(
        self, started: socket.socket, cpu_limit: float, wall_limit: float, sleepers_wait: bool
    ) -> None:
        now = time.monotonic()
        self.started = started
        self.cpu_limit = cpu_limit
        self.wall_limit = wall_limit
        self.sleepers_wait = sleepers_wait
        self.cause: Cause = ""
        self.pid = 0  # 0: not yet read from `started`
        self.pidfd = -1
        self._host_pid: int | None = None
        # Of the monotonic clock: when the child's time is over, and when to look at it next.
        self.deadline = now + wall_limit
        self.due = now + min(cpu_limit, TICK)
        self._last_deadline = now + PATIENCE * wall_limit
        self._last_look = now
        # Since when it has done nothing, its CPU time then, and the looks since.
        self._idle_since = now
        self._used_then = 0.0
        self._looks_asleep = 0

    def _find(self) -> None:
        """Read who the child is, if that has not been needed before. Raises ForkServerLost."""
        if not self.pid:
            try:
                data, pidfds, _, _ = socket.recv_fds(self.started, fs.STARTED.size, 1)
                (self.pid,) = fs.STARTED.unpack(data)
            except (OSError, struct.error):
                raise ForkServerLost("its fork server has closed its connection") from None
            self.pidfd = pidfds[0] if pidfds else -1

    def close(self) -> None:
        """The child has ended, or the fork server has."""
        with suppress(ForkServerLost):
            self._find()
        if self.pidfd != -1:
            os.close(self.pidfd)

    def kill(self, cause: Cause) -> None:
        self.cause = self.cause or cause
        self._find()
        with suppress(ProcessLookupError):
            if self.pidfd == -1:
                os.kill(self.pid, signal.SIGKILL)
                return
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except PermissionError:  # a rule on system calls: by its pid, unless it has ended
                pid = _pid_of(self.pidfd)
                if pid is not None and pid > 0:
                    os.kill(pid, signal.SIGKILL)

    def look(self, crowded: Callable[[], bool]) -> None:
        """End the child if its time is over, if it waits in vain, or if it has too many files."""
        now, used = time.monotonic(), self._used()
        idle = now - self._idle_since
        self._looks_asleep += 1
        sleeps = self._sleeps()
        busy = used - self._used_then > BUSY * idle
        if not self.sleepers_wait or busy or not sleeps:
            self._idle_since = now
            self._used_then = used
            self._looks_asleep = 0
        if not sleeps:  # it runs, or would if the machine let it: that is no waiting
            self.deadline = min(self.deadline + now - self._last_look, self._last_deadline)
        self._last_look = now
        waits = idle >= IDLE_AFTER and self._looks_asleep >= IDLE_LOOKS
        if used >= self.cpu_limit or now >= self.deadline or waits or crowded():
            self.kill("timeout")
        self.due = now + max(0.005, min(self.cpu_limit - used, TICK))

    def pause(self, seconds: float) -> None:
        """The child has waited for the verifier: that counts for nothing.

        That it has sent something is no sign of life: its CPU time is.
        """
        self.deadline += seconds
        self._last_deadline += seconds
        self._idle_since += seconds

    def _used(self) -> float:
        """CPU seconds; 0 if there is no such clock, so that RLIMIT_CPU and wall time remain."""
        # The child has ended: the clock of "pid −1" is the verifier's own, which has run for long.
        if self._host() <= 0:
            return 0.0
        try:
            return time.clock_gettime((~self._host() << 3) | 2)  # see clock_getcpuclockid(3)
        except (OSError, ValueError):
            return 0.0

    def _host(self) -> int:
        """The pid as this process sees it. −1: the child has ended.

        The child may be in a pid namespace of its own, where it has another one.
        """
        if self._host_pid is None:
            self._find()
            seen_here = None if self.pidfd == -1 else _pid_of(self.pidfd)
            self._host_pid = self.pid if seen_here is None else seen_here
        return self._host_pid

    def _sleeps(self) -> bool:
        """Asleep or stopped. A child that a busy machine keeps from running is neither."""
        try:
            with open(f"/proc/{self._host()}/stat") as f:
                return f.read().rsplit(")", 1)[1].split()[0] in "STt"
        except (OSError, IndexError):
            return False


def _pid_of(pidfd: int) -> int | None:
    """The pid as this process sees it, −1 if the process has ended; None if /proc does not say."""
    with suppress(OSError), open(f"/proc/self/fdinfo/{pidfd}") as info:
        for line in info:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return None


# What a process ends with that makes a system call which is forbidden on pain of death, as its
# parent passes it on: see isolation._enter_namespaces.
SIGSYS_STATUS = -signal.SIGSYS & 0xFF


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Of a process that has closed its end of a socket: its status; None if it has not ended."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(1.0) & 0xFF
    return None


def _in_words(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    if status == SIGSYS_STATUS:
        return "was ended for a system call that is forbidden here (SIGSYS)"
    return f"was ended by signal {0x100 - status}" if status > 0x80 else f"ended with {status}"


class ForkServerHandle:
    """The verifier's end of a fork server, which works in the folder `settings.workdir`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.cwd = os.path.join(settings.workdir, "cwd")  # of a child, where there is no tmpfs
        self._open = ExitStack()  # closed by `close`, however far `start` had come

    def start(self) -> "ForkServerHandle":
        """Start it, and wait until it serves. Raises ForkServerLost."""
        root = os.path.join(self.settings.workdir, "root")
        # Once the fork server has ended: callbacks run last to first.
        self._open.callback(shutil.rmtree, root, ignore_errors=True)
        self._open.callback(remove_empty, self.cwd)
        os.chmod(self.settings.workdir, 0o711)  # children run as another user
        hello = self._launch(self.settings.forbid)
        if hello.half_way:
            reason = hello.half_way
            hello = self._launch(f"{self.settings.forbid},namespaces")
            hello.missing["namespaces"] = reason
        if hello.unusable:
            raise ForkServerLost(hello.unusable)
        self.active, self.missing = hello.active, hello.missing
        if "chroot" in self.active:
            self.cwd = f"{root}{ROOT_CWD}"
        _, fds, _, _ = socket.recv_fds(self.control, 1, 1)
        if not fds:
            raise ForkServerLost("its fork server has closed its connection")
        self.started = self._open.enter_context(socket.socket(fileno=fds[0]))
        for end in (self.control, self.started):
            messages.set_timeout(end, STUCK_AFTER)
        return self

    def _launch(self, forbid: str) -> fs.Hello:
        """Start the process, and learn which layers it has entered. Raises ForkServerLost."""
        s = self.settings
        self.process, self.control = start_process(
            "fork_server", s.workdir, s.memory_mb, s.output_bytes, forbid
        )
        self._open.callback(reap, self.process, 1.0)
        self._open.enter_context(self.control)
        messages.set_timeout(self.control, START_WITHIN)
        try:
            hello = messages.receive(self.control)
        except OSError:
            raise ForkServerLost(f"no hello within {START_WITHIN} s") from None
        if hello is None:
            status = _exit_status(self.process)
            if status == SIGSYS_STATUS and "namespaces" not in forbid:
                return fs.Hello({}, {}, half_way=f"a rule on system calls: {_in_words(status)}")
            raise ForkServerLost(f"its fork server {_in_words(status)} while it started")
        return fs.Hello(*ast.literal_eval(hello.decode()))

    def close(self) -> None:
        """The fork server sees the end of its input and exits; the kernel ends a child with it."""
        self._open.close()

    def report(self) -> bytes:
        """How the child has ended. Raises ForkServerLost."""
        try:
            data = self.control.recv(fs.REPORT.size, socket.MSG_WAITALL)
        except BlockingIOError:
            data = b""
        if len(data) < fs.REPORT.size:
            raise ForkServerLost("its fork server has closed its connection")
        return data

    def crowded(self) -> bool:
        """Has the child too many files, in folders of its own too?

        A fresh tmpfs has a limit of its own, and cannot be seen from here.
        """
        if "namespaces" in self.active:
            return False
        count = 0
        folders = [self.cwd]
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        count += 1
                        if count > MAX_ENTRIES:
                            return True
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
            except FileNotFoundError:  # gone by now
                continue
            except OSError:  # hidden from us
                return True
        return False

    def run(
        self,
        job: Mapping[str, object],
        cpu_limit: float,
        reply: Reply,
        *,
        evidence_fd: int | None = None,
        result_name: str = "",
        room: int = MAX_LINE,
        wall_s: float | None = None,
    ) -> ExitInfo:
        """Fork one child on `job` and answer its messages until it ends. Raises ForkServerLost.

        evidence_fd: an empty memory file for the file `result_name` of the child's working
        directory, or, where that is "", for what the child prints. room: bytes of one message that
        are read; a longer one is {"long": True}. wall_s: its wall limit; by default that of its
        CPU limit.
        """
        token = secrets.token_hex(8)
        own_end, other_end = socket.socketpair()
        job_fd = memory_file(marshal.dumps({**job, "token": token}))
        flags = 0
        # Where nothing bounds the files that a child may open, a strict run could look for the
        # expected values in this machine's.
        is_judged = job["kind"] == "strict" or (job["kind"] == "probe" and not job["first"])
        if FILE_LAYERS & self.active.keys() or not is_judged:
            flags |= fs.OPEN_ALLOWED
        if evidence_fd is not None and not result_name:
            flags |= fs.STDOUT_WANTED
        frame = fs.FRAME.pack(flags, cpu_limit, result_name.encode())
        wall_s = wall_s or wall_limit(cpu_limit)
        watch = Watch(self.started, cpu_limit, wall_s, "seccomp" in self.active)
        try:
            # A frame always comes with three descriptors: where no evidence is wanted, any will do.
            fds = [job_fd, other_end.fileno(), job_fd if evidence_fd is None else evidence_fd]
            socket.send_fds(self.control, [frame], fds)
            other_end.close()
            return _Session(self, own_end, token.encode(), reply, room, watch).run()
        except (BrokenPipeError, ConnectionResetError, BlockingIOError) as e:
            raise ForkServerLost(type(e).__name__) from None
        finally:
            own_end.close()
            other_end.close()
            os.close(job_fd)
            watch.close()


class _Session:
    """One child's messages, from its start to its end."""

    def __init__(
        self,
        handle: ForkServerHandle,
        connection: socket.socket,
        token: bytes,
        reply: Reply,
        room: int,
        watch: Watch,
    ) -> None:
        self.handle = handle
        self.connection = connection
        self.token = token  # every message of ours begins with it
        self.reply = reply
        self.room = room
        self.watch = watch
        self.received = 0  # bytes
        self.buffer = bytearray()  # the line that is being received
        self.cut = False  # it is too long to be read
        self.listening = True
        self.poller = select.poll()

    def run(self) -> ExitInfo:
        """Answer and watch the child until the fork server reports its end."""
        watch, control = self.watch, self.handle.control
        messages.set_timeout(self.connection, STUCK_AFTER, socket.SO_SNDTIMEO)
        self.poller.register(self.connection, select.POLLIN)
        self.poller.register(control, select.POLLIN)
        while True:
            now = time.monotonic()
            ready = {fd for fd, _ in self.poller.poll(1000 * max(0.0, watch.due - now))}
            self._receive()  # before the report: what a child sent just before its end counts
            if control.fileno() in ready:
                report = self.handle.report()
                self._receive()
                return self._end(report)
            if time.monotonic() >= watch.deadline + STUCK_AFTER:
                raise ForkServerLost("silent")
            if time.monotonic() >= watch.due:
                watch.look(self.handle.crowded)

    def _end(self, report: bytes) -> ExitInfo:
        status, user_s, user_us, system_s, system_us = fs.REPORT.unpack(report)
        if status == fs.NO_STATUS:
            raise ForkServerLost("no exit status")
        # Every job sends something before an answer's first instruction.
        if self.received == 0 and status == HARNESS_EXIT << 8:
            raise ForkServerLost("a child could not be confined")
        cpu_s = user_s + system_s + (user_us + system_us) * 1e-6
        cause = self.watch.cause
        if not cause and cpu_s > self.watch.cpu_limit:
            cause = "timeout"
        wall_s = time.monotonic() - (self.watch.deadline - self.watch.wall_limit)
        return ExitInfo(status, cause, cpu_s, wall_s)

    def _receive(self) -> None:
        """Take what the child has sent, until the next look at it is due."""
        while self.listening:
            try:
                part = self.connection.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                part = b""
            if not part:
                self._stop_listening()
                return
            self.received += len(part)
            try:
                if self.received > MAX_RECEIVED:
                    raise _BadMessage
                self._take(part)
            except _BadMessage:  # read no more of it; how the child ends may still count
                self._stop_listening()
                self.connection.shutdown(socket.SHUT_RDWR)
            except EndSession:
                self._stop_listening()
                self.watch.kill("enough")
            if time.monotonic() >= self.watch.due:
                return  # a child that floods is watched all the same

    def _stop_listening(self) -> None:
        self.listening = False
        self.poller.unregister(self.connection)

    def _take(self, part: bytes) -> None:
        """Answer each line that `part` completes. Raises EndSession, _BadMessage."""
        *lines, rest = part.split(b"\n")
        for line in lines:
            self._add(line)
            complete, long = bytes(self.buffer), self.cut
            self.buffer.clear()
            self.cut = False
            self._answer(complete, long)
        self._add(rest)

    def _add(self, piece: bytes) -> None:
        """Keep a piece of the current line, of a line longer than `room` only the beginning."""
        if len(self.buffer) + len(piece) > self.room:
            self.cut = True
        if not self.cut:
            self.buffer += piece
        elif not self.buffer:
            self.buffer += piece[: len(self.token)]  # shows whether the line is ours

    def _answer(self, line: bytes, long: bool) -> None:
        if not line.startswith(self.token):
            raise _BadMessage
        try:
            message = {"long": True} if long else decode_line(line[len(self.token) :])
        except BadClaim:
            raise _BadMessage from None
        if not isinstance(message, dict):
            raise _BadMessage
        started = time.monotonic()
        answer = self.reply(message)
        if answer is not None:
            try:
                messages.send(self.connection, answer)
            except OSError:  # it has ended, or does not read
                raise _BadMessage from None
        self.watch.pause(time.monotonic() - started)


def memory_file(content: bytes = b"") -> int:
    """An anonymous file's descriptor."""
    fd = os.memfd_create("vgrout")
    while content:
        content = content[os.write(fd, content) :]
    return fd
