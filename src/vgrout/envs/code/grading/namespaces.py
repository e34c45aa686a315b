"""Namespaces, and a root of their own in which there is the interpreter's library and little else.

References: user_namespaces(7), mount_namespaces(7), pivot_root(2), mount(2).
"""

import ctypes
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vgrout.envs.code.grading import kernel
from vgrout.envs.code.grading.stdlib import hidden_folders

SPARE_UID = 65534  # nobody: the uid of children where the trainer is root

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

# A child's working directory in the root of its own. Landlock's rule is on the folder above, since
# each child has a new tmpfs mounted here.
ROOT_CWD = "/home/answer"
# The root holds mount points and links only.
_ROOT_OPTIONS = "size=4m,nr_inodes=4000,mode=755"
_EMPTY_FOLDER_OPTIONS = "size=4k,mode=755"


class HalfWay(Exception):
    """The namespaces were entered but could not be furnished: start again without them."""


def mount(
    source: str | None,
    target: str,
    kind: str | None,
    flags: int,
    options: str = "",
) -> None:
    encoded = [None if x is None else os.fsencode(x) for x in (source, target, kind)]
    result = kernel.libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options) or None)
    kernel.check(result, f"mount {target}")


def unmount(target: str) -> None:
    kernel.check(kernel.libc.umount2(os.fsencode(target), MNT_DETACH), "umount")


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


def unshare_with_ids() -> bool:
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
            kernel.check(kernel.libc.unshare(namespaces), "unshare")
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
    mount(str(source), target, None, MS_BIND)
    mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | outside)
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
        for hidden in hidden_folders(folder):
            # An installed package may carry answers: an empty folder is mounted over it.
            if hidden.is_dir():
                flags = MS_RDONLY | MS_NOSUID
                mount("tmpfs", f"{root}{hidden}", "tmpfs", flags, _EMPTY_FOLDER_OPTIONS)
    for library in sorted(shared_libraries):
        if not any(library.is_relative_to(folder) for folder in folders):
            _bind(library, root, _links_to(library))


def enter_new_root(workdir: str, shared_libraries: set[Path]) -> None:
    """Make a tmpfs the root: the interpreter's library, two devices, an empty folder, no more."""
    os.umask(0o022)
    mount(None, "/", None, MS_REC | MS_PRIVATE)  # no mount below is seen outside
    mount("tmpfs", workdir, "tmpfs", MS_NOSUID | MS_NODEV, _ROOT_OPTIONS)
    os.makedirs(f"{workdir}{ROOT_CWD}")
    _link_top_folders(workdir)
    _bind_library(workdir, shared_libraries)
    for device in ("/dev/null", "/dev/urandom"):
        _bind(Path(device), workdir)
    # The old root is stacked on the new one, and then detached: no path leads to it any more.
    os.chdir(workdir)
    kernel.check(kernel.libc.syscall(kernel.machine().pivot_root, b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")
    mount(None, "/", None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
