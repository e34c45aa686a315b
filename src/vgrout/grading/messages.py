"""What trainer, verifier and fork server say to one another: a length, then so many bytes. Standard library only."""

import socket
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """What one worker needs to know, as it comes from the trainer."""

    workdir: str
    cpu_s: float
    memory_mb: int
    output_bytes: int
    forbid: str  # layers to leave off, comma-separated (tests of the ladder)


# The fields of a grade that need a run, before any run.
NOT_RUN: dict[str, Any] = {
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


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(4, "little") + data)


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None where the other end has closed. Raises OSError, also where the timeout is over."""
    head = connection.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    data = connection.recv(size, socket.MSG_WAITALL)
    return data if len(data) == size else None


def set_timeout(connection: socket.socket, seconds: float, option: int = socket.SO_RCVTIMEO) -> None:
    """By the kernel: Python's own timeouts make a socket non-blocking, and MSG_WAITALL void."""
    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
