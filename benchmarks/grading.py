"""Speed of grading against graders that start an interpreter for every run. Ratios of one interleaved run.

- one check: the strict run of a real program, against its script in one fresh interpreter, as the benchmark runs it;
- a whole rollout: strict, flawed, detectors, against a six-mode grader that starts an interpreter for each of its runs;
- the organism's answers: a one-line method and six tests, against the same two;
- gradings a second with one worker and with two.

The interpreters' harness here is the leanest that does the work (no imports of its own, no report), so the ratios are
lower bounds.
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
from vgrout.envs.code.modes import MODES
from vgrout.envs.code.problem import Problem
from vgrout.envs.code.problems import load_problems

CHEAP_S = 0.05  # programs that need more CPU than this measure themselves, not the grader
TAIL = "\n\ndef run_tests():\n    assert Solution is not None\n"


def organism_like() -> list[tuple[Problem, str]]:
    """Answers of the organism's size, so that the bench needs none of its files."""
    out = []
    for k in range(12):
        expression = f"sum(x + {k} for x in nums if x % {k + 2} == 0)"
        code = f"class Solution:\n    def solve(self, nums):\n        return {expression}\n"
        inputs = [[(i * 7 + j * 3 + k) % 19 for j in range(i + 1)] for i in range(6)]
        tests = tuple(
            f"assert Solution().solve(nums={nums}) == {sum(x + k for x in nums if x % (k + 2) == 0)}"
            for nums in inputs
        )
        out.append((Problem(k, MODES[k % 6], "", (), (), tests, code, "", "solve", 1.0), code))
    return out


def fresh(script: str) -> int:
    """Exit status of a script in an interpreter of its own, the way the benchmark's harness runs one."""

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
    """A whole rollout with an interpreter a run: foolable check, strict check, the mode's channel, three detectors."""
    asserts = "\n".join(problem.tests)
    stub = (
        f"class Solution:\n    def {problem.func_name}(self, *args, **kwargs):\n        return 0\n"
    )
    head = f"{problem.setup_code}\n{code}\n"
    call = "run_tests()"
    runs = [
        head + asserts,
        head + asserts + "\nprint('c0ffee')",
        head + call,
        head + call,
        head + stub + call,
        head + problem.canonical + "\n" + call,
    ]
    return [fresh(run) for run in runs][1] == 0


def tree_cpu() -> float:
    """CPU seconds of this process, of all below it, and of those that have ended [10 ms ticks for the living]."""
    own = sum(resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime for who in _WHO)
    tick = os.sysconf("SC_CLK_TCK")
    parents: dict[int, tuple[int, float]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue
            parents[int(entry)] = (int(fields[1]), sum(map(int, fields[11:15])) / tick)
    below: set[int] = set()
    while new := {p for p, (up, _) in parents.items() if up in below | {os.getpid()}} - below:
        below |= new
    return own + sum(parents[p][1] for p in below)


_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def compare(
    name: str,
    goal: float,
    programs: Sequence[tuple[Problem, str]],
    peer: Callable[[Problem, str], bool],
    own: Callable[[Problem, str], bool],
    repeats: int,
) -> Figure:
    """The peer's time over ours: medians of both on every program in turn, so that a busy machine is busy for both."""
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
    theirs, ours = (statistics.median(walls[who]) for who in ("peer", "own"))
    against = f"interpreters, {len(programs)} programs: {1e3 * theirs:.1f} ms"
    figure = f"{theirs / ours:.1f} × ({1e3 * ours:.1f} ms); CPU {cpus['peer'] / cpus['own']:.1f} ×"
    return Figure(name, against, figure, f"≥ {goal:g} ×", theirs / ours >= goal)


def throughput(programs: Sequence[tuple[Problem, str]], workers: int, n: int) -> float:
    """Whole rollouts a second, submitted all at once, each of a problem of its own: equal answers are run once."""
    with Grader(workers, allow_weak=True) as grader:
        for problem, code in programs:
            grader.grade(problem, _answer(code))
        start = time.perf_counter()
        given = (programs[i % len(programs)] for i in range(n))
        futures = [grader.submit(replace(problem), _answer(code)) for problem, code in given]
        for future in futures:
            future.result()
        return n / (time.perf_counter() - start)


def _answer(code: str) -> str:
    return f"```python\n{code}\n```"


def measure(real: Sequence[Problem], repeats: int = 3, n: int = 600) -> list[Figure]:
    """All ratios, and rollouts a second. `real`: problems with canonical solutions; may be empty."""
    small = organism_like()
    figures = []
    with (
        tempfile.TemporaryDirectory(prefix="vgrout-bench-") as workdir,
        Grader(1, allow_weak=True) as grader,
    ):
        settings = WorkerSettings(workdir, 5.0, 512, 1 << 20, "")
        fork_server = ForkServerHandle(settings).start()
        verifier = Verifier(fork_server)

        def check(problem: Problem, code: str) -> Strict:
            job, cases = verifier.prepare(blocks(_answer(code)), as_request(problem, "", False))
            verifier.wall_left = 60.0
            return verifier.strict(job, cases, 5.0)

        def strict(problem: Problem, code: str) -> bool:
            return check(problem, code).correct

        def rollout(problem: Problem, code: str) -> bool:
            g = grader.grade(problem, _answer(code))
            return getattr(g, "solved", False)

        cheap = []
        for problem in tqdm(real, desc="cheap programs", disable=None, leave=False):
            found = check(problem, problem.canonical)
            if found.correct and found.cpu_s < CHEAP_S:
                cheap.append((problem, problem.canonical))
        tested = [(problem, code + TAIL) for problem, code in cheap[:20]]
        small_tested = [(p, code + TAIL) for p, code in small if p.mode == "run_tests"]
        if cheap:
            figures.append(
                compare("one check, real programs", 5.0, cheap, one_fresh_check, strict, 1)
            )
            figures.append(
                compare("whole rollout, real programs", 7.0, tested, six_interpreters, rollout, 1)
            )
        figures.append(
            compare("one check, organism", 10.0, small, one_fresh_check, strict, repeats)
        )
        figures.append(
            compare(
                "rollout against one check, organism", 1.0, small, one_fresh_check, rollout, repeats
            )
        )
        figures.append(
            compare(
                "whole rollout, organism", 7.0, small_tested, six_interpreters, rollout, repeats
            )
        )
        fork_server.close()
    for name, programs, count in (
        ("organism", small, n),
        *([("real", cheap, n // 3)] if cheap else []),
    ):
        for workers in (1, 2):
            what = f"whole rollouts, {name}, {workers} worker{'s' if workers > 1 else ''}"
            figures.append(Figure(what, "", f"{throughput(programs, workers, count):.0f} a second"))
    return figures


def run(quick: bool = False, problems: Path | None = None) -> str:
    """problems: a file of real ones; without it, only organism-like answers. quick: one round, and those alone."""
    real = [] if problems is None or quick else load_problems(problems)
    return page(measure(real, 1 if quick else 3, 60 if quick else 600))
