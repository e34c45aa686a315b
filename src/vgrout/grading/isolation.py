"""The layers of protection, hand-written over ctypes: namespaces, landlock, seccomp, rlimits, an unprivileged uid.

A fork server enters them once (`enclose`), except the seccomp filter and the CPU limit, which every child sets for
itself (`SeccompFilter.install`, `limit_child`): the filter forbids fork, which the fork server needs. A layer that the
kernel refuses is reported with its reason, and the next one is tried. References: landlock(7), seccomp(2),
user_namespaces(7).
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
IS_LINUX = sys.platform == "linux"
SPARE_UID = 65534  # nobody, where the trainer is root

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000


@dataclass
class Layers:
    """Which layers are on, and why the others are off."""

    active: dict[str, str] = field(default_factory=dict)  # layer → detail ("" if none)
    missing: dict[str, str] = field(default_factory=dict)  # layer → reason


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {errno.errorcode.get(code, code)}")
    return result


def _prctl(option: int, a: int = 0, b: int = 0) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(a), ctypes.c_ulong(b), 0, 0), "prctl")


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that forked it dies (Linux; elsewhere the closed pipe says so)."""
    if IS_LINUX:
        _prctl(PR_SET_PDEATHSIG, 9)


# --- seccomp ---------------------------------------------------------------------------------------------------------


def _numbers(table: str) -> dict[str, int]:
    return {name: int(number) for name, number in (entry.split("=") for entry in table.split())}


# What CPython needs to compute, print and use files of its own directory. Everything else is EPERM, so that a refused
# call is an ordinary exception. No sleep: it returns at once, and a program that waits spends CPU time instead.
_X86_64 = _numbers(
    "read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12 "
    "rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17 pwrite64=18 readv=19 writev=20 "
    "access=21 pipe=22 sched_yield=24 mremap=25 madvise=28 dup=32 dup2=33 nanosleep=35 getitimer=36 alarm=37 "
    "setitimer=38 getpid=39 exit=60 kill=62 uname=63 fcntl=72 fsync=74 fdatasync=75 truncate=76 ftruncate=77 "
    "getdents=78 getcwd=79 rename=82 creat=85 unlink=87 readlink=89 umask=95 gettimeofday=96 getrlimit=97 "
    "getrusage=98 sysinfo=99 times=100 getuid=102 getgid=104 geteuid=107 getegid=108 getppid=110 getpgrp=111 "
    "rt_sigpending=127 sigaltstack=131 gettid=186 time=201 futex=202 sched_getaffinity=204 getdents64=217 "
    "restart_syscall=219 fadvise64=221 clock_gettime=228 clock_getres=229 clock_nanosleep=230 exit_group=231 "
    "tgkill=234 openat=257 newfstatat=262 unlinkat=263 renameat=264 readlinkat=267 faccessat=269 "
    "set_robust_list=273 dup3=292 pipe2=293 prlimit64=302 renameat2=316 getrandom=318 statx=332 rseq=334 "
    "clone3=435 openat2=437 faccessat2=439"
)
_AARCH64 = _numbers(
    "getcwd=17 dup=23 dup3=24 fcntl=25 ioctl=29 unlinkat=35 renameat=38 truncate=45 ftruncate=46 faccessat=48 "
    "openat=56 close=57 pipe2=59 getdents64=61 lseek=62 read=63 write=64 readv=65 writev=66 pread64=67 "
    "pwrite64=68 readlinkat=78 newfstatat=79 fstat=80 fsync=82 fdatasync=83 exit=93 exit_group=94 futex=98 "
    "set_robust_list=99 nanosleep=101 getitimer=102 setitimer=103 clock_gettime=113 clock_getres=114 "
    "clock_nanosleep=115 sched_getaffinity=123 sched_yield=124 restart_syscall=128 kill=129 tgkill=131 "
    "sigaltstack=132 rt_sigaction=134 rt_sigprocmask=135 rt_sigpending=136 rt_sigreturn=139 times=153 uname=160 "
    "getrlimit=163 getrusage=165 umask=166 gettimeofday=169 getpid=172 getppid=173 getuid=174 geteuid=175 "
    "getgid=176 getegid=177 gettid=178 sysinfo=179 brk=214 munmap=215 mremap=216 mmap=222 fadvise64=223 "
    "mprotect=226 madvise=233 prlimit64=261 renameat2=276 getrandom=278 statx=291 rseq=293 clone3=435 openat2=437 "
    "faccessat2=439"
)
_ARCH = {"x86_64": (0xC000_003E, _X86_64), "aarch64": (0xC000_00B7, _AARCH64)}
_OPENERS = ("open", "openat", "openat2", "creat", "truncate")

_LD, _JEQ, _JGE, _JGT, _JA, _RET = 0x20, 0x15, 0x35, 0x25, 0x05, 0x06
_ALLOW = 0x7FFF_0000


def _deny(code: int) -> int:
    return 0x0005_0000 | code


_Insn = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def _arg(index: int, high: bool = False) -> _Insn:
    return (_LD, 0, 0, 16 + 8 * index + (4 if high else 0))  # little-endian halves of seccomp_data.args


def _one_of(index: int, values: tuple[int, ...]) -> list[_Insn]:
    body = [_arg(index)]
    for i, value in enumerate(values):
        body.append((_JEQ, len(values) - i, 0, value))
    return [*body, (_RET, 0, 0, _deny(errno.EPERM)), (_RET, 0, 0, _ALLOW)]


def _tree(leaves: list[tuple[int, list[_Insn]]]) -> list[_Insn]:
    """Binary search over (first syscall number, body), sorted: about 8 comparisons instead of a hundred."""
    if len(leaves) == 1:
        return leaves[0][1]
    half = len(leaves) // 2
    left, right = _tree(leaves[:half]), _tree(leaves[half:])
    pivot = leaves[half][0]
    if len(left) < 256:
        return [(_JGE, len(left), 0, pivot), *left, *right]
    return [(_JGE, 0, 1, pivot), (_JA, 0, 0, len(left)), *left, *right]


class SeccompFilter:
    """The classic BPF program of one kind of child. Built once; only the child's own pid is patched in later."""

    def __init__(self, allow_open: bool) -> None:
        audit, numbers = _ARCH[platform.machine()]  # KeyError: no table for this machine
        pid = -1
        eperm: list[_Insn] = [(_RET, 0, 0, _deny(errno.EPERM))]
        special: dict[str, list[_Insn]] = {
            "kill": _one_of(0, (pid,)),
            "tgkill": _one_of(0, (pid,)),
            # F_DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC; no F_SETOWN, which sends signals to others
            "fcntl": _one_of(1, (0, 1, 2, 3, 4, 1030)),
            "ioctl": _one_of(1, (0x5401, 0x5450, 0x5451)),  # TCGETS, FIONCLEX, FIOCLEX
            "prlimit64": [
                _arg(2),
                (_JEQ, 0, 3, 0),
                _arg(2, high=True),
                (_JEQ, 0, 1, 0),
                (_RET, 0, 0, _ALLOW),
                *eperm,
            ],
            "nanosleep": [(_RET, 0, 0, _deny(0))],
            "clock_nanosleep": [(_RET, 0, 0, _deny(0))],
            "clone3": [(_RET, 0, 0, _deny(errno.ENOSYS))],
            "openat2": [(_RET, 0, 0, _deny(errno.ENOSYS))],
        }
        if not allow_open:
            special |= dict.fromkeys(_OPENERS, eperm)
        bodies = {nr: special.get(name, [(_RET, 0, 0, _ALLOW)]) for name, nr in numbers.items()}
        leaves: list[tuple[int, list[_Insn]]] = []
        for nr in range(max(bodies) + 2):
            body = bodies.get(nr, eperm)
            if not leaves or leaves[-1][1] != body:
                leaves.append((nr, body))
        program = [
            (_LD, 0, 0, 4),  # architecture: another one has other numbers
            (_JEQ, 1, 0, audit),
            (_RET, 0, 0, 0x8000_0000),  # kill the process
            (_LD, 0, 0, 0),  # syscall number; the x32 bit makes it larger than any in the tree, hence EPERM
            *_tree(leaves),
        ]
        self._pid_slots = [i for i, (code, _, _, k) in enumerate(program) if code == _JEQ and k == pid]
        packed = b"".join(struct.pack("HBBI", code, jt, jf, k & 0xFFFF_FFFF) for code, jt, jf, k in program)
        self._code = ctypes.create_string_buffer(packed, len(packed))
        self._prog = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(self._code)))

    def install(self, pid: int) -> None:
        """Irrevocable for this process. `pid`: the only process that it may signal (itself)."""
        for slot in self._pid_slots:
            struct.pack_into("I", self._code, 8 * slot + 4, pid)
        _check(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(self._prog), 0, 0), "seccomp")


# --- landlock --------------------------------------------------------------------------------------------------------

_LL_CREATE, _LL_ADD, _LL_RESTRICT = 444, 445, 446
_EXEC, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << i for i in range(6))
_MAKE_REG, _TRUNCATE = 1 << 8, 1 << 14
_FILE_ONLY = _EXEC | _WRITE_FILE | _READ_FILE | _TRUNCATE
_ALL_FS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}


def landlock_abi() -> int:
    """Version of the kernel's landlock. Raises OSError where there is none."""
    return _check(_libc.syscall(_LL_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1)), "landlock")


def _stdlib_entries() -> list[Path]:
    """Files and folders of the standard library, without site-packages: an installed package may carry answers."""
    stdlib = Path(os.__file__).parent
    return [p for p in stdlib.iterdir() if p.name not in ("site-packages", "dist-packages")]


def _shared_libraries() -> set[Path]:
    """Folders of the shared libraries in use; where one also holds the standard library (and so site-packages), the
    libraries themselves."""
    with open("/proc/self/maps") as maps:
        mapped = {Path(line.split(maxsplit=5)[5].strip()) for line in maps if ".so" in line}
    stdlib = Path(os.__file__).resolve().parent
    return {lib if stdlib.is_relative_to(lib.parent) else lib.parent for lib in mapped if stdlib not in lib.parents}


def _landlock(workdir: str) -> str:
    abi = landlock_abi()
    handled = _ALL_FS[min(abi, 5)]
    net = 3 if abi >= 4 else 0
    scoped = 3 if abi >= 6 else 0
    attr = struct.pack("QQQ", handled, net, scoped)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _check(_libc.syscall(_LL_CREATE, attr, ctypes.c_size_t(size), ctypes.c_uint(0)), "landlock")

    def allow(path: str | Path, access: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # not on this machine: nothing to allow
        if not os.path.isdir(path):
            access &= _FILE_ONLY
        rule = struct.pack("=Qi", access & handled, fd)
        _check(_libc.syscall(_LL_ADD, ruleset, 1, rule, ctypes.c_uint(0)), f"landlock rule {path}")
        os.close(fd)

    stdlib = Path(os.__file__).parent
    allow(stdlib, _READ_DIR)  # the import system lists it
    for entry in _stdlib_entries():
        allow(entry, _READ_FILE | _READ_DIR)
    for folder in _shared_libraries():
        allow(folder, _READ_FILE | _READ_DIR)
    allow("/dev/null", _READ_FILE | _WRITE_FILE)
    allow("/dev/urandom", _READ_FILE)
    allow(workdir, _READ_FILE | _WRITE_FILE | _READ_DIR | _REMOVE_FILE | _REMOVE_DIR | _MAKE_REG | _TRUNCATE)
    _check(_libc.syscall(_LL_RESTRICT, ruleset, ctypes.c_uint(0)), "landlock")
    os.close(ruleset)
    return f"ABI {abi}"


# --- namespaces, uid, rlimits ----------------------------------------------------------------------------------------


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _namespaces(workdir: str) -> str:
    """User, mount, pid, net, ipc and uts namespaces; a small tmpfs over the working directory. Returns in the first
    process of the pid namespace: the caller's process stays behind and waits for it."""
    uid, gid = os.getuid(), os.getgid()
    spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    _check(_libc.unshare(spaces), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _libc.mount(None, b"/", None, ctypes.c_ulong(0x4000 | 0x4_0000), None)  # private, recursively; slaves will do
    options = b"size=16m,nr_inodes=300,mode=700"
    flags = ctypes.c_ulong(0x2 | 0x4 | 0x8)  # nosuid, nodev, noexec
    _check(_libc.mount(b"tmpfs", workdir.encode(), b"tmpfs", flags, options), "tmpfs")
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    return "user, mount, pid, net, ipc, uts"


def _drop_root(workdir: str) -> str:
    """Become `nobody`, if the standard library can still be read then. Raises OSError otherwise."""
    if os.getuid() != 0:
        raise OSError("not root: the trainer's own uid")
    pid = os.fork()
    if pid == 0:  # try it on a throw-away process: there is no way back
        try:
            os.setgroups([])
            os.setresgid(SPARE_UID, SPARE_UID, SPARE_UID)
            os.setresuid(SPARE_UID, SPARE_UID, SPARE_UID)
            ok = os.access(os.__file__, os.R_OK)
        except OSError:
            ok = False
        os._exit(0 if ok else 1)
    if os.waitpid(pid, 0)[1] != 0:
        raise OSError("the interpreter's library is readable by root only")
    os.chown(workdir, SPARE_UID, SPARE_UID)
    os.setgroups([])
    os.setresgid(SPARE_UID, SPARE_UID, SPARE_UID)
    os.setresuid(SPARE_UID, SPARE_UID, SPARE_UID)
    return f"uid {SPARE_UID}"


def _drop_capabilities() -> None:
    header = struct.pack("Ii", 0x2008_0522, 0)
    _check(_libc.syscall(_SYS_CAPSET[platform.machine()], header, struct.pack("6I", *(0,) * 6)), "capset")


_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


def _rlimits(memory_mb: int, output_bytes: int) -> None:
    def cap(which: int, value: int) -> None:
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))

    cap(resource.RLIMIT_AS, memory_mb << 20)
    cap(resource.RLIMIT_FSIZE, output_bytes)
    cap(resource.RLIMIT_CORE, 0)
    cap(resource.RLIMIT_NOFILE, 128)
    cap(resource.RLIMIT_STACK, 64 << 20)
    cap(resource.RLIMIT_MEMLOCK, 0)


def enclose(workdir: str, memory_mb: int, output_bytes: int, forbid: frozenset[str]) -> Layers:
    """Enter every layer that is entered once. May fork (pid namespace): returns in the process that is to serve.

    `forbid` names layers to leave off, for tests of the ladder ("namespaces", "landlock", "seccomp", "uid").
    """
    layers = Layers()

    def attempt(name: str, enter) -> None:
        if name in forbid:
            layers.missing[name] = "switched off"
            return
        try:
            layers.active[name] = enter() or ""
        except (OSError, KeyError, AttributeError, ValueError) as e:
            layers.missing[name] = str(e) if not isinstance(e, KeyError) else f"no table for {platform.machine()}"

    if IS_LINUX:
        attempt("no_new_privs", lambda: _prctl(PR_SET_NO_NEW_PRIVS, 1))
        attempt("uid", lambda: _drop_root(workdir))
        _prctl(PR_SET_DUMPABLE, 1)  # a change of uid cleared it, and the uid map could not be written
        attempt("namespaces", lambda: _namespaces(workdir))
        os.chdir(workdir)
        attempt("landlock", lambda: _landlock(workdir))
        attempt("seccomp", lambda: SeccompFilter(allow_open=True) and None)
        attempt("no_capabilities", _drop_capabilities)
        _prctl(PR_SET_DUMPABLE, 0)  # no ptrace, no /proc/PID/mem by a process of the same uid
    else:
        os.chdir(workdir)
        for name in ("namespaces", "landlock", "seccomp"):
            layers.missing[name] = f"not on {sys.platform}"
    attempt("rlimits", lambda: _rlimits(memory_mb, output_bytes))
    return layers


def limit_child(cpu_s: float, cannot_fork: bool) -> None:
    """In the child: the kernel's own CPU limit, a second above ours, in case nobody watches; and no processes of its
    own, unless the filter forbids them already (the kernel does not hold root to this limit)."""
    cap = int(cpu_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cap, cap))
    if not cannot_fork:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
