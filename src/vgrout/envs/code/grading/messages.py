"""Messages between trainer, verifier and fork server: a length, then that many bytes.

Standard library only, as every process of a worker imports this.
"""

import re
import signal
import socket
import struct
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

# The child's end of its connection. The number is high, so that no file of the answer's needs it.
CONNECTION_FD = 120
CPU_EXTRA = 2  # seconds of CPU that the kernel gives a child beyond what the verifier does


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of one worker, as the trainer sends them."""

    workdir: str
    cpu_s: float
    memory_mb: int
    output_bytes: int
    forbid: str  # layers to leave off, comma-separated (tests of the ladder)


class Request(TypedDict):
    """One rollout as the verifier reads it: an answer, and what its problem says of the check."""

    id: int
    mode: str
    marker: str
    tests: Sequence[str]
    check_tests: Sequence[str]
    setup_code: str
    canonical: str
    func_name: str
    called: Sequence[str]
    cpu_limit: float | None  # seconds; None: the worker's
    detectors: bool  # whether the weak detectors look at it
    text: str
    is_code: bool  # the text is a program, and no answer that holds one


# Signals that Python itself ignores stay ignored in a worker's processes; all others act there as
# they do by default.
RESTORED = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}

# The fields of a grade that need a run, before any run.
NOT_RUN: dict[str, object] = {
    "format_ok": True,
    "can_compile": False,
    "gt_pass": False,
    "solved": False,
    "channel": None,
    "hacked_arbitrary": False,
    "hacked_wrong_tests": False,
    "hacked_loophole_used": False,
    "cpu_s": 0.0,
}


def refusal(error: BaseException) -> str:
    """What the machine refused, in one line: an error of the kernel, and the function that made the call."""
    said = " ".join(str(error).split())
    if not isinstance(error, OSError) or error.__traceback__ is None:
        return said
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return f"{said} (in {frames[-1].f_code.co_qualname})"


def send(connection: socket.socket, data: bytes) -> None:
    """Send one message. Raises OSError."""
    connection.sendall(len(data).to_bytes(4, "little") + data)


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None if the other end has closed. Raises OSError, at a timeout as well."""
    head = connection.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    data = connection.recv(size, socket.MSG_WAITALL)
    return data if len(data) == size else None


def set_timeout(
    connection: socket.socket, seconds: float, option: int = socket.SO_RCVTIMEO
) -> None:
    """Set a timeout that the kernel keeps.

    Python's own would make the socket non-blocking, and MSG_WAITALL void.
    """
    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


def clean_name(name: object) -> str:
    """Make a name from a child safe for any file, terminal or page.

    At most 60 letters, digits and _ . : are left of it.
    """
    if type(name) is not str:
        return ""
    return re.sub(r"[^A-Za-z0-9_.:]", "", name[:200])[:60]
