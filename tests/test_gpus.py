"""Runs on GPUs of their own: pretended cards, and real processes that write down which of them they saw."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runs import until
from vgrout.config.presets import resolve
from vgrout.ground import machine
from vgrout.ground.machine import free_bytes, visible
from vgrout.runs import plan as run_plan
from vgrout.sweep.workers import Local

EIGHT = "".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i}{i}{i}a)\n" for i in range(8))
MIG = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-000a)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4)
  MIG 3g.40gb     Device  1: (UUID: MIG-cba6)
"""


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Sets what this machine's nvidia-smi lists."""
    client = tmp_path / "bin" / "nvidia-smi"
    client.parent.mkdir()
    client.write_text(
        f'#!/bin/sh\n[ "$1" = -L ] && cat {tmp_path}/cards\n[ "$1" = --id=5 ] && echo 40960\n'
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return (tmp_path / "cards").write_text


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
def test_visible_gpus(listed, allowed, names, cards, monkeypatch):
    cards(listed)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert visible() == tuple(names.split())


def test_what_is_free_is_asked_of_the_first_gpu(cards, monkeypatch):
    cards(EIGHT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    assert free_bytes() == 40 * 2**30
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")  # which says nothing that is a number
    assert free_bytes() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert free_bytes() is None


@pytest.mark.parametrize(
    ("allowed", "device", "dtype"), [(None, "cuda", "bf16"), ("", "cpu", "fp32")]
)
def test_a_plan_is_made_for_what_a_run_may_use(allowed, device, dtype, cards, monkeypatch):
    """On WSL2, too, which has nvidia-smi in a folder of its own and no /dev/nvidia0."""
    cards(EIGHT)
    client = Path(shutil.which("nvidia-smi") or "")
    monkeypatch.setattr(machine, "WSL", str(client.parent))
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    cfg = resolve(["mini"])
    assert (run_plan.device_of(cfg), run_plan.dtype_of(cfg)) == (device, dtype)


def started(local, folder, name):
    """A process that says what it sees, and ends once the file `end NAME` is there."""
    entry = SimpleNamespace(
        argv=[sys.executable, "-c", NOTE, str(folder / name), str(folder / f"end {name}")]
    )
    return local.start(entry, folder / "log")


NOTE = """
import os, pathlib, sys, time
name, ends = sys.argv[1:]
seen = [os.environ.get(n, "") for n in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")]
pathlib.Path(name).write_text(",".join(seen))
while not pathlib.Path(ends).exists(): time.sleep(0.02)
"""


def test_a_slot_has_its_own_gpu(tmp_path, monkeypatch):
    """The next run gets the GPU of one that has ended."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    local = Local(None, ("0", "GPU-aa", "5"))
    assert local.slots == 3
    jobs = {name: started(local, tmp_path, name) for name in "abc"}
    (tmp_path / "end b").touch()
    until(lambda: jobs["b"].poll() == 0)
    jobs["d"] = started(local, tmp_path, "d")
    for name in "acd":
        (tmp_path / f"end {name}").touch()
    until(lambda: all(jobs[name].poll() == 0 for name in "acd"))
    assert [(tmp_path / name).read_text() for name in "abcd"] == [
        "0,7",
        "GPU-aa,7",
        "5,7",
        "GPU-aa,7",
    ]


@pytest.mark.parametrize(("jobs", "threads"), [(1, "7"), (2, "1")])
def test_on_the_cpu_several_runs_have_a_thread_each(jobs, threads, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "end a").touch()
    local = Local(jobs, ())
    assert local.slots == jobs
    job = started(local, tmp_path, "a")
    until(lambda: job.poll() == 0)
    assert (tmp_path / "a").read_text() == f",{threads}"
