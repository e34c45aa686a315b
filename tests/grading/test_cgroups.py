"""Control groups: whom the kernel ends where memory runs out, how many cores a quota leaves."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vgrout.ground import machine

LIMIT = 700 << 20
TRAINER = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
ballast = b"x" * (400 << 20)
from vgrout.envs.code.grading.grade import Grade, Grader
from vgrout.envs.code.modes import Problem
problem = Problem(1, "run_tests", "", (), (), ("assert Solution().f(1) == 2",),
                  "class Solution:\\n    def f(self, x):\\n        return x + 1\\n", "", "f", 5.0)
right = problem.canonical
eater = "B = []\\nclass Solution:\\n    def f(self, x):\\n        while True: B.append(b'x' * (8 << 20))\\n"
with Grader(workers=1, allow_weak=True) as grader:
    for code in (right, eater, right):
        grade = grader.grade(problem, f"```python\\n{code}\\n```")
        print(isinstance(grade, Grade) and grade.solved)
"""


@pytest.fixture
def group():
    """A control group with a limit of memory and no swap, of either version."""
    base = Path("/sys/fs/cgroup")
    old = (base / "memory" / "memory.limit_in_bytes").exists()
    at = (base / "memory" if old else base) / f"vgrout_test_{os.getpid()}"
    try:
        at.mkdir()
        (at / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(LIMIT))
    except OSError as e:
        if at.is_dir():
            at.rmdir()
        pytest.skip(f"no control group of memory can be made here ({e.strerror})")
    yield at
    for _ in range(50):
        try:
            return at.rmdir()
        except OSError:  # its processes are still ending
            time.sleep(0.1)


QUOTAS = {  # the process's line in /proc/self/cgroup, files below the groups' folder, cores of 4
    "none": ("0::/", {"cpu.max": "max 100000"}, 4),
    "v2": ("0::/a", {"a/cpu.max": "200000 100000"}, 2),
    "v2, of an outer group": (
        "0::/a/b",
        {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"},
        2,
    ),
    "v2, a tenth": ("0::/a", {"a/cpu.max": "10000 100000"}, 1),
    "v2, more than there is": ("0::/a", {"a/cpu.max": "900000 100000"}, 4),
    "damaged": ("0::/a", {"a/cpu.max": "100000 0"}, 4),
    "no such file": (None, {}, 4),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_a_quota_of_time_counts_as_cores(case, tmp_path, monkeypatch):
    own, files, want = QUOTAS[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if own:
        (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert machine.cores() == want


@pytest.mark.long
def test_memory_that_an_answer_takes_ends_the_answer(group):
    command = [sys.executable, "-c", TRAINER, str(group / "cgroup.procs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "True"]
    events = group / (
        "memory.events" if (group / "memory.events").exists() else "memory.oom_control"
    )
    assert "oom_kill 0\n" not in events.read_text(), "or the kernel was not asked"
