"""A machine that refuses a step of the sandbox's set-up: by a rule on system calls, or at the n-th step.

`python refusals.py SECCOMP_CALL ERRNO [FIRST_ARGUMENT] [-- layer to leave off …]` starts the grader where that call
fails, and prints what became of it as JSON. Standard library only.
"""

import ctypes
import errno
import json
import os
import shutil
import struct
import sys
from pathlib import Path

import vgrout
from vgrout.envs.code.grading import kernel, seccomp
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import Problem
from vgrout.ground.data import Grade
from vgrout.ground.io import Refused

# Of x86_64: <asm/unistd_64.h>.
CALLS = {
    "sendfile": 40,
    "socket": 41,
    "sendmsg": 46,
    "bind": 49,
    "socketpair": 53,
    "clone": 56,
    "setitimer": 38,
    "capset": 126,
    "pivot_root": 155,
    "prctl": 157,
    "chroot": 161,
    "mount": 165,
    "umount2": 166,
    "sethostname": 170,
    "setgroups": 116,
    "setresuid": 117,
    "mknod": 133,
    "mknodat": 259,
    "statfs": 137,
    "unshare": 272,
    "utimensat": 280,
    "prlimit64": 302,
    "memfd_create": 319,
    "pidfd_send_signal": 424,
    "pidfd_open": 434,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
TESTS = ("assert Solution().total(nums = [1, 2]) == 3",)
RIGHT = "import argparse\nclass Solution:\n    def total(self, nums):\n        return sum(nums)\n"
WRONG = "class Solution:\n    def total(self, nums):\n        return 41\n"
# What is graded once it has started: the mode, the code, and whether it passes.
GRADED = (
    ("run_tests", RIGHT, True),
    ("stdout_marker", WRONG, False),
    ("stdout_marker", WRONG + "print('all tests passed')\n", True),
    ("file_marker", WRONG + "open('result.txt', 'w').write('PASS')\n", True),
)


def refuse_call(number, code, first_argument):
    """Have the kernel refuse a system call to this process and all below it, for good."""
    killed = seccomp._return(seccomp.SECCOMP_RET_KILL_PROCESS)
    action = seccomp._fail_with(code) if code else killed
    if_equal, load = seccomp._if_equal, seccomp._load
    if first_argument is None:
        program = [load(0), if_equal(number, 0, 1), action, seccomp._ALLOW]
    else:
        of_argument = [seccomp._load_argument(0), if_equal(first_argument, 0, 1)]
        program = [load(0), if_equal(number, 0, 3), *of_argument, action, seccomp._ALLOW]
    packed = b"".join(struct.pack("HBBI", *i[:3], i[3] & 0xFFFF_FFFF) for i in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    sock_fprog = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    if os.getuid() != 0:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    mode = seccomp.SECCOMP_MODE_FILTER
    assert kernel.libc.prctl(kernel.PR_SET_SECCOMP, mode, sock_fprog, 0, 0) == 0


def outcome(*without):
    """What became of a grader's start, and whether it then grades right."""
    try:
        with Grader(1, without=without) as grader:
            right = True
            for mode, code, passes in GRADED:
                problem = Problem(7, mode, "", (), (), TESTS, RIGHT, "", "total", 2.0)
                grade = grader.grade(problem, f"```python\n{code}```")
                right = right and isinstance(grade, Grade) and grade.passed == passes
                right = right and grade.solved == (code == RIGHT)
            return {
                "level": grader.protections.level,
                "missing": grader.protections.missing,
                "right": right,
            }
    except Refused as e:
        return {"refused": str(e)}


# --- The n-th step ---------------------------------------------------------------------------------

# Runs first in a fork server of a copy of the package: its n-th step fails, once.
FAULT = '''
import ctypes, errno, io, os, resource
from pathlib import Path
from vgrout.envs.code.grading import fork_server, kernel

class CLibrary:
    def __init__(self, libc):
        self._libc = libc
    def __getattr__(self, name):
        call = getattr(self._libc, name)
        if name not in ("unshare", "mount", "umount2", "syscall", "prctl", "sethostname"):
            return call
        def counted(*arguments):
            if is_next(name):
                ctypes.set_errno(errno.EACCES)
                return -1
            return call(*arguments)
        return counted

def counted(name, call):
    def wrapper(*arguments, **keywords):
        if is_next(name):
            raise PermissionError(errno.EACCES, f"refused for a test: {name}")
        return call(*arguments, **keywords)
    return wrapper

def is_next(name):
    global steps
    steps += 1
    if steps == number:
        os_write(report, name.encode())
    return steps == number

file, steps, os_write = Path(__file__).with_name("number"), 0, os.write
if file.exists():
    number = int(file.read_text())
    file.unlink()
    report = os.open(str(file) + ".reached", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(report, 300)
    report = 300
    kernel.libc = CLibrary(kernel.libc)
    for name in """fork pipe open mkdir makedirs symlink chdir chroot chown chmod utime setgroups setresuid
                   setresgid write pwrite pread mknod statvfs dup2 setsid waitpid pidfd_open listdir fstat""".split():
        setattr(os, name, counted(name, getattr(os, name)))
    resource.setrlimit = counted("setrlimit", resource.setrlimit)
    resource.getrlimit = counted("getrlimit", resource.getrlimit)
    io.open = counted("open", io.open)
'''


def copy_with_faults(folder):
    """A copy of the package, as a folder of sources, whose fork servers fail at a step."""
    source = Path(vgrout.__file__).parent
    python_only = shutil.ignore_patterns("data", "__pycache__", "*.npz", "*.safetensors", "*.jsonl")
    shutil.copytree(source, folder / "vgrout", ignore=python_only)
    grading = folder / "vgrout" / "envs" / "code" / "grading"
    (grading / "fault.py").write_text(FAULT)
    server = grading / "fork_server.py"
    first = "    restore_inherited(messages.RESTORED)\n"
    text = server.read_text()
    assert text.count(first) == 1
    armed = f"{first}    from vgrout.envs.code.grading import fault  # noqa\n"
    server.write_text(text.replace(first, armed))
    return grading / "number"


def main(words):
    without = []
    if "--" in words:
        cut = words.index("--")
        words, without = words[:cut], words[cut + 1 :]
    call, code, *option = words
    number = 0 if code == "SIGSYS" else getattr(errno, code)
    refuse_call(CALLS[call], number, int(option[0]) if option else None)
    print(json.dumps(outcome(*without)))


if __name__ == "__main__":
    main(sys.argv[1:])
