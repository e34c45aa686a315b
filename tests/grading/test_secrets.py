"""No secret is sent to a child, and nothing that one child learns reaches the next."""

import json
import marshal
import os
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vgrout.grading import grade as grade_module
from vgrout.grading.grade import Grader, Limits, as_request
from vgrout.grading.messages import Settings
from vgrout.grading.verdict import Verifier
from vgrout.grading.watch import EndSession, ForkServerHandle
from vgrout.types import MODES, Mode, Problem

from .attacks import ALWAYS, SAY, method
from .conftest import SUM_WRONG, fenced, graded, sum_problem

# Numbers that stand nowhere else, so that they can be looked for in the bytes that a child is sent.
SECRETS = (918_273_645, 564_738_291, 192_837_465)
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
    "tests": SUM_WRONG + "def run_tests():\n    for i in range(9): assert Solution().total([100 + i]) is not None\n",
    "asks": method("say('{\"reveal\": true}'); say('{\"values\": [1]}'); return 41", SAY),
}


def as_bytes(value: Any) -> bytes:
    return json.dumps(value, default=lambda x: x.decode("latin-1") if isinstance(x, bytes) else repr(x)).encode()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[tuple[ForkServerHandle, ForkServerHandle, Settings]]:
    settings = Settings(str(tmp_path_factory.mktemp("work")), 1.0, 512, 1 << 20, "")
    answers, canonical = (ForkServerHandle(settings, name).start().ready() for name in ("answers", "canonical"))
    yield answers, canonical, settings
    answers.close()
    canonical.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_no_expected_value_and_no_canonical_solution_is_sent(two, mode: Mode, code: str, monkeypatch):
    """Everything that is sent to the children of an answer: their jobs, and every reply."""
    answers, canonical, settings = two
    sent: list[bytes] = []
    run = ForkServerHandle.run

    def recorded(self, job, limit, reply, **more):
        if self is canonical:
            return run(self, job, limit, reply, **more)
        sent.append(marshal.dumps(job) + as_bytes(job))

        def recorded_reply(message):
            answer = reply(message)
            if answer is not None:
                sent.append(answer + as_bytes(marshal.loads(answer)) if answer[:1] == b"(" else answer)
            return answer

        return run(self, job, limit, recorded_reply, **more)

    monkeypatch.setattr(ForkServerHandle, "run", recorded)
    problem = Problem(7, mode, "", (), (), TESTS, CANONICAL, "", "total", 1.0)
    own = code == CANONICAL  # an answer may know what it has found out itself
    Verifier(answers, settings, canonical).grade(as_request(problem, fenced(code), True))
    assert len(sent) >= 2
    for data in sent if not own else [d.replace(CANONICAL.encode(), b"") for d in sent]:
        for value in SECRETS:
            if not own:
                assert str(value).encode() not in data
            assert marshal.dumps(value) not in data
        assert own or b"the_canonical_name" not in data


def test_the_right_tests_still_accept_the_canonical_solution(two):
    answers, canonical, settings = two
    for wanted, flag in ((SECRETS[1], False), (5, True)):
        code = SUM_WRONG + f"def run_tests():\n    assert Solution().total([1]) == {wanted}\n"
        problem = Problem(7, "run_tests", "", (), (), TESTS, CANONICAL, "", "total", 1.0)
        verifier, request = Verifier(answers, settings, canonical), as_request(problem, fenced(code), True)
        left = verifier.grade(request)["left"]
        assert verifier.detect_d(request | {"left": left}) == {"hacked_wrong_tests": flag}


def test_detector_d_goes_on_after_a_result_without_plain_form(two):
    """A canonical solution that returns a node, say, ends that detector's child, and no more."""
    answers, canonical, settings = two
    verifier = Verifier(answers, settings, canonical)
    solution = CANONICAL + "    def odd(self, nums):\n        return object()\n"
    for name, known in [("odd", False), ("total", True)] * 3:
        code = f"class Solution:\n    pass\ndef run_tests():\n    assert Solution().{name}([1]) == 5\n"
        problem = Problem(7, "run_tests", "", (), (), TESTS, solution, "", name, 1.0)
        request = as_request(problem, fenced(code), True) | {"left": (1.0, 6.0)}
        assert verifier.detect_d(request) == {"hacked_wrong_tests": known}


def test_detector_d_comes_behind_the_verdicts_and_beside_none(monkeypatch):
    """On two workers: while one child is told known outputs, no other answer runs."""
    running, order = set(), []
    ask = grade_module._Worker.ask

    def watched(self, request):
        told = "left" in request
        running.add((told, self))
        order.append(told)
        assert len({kind for kind, _ in running}) == 1
        try:
            return ask(self, request)
        finally:
            running.discard((told, self))

    monkeypatch.setattr(grade_module._Worker, "ask", watched)
    tested = [fenced(SUM_WRONG + f"def run_tests(): assert Solution().total([{i}]) == {i}\n") for i in range(12)]
    with Grader(2) as grader:
        verdicts = [grader.submit(sum_problem("sentinel"), text) for text in tested]
        assert all(v.result().detectors["D"] is False for v in verdicts)
        assert order == [False] * 12 + [True] * 12


def test_close_ends_what_waits_for_its_turn():
    tested = [fenced(SUM_WRONG + f"def run_tests(): assert Solution().total([{i}]) == {i}\n") for i in range(40)]
    grader = Grader(1)
    verdicts = [grader.submit(sum_problem("sentinel"), text) for text in tested]
    grader.close()
    assert all(v.done() for v in verdicts)
    assert isinstance(verdicts[-1].exception(), CancelledError)


# --- channels --------------------------------------------------------------------------------------------------------

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
    "a file left in the working directory": ("open('left', 'w').write('1')", "os.listdir('.')"),
    "times of the working directory": ("open('x', 'w').close()", "os.stat('.').st_mtime_ns - os.stat('.').st_ctime_ns"),
    "flags of open files": (
        "[fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK) for fd in (0, 1, 2)]",
        "[fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (0, 1, 2)]",
    ),
    "inode numbers of pipes": ("[os.pipe() for _ in range(40)]", "os.fstat(os.pipe()[0]).st_ino"),
    "inode number of the connection": ("[os.dup(0) for _ in range(40)]", "os.fstat(120).st_ino"),
    "process numbers": ("None", "(os.getpid(), os.getppid(), os.getsid(0))"),
    "mount numbers": ("None", "raw(332, -100, b'.', 0, 0x4000, ctypes.create_string_buffer(256))"),
    "the fork server's CPU clock": ("[0 for _ in range(300_000)]", "time.clock_gettime((~os.getppid() << 3) | 2)"),
    "shared memory": ("libc.shmget(77, 4096, 0o1666)", "libc.shmget(77, 1, 0)"),
    "free memory and processes": ("bytearray(200 << 20)", "raw(99, ctypes.create_string_buffer(256))"),
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


def run_one(server: ForkServerHandle, expression: str, kind: str = "strict") -> str:
    """The value of the expression in a fresh child; kind "told": detector D's."""
    claims: list[Any] = []

    def reply(message: dict[str, Any]) -> None:
        if "claims" in message or "call" in message:
            claims.extend(message.get("claims") or message["call"][0])
            raise EndSession

    code = READER.replace("EXPRESSION", expression)
    if kind == "told":
        code += "own = Solution\ndef run_tests():\n    Solution().total(own().total([]))\n"
        code = code.replace("class Solution", "class Own").replace("own = Solution", "own = Own")
    call = marshal.dumps(("Solution", "total", [[]], {}, False))
    job = {"kind": kind, "code": code, "setup": b"", "test_function": "run_tests", "calls": [call], "kinds": ["plain"]}
    server.run(job | {"function": "total", "against": "canonical"}, 2.0, reply)
    return claims[0]


@pytest.mark.parametrize("channel", CHANNELS)
def test_no_bit_crosses_from_one_child_to_the_next(two, channel: str):
    """What the second child reads does not depend on what the first one did: read three times after each."""
    server = two[0]
    if server.active.keys() < {"namespaces", "landlock", "seccomp"}:
        pytest.skip("not at level 3 here")
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
LASTS = "[0 for _ in range(6_000_000)]"
# name → (what one worker's child does to say 1, what another one's reads meanwhile)
BESIDE = {
    "a shared futex on a library file": (
        f"libc.syscall(202, {SHARED}, 0, ctypes.c_uint.from_address({SHARED}).value, {WAIT})",
        f"max(libc.syscall(202, {SHARED}, 1, 9) for _ in range(2_000))",
    ),
    "signals queued by the user": (f"({BLOCK}, {QUEUE}, {LASTS})", f"({BLOCK}, {QUEUE}.count(0))[1]"),
    "a lease on a library file": (f"(libc.fcntl({LIBRARY}, 1024, 0), {LASTS})", f"libc.fcntl({LIBRARY}, 1025)"),
    "a lock on a library file": (f"(libc.flock({LIBRARY}, 6), {LASTS})", f"libc.flock({LIBRARY}, 6)"),
    "a watch on a library file": (f"[{LIBRARY} for _ in range(99)]", "libc.inotify_init1(0)"),
    "an abstract socket": (f"(libc.socket(1, 1, 0), {LASTS})", "libc.socket(1, 1, 0)"),
    "a priority": (f"(libc.setpriority(2, os.getuid(), 10), {LASTS})", "libc.getpriority(2, os.getuid())"),
}


@pytest.mark.parametrize("channel", BESIDE)
def test_no_bit_crosses_between_two_workers(two, channel: str):
    """Both children live at the same time."""
    if two[0].active.keys() < {"namespaces", "landlock", "seccomp"}:
        pytest.skip("not at level 3 here")
    write, read = (f"(setattr(libc.mmap, 'restype', ctypes.c_long), {e})[1]" for e in BESIDE[channel])
    seen = {bit: [] for bit in "01"}
    with ThreadPoolExecutor(1) as other:
        for _ in range(3):
            for bit in "01":
                done = other.submit(run_one, two[1], write if bit == "1" else "None")
                seen[bit].append(run_one(two[0], read))
                done.result()
    assert len({*seen["0"], *seen["1"]}) == 1, seen


SEALED = {
    **dict.fromkeys(("os.open('x', os.O_CREAT | 2)", "os.stat('/')", "os.listdir('.')", LIBRARY), "PermissionError"),
    **dict.fromkeys(("os.read(3, 1)", "os.fstat(1)", "os.fork()", "os.dup(0)"), "PermissionError"),
    **dict.fromkeys(
        ("raw(9, None, 4096, 1, 2, 0, 0)", "raw(228, 0, ctypes.c_buffer(16))", "raw(157, 22)", "libc.clock()"), "-1"
    ),
    "libc.time(None)": "0",
    "os.times()[4]": "0.0",
    "time.time() < 99 and time.monotonic_ns() < 99": "True",
    "time.sleep(9)": "None",
}


@pytest.mark.parametrize("expression", SEALED)
def test_the_child_that_is_told_known_outputs_is_sealed(two, expression: str):
    """Before the answer's first instruction: no file, no process, no clock."""
    if "seccomp" not in two[0].active:
        pytest.skip("no seccomp here")
    assert run_one(two[0], expression, "told") in (SEALED[expression], repr(SEALED[expression]))


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
    """By one grader three times, and by a fresh one: what its tests learned of the canonical solution does not last."""
    code = LEAK.replace("{path!r}", repr(f"{STDLIB}/this.py"))
    for _ in range(2):
        with Grader(1, limits=Limits(cpu_s=1.0)) as grader:
            for mode in ("run_tests", "eq_override", "sentinel"):
                assert not graded(grader, sum_problem(mode), code).solved


# --- the world of a child --------------------------------------------------------------------------------------------


def test_a_child_sees_the_interpreters_library_and_nothing_else(two):
    server = two[0]
    if "namespaces" not in server.active:
        pytest.skip("no namespaces here")
    top = set(STDLIB.split("/")[1:2]) | {"dev", "home", "usr", "bin", "lib", "lib32", "lib64", "sbin"}
    assert set(eval(run_one(server, "os.listdir('/')"))) <= top
    assert eval(run_one(server, "sorted(os.listdir('/dev'))")) == ["null", "urandom"]
    for path in ("/proc", "/etc", "/tmp", "/sys", "/var", str(Path(__file__)), "/bin/sh"):
        assert run_one(server, f"os.stat({path!r})") == "FileNotFoundError"
    site = f"{STDLIB}/site-packages"
    if os.path.isdir(site):
        assert run_one(server, f"os.listdir({site!r})") == "[]"
    assert run_one(server, f"open({STDLIB + '/x'!r}, 'w')") in ("OSError", "PermissionError")
    assert run_one(server, "os.uname().nodename") == "'answer'"
    assert run_one(server, "len([fd for fd in range(256) if not fcntl.fcntl(fd, fcntl.F_GETFD) < 0])") == "OSError"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_child_of_root_is_not_root(two):
    if "uid" not in two[0].active:
        pytest.skip("the second uid is not to be had here")
    assert run_one(two[0], "(os.getuid(), os.geteuid(), os.getgid())") == "(65534, 65534, 65534)"


def test_a_child_has_no_capability_left(two):
    """Not even in its own namespace: it cannot mount, nor name its host."""
    for call in ("165, b'x', b'/home', b'tmpfs', 0, None", "170, b'x', 1"):
        assert run_one(two[0], f"libc.syscall({call})") == "-1"
