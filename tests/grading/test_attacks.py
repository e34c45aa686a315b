"""Every hostile program: the right verdict in every mode, and no harm done."""

import gc
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import vgrout
from vgrout.envs.code.grading.grade import Grader

from .attacks import ATTACKS, CONTROLS, FILES, check_attack, check_control

HERE = Path(__file__).parent
SOURCE = Path(vgrout.__file__).parents[1]
SPARE_UID = 65533


@pytest.mark.parametrize("at", range(len(ATTACKS)), ids=lambda at: ATTACKS[at].name)
def test_attack(grader, at):
    """In every fourth of its modes, and the next attacks in the others."""
    attack = ATTACKS[at]
    modes = attack.modes[at % 4 :: 4] or attack.modes[:1]
    assert check_attack(grader, replace(attack, modes=modes)) == []


@pytest.mark.long
def test_every_attack_in_all_its_modes(grader):
    assert [w for attack in ATTACKS for w in check_attack(grader, attack)] == []


def test_files_where_a_container_leaves_no_namespaces():
    with Grader(1, without=("namespaces",)) as grader:
        assert grader.protections.level == 2
        assert [w for attack in FILES for w in check_attack(grader, attack)] == []


@pytest.mark.parametrize("control", CONTROLS, ids=lambda c: c.name)
def test_honest_control(grader, control):
    assert check_control(grader, control) == []


def test_the_trainer_keeps_its_memory_and_descriptors(grader):
    """Floods it with hostile gradings: neither resident memory nor open files of this process grow."""

    def usage():
        gc.collect()
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]), len(os.listdir("/proc/self/fd"))

    hostile = [a for a in ATTACKS if a.name.startswith("H31") and "flooded" not in a.name]
    floods = [replace(attack, modes=attack.modes[:2]) for attack in hostile]
    assert [w for attack in floods for w in check_attack(grader, attack)] == []
    memory_before, files_before = usage()
    for attack in floods * 2:
        check_attack(grader, attack)
    memory_after, files_after = usage()
    growth = f"resident memory grew from {memory_before} to {memory_after} KiB"
    assert memory_after - memory_before < 4 << 10, growth
    assert files_after == files_before, f"open files grew from {files_before} to {files_after}"


def interpreter_for_others():
    """A Python ≥ 3.11 that any user may run; the test is skipped if there is none."""
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        found = shutil.which(candidate)
        if found is None:
            continue
        is_old = [found, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            done = subprocess.run(is_old, user=SPARE_UID, cwd="/", capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return found
    pytest.skip("no interpreter here that another user may run")


def run_suite(*without, user):
    python = sys.executable if user is None else interpreter_for_others()
    done = subprocess.run(
        [python, str(HERE / "attacks.py"), *without],
        env={
            "PYTHONPATH": str(SOURCE),
            "PATH": "/usr/bin:/bin",
            "HOME": "/nonexistent",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        cwd="/",
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "level", "user"),
    [
        pytest.param("", 3, SPARE_UID, marks=needs_root),
        pytest.param("namespaces", 2, SPARE_UID, marks=needs_root),
        ("namespaces", 2, None),  # what a container's default rules leave
        ("landlock", 1, None),  # an answer cannot open files in the strict run …
        ("seccomp", 1, None),  # … or can fork …
        ("namespaces landlock", 1, None),  # … but is not taken for right
    ],
)
def test_the_whole_suite(without, level, user):
    result = run_suite(*without.split(), user=user)
    assert result["uid"] == (os.getuid() if user is None else user)
    assert result["protections"]["level"] == level
    assert [w for w in result["wrong"] if level > 1 or w.startswith("strict oracle fooled")] == []


@pytest.mark.slow
@needs_root
def test_root_becomes_nobody_where_the_library_is_readable():
    code = (
        "from vgrout.envs.code.grading.grade import Grader\n"
        "with Grader(1) as g: print(g.protections.active.get('uid'), g.protections.level)"
    )
    env = {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    python = interpreter_for_others()
    done = subprocess.run(
        [python, "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["uid", "65534", "3"], done.stderr[-2000:]
