"""The layers of protection, entered through ctypes: namespaces, landlock, seccomp, rlimits, a uid.

A fork server enters the namespaces once (`enclose`) and builds a root of its own in them: a tmpfs
with read-only bind mounts of the interpreter's library. So a child finds no /proc, no other file,
and no access time that it could change. Each child then confines itself (`Enclosure.enter`): an
empty tmpfs as working directory, the CPU limit, the uid, landlock, no capabilities, and last the
seccomp filter, which forbids what the fork server needs. A layer that the kernel refuses is
reported with its reason, and the next one is tried. The child's layers are tried too, once, in
processes that are thrown away (`_rehearse`), so that no answer pays for one that cannot be entered.

Where there are neither namespaces nor landlock, a child of root gets another root by chroot: an
empty folder with two devices, from which nothing can be imported. So its fork server has imported
the whole library (`import_library`).

References: landlock(7), seccomp(2), user_namespaces(7), pivot_root(2), capabilities(7).
"""

import ctypes
import errno
import importlib
import os
import pkgutil
import platform
import resource
import signal
import stat
import struct
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
IS_LINUX = sys.platform == "linux"
SPARE_UID = 65534  # nobody: the uid of children where the trainer is root

# prctl(2)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

# unshare(2)
CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

# mount(2), umount2(2)
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x4_0000
MNT_DETACH = 2

# The child's end of its connection. The number is high, so that no file of the answer's needs it.
CONNECTION_FD = 120
CPU_EXTRA = 2  # seconds of CPU that the kernel gives a child beyond what the verifier does
MAX_FILES = 128  # that a child may have open
# A child's files have numbers below this.
_END_OF_FDS = 256


# Layers of which each bounds the files that a child can open. Without any, only seccomp can: it
# forbids the strict run to open files at all.
FILE_LAYERS = frozenset({"namespaces", "landlock", "chroot"})


class HalfWay(Exception):
    """The namespaces were entered but could not be furnished: start again without them."""


class Unusable(Exception):
    """No child can be run here, in whatever layers: what it lacks, in one line."""


def _check(result: int, what: str) -> int:
    """Return the result of a call of the C library. Raises OSError if it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {errno.errorcode.get(code, code)}")
    return result


def _prctl(option: int, argument: int = 0) -> None:
    result = _libc.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), 0, 0)
    _check(result, f"prctl {option}")


def die_with_parent(by: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that forked it dies.

    On other systems the process learns of it from a closed pipe.
    """
    if IS_LINUX:
        _prctl(PR_SET_PDEATHSIG, by)


# --- What differs between processors -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Machine:
    """System call numbers of one processor architecture."""

    audit: int  # AUDIT_ARCH_…, as seccomp reports the architecture of a call
    allowed: dict[str, int]  # system calls that a child may make → number
    pivot_root: int
    capset: int


def _numbers(table: str) -> dict[str, int]:
    entries = [entry.split("=") for entry in table.split()]
    return {name: int(number) for name, number in entries}


# What CPython needs to compute, to print, and to use files of its own directory. Every other call
# fails with EPERM, which an answer sees as an ordinary exception.
#
# There is no real sleep: it returns at once, so a program that waits spends CPU time instead.
# Nothing is allowed by which one child could leave a trace for another one to see:
# - no pipe (inode numbers), no statx (mount numbers), no sysinfo
# - no getrusage (was a file in memory?)
# - no CPU clock of another process
# - no lock or lease on a file, no advice that throws a file out of memory
# - no futex but a private one: a shared one is found by its file's inode
# - no queued signals: the kernel counts them by user
_X86_64 = _numbers("""
    read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12
    rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17 pwrite64=18 readv=19
    writev=20 access=21 sched_yield=24 mremap=25 madvise=28 dup=32 dup2=33 nanosleep=35 getitimer=36
    alarm=37 setitimer=38 getpid=39 exit=60 kill=62 uname=63 fcntl=72 fsync=74 fdatasync=75
    truncate=76 ftruncate=77 getdents=78 getcwd=79 rename=82 creat=85 unlink=87 readlink=89 umask=95
    gettimeofday=96 getrlimit=97 times=100 getuid=102 getgid=104 geteuid=107 getegid=108 getppid=110
    getpgrp=111 rt_sigpending=127 sigaltstack=131 gettid=186 time=201 futex=202
    sched_getaffinity=204 getdents64=217 restart_syscall=219 clock_gettime=228 clock_getres=229
    clock_nanosleep=230 exit_group=231 tgkill=234 openat=257 newfstatat=262 unlinkat=263
    renameat=264 readlinkat=267 faccessat=269 set_robust_list=273 dup3=292 prlimit64=302
    renameat2=316 getrandom=318 statx=332 rseq=334 clone3=435 openat2=437 faccessat2=439
""")
_AARCH64 = _numbers("""
    getcwd=17 dup=23 dup3=24 fcntl=25 ioctl=29 unlinkat=35 renameat=38 truncate=45 ftruncate=46
    faccessat=48 openat=56 close=57 getdents64=61 lseek=62 read=63 write=64 readv=65 writev=66
    pread64=67 pwrite64=68 readlinkat=78 newfstatat=79 fstat=80 fsync=82 fdatasync=83 exit=93
    exit_group=94 futex=98 set_robust_list=99 nanosleep=101 getitimer=102 setitimer=103
    clock_gettime=113 clock_getres=114 clock_nanosleep=115 sched_getaffinity=123 sched_yield=124
    restart_syscall=128 kill=129 tgkill=131 sigaltstack=132 rt_sigaction=134 rt_sigprocmask=135
    rt_sigpending=136 rt_sigreturn=139 times=153 uname=160 getrlimit=163 umask=166 gettimeofday=169
    getpid=172 getppid=173 getuid=174 geteuid=175 getgid=176 getegid=177 gettid=178 brk=214
    munmap=215 mremap=216 mmap=222 mprotect=226 madvise=233 prlimit64=261 renameat2=276
    getrandom=278 statx=291 rseq=293 clone3=435 openat2=437 faccessat2=439
""")
_MACHINES = {
    "x86_64": _Machine(audit=0xC000_003E, allowed=_X86_64, pivot_root=155, capset=126),
    "aarch64": _Machine(audit=0xC000_00B7, allowed=_AARCH64, pivot_root=41, capset=91),
}


def _machine() -> _Machine:
    """The table of this machine. Raises KeyError if there is none."""
    return _MACHINES[platform.machine()]


# --- seccomp -------------------------------------------------------------------------------------

# Operations of classic BPF.
_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_IF_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_JUMP = 0x05  # BPF_JMP | BPF_JA
_RETURN = 0x06  # BPF_RET | BPF_K
_LONGEST_JUMP = 255  # of a comparison; an unconditional one goes farther

# What a filter returns: seccomp(2).
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_KILL_PROCESS = 0x8000_0000
SECCOMP_RET_ERRNO = 0x0005_0000
SECCOMP_RET_ALLOW = 0x7FFF_0000

# Offsets in struct seccomp_data, which a filter reads. `args` are of 64 bits, little-endian.
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_ARGUMENTS_OFFSET = 16

# Arguments that the filter lets through.
_FIRST_OTHER_CLOCK = 16  # CLOCK_REALTIME and the like are 0 … 11, larger numbers are of processes
_FIRST_REAL_TIME_SIGNAL = 32
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC
_IOCTL_REQUESTS = (0x5401, 0x5450, 0x5451)  # TCGETS, FIONCLEX, FIOCLEX
_MADVISE_ADVICE = (4, 8)  # MADV_DONTNEED, MADV_FREE: those of malloc
FUTEX_PRIVATE_FLAG = 128

_PID_PLACEHOLDER = -1  # in a program, until the child's own pid is known


class _Instruction(NamedTuple):
    """One instruction of classic BPF: struct sock_filter."""

    operation: int
    if_true: int  # instructions to skip if a comparison holds
    if_false: int  # and if it does not
    constant: int


_Program = list[_Instruction]


def _load(offset: int) -> _Instruction:
    return _Instruction(_LOAD, 0, 0, offset)


def _load_argument(index: int, high: bool = False) -> _Instruction:
    """Load the lower 32 bits of an argument of the system call, or the higher ones."""
    return _load(_ARGUMENTS_OFFSET + 8 * index + (4 if high else 0))


def _if_equal(constant: int, if_true: int, if_false: int) -> _Instruction:
    return _Instruction(_JUMP_IF_EQUAL, if_true, if_false, constant)


def _if_at_least(constant: int, if_true: int, if_false: int) -> _Instruction:
    return _Instruction(_JUMP_IF_AT_LEAST, if_true, if_false, constant)


def _return(action: int) -> _Instruction:
    return _Instruction(_RETURN, 0, 0, action)


def _fail_with(code: int) -> _Instruction:
    """Do not make the call: it fails with this errno, or with 0 it seems to have succeeded."""
    return _return(SECCOMP_RET_ERRNO | code)


_ALLOW = _return(SECCOMP_RET_ALLOW)
_EPERM = _fail_with(errno.EPERM)


def _allow_values(argument: int, values: tuple[int, ...]) -> _Program:
    """Allow the call if the argument is one of `values`, else EPERM."""
    program = [_load_argument(argument)]
    for i, value in enumerate(values):
        to_allow = len(values) - i  # past the comparisons that are left, and past EPERM
        program.append(_if_equal(value, to_allow, 0))
    return [*program, _EPERM, _ALLOW]


def _refuse_from(argument: int, bound: int) -> _Program:
    """EPERM if the argument is `bound` or more; else go on with what follows."""
    return [_load_argument(argument), _if_at_least(bound, 0, 1), _EPERM]


# The connection is a socket, and its inode number comes from a counter of the machine, which other
# children move. So fstat may not look at it, and dup may not copy it to a number where fstat may.
_REFUSE_CONNECTION: _Program = [_load_argument(0), _if_equal(CONNECTION_FD, 0, 1), _EPERM]


def _rules(may_open: bool) -> dict[str, _Program]:
    """What is done with each allowed call that is not simply let through."""
    system_clocks = [*_refuse_from(0, _FIRST_OTHER_CLOCK), _ALLOW]
    to_itself = _allow_values(0, (_PID_PLACEHOLDER,))
    rules = {
        # Signals: to the child itself alone. A real-time signal would be queued.
        "kill": [*_refuse_from(1, _FIRST_REAL_TIME_SIGNAL), *to_itself],
        "tgkill": [*_refuse_from(2, _FIRST_REAL_TIME_SIGNAL), *to_itself],
        # No locks, no leases, and no F_SETOWN, which has signals sent to others.
        "fcntl": [*_REFUSE_CONNECTION, *_allow_values(1, _FCNTL_COMMANDS)],
        "clock_gettime": system_clocks,
        "clock_getres": system_clocks,
        "futex": [
            _load_argument(1),
            _Instruction(_JUMP_IF_ANY_BIT, 1, 0, FUTEX_PRIVATE_FLAG),
            _EPERM,
            _ALLOW,
        ],
        "madvise": _allow_values(2, _MADVISE_ADVICE),
        "ioctl": _allow_values(1, _IOCTL_REQUESTS),
        # Read a limit, set none: the pointer to the new one, 64 bits of it, has to be null.
        "prlimit64": [
            _load_argument(2),
            _if_equal(0, 0, 3),
            _load_argument(2, high=True),
            _if_equal(0, 0, 1),
            _ALLOW,
            _EPERM,
        ],
    }
    for name in ("nanosleep", "clock_nanosleep", "fsync", "fdatasync"):
        rules[name] = [_fail_with(0)]
    for name in ("clone3", "openat2", "statx"):
        rules[name] = [_fail_with(errno.ENOSYS)]  # the C library then makes the older call
    for name in ("fstat", "newfstatat", "dup", "dup2", "dup3"):
        rules[name] = [*_REFUSE_CONNECTION, _ALLOW]
    if not may_open:
        for name in ("open", "openat", "openat2", "creat", "truncate"):
            rules[name] = [_EPERM]
    return rules


class _Leaf(NamedTuple):
    """What is done with all system calls from `first` on, up to the next leaf's."""

    first: int
    body: _Program


def _search_tree(leaves: list[_Leaf]) -> _Program:
    """A binary search over sorted leaves: about 8 comparisons a call instead of a hundred."""
    if len(leaves) == 1:
        return leaves[0].body
    half = len(leaves) // 2
    left, right = _search_tree(leaves[:half]), _search_tree(leaves[half:])
    pivot = leaves[half].first
    if len(left) <= _LONGEST_JUMP:
        return [_if_at_least(pivot, len(left), 0), *left, *right]
    over_left = _Instruction(_JUMP, 0, 0, len(left))
    return [_if_at_least(pivot, 0, 1), over_left, *left, *right]


def _filter_program(may_open: bool) -> _Program:
    """The whole filter of one kind of child. Raises KeyError if this machine has no table."""
    machine = _machine()
    rules = _rules(may_open)
    bodies = {number: rules.get(name, [_ALLOW]) for name, number in machine.allowed.items()}
    leaves: list[_Leaf] = []
    for number in range(max(bodies) + 2):
        body = bodies.get(number, [_EPERM])
        if not leaves or leaves[-1].body != body:
            leaves.append(_Leaf(number, body))
    return [
        # Another architecture (32-bit calls on x86) has other numbers: kill the process.
        _load(_ARCHITECTURE_OFFSET),
        _if_equal(machine.audit, 1, 0),
        _return(SECCOMP_RET_KILL_PROCESS),
        # The x32 bit makes a number larger than any in the tree, hence EPERM.
        _load(_NUMBER_OFFSET),
        *_search_tree(leaves),
    ]


class SeccompFilter:
    """The filter of one kind of child, built once. Only the child's own pid is filled in later."""

    def __init__(self, may_open: bool) -> None:
        program = _filter_program(may_open)
        packed = b""
        self._pid_slots: list[int] = []
        for i, (operation, if_true, if_false, constant) in enumerate(program):
            if operation == _JUMP_IF_EQUAL and constant == _PID_PLACEHOLDER:
                self._pid_slots.append(i)
            packed += struct.pack("HBBI", operation, if_true, if_false, constant & 0xFFFF_FFFF)
        self._code = ctypes.create_string_buffer(packed, len(packed))
        sock_fprog = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(self._code))
        self._prog = ctypes.create_string_buffer(sock_fprog)

    def install(self, pid: int) -> None:
        """Filter the calls of this process for good. `pid`: the one process that it may signal."""
        for slot in self._pid_slots:
            struct.pack_into("I", self._code, 8 * slot + 4, pid)
        filter_address = ctypes.byref(self._prog)
        _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_address, 0, 0), "seccomp")


# --- landlock ------------------------------------------------------------------------------------

SYS_LANDLOCK_CREATE_RULESET = 444  # the same numbers on every architecture
SYS_LANDLOCK_ADD_RULE = 445
SYS_LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1

# Rights to files: LANDLOCK_ACCESS_FS_…
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_DIR = 1 << 4
_REMOVE_FILE = 1 << 5
_MAKE_REG = 1 << 8
_TRUNCATE = 1 << 14
_RIGHTS_TO_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE  # a rule on a file has no other
_RIGHTS_TO_CWD = (
    _READ_FILE | _WRITE_FILE | _READ_DIR | _REMOVE_FILE | _REMOVE_DIR | _MAKE_REG | _TRUNCATE
)

# Version of the kernel's interface → every right to files that it knows: version 2 added REFER,
# 3 TRUNCATE, 5 IOCTL_DEV.
_KNOWN_RIGHTS = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    4: (1 << 15) - 1,
    5: (1 << 16) - 1,
}
_TCP_SINCE = 4  # the version that first refuses TCP
_SCOPES_SINCE = 6  # … that first refuses abstract sockets and signals to processes outside
_BIND_AND_CONNECT_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3

# Folders of the standard library that no answer needs.
HIDDEN = (
    "site-packages",
    "dist-packages",
    "test",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "tkinter",
    "distutils",
    "pydoc_data",
    "venv",
    "config-3*",
    "*.egg-info",
)


def _hidden(folder: Path) -> list[Path]:
    return [path for pattern in HIDDEN for path in folder.glob(pattern)]


def _loaded_libraries() -> set[Path]:
    """The shared libraries that are mapped into this process."""
    with open("/proc/self/maps") as maps:
        return {Path(line.split(maxsplit=5)[5].strip()) for line in maps if ".so" in line}


def _library_rules() -> dict[Path, int]:
    """What a child may read under the machine's own root → with which rights.

    That is the standard library, without site-packages (an installed package may carry answers),
    and the folders of the shared libraries in use. Of a folder that holds the standard library as
    well, only these libraries are readable.
    """
    stdlib = Path(os.__file__).parent
    entries = set(stdlib.iterdir()) - {*_hidden(stdlib)}
    real_stdlib = stdlib.resolve()
    libraries: set[Path] = set()
    for library in _loaded_libraries():
        if real_stdlib in library.parents:
            continue
        holds_stdlib = real_stdlib.is_relative_to(library.parent)
        libraries.add(library if holds_stdlib else library.parent)
    rules = {stdlib: _READ_DIR}  # the import system lists it
    for path in (*entries, *libraries):
        rules[path] = _READ_FILE | _READ_DIR
    return rules


def _create_ruleset(exempt: int) -> tuple[int, int, int]:
    """An empty ruleset, which refuses everything that the kernel knows but the `exempt` rights.

    Returns its descriptor, the rights to files that it refuses, and the version of the kernel's
    interface.
    """
    version = _check(
        _libc.syscall(
            SYS_LANDLOCK_CREATE_RULESET,
            None,
            ctypes.c_size_t(0),
            ctypes.c_uint(LANDLOCK_CREATE_RULESET_VERSION),
        ),
        "landlock",
    )
    refused = _KNOWN_RIGHTS[min(version, 5)] & ~exempt
    tcp = _BIND_AND_CONNECT_TCP if version >= _TCP_SINCE else 0
    scopes = _ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPES_SINCE else 0
    attributes = struct.pack("QQQ", refused, tcp, scopes)
    # An older kernel knows the first one or two of the three only.
    if version >= _SCOPES_SINCE:
        size = 24
    elif version >= _TCP_SINCE:
        size = 16
    else:
        size = 8
    ruleset = _check(
        _libc.syscall(
            SYS_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint(0)
        ),
        "landlock",
    )
    return ruleset, refused, version


def _allow_path(ruleset: int, path: str | Path, rights: int) -> None:
    """Add the rule that grants `rights` to a path and all beneath it; a missing path gets none.

    Raises OSError: without a rule right answers would find nothing there.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # not on this machine: nothing to allow
    if not os.path.isdir(path):
        rights &= _RIGHTS_TO_A_FILE
    if rights:  # the kernel refuses a rule without any
        rule = struct.pack("=Qi", rights, fd)
        result = _libc.syscall(
            SYS_LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, ctypes.c_uint(0)
        )
        _check(result, f"landlock rule {path}")
    os.close(fd)


def _make_ruleset(readable: dict[Path, int], writable: str, exempt: int = 0) -> tuple[int, str]:
    """A landlock ruleset's descriptor, and the kernel's version of landlock.

    Nothing is restricted yet. `exempt`: rights that it never restricts.
    """
    ruleset, refused, version = _create_ruleset(exempt)
    for path, rights in readable.items():
        _allow_path(ruleset, path, rights & refused)
    _allow_path(ruleset, "/dev/null", (_READ_FILE | _WRITE_FILE) & refused)
    _allow_path(ruleset, "/dev/urandom", _READ_FILE & refused)
    _allow_path(ruleset, writable, _RIGHTS_TO_CWD & refused)
    return ruleset, f"ABI {version}"


# --- Namespaces and the root in them -------------------------------------------------------------

# A child's working directory in the root of its own. Landlock's rule is on the folder above, since
# each child has a new tmpfs mounted here.
ROOT_CWD = "/home/answer"
# The root holds mount points and links only.
_ROOT_OPTIONS = "size=4m,nr_inodes=4000,mode=755"
_EMPTY_FOLDER_OPTIONS = "size=4k,mode=755"


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    encoded = [None if x is None else os.fsencode(x) for x in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options) or None)
    _check(result, f"mount {target}")


def _unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), "umount")


_PIPE_BYTES = 1 << 16  # that fit into a pipe while nobody reads


def _in_throwaway(work: Callable[[], str], writer_fd: int | None = None) -> tuple[int, str]:
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


def _load_extension_modules(stdlib: Path) -> None:
    """Map every extension module of the standard library, and so the libraries that it needs."""
    for module in sorted((stdlib / "lib-dynload").glob("*.so")):
        if "test" in module.name:
            continue
        with suppress(OSError):
            ctypes.CDLL(str(module), mode=os.RTLD_LAZY)


def _shared_libraries() -> set[Path]:
    """The shared libraries that the standard library may need, those of its own folder left out.

    They are found by loading its extension modules in a throw-away process. Raises OSError.
    """
    stdlib = Path(os.__file__).resolve().parent

    def list_them() -> str:
        _load_extension_modules(stdlib)
        return "\n".join(map(str, _loaded_libraries()))

    status, listed = _in_throwaway(list_them)
    if status != 0:
        raise OSError(f"the library's shared objects cannot be listed: {listed}")
    libraries = _loaded_libraries().union(map(Path, listed.splitlines()))
    return {path for path in libraries if stdlib not in path.parents}


def _map_two_ids(reader: int, writer: int, proc: Path) -> None:
    """Map root and the spare uid into the namespace of the process of the folder `proc`.

    Runs in a helper that stays outside of the namespace, where it may still map two ids, once the
    other process has written a byte. Ends the helper, with status 0 if both are mapped.
    """
    failed = 1
    try:
        os.close(writer)
        if os.read(reader, 1):  # else it could not enter the namespace
            for file in ("gid_map", "uid_map"):
                (proc / file).write_text(f"0 0 1\n{SPARE_UID} {SPARE_UID} 1\n")
            failed = 0
    finally:
        os._exit(failed)


def _unshare_with_ids() -> bool:
    """Enter new namespaces. True: the spare uid exists in them too, which only root can arrange.

    Raises OSError if they were not entered, HalfWay if they were, but no ids can be mapped into
    them. A security module may allow the one and not the other.
    """
    uid, gid = os.getuid(), os.getgid()
    namespaces = (
        CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    )
    proc = Path(f"/proc/{os.getpid()}")
    reader, writer = os.pipe()
    helper = None
    entered = both_mapped = False
    try:
        try:
            if uid == 0:
                helper = os.fork()
                if helper == 0:
                    _map_two_ids(reader, writer, proc)
            _check(_libc.unshare(namespaces), "unshare")
            entered = True
            os.write(writer, b"x")
        finally:
            os.close(reader)
            os.close(writer)
            if helper is not None:
                both_mapped = os.waitpid(helper, 0)[1] == 0
        if both_mapped:
            os.setgroups([])
        else:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as error:
        if not entered:
            raise
        raise HalfWay(f"entered, but no ids can be mapped into them: {error}") from None
    return both_mapped


def _bind(source: Path, root: str, names: Iterable[str] = ()) -> None:
    """Show a file or folder read-only under the same path below `root`.

    names: further names for a file, which become links beside it.
    """
    target = f"{root}{source}"
    if source.is_dir():
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o644))
    # Flags that are set on the mount outside cannot be taken away here.
    outside = os.statvfs(source).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount(str(source), target, None, MS_BIND)
    _mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | outside)
    for name in names:
        with suppress(FileExistsError):
            os.symlink(source.name, os.path.join(os.path.dirname(target), name))


def _links_to(library: Path) -> list[str]:
    """Names beside a shared library that lead to it: libz.so.1 for libz.so.1.2.13."""
    beginning = library.name.split(".so")[0] + ".so"
    beside = []
    for name in os.listdir(library.parent):
        if name.startswith(beginning) and name != library.name:
            beside.append(name)
    real = os.path.realpath
    return [name for name in beside if real(library.parent / name) == real(library)]


def _link_top_folders(root: str) -> None:
    """Where /lib is a link to usr/lib it is one in the new root too, as the loader expects."""
    for top in ("bin", "lib", "lib32", "lib64", "sbin"):
        if os.path.islink(f"/{top}"):
            os.makedirs(f"{root}{os.path.realpath(f'/{top}')}", exist_ok=True)
            os.symlink(os.readlink(f"/{top}").lstrip("/"), f"{root}/{top}")


def _outermost(folders: list[Path]) -> list[Path]:
    """The folders that are not inside another one of them."""
    outermost = []
    for folder in folders:
        others = [other for other in folders if other != folder]
        if not any(folder.is_relative_to(other) for other in others):
            outermost.append(folder)
    return outermost


def _bind_library(root: str, shared_libraries: set[Path]) -> None:
    """Show the interpreter's library, but none of its hidden folders, and the shared libraries."""
    folders = _outermost([Path(entry) for entry in sys.path if os.path.isdir(entry)])
    for folder in folders:
        _bind(folder, root)
        for hidden in _hidden(folder):
            # An installed package may carry answers: an empty folder is mounted over it.
            if hidden.is_dir():
                flags = MS_RDONLY | MS_NOSUID
                _mount("tmpfs", f"{root}{hidden}", "tmpfs", flags, _EMPTY_FOLDER_OPTIONS)
    for library in sorted(shared_libraries):
        if not any(library.is_relative_to(folder) for folder in folders):
            _bind(library, root, _links_to(library))


def _enter_new_root(workdir: str, shared_libraries: set[Path]) -> None:
    """Make a tmpfs the root: the interpreter's library, two devices, an empty folder, no more."""
    os.umask(0o022)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)  # no mount below is seen outside
    _mount("tmpfs", workdir, "tmpfs", MS_NOSUID | MS_NODEV, _ROOT_OPTIONS)
    os.makedirs(f"{workdir}{ROOT_CWD}")
    _link_top_folders(workdir)
    _bind_library(workdir, shared_libraries)
    for device in ("/dev/null", "/dev/urandom"):
        _bind(Path(device), workdir)
    # The old root is stacked on the new one, and then detached: no path leads to it any more.
    os.chdir(workdir)
    _check(_libc.syscall(_machine().pivot_root, b".", b"."), "pivot_root")
    _unmount(".")
    os.chdir("/")
    _mount(None, "/", None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


# --- Users, capabilities, rlimits ----------------------------------------------------------------

_LINUX_CAPABILITY_VERSION_3 = 0x2008_0522
_NO_CAPABILITIES = bytes(24)  # effective, permitted, inheritable: each of 64 bits


def _become(uid: int) -> None:
    """Take on another uid and gid, for good."""
    if os.getuid() == 0:
        with suppress(PermissionError):  # where groups may not be set, this process has none
            os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _can_become(uid: int) -> bool:
    """Could this process still read its library as `uid`? Tried in a throw-away process."""
    pid = os.fork()
    if pid == 0:
        try:
            _become(uid)
            readable = bool(Path(os.__file__).read_bytes())
        except OSError:
            readable = False
        os._exit(0 if readable else 1)
    return os.waitpid(pid, 0)[1] == 0


def _drop_capabilities() -> None:
    header = struct.pack("Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    _check(_libc.syscall(_machine().capset, header, _NO_CAPABILITIES), "capset")


def cap_limit(which: int, value: int) -> None:
    """Lower a resource limit of this process, for good."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _set_rlimits(memory_mb: int, output_bytes: int) -> None:
    """The limits that a fork server takes on itself, and that its children inherit.

    Every one is set that can be. Raises OSError, which names the others.
    """
    limits = {
        "AS": memory_mb << 20,
        "FSIZE": output_bytes,
        "CORE": 0,
        "NOFILE": MAX_FILES,
        "STACK": 64 << 20,
        "MEMLOCK": 0,
    }
    refused = []
    for name, value in limits.items():
        try:
            cap_limit(getattr(resource, f"RLIMIT_{name}"), value)
        except (OSError, ValueError) as error:
            refused.append(f"RLIMIT_{name}: {error}")
    if refused:
        raise OSError("; ".join(refused))


# --- One fork server, its children ---------------------------------------------------------------


@dataclass
class Enclosure:
    """The layers that a fork server has entered, and those that each of its children enters."""

    cwd: str  # working directory of a child
    spare_uid_exists: bool  # a child may become SPARE_UID, as far as ids go
    active: dict[str, str] = field(default_factory=dict)  # layer → detail ("" if none)
    missing: dict[str, str] = field(default_factory=dict)  # layer → reason
    # The fork server has namespaces and a root of its own: `cwd` is a new tmpfs for each child.
    own_root: bool = False
    # The root of a child, where that is made by chroot; `cwd` is in there.
    chroot: str = ""
    # The layer that a child is entering, which is named if that fails.
    entering: str = ""
    uid: int | None = None  # that a child takes on; None: it keeps the fork server's
    # The seccomp filters of children that may open files (True) and of those that may not.
    filters: dict[bool, SeccompFilter] = field(default_factory=dict)
    ruleset: int | None = None  # descriptor of landlock's
    last_pid: int | None = None  # descriptor of the file that sets the pid of the next process

    @property
    def cannot_fork(self) -> bool:
        """The seccomp filter forbids children to fork."""
        return bool(self.filters)

    def renew(self) -> None:
        """Ahead of each child: an empty working directory, and the same pid for every child."""
        if self.own_root:
            owner = "" if self.uid is None else f",uid={self.uid},gid={self.uid}"
            flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
            _mount("tmpfs", self.cwd, "tmpfs", flags, f"size=17m,nr_inodes=300,mode=700{owner}")
        else:
            os.mkdir(self.cwd, 0o700)
            if self.uid is not None:
                os.chown(self.cwd, self.uid, self.uid)
        if self.last_pid is not None:
            os.pwrite(self.last_pid, b"1", 0)

    def discard(self) -> None:
        """After each child. Raises OSError if the working directory, no tmpfs, is not empty."""
        if self.own_root:
            _unmount(self.cwd)
        else:
            os.rmdir(self.cwd)

    def enter(self, cpu_s: float, may_open: bool) -> None:
        """Confine this process, a child, for good. may_open: the seccomp filter lets it open files.

        Seccomp comes last, as its filter forbids what the other layers need. Raises OSError or
        ValueError; `entering` then says in which layer.
        """
        self.entering = "the working directory"
        os.chdir(self.cwd)
        if self.own_root:
            # The folder was made when the child before this one ended: its times would tell when.
            os.utime(".")
        self.entering = "the limits of a child"
        self._limit_processes_and_cpu(cpu_s)
        if self.chroot:
            self.entering = "chroot"
            os.chroot(self.chroot)
            os.chdir(ROOT_CWD)
        if self.uid is not None:
            self.entering = "uid"
            _become(self.uid)
        if IS_LINUX:
            self._restrict()
        # Files of the fork server: all but the standard streams and the connection.
        os.closerange(3, CONNECTION_FD)
        os.closerange(CONNECTION_FD + 1, _END_OF_FDS)
        if self.filters:
            self.entering = "seccomp"
            self.filters[may_open].install(os.getpid())

    def leave_off(self, layer: str, reason: str) -> None:
        """Go on without a layer that children cannot enter. Raises Unusable if they have to."""
        if layer not in self.active:
            raise Unusable(f"{layer}: {reason}")
        del self.active[layer]
        self.missing[layer] = reason
        if layer == "uid":
            self.uid = None
        elif layer == "landlock":
            self.ruleset = None
        elif layer == "seccomp":
            self.filters = {}
        if self.chroot and layer in ("uid", "chroot"):
            self.missing["chroot"] = reason
            self.active.pop("chroot", None)
            self.cwd = os.path.join(os.path.dirname(self.chroot), "cwd")
            self.chroot = ""

    def _limit_processes_and_cpu(self, cpu_s: float) -> None:
        # The kernel's own CPU limit, a second above the verifier's, in case nobody watches.
        cap_limit(resource.RLIMIT_CPU, int(cpu_s) + CPU_EXTRA)
        if self.cannot_fork:
            return
        # Without seccomp shared memory would outlive the child, and it could fork.
        if self.own_root:
            _check(_libc.unshare(CLONE_NEWIPC), "unshare")
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # the kernel does not hold root to it

    def _restrict(self) -> None:
        """Landlock, no capabilities, and no way in for other processes."""
        self.entering = "the end with its fork server"
        if not self.own_root:
            die_with_parent()  # in a pid namespace the kernel ends a child with its fork server
        if self.ruleset is not None:
            self.entering = "landlock"
            rulesets = [self.ruleset]
            # It grants writing in the folder above the working directory, which is read-only in a
            # root of its own and writable elsewhere: there a second ruleset grants the child its
            # working directory alone.
            if not self.own_root:
                may_read = _EXECUTE | _READ_FILE | _READ_DIR
                rulesets.append(_make_ruleset({}, self.cwd, exempt=may_read)[0])
            for ruleset in rulesets:
                result = _libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(0))
                _check(result, "landlock")
        if "no_capabilities" in self.active:
            self.entering = "no_capabilities"
            _drop_capabilities()
        self.entering = "the lock against other processes"
        _prctl(PR_SET_DUMPABLE, 0)  # no ptrace, no /proc/PID/mem by a process of the same uid


# --- The layers that are entered once, by a fork server ------------------------------------------


def _enter_namespaces(enclosure: Enclosure, workdir: str) -> str:
    """Enter the namespaces and a root of their own.

    Returns in the first process of the pid namespace; the process that called waits for that one
    and ends as it ends. Raises HalfWay if the namespaces were entered but could not be furnished.
    """
    # In a pid namespace a child has another pid than its verifier sees: a descriptor tells which.
    os.close(os.pidfd_open(os.getpid()))
    shared_libraries = _shared_libraries()
    both_mapped = _unshare_with_ids()
    try:
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CLOEXEC
            enclosure.last_pid = os.open("/proc/sys/kernel/ns_last_pid", flags)
        _enter_new_root(workdir, shared_libraries)
        pid = os.fork()
    except (OSError, KeyError, ValueError, AttributeError) as error:
        raise HalfWay(f"namespaces without a root of their own: {error}") from None
    if pid:
        try:
            die_with_parent()
            _, status = os.waitpid(pid, 0)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # its end is seen by the verifier
            os._exit(1)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    enclosure.cwd = ROOT_CWD
    enclosure.own_root = True
    enclosure.spare_uid_exists = both_mapped
    try:
        _check(_libc.sethostname(b"answer", 6), "sethostname")
    except OSError as error:
        raise HalfWay(f"namespaces with the machine's name: {error}") from None
    if enclosure.last_pid is not None:
        try:
            os.pwrite(enclosure.last_pid, b"1", 0)
        except OSError:
            enclosure.last_pid = None
    pids = "pid" if enclosure.last_pid is not None else "pid (which counts the children)"
    return f"user, mount with a root of its own, {pids}, net, ipc, uts"


def _choose_uid(enclosure: Enclosure) -> str:
    """Children of root take on another uid: `_become`. Raises OSError where they cannot."""
    if os.getuid() != 0:
        raise OSError("not root: the trainer's own uid")
    if not enclosure.spare_uid_exists:
        raise OSError("no second uid in this container")
    if not _can_become(SPARE_UID):
        raise OSError("the interpreter's library is readable by root only")
    enclosure.uid = SPARE_UID
    return f"uid {SPARE_UID}"


def _prepare_landlock(enclosure: Enclosure) -> str:
    """Make the ruleset that each child takes on. In a root of its own it may read everything."""
    everything = {Path("/"): _READ_FILE | _READ_DIR}
    readable = everything if enclosure.own_root else _library_rules()
    enclosure.ruleset, version = _make_ruleset(readable, os.path.dirname(enclosure.cwd))
    return version


def _prepare_chroot(enclosure: Enclosure, workdir: str, forbid: frozenset[str]) -> str:
    """Make a root for the children of a fork server that is root.

    Two devices and a folder for their working directory are all that is in there. Raises OSError
    where a child could change it, or where there can be no devices.
    """
    if os.getuid() != 0 or not enclosure.spare_uid_exists or "uid" in forbid:
        raise OSError("only for children of root that become another user")
    root = os.path.join(workdir, "root")
    os.umask(0o022)
    for folder in ("dev", os.path.dirname(ROOT_CWD).lstrip("/")):
        os.makedirs(os.path.join(root, folder))
    for device in ("/dev/null", "/dev/urandom"):
        os.mknod(f"{root}{device}", stat.S_IFCHR, os.stat(device).st_rdev)
        os.chmod(f"{root}{device}", 0o666)
        os.close(os.open(f"{root}{device}", os.O_RDWR))  # a folder may be mounted without devices
    enclosure.chroot = root
    enclosure.cwd = f"{root}{ROOT_CWD}"
    # Whether that user could read the interpreter's library does not matter: nobody can, in there.
    enclosure.uid = SPARE_UID
    enclosure.missing.pop("uid", None)
    enclosure.active["uid"] = f"uid {SPARE_UID}"
    return "a folder without the library, all of which is imported before"


# Modules that no answer needs, or whose import does something.
_NOT_IMPORTED = {"antigravity", "this", "turtle", "__main__", "_tkinter", *HIDDEN}


def import_library() -> None:
    """Import every module of the standard library, for children that find no file of it."""
    names = sorted(sys.stdlib_module_names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while names:
            name = names.pop()
            last = name.rpartition(".")[2]
            if last in _NOT_IMPORTED or last.startswith(("test", "_test", "xx", "_xx")):
                continue
            try:
                module = importlib.import_module(name)
            except Exception:  # of another system
                continue
            for inner in pkgutil.iter_modules(getattr(module, "__path__", ())):
                names.append(f"{name}.{inner.name}")


def _prepare_seccomp(enclosure: Enclosure) -> str:
    """Make the filters, of which each child installs one."""
    enclosure.filters = {may_open: SeccompFilter(may_open) for may_open in (False, True)}
    return ""


def _forbid_new_privileges() -> str:
    _prctl(PR_SET_NO_NEW_PRIVS, 1)  # no setuid program; landlock and seccomp want it
    return ""


def enclose(workdir: str, memory_mb: int, output_bytes: int, forbid: frozenset[str]) -> Enclosure:
    """Enter every layer that is entered once, and prepare those that each child enters.

    May fork, for the pid namespace: returns in the process that is to serve. `forbid` names layers
    to leave off, for tests of the ladder ("namespaces", "landlock", "seccomp", "uid"). Raises
    HalfWay if the namespaces were entered but could not be furnished, Unusable if no child can be
    run at all, with whatever is left.
    """
    enclosure = Enclosure(os.path.join(workdir, "cwd"), spare_uid_exists=os.getuid() == 0)

    def attempt(layer: str, enter: Callable[[], str]) -> None:
        if layer in forbid:
            enclosure.missing[layer] = "switched off"
            return
        try:
            enclosure.active[layer] = enter()
        except KeyError:
            enclosure.missing[layer] = f"no table for {platform.machine()}"
        except (OSError, AttributeError, ValueError) as error:
            enclosure.missing[layer] = str(error)

    def rlimits() -> str:
        _set_rlimits(memory_mb, output_bytes)
        return ""

    if IS_LINUX:
        attempt("no_new_privs", _forbid_new_privileges)
        attempt("namespaces", lambda: _enter_namespaces(enclosure, workdir))
        attempt("uid", lambda: _choose_uid(enclosure))
        attempt("landlock", lambda: _prepare_landlock(enclosure))
        if not FILE_LAYERS & enclosure.active.keys():
            attempt("chroot", lambda: _prepare_chroot(enclosure, workdir, forbid))
        attempt("seccomp", lambda: _prepare_seccomp(enclosure))
        attempt("no_capabilities", lambda: "")  # each child drops its own
        die_with_parent()
        _prctl(PR_SET_DUMPABLE, 0)
    else:
        for layer in ("namespaces", "landlock", "seccomp"):
            enclosure.missing[layer] = f"not on {sys.platform}"
    attempt("rlimits", rlimits)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most <= CONNECTION_FD:
        raise Unusable(
            f"an answer needs {MAX_FILES} open files, but {most} are allowed (ulimit -n)"
        )
    _rehearse(enclosure, workdir, forbid)
    return enclosure


def _rehearse(enclosure: Enclosure, workdir: str, forbid: frozenset[str]) -> None:
    """Enter the layers of a child in throw-away processes, and leave off each that fails.

    Raises HalfWay if there is no working directory in the namespaces, Unusable if there is none
    anywhere, or if something fails that is no layer.
    """

    def enter() -> str:
        try:
            enclosure.enter(1.0, True)
        except (OSError, ValueError) as error:
            raise OSError(f"{enclosure.entering}\n{error}") from None
        return ""

    while True:
        try:
            enclosure.renew()
        except OSError as error:
            if enclosure.own_root:
                raise HalfWay(f"no folder for an answer in the namespaces: {error}") from None
            raise Unusable(f"no folder for an answer: {error}") from None
        status, said = _in_throwaway(enter, writer_fd=CONNECTION_FD)
        enclosure.discard()
        if status == 0:
            return
        if not said:
            ended = os.waitstatus_to_exitcode(status)
            how = f"signal {-ended}" if ended < 0 else f"status {ended}"
            raise Unusable(f"a child ended with {how} on its way into the sandbox")
        layer, _, reason = said.partition("\n")
        enclosure.leave_off(layer, reason)
        lost_landlock = layer == "landlock" and "chroot" not in forbid
        if lost_landlock and not FILE_LAYERS & enclosure.active.keys():
            try:
                enclosure.active["chroot"] = _prepare_chroot(enclosure, workdir, forbid)
            except OSError as error:
                enclosure.missing["chroot"] = str(error)
