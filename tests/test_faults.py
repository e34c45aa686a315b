"""What happens to a run when the machine, the disk or the numbers fail. Processes really die, disks are really full."""

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

from test_loop import ARMS, adapter_bytes, rows, run, start
from vgrout import checkpoint, loop, nonfinite, watch
from vgrout.config import parse
from vgrout.detectors import EchoTrap
from vgrout.nouns import Ungraded
from vgrout.replay import main as replay_main
from vgrout.run_dir import RunDir
from vgrout.train import main

TINY = ["--threads", "1", "--group", "4", "--prompts-per-step", "2", "--final-n-prompts", "6", "--final-samples", "1"]
DETECTORS = ["--reward-hack-detector", "separation,info_rm,mop,rm_ensemble,ragen,advantage", "--echo-trap-enabled"]
GUARD = ["--eval-ablate-every", "2", "--eval-n-prompts", "2", "--guard-warmup", "2", "--guard-baseline", "1"]
KILLS = 5  # of each arm's run


def flags(arm: str, *more: str, steps: int = 6) -> list[str]:
    """Everything on: demonstrations, refreshed direction, guard, every detector, a checkpoint each step."""
    refresh = [] if arm == "none" else ["--vhack-refresh-every", "2"]
    argv = ["smoke", "--intervention", arm, "--steps", str(steps), *TINY, *GUARD, *DETECTORS, *refresh]
    return [*argv, "--checkpoint-every", "1", *more]


def bare(arm: str, *more: str, steps: int = 4) -> list[str]:
    """A checkpoint each step and nothing that watches, where nothing needs to: these runs take a second or two."""
    argv = ["smoke", "--intervention", arm, "--steps", str(steps), *TINY, "--eval-ablate-every", "0"]
    return [*argv, "--checkpoint-every", "1", "--guard", "off", *more]


def status(path: Path) -> dict[str, Any]:
    return json.loads((path / "status.json").read_text())


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
    """SIGKILL on the n-th call of anything that touches the disk on the way through a save."""
    count = 0

    def deadly(real: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapped

    for module, name in ((os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (os, "open")):
        setattr(module, name, deadly(getattr(module, name)))
    checkpoint.shutil.rmtree = deadly(checkpoint.shutil.rmtree)  # type: ignore[assignment]


def test_death_at_every_step_of_a_save(tmp_path: Path) -> None:
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


def test_death_at_random_moments_of_saving(tmp_path: Path) -> None:
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
@pytest.mark.parametrize("arm", ARMS)
def test_killed_at_random_moments_again_and_again(arm: str, tmp_path: Path) -> None:
    """Kills while loading, sampling, training, evaluating and saving; the rows never notice."""
    whole = run(tmp_path / "whole", *flags(arm, "--seed", "7"))
    folder = tmp_path / "killed"
    folder.mkdir()
    rng = random.Random(f"kill {arm}")
    process = start(folder, *flags(arm, "--seed", "7"))
    while not list(folder.glob("out/runs/*/resume/step_*/manifest.json")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    path = only_run(folder)
    kills = 0
    for _ in range(KILLS):
        began = time.monotonic()
        wait = rng.choice([rng.uniform(0, 1.0), rng.uniform(0, 12.0)])
        while process.poll() is None and time.monotonic() - began < wait:
            time.sleep(0.005)
        if process.poll() is not None:
            break
        process.kill()
        process.communicate()
        kills += 1
        process = start(folder, "smoke", "--resume", str(path), "--threads", "1")
    said, _ = process.communicate(timeout=600)
    assert kills >= 1
    assert process.returncode == 0, said
    assert rows(path) == rows(whole)
    assert adapter_bytes(path) == adapter_bytes(whole)
    print(f"{arm}: {kills} kills survived")


DIE_IN_SAVE = """
import os, signal, sys
from vgrout import checkpoint, train
real, left = os.replace, [{n}]
def replace(a, b):
    left[0] -= "resume" in str(a)
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(a, b)
os.replace = replace
sys.exit(train.main({argv!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 5, 6])
def test_killed_inside_a_save(n: int, tmp_path: Path) -> None:
    """state.pt, manifest.json, the folder: the second checkpoint's three renames."""
    whole = run(tmp_path / "whole", *flags("route2", steps=3))
    code = DIE_IN_SAVE.format(n=n, argv=flags("route2", steps=3))
    folder = tmp_path / "killed"
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    path = only_run(folder)
    assert [p.name for p in checkpoint.complete(path)] == ["step_000001"]
    assert run(folder, "smoke", "--resume", "latest", "--threads", "1") == path
    assert rows(path) == rows(whole)
    assert adapter_bytes(path) == adapter_bytes(whole)


# --- damaged and vanished files --------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A route2 run interrupted after three of four steps, its folder the working directory."""
    monkeypatch.chdir(tmp_path)
    close = loop.Books.close_step

    def stop_after_three(self: loop.Books, row: Any, *rest: Any) -> None:
        self.study.stop.requested = row.step == 2
        close(self, row, *rest)

    with monkeypatch.context() as m:
        m.setattr(loop.Books, "close_step", stop_after_three)
        return run(tmp_path, *bare("route2"), code=130)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one go."""
    return run(tmp_path_factory.mktemp("whole"), *bare("route2"))


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


@pytest.mark.parametrize("damage", ["truncated", "manifest missing"])
def test_resume_goes_back_one_checkpoint(damage: str, stopped: Path, whole: Path) -> None:
    DAMAGE[damage](checkpoint.complete(stopped)[-1])
    assert run(Path.cwd(), "smoke", "--resume", "latest", "--threads", "1") == stopped
    assert rows(stopped) == rows(whole)
    assert adapter_bytes(stopped) == adapter_bytes(whole)


def test_nothing_left_to_resume_from(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, point in enumerate(checkpoint.complete(stopped)):
        DAMAGE[["truncated", "bit flipped", "manifest cut"][i]](point)
    before = status(stopped)
    assert main(["smoke", "--resume", str(stopped), "--threads", "1"]) == 2
    said = capsys.readouterr().out
    assert "no usable checkpoint" in said
    assert "does not match its hash" in said
    assert "manifest cannot be read" in said
    assert status(stopped) == before, "a refused resume leaves the run as it was"


def test_a_pool_that_vanished_or_changed(
    stopped: Path, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`whole` shows what it would have been: a pool that lost a file must not quietly give other rows."""
    record = json.loads((stopped / "run.json").read_text())
    record["hashes"]["pool"] = "0" * 64
    (stopped / "run.json").write_text(json.dumps(record))
    assert main(["smoke", "--resume", str(stopped), "--threads", "1"]) == 2
    assert "changed since: pool" in capsys.readouterr().out
    monkeypatch.setattr("vgrout.organism.POOL_DIR", Path("vanished"))
    assert main(["smoke", "--resume", str(stopped), "--threads", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("E ")
    assert "vanished" in said
    assert said.count("\n") == 1
    assert status(stopped)["state"] == "interrupted"


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


@pytest.mark.parametrize("leave", [0, 150_000])
def test_a_full_disk_stops_the_run_and_says_so(leave: int, small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    """0: rows no longer fit. 150 000: rows do, the next checkpoint does not."""
    folder = small_disk(64 * 1024)
    process = start(folder, *bare("none", steps=300))
    while not list(folder.glob("out/runs/*/resume/step_*/manifest.json")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    path = only_run(folder)
    ballast = fill(folder, leave)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    end = status(path)
    assert end["state"] == "failed"
    assert end["reason"].startswith("disk full")
    assert "last good checkpoint is step_" in end["reason"]
    assert end["next"].startswith("free some space, then: python -m vgrout.train smoke --resume")
    point, passed_over = checkpoint.latest(path)
    assert passed_over == []
    ballast.unlink()
    resumed = start(folder, "smoke", "--resume", str(path.relative_to(folder)), "--threads", "1")
    while resumed.poll() is None and not (
        status(path)["state"] == "running" and status(path)["step"] > point.next_step
    ):
        time.sleep(0.02)
    resumed.send_signal(signal.SIGINT)
    said, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 130, said
    assert [r["step"] for r in rows(path)] == list(range(len(rows(path))))


def test_a_disk_too_small_is_refused_at_the_start(
    small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_disk(256)
    monkeypatch.chdir(folder)
    assert main(["mini", "--intervention", "none"]) == 2
    said = capsys.readouterr().err
    assert "MiB are free" in said
    assert said.count("\n") == 1
    assert not list((folder / "out" / "runs").iterdir())


def test_a_read_only_folder_is_refused(
    stopped: Path,
    small_disk: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, home = small_disk(64 * 1024), stopped.parents[2]
    copy = folder / "out" / "runs" / stopped.name
    shutil.copytree(home / "out" / "runs", folder / "out" / "runs")
    (folder / "logs").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    monkeypatch.chdir(folder)
    assert main(["smoke", "--intervention", "none"]) == 2
    said = capsys.readouterr().err
    assert "cannot be written (Read-only file system)" in said
    monkeypatch.chdir(home)
    assert main(["smoke", "--resume", str(copy)]) == 2
    said += capsys.readouterr().err
    assert said.count("cannot be written") == 2
    assert said.count("\n") == 2


# --- halts -----------------------------------------------------------------------------------------------------------


def test_the_guard_halts_and_only_log_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any KL at all is above 1e-12: the guard must fire at the first evaluation after the warm-up."""
    argv = ["smoke", "--intervention", "none", "--steps", "6", *TINY, *GUARD, "--checkpoint-every", "1"]
    argv += ["--beta", "0.001", "--kl-hard-stop", "1e-12", "--guard"]
    path = run(tmp_path, *argv, "halt", code=3)
    end = status(path)
    assert end["state"] == "halted"
    assert end["reason"].startswith("guard: KL to the initial policy")
    assert end["step"] < 6
    assert "--guard log" in end["next"]
    assert checkpoint.latest(path)[0].next_step == end["step"], "the halting step is saved"
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
    """A learning rate of 1000 leaves nothing of what the model knew."""
    argv = bare("none", "--lr", "1000", "--grad-clip", "1e9", "--warmup-frac", "0", "--guard", "log", steps=20)
    path = run(tmp_path, *argv, code=4)
    end = status(path)
    assert end["state"] == "diverged"
    assert len(rows(path)) < 20
    assert "collapsed" in end["reason"] or "not finite" in end["reason"]


def test_watching_never_changes_training(tmp_path: Path) -> None:
    argv = flags("erase", steps=4)
    blind = [a for a in argv if a not in DETECTORS]
    watched, unwatched = run(tmp_path / "a", *argv), run(tmp_path / "b", *blind, "--guard", "off")
    assert rows(watched, "watch") == rows(unwatched)
    assert adapter_bytes(watched) == adapter_bytes(unwatched)


# --- failures inside a step ------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, at: set[int]) -> None:
    """One NaN in one rollout's gradient, on those calls."""
    real, calls = loop.policy_gradients, iter(range(1000))

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        grads, metrics = real(*args, **kwargs)
        if next(calls) in at and grads:
            next(iter(grads[0].values()))[0, 0] = torch.nan
        return grads, metrics

    monkeypatch.setattr(loop, "policy_gradients", poisoned)


@pytest.mark.parametrize("arm", ["none", "route2"])
def test_a_step_that_is_not_finite_is_skipped_and_kept(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as m:
        poison(m, {1})
        path = run(tmp_path, *bare(arm))
    assert [r["skipped"] for r in rows(path)] == [0, 1, 0, 0]
    assert rows(path)[1]["loss"] is None
    assert rows(path)[2]["gn"] > 0
    before, after = (torch.load(path / f"resume/step_{s:06d}/state.pt", weights_only=True) for s in (2, 3))
    assert not torch.equal(before["adapter"]["delta_S"], after["adapter"]["delta_S"])
    assert after["adapter"]["delta_S"].isfinite().all()
    file = path / "nonfinite_step0001.pt"
    capsys.readouterr()
    assert replay_main([str(file)]) == 0
    said = capsys.readouterr().out
    assert "every rollout is finite this time" in said
    batch = nonfinite.load(file)
    assert batch.step == 1
    assert sum(map(len, batch.groups)) == said.count("student") + said.count("teacher")
    data = torch.load(file, weights_only=True)
    data["adapter"]["delta_S"][0] = torch.inf
    torch.save(data, tmp_path / "worse.pt")
    assert replay_main([str(tmp_path / "worse.pt")]) == 4
    assert "not finite again" in capsys.readouterr().out


def test_three_in_a_row_are_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {0, 1, 2})
    path = run(tmp_path, *bare("none", steps=6), code=4)
    assert [r["skipped"] for r in rows(path)] == [1, 1, 1]
    assert "3 steps in a row" in status(path)["reason"]
    assert sorted(p.name for p in path.glob("nonfinite*")) == [f"nonfinite_step000{i}.pt" for i in (0, 1, 2)]


def test_replay_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pt").write_bytes(b"nothing")
    for name in ("x.pt", "y.pt"):
        assert replay_main([str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert name in said
        assert said.count("\n") == 1


def test_a_sandbox_that_fails_drops_its_group_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 loses one group, step 2 all of them: counted, explained, and nothing is learnt from what is not there."""
    collect = loop.collect

    def shaky(study: loop.Study, problems: Any, step: int, clock: Any) -> Any:
        real, first = study.grader.submit, problems[0].id

        def submit(problem: Any, text: str) -> Future:
            future: Future = Future()
            if step == 2 or (step == 1 and problem.id == first):
                future.set_result(Ungraded("worker lost 4 times: gone"))
                return future
            return real(problem, text)

        study.grader.submit = submit  # type: ignore[method-assign]
        try:
            return collect(study, problems, step, clock)
        finally:
            study.grader.submit = real  # type: ignore[method-assign]

    monkeypatch.setattr(loop, "collect", shaky)
    path = run(tmp_path, *bare("none"))
    seen = rows(path)
    assert [r["dropped"] for r in seen] == [0, 1, 2, 0]
    assert [r["drop_why"] for r in seen] == [None, "worker lost 4 times: gone", "worker lost 4 times: gone", None]
    assert seen[2]["gn"] is None
    before, after = (torch.load(path / f"resume/step_{s:06d}/state.pt", weights_only=True) for s in (2, 3))
    assert torch.equal(before["adapter"]["delta_S"], after["adapter"]["delta_S"])


def test_the_tripwire_without_teacher_scores_the_base_policys_answers(tmp_path: Path) -> None:
    path = run(tmp_path, "smoke", "--intervention", "none", "--steps", "6", *TINY, "--teacher-pool-dir", "")
    read = [r["step"] for r in rows(path) if "collapse" in r.get("watch", {})]
    assert read == [0, watch.SCORE_EVERY]


def test_a_guard_that_cannot_fire() -> None:
    with pytest.raises(SystemExit):
        parse(["fast", "--steps", "10"])
    assert parse(["fast", "--steps", "10", "--guard", "log"]).guard_blind
    assert parse(["smoke"]).guard_mode == "log"
    assert parse(["full"]).guard_mode == "halt"
    cfg = parse(["mini"])
    with pytest.raises(ValueError, match="could not fire"):
        replace(cfg, guard=replace(cfg.guard, guard="halt", guard_warmup=1000))
