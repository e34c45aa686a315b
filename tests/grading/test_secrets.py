"""No secret is sent to a child, and nothing that one child learns reaches the next."""

import json
import marshal
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from quick import one_in
from vgrout.envs.code.grading.extract import MARKED
from vgrout.envs.code.grading.grade import Grader, Limits, as_request
from vgrout.envs.code.grading.messages import WorkerSettings
from vgrout.envs.code.grading.verdict import Verifier
from vgrout.envs.code.grading.watch import EndSession, ForkServerHandle
from vgrout.envs.code.modes import MODES, Problem

from .attacks import ALWAYS, SAY, method
from .conftest import SUM_WRONG, fenced, graded, sum_problem

# Numbers that stand nowhere else, so that they can be looked for in the bytes that a child is sent.
SECRETS = (918_273_645, 564_738_291, 192_837_465, 546_372_819, 819_546_273)
TESTS = tuple(f"assert Solution().total(nums = [{i}]) == {v}" for i, v in enumerate(SECRETS))
CANONICAL = (
    "class Solution:\n    def total(self, nums):\n        the_canonical_name = 1\n"
    f"        return {list(SECRETS)}[nums[0]]\n"
)
CODES = {
    "right": CANONICAL,
    "wrong": SUM_WRONG,
    "equals everything": method("return Yes()", ALWAYS),
    "empty tests": SUM_WRONG + "def run_tests(): pass\n",
    "tests": SUM_WRONG
    + "def run_tests():\n    for i in range(9): assert Solution().total([100 + i]) is not None\n",
    "asks": method("say('{\"reveal\": true}'); say('{\"values\": [1]}'); return 41", SAY),
}


def as_bytes(value):
    return json.dumps(
        value, default=lambda x: x.decode("latin-1") if isinstance(x, bytes) else repr(x)
    ).encode()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The fork servers of two workers."""
    folders = [str(tmp_path_factory.mktemp("work")) for _ in range(2)]
    servers = [
        ForkServerHandle(WorkerSettings(folder, 1.0, 512, 1 << 20, "")).start()
        for folder in folders
    ]
    yield servers[0], servers[1]
    for server in servers:
        server.close()


@pytest.mark.parametrize("mode", ["given_tests", *one_in(3, MODES[:-1])])
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_no_expected_value_and_no_canonical_solution_is_sent(two, mode, code, monkeypatch):
    """Reads everything that is sent to the children: their jobs, and every reply.

    Detector D's child, the last, is sent the canonical solution, and no expected value either.
    """
    sent = []
    kinds = []
    run = ForkServerHandle.run

    def recorded(self, job, limit, reply, **more):
        kinds.append(job.get("against", job["kind"]))
        if kinds[-1] == "canonical":
            assert job["canonical"] == [(MARKED, CANONICAL)]
            job = job | {"canonical": []}
        sent.append(marshal.dumps(job) + as_bytes(job))

        def recorded_reply(message):
            answer = reply(message)
            if answer is not None:
                sent.append(answer)
                if answer[:1] == b"(":  # marshalled
                    sent.append(as_bytes(marshal.loads(answer)))
            return answer

        return run(self, job, limit, recorded_reply, **more)

    monkeypatch.setattr(ForkServerHandle, "run", recorded)
    problem = Problem(7, mode, "", (), (), TESTS[:3], CANONICAL, "", "total", 1.0)
    if mode == "given_tests":
        problem = replace(problem, check_tests=TESTS[3:])
    own = code == CANONICAL  # an answer may know what it has found out itself
    Verifier(two[0]).grade(as_request(problem, fenced(code), True))
    assert len(sent) >= 2
    assert "canonical" not in kinds[:-1]
    for data in sent:
        if own:
            data = data.replace(CANONICAL.encode(), b"")
        for value in SECRETS:
            assert own or str(value).encode() not in data
            assert marshal.dumps(value) not in data
        assert own or b"the_canonical_name" not in data


def skip_below_level_3(server):
    if not server.active.keys() >= {"namespaces", "landlock", "seccomp"}:
        pytest.skip("not at level 3 here")


STDLIB = os.path.dirname(os.__file__)
# name → (what the first child does to say 1, what the second one reads)
CHANNELS = {
    "access time of a library file": (
        f"open({STDLIB + '/this.py'!r}).read() and __import__('this')",
        f"os.stat({STDLIB + '/this.py'!r}).st_atime_ns",
    ),
    "inode numbers of the working directory": (
        "[(open('x', 'w').close(), os.unlink('x')) for _ in range(100)]",
        "(open('y', 'w').close(), os.stat('y').st_ino)[1]",
    ),
    "inode numbers of folders": (
        "[os.mkdir(str(i)) for i in range(50)]",
        "(os.mkdir('y'), os.stat('y').st_ino, os.stat('.').st_nlink)",
    ),
    "a mode, a time and a lock of a library file": (
        f"[os.chmod({STDLIB + '/this.py'!r}, 0), os.utime({STDLIB + '/this.py'!r}, (1, 1))]",
        f"(os.stat({STDLIB + '/this.py'!r}).st_mode, os.stat({STDLIB + '/this.py'!r}).st_mtime_ns)",
    ),
    "limits": (
        "[__import__('resource').setrlimit(n, (9, 9)) for n in (0, 4, 7)]",
        "[__import__('resource').getrlimit(n) for n in range(16)]",
    ),
    "a file left in the working directory": ("open('left', 'w').write('1')", "os.listdir('.')"),
    "times of the working directory": (
        "open('x', 'w').close()",
        "os.stat('.').st_mtime_ns - os.stat('.').st_ctime_ns",
    ),
    "flags of open files": (
        "[fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK) for fd in (0, 1, 2)]",
        "[fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (0, 1, 2)]",
    ),
    "inode numbers of pipes": ("[os.pipe() for _ in range(40)]", "os.fstat(os.pipe()[0]).st_ino"),
    "inode number of the connection": ("[os.dup(0) for _ in range(40)]", "os.fstat(120).st_ino"),
    "process numbers": ("None", "(os.getpid(), os.getppid(), os.getsid(0))"),
    "mount numbers": ("None", "raw(332, -100, b'.', 0, 0x4000, ctypes.create_string_buffer(256))"),
    "the fork server's CPU clock": (
        "[0 for _ in range(300_000)]",
        "time.clock_gettime((~os.getppid() << 3) | 2)",
    ),
    "shared memory": ("libc.shmget(77, 4096, 0o1666)", "libc.shmget(77, 1, 0)"),
    "free memory and processes": (
        "bytearray(200 << 20)",
        "raw(99, ctypes.create_string_buffer(256))",
    ),
    "memory of the fork server": (
        "(open('result.txt', 'w').write('PASS' + 'leftover' * 99), print('leftover' * 99))",
        "sum(type(o) is bytes and b'left' + b'over' in o for o in gc.get_objects())",
    ),
    "a lock on a library file": (
        f"fcntl.flock(open({STDLIB + '/this.py'!r}), fcntl.LOCK_EX)",
        f"fcntl.flock(open({STDLIB + '/this.py'!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    ),
}
READER = """
import ctypes, fcntl, gc, os, time
libc = ctypes.CDLL(None, use_errno=True)
def raw(*a):
    done = libc.syscall(*a)
    return done if done else [bytes(x) for x in a if type(x) is not int and type(x) is not bytes]
class Solution:
    def total(self, nums):
        try: return repr(EXPRESSION)
        except Exception as e: return type(e).__name__
"""


def run_one(server, expression):
    """The value of the expression in a fresh child."""
    claims = []

    def reply(message):
        if "claims" in message:
            claims.extend(message["claims"])
            raise EndSession

    code = READER.replace("EXPRESSION", expression)
    call = marshal.dumps(("total", [[]], {}, False))
    job = {
        "kind": "strict",
        "program": [(0, code)],
        "called": (),
        "setup": b"",
        "test_function": "",
        "builders": [],
        "calls": [call],
    }
    server.run(job | {"kinds": ["plain"]}, 2.0, reply)
    return claims[0]


@pytest.mark.parametrize("channel", CHANNELS)
def test_no_bit_crosses_from_one_child_to_the_next(two, channel):
    """What the second child reads does not depend on what the first one did.

    It is read three times after each.
    """
    server = two[0]
    skip_below_level_3(server)
    write, read = CHANNELS[channel]
    seen = {bit: [] for bit in "01"}
    for _ in range(3):
        for bit in "01":
            run_one(server, write if bit == "1" else "None")
            seen[bit].append(run_one(server, read))
    assert len({*seen["0"], *seen["1"]}) == 1, seen


LIBRARY = f"os.open({STDLIB + '/this.py'!r}, 0)"
WAIT = "ctypes.byref((ctypes.c_long * 2)(1))"
SHARED = f"libc.mmap(None, 4096, 1, 1, {LIBRARY}, 0) + 8"
QUEUE = "[libc.syscall(234, os.getpid(), os.getpid(), 40) for _ in range(50_000)]"
BLOCK = "__import__('signal').pthread_sigmask(0, range(34, 64))"
LASTS = "[0 for _ in range(2_000_000)]"
# name → (what one worker's child does to say 1, what another one's reads meanwhile)
BESIDE = {
    "a shared futex on a library file": (
        f"libc.syscall(202, {SHARED}, 0, ctypes.c_uint.from_address({SHARED}).value, {WAIT})",
        f"max(libc.syscall(202, {SHARED}, 1, 9) for _ in range(2_000))",
    ),
    "signals queued by the user": (
        f"({BLOCK}, {QUEUE}, {LASTS})",
        f"({BLOCK}, {QUEUE}.count(0))[1]",
    ),
    "a lease on a library file": (
        f"(libc.fcntl({LIBRARY}, 1024, 0), {LASTS})",
        f"libc.fcntl({LIBRARY}, 1025)",
    ),
    "a lock on a library file": (
        f"(libc.flock({LIBRARY}, 6), {LASTS})",
        f"libc.flock({LIBRARY}, 6)",
    ),
    "a watch on a library file": (f"[{LIBRARY} for _ in range(99)]", "libc.inotify_init1(0)"),
    "an abstract socket": (f"(libc.socket(1, 1, 0), {LASTS})", "libc.socket(1, 1, 0)"),
    "a priority": (
        f"(libc.setpriority(2, os.getuid(), 10), {LASTS})",
        "libc.getpriority(2, os.getuid())",
    ),
}


@pytest.mark.parametrize("channel", BESIDE)
def test_no_bit_crosses_between_two_workers(two, channel):
    """Both children live at the same time."""
    skip_below_level_3(two[0])
    write, read = (
        f"(setattr(libc.mmap, 'restype', ctypes.c_long), {e})[1]" for e in BESIDE[channel]
    )
    seen = {bit: [] for bit in "01"}
    with ThreadPoolExecutor(1) as other:
        for _ in range(2):
            for bit in "01":
                done = other.submit(run_one, two[1], write if bit == "1" else "None")
                seen[bit].append(run_one(two[0], read))
                done.result()
    assert len({*seen["0"], *seen["1"]}) == 1, seen


LEAK = """
import ctypes, fcntl, os
class Solution:
    def total(self, nums):
        for look in (lambda: os.stat({path!r}).st_atime_ns % 10_000, lambda: len(os.listdir('.')),
                     lambda: fcntl.fcntl(0, fcntl.F_GETFL) & os.O_APPEND and 6):
            try:
                if look() in (6, 606): return 6
            except OSError: pass
        return 41
def keep(value):
    for leave in (lambda: os.utime({path!r}, ns=(value, value)), lambda: open('k', 'w').write(str(value)),
                  lambda: fcntl.fcntl(0, fcntl.F_SETFL, os.O_APPEND)):
        try: leave()
        except OSError: pass
def run_tests():
    for nums in ([1, 2, 3], [], [5], [-2, 2, 9, 11]): keep(Solution().total(nums))
"""


def test_the_same_text_is_wrong_the_second_and_the_third_time():
    """It is graded three times by one grader, and again by a fresh one.

    What its own tests could learn of the canonical solution does not last.
    """
    code = LEAK.replace("{path!r}", repr(f"{STDLIB}/this.py"))
    for _ in range(2):
        with Grader(1, limits=Limits(cpu_s=1.0)) as grader:
            for mode in ("run_tests", "eq_override", "sentinel"):
                assert not graded(grader, sum_problem(mode), code).solved


def test_a_child_sees_the_interpreters_library_and_nothing_else(two):
    server = two[0]
    if "namespaces" not in server.active:
        pytest.skip("no namespaces here")
    top = {STDLIB.split("/")[1], "dev", "home", "usr", "bin", "lib", "lib32", "lib64", "sbin"}
    assert set(eval(run_one(server, "os.listdir('/')"))) <= top
    assert eval(run_one(server, "sorted(os.listdir('/dev'))")) == ["null", "urandom"]
    for path in ("/proc", "/etc", "/tmp", "/sys", "/var", str(Path(__file__)), "/bin/sh"):
        assert run_one(server, f"os.stat({path!r})") == "FileNotFoundError"
    site = f"{STDLIB}/site-packages"
    if os.path.isdir(site):
        assert run_one(server, f"os.listdir({site!r})") == "[]"
    assert run_one(server, f"open({STDLIB + '/x'!r}, 'w')") in ("OSError", "PermissionError")
    assert run_one(server, "os.uname().nodename") == "'answer'"
    every_fd = "[fcntl.fcntl(fd, fcntl.F_GETFD) for fd in range(256)]"
    assert run_one(server, every_fd) == "OSError"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_child_of_root_is_not_root(two):
    if "uid" not in two[0].active:
        pytest.skip("the second uid is not to be had here")
    assert run_one(two[0], "(os.getuid(), os.geteuid(), os.getgid())") == "(65534, 65534, 65534)"


def test_a_child_has_no_capability_left(two):
    """Not even in its own namespace: it cannot mount, nor name its host."""
    for call in ("165, b'x', b'/home', b'tmpfs', 0, None", "170, b'x', 1"):
        assert run_one(two[0], f"libc.syscall({call})") == "-1"
