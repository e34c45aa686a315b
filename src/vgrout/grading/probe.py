"""A throw-away child attacks its own sandbox: what succeeds is not protected here, whatever the kernel promised."""

import ctypes
import os
import socket
from collections.abc import Callable
from typing import Any

# What makes the strict oracle untrustworthy: ways to learn the expected values, or to stop the verifier.
FATAL = (
    "read a file outside",
    "read its parent's memory",
    "attach to its parent",
    "connect over TCP",
    "connect locally",
)


def attack(spec: dict[str, Any]) -> dict[str, bool]:
    """Run every attack. True: it succeeded. `spec` names a secret file, a TCP port and an abstract socket."""
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
        "connect locally": local,
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
