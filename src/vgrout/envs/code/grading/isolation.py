"""The layers of protection around an answer, and the order in which they are entered.

The layers are namespaces with a root of their own (`namespaces`), landlock, seccomp, a uid without
rights, no capabilities, and rlimits.

A fork server enters the namespaces once (`enclose`) and builds a root of its own in them: a tmpfs
with read-only bind mounts of the interpreter's library. So a child finds no /proc, no other file,
and no access time that it could change. Each child then confines itself (`Enclosure.enter`): an
empty tmpfs as working directory, the CPU limit, the uid, landlock, no capabilities, and last the
seccomp filter, which forbids what the fork server needs. A layer that the kernel refuses is
reported with its reason, and the next one is tried. The child's layers are tried too, once, in
processes that are thrown away (`_rehearse`), so that no answer pays for one that cannot be entered.

Where there are neither namespaces nor landlock, a child of root gets another root by chroot: an
empty folder with two devices, from which nothing can be imported. So its fork server has imported
the whole library (`stdlib.import_library`).

References: credentials(7), capabilities(7), getrlimit(2), chroot(2).
"""

import os
import platform
import resource
import signal
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vgrout.envs.code.grading import kernel
from vgrout.envs.code.grading.landlock import (
    EXECUTE,
    READ_DIR,
    READ_FILE,
    library_rules,
    make_ruleset,
    restrict_to,
)
from vgrout.envs.code.grading.messages import CONNECTION_FD, CPU_EXTRA
from vgrout.envs.code.grading.namespaces import (
    CLONE_NEWIPC,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    ROOT_CWD,
    SPARE_UID,
    HalfWay,
    enter_new_root,
    mount,
    unmount,
    unshare_with_ids,
)
from vgrout.envs.code.grading.seccomp import SeccompFilter
from vgrout.envs.code.grading.stdlib import shared_libraries

MAX_FILES = 128  # that a child may have open
# A child's files have numbers below this.
_END_OF_FDS = 256


# Layers of which each bounds the files that a child can open. Without any, only seccomp can: it
# forbids the strict run to open files at all.
FILE_LAYERS = frozenset({"namespaces", "landlock", "chroot"})


class Unusable(Exception):
    """No child can be run here, in whatever layers: what it lacks, in one line."""


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

    def read_library() -> str:
        _become(uid)
        Path(os.__file__).read_bytes()
        return ""

    status, _ = kernel.in_throwaway(read_library)
    return status == 0


def _drop_capabilities() -> None:
    header = struct.pack("Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    kernel.check(kernel.libc.syscall(kernel.machine().capset, header, _NO_CAPABILITIES), "capset")


def cap_limit(which: int, value: int, for_good: bool = True) -> None:
    """Lower a resource limit of this process."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value if for_good else hard))


def _set_rlimits(memory_mb: int, output_bytes: int) -> str:
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
            # an answer may ask for a deeper stack, as many that recurse do, within its memory
            cap_limit(getattr(resource, f"RLIMIT_{name}"), value, for_good=name != "STACK")
        except (OSError, ValueError) as error:
            refused.append(f"RLIMIT_{name}: {error}")
    if refused:
        raise OSError("; ".join(refused))
    return ""


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
            mount("tmpfs", self.cwd, "tmpfs", flags, f"size=17m,nr_inodes=300,mode=700{owner}")
        else:
            os.mkdir(self.cwd, 0o700)
            if self.uid is not None:
                os.chown(self.cwd, self.uid, self.uid)
        if self.last_pid is not None:
            os.pwrite(self.last_pid, b"1", 0)

    def discard(self) -> None:
        """After each child. Raises OSError if the working directory, no tmpfs, is not empty."""
        if self.own_root:
            unmount(self.cwd)
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
            kernel.check(kernel.libc.unshare(CLONE_NEWIPC), "unshare")
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # the kernel does not hold root to it

    def _restrict(self) -> None:
        """Landlock, no capabilities, and no way in for other processes."""
        self.entering = "the end with its fork server"
        if not self.own_root:
            kernel.die_with_parent()  # in a pid namespace the kernel ends a child with its fork server
        if self.ruleset is not None:
            self.entering = "landlock"
            rulesets = [self.ruleset]
            # It grants writing in the folder above the working directory, which is read-only in a
            # root of its own and writable elsewhere: there a second ruleset grants the child its
            # working directory alone.
            if not self.own_root:
                may_read = EXECUTE | READ_FILE | READ_DIR
                rulesets.append(make_ruleset({}, self.cwd, exempt=may_read)[0])
            for ruleset in rulesets:
                restrict_to(ruleset)
        if "no_capabilities" in self.active:
            self.entering = "no_capabilities"
            _drop_capabilities()
        self.entering = "the lock against other processes"
        kernel.prctl(
            kernel.PR_SET_DUMPABLE, 0
        )  # no ptrace, no /proc/PID/mem by a process of the same uid


# --- The layers that are entered once, by a fork server ------------------------------------------


def _enter_namespaces(enclosure: Enclosure, workdir: str) -> str:
    """Enter the namespaces and a root of their own.

    Returns in the first process of the pid namespace; the process that called waits for that one
    and ends as it ends. Raises HalfWay if the namespaces were entered but could not be furnished.
    """
    # In a pid namespace a child has another pid than its verifier sees: a descriptor tells which.
    os.close(os.pidfd_open(os.getpid()))
    libraries = shared_libraries()
    both_mapped = unshare_with_ids()
    try:
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CLOEXEC
            enclosure.last_pid = os.open("/proc/sys/kernel/ns_last_pid", flags)
        enter_new_root(workdir, libraries)
        pid = os.fork()
    except (OSError, KeyError, ValueError, AttributeError) as error:
        raise HalfWay(f"namespaces without a root of their own: {error}") from None
    if pid:
        try:
            kernel.die_with_parent()
            _, status = os.waitpid(pid, 0)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # its end is seen by the verifier
            os._exit(1)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    enclosure.cwd = ROOT_CWD
    enclosure.own_root = True
    enclosure.spare_uid_exists = both_mapped
    try:
        kernel.check(kernel.libc.sethostname(b"answer", 6), "sethostname")
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
    everything = {Path("/"): READ_FILE | READ_DIR}
    readable = everything if enclosure.own_root else library_rules()
    enclosure.ruleset, version = make_ruleset(readable, os.path.dirname(enclosure.cwd))
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


def _prepare_seccomp(enclosure: Enclosure) -> str:
    """Make the filters, of which each child installs one."""
    enclosure.filters = {may_open: SeccompFilter(may_open) for may_open in (False, True)}
    return ""


def _forbid_new_privileges() -> str:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)  # no setuid program; landlock and seccomp want it
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

    attempt("no_new_privs", _forbid_new_privileges)
    attempt("namespaces", lambda: _enter_namespaces(enclosure, workdir))
    attempt("uid", lambda: _choose_uid(enclosure))
    attempt("landlock", lambda: _prepare_landlock(enclosure))
    if not FILE_LAYERS & enclosure.active.keys():
        attempt("chroot", lambda: _prepare_chroot(enclosure, workdir, forbid))
    attempt("seccomp", lambda: _prepare_seccomp(enclosure))
    attempt("no_capabilities", lambda: "")  # each child drops its own
    kernel.die_with_parent()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    attempt("rlimits", lambda: _set_rlimits(memory_mb, output_bytes))
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
        status, said = kernel.in_throwaway(enter, writer_fd=CONNECTION_FD)
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
