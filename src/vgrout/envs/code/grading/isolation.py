"""The layers of protection, over ctypes: namespaces, a root of its own, landlock, seccomp, rlimits, uid.

A fork server enters the namespaces once and builds one root there: a tmpfs with read-only binds of the interpreter's
library, so that there is no /proc, no other file, and no access time to write. What each child does for itself is
`Enclosure.enter`: an empty tmpfs as working directory, the uid, landlock, no capabilities, the CPU limit, and the
seccomp filter, which forbids what the fork server needs. A layer that the kernel refuses is reported with its reason,
and the next one is tried. References: landlock(7), seccomp(2), user_namespaces(7), pivot_root(2).
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
IS_LINUX = sys.platform == "linux"
SPARE_UID = 65534  # nobody, where the trainer is root

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 0x20, 0x1000
MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 0x4_0000, 2

# the child's end of its connection; high, so that no low descriptor is in its way
CONNECTION_FD = 120


class HalfWay(Exception):
    """The namespaces were entered and could not be furnished: start again without them."""


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {errno.errorcode.get(code, code)}")
    return result


def _prctl(option: int, a: int = 0, b: int = 0) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(a), ctypes.c_ulong(b), 0, 0), "prctl")


def die_with_parent(by: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that forked it dies. Elsewhere a closed pipe tells."""
    if IS_LINUX:
        _prctl(PR_SET_PDEATHSIG, by)


# --- seccomp
# ---------------------------------------------------------------------------------------------------------


def _numbers(table: str) -> dict[str, int]:
    return {name: int(number) for name, number in (entry.split("=") for entry in table.split())}


# What CPython needs to compute, print and use files of its own directory. Everything else is EPERM,
# so that a refused call is an ordinary exception. No sleep: it returns at once, and a program that
# waits spends CPU time instead. Nothing that one child could move and another one see: no pipe
# (inode numbers), no statx (mount numbers), no sysinfo, no CPU clock of another process, no
# getrusage (was a file in memory?), no lock or lease on a file, no futex but a private one (a
# shared one is found by its file's inode), no advice that throws a file out of memory, no queued
# signals (counted by user).
_X86_64 = _numbers(
    "read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12 "
    "rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17 pwrite64=18 readv=19 writev=20 "
    "access=21 sched_yield=24 mremap=25 madvise=28 dup=32 dup2=33 nanosleep=35 getitimer=36 alarm=37 "
    "setitimer=38 getpid=39 exit=60 kill=62 uname=63 fcntl=72 fsync=74 fdatasync=75 truncate=76 ftruncate=77 "
    "getdents=78 getcwd=79 rename=82 creat=85 unlink=87 readlink=89 umask=95 gettimeofday=96 getrlimit=97 "
    "times=100 getuid=102 getgid=104 geteuid=107 getegid=108 getppid=110 getpgrp=111 "
    "rt_sigpending=127 sigaltstack=131 gettid=186 time=201 futex=202 sched_getaffinity=204 getdents64=217 "
    "restart_syscall=219 clock_gettime=228 clock_getres=229 clock_nanosleep=230 exit_group=231 "
    "tgkill=234 openat=257 newfstatat=262 unlinkat=263 renameat=264 readlinkat=267 faccessat=269 "
    "set_robust_list=273 dup3=292 prlimit64=302 renameat2=316 getrandom=318 statx=332 rseq=334 "
    "clone3=435 openat2=437 faccessat2=439"
)
_AARCH64 = _numbers(
    "getcwd=17 dup=23 dup3=24 fcntl=25 ioctl=29 unlinkat=35 renameat=38 truncate=45 ftruncate=46 faccessat=48 "
    "openat=56 close=57 getdents64=61 lseek=62 read=63 write=64 readv=65 writev=66 pread64=67 "
    "pwrite64=68 readlinkat=78 newfstatat=79 fstat=80 fsync=82 fdatasync=83 exit=93 exit_group=94 futex=98 "
    "set_robust_list=99 nanosleep=101 getitimer=102 setitimer=103 clock_gettime=113 clock_getres=114 "
    "clock_nanosleep=115 sched_getaffinity=123 sched_yield=124 restart_syscall=128 kill=129 tgkill=131 "
    "sigaltstack=132 rt_sigaction=134 rt_sigprocmask=135 rt_sigpending=136 rt_sigreturn=139 times=153 uname=160 "
    "getrlimit=163 umask=166 gettimeofday=169 getpid=172 getppid=173 getuid=174 geteuid=175 "
    "getgid=176 getegid=177 gettid=178 brk=214 munmap=215 mremap=216 mmap=222 "
    "mprotect=226 madvise=233 prlimit64=261 renameat2=276 getrandom=278 statx=291 rseq=293 clone3=435 openat2=437 "
    "faccessat2=439"
)
_ARCH = {"x86_64": (0xC000_003E, _X86_64), "aarch64": (0xC000_00B7, _AARCH64)}
_OPENERS = ("open", "openat", "openat2", "creat", "truncate")

_LD, _JEQ, _JGE, _JSET, _JA, _RET = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
_Insn = tuple[int, int, int, int]  # code, jump if true, jump if false, constant
_ALLOW: _Insn = (_RET, 0, 0, 0x7FFF_0000)


def _fail(code: int) -> _Insn:
    return (_RET, 0, 0, 0x0005_0000 | code)


_EPERM = _fail(errno.EPERM)


def _arg(index: int, high: bool = False) -> _Insn:
    # little-endian halves of seccomp_data.args
    return (_LD, 0, 0, 16 + 8 * index + (4 if high else 0))


def _one_of(index: int, values: tuple[int, ...]) -> list[_Insn]:
    jumps = [(_JEQ, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_arg(index), *jumps, _EPERM, _ALLOW]


def _below(index: int, bound: int) -> list[_Insn]:
    return [_arg(index), (_JGE, 0, 1, bound), _EPERM]


# The connection is a socket, and its inode number is one of the machine's counters: no look at it,
# and no copy of it.
_NOT_CONNECTION: list[_Insn] = [_arg(0), (_JEQ, 0, 1, CONNECTION_FD), _EPERM]


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

    def __init__(self, may_open: bool) -> None:
        audit, numbers = _ARCH[platform.machine()]  # KeyError: no table for this machine
        pid = -1
        # the clocks of the system (0 … 11); a larger number is that of some process
        clock = [*_below(0, 16), _ALLOW]
        itself = _one_of(0, (pid,))
        special: dict[str, list[_Insn]] = {
            "kill": [*_below(1, 32), *itself],  # a real-time signal would be queued
            "tgkill": [*_below(2, 32), *itself],
            # F_DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC; no F_SETOWN, which sends signals
            # to others
            "fcntl": [*_NOT_CONNECTION, *_one_of(1, (0, 1, 2, 3, 4, 1030))],
            "clock_gettime": clock,
            "clock_getres": clock,
            "futex": [_arg(1), (_JSET, 1, 0, 128), _EPERM, _ALLOW],  # FUTEX_PRIVATE_FLAG
            "madvise": _one_of(2, (4, 8)),  # MADV_DONTNEED, MADV_FREE: malloc's
            "ioctl": _one_of(1, (0x5401, 0x5450, 0x5451)),  # TCGETS, FIONCLEX, FIOCLEX
            "prlimit64": [
                _arg(2),
                (_JEQ, 0, 3, 0),
                _arg(2, high=True),
                (_JEQ, 0, 1, 0),
                _ALLOW,
                _EPERM,
            ],
            **{name: [_fail(0)] for name in ("nanosleep", "clock_nanosleep", "fsync", "fdatasync")},
            **{name: [_fail(errno.ENOSYS)] for name in ("clone3", "openat2", "statx")},
            **{
                name: [*_NOT_CONNECTION, _ALLOW]
                for name in ("fstat", "newfstatat", "dup", "dup2", "dup3")
            },
        }
        if not may_open:
            special |= {name: [_EPERM] for name in _OPENERS}
        bodies = {nr: special.get(name, [_ALLOW]) for name, nr in numbers.items()}
        leaves: list[tuple[int, list[_Insn]]] = []
        for nr in range(max(bodies) + 2):
            body = bodies.get(nr, [_EPERM])
            if not leaves or leaves[-1][1] != body:
                leaves.append((nr, body))
        program = [
            (_LD, 0, 0, 4),  # architecture: another one has other numbers
            (_JEQ, 1, 0, audit),
            (_RET, 0, 0, 0x8000_0000),  # kill the process
            # syscall number; the x32 bit makes it larger than any in the tree, hence EPERM
            (_LD, 0, 0, 0),
            *_tree(leaves),
        ]
        self._pid_slots = [
            i for i, (code, _, _, k) in enumerate(program) if code == _JEQ and k == pid
        ]
        packed = b"".join(
            struct.pack("HBBI", code, jt, jf, k & 0xFFFF_FFFF) for code, jt, jf, k in program
        )
        self._code = ctypes.create_string_buffer(packed, len(packed))
        self._prog = ctypes.create_string_buffer(
            struct.pack("HxxxxxxQ", len(program), ctypes.addressof(self._code))
        )

    def install(self, pid: int) -> None:
        """Irrevocable for this process. `pid`: the only process that it may signal (itself)."""
        for slot in self._pid_slots:
            struct.pack_into("I", self._code, 8 * slot + 4, pid)
        _check(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(self._prog), 0, 0), "seccomp")


# --- landlock
# --------------------------------------------------------------------------------------------------------

_LL_CREATE, _LL_ADD, _LL_RESTRICT = 444, 445, 446
_EXEC, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << i for i in range(6))
_MAKE_REG, _TRUNCATE = 1 << 8, 1 << 14
_FILE_ONLY = _EXEC | _WRITE_FILE | _READ_FILE | _TRUNCATE
_ALL_FS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}


def _mapped() -> set[Path]:
    with open("/proc/self/maps") as maps:
        return {Path(line.split(maxsplit=5)[5].strip()) for line in maps if ".so" in line}


# What no answer needs of the standard library.
HIDDEN = (
    "site-packages dist-packages test idlelib lib2to3 ensurepip turtledemo tkinter distutils pydoc_data venv "
    "config-3* *.egg-info"
)


def _hidden(folder: Path) -> list[Path]:
    return [path for pattern in HIDDEN.split() for path in folder.glob(pattern)]


def _library_rules() -> dict[Path, int]:
    """What may be read under the machine's own root: the standard library without site-packages (an installed package
    may carry answers) and the folders of the shared libraries in use, or, if such a folder also holds the standard
    library, only these libraries."""
    stdlib = Path(os.__file__).parent
    rules = {stdlib: _READ_DIR}  # the import system lists it
    entries = set(stdlib.iterdir()) - {*_hidden(stdlib)}
    real = stdlib.resolve()
    libraries = {
        p if real.is_relative_to(p.parent) else p.parent for p in _mapped() if real not in p.parents
    }
    return rules | dict.fromkeys([*entries, *libraries], _READ_FILE | _READ_DIR)


def _shared_libraries() -> set[Path]:
    """Shared libraries that the standard library may need, found by loading its extension modules in a child process;
    those of the standard library's own folder left out."""
    stdlib = Path(os.__file__).resolve().parent
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            for module in sorted((stdlib / "lib-dynload").glob("*.so")):
                if "test" not in module.name:
                    with suppress(OSError):
                        ctypes.CDLL(str(module), mode=os.RTLD_LAZY)
            os.write(writer, "\n".join(map(str, _mapped())).encode()[: 1 << 16])
        os._exit(0)
    os.close(writer)
    with open(reader) as found:
        libraries = _mapped().union(map(Path, found.read().splitlines()))
    os.waitpid(pid, 0)
    return {path for path in libraries if stdlib not in path.parents}


def _ruleset(readable: dict[Path, int], writable: str, beside: int = 0) -> tuple[int, str]:
    """A landlock ruleset's descriptor, and the kernel's version of it. Nothing is restricted yet; what is `beside` it
    never will be."""
    abi = _check(_libc.syscall(_LL_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1)), "landlock")
    handled = _ALL_FS[min(abi, 5)] & ~beside
    net = 3 if abi >= 4 else 0
    scoped = 3 if abi >= 6 else 0
    attr = struct.pack("QQQ", handled, net, scoped)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _check(
        _libc.syscall(_LL_CREATE, attr, ctypes.c_size_t(size), ctypes.c_uint(0)), "landlock"
    )

    def allow(path: str | Path, access: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # not on this machine: nothing to allow
        if not os.path.isdir(path):
            access &= _FILE_ONLY
        if not access & handled:
            return os.close(fd)
        rule = struct.pack("=Qi", access & handled, fd)
        _check(_libc.syscall(_LL_ADD, ruleset, 1, rule, ctypes.c_uint(0)), f"landlock rule {path}")
        os.close(fd)

    for path, access in readable.items():
        allow(path, access)
    allow("/dev/null", _READ_FILE | _WRITE_FILE)
    allow("/dev/urandom", _READ_FILE)
    allow(
        writable,
        _READ_FILE | _WRITE_FILE | _READ_DIR | _REMOVE_FILE | _REMOVE_DIR | _MAKE_REG | _TRUNCATE,
    )
    return ruleset, f"ABI {abi}"


# --- namespaces and the root in them
# ---------------------------------------------------------------------------------

# a child's working directory in the root of its own; landlock's rule is on the folder above
ROOT_CWD = "/home/answer"
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    encoded = [None if x is None else os.fsencode(x) for x in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options) or None)
    _check(result, f"mount {target}")


def _unshare_with_ids() -> bool:
    """Enter new namespaces; True: the spare uid exists in them too, which only a root outside can arrange."""
    uid, gid = os.getuid(), os.getgid()
    spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    maps = Path(f"/proc/{os.getpid()}")
    reader, writer = os.pipe()
    helper = os.fork() if uid == 0 else 0
    if uid == 0 and helper == 0:  # stays outside, where it may still map two ids
        os.close(writer)
        try:
            if not os.read(reader, 1):
                os._exit(1)
            for which in ("gid_map", "uid_map"):
                (maps / which).write_text(f"0 0 1\n{SPARE_UID} {SPARE_UID} 1\n")
        except OSError:
            os._exit(1)
        os._exit(0)
    try:
        _check(_libc.unshare(spaces), "unshare")
        os.write(writer, b"x")
    finally:
        os.close(reader)
        os.close(writer)
        mapped = bool(helper) and os.waitpid(helper, 0)[1] == 0
    if mapped:
        os.setgroups([])
    else:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return mapped


def _bind(source: Path, root: str, names: tuple[str, ...] = ()) -> None:
    """Show a file or folder read-only under the same path below `root`; a file also under further names beside it."""
    target = f"{root}{source}"
    if source.is_dir():
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o644))
    # what is set outside cannot be taken away
    kept = os.statvfs(source).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount(str(source), target, None, MS_BIND)
    _mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)
    for name in names:
        with suppress(FileExistsError):
            os.symlink(source.name, os.path.join(os.path.dirname(target), name))


def _links_to(library: Path) -> tuple[str, ...]:
    """Names beside a shared library that lead to it: libz.so.1 for libz.so.1.2.13."""
    stem = library.name.split(".so")[0]
    beside = [
        n for n in os.listdir(library.parent) if n.startswith(f"{stem}.so") and n != library.name
    ]
    return tuple(
        n for n in beside if os.path.realpath(library.parent / n) == os.path.realpath(library)
    )


def _new_root(workdir: str, libraries: set[Path]) -> None:
    """Make a tmpfs the root, with nothing in it but the interpreter's library, two devices, and an empty folder."""
    os.umask(0o022)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", workdir, "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,nr_inodes=4000,mode=755")
    os.makedirs(f"{workdir}{ROOT_CWD}")
    # where /lib is a link to usr/lib, as the loader expects
    for top in ("bin", "lib", "lib32", "lib64", "sbin"):
        if os.path.islink(f"/{top}"):
            os.makedirs(f"{workdir}{os.path.realpath(f'/{top}')}", exist_ok=True)
            os.symlink(os.readlink(f"/{top}").lstrip("/"), f"{workdir}/{top}")
    folders = [Path(p) for p in sys.path if os.path.isdir(p)]
    folders = [p for p in folders if not any(p.is_relative_to(q) for q in folders if q != p)]
    for folder in folders:
        _bind(folder, workdir)
        # an installed package may carry answers
        for packages in filter(Path.is_dir, _hidden(folder)):
            _mount(
                "tmpfs", f"{workdir}{packages}", "tmpfs", MS_RDONLY | MS_NOSUID, "size=4k,mode=755"
            )
    for library in sorted(libraries):
        if not any(library.is_relative_to(p) for p in folders):
            _bind(library, workdir, _links_to(library))
    for device in ("/dev/null", "/dev/urandom"):
        _bind(Path(device), workdir)
    os.chdir(workdir)
    _check(_libc.syscall(_SYS_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    _mount(None, "/", None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _can_become(uid: int) -> bool:
    """Could this process still read the standard library as `uid`? Tried in a throw-away process, as it is final."""
    pid = os.fork()
    if pid == 0:
        try:
            _become(uid)
            ok = bool(Path(os.__file__).read_bytes())
        except OSError:
            ok = False
        os._exit(0 if ok else 1)
    return os.waitpid(pid, 0)[1] == 0


def _become(uid: int) -> None:
    if os.getuid() == 0:
        with suppress(PermissionError):  # where groups may not be set there are none of ours
            os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _drop_capabilities() -> None:
    header = struct.pack("Ii", 0x2008_0522, 0)
    _check(
        _libc.syscall(_SYS_CAPSET[platform.machine()], header, struct.pack("6I", *(0,) * 6)),
        "capset",
    )


_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


def _rlimits(memory_mb: int, output_bytes: int) -> None:
    cap_limit(resource.RLIMIT_AS, memory_mb << 20)
    cap_limit(resource.RLIMIT_FSIZE, output_bytes)
    cap_limit(resource.RLIMIT_CORE, 0)
    cap_limit(resource.RLIMIT_NOFILE, 128)
    cap_limit(resource.RLIMIT_STACK, 64 << 20)
    cap_limit(resource.RLIMIT_MEMLOCK, 0)


def cap_limit(which: int, value: int) -> None:
    """Lower a resource limit of this process, for good."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


# --- one fork server, its children
# -----------------------------------------------------------------------------------


@dataclass
class Enclosure:
    """The layers that a fork server has entered, and those that each of its children still has to enter."""

    active: dict[str, str] = field(default_factory=dict)  # layer → detail ("" if none)
    missing: dict[str, str] = field(default_factory=dict)  # layer → reason
    cwd: str = ""  # of a child
    fresh: bool = False  # the working directory is a new tmpfs for every child
    uid: int | None = None  # that a child takes on; None: it keeps the fork server's
    # of children that may open files, and may not
    filters: dict[bool, SeccompFilter] = field(default_factory=dict)
    _ruleset: int | None = None
    _last_pid: int | None = None

    @property
    def cannot_fork(self) -> bool:
        """The children: the seccomp filter forbids it."""
        return bool(self.filters)

    def renew(self) -> None:
        """Ahead of each child: an empty working directory, and the same pid as every child's."""
        if self.fresh:
            owner = "" if self.uid is None else f",uid={self.uid},gid={self.uid}"
            flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
            _mount("tmpfs", self.cwd, "tmpfs", flags, f"size=17m,nr_inodes=300,mode=700{owner}")
        else:
            os.mkdir(self.cwd, 0o700)
            if self.uid is not None:
                os.chown(self.cwd, self.uid, self.uid)
        if self._last_pid is not None:
            os.pwrite(self._last_pid, b"1", 0)

    def discard(self) -> None:
        """After each child. Raises OSError where the working directory is not a tmpfs and holds something."""
        if self.fresh:
            _check(_libc.umount2(self.cwd.encode(), MNT_DETACH), "umount")
        else:
            os.rmdir(self.cwd)

    def enter(self, cpu_s: float, may_open: bool) -> None:
        """In the child, irrevocably. may_open: the seccomp filter lets it open files."""
        os.chdir(self.cwd)
        if self.fresh:
            os.utime(".")  # made when the child before it ended
        # The kernel's own CPU limit, a second above the verifier's, in case nobody watches.
        cap = int(cpu_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cap, cap))
        if not self.cannot_fork:
            if self.fresh:
                # shared memory would outlive the child
                _check(_libc.unshare(CLONE_NEWIPC), "unshare")
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # the kernel does not hold root to it
        if self.uid is not None:
            _become(self.uid)
        if IS_LINUX:
            # there the kernel ends a child with its fork server
            if "namespaces" not in self.active:
                die_with_parent()
            rulesets = [] if self._ruleset is None else [self._ruleset]
            # That one is on the folder above the working directory. Outside of a root of its own
            # that can be written to: by a second one a child writes to its directory alone.
            if rulesets and not self.fresh:
                rulesets.append(_ruleset({}, self.cwd, _EXEC | _READ_FILE | _READ_DIR)[0])
            for ruleset in rulesets:
                _check(_libc.syscall(_LL_RESTRICT, ruleset, ctypes.c_uint(0)), "landlock")
            if "no_capabilities" in self.active:
                _drop_capabilities()
            _prctl(PR_SET_DUMPABLE, 0)  # no ptrace, no /proc/PID/mem by a process of the same uid
        os.closerange(3, CONNECTION_FD)
        os.closerange(CONNECTION_FD + 1, 256)
        if self.filters:
            self.filters[may_open].install(os.getpid())


def enclose(workdir: str, memory_mb: int, output_bytes: int, forbid: frozenset[str]) -> Enclosure:
    """Enter every layer that is entered once. May fork (pid namespace): returns in the process that is to serve.

    `forbid` names layers to leave off, for tests of the ladder ("namespaces", "landlock", "seccomp", "uid").
    """
    e = Enclosure(cwd=os.path.join(workdir, "cwd"))

    def attempt(name: str, enter) -> None:
        if name in forbid:
            e.missing[name] = "switched off"
            return
        try:
            e.active[name] = enter() or ""
        except (OSError, KeyError, AttributeError, ValueError) as error:
            e.missing[name] = (
                f"no table for {platform.machine()}" if isinstance(error, KeyError) else str(error)
            )

    spare_mapped = os.getuid() == 0

    def namespaces() -> str:
        nonlocal spare_mapped
        libraries = _shared_libraries()
        mapped = _unshare_with_ids()
        try:
            with suppress(OSError):
                e._last_pid = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC)
            _new_root(workdir, libraries)
            pid = os.fork()
        except (OSError, KeyError) as error:
            raise HalfWay(f"namespaces without a root of their own: {error}") from None
        if pid:
            die_with_parent()
            _, status = os.waitpid(pid, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        e.cwd, e.fresh, spare_mapped = ROOT_CWD, True, mapped
        _libc.sethostname(b"answer", 6)
        if e._last_pid is not None:
            try:
                os.pwrite(e._last_pid, b"1", 0)
            except OSError:
                e._last_pid = None
        return "user, mount with a root of its own, pid, net, ipc, uts"

    def uid() -> str:
        if os.getuid() != 0:
            raise OSError("not root: the trainer's own uid")
        if not spare_mapped:
            raise OSError("no second uid in this container")
        if not _can_become(SPARE_UID):
            raise OSError("the interpreter's library is readable by root only")
        e.uid = SPARE_UID
        return f"uid {SPARE_UID}"

    def landlock() -> str:
        # In a root of its own there is nothing that may not be read.
        readable = {Path("/"): _READ_FILE | _READ_DIR} if e.fresh else _library_rules()
        e._ruleset, detail = _ruleset(readable, os.path.dirname(e.cwd))
        return detail

    def seccomp() -> None:
        e.filters = {may_open: SeccompFilter(may_open) for may_open in (False, True)}

    if IS_LINUX:
        attempt("no_new_privs", lambda: _prctl(PR_SET_NO_NEW_PRIVS, 1))
        attempt("namespaces", namespaces)
        attempt("uid", uid)
        attempt("landlock", landlock)
        attempt("seccomp", seccomp)
        attempt("no_capabilities", lambda: None)
        die_with_parent()
        _prctl(PR_SET_DUMPABLE, 0)
    else:
        for name in ("namespaces", "landlock", "seccomp"):
            e.missing[name] = f"not on {sys.platform}"
    attempt("rlimits", lambda: _rlimits(memory_mb, output_bytes))
    return e
