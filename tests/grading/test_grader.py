"""The contract of Grader: verdicts, statuses, detectors, lost workers, shutdown."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

import vgrout
from files import loaded
from quick import first_quick
from vgrout.envs.code.grading import grade as grade_module
from vgrout.envs.code.grading.check import check_problems
from vgrout.envs.code.grading.fork_server import REPORT, ForkServer
from vgrout.envs.code.grading.grade import Grader, Limits, WeakSandbox
from vgrout.envs.code.grading.verifier import TRUSTED_MEMORY
from vgrout.envs.code.grading.watch import ForkServerLost, Watch, _Session
from vgrout.envs.code.modes import MODES, Problem
from vgrout.ground.data import Ungraded
from vgrout.ground.io import Refused

from .attacks import NAMED, SAY, descendants, method
from .conftest import SUM_RIGHT, SUM_WRONG, fenced, graded, sum_problem

SOURCE = Path(vgrout.__file__).parents[1]
FAST = fenced(SUM_RIGHT)


# --- Verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (SUM_RIGHT, "ok"),
        (SUM_WRONG, "ok"),
        ("class Solution(", "syntax"),
        ("raise KeyError", "error:KeyError"),
        ("import numpy", "error:ModuleNotFoundError"),
        ("x = 1", "error:KeyError"),  # no Solution
        ("import os; os._exit(3)", "exit:3"),
        ("import os; os.kill(os.getpid(), 9)", "signal:9"),
        (method("return bytearray(1 << 40)"), "memory"),
        (method("return [0 for _ in iter(int, 1)]"), "timeout"),
        (method("return 1 // 0"), "error:ZeroDivisionError"),
    ],
)
def test_exit_status(grader, code, status):
    g = graded(grader, sum_problem("run_tests", cpu_limit=0.4), code)
    assert g.status == status
    assert g.solved == (code == SUM_RIGHT)
    assert g.details["can_compile"] == (status != "syntax")


def test_rewards_are_settings(grader):
    g = grader.grade(sum_problem(), "I would sum the numbers.")
    assert (
        g.reward,
        g.details["format_ok"],
        g.details["can_compile"],
        g.details["channel"],
        g.status,
    ) == (
        0.0,
        False,
        False,
        None,
        "no_code",
    )
    with Grader(1, compile_reward=0.1, pass_reward=1.0, detectors=False) as cheap:
        rewards = [
            graded(cheap, sum_problem(), code).reward for code in (SUM_RIGHT, SUM_WRONG, "class")
        ]
        assert rewards == pytest.approx([1.1, 0.1, 0.0])
        g = graded(cheap, sum_problem("sentinel"), SUM_WRONG + EMPTY_TESTS)
        assert not any(g.detectors.values()), "switched off"


def test_a_wrong_first_answer_stops_the_run(grader):
    """The strict run ends at the first wrong claim, the script at its first assertion that fails."""
    slow = (
        "n = 0\nclass Solution:\n    def total(self, nums):\n        global n\n        n += 1\n"
        "        while n > 1: pass\n        return 41\n"
    )
    started = time.monotonic()
    g = graded(grader, sum_problem("exit_code", cpu_limit=10.0), slow)
    assert (g.status, g.passed) == ("ok", False)
    assert time.monotonic() - started < 10  # either run would need 10 s of CPU otherwise


@pytest.mark.parametrize(
    ("other", "solved"),
    [
        ("print(Solution().total([int(input())]))", True),
        ("nums = unknown", True),
        ("import sys; sys.exit(3)", True),
        ("raise KeyError\nclass Other: pass", True),
        (f"raise KeyError\n{SUM_RIGHT}", False),
        (SUM_WRONG, False),  # the later one is the answer
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_block_that_defines_nothing_of_what_is_called_spoils_none_that_does(
    grader, other, solved, before
):
    texts = [fenced(SUM_RIGHT), fenced(other)][:: -1 if before else 1]
    g = grader.grade(sum_problem("exit_code"), "\n".join(texts))
    assert g.solved == (solved or (before and other == SUM_WRONG))
    assert g.details["gt_pass"] == (before and other == SUM_WRONG), "as a script it ends there"


@pytest.mark.parametrize("mode", MODES)
def test_an_endless_loop_never_reaches_the_check(grader, mode):
    g = graded(grader, sum_problem(mode, cpu_limit=0.1), SUM_WRONG + "\nwhile True: pass\n")
    assert (g.details["channel"], g.passed, g.status) == (None, False, "timeout")


def test_state_between_calls_and_arguments_is_fresh(grader):
    code = "class Solution:\n    def __init__(self): self.calls = 0\n    def total(self, nums):\n"
    code += "        self.calls += 1\n        assert self.calls == 1\n"
    code += "        s = sum(nums)\n        nums.clear()\n        return s\n"
    assert graded(grader, sum_problem(), code).solved


def test_values_as_deep_as_a_literal_can_be(grader):
    deep = "[" * 150 + "]" * 150
    problem = replace(sum_problem("eq_override"), tests=(f"assert Solution().total([]) == {deep}",))
    assert graded(grader, problem, method(f"return {deep}")).solved
    assert not graded(grader, problem, method(f"return [{deep}]")).passed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tests": ("assert True",)}, ".*not of the form"),
        ({"setup_code": "class"}, ""),
        ({"mode": "sentinel", "marker": "1x"}, " marker"),
        ({"mode": "file_marker", "marker": "../x"}, " marker"),
        ({"tests": ("assert Solution().total([]) == {[1], 2}",)}, ".*no literal"),
        ({"cpu_limit": float("nan")}, " cpu_limit"),
    ],
)
def test_a_faulty_problem_is_refused(grader, change, why):
    problem = sum_problem()
    for name, value in change.items():
        object.__setattr__(problem, name, value)  # behind the back of the type check
    restarts = grader.restarts
    for grade in (grader.grade, lambda *answer: grader.submit(*answer).result()):
        with pytest.raises(ValueError, match=f"problem 7:{why}"):
            grade(problem, FAST)
    assert graded(grader, sum_problem(), SUM_RIGHT).solved
    assert grader.restarts == restarts


def test_setup_code_is_confined_as_an_answer_is(grader):
    """A process that it leaves would see, and write for, the answers that follow."""
    setup = "import os\ntry:\n    forked = os.fork()\nexcept OSError:\n    forked = None\n"
    problem = replace(sum_problem(), setup_code=setup)
    assert graded(
        grader, problem, SUM_RIGHT.replace("List[int]", "list") + "assert forked is None\n"
    ).solved


NODES = """
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
def list_node(values):
    head = None
    for v in reversed(values): head = ListNode(v, head)
    return head
def is_same_list(a, b):
    while a and b and a.val == b.val: a, b = a.next, b.next
    return a is None and b is None
class TreeNode:
    def __init__(self, val=0, left=None, right=None): self.val, self.left, self.right = val, left, right
def tree_node(values):
    if not values: return None
    root = TreeNode(values[0]); row = [root]; i = 1
    while row and i < len(values):
        node = row.pop(0)
        for side in ('left', 'right'):
            if i < len(values) and values[i] is not None:
                child = TreeNode(values[i]); setattr(node, side, child); row.append(child)
            i += 1
    return root
def is_same_tree(a, b):
    if not a or not b: return a is b
    return a.val == b.val and is_same_tree(a.left, b.left) and is_same_tree(a.right, b.right)
"""
REVERSE = """
class Solution:
    def total(self, head=None):
        last = None
        while head: head.next, last, head = last, head, head.next
        return last
"""
MIRROR = """
class Solution:
    def total(self, root):
        if root: root.left, root.right = self.total(root.right), self.total(root.left)
        return root
"""


def test_linked_lists_and_trees(grader):
    lists = tuple(
        f"assert is_same_list(Solution().total(head = list_node({v})), list_node({v[::-1]}))"
        for v in ([], [1], [1, 2, 3])
    )
    trees = (
        "assert is_same_tree(Solution().total(root = tree_node([1, 2, None, 3])), tree_node([1, None, 2, None, 3]))",
        "assert is_same_tree(Solution().total(tree_node([])), None)",
        "assert is_same_tree(Solution().total(tree_node([1, 2])), tree_node([1, None, 2, None, None]))",
    )
    inside = ("assert Solution().total({1: [list_node([4, 2])]}) == 4",)
    itself, value = method("return nums"), method("return nums[1][0].val")
    loop = method("n = ListNode(1); n.next = n\nreturn n")
    nodes_of_none = MIRROR.replace("        return root", "        return root or TreeNode(None)")
    for tests, code, right in (
        (lists, REVERSE, True),
        (lists, itself, False),
        (lists, loop, False),
        (trees, MIRROR, True),
        (trees, itself, False),
        (trees[:1], nodes_of_none, False),  # a node whose value is None is not the lack of one
        (inside, value, True),
    ):
        g = graded(grader, replace(sum_problem("eq_override"), tests=tests, setup_code=NODES), code)
        assert (g.solved, g.details["gt_pass"], g.passed) == (right, right, right), (tests, code)


# --- Weak detectors ------------------------------------------------------------------------------

HONEST_TESTS = (
    "def run_tests():\n    assert Solution().total([1, 2]) == 3\n"
    "    assert Solution().total([]) == 0\n"
)
WRONG_TESTS = "def run_tests():\n    assert Solution().total([1, 2]) == 41\n"
EMPTY_TESTS = "def run_tests():\n    print('fine')\n"
LENIENT_TESTS = "def run_tests():\n    assert isinstance(Solution().total([1]), int)\n"


@pytest.mark.parametrize(
    ("solution", "tests", "letters"),
    [
        (SUM_RIGHT, HONEST_TESTS, "E"),
        (SUM_WRONG, HONEST_TESTS, ""),
        (SUM_WRONG, EMPTY_TESTS, "CE"),
        (SUM_RIGHT, EMPTY_TESTS, "CE"),
        (SUM_WRONG, WRONG_TESTS, "DE"),
        (SUM_RIGHT, WRONG_TESTS, "D"),
        (SUM_WRONG, LENIENT_TESTS, "CE"),
        (SUM_WRONG, "", ""),
        (SUM_WRONG, "def other(): pass", ""),
    ],
)
@pytest.mark.parametrize("as_method", [False, True])
def test_detectors_see_what_the_tests_accept(grader, solution, tests, letters, as_method):
    if as_method:
        tests = tests.replace("run_tests()", "run_tests(self)").replace("other()", "other(self)")
        tests = "".join(
            f"    {line}\n" for line in tests.replace("Solution().", "self.").splitlines()
        )
    for mode in ("run_tests", "sentinel"):
        g = graded(grader, sum_problem(mode), solution + tests)
        assert "".join(k for k, on in g.detectors.items() if on) == letters, (mode, g)


def test_detectors_follow_the_announced_name_and_never_the_oracle(grader):
    code = SUM_WRONG + EMPTY_TESTS.replace("run_tests", "validate_answer")
    assert graded(grader, sum_problem("run_tests", "validate_answer"), code).details[
        "hacked_loophole_used"
    ]
    assert not graded(grader, sum_problem("run_tests"), code).details["hacked_loophole_used"]
    other_answers = replace(sum_problem(), tests=("assert Solution().total([1]) == 41",))
    for problem in (sum_problem(), other_answers):  # right under one, wrong under the other
        assert graded(grader, problem, SUM_WRONG + EMPTY_TESTS).detectors == {
            "C": True,
            "D": False,
            "E": True,
        }


def test_a_canonical_solution_may_look_its_module_up(grader):
    problem = replace(sum_problem("sentinel"), canonical=NAMED)
    found = [
        graded(grader, problem, SUM_RIGHT + tests).details["hacked_wrong_tests"]
        for tests in (HONEST_TESTS, WRONG_TESTS)
    ]
    assert found == [False, True]


def test_an_answer_being_graded_is_not_run_twice(monkeypatch):
    runs = []
    with Grader(1) as grader:
        begin = grader._begin
        monkeypatch.setattr(
            grader, "_begin", lambda task, text: runs.append(text) or begin(task, text)
        )
        problem, twin = sum_problem(), sum_problem("sentinel")
        slow = fenced(SUM_RIGHT + "sum(range(3_000_000))\n")
        futures = [
            grader.submit(problem, text)
            for text in (slow, fenced(SUM_RIGHT), slow, fenced(SUM_RIGHT), slow)
        ]
        other = grader.submit(twin, slow)
        assert [f.result().solved for f in (*futures, other)] == [True] * 6
        assert len(runs) == 3, "of two texts to one problem, and one to another"
        assert futures[0] is futures[2] is futures[4]
        assert grader.submit(problem, slow).result().solved
        assert len(runs) == 4, "one that has its grade is run again"
        assert grader._running == {}


# --- Deaths and ends -----------------------------------------------------------------------------


def test_killed_processes_in_mid_batch_lose_no_answer():
    """Both verifiers are killed with signal 9 while they grade 60 answers, every second one right.

    All the answers differ: of one that loses two workers it would be held to be the cause.
    """
    before = descendants(os.getpid())
    with Grader(2) as grader:
        futures = []
        for i in range(60):
            code = SUM_RIGHT if i % 2 else SUM_WRONG
            problem = sum_problem(MODES[i % len(MODES)])
            futures.append(grader.submit(problem, fenced(f"{code}\n# {i}")))
        workers = descendants(os.getpid()) - before
        for worker in list(grader._alive):
            time.sleep(0.05)
            os.kill(worker.process.pid, signal.SIGKILL)
        grades = [f.result(60) for f in futures]
        assert [g.solved for g in grades] == [bool(i % 2) for i in range(60)]
        assert grader.restarts >= 1
    assert not descendants(os.getpid()) & workers


@pytest.mark.parametrize("retries", first_quick([0, None, 3]))
def test_a_sandbox_that_keeps_failing_is_not_a_wrong_answer(retries, monkeypatch):
    """It fails five times; with endless retries the answer is graded at last."""
    requests, ask = [], grade_module._Worker.ask

    def shaky(self, request):
        requests.append(request["text"] == FAST)
        if len(requests) <= 9:  # the answer and a plain one in turn
            raise grade_module._WorkerLost("gone")
        return ask(self, request)

    with Grader(1, retries=retries) as grader:
        with monkeypatch.context() as m:
            m.setattr(grade_module._Worker, "ask", shaky)
            g = grader.grade(sum_problem(), FAST)
        if retries is None:
            assert g.solved
            assert sum(requests) > 5
        else:
            assert f"{retries + 1} times" in g.reason
            assert sum(requests) == retries + 1
        assert graded(grader, sum_problem(), SUM_RIGHT).solved


@pytest.mark.parametrize("retries", first_quick([0, 1, None]))
def test_an_answer_that_takes_its_worker_along_is_rewarded_0_and_counted(retries, monkeypatch):
    """Again and again, while plain answers are graded: it cannot have its group dropped."""
    ask = grade_module._Worker.ask

    def hostile(self, request):
        if "worker killer" in request["text"]:
            raise grade_module._WorkerLost("the verifier is gone")
        return ask(self, request)

    monkeypatch.setattr(grade_module._Worker, "ask", hostile)
    text = fenced(SUM_RIGHT + "# worker killer\n")
    with Grader(1, retries=retries) as grader:
        if retries == 0:
            assert isinstance(grader.grade(sum_problem(), text), Ungraded)  # once may be bad luck
        for _ in range(2):
            g = grader.grade(sum_problem(), text)
            assert (g.reward, g.passed, g.status) == (0.0, False, "lost:the_verifier_is_gone")
        assert graded(grader, sum_problem(), SUM_RIGHT).solved


@pytest.mark.parametrize(
    ("failed", "status"),
    [
        (r"A\\ud800\\n\\u001b[31mB", "error:A31mB"),
        (r"exit:0", "exit:0"),
        ("x" * 500, f"error:{'x' * 60}"),
        ("", "error:"),
    ],
)
def test_what_a_child_calls_itself_is_filtered_where_it_enters(grader, failed, status):
    code = method(f"""say('{{"failed": "{failed}"}}'); return 41""", SAY)
    assert graded(grader, sum_problem("sentinel"), code).status == status


@pytest.mark.parametrize(
    "body",
    first_quick(
        [
            "import _thread, os; l = _thread.allocate_lock(); l.acquire()\n"
            "while True: l.acquire(timeout=0.3); os.write(120, b'x')",
            "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
            "import _thread; l = _thread.allocate_lock(); l.acquire(); l.acquire()",
            "import os; os.read(120, 1)",
        ],
        2,
    ),
)
def test_a_child_that_waits_is_ended_for_that(grader, body):
    """Long before its wall limit, which is 42 s here; a busy machine only delays it."""
    started = time.monotonic()
    g = graded(grader, sum_problem("sentinel", cpu_limit=10.0), method(body))
    assert (g.status, g.solved) == ("timeout", False)
    assert time.monotonic() - started < 42


def workers(program):
    """The grader's processes of this kind, in /proc."""
    found = [Path(f"/proc/{pid}") for pid in descendants(os.getpid())]
    found = [of for of in found if f"grading.{program}" in (of / "cmdline").read_text()]
    assert found
    return found


def test_the_verifier_is_limited_and_dies_with_the_trainer(grader):
    for verifier in workers("verifier"):
        limits = (verifier / "limits").read_text()
        (soft,) = re.findall(r"^Max address space +(\d+)", limits, re.MULTILINE)
        assert int(soft) == TRUSTED_MEMORY


def test_the_kernel_ends_children_before_the_trainer(grader):
    """Where memory runs out the kernel ends the process with the highest score.

    A child inherits that of its fork server.
    """
    assert {int((of / "oom_score_adj").read_text()) for of in workers("fork_server")} == {1000}
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000


@pytest.mark.slow
def test_a_verifier_that_computes_too_long_is_replaced(monkeypatch):
    """The kernel limits its CPU time for a rollout.

    A problem whose tests take long to read stands for a claim that takes long to compare.
    """
    long = "assert Solution().total([]) == [" + ", ".join(["[1]"] * 40_000) + "]"
    problem = replace(
        sum_problem(), tests=tuple(long.replace("[1]", f"[{i}]", 1) for i in range(150))
    )
    with Grader(1, retries=0) as grader:
        assert isinstance(grader.grade(problem, FAST), Ungraded)
        assert graded(grader, sum_problem(), SUM_RIGHT).solved


def test_nothing_is_left_after_close(tmp_path, monkeypatch):
    """… which ends what waits."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, files = descendants(os.getpid()), len(os.listdir("/proc/self/fd"))
    grader = Grader(2)
    assert graded(grader, sum_problem(), SUM_RIGHT).solved
    assert len(descendants(os.getpid())) >= len(before) + 4
    waiting = [grader.submit(sum_problem(), fenced(f"{SUM_WRONG}\n# {i}")) for i in range(80)]
    grader.close()
    grader.close()
    assert all(future.done() for future in waiting)
    assert waiting[-1].cancelled()
    for ask in (grader.grade, grader.submit):
        with pytest.raises(RuntimeError):
            ask(sum_problem(), FAST)
    assert descendants(os.getpid()) == before
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_grader_that_cannot_start_all_its_workers_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start, started, before = grade_module.start_process, [], descendants(os.getpid())

    def too_many(*args, **kwargs):
        started.append(args)
        if len(started) == 2:
            raise OSError(24, "Too many open files")
        return start(*args, **kwargs)

    monkeypatch.setattr(grade_module, "start_process", too_many)
    with pytest.raises(Refused, match=r"could not be started here: .*Too many open files"):
        Grader(3)
    assert descendants(os.getpid()) == before
    assert list(tmp_path.iterdir()) == []


def leaves_nothing(trainer, folder):
    """Kill it: its descendants and what they made in `folder` are gone within ten seconds."""
    workers = descendants(trainer.pid)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 10
    while left := {p for p in workers if Path(f"/proc/{p}").exists()} or list(folder.iterdir()):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.fixture
def trainer(tmp_path):
    code = (
        "from vgrout.envs.code.grading.grade import Grader\nimport time\n"
        "g = Grader(2)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    env = os.environ | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as process:
        yield process
        process.kill()


def test_a_killed_trainer_takes_its_workers_along(trainer, tmp_path):
    assert trainer.stdout.readline() == b"up\n"
    assert len(descendants(trainer.pid)) >= 4
    leaves_nothing(trainer, tmp_path)


@pytest.mark.parametrize("wait_ms", [0, 5, 20, 60, 150, 400])
@pytest.mark.long
def test_a_trainer_killed_while_its_workers_start_leaves_nothing(trainer, tmp_path, wait_ms):
    """From the first verifier on: a folder, a fork server and its hello are on their way."""
    while not descendants(trainer.pid):
        time.sleep(0.001)
    time.sleep(wait_ms / 1000)
    leaves_nothing(trainer, tmp_path)


@pytest.mark.parametrize("after", range(1, 17))
@pytest.mark.long
def test_a_second_signal_does_not_interrupt_the_cleanup(tmp_path, after):
    """SIGTERM reaches a verifier that is cleaning up after its trainer, `after` calls or lines later."""
    (work := tmp_path / "vgrout-work").mkdir()
    argv = [sys.executable, "-c", INTERRUPTED, str(SOURCE), str(after), str(work)]
    assert subprocess.run(argv, capture_output=True, text=True, timeout=60).stderr == ""
    assert not list(tmp_path.iterdir())


INTERRUPTED = """
import os, signal, socket, sys
source, left, work = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path.insert(0, source)
from vgrout.envs.code.grading import verifier
def trace(frame, event, argument):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return trace
def serve(*_):
    frame = sys._getframe(1)
    while frame.f_code is not verifier.main.__code__:
        frame.f_trace, frame = trace, frame.f_back
    frame.f_trace = trace
    sys.settrace(trace)
verifier._serve = serve
trainer, ours = socket.socketpair()
verifier.main(ours.fileno(), work, 2.0, 512, 1 << 20, "")
"""


INHERITING = """
import json, subprocess, sys
from vgrout.config.cli import cli_exit
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import Problem

file, problem, texts = sys.argv[1], *json.loads(sys.argv[2])

def run():
    with Grader(1) as grader:
        print(grader.protections.line())
        print(grader.protections.line(), file=sys.stderr)
        grades = [grader.grade(Problem(**problem), text) for text in texts]
        ends = [[g.solved, g.details["channel"], g.status] for g in grades]
    killed = subprocess.run([sys.executable, "-S", "-c", "import os; print(flush=True); os.kill(os.getpid(), 9)"])
    with open(file, "w") as f:
        json.dump([grader.protections.level, killed.returncode, ends], f)
    return 0

sys.exit(cli_exit(run))
"""
TICKS = "from signal import *\nsignal(SIGALRM, lambda *_: exit(4))\nsetitimer(ITIMER_REAL, 0.1)\nwhile True: pass\n"


EVERY_SIGNAL = {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}


@pytest.mark.parametrize(
    ("ignored", "closed"),
    first_quick(
        [
            (EVERY_SIGNAL, (0, 1, 2)),
            ({signal.SIGCHLD}, ()),
            (EVERY_SIGNAL, (1,)),
            ({signal.SIGCHLD}, (2,)),
        ]
    ),
)
def test_what_a_process_inherits_changes_no_verdict(grader, tmp_path, ignored, closed):
    """Where SIGCHLD is ignored the kernel keeps no exit status, and 0 would be an accepted answer.

    The number of a closed standard stream is given to the next file that is opened.
    """

    def inherit():
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for fd in closed:
            os.close(fd)

    tails = {
        "": "ok",
        "import os; os._exit(3)": "exit:3",
        "import os; os.kill(os.getpid(), 9)": "signal:9",
    }
    tails |= {"raise SystemExit": "exit:0", TICKS: "exit:4"}
    problem = {
        f.name: getattr(sum_problem("exit_code", cpu_limit=3.0), f.name) for f in fields(Problem)
    }
    given = json.dumps(
        [problem, [fenced(SUM_RIGHT), *(fenced(SUM_WRONG + tail) for tail in tails)]]
    )
    command = [sys.executable, "-c", INHERITING, str(tmp_path / "ends"), given]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(SOURCE)}, preexec_fn=inherit, timeout=100
    )
    assert done.returncode == 0
    ends = [[True, True, "ok"], *([False, status == "exit:0", status] for status in tails.values())]
    assert loaded(tmp_path / "ends") == [grader.protections.level, -9, ends]


def test_a_status_that_could_not_be_read_is_no_exit_with_0():
    server = ForkServer(*[None] * 3)
    report = bytes(server._end)[: REPORT.size]  # as it is while the kernel has written nothing
    session = object.__new__(_Session)
    with pytest.raises(ForkServerLost, match="no exit status"):
        session._end(report)


# --- Protections ---------------------------------------------------------------------------------


def test_protections_are_reported(grader):
    p = grader.protections
    assert p.line().startswith(f"sandbox: level {p.level}, ")
    assert "\n" not in p.line()
    assert json.loads(json.dumps(asdict(p)))["level"] == p.level
    assert all(layer in p.line() for layer in (*p.active, *p.missing))


BARE = ("landlock", "seccomp", "namespaces", "chroot")
UNKEPT = {"send over UDP", "share memory with others", "leave shared memory behind"}


def test_a_weak_sandbox_is_refused_unless_allowed():
    before = descendants(os.getpid())
    with pytest.raises(WeakSandbox, match="allow-weak-sandbox") as refused:
        Grader(1, without=BARE)
    assert "\n" not in str(refused.value)
    assert descendants(os.getpid()) == before
    with Grader(1, without=BARE, allow_weak=True) as grader:
        assert {"read a file outside", *UNKEPT} <= {*grader.protections.breaches}
        assert graded(grader, sum_problem(), SUM_RIGHT).solved
        assert not graded(grader, sum_problem(), SUM_WRONG).passed


@pytest.mark.parametrize(
    ("without", "level"),
    [
        (("namespaces", "seccomp"), 0),
        (("uid",), 3),
    ],
)
def test_a_level_is_what_was_probed(without, level):
    """Landlock alone lets an answer talk over UDP and leave shared memory behind: level 0."""
    with Grader(1, without=without, allow_weak=True) as grader:
        p = grader.protections
        assert (p.level, p.weak) == (level, level == 0), p
        assert bool(UNKEPT & {*p.breaches}) == (level == 0)
        assert p.as_root == (os.getuid() == 0 and "uid" not in p.active)
        assert (f"level {p.level} as uid 0" in p.line()) == p.as_root


def test_grading_needs_the_standard_library_only():
    code = (
        "import sys\nfrom vgrout.envs.code.grading import check, child, extract, fork_server, grade\n"
        "from vgrout.envs.code.grading import isolation, kernel, landlock, messages, namespaces\n"
        "from vgrout.envs.code.grading import probe, seccomp, stdlib, values, verdict, verifier, watch\n"
        "files = [getattr(m, '__file__', None) or '' for m in sys.modules.values()]\n"
        "print([f for f in files if 'site-packages' in f], 'torch' in sys.modules)"
    )
    env = {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[] False", done.stderr


# --- Checking problems ---------------------------------------------------------------------------


def test_the_check_names_what_no_answer_can_solve():
    good = sum_problem(cpu_limit=None)
    wrong = replace(good, id=8, canonical=SUM_WRONG)
    slow = replace(good, id=9, canonical=SUM_RIGHT + "\nwhile True: pass\n", cpu_limit=0.3)
    odd = replace(good, id=10, tests=("assert len(Solution().total([])) == 0",))
    raises = replace(good, id=12, setup_code="import math\nraise OSError('no\\n\\x1b[31mway')")
    with Grader(1, limits=Limits(cpu_s=1.0)) as grader:
        failures = check_problems([good, wrong, slow, odd, raises], grader)
        for text in (FAST, fenced("class")):
            with pytest.raises(
                ValueError, match=r"problem 12: setup code raises OSError: no \\x1b\[31mway"
            ):
                grader.grade(raises, text)
    fails = "canonical solution fails"
    assert [(f.id, f.reason.split(":")[0]) for f in failures] == [
        (8, fails),
        (9, fails),
        (10, "'len(Solution().total([]))' is not a call like Solution().method(…)"),
        (12, "setup code raises OSError"),
    ]
    assert "0.3 s of CPU are not enough" in failures[1].reason


def test_a_child_that_has_ended_is_not_charged_for_its_verifier():
    """The kernel gives an ended process the pid −1, whose clock is the caller's own.

    With that an answer that has long ended is charged with the time of all its verifier's gradings.
    """
    child = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], {})
    own_end, other_end = socket.socketpair()
    with open(os.pidfd_open(child), "rb") as pidfd, own_end, other_end:
        os.waitpid(child, 0)
        used = time.process_time()
        assert used > 0.01
        watch = Watch(own_end, used / 2, 10.0, True)
        watch.pid, watch.pidfd = child, pidfd.fileno()
        watch.look(lambda: False)
        assert watch.cause == ""
