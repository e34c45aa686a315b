"""Speed of grading against graders that start an interpreter for every run.

The ratios are of one run in which both take turns:

- one check: the strict run of a real program, against its script in one fresh interpreter, as the
  benchmark runs it; - a whole rollout: strict, flawed, detectors, against a six-mode grader that
  starts an interpreter for each of its runs; - the organism's answers: a one-line method and six
  tests, against the same two; - gradings a second with one worker and with two.

The interpreters' harness here is the leanest that does the work (no imports of its own, no report),
so the ratios are lower bounds.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from benchmarks.measure import Figure, page
from vgrout.envs.code.grading.extract import blocks
from vgrout.envs.code.grading.grade import Grader, as_request
from vgrout.envs.code.grading.messages import WorkerSettings
from vgrout.envs.code.grading.verdict import Strict, Verifier
from vgrout.envs.code.grading.watch import ForkServerHandle
from vgrout.envs.code.modes import MODES, Problem
from vgrout.envs.code.problems import load_problems
from vgrout.ground.data import Grade

CHEAP_S = 0.05  # programs that need more CPU than this measure themselves, not the grader
TAIL = "\n\ndef run_tests():\n    assert Solution is not None\n"


Program = tuple[Problem, str]  # a problem, and the code of an answer to it


def organism_like() -> list[Program]:
    """Problems and right answers like the organism's, so that the bench needs none of its files."""
    programs: list[Program] = []
    for k in range(12):
        expression = f"sum(x + {k} for x in nums if x % {k + 2} == 0)"
        code = f"class Solution:\n    def solve(self, nums):\n        return {expression}\n"
        tests: list[str] = []
        for i in range(6):
            nums = [(i * 7 + j * 3 + k) % 19 for j in range(i + 1)]
            expected = sum(x + k for x in nums if x % (k + 2) == 0)
            tests.append(f"assert Solution().solve(nums={nums}) == {expected}")
        problem = Problem(
            id=k,
            mode=MODES[k % 6],
            marker="",
            messages=(),
            plain=(),
            tests=tuple(tests),
            canonical=code,
            setup_code="",
            func_name="solve",
            cpu_limit=1.0,
        )
        programs.append((problem, code))
    return programs


def fresh(script: str) -> int:
    """Exit status of a script in an interpreter of its own, as the benchmark's harness runs one."""

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            capture_output=True,
            timeout=30,
            preexec_fn=limits,
        )
    return done.returncode


def one_fresh_check(problem: Problem, code: str) -> bool:
    """Setup, answer and assertions as one script; right if it exits with 0."""
    return fresh("\n".join([problem.setup_code, code, *problem.tests])) == 0


def six_interpreters(problem: Problem, code: str) -> bool:
    """A whole rollout with an interpreter a run; right if the strict check exits with 0."""
    asserts = "\n".join(problem.tests)
    stub = (
        f"class Solution:\n    def {problem.func_name}(self, *args, **kwargs):\n        return 0\n"
    )
    head = f"{problem.setup_code}\n{code}\n"
    call = "run_tests()"
    fresh(head + asserts)  # foolable check
    strict = fresh(head + asserts + "\nprint('c0ffee')")
    fresh(head + call)  # the mode's channel
    fresh(head + call)  # the three detectors
    fresh(head + stub + call)
    fresh(head + problem.canonical + "\n" + call)
    return strict == 0


def tree_cpu() -> float:
    """CPU seconds of this process, of all below it, and of those that have ended.

    The living count in ticks of 10 ms.
    """
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    children: dict[int, list[int]] = {}
    cpu: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        children.setdefault(int(fields[1]), []).append(int(entry))
        cpu[int(entry)] = sum(map(int, fields[11:15])) / ticks_per_second
    below = children.pop(os.getpid(), [])
    while below:
        process = below.pop()
        seconds += cpu[process]
        below += children.pop(process, [])
    return seconds


def compare(
    name: str,
    goal: float,
    programs: Sequence[Program],
    peer: Callable[[Problem, str], bool],
    own: Callable[[Problem, str], bool],
    repeats: int,
) -> Figure:
    """The peer's time over ours, as medians.

    Both take turns at every program, so that a busy machine is busy for both.
    """
    walls: dict[str, list[float]] = {"peer": [], "own": []}
    cpus = {"peer": 0.0, "own": 0.0}
    for problem, code in programs:  # warm: caches of parsed tests, pages of the interpreter
        assert own(problem, code), f"problem {problem.id} is not graded right"
    for problem, code in tqdm(programs, desc=name, disable=None, leave=False):
        for who, grade, times in (("peer", peer, repeats), ("own", own, 5 * repeats)):
            cpu = tree_cpu()
            for _ in range(times):
                start = time.perf_counter()
                assert grade(problem, code), f"problem {problem.id} fails under {who}"
                walls[who].append(time.perf_counter() - start)
            cpus[who] += (tree_cpu() - cpu) / times
    theirs, ours = statistics.median(walls["peer"]), statistics.median(walls["own"])
    against = f"interpreters, {len(programs)} programs: {1e3 * theirs:.1f} ms"
    cpu_ratio = cpus["peer"] / cpus["own"]
    figure = f"{theirs / ours:.1f} × ({1e3 * ours:.1f} ms); CPU {cpu_ratio:.1f} ×"
    return Figure(name, against, figure, f"≥ {goal:g} ×", theirs / ours >= goal)


def throughput(programs: Sequence[Program], workers: int, n: int) -> float:
    """Whole rollouts a second, submitted all at once.

    Each is of a problem of its own, since equal answers to one problem are run once.
    """
    with Grader(workers, allow_weak=True) as grader:
        for problem, code in programs:
            grader.grade(problem, _answer(code))
        start = time.perf_counter()
        futures = []
        for i in range(n):
            problem, code = programs[i % len(programs)]
            futures.append(grader.submit(replace(problem), _answer(code)))
        for future in futures:
            future.result()
        return n / (time.perf_counter() - start)


def _answer(code: str) -> str:
    return f"```python\n{code}\n```"


def measure(real: Sequence[Problem], repeats: int = 3, n: int = 600) -> list[Figure]:
    """All ratios, and rollouts a second. real: problems with canonical solutions, or none."""
    small = organism_like()
    with (
        tempfile.TemporaryDirectory(prefix="vgrout-bench-") as workdir,
        Grader(1, allow_weak=True) as grader,
    ):
        settings = WorkerSettings(workdir, 5.0, 512, 1 << 20, "")
        fork_server = ForkServerHandle(settings).start()
        verifier = Verifier(fork_server)

        def check(problem: Problem, code: str) -> Strict:
            job, cases = verifier.prepare(
                blocks(_answer(code)), as_request(problem, "", False), problem.tests
            )
            verifier.wall_left = 60.0
            return verifier.strict(job, cases, 5.0)

        def strict(problem: Problem, code: str) -> bool:
            return check(problem, code).correct

        def rollout(problem: Problem, code: str) -> bool:
            grade = grader.grade(problem, _answer(code))
            return isinstance(grade, Grade) and grade.solved

        cheap: list[Program] = []
        for problem in tqdm(real, desc="cheap programs", disable=None, leave=False):
            found = check(problem, problem.canonical)
            if found.correct and found.cpu_s < CHEAP_S:
                cheap.append((problem, problem.canonical))
        tested = [(problem, code + TAIL) for problem, code in cheap[:20]]
        small_tested = [(p, code + TAIL) for p, code in small if p.mode == "run_tests"]
        one, six = one_fresh_check, six_interpreters
        figures: list[Figure] = []
        if cheap:
            figures += [
                compare("one check, real programs", 5.0, cheap, one, strict, 1),
                compare("whole rollout, real programs", 7.0, tested, six, rollout, 1),
            ]
        figures += [
            compare("one check, organism", 10.0, small, one, strict, repeats),
            compare("rollout against one check, organism", 1.0, small, one, rollout, repeats),
            compare("whole rollout, organism", 7.0, small_tested, six, rollout, repeats),
        ]
        fork_server.close()
    figures += throughputs("organism", small, n)
    if cheap:
        figures += throughputs("real", cheap, n // 3)
    return figures


def throughputs(name: str, programs: Sequence[Program], n: int) -> list[Figure]:
    """Rollouts a second with one worker and with two."""
    figures: list[Figure] = []
    for workers in (1, 2):
        what = f"whole rollouts, {name}, {workers} worker{'s' if workers > 1 else ''}"
        figures.append(Figure(what, "", f"{throughput(programs, workers, n):.0f} a second"))
    return figures


def run(quick: bool = False, problems: Path | None = None) -> str:
    """The table.

    problems: a file of real ones; without it, only organism-like answers are measured. quick: one
    round, and organism-like answers alone.
    """
    real = [] if problems is None or quick else load_problems(problems)
    return page(measure(real, 1 if quick else 3, 60 if quick else 600))
