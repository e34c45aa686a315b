"""Whether verdicts are right: honest answers and hostile ones, at every level, under several Pythons.

The corpora are those of the tests (tests/grading/honest.py, attacks.py); real problems' canonical
solutions join the honest ones. Each run is a process of its own, under the interpreter that also
runs the answers; these need nothing installed. With another checkout of this project, both grade
the same answers in turns, and their CPU time is compared.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.measure import Figure, page
from vgrout.envs.code.problems import load_problems
from vgrout.errors import Refused

ROOT = Path(__file__).resolve().parents[1]
CORPORA = ROOT / "tests" / "grading"
# What is left off → the level of what remains.
LEVELS = {"": "3", "namespaces": "2", "landlock": "1, no landlock", "seccomp": "1, no seccomp"}
WITHOUT_SECCOMP = ("seccomp",)  # there answers may fork: hostile ones are not tried
ROUNDS = 5
# Grades a corpus twice with one worker, and prints the CPU seconds of the second time, of all its
# processes.
TIMED = """
import resource, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import honest
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import MODES

def cpu():
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, both))

names = [name for name in honest.NAMED if not name.startswith("imports ")]
codes = [honest.NAMED[name] for name in names] + [
    f"class Solution:\\n    def total(self, nums):\\n        return {value}\\n" for value in range(40, 100)
]
with Grader(1) as grader:
    for code in codes:
        for mode in MODES:
            grader.grade(honest.problem(mode), f"```python\\n{code}\\n```")
print(cpu())
"""


def _json_of(python: str, script: Path, *words: str) -> dict:
    """The last line that a script of the tests prints."""
    env = {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [python, str(script), *words]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    if not done.stdout:
        raise Refused(f"{python} {script.name}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def verdicts(pythons: Sequence[str], problems: Path | None) -> list[Figure]:
    """Wrong verdicts on honest answers, and hostile ones that were solved."""
    figures: list[Figure] = []
    folder = tempfile.mkdtemp(prefix="vgrout-bench-")
    real = [] if problems is None else ["--problems", _plain(problems, Path(folder))]
    rounds = [(python, without) for python in pythons for without in LEVELS]
    for python, without in tqdm(rounds, desc="verdicts", disable=None, leave=False):
        words = without.split()
        honest = _json_of(python, CORPORA / "honest.py", *real, *words)
        name = f"Python {honest['python']}, level {LEVELS[without]}"
        wrong = len(honest["wrong"])
        figure = f"{wrong} of {honest['graded']} ({honest['answers']} answers)"
        figures.append(Figure(f"honest, {name}", "wrong verdicts", figure, "0", wrong == 0))
        if without in WITHOUT_SECCOMP:
            continue
        hostile = _json_of(python, CORPORA / "attacks.py", *words)
        fooled = [text for text in hostile["wrong"] if text.startswith("strict oracle fooled")]
        figure = f"{len(fooled)} of {hostile['graded']} ({len(hostile['wrong'])} other deviations)"
        figures.append(Figure(f"hostile, {name}", "solved", figure, "0", not fooled))
    shutil.rmtree(folder)
    return figures


def _plain(problems: Path, folder: Path) -> str:
    """The path of a file of real problems that an interpreter without any package can read."""
    fields = ("id", "tests", "canonical", "setup_code", "func_name", "cpu_limit")
    plain = []
    for problem in load_problems(problems):
        of_this_one = {name: getattr(problem, name) for name in fields}
        plain.append({"mode": "run_tests", "marker": "", "messages": (), "plain": ()} | of_this_one)
    (folder / "problems.json").write_text(json.dumps(plain))
    return str(folder / "problems.json")


def _cpu_s(source: Path) -> float:
    """CPU seconds of one process tree that grades with the package in this folder."""
    command = [sys.executable, "-c", TIMED, str(source), str(CORPORA)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    return float(done.stdout.splitlines()[-1])


def cost(against: Path) -> Figure:
    """CPU time of grading the same answers, over another checkout's, in rounds by turns."""
    ratios = []
    for _ in tqdm(range(ROUNDS), desc="cost", disable=None, leave=False):
        other, own = _cpu_s(against / "src"), _cpu_s(ROOT / "src")
        ratios.append(own / other)
    ratio = statistics.median(ratios)
    figure = f"{ratio:.3f} × ({min(ratios):.3f} to {max(ratios):.3f}, {ROUNDS} rounds)"
    return Figure("CPU time of grading", str(against), figure, "≤ 1.03 ×", ratio <= 1.03)


def run(pythons: Sequence[str], problems: Path | None, against: Path | None) -> str:
    """The table."""
    figures = verdicts(pythons, problems)
    if against is not None:
        figures.append(cost(against))
    return page(figures)
