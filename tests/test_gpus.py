"""Runs on GPUs of their own: eight pretended cards, and real processes that write down which of them they saw."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runs import until
from vgrout.config.presets import resolve
from vgrout.model.packing import how_to_install_flash
from vgrout.sweep import runner
from vgrout.sweep.__main__ import main
from vgrout.sweep.gpus import Share, visible
from vgrout.sweep.pueue import Pueue
from vgrout.sweep.workers import Attempt

EIGHT = "".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i}{i}{i}a)\n" for i in range(8))
MIG = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-000a)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4)
  MIG 3g.40gb     Device  1: (UUID: MIG-cba6)
"""
STUDY = """
name = "many"
preset = "smoke"
seeds = [{seeds}]
[[arms]]
intervention = "none"
"""
# What stands in for a run: notes what it saw, and leaves a finished run. DIE: the seed whose
# first attempt is killed after a checkpoint.
RUN = """
import json, os, pathlib, shutil, signal, sys, time
flags = sys.argv[1:]
resumed = [pathlib.Path(f.partition("=")[2]) for f in flags if f.startswith("--resume=")]
seed = next((f.partition("=")[2] for f in flags if f.startswith("--seed=")), None) or resumed[0].name
def note(what):
    saw = {"what": what, "seed": int(seed), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "flags": flags}
    with open("saw.jsonl", "a") as f:
        f.write(json.dumps(saw | {"at": time.monotonic(), "pid": os.getpid()}) + "\\n")
note("start")
run = pathlib.Path("out/runs", seed)
until = time.monotonic() + 120  # so that as many as there is room for go at once, on a busy machine, too
while open("saw.jsonl").read().count('"start"') < int(os.environ["TOGETHER"]) and time.monotonic() < until:
    time.sleep(0.05)
shutil.copytree(pathlib.Path("prepared", seed), run, dirs_exist_ok=True)
if seed == os.environ.get("DIE") and not resumed:
    (run / "status.json").write_text(json.dumps({"state": "running"}))
    (run / "resume" / "step_000001").mkdir(parents=True)
    (run / "resume" / "step_000001" / "manifest.json").write_text("{}")
    note("end")
    os.kill(os.getpid(), signal.SIGKILL)
note("end")
"""


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what this machine's nvidia-smi lists; eight cards at first. The locks lie in the test's own folder."""
    client = tmp_path / "bin" / "nvidia-smi"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat {tmp_path}/cards\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "cards").write_text(EIGHT)
    return lambda listed: (tmp_path / "cards").write_text(listed) and None


@pytest.fixture
def study(tmp_path: Path, cards: object, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Makes a study of n seeds whose runs are those of RUN."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(RUN)
    monkeypatch.setattr(Attempt, "argv", property(lambda self: [sys.executable, str(tmp_path / "run.py"), *self.flags]))

    def make(n: int) -> Path:
        for seed in range(1, n + 1):
            path = tmp_path / "prepared" / str(seed)
            path.mkdir(parents=True)
            cfg = resolve(["smoke", "--intervention=none", f"--seed={seed}"])
            (path / "run.json").write_text(json.dumps({"config": cfg.as_dict(), "hashes": {}}))
            (path / "status.json").write_text(json.dumps({"state": "finished"}))
            (path / "per_mode_deploy.json").write_text(json.dumps({"hack_deploy": 0.25, "solve_deploy": 0.5}))
        file = tmp_path / "many.toml"
        file.write_text(STUDY.format(seeds=", ".join(map(str, range(1, n + 1)))))
        return file

    return make


def saw() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("saw.jsonl").read_text().splitlines()]


def spans() -> list[tuple[float, float, tuple[str, ...]]]:
    """Of every process, when it began and ended, and its GPUs."""
    notes = saw()
    ends = {n["pid"]: n["at"] for n in notes if n["what"] == "end"}
    return [(n["at"], ends[n["pid"]], tuple(n["gpus"].split(","))) for n in notes if n["what"] == "start"]


def assert_never_shared(gpus: set[str], each: int = 1) -> None:
    """No GPU has two runs at a time, every one is used, and more than one run goes at a time."""
    runs = spans()
    assert {gpu for _, _, own in runs for gpu in own} == gpus
    assert all(len(set(own)) == each for _, _, own in runs)
    alongside = [(a, b) for a in runs for b in runs if a is not b and a[0] < b[1] and b[0] < a[1]]
    assert alongside
    assert all(not {*a[2]} & {*b[2]} for a, b in alongside)


@pytest.mark.parametrize(
    ("listed", "allowed", "names"),
    [
        (EIGHT, None, "0 1 2 3 4 5 6 7"),
        (EIGHT, "5, 2", "5 2"),
        (EIGHT, "GPU-222a,GPU-33", "GPU-222a GPU-33"),
        (EIGHT, "1,-1,2", "1"),  # CUDA stops at the first that is none
        (EIGHT, "7,8", "7"),
        (EIGHT, "NoDevFiles", ""),  # SLURM's, for a job without one
        (EIGHT, "", ""),
        (MIG, None, "MIG-c6d4 MIG-cba6"),
        (MIG, "MIG-cba6", "MIG-cba6"),
        ("", "0,1", ""),
    ],
)
def test_visible_gpus(
    listed: str,
    allowed: str | None,
    names: str,
    cards: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards(listed)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert visible() == tuple(names.split())


def test_install_line_names_a_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert "`uv sync --extra gpu` compiles it with nvcc, which is not here" in how_to_install_flash()
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch()
    assert "an hour or more" in how_to_install_flash()


def test_jobs_are_gpus_or_else_cores(cards: Callable[[str], None]) -> None:
    assert [Share.of(None, each, 3).jobs for each in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert Share.of(2, 3, 3).jobs == 2  # two GPUs idle, as was asked
    cards("")
    assert Share.of(None, 1, 3) == Share(3)
    assert Share.of(9, 1, 3) == Share(9)


@pytest.mark.parametrize(
    ("listed", "jobs", "each", "refused"),
    [
        (EIGHT, 9, 1, "--jobs 9: 8 GPUs here (0, 1, 2, 3, 4, 5, 6, 7), 1 a run; give at most 8"),
        (EIGHT, 5, 2, "2 a run; give at most 4"),
        (EIGHT, None, 3, "some would idle; give one of 1, 2, 4, 8, or add --jobs 2"),
        (EIGHT, None, 9, "--gpus-per-run 9: 8 GPUs here (0, 1, 2, 3, 4, 5, 6, 7); give at most 8"),
        (MIG, None, 2, "--gpus-per-run 2: a process can use one MIG instance; leave it out"),
        ("", None, 2, "--gpus-per-run 2: there is no GPU here; leave it out"),
    ],
)
def test_what_has_no_room_is_refused(
    listed: str, jobs: int | None, each: int, refused: str, cards: Callable[[str], None]
) -> None:
    cards(listed)
    with pytest.raises(ValueError, match=re.escape(refused)):
        Share.of(jobs, each, 3)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (["--jobs=9"], "--jobs 9: 8 GPUs here (0, 1, 2, 3, 4, 5, 6, 7), 1 a run; give at most 8"),
        (["--gpus-per-run=8"], "a step has 4 rollouts; give at most 4"),
        (["--gpus-per-run=2", "--commands"], "--gpus-per-run: not read with --commands: torchrun starts the ranks"),
        (["--gpus-per-run=2", "--via=ray"], "--gpus-per-run: not read with --via ray: a run has one GPU"),
        (["--gpus-per-run=0"], "--gpus-per-run 0: should lie in [1, 1024]"),
    ],
)
def test_refusals_leave_nothing(
    flags: list[str], refused: str, study: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(study(1)), *flags]) == 2
    output = capsys.readouterr().err
    assert refused in output
    assert output.count("\n") == 1
    assert not Path("out").exists()


def test_ranks_of_a_study_need_a_gpu_each(study: Callable[[int], Path], capsys: pytest.CaptureFixture[str]) -> None:
    file = study(1)
    file.write_text(file.read_text() + "ranks = 2\n")
    assert main([str(file), "--dry-run"]) == 2
    assert "--ranks 2, and each rank needs a GPU; add --gpus-per-run 2" in capsys.readouterr().err
    assert main([str(file), "--dry-run", "--gpus-per-run=2"]) == 0
    output = capsys.readouterr().out
    assert "4 at a time, 1 wave" in output
    assert "GPUs 0, 1, 2, 3, 4, 5, 6, 7: each run has 2 of its own, a rank on each" in output


def test_dry_run_says_jobs_gpus_and_waves(study: Callable[[int], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(study(20)), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "8 at a time, 3 waves" in output
    assert "GPUs 0, 1, 2, 3, 4, 5, 6, 7: each run has one of its own" in output


def test_runs_never_share_a_gpu_and_a_dead_one_frees_its_own(
    study: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = study(12)
    monkeypatch.setenv("DIE", "3")
    monkeypatch.setenv("TOGETHER", "8")
    assert main([str(file)]) == 1  # the killed one
    assert_never_shared({*"01234567"})
    assert len(spans()) == 12
    assert main([str(file)]) == 0  # it is resumed, on a GPU of its own
    (last,) = saw()[-1:]
    assert last["flags"] == ["smoke", "--resume=out/runs/3"]
    assert last["gpus"] in {*"01234567"}


def test_several_gpus_a_run(study: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"GPU-{i}{i}" for i in (1, 2, 3, 6, 7)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names[:4]))
    monkeypatch.setenv("TOGETHER", "2")
    assert main([str(study(5)), "--gpus-per-run=2"]) == 0
    assert_never_shared({*names[:4]}, each=2)
    assert all("--ranks=2" in note["flags"] for note in saw())


def test_on_the_cpu_nothing_is_set(
    study: Callable[[int], Path], cards: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards("")
    monkeypatch.setenv("TOGETHER", "1")
    assert main([str(study(1)), "--jobs=1"]) == 0
    assert {note["gpus"] for note in saw()} == {None}


def test_queued_runs_and_a_sweep_share_the_gpus(
    study: Callable[[int], Path],
    cards: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue that starts six runs at once on two GPUs, one of which another process has, until it is killed."""
    cards("\n".join(EIGHT.splitlines()[:2]))
    monkeypatch.setenv("TOGETHER", "2")
    commands: list[list[str]] = []
    monkeypatch.setattr(Pueue, "__init__", lambda self: setattr(self, "open", set()))
    monkeypatch.setattr(Pueue, "add", lambda self, argv, label: commands.append([*argv]))
    assert main([str(study(6)), "--via=pueue"]) == 0
    holder = subprocess.Popen(Share(1, ("0", "1")).command(["sleep", "600"]))
    until(lambda: _command(holder.pid) == "sleep")
    with ThreadPoolExecutor(6) as pool:
        ended = pool.map(lambda argv: subprocess.run(argv, capture_output=True, text=True), commands)
        until(lambda: Path("saw.jsonl").exists() and len(saw()) == 1)
        holder.send_signal(signal.SIGKILL)
        done = [*ended]
    assert [p.returncode for p in done] == [0] * 6
    assert any(p.stdout == "I waiting until 1 of the GPUs 0, 1 are free\n" for p in done)
    until(lambda: holder.poll() is not None)
    assert_never_shared({"0", "1"})


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]


def test_a_signal_ends_a_run_that_waits(cards: object, tmp_path: Path) -> None:
    """As one that was interrupted, with its GPUs free."""
    command = Share(1, ("0",)).command
    holder = subprocess.Popen(command(["sleep", "600"]))
    until(lambda: _command(holder.pid) == "sleep")
    waiting = subprocess.Popen(command(["true"]), stdout=subprocess.PIPE, text=True)
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "I waiting until 1 of the GPUs 0 are free\n"
    waiting.terminate()
    assert runner.ENDED[waiting.wait()] == "interrupted"
    waiting.stdout.close()
    holder.kill()
    holder.wait()
    assert subprocess.run(command(["true"]), timeout=60).returncode == 0
