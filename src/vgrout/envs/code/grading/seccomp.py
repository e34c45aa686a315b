"""The seccomp filter of a child: which system calls it may make, as a program of classic BPF.

Reference: seccomp(2).
"""

import ctypes
import errno
import platform
import struct
from typing import NamedTuple

from vgrout.envs.code.grading import kernel
from vgrout.envs.code.grading.messages import CONNECTION_FD


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
# - no CPU clock of another process, no limit of another process
# - no lease on a file, no advice that throws a file out of memory
# - no lock, no mode and no time of a file: these calls do nothing and seem to have succeeded
# - no futex but a private one: a shared one is found by its file's inode
# - no queued signals: the kernel counts them by user
_X86_64 = _numbers("""
    read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11
    brk=12 rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17 pwrite64=18
    readv=19 writev=20 access=21 select=23 sched_yield=24 mremap=25 msync=26 madvise=28 dup=32 dup2=33
    nanosleep=35 getitimer=36 alarm=37 setitimer=38 getpid=39 exit=60 kill=62 uname=63 fcntl=72
    flock=73 fsync=74 fdatasync=75 truncate=76 ftruncate=77 getdents=78 getcwd=79 chdir=80 fchdir=81
    rename=82 mkdir=83 rmdir=84 creat=85 unlink=87 symlink=88 readlink=89 chmod=90 fchmod=91
    umask=95 gettimeofday=96 getrlimit=97 times=100 getuid=102 getgid=104 geteuid=107 getegid=108
    getppid=110 getpgrp=111 rt_sigpending=127 sigaltstack=131 utime=132 gettid=186 listxattr=194
    llistxattr=195 flistxattr=196 time=201 futex=202 sched_getaffinity=204 getdents64=217
    restart_syscall=219 clock_gettime=228 clock_getres=229 clock_nanosleep=230 exit_group=231
    tgkill=234 utimes=235 openat=257 mkdirat=258 futimesat=261 newfstatat=262 unlinkat=263
    renameat=264 symlinkat=266 readlinkat=267 fchmodat=268 faccessat=269 pselect6=270 ppoll=271
    set_robust_list=273 utimensat=280 dup3=292 prlimit64=302 renameat2=316 getrandom=318 statx=332
    rseq=334 clone3=435 openat2=437 faccessat2=439 fchmodat2=452
""")
_AARCH64 = _numbers("""
    listxattr=11 llistxattr=12 flistxattr=13 getcwd=17 dup=23 dup3=24 fcntl=25 ioctl=29 flock=32
    mkdirat=34 unlinkat=35 symlinkat=36 renameat=38 truncate=45 ftruncate=46 faccessat=48 chdir=49
    fchdir=50 fchmod=52 fchmodat=53 openat=56 close=57 getdents64=61 lseek=62 read=63 write=64
    readv=65 writev=66 pread64=67 pwrite64=68 pselect6=72 ppoll=73 readlinkat=78 newfstatat=79
    fstat=80 fsync=82 fdatasync=83 utimensat=88 exit=93 exit_group=94 futex=98 set_robust_list=99
    nanosleep=101 getitimer=102 setitimer=103 clock_gettime=113 clock_getres=114 clock_nanosleep=115
    sched_getaffinity=123 sched_yield=124 restart_syscall=128 kill=129 tgkill=131 sigaltstack=132
    rt_sigaction=134 rt_sigprocmask=135 rt_sigpending=136 rt_sigreturn=139 times=153 uname=160
    getrlimit=163 umask=166 gettimeofday=169 getpid=172 getppid=173 getuid=174 geteuid=175
    getgid=176 getegid=177 gettid=178 brk=214 munmap=215 mremap=216 mmap=222 mprotect=226 msync=227
    madvise=233 prlimit64=261 renameat2=276 getrandom=278 statx=291 rseq=293 clone3=435 openat2=437
    faccessat2=439 fchmodat2=452
""")
_ALLOWED = {"x86_64": _X86_64, "aarch64": _AARCH64}  # system call → number

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
_LOCKS = (6, 7)  # F_SETLK, F_SETLKW, which do nothing
_IOCTL_REQUESTS = (0x5401, 0x5450, 0x5451)  # TCGETS, FIONCLEX, FIOCLEX
_MADVISE_ADVICE = (4, 8)  # MADV_DONTNEED, MADV_FREE: those of malloc
FUTEX_PRIVATE_FLAG = 128

# Calls that do nothing, and seem to have succeeded.
_PRETENDED = (
    *(
        "nanosleep",
        "clock_nanosleep",
        "fsync",
        "fdatasync",
        "msync",
        "flock",
        "chmod",
        "fchmod",
        "fchmodat",
    ),
    *("fchmodat2", "utime", "utimes", "futimesat", "utimensat"),
)
# What a child that may open no file may not do either.
_OF_FILES = (
    *("open", "openat", "openat2", "creat", "truncate", "mkdir", "mkdirat", "rmdir"),
    *("symlink", "symlinkat"),
)

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


def _load_argument(index: int) -> _Instruction:
    """Load the lower 32 bits of an argument of the system call."""
    return _load(_ARGUMENTS_OFFSET + 8 * index)


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
    no_locks: _Program = [_load_argument(1)]
    for lock in _LOCKS:
        no_locks += [_if_equal(lock, 0, 1), _fail_with(0)]
    system_clocks = [*_refuse_from(0, _FIRST_OTHER_CLOCK), _ALLOW]
    to_itself = _allow_values(0, (_PID_PLACEHOLDER,))
    rules = {
        # Signals: to the child itself alone. A real-time signal would be queued.
        "kill": [*_refuse_from(1, _FIRST_REAL_TIME_SIGNAL), *to_itself],
        "tgkill": [*_refuse_from(2, _FIRST_REAL_TIME_SIGNAL), *to_itself],
        # No locks, no leases, and no F_SETOWN, which has signals sent to others.
        "fcntl": [*_REFUSE_CONNECTION, *no_locks, *_allow_values(1, _FCNTL_COMMANDS)],
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
        # Its own limits, which it can only lower.
        "prlimit64": _allow_values(0, (0, _PID_PLACEHOLDER)),
    }
    for name in _PRETENDED:
        rules[name] = [_fail_with(0)]
    for name in ("listxattr", "llistxattr", "flistxattr"):
        rules[name] = [_fail_with(errno.ENOTSUP)]  # shutil.copy2 then copies none
    for name in ("clone3", "openat2", "statx"):
        rules[name] = [_fail_with(errno.ENOSYS)]  # the C library then makes the older call
    for name in ("fstat", "newfstatat", "dup", "dup2", "dup3"):
        rules[name] = [*_REFUSE_CONNECTION, _ALLOW]
    if not may_open:
        for name in _OF_FILES:
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
    allowed = _ALLOWED[platform.machine()]
    rules = _rules(may_open)
    bodies = {number: rules.get(name, [_ALLOW]) for name, number in allowed.items()}
    leaves: list[_Leaf] = []
    for number in range(max(bodies) + 2):
        body = bodies.get(number, [_EPERM])
        if not leaves or leaves[-1].body != body:
            leaves.append(_Leaf(number, body))
    return [
        # Another architecture (32-bit calls on x86) has other numbers: kill the process.
        _load(_ARCHITECTURE_OFFSET),
        _if_equal(kernel.machine().audit, 1, 0),
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
        kernel.check(
            kernel.libc.prctl(kernel.PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_address, 0, 0),
            "seccomp",
        )
