"""Every step of the sandbox's set-up fails, once or always: the grader starts at the level that is left, or says in one
line what it needs. No traceback, no hang, and nothing half-made: what it then grades is right."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vgrout
from quick import first_quick
from vgrout.envs.code.grading import processes

from . import refusals
from .test_attacks import SPARE_UID, interpreter_for_others

HERE = Path(__file__).parent
SOURCE = Path(vgrout.__file__).parents[1]
IS_ROOT = os.getuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root")
of_this_machine = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="numbers of system calls"
)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = "1", "22", "38"


def outcome(command, **settings):
    """What refusals.py prints under this command."""
    env = {"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    if sys.pycache_prefix is not None:
        env["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    done = subprocess.run(
        command, env=env, cwd="/", capture_output=True, text=True, timeout=120, **settings
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


START = f"import json, sys; sys.path.insert(0, {str(HERE)!r})\n"
START += "import refusals; print(json.dumps(refusals.outcome()))"


def refused(*words):
    return outcome([sys.executable, str(HERE / "refusals.py"), *words])


def is_told(found):
    """It has started and grades right, or there is one line that says why not."""
    if "refused" in found:
        assert "\n" not in found["refused"]
        reason = found["refused"]
        assert "too weak here" in reason or "could not be started here: " in reason
        assert len(reason.split("here", 1)[1]) > 10
    else:
        assert found["right"], found


def later(*case):
    """A case like another of its kind here, which is quick: each starts an interpreter and a grader."""
    return pytest.param(*case, marks=pytest.mark.long)


@of_this_machine
@pytest.mark.parametrize(
    ("words", "level", "off"),
    [
        (("unshare", "EPERM"), 2, "namespaces"),
        later(("mount", "EPERM"), 2, "namespaces"),
        (("pidfd_open", "ENOSYS"), 2, "namespaces"),  # before Linux 5.3
        pytest.param(("setgroups", "EPERM"), 2, "namespaces", marks=needs_root),
        (("capset", "EPERM"), 3, "no_capabilities"),
        (("landlock_create_ruleset", "ENOSYS"), 1, "landlock"),
        later(("landlock_add_rule", "EPERM"), 1, "landlock"),
        (("prctl", "EINVAL", PR_SET_SECCOMP), 1, "seccomp"),
        pytest.param(("prctl", "EPERM", PR_SET_NO_NEW_PRIVS), 1, "no_new_privs", marks=needs_root),
        later(("socket", "EPERM"), 3, None),
        (("chroot", "EPERM", "--", "namespaces", "landlock"), None, None),
        later(("mknodat", "EPERM", "--", "namespaces", "landlock"), None, None),
        (("prctl", "EPERM", PR_SET_PDEATHSIG), None, None),
        later(("prlimit64", "EPERM"), None, None),
        later(("sendmsg", "ENOSYS"), None, None),
        later(("setitimer", "ENOSYS"), None, None),
        (("clone", "EAGAIN"), None, None),
        (("landlock_create_ruleset", "SIGSYS"), None, None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_call_that_the_kernel_refuses(words, level, off):
    found = refused(*words)
    if "chroot" in words or "mknodat" in words:
        assert "too weak here" in found["refused"]
        return
    is_told(found)
    assert found.get("level") == level
    if off is not None:
        assert off in found["missing"]


READ_ONLY_PROC = 'mount --bind /proc /proc && mount -o remount,ro,bind /proc && exec "$@"'


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1)")
@pytest.mark.parametrize("user", [None, SPARE_UID])
def test_a_namespace_whose_ids_cannot_be_mapped(user):
    """As where a security module restricts user namespaces: they are entered, and then /proc refuses the maps."""
    python = sys.executable if user is None else interpreter_for_others()
    command = [python, "-c", START]
    if user is not None:
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
    found = outcome(["unshare", "-m", "sh", "-c", READ_ONLY_PROC, "sh", *command])
    assert (found["level"], found["right"]) == (2, True)
    assert "ids" in found["missing"]["namespaces"]


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv(1)")
def test_root_without_capabilities():
    command = [sys.executable, "-c", START]
    found = outcome(["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", *command])
    is_told(found)
    assert found["level"] == 2


@pytest.mark.parametrize(
    ("limit", "says"),
    first_quick(
        [
            ("-n 100", "ulimit -n"),
            ("-f 0", "ulimit -f"),
            ("-t 2", "ulimit -t"),
            ("-n 12", "ulimit -n"),
        ],
        2,
    ),
)
def test_limits_under_which_no_answer_could_be_judged(limit, says):
    found = outcome(["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", sys.executable, "-c", START])
    assert says in found["refused"]
    assert "\n" not in found["refused"]


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv(1)")
@pytest.mark.parametrize("processes", first_quick([1, 40, 5, 3, 6], 2))
def test_a_limit_on_processes(processes):
    python = interpreter_for_others()
    user = ["setpriv", f"--reuid={SPARE_UID - 7}", f"--regid={SPARE_UID}", "--clear-groups"]
    command = [*user, "prlimit", f"--nproc={processes}", python, "-c", START]
    found = outcome(command)
    is_told(found)
    if processes == 40:
        assert found["level"] == 3
    elif "refused" in found:
        assert "ulimit -u" in found["refused"]


# --- One step, once --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def number(tmp_path_factory):
    return refusals.copy_with_faults(tmp_path_factory.mktemp("faults"))


def fail_at(step, number, monkeypatch, capfd, *without):
    """Start a grader whose fork server fails at a step, and hold it to the contract. False: it has fewer steps."""
    monkeypatch.setattr(processes, "SOURCE", str(number.parents[4]))
    number.write_text(str(step))
    reached = number.with_name("number.reached")
    reached.unlink(missing_ok=True)
    is_told(refusals.outcome(*without))
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    return reached.exists() and reached.stat().st_size > 0


# Of the first hundred or so most are of the interpreter's library, a mount each.
EARLY = (1, 3, 5, 8, 11, 15, 23, 2, 4, 7, 9, 10, 13, 14, 17, 40)


@pytest.mark.parametrize("step", first_quick(EARLY, 4))
def test_a_step_that_fails_once(step, number, monkeypatch, capfd):
    assert fail_at(step, number, monkeypatch, capfd)


@pytest.mark.parametrize(
    "step", first_quick([*range(1, 60, 9), *range(4, 60, 9), *range(7, 60, 9)], 4)
)
def test_a_step_that_fails_once_without_namespaces(step, number, monkeypatch, capfd):
    fail_at(step, number, monkeypatch, capfd, "namespaces")


@pytest.mark.slow
@pytest.mark.parametrize(
    "without", ["", "namespaces", "landlock", "namespaces landlock", "seccomp"]
)
def test_every_step_fails_once(without, number, monkeypatch, capfd):
    step = 1
    while fail_at(step, number, monkeypatch, capfd, *without.split()):
        step += 1
    assert step > 30
