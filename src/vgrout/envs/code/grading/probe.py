"""Attacks of a throw-away child on its own sandbox.

What succeeds is unprotected, whatever the kernel promised.
"""

import ctypes
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypedDict

# ptrace(2), waitpid(2), shmget(2), shmctl(2)
PTRACE_ATTACH = 16
PTRACE_DETACH = 17
WALL = 0x4000_0000  # __WALL
IPC_CREAT = 0o1000
IPC_RMID = 0

LEFT_BEHIND = "left"  # a file of the first child
EVIDENCE = b"seen by the verifier"  # what the first child writes into it, and the second one prints


class Spec(TypedDict):
    """What to attack, and with how much."""

    secret: str  # path of a file outside of the sandbox
    port: int  # a TCP port that listens
    udp_port: int
    abstract: str  # address of a local socket
    shm_key: int  # of a segment of shared memory; the next one is free for the children
    memory: int  # more bytes than a child may allocate
    file: int  # more bytes than a child may write


def leave(spec: Spec) -> dict[str, bool]:
    """Leave something, in a first child, for the second one to find."""
    with suppress(OSError):
        ctypes.CDLL(None).shmget(spec["shm_key"] + 1, 4096, IPC_CREAT | 0o600)
    with suppress(OSError), open(LEFT_BEHIND, "wb") as f:
        f.write(EVIDENCE)
    return {}


def attack(spec: Spec) -> dict[str, bool]:
    """Run every attack, in a second child: name → did it succeed?"""
    os.write(1, EVIDENCE)
    outcome = {}
    for name, attempt in (FATAL | OTHERS).items():
        try:
            outcome[name] = attempt(spec)
        except (OSError, MemoryError):
            outcome[name] = False
    return outcome


def _read_secret(spec: Spec) -> bool:
    with open(spec["secret"], "rb") as f:
        return bool(f.read())


def _parent_memory(_: Spec) -> bool:
    with open(f"/proc/{os.getppid()}/mem", "rb"):
        return True


def _attach(_: Spec) -> bool:
    ptrace, parent = ctypes.CDLL(None).ptrace, os.getppid()
    if ptrace(PTRACE_ATTACH, parent, None, None) != 0:
        return False
    os.waitpid(parent, WALL)  # it has stopped: let it go on
    ptrace(PTRACE_DETACH, parent, None, None)
    return True


def _signal_parent(_: Spec) -> bool:
    os.kill(os.getppid(), 0)
    return True


def _tcp(spec: Spec) -> bool:
    socket.create_connection(("127.0.0.1", spec["port"]), timeout=1).close()
    return True


def _udp(spec: Spec) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(0.2)
        s.sendto(b"?", ("127.0.0.1", spec["udp_port"]))
    return True  # the verifier says whether it arrived


def _local(spec: Spec) -> bool:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(spec["abstract"])
    return True


def _shared_memory(spec: Spec) -> bool:
    return ctypes.CDLL(None).shmget(spec["shm_key"], 1, 0) != -1


def _file_behind(_: Spec) -> bool:
    return os.path.exists(LEFT_BEHIND)


def _shared_memory_behind(spec: Spec) -> bool:
    libc = ctypes.CDLL(None)
    segment = libc.shmget(spec["shm_key"] + 1, 1, 0)
    libc.shmctl(segment, IPC_RMID, None)
    return segment != -1


def _write_outside(spec: Spec) -> bool:
    path = spec["secret"] + ".written"
    with open(path, "w") as f:
        f.write("x")
    os.unlink(path)
    return True


def _fork(_: Spec) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def _memory(spec: Spec) -> bool:
    return bool(bytearray(spec["memory"]))


def _big_file(spec: Spec) -> bool:
    with open("big", "wb") as f:
        f.truncate(spec["file"])
    return True


Attacks = dict[str, Callable[[Spec], bool]]

# What makes the reference tests untrustworthy: ways to learn the expected values, or to stop the
# verifier.
FATAL: Attacks = {
    "read a file outside": _read_secret,
    "read its parent's memory": _parent_memory,
    "attach to its parent": _attach,
    "signal its parent": _signal_parent,
    "connect over TCP": _tcp,
    "send over UDP": _udp,
    "connect locally": _local,
    "share memory with others": _shared_memory,
    "leave a file behind": _file_behind,
    "leave shared memory behind": _shared_memory_behind,
}
OTHERS: Attacks = {
    "write outside": _write_outside,
    "fork": _fork,
    "use too much memory": _memory,
    "write a large file": _big_file,
}
