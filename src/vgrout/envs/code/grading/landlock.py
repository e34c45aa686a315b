"""Rules of landlock: which files a process may read and write.

Reference: landlock(7).
"""

import ctypes
import os
import struct
from pathlib import Path

from vgrout.envs.code.grading import kernel
from vgrout.envs.code.grading.stdlib import hidden_folders, loaded_libraries

SYS_LANDLOCK_CREATE_RULESET = 444  # the same numbers on every architecture
SYS_LANDLOCK_ADD_RULE = 445
SYS_LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1

# Rights to files: LANDLOCK_ACCESS_FS_…
EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
_REMOVE_DIR = 1 << 4
_REMOVE_FILE = 1 << 5
_MAKE_DIR = 1 << 7
_MAKE_REG = 1 << 8
_MAKE_SYM = 1 << 12
_REFER = 1 << 13  # moving from one folder into another
_TRUNCATE = 1 << 14
_RIGHTS_TO_A_FILE = EXECUTE | _WRITE_FILE | READ_FILE | _TRUNCATE  # a rule on a file has no other
_RIGHTS_TO_CWD = READ_FILE | _WRITE_FILE | _TRUNCATE | READ_DIR | _REMOVE_FILE | _REMOVE_DIR
_RIGHTS_TO_CWD |= _MAKE_REG | _MAKE_DIR | _MAKE_SYM | _REFER

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


def library_rules() -> dict[Path, int]:
    """What a child may read under the machine's own root → with which rights.

    That is the standard library, without site-packages (an installed package may carry answers),
    and the folders of the shared libraries in use. Of a folder that holds the standard library as
    well, only these libraries are readable.
    """
    stdlib = Path(os.__file__).parent
    entries = set(stdlib.iterdir()) - {*hidden_folders(stdlib)}
    real_stdlib = stdlib.resolve()
    libraries: set[Path] = set()
    for library in loaded_libraries():
        if real_stdlib in library.parents:
            continue
        holds_stdlib = real_stdlib.is_relative_to(library.parent)
        libraries.add(library if holds_stdlib else library.parent)
    rules = {stdlib: READ_DIR}  # the import system lists it
    for path in (*entries, *libraries):
        rules[path] = READ_FILE | READ_DIR
    return rules


def _create_ruleset(exempt: int) -> tuple[int, int, int]:
    """An empty ruleset, which refuses everything that the kernel knows but the `exempt` rights.

    Returns its descriptor, the rights to files that it refuses, and the version of the kernel's
    interface.
    """
    version = kernel.check(
        kernel.libc.syscall(
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
    ruleset = kernel.check(
        kernel.libc.syscall(
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
        result = kernel.libc.syscall(
            SYS_LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, ctypes.c_uint(0)
        )
        kernel.check(result, f"landlock rule {path}")
    os.close(fd)


def make_ruleset(readable: dict[Path, int], writable: str, exempt: int = 0) -> tuple[int, str]:
    """A landlock ruleset's descriptor, and the kernel's version of landlock.

    Nothing is restricted yet. `exempt`: rights that it never restricts.
    """
    ruleset, refused, version = _create_ruleset(exempt)
    for path, rights in readable.items():
        _allow_path(ruleset, path, rights & refused)
    _allow_path(ruleset, "/dev/null", (READ_FILE | _WRITE_FILE) & refused)
    _allow_path(ruleset, "/dev/urandom", READ_FILE & refused)
    _allow_path(ruleset, writable, _RIGHTS_TO_CWD & refused)
    return ruleset, f"ABI {version}"


def restrict_to(ruleset: int) -> None:
    """Hold this process to a ruleset for good, beside those that it is held to already."""
    result = kernel.libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(0))
    kernel.check(result, "landlock")
