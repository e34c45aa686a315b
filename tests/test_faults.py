"""Runs whose machine, disk or numbers fail. Processes really die, disks are really full."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kills
from runs import FEW, SharedRuns, adapter_bytes, once, rows, run, status, until
from test_train import start, wait_for_steps
from vgrout import loading, optim, rollout
from vgrout.config.presets import parse, resumed
from vgrout.config.run import identity
from vgrout.data import organism
from vgrout.guard import guard as watch
from vgrout.guard.detectors import EchoTrap
from vgrout.report.runs import load
from vgrout.runs import checkpoint
from vgrout.runs.run_dir import RunDir
from vgrout.sweep.ledger import Ledger
from vgrout.train import main
from vgrout.types import Ungraded

TINY = ["--threads", "1", "--group", "4", "--prompts-per-step", "2", "--final-n-prompts", "1", "--final-samples", "1"]
DETECTORS = ["--reward-hack-detector", "info_rm,advantage", "--echo-trap-enabled"]
GUARD = ["--eval-ablate-every", "2", "--eval-n-prompts", "2", "--guard-warmup=2", "--guard-baseline=1"]
KILLS = 3  # per intervention; `python -m benchmarks kills` does more


def flags(intervention: str, *more: str, steps: int = 6) -> list[str]:
    """Everything on: demonstrations, refreshed direction, guard, detectors, a checkpoint each step."""
    refresh = [] if intervention == "none" else ["--vhack-refresh-every", "2"]
    argv = ["smoke", "--intervention", intervention, "--steps", str(steps), *TINY, *GUARD, *DETECTORS, *refresh]
    return once([*argv, "--checkpoint-every", "1", *more])


def bare(intervention: str, *more: str, steps: int = 4) -> list[str]:
    """A checkpoint each step and nothing that watches: these runs take a second or two."""
    argv = ["smoke", "--intervention", intervention, "--steps", str(steps), *TINY, "--eval-ablate-every", "0"]
    return once([*argv, "--checkpoint-every", "1", "--guard", "off", *more])


def adapter_file(path: Path) -> bytes:
    """The deployed model, metadata included."""
    return (path / "train.safetensors").read_bytes()


def only_run(folder: Path) -> Path:
    (path,) = (folder / "out" / "runs").iterdir()
    return path


# --- kill -9 inside a save -------------------------------------------------------------------------------------------


def in_child(body: Callable[[], None]) -> tuple[int, Callable[[], int]]:
    """Fork, run `body`, leave without any clean-up. Returns pid and a function that reaps it: 0 or −signal."""
    if (pid := os.fork()) == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def state(step: int) -> dict[str, Any]:
    return {"step": step, "δS": torch.full((20_000,), float(step)), "watch": {"guard": {"streak": step}}}


def play(run: RunDir, first: int, last: int) -> None:
    for step in range(first, last):
        run.append({"step": step}, [{"step": step}])
        checkpoint.save(run.path, step + 1, state(step), keep=2)


def require_sound(run: RunDir) -> int:
    """The newest complete checkpoint verifies without passing any over, and the growing files reach it."""
    point, passed_over = checkpoint.latest(run.path)
    assert passed_over == []
    assert point.state["step"] == point.next_step - 1
    assert torch.equal(point.state["δS"], state(point.next_step - 1)["δS"])
    checkpoint.rewind(run.path, point)
    assert run.steps_on_disk() == point.next_step
    return point.next_step


def die_at(call: int) -> None:
    """SIGKILL on the n-th call that touches the disk during a save."""
    count = 0

    def deadly(real: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapped

    calls = ((os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (os, "open"))
    for module, name in (*calls, (shutil, "rmtree")):
        setattr(module, name, deadly(getattr(module, name)))


def test_kill_before_each_disk_call_of_a_save(tmp_path: Path) -> None:
    """Two checkpoints stand, the third is being written and the first pruned: killed before each call in turn."""
    survived = 0
    for call in range(1, 100):
        with RunDir.create(f"r{call}", tmp_path) as run:
            play(run, 0, 2)
            run.close()

            def body(run: RunDir = run, call: int = call) -> None:
                die_at(call)
                play(run, 2, 3)

            _, reap = in_child(body)
            code = reap()
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


def test_kill_at_random_moments_of_saving(tmp_path: Path) -> None:
    rng = random.Random(0)
    with RunDir.create("r", tmp_path) as run:
        play(run, 0, 1)
        run.close()
        first = 1
        for _ in range(30):
            pid, reap = in_child(lambda first=first: play(run, first, first + 1000))
            while not (run.path / "resume" / f"step_{first + 1:06d}").exists():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
            assert reap() == -signal.SIGKILL
            before, first = first, require_sound(run)
            assert first > before


# --- kill -9 of the program ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("intervention", kills.ARMS)
def test_repeated_kills(intervention: str, tmp_path: Path) -> None:
    """At random moments of loading, training, evaluating and saving: rows and weights stay the same."""
    tally = kills.torture(intervention, KILLS, tmp_path)
    print(kills.table([tally]))
    assert (tally.survived, tally.tried) == (KILLS, KILLS), tally


DIE_IN_SAVE = """
import os, signal, sys
from vgrout import train
from vgrout.runs import checkpoint
real, left = os.replace, [{n}]
def replace(a, b):
    left[0] -= "resume" in str(a)
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(a, b)
os.replace = replace
sys.exit(train.main({argv!r}))
"""


@pytest.fixture(scope="module")
def uninterrupted_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("three"), *flags("route2", steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 5, 6])
def test_kill_inside_a_save(n: int, uninterrupted_three: Path, tmp_path: Path) -> None:
    """state.pt, manifest.json, the folder: the second checkpoint's three renames."""
    code = DIE_IN_SAVE.format(n=n, argv=flags("route2", steps=3))
    folder = tmp_path / "killed"
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    path = only_run(folder)
    assert [p.name for p in checkpoint.complete(path)] == ["step_000001"]
    assert run(folder, "smoke", "--resume", "latest", "--threads", "1") == path
    assert rows(path) == rows(uninterrupted_three)
    assert adapter_file(path) == adapter_file(uninterrupted_three)


# --- damaged and vanished files --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, shared_run: SharedRuns) -> Path:
    """A folder with a route2 run interrupted after three of four steps, and the pool that it reads."""
    home = shared_run.warm(tmp_path_factory.mktemp("home"))
    shutil.copytree(organism.POOL_DIR, home / "pool")
    run(home, *bare("route2", "--teacher-pool-dir", "pool"), stop_after=2)
    return home


@pytest.fixture
def stopped(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its run directory in a copy of that folder, which is the working directory."""
    shutil.copytree(home, tmp_path / "home", symlinks=True)
    monkeypatch.chdir(tmp_path / "home")
    return only_run(Path()).resolve()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, shared_run: SharedRuns) -> Path:
    """The same run in one go."""
    folder = shared_run.warm(tmp_path_factory.mktemp("uninterrupted"))
    shutil.copytree(organism.POOL_DIR, folder / "pool")
    return run(folder, *bare("route2", "--teacher-pool-dir", "pool"))


def command(*argv: str, code: int, launcher: str = "") -> str:
    """The output of a command line in the working directory. launcher: code to run before the program."""
    how = ["-c", f"{launcher}\nimport sys; from vgrout.train import main; sys.exit(main())"] if launcher else []
    done = subprocess.run(
        [sys.executable, *(how or ["-m", "vgrout.train"]), *argv], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line in which the program refuses, before it has loaded a model."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(loading, "load_policy", lambda _: pytest.fail("a model is loaded"))
        assert main([*argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("E ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 0x10
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda p: os.truncate(p / "state.pt", (p / "state.pt").stat().st_size // 2),
    "bit flipped": lambda p: flip(p / "state.pt", 0.7),
    "manifest missing": lambda p: (p / "manifest.json").unlink(),
    "manifest cut": lambda p: os.truncate(p / "manifest.json", 30),
}


@pytest.mark.long
def test_resume_skips_damaged_checkpoints(
    stopped: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest truncated, the one before it bit-flipped: from the first."""
    _, second, newest = checkpoint.complete(stopped)
    DAMAGE["truncated"](newest)
    DAMAGE["bit flipped"](second)
    assert run(Path.cwd(), "smoke", "--resume", "latest", "--threads", "1") == stopped
    output = capsys.readouterr().out
    assert output.count("does not match its hash; the checkpoint is damaged; going back one further") == 2
    assert "resumed after step 0" in output
    assert rows(stopped) == rows(uninterrupted)
    assert adapter_file(stopped) == adapter_file(uninterrupted)


@pytest.mark.parametrize("first", ["truncated", "manifest missing"])
def test_resume_without_a_good_checkpoint(first: str, stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for damage, point in zip((first, "bit flipped", "manifest cut"), checkpoint.complete(stopped), strict=True):
        DAMAGE[damage](point)
    before = status(stopped)
    assert main(["smoke", "--resume", str(stopped), "--threads", "1"]) == 2
    output = capsys.readouterr().err
    assert "no usable checkpoint" in output
    assert "does not match its hash" in output
    assert "manifest cannot be read" in output
    assert status(stopped) == before, "a refused resume leaves the run as it was"


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def finish(run: Path) -> None:
    (run / "status.json").write_text(json.dumps(status(run) | {"state": "finished"}))


def unroute(run: Path) -> None:
    (run / "status.json").write_text(json.dumps(status(run) | {"state": "unrouted"}))


# name: what happens to the run's folder, flags, what the one line says
REFUSED: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "finished": (finish, [], "this run is finished"),
    "routed nothing": (unroute, [], "this run is evaluated; it routed nothing"),
    "changed settings": (lambda _: None, ["--lr", "0.5", "--beta", "0.1"], "--lr 0.5 (run: 0.03), --beta 0.1"),
    "another dtype": (lambda _: None, ["--dtype", "bf16"], "--dtype bf16 (run: fp32)"),
    "pool file gone": (lambda _: min(Path("pool").glob("prompt_*")).unlink(), [], "recorded in pool.json, not there"),
    "pool file altered": (lambda _: append(Path("pool/pool.json"), " "), [], "changed since: pool; put"),
    "pool gone": (lambda _: shutil.rmtree("pool"), [], "--teacher-pool-dir pool: no such folder"),
    "run.json torn": (lambda run: os.truncate(run / "run.json", 99), [], "run.json: damaged"),
    "status.json gone": (lambda run: (run / "status.json").unlink(), [], "status.json: not there"),
    "no run there": (shutil.rmtree, [], "run.json: not there"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_resume(case: str, stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, before anything is loaded; the run is left as it was."""
    damage, more, message = REFUSED[case]
    damage(stopped)
    before = {p: p.read_bytes() for p in sorted(stopped.rglob("*")) if p.is_file()}
    assert message in refused(capsys, "smoke", "--resume", str(stopped), *more)
    assert {p: p.read_bytes() for p in sorted(stopped.rglob("*")) if p.is_file()} == before


def test_resume_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run needs no out/runs in the working directory; another program's run is refused."""
    there, here = tmp_path / "run", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    (there / "status.json").write_text('{"state": "interrupted"}')
    for record in ({}, {"config": {"method": "uld"}}):
        (there / "run.json").write_text(json.dumps(record))
        assert main(["smoke", "--resume", str(there)]) == 2
        assert capsys.readouterr().err == (
            f"E --resume {there}: not a run of vgrout.train; give one of those below out/runs\n"
        )
    (there / "run.json").write_text(json.dumps({"config": parse(bare("none")).as_dict(), "hashes": {}}))
    assert main(["smoke", "--resume", str(there), "--dry-run"]) == 0
    assert "MiB free" in capsys.readouterr().out


def test_a_running_run_is_not_resumed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.reopen(stopped):
        assert "another process is writing this run" in command("smoke", "--resume", str(stopped), code=2)
        assert "running ones left out" in refused(capsys, "smoke", "--resume", "latest")


def test_resume_keeps_settings() -> None:
    """Process settings too: a run that saved every step still does after a resume."""
    stored = parse(bare("none"))
    assert resumed(parse(["smoke", "--resume", "x", "--resume-force"]), stored) == (stored, [])
    cfg, differing = resumed(parse(["smoke", "--resume", "x", "--checkpoint-every", "7"]), stored)
    assert (cfg.run.checkpoint_every, cfg.run.threads, differing) == (7, 1, [])


# --- disks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many KiB; skips where this process may not."""
    mounted: list[Path] = []

    def mount(kib: int) -> Path:
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


def fill(folder: Path, leave: int) -> Path:
    """A file that leaves so many bytes free."""
    ballast, disk = folder / "ballast", os.statvfs(folder)
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as f:  # the run may be quicker than we are
        for _ in range((disk.f_bavail * disk.f_frsize - leave) // 4096):
            f.write(b"\0" * 4096)
    return ballast


@pytest.mark.parametrize("leave", [0, pytest.param(150_000, marks=pytest.mark.slow)])
@pytest.mark.long
def test_full_disk(leave: int, small_disk: Callable[[int], Path], tmp_path: Path) -> None:
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
    assert end["next"].startswith("free some space, then: python -m vgrout.train smoke --resume")
    point, passed_over = checkpoint.latest(path)
    assert passed_over == []
    ballast.unlink()
    again = run(folder, "smoke", "--resume", str(path), "--threads", "1", stop_after=point.next_step)
    assert again == path
    assert [r["step"] for r in rows(path)] == list(range(point.next_step + 1))


def test_small_disk_is_refused(
    small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder := small_disk(256))
    output = refused(capsys, "mini", "--intervention", "none")
    assert output.startswith("E out/runs: the run writes about ")
    assert "MiB are free" in output
    assert not (folder / "out").exists()


def test_small_disk_is_refused_on_resume(
    stopped: Path,
    small_disk: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder := small_disk(4096))
    shutil.copytree(stopped, folder / "out" / "runs" / stopped.name)
    (folder / "pool").symlink_to(stopped.parents[2] / "pool")
    record = json.loads((stopped / "run.json").read_text())
    record["config"]["scale"]["steps"] = 100_000
    (folder / "out" / "runs" / stopped.name / "run.json").write_text(json.dumps(record))
    output = refused(capsys, "smoke", "--resume", "latest")
    assert "MiB more, " in output
    assert "free some space, or move the run to another disk" in output


def test_read_only_folder_is_refused(
    stopped: Path,
    small_disk: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, home = small_disk(64 * 1024), Path.cwd()
    shutil.copytree(home / "out" / "runs", folder / "out" / "runs")
    (folder / "logs").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    monkeypatch.chdir(folder)
    output = refused(capsys, "smoke", "--intervention", "none")
    assert output.startswith("E out/runs: cannot be written (Read-only file system)")
    monkeypatch.chdir(home)
    again = refused(capsys, "smoke", "--resume", str(folder / "out" / "runs" / stopped.name))
    assert "cannot be written (Read-only file system)" in again


@pytest.mark.slow
def test_vanished_folder(tmp_path: Path) -> None:
    process = start(tmp_path, *bare("none", steps=300))
    shutil.rmtree(wait_for_steps(tmp_path, 2, process).rename(tmp_path / "gone"))  # at once for the run
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert "files of the run cannot be written" in output
    assert "there is no checkpoint" in output


@pytest.mark.long
def test_a_run_that_routed_nothing_is_evaluated_and_fails_for_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without demonstrations, and before the weak detector has flagged an answer, the gate has nothing to route."""
    path = run(tmp_path, *bare("route2", "--mix-ratio", "0"), code=1)
    end, final = status(path), json.loads((path / "per_mode_deploy.json").read_text())
    assert (end["state"], end["step"]) == ("unrouted", 4)
    assert "routed nothing in 4 steps" in end["reason"] == final["unrouted"]
    assert final["solve_deploy"] is not None
    assert "NOTHING WAS ROUTED" in (path / "summary.md").read_text()
    assert load([path]).left_out == [f"{path.name} (unrouted)"]
    monkeypatch.chdir(tmp_path)
    ledger = Ledger()
    ledger.refresh()
    assert [record.state for record in filter(None, ledger._records.values())] == ["unrouted"]
    for which in (str(path), "latest"):
        assert main(["smoke", "--resume", which]) == 2
    assert status(path) == end, "it is not trained or evaluated again"


# --- halts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervention", "more"),
    [
        ("route2", []),
        pytest.param("none", [], marks=pytest.mark.slow),
        pytest.param("screen", ["--monitor", "pmi", *FEW], marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_halted_run_resumes_only_with_guard_log(
    intervention: str,
    more: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any KL at all is above 1e-12: the guard must fire at the first evaluation after the warm-up."""
    argv = ["smoke", "--intervention", intervention, *more, "--steps", "5", *TINY, *GUARD, "--checkpoint-every", "1"]
    argv += ["--guard-halt-on", "kl", "--kl-hard-stop", "1e-12", "--guard"]
    path = run(tmp_path, *argv, "halt", code=3)
    end = status(path)
    assert end["state"] == "halted"
    assert end["reason"].startswith("guard: KL to the initial policy")
    assert end["step"] < 5
    assert "--guard log" in end["next"]
    assert checkpoint.latest(path)[0].next_step == end["step"], "the halting step is saved"
    final = json.loads((path / "per_mode_deploy.json").read_text())
    assert (final["halted"], final["steps_done"], final["steps"]) == (end["reason"], end["step"], 5)
    assert "halted after step" in (path / "summary.md").read_text()
    (counted,) = load([path]).runs
    assert counted.seed_name == f"41 (halted at {end['step'] - 1})"
    assert len(counted.rows) == end["step"]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for again in ([], ["--guard", "halt"], ["--resume-force"]):
        assert main(["smoke", "--resume", str(path), "--threads", "1", *again]) == 2
        assert "add --guard log" in capsys.readouterr().err
    assert status(path) == end
    assert main(["smoke", "--resume", str(path), "--threads", "1", "--guard", "log"]) == 0
    logged = run(tmp_path / "logged", *argv, "log")
    assert rows(path) == rows(logged)
    assert rows(path)[-1]["watch"]["guard"]["reason"].startswith("latched: ")
    record = json.loads((path / "run.json").read_text())
    assert record["config"]["guard"]["guard"] == "log"
    assert [r["step"] for r in record["resumed"]] == [end["step"]]
    ledger = Ledger()  # a study that has the run finds it still
    ledger.refresh()
    found = ledger.find(identity(parse([*argv, "halt"])), {})
    assert found is not None
    assert found.path.samefile(path)


@pytest.mark.long
def test_a_detector_halts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base policy that never repeats anything makes every honest answer an echo."""

    def silent(self: EchoTrap, _texts: Any) -> float:
        self.base = 0.0
        return 0.0

    monkeypatch.setattr(EchoTrap, "calibrate", silent)
    path = run(
        tmp_path, *bare("none", "--echo-trap-enabled", "--echo-trap-threshold", "0.01", "--echo-trap-halt"), code=3
    )
    assert "detector echo says HACK" in status(path)["reason"]
    monkeypatch.chdir(tmp_path)
    assert main(["smoke", "--resume", "latest", "--threads", "1"]) == 2
    assert main(["smoke", "--resume", "latest", "--threads", "1", "--guard", "log"]) == 0
    assert len(rows(path)) == 4


def test_a_collapse_is_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate of 1000 destroys the model."""
    argv = bare("none", "--lr", "1000", "--grad-clip", "1e9", "--warmup-frac", "0", "--guard", "log", steps=20)
    path = run(tmp_path, *argv, code=4)
    end = status(path)
    assert end["state"] == "diverged"
    assert len(rows(path)) < 20
    assert "collapsed" in end["reason"] or "not finite" in end["reason"]


@pytest.mark.slow
def test_watching_never_changes_training(tmp_path: Path) -> None:
    argv = flags("erase", steps=4)
    blind = [a for a in argv if a not in (*DETECTORS, *GUARD[4:])]
    watched, unwatched = run(tmp_path / "a", *argv), run(tmp_path / "b", *blind, "--guard", "off")
    assert rows(watched, "watch") == rows(unwatched)
    assert adapter_bytes(watched) == adapter_bytes(unwatched)


# --- endings, by the command line ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    """In the middle of an endless step; the last checkpoint stands."""
    code = "import time; from vgrout import rollout; real = rollout.rollout\n"
    code += "rollout.rollout = lambda *a, **k: time.sleep(9999) if a[5] == 2 else real(*a, **k)\n"
    code += f"import sys; from vgrout import train; sys.exit(train.main({bare('none')!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    path = wait_for_steps(tmp_path, 2, process)
    until(lambda: any(p.name.endswith("2") for p in checkpoint.complete(path)))
    process.send_signal(signal.SIGINT)
    (log,) = tmp_path.glob("logs/*")
    until(lambda: "SIGINT: finishing this step" in log.read_text())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert (status(path)["state"], status(path)["step"]) == ("interrupted", 2)
    assert "stopped at once; the last checkpoint stands" in output
    assert checkpoint.latest(path)[0].next_step == 2


@pytest.mark.slow
def test_interrupt_in_the_final_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps done, the report not: 130, and a resume does the report alone."""
    monkeypatch.chdir(tmp_path)
    ask = "import os, signal; from vgrout import evaluate; real = evaluate.balanced\n"
    ask += "evaluate.balanced = lambda *a: (os.kill(os.getpid(), signal.SIGTERM), real(*a))[1]"
    command(*bare("none"), code=130, launcher=ask)
    path = only_run(tmp_path)
    assert status(path)["reason"] == "interrupted before the final evaluation was done"
    assert not (path / "summary.md").exists()
    command("smoke", "--resume", "latest", code=0)
    assert (path / "summary.md").exists()
    assert len(rows(path)) == 4


@pytest.mark.slow
def test_a_stalled_phase_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a heartbeat of one second, a slow sampler and a slow loader are each named twice."""
    monkeypatch.chdir(tmp_path)
    slow = "import time; from vgrout import console, loading, rollout; console.HEARTBEAT_S = 1.0\n"
    slow += "def late(real): return lambda *a, **k: (time.sleep(2.6), real(*a, **k))[1]\n"
    slow += "rollout.sample = late(rollout.sample); loading.load_policy = late(loading.load_policy)"
    output = command(*bare("none", steps=1), code=0, launcher=slow)
    for phase in ("loading", "gen"):
        assert f"still in {phase}: 1 s" in output
        assert f"still in {phase}: 2 s" in output


@pytest.mark.slow
def test_killed_sandbox_workers_change_no_row(tmp_path: Path) -> None:
    """Killed again and again while the run grades; with unlimited retries nothing is dropped."""
    argv = bare("none", "--max-error-retries", "None", steps=8)
    uninterrupted = run(tmp_path / "uninterrupted", *argv)
    (folder := tmp_path / "hit").mkdir()
    process = start(folder, *argv)
    path = wait_for_steps(folder, 1, process)
    killed: set[int] = set()
    while process.poll() is None and len(killed) < 12:
        for worker in children(process.pid) - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
            killed.add(worker)
        time.sleep(0.2)  # only the pace
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert len(killed) >= 2
    assert rows(path) == rows(uninterrupted)
    assert adapter_file(path) == adapter_file(uninterrupted)


def children(pid: int) -> set[int]:
    """Processes whose parent is `pid`."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.add(int(entry.parent.name))
    return found


# --- failures inside a step ------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, at: set[int]) -> None:
    """One NaN in one rollout's gradient, on those calls."""
    real, calls = optim.policy_gradients, iter(range(1000))

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        grads, metrics = real(*args, **kwargs)
        if next(calls) in at and grads and grads[0]:
            next(iter(grads[0][0].values()))[0, 0] = torch.nan
        return grads, metrics

    monkeypatch.setattr(optim, "policy_gradients", poisoned)


@pytest.mark.parametrize("intervention", ["none", "route2"])
@pytest.mark.long
def test_nonfinite_step_is_skipped(
    intervention: str, tmp_path: Path, shared_run: SharedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1})
    path = run(shared_run.warm(tmp_path), *bare(intervention), stop_after=3)
    assert [r["skipped"] for r in rows(path)] == [0, 1, 0, 0]
    assert rows(path)[1]["loss"] is None
    assert rows(path)[2]["gn"] > 0
    before, after = (torch.load(path / f"resume/step_{s:06d}/state.pt", weights_only=True) for s in (2, 3))
    assert not torch.equal(before["adapter"]["delta_S"], after["adapter"]["delta_S"])
    assert after["adapter"]["delta_S"].isfinite().all()


def test_three_nonfinite_steps_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {0, 1, 2})
    path = run(tmp_path, *bare("none", steps=6), code=4)
    assert [r["skipped"] for r in rows(path)] == [1, 1, 1]
    end = status(path)
    assert (end["state"], end["step"]) == ("diverged", 3)
    assert "3 steps in a row" in end["reason"]
    assert not checkpoint.latest(path)[0].state["adapter"]["delta_S"].any()
    monkeypatch.chdir(tmp_path)
    assert main(["smoke", "--resume", "latest", "--threads", "1"]) == 4


def test_sandbox_failure_drops_only_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 loses one group, step 2 all: they are counted with the reason, and nothing is learnt from them."""
    make = rollout.rollout

    def shaky(policy: Any, grader: Any, problems: Any, demos: Any, cfg: Any, step: int, **more: Any) -> Any:
        submit, first = grader.submit, problems[0].id

        def lossy(problem: Any, text: str) -> Future:
            future: Future = Future()
            if step == 2 or (step == 1 and problem.id == first):
                future.set_result(Ungraded("worker lost 4 times: gone"))
                return future
            return submit(problem, text)

        with monkeypatch.context() as m:
            m.setattr(grader, "submit", lossy)
            return make(policy, grader, problems, demos, cfg, step, **more)

    monkeypatch.setattr(rollout, "rollout", shaky)
    path = run(tmp_path, *bare("none"), stop_after=3)
    seen = rows(path)
    assert [r["dropped"] for r in seen] == [0, 1, 2, 0]
    assert [r["drop_why"] for r in seen] == [None, "worker lost 4 times: gone", "worker lost 4 times: gone", None]
    assert seen[2]["gn"] is None
    before, after = (torch.load(path / f"resume/step_{s:06d}/state.pt", weights_only=True) for s in (2, 3))
    assert torch.equal(before["adapter"]["delta_S"], after["adapter"]["delta_S"])


@pytest.mark.long
def test_tripwire_without_teacher(tmp_path: Path) -> None:
    argv = ["smoke", "--intervention", "none", "--steps", "6", *TINY, "--teacher-pool-dir", ""]
    path = run(tmp_path, *argv, stop_after=5)
    read = [r["step"] for r in rows(path) if "collapse" in r.get("watch", {})]
    assert read == [0, watch.SCORE_EVERY]


def test_guard_that_cannot_fire() -> None:
    with pytest.raises(SystemExit):
        parse(["fast", "--steps", "10"])
    assert parse(["fast", "--steps", "10", "--guard", "log"]).guard_blind
    assert parse(["smoke"]).guard_mode == "log"
    assert parse(["full"]).guard_mode == "halt"
    assert parse(["full", "--intervention=none"]).guard_mode == "log"
    cfg = parse(["mini"])
    with pytest.raises(ValueError, match="could not fire"):
        replace(cfg, guard=replace(cfg.guard, guard="halt", guard_warmup=1000))
