"""The C library's calls that Python has no function for, and what of them differs by processor.

`check` makes an OSError of a call that failed. `in_throwaway` tries something in a process that
ends with it.

References: prctl(2), syscalls(2).
"""

import ctypes
import errno
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass

libc = ctypes.CDLL(None, use_errno=True)

# prctl(2)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38


def check(result: int, what: str) -> int:
    """Return the result of a call of the C library. Raises OSError if it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {errno.errorcode.get(code, code)}")
    return result


def prctl(option: int, argument: int = 0) -> None:
    """prctl(2) with one argument. Raises OSError where the kernel refuses."""
    result = libc.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), 0, 0)
    check(result, f"prctl {option}")


def die_with_parent(by: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that forked it dies."""
    prctl(PR_SET_PDEATHSIG, by)


_PIPE_BYTES = 1 << 16  # that fit into a pipe while nobody reads


def in_throwaway(work: Callable[[], str], writer_fd: int | None = None) -> tuple[int, str]:
    """Do some work in a process that ends with it. Raises OSError if there can be none.

    writer_fd: the number of the pipe's end in that process, where the work closes others. Returns
    the wait status, 0 if the work was done, and what it returned, or how its exception reads.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            failed = 1
            try:
                if writer_fd is not None:
                    writer = os.dup2(writer, writer_fd)
                try:
                    said = work()
                    failed = 0
                except BaseException as error:
                    said = str(error)
                os.write(writer, said.encode()[:_PIPE_BYTES])
            finally:
                os._exit(failed)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    return os.waitpid(pid, 0)[1], said


@dataclass(frozen=True, slots=True)
class Machine:
    """What differs between processor architectures: numbers of system calls, and their own."""

    audit: int  # AUDIT_ARCH_…, as seccomp reports the architecture of a call
    pivot_root: int
    capset: int


_MACHINES = {
    "x86_64": Machine(audit=0xC000_003E, pivot_root=155, capset=126),
    "aarch64": Machine(audit=0xC000_00B7, pivot_root=41, capset=91),
}


def machine() -> Machine:
    """The table of this machine. Raises KeyError if there is none."""
    return _MACHINES[platform.machine()]
