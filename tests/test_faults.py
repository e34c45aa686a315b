"""Runs whose machine, disk or numbers fail. Processes really die, disks are really full."""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import pytest
import torch
from loguru import logger

from files import loaded
from runs import adapter_bytes, once, only_run, rows, run, status
from test_train import start, wait_for_steps
from vgrout.config.presets import resolve
from vgrout.config.run import settings_sha256
from vgrout.envs.base import Splits
from vgrout.ground import console, embedded
from vgrout.ground.data import Ungraded
from vgrout.ground.io import Refused
from vgrout.ground.ranks import RankLost
from vgrout.guard import guard as watch
from vgrout.guard.detectors import EchoTrap
from vgrout.loop import grpo, rollout
from vgrout.model.load import load as weights
from vgrout.report.load import load
from vgrout.runs import checkpoint, context
from vgrout.runs.context import stop_on_signals
from vgrout.runs.recorder import Recorder
from vgrout.runs.run_dir import RunDir, steps_on_disk
from vgrout.sweep.entry import Ledger
from vgrout.train import main

TINY = "--threads 1 --group 4 --prompts-per-step 2 --final-n-prompts 1 --final-samples 1".split()
DETECTORS = ["--reward-hack-detector", "info_rm,advantage", "--echo-trap-enabled"]
GUARD = "--eval-ablate-every 2 --eval-n-prompts 2 --guard-warmup=2".split()
KILLS = 3  # per intervention
# What a default run leaves off: a KL term, the split by detectors, demonstrations that end, an
# ablated slice, a probe.
REST = "--beta 1e-3 --report-detectors E,C --teacher-off-step 5".split()
OF_ITS_OWN = {
    "none": [],
    "erase": [],
    "route": ["--rollout-ablate-frac", "0.5"],
    "route2": ["--rollout-ablate-frac", "0.5"],
    "screen": "--monitor online_probe --seed-monitor detector".split(),
}


def flags(intervention, *more, steps=6):
    """Everything on: demonstrations, refreshed direction, guard, detectors, a checkpoint each step."""
    refresh = [] if intervention == "none" else ["--vhack-refresh-every", "2"]
    argv = f"smoke --intervention {intervention} --steps {steps} --checkpoint-every 1".split()
    return once([*argv, *TINY, *GUARD, *DETECTORS, *refresh, *more])


def bare(intervention, *more, steps=4):
    """A checkpoint each step and nothing that watches: these runs take a second or two."""
    argv = f"smoke --intervention {intervention} --steps {steps} --checkpoint-every 1".split()
    return once([*argv, *TINY, "--eval-ablate-every=0", "--guard=off", *more])


def adapter_file(path):
    """The deployed model, metadata included."""
    return (path / "train.safetensors").read_bytes()


# --- kill -9 inside a save
# -------------------------------------------------------------------------------------------


def state(step):
    return {
        "step": step,
        "δS": torch.full((20_000,), float(step)),
        "watch": {"guard": {"streak": step}},
    }


def play(run, first, last):
    for step in range(first, last):
        run.append({"step": step}, [{"step": step}])
        checkpoint.save(run.path, step + 1, state(step), keep=2)


def latest(run):
    """The newest checkpoint, which is good."""
    passed_over = []
    point = next(checkpoint.newest_first(run, passed_over))
    assert passed_over == []
    return point


def require_sound(run):
    """The newest complete checkpoint verifies without passing any over, and the growing files reach it."""
    point = latest(run.path)
    assert point.state["step"] == point.next_step - 1
    assert torch.equal(point.state["δS"], state(point.next_step - 1)["δS"])
    checkpoint.rewind(run.path, point)
    assert steps_on_disk(run.path) == point.next_step
    return point.next_step


def die_at(call):
    """SIGKILL on the n-th call that touches the disk during a save."""
    calls = count(1)

    def deadly(real):
        return lambda *a, **kw: (
            os.kill(os.getpid(), signal.SIGKILL) if next(calls) == call else real(*a, **kw)
        )

    for name in ("fsync", "replace", "mkdir", "rmdir", "unlink", "open"):
        setattr(os, name, deadly(getattr(os, name)))
    shutil.rmtree = deadly(shutil.rmtree)


def test_kill_before_each_disk_call_of_a_save(tmp_path):
    """Two checkpoints stand, the third is being written and the first pruned: killed before each call in turn."""
    survived = 0
    for call in range(1, 100):
        with RunDir.create(f"r{call}", tmp_path) as run:
            play(run, 0, 2)
            run.close()
            if (pid := os.fork()) == 0:  # leaves without any clean-up
                try:
                    die_at(call)
                    play(run, 2, 3)
                finally:
                    os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert require_sound(run) in (2, 3)
            if code == 0:
                assert require_sound(run) == 3
                break
            assert code == -signal.SIGKILL
            survived += 1
            play(run, require_sound(run), 4)  # and goes on
            assert require_sound(run) == 4
            assert not list((run.path / "resume").glob(".tmp*"))
    assert 6 <= survived < 60, survived


# --- kill -9 of the program
# ------------------------------------------------------------------------------------------


def died(process, seconds):
    """Killed after so many seconds; False if it had ended by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, output
        return False
    process.kill()
    process.communicate()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("intervention", OF_ITS_OWN)
def test_repeated_kills(intervention, tmp_path):
    """At random moments of loading, training, evaluating and saving: rows and weights stay the same."""
    argv = flags(
        "none" if intervention == "screen" else intervention, *REST, *OF_ITS_OWN[intervention]
    )
    argv = [*argv, "--intervention", intervention]
    rng, begin = random.Random(intervention), time.monotonic()
    (whole := tmp_path / "whole").mkdir()
    assert not died(start(whole, *once(argv)), 900)
    lifetime, unbroken, deaths = time.monotonic() - begin, only_run(whole), 0
    for attempt in count():
        if deaths >= KILLS:
            break
        (folder := tmp_path / f"attempt_{attempt}" / "out").mkdir(parents=True)
        (folder / "svd_cache").symlink_to(whole / "out" / "svd_cache")
        again, finished = once(argv), []
        while not finished:
            deaths += died(
                start(folder.parent, *again), rng.uniform(0, lifetime) if deaths < KILLS else 900
            )
            if saved := [*folder.glob("runs/*/resume/step_*/manifest.json")]:
                again = ["smoke", "--resume", f"out/runs/{saved[0].parents[2].name}"]
            finished = [p for p in folder.glob("runs/*") if (p / "status.json").is_file()]
            finished = [p for p in finished if status(p)["state"] == "finished"]
        (path,) = finished
        assert rows(path) == rows(unbroken)
        assert adapter_file(path) == adapter_file(unbroken)


# --- damaged and vanished files
# --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory, shared_run):
    """A folder with a route2 run interrupted after three of four steps, and the pool that it reads."""
    home = shared_run.warm(tmp_path_factory.mktemp("home"))
    shutil.copytree(embedded.POOL_DIR, home / "pool")
    run(home, *bare("route2", "--teacher-pool-dir", "pool"), stop_after=2)
    return home


@pytest.fixture
def stopped(home, tmp_path, monkeypatch):
    """Its run directory in a copy of that folder, which is the working directory."""
    shutil.copytree(home, tmp_path / "home", symlinks=True)
    monkeypatch.chdir(tmp_path / "home")
    return only_run(Path()).resolve()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, shared_run):
    """The same run in one go."""
    folder = shared_run.warm(tmp_path_factory.mktemp("uninterrupted"))
    shutil.copytree(embedded.POOL_DIR, folder / "pool")
    return run(folder, *bare("route2", "--teacher-pool-dir", "pool"))


def refused(capsys, *argv):
    """The line in which the program refuses, before it has loaded a model."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(weights, "run_policy", lambda _: pytest.fail("a model is loaded"))
        assert main([*argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("E ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 0x10
    path.write_bytes(bytes(data))


DAMAGE = {
    "truncated": lambda p: os.truncate(p / "state.pt", (p / "state.pt").stat().st_size // 2),
    "bit flipped": lambda p: flip(p / "state.pt", 0.7),
    "manifest missing": lambda p: (p / "manifest.json").unlink(),
    "manifest cut": lambda p: os.truncate(p / "manifest.json", 30),
}


@pytest.mark.long
def test_resume_skips_damaged_checkpoints(stopped, uninterrupted, capsys):
    """The newest truncated, the one before it bit-flipped: from the first."""
    _, second, newest = checkpoint.complete(stopped)
    DAMAGE["truncated"](newest)
    DAMAGE["bit flipped"](second)
    assert run(Path.cwd(), "smoke", "--resume", "latest", "--threads", "1") == stopped
    output = capsys.readouterr().out
    assert (
        output.count("does not match its hash; the checkpoint is damaged; going back one further")
        == 2
    )
    assert "resumed after step 0" in output
    assert rows(stopped) == rows(uninterrupted)
    assert adapter_file(stopped) == adapter_file(uninterrupted)


@pytest.mark.parametrize("first", ["truncated", "manifest missing"])
def test_resume_without_a_good_checkpoint(first, stopped, capsys):
    for damage, point in zip(
        (first, "bit flipped", "manifest cut"), checkpoint.complete(stopped), strict=True
    ):
        DAMAGE[damage](point)
    before = status(stopped)
    assert main(["smoke", "--resume", str(stopped), "--threads", "1"]) == 2
    output = capsys.readouterr().err
    assert "no usable checkpoint" in output
    assert "does not match its hash" in output
    assert "it cannot be read" in output
    assert status(stopped) == before, "a refused resume leaves the run as it was"


def append(path, text):
    path.write_text(path.read_text() + text)


def ended(run, state):
    (run / "status.json").write_text(json.dumps(status(run) | {"state": state}))


# name: what happens to the run's folder, flags, what the one line says
REFUSED = {
    "finished": (lambda run: ended(run, "finished"), [], "this run is finished"),
    "routed nothing": (lambda run: ended(run, "unrouted"), [], "evaluated; it routed nothing"),
    "changed settings": (
        lambda _: None,
        ["--lr", "0.5", "--beta", "0.1"],
        "--lr 0.5 (run: 0.03), --beta 0.1",
    ),
    "pool file gone": (
        lambda _: min(Path("pool").glob("prompt_*")).unlink(),
        [],
        "recorded in pool.json, not there",
    ),
    "pool file altered": (
        lambda _: append(Path("pool/pool.json"), " "),
        [],
        "changed since: pool; put",
    ),
    "run.json torn": (lambda run: os.truncate(run / "run.json", 99), [], "run.json: not JSON"),
    "no run there": (shutil.rmtree, [], "run.json: not there"),
    # more steps than are done between two checkpoints: they are not cut away
    "no checkpoint": (lambda run: shutil.rmtree(run / "resume"), [], "is empty after 3 steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_resume(case, stopped, capsys):
    """One line, exit code 2, before anything is loaded; the run is left as it was."""
    damage, more, message = REFUSED[case]
    damage(stopped)
    before = {p: p.read_bytes() for p in sorted(stopped.rglob("*")) if p.is_file()}
    assert message in refused(capsys, "smoke", "--resume", str(stopped), *more)
    assert {p: p.read_bytes() for p in sorted(stopped.rglob("*")) if p.is_file()} == before


def test_resume_from_another_folder(tmp_path, monkeypatch, capsys):
    """A dry run needs no out/runs in the working directory; another program's run is refused."""
    for name in ("run", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    there = tmp_path / "run"
    (there / "status.json").write_text('{"state": "interrupted"}')
    for record in ({}, {"config": {"method": "uld"}}):
        (there / "run.json").write_text(json.dumps(record))
        why = f"E --resume {there}: not a run of vgrout.train; give one of those below out/runs\n"
        assert refused(capsys, "smoke", "--resume", str(there)) == why
    (there / "run.json").write_text(
        json.dumps({"config": resolve(bare("none")).as_dict(), "hashes": {}})
    )
    assert main(["smoke", "--resume", str(there), "--dry-run"]) == 0
    assert "MiB free" in capsys.readouterr().out


# --- disks
# -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a tmpfs of so many KiB; skips where this process may not."""
    mounted = []

    def mount(kib):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, leave):
    """A file that leaves so many bytes free."""
    ballast, disk = folder / "ballast", os.statvfs(folder)
    # the run may be quicker than we are
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as f:
        for _ in range((disk.f_bavail * disk.f_frsize - leave) // 4096):
            f.write(b"\0" * 4096)
    return ballast


@pytest.mark.parametrize("leave", [0, pytest.param(150_000, marks=pytest.mark.slow)])
@pytest.mark.long
def test_full_disk(leave, small_disk, tmp_path):
    """0: rows no longer fit. 150 000: rows do, the next checkpoint does not."""
    folder = small_disk(64 * 1024)
    process = start(folder, *bare("none", steps=300))
    while not list(folder.glob("out/runs/*/resume/step_*/manifest.json")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    path = only_run(folder)
    ballast = fill(folder, leave)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    end = status(path)
    assert end["state"] == "failed"
    assert end["reason"].startswith("disk full")
    assert "last good checkpoint is step_" in end["reason"]
    assert end["next"].startswith("free some space, then: ")
    assert " vgrout train smoke --resume" in end["next"]
    point = latest(path)
    ballast.unlink()
    again = run(
        folder, "smoke", "--resume", str(path), "--threads", "1", stop_after=point.next_step
    )
    assert again == path
    assert [r["step"] for r in rows(path)] == list(range(point.next_step + 1))


def test_small_disk_is_refused(stopped, small_disk, monkeypatch, capsys):
    """At the start, and on a resume."""
    monkeypatch.chdir(folder := small_disk(256))
    output = refused(capsys, "mini", "--intervention", "none")
    assert output.startswith("E out/runs: the run writes about ")
    assert "MiB are free" in output
    assert not (folder / "out").exists()
    monkeypatch.chdir(folder := small_disk(4096))
    shutil.copytree(stopped, folder / "out" / "runs" / stopped.name)
    (folder / "pool").symlink_to(stopped.parents[2] / "pool")
    record = loaded(stopped / "run.json")
    record["config"]["scale"]["steps"] = 100_000
    (folder / "out" / "runs" / stopped.name / "run.json").write_text(json.dumps(record))
    output = refused(capsys, "smoke", "--resume", "latest")
    assert "MiB more, " in output
    assert "free some space, or move the run to another disk" in output


@pytest.mark.long
def test_a_run_that_routed_nothing_is_evaluated_and_fails_for_good(tmp_path, capsys, monkeypatch):
    """Without demonstrations, and before the weak detector has flagged an answer, the gate has nothing to route."""
    path = run(tmp_path, *bare("route2", "--mix-ratio", "0"), code=1)
    end, final = status(path), loaded(path / "per_mode_deploy.json")
    assert (end["state"], end["step"]) == ("unrouted", 4)
    assert "routed nothing in 4 steps" in end["reason"] == final["unrouted"]
    assert final["solve_deploy"] is not None
    assert "**Nothing was routed**" in (path / "summary.md").read_text()
    assert load([path]) == ([], [f"{path.name} (unrouted)"])
    monkeypatch.chdir(tmp_path)
    ledger = Ledger()
    ledger.refresh()
    found = [record for of_identity in ledger._records.values() for record in of_identity]
    assert [record.state for record in found] == ["unrouted"]
    for which in (str(path), "latest"):
        assert main(["smoke", "--resume", which]) == 2
    assert status(path) == end, "it is not trained or evaluated again"


# --- halts
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervention", "more"),
    [
        ("route2", []),
        pytest.param("none", [], marks=pytest.mark.slow),
        pytest.param("screen", ["--monitor", "detector"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_halted_run_resumes_only_with_guard_log(intervention, more, tmp_path, capsys, monkeypatch):
    """Any KL at all is above 1e-12: the guard must fire at the first evaluation after the warm-up."""
    argv = f"smoke --intervention {intervention} --steps 5 --checkpoint-every 1".split()
    argv += [*more, *TINY, *GUARD]
    argv += "--guard-halt-on kl --kl-hard-stop 1e-12 --guard".split()
    path = run(tmp_path, *argv, "halt", code=3)
    end = status(path)
    assert end["state"] == "halted"
    assert end["reason"].startswith("guard: KL to the untrained model")
    assert end["step"] < 5
    assert "--guard log" in end["next"]
    assert latest(path).next_step == end["step"], "the halting step is saved"
    final = loaded(path / "per_mode_deploy.json")
    assert (final["halted"], final["steps_done"], final["steps"]) == (end["reason"], end["step"], 5)
    assert "**Halted**: " in (path / "summary.md").read_text()
    (counted,), _ = load([path])
    assert counted.seed_name == f"41 (halted at {end['step'] - 1})"
    assert len(counted.steps) == end["step"]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for again in ([], ["--guard", "halt"]):
        assert main(["smoke", "--resume", str(path), "--threads", "1", *again]) == 2
        assert "add --guard log" in capsys.readouterr().err
    assert status(path) == end
    assert main(["smoke", "--resume", str(path), "--threads", "1", "--guard", "log"]) == 0
    logged = run(tmp_path / "logged", *argv, "log")
    assert rows(path) == rows(logged)
    assert rows(path)[-1]["watch"]["guard"]["reason"].startswith("latched: ")
    record = loaded(path / "run.json")
    assert record["config"]["guard"]["guard"] == "log"
    assert [r["step"] for r in record["resumed"]] == [end["step"]]
    ledger = Ledger()  # a study that has the run finds it still
    ledger.refresh()
    found = ledger.find(settings_sha256(resolve([*argv, "halt"])), {})
    assert found.path.samefile(path)


@pytest.mark.long
def test_a_detector_halts(tmp_path, monkeypatch, capsys):
    """A base policy that never repeats anything makes every honest answer an echo."""
    monkeypatch.setattr(
        EchoTrap, "calibrate", lambda self, _texts: setattr(self, "base", 0.0) or 0.0
    )
    echo = ["--echo-trap-enabled", "--echo-trap-threshold", "0.01", "--echo-trap-halt"]
    path = run(tmp_path, *bare("none", *echo), code=3)
    assert "detector echo says HACK" in status(path)["reason"]
    command = status(path)["next"].partition("to go on all the same: ")[2]
    assert f"To go on all the same: {command}" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main("smoke --resume latest --threads 1".split()) == 2
    assert main("smoke --resume latest --threads 1 --guard log".split()) == 0
    assert len(rows(path)) == 4


@pytest.mark.long
def test_a_collapse_is_a_divergence(tmp_path):
    """A learning rate of 1000 destroys the model."""
    high = "--lr 1000 --grad-clip 1e9 --warmup-frac 0 --guard log".split()
    argv = bare("none", *high, steps=20)
    path = run(tmp_path, *argv, code=4)
    assert status(path)["state"] == "diverged"
    assert len(rows(path)) < 20
    assert re.search("collapsed|not finite", status(path)["reason"])


@pytest.mark.long
@pytest.mark.parametrize("lr", ["1e30", "1e38"])
@pytest.mark.parametrize("intervention", ["none", "route2"])
def test_an_update_that_overflows_is_a_divergence(lr, intervention, tmp_path):
    path = run(tmp_path, *bare(intervention, "--lr", lr, "--guard", "log"), code=4)
    assert status(path)["state"] == "diverged"
    assert "lower --lr" in status(path)["reason"]


@pytest.mark.slow
def test_watching_never_changes_training(tmp_path):
    argv = flags("erase", steps=4)
    blind = [a for a in argv if a not in (*DETECTORS, *GUARD[4:])]
    watched, unwatched = run(tmp_path / "a", *argv), run(tmp_path / "b", *blind, "--guard", "off")
    assert rows(watched, "watch") == rows(unwatched)
    assert adapter_bytes(watched) == adapter_bytes(unwatched)


# --- endings, by the command line
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_that_asks_for_an_end_is_heard_once(number, monkeypatch):
    monkeypatch.setattr(context, "ONE_REQUEST_S", 0.0)
    # the tests may themselves run under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with stop_on_signals() as stop:
        signal.raise_signal(number)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_several_sigterms_at_once_are_one_request(monkeypatch):
    """A sweep that is killed sends one for each of its threads."""
    with stop_on_signals() as stop:
        for _ in range(5):
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        # those that are passed over do not put off the next one that counts
        monkeypatch.setattr(context, "ONE_REQUEST_S", 0.3)

        def keeps_asking():
            for _ in range(50):
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.1)

        with pytest.raises(KeyboardInterrupt):
            keeps_asking()


def test_another_signal_right_after_a_sigterm_counts():
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_before_the_first_step_one_signal_is_enough():
    loading = True
    with stop_on_signals(lambda: loading) as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested
    loading = False
    with stop_on_signals(lambda: loading) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested


# as the installed command
COMMAND = """import sys
from vgrout.__main__ import main
print("begun", flush=True)
sys.exit(main())
"""


@pytest.mark.long
@pytest.mark.parametrize(("after", "twice"), [(0.1, False), (1.0, True), (4.0, True)])
def test_ctrl_c_in_the_first_seconds_shows_no_traceback(tmp_path, after, twice):
    script = tmp_path / "vgrout"
    script.write_text(COMMAND)
    process = subprocess.Popen(
        [sys.executable, script, "train", *bare("none", steps=9999)],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # the tests may themselves run in the background of a script, which ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "begun\n"
    time.sleep(after)
    for _ in range(1 + twice):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    output, _ = process.communicate(timeout=60)
    assert "Traceback" not in output
    # the second one may come when Python has put its handlers away; a shell makes 130 of that too
    assert process.returncode in (130, -signal.SIGINT)


def test_a_signal_that_comes_while_a_line_is_logged_is_said_beside_it(capfd, monkeypatch):
    console.setup(None)
    monkeypatch.setattr(
        console, "printable", lambda line: (signal.raise_signal(signal.SIGINT), line)[1]
    )
    with stop_on_signals() as stop:
        logger.info("a line")
        monkeypatch.undo()
    assert stop.requested
    out, error = capfd.readouterr()
    assert out == "a line\n"
    assert "W SIGINT: finishing this step" in error


def test_a_hangup_that_is_ignored_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_interrupt_in_the_final_evaluation(tmp_path, monkeypatch):
    """All steps done, the report not: 130, and a resume does the report alone."""
    real = Splits.balanced

    def interrupted(splits, part, n):
        if part == "test":
            signal.raise_signal(signal.SIGTERM)
        return real(splits, part, n)

    with monkeypatch.context() as m:
        m.setattr(Splits, "balanced", interrupted)
        path = run(tmp_path, *bare("none"), code=130)
    assert status(path)["reason"] == "interrupted before the final evaluation was done"
    assert not (path / "summary.md").exists()
    assert run(tmp_path, "smoke", "--resume", "latest", "--threads", "1") == path
    assert (path / "summary.md").exists()
    assert len(rows(path)) == 4


@pytest.mark.slow
def test_killed_sandbox_workers_change_no_row(tmp_path):
    """One is killed in every step; with unlimited retries nothing is dropped.

    Not two: an answer that loses its worker twice is taken for the reason.
    """
    argv = bare("none", "--max-error-retries", "None", steps=8)
    uninterrupted = run(tmp_path / "uninterrupted", *argv)
    (folder := tmp_path / "hit").mkdir()
    process = start(folder, *argv)
    path, killed = wait_for_steps(folder, 1, process), set[str]()
    steps = path / "steps.jsonl"
    while process.poll() is None and len(killed) < 12:
        done = len(steps.read_text().splitlines())
        workers = set[str]()
        # of every thread: a worker is a child of the one that started it
        for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                workers |= {*children.read_text().split()} - killed
        for worker in sorted(workers, key=int)[:1]:
            with contextlib.suppress(OSError):
                os.kill(int(worker), signal.SIGKILL)
                killed.add(worker)
        while process.poll() is None and len(steps.read_text().splitlines()) == done:
            time.sleep(0.02)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert len(killed) >= 2
    assert rows(path) == rows(uninterrupted)
    assert adapter_file(path) == adapter_file(uninterrupted)


# --- the command that an ending prints


def interrupted_twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def raising(e):
    def ending():
        raise e

    return ending


# how a run ends in its second step: the ending, and its exit code
ENDINGS = {
    "SIGINT": (lambda: signal.raise_signal(signal.SIGINT), 130),
    "SIGTERM": (lambda: signal.raise_signal(signal.SIGTERM), 130),
    "SIGINT twice": (interrupted_twice, 130),
    "a fault": (raising(RuntimeError("shapes do not fit")), 1),
    "a refusal": (raising(Refused("the reward file is gone")), 1),
    "out of memory": (raising(MemoryError("cannot allocate 3 bytes")), 1),
    "a lost rank": (raising(RankLost("another rank has ended")), 1),
    "a full disk": (lambda: None, 1),
}


def printed_command(text):
    """The arguments of the last `vgrout train …` in a text."""
    command = re.findall(r"vgrout train (.*)", text)[-1]
    return shlex.split(command)


@pytest.mark.long
@pytest.mark.parametrize("saved", [False, True], ids=["no checkpoint", "a checkpoint"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_printed_command_goes_on(ending, saved, tmp_path, shared_run, capsys, monkeypatch):
    """Whether or not there is a checkpoint, and in a folder of one's own with a blank in its name."""
    ends, code = ENDINGS[ending]
    record = Recorder.record

    def end_in_second_step(self, row, *rest):
        if row.step == 1:
            ends()
        record(self, row, *rest)
        if ending == "a full disk":
            files = self.run.dir._files
            files["steps.jsonl"].close()
            files["steps.jsonl"] = open("/dev/full", "w")  # noqa: SIM115
            Recorder.record = record  # or this test's frame would be somebody's own code

    argv = bare("none", "--checkpoint-every", "1" if saved else "9", steps=3)
    whole = shared_run(*argv)
    monkeypatch.chdir(shared_run.warm(tmp_path))
    with monkeypatch.context() as m:
        m.setattr(Recorder, "record", end_in_second_step)
        assert main([*argv, "--output-dir", "my run"]) == code
    path, printed = tmp_path / "my run", capsys.readouterr()
    is_saved = saved or ending in ("SIGINT", "SIGTERM")  # a run that is asked to stop saves
    assert any(path.glob("resume/step_*")) == is_saved
    said = f"{printed.out}{printed.err}"
    assert ("the last checkpoint stands" in said) <= is_saved
    resume = printed_command(status(path)["next"])
    assert resume[-2:] == ["--resume", "my run"]
    if ending not in ("a fault", "a refusal"):  # their last line is what was wrong
        assert printed_command(said) == resume
    assert main(resume) == 0
    assert rows(path) == rows(whole)
    assert adapter_bytes(path) == adapter_bytes(whole)
    record_file = loaded(path / "run.json")
    assert record_file["hashes"]["base_weights"]


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_ended_while_it_loaded_is_gone_on_from(
    killed, tmp_path, shared_run, monkeypatch
):
    """One that was killed has a record, and no status yet."""
    argv = bare("none", steps=3)
    monkeypatch.chdir(shared_run.warm(tmp_path))
    with monkeypatch.context() as m:
        m.setattr(weights, "run_policy", lambda _: raising(RuntimeError("no such layer"))())
        assert main(argv) == 1
    path = only_run(tmp_path)
    again = printed_command(status(path)["next"])
    if killed:
        (path / "status.json").unlink()
    assert main(again) == 0
    assert rows(path) == rows(shared_run(*argv))


# --- failures inside a step
# ------------------------------------------------------------------------------------------


def poison(monkeypatch, at):
    """One NaN in one row's gradient, on those calls."""
    real, calls = grpo._is_finite, count()

    def poisoned(g, metrics):
        if next(calls) in at and len(g):
            g[0, 0] = torch.nan
        return real(g, metrics)

    monkeypatch.setattr(grpo, "_is_finite", poisoned)


def saved_vectors(path, *steps):
    for step in steps:
        yield torch.load(path / f"resume/step_{step:06d}/state.pt", weights_only=True)["adapter"][
            "delta_S"
        ]


@pytest.mark.parametrize("intervention", ["none", "route2"])
@pytest.mark.long
def test_nonfinite_step_is_skipped(intervention, tmp_path, shared_run, monkeypatch):
    poison(monkeypatch, {1})
    path = run(shared_run.warm(tmp_path), *bare(intervention), stop_after=3)
    assert [r["skipped"] for r in rows(path)] == [0, 1, 0, 0]
    assert rows(path)[1]["loss"] is None
    assert rows(path)[2]["gn"] > 0
    before, after = saved_vectors(path, 2, 3)
    assert not torch.equal(before, after)
    assert after.isfinite().all()


@pytest.mark.long
def test_three_nonfinite_steps_end_the_run(tmp_path, monkeypatch):
    poison(monkeypatch, {0, 1, 2})
    path = run(tmp_path, *bare("none", steps=6), code=4)
    assert [r["skipped"] for r in rows(path)] == [1, 1, 1]
    end = status(path)
    assert (end["state"], end["step"]) == ("diverged", 3)
    assert "3 steps in a row" in end["reason"]
    assert not latest(path).state["adapter"]["delta_S"].any()
    monkeypatch.chdir(tmp_path)
    assert main("smoke --resume latest --threads 1".split()) == 4


@pytest.mark.long
def test_sandbox_failure_drops_only_its_group(tmp_path, monkeypatch):
    """Step 1 loses one group, step 2 all: they are counted with the reason, and nothing is learnt from them."""
    make = rollout.rollout

    def shaky(policy, grader, problems, demos, cfg, step, **more):
        submit, lost = grader.submit, Future()
        lost.set_result(Ungraded("worker lost 4 times: gone"))
        with monkeypatch.context() as m:
            gone = {0: [], 1: [problems[0].id], 2: [p.id for p in problems]}.get(step, [])
            m.setattr(
                grader, "submit", lambda p, *answer: lost if p.id in gone else submit(p, *answer)
            )
            return make(policy, grader, problems, demos, cfg, step, **more)

    monkeypatch.setattr("vgrout.loop.rollout.rollout", shaky)
    path = run(tmp_path, *bare("none"), stop_after=3)
    seen = rows(path)
    assert [r["dropped"] for r in seen] == [0, 1, 2, 0]
    assert [r["drop_why"] for r in seen] == [
        None,
        "worker lost 4 times: gone",
        "worker lost 4 times: gone",
        None,
    ]
    assert seen[2]["gn"] is None
    assert torch.equal(*saved_vectors(path, 2, 3))


@pytest.mark.long
def test_tripwire_without_teacher(tmp_path):
    argv = ["smoke", "--intervention", "none", "--steps", "6", *TINY, "--teacher-pool-dir", ""]
    path = run(tmp_path, *argv, stop_after=5)
    read = [r["step"] for r in rows(path) if "collapse" in r.get("watch", {})]
    assert read == [0, watch.SCORE_EVERY]
