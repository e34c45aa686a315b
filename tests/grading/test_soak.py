"""Ten thousand gradings of mixed kinds: flat memory, nothing left, one outcome for each kind."""

import gc
import os
from collections import defaultdict
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from vgrout.envs.code.grading.grade import Grader, Limits
from vgrout.envs.code.modes import MODES

from .attacks import ATTACKS, descendants, method
from .conftest import SUM_RIGHT, fenced, sum_problem

N = 10_000
# a right answer, and what attacks in one mode; none that takes long
KINDS = {"right": (SUM_RIGHT, "run_tests")}
KINDS |= {a.name: (a.code, a.modes[-1]) for a in ATTACKS[::4] if a.modes == MODES}
SLOW_EVERY = 500  # an endless loop, now and then


@pytest.mark.slow
def test_ten_thousand_mixed_gradings(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcomes = defaultdict(list)
    with Grader(2, limits=Limits(cpu_s=0.3)) as grader:

        def batch(start, stop):
            futures = []
            kinds = cycle(KINDS.items())
            for i in range(start, stop):
                name, (code, mode) = next(kinds)
                if i % SLOW_EVERY == 0:
                    name, code, mode = "loop", method("while True: pass"), "run_tests"
                problem = sum_problem(mode, cpu_limit=None)
                futures.append((name, grader.submit(problem, fenced(code))))
            for name, future in futures:
                grade = future.result()
                grade = replace(grade, details={**grade.details, "cpu_s": 0.0})
                if grade not in outcomes[name]:
                    outcomes[name].append(grade)

        def of_status(name):
            gc.collect()
            found = {
                pid: Path(f"/proc/{pid}/status").read_text()
                for pid in (os.getpid(), *descendants(os.getpid()))
            }
            return {pid: text.split(f"{name}:")[1].split()[0] for pid, text in found.items()}

        batch(0, 2000)
        before, files = of_status("VmRSS"), len(os.listdir("/proc/self/fd"))
        for start in range(2000, N, 1000):
            batch(start, start + 1000)
        after = of_status("VmRSS")
        assert after.keys() == before.keys(), "a worker was replaced, or a process was left"
        growth = {pid: int(after[pid]) - int(before[pid]) for pid in before}
        assert max(growth.values()) < 2048, f"resident memory grew [KiB]: {growth} of {before}"
        assert len(os.listdir("/proc/self/fd")) == files
        assert "Z" not in of_status("State").values()
        assert grader.restarts == 0
        assert all(list(folder.iterdir()) == [] for folder in tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []
    assert outcomes.keys() == {*KINDS, "loop"}
    assert all(len(seen) == 1 for seen in outcomes.values()), outcomes
