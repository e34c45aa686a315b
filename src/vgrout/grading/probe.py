"""A throw-away child attacks its own sandbox: what succeeds is not protected here, whatever the kernel promised."""

import ctypes
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# What makes the strict oracle untrustworthy: ways to learn the expected values, or to stop the verifier.
FATAL = (
    "read a file outside",
    "read its parent's memory",
    "attach to its parent",
    "signal its parent",
    "connect over TCP",
    "send over UDP",
    "connect locally",
    "share memory with others",
    "leave a file behind",
    "leave shared memory behind",
)


def leave(spec: dict[str, Any]) -> dict[str, bool]:
    """In a first child: leave something for the second one to find."""
    with suppress(OSError):
        ctypes.CDLL(None).shmget(spec["shm_key"] + 1, 4096, 0o1600)
    with suppress(OSError), open("left", "w"):
        pass
    return {}


def attack(spec: dict[str, Any]) -> dict[str, bool]:
    """In a second child, run every attack. True: it succeeded. `spec` names a secret file, a TCP and a UDP port, an
    abstract socket and the key of a shared memory segment."""
    parent = os.getppid()

    def read_secret() -> bool:
        with open(spec["secret"], "rb") as f:
            return bool(f.read())

    def write_outside() -> bool:
        path = spec["secret"] + ".written"
        with open(path, "w") as f:
            f.write("x")
        os.unlink(path)
        return True

    def parent_memory() -> bool:
        with open(f"/proc/{parent}/mem", "rb"):
            return True

    def attach() -> bool:
        ptrace = ctypes.CDLL(None).ptrace
        if ptrace(16, parent, None, None) != 0:
            return False
        os.waitpid(parent, 0x4000_0000)  # __WALL: wait for the stop, then let it go on
        ptrace(17, parent, None, None)
        return True

    def tcp() -> bool:
        socket.create_connection(("127.0.0.1", spec["port"]), timeout=1).close()
        return True

    def local() -> bool:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(spec["abstract"])
        return True

    def udp() -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(0.2)
            s.sendto(b"?", ("127.0.0.1", spec["udp_port"]))
        return True  # the verifier says whether it arrived

    def shared_memory() -> bool:
        return ctypes.CDLL(None).shmget(spec["shm_key"], 1, 0) != -1

    def shared_memory_behind() -> bool:
        libc = ctypes.CDLL(None)
        segment = libc.shmget(spec["shm_key"] + 1, 1, 0)
        libc.shmctl(segment, 0, None)  # IPC_RMID
        return segment != -1

    def file_behind() -> bool:
        return os.path.exists("left")

    def fork() -> bool:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return True

    def signal_parent() -> bool:
        os.kill(parent, 0)
        return True

    def memory() -> bool:
        return bool(bytearray(spec["memory"]))

    def big_file() -> bool:
        with open("big", "wb") as f:
            f.truncate(spec["file"])
        return True

    attacks: dict[str, Callable[[], bool]] = {
        "read a file outside": read_secret,
        "write outside": write_outside,
        "read its parent's memory": parent_memory,
        "attach to its parent": attach,
        "connect over TCP": tcp,
        "send over UDP": udp,
        "connect locally": local,
        "share memory with others": shared_memory,
        "leave a file behind": file_behind,
        "leave shared memory behind": shared_memory_behind,
        "fork": fork,
        "signal its parent": signal_parent,
        "use too much memory": memory,
        "write a large file": big_file,
    }
    outcome = {}
    for name, attempt in attacks.items():
        try:
            outcome[name] = attempt()
        except (OSError, MemoryError):
            outcome[name] = False
    return outcome
