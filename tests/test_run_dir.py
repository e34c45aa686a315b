"""Files of a run: atomic writes, refusals, checkpoints that are complete or absent."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vgrout import train
from vgrout.errors import refuse
from vgrout.files import held, to_json, write_atomic
from vgrout.model import load
from vgrout.runs import checkpoint
from vgrout.runs.context import RunDir, last_resumable


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir.create("smoke_none_seed1", tmp_path / "out" / "runs") as run:
        yield run


def test_write_atomic_leaves_the_old_file_on_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_nan_never_reaches_a_file() -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json({"x": float("nan")})


def test_runs_in_one_second_get_their_own_folders(tmp_path: Path) -> None:
    runs = [RunDir.create("x", tmp_path) for _ in range(3)]
    for run in runs:
        run.append({"step": 0}, [])
        run.close()
        checkpoint.save(run.path, 1, {}, keep=1)
        run.status("interrupted", 1, "", "")
    assert len({run.path.name for run in runs}) == 3
    assert last_resumable(tmp_path) == runs[-1].path


def test_rows_have_their_rollouts_and_a_torn_one_does_not_count(run: RunDir) -> None:
    run.append({"step": 0}, [{"a": 1}, {"a": 2}])
    assert run.steps_on_disk() == 1
    with open(run.path / "steps.jsonl", "a") as f:
        f.write('{"step": 1, "lo')  # killed
    assert run.steps_on_disk() == 1
    assert len((run.path / "rollouts.jsonl").read_text().splitlines()) == 2


def test_status_and_latest(run: RunDir) -> None:
    root = run.path.parent
    with pytest.raises(ValueError, match="no unfinished run"):
        last_resumable(root)
    run.append({"step": 0}, [])
    checkpoint.save(run.path, 1, {"x": torch.ones(2)}, keep=3)
    run.status("interrupted", 1, "signal", "resume")
    with pytest.raises(ValueError, match="running ones left out"):
        last_resumable(root)
    with pytest.raises(ValueError, match="another process is writing this run"):
        RunDir.reopen(run.path)
    run.close()
    assert last_resumable(root) == run.path
    (run.path / ".train.safetensors.123.tmp").write_bytes(b"half")
    with RunDir.reopen(run.path):
        assert held(run.path)
        assert not list(run.path.glob(".*.tmp")), "what a killed process left half-written is swept"
    run.status("finished", 1, "", "")
    with pytest.raises(ValueError, match="no unfinished run"):
        last_resumable(root)


@pytest.mark.long
def test_a_run_in_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--output-dir: out/runs is not made, a second run is refused, and a refused run leaves nothing."""
    monkeypatch.chdir(tmp_path)
    small = [
        "smoke",
        "--intervention=none",
        "--steps=1",
        "--final-n-prompts=6",
        "--final-samples=1",
    ]
    argv = [*small, "--output-dir=exp/a"]
    assert train.main(argv) == 0
    run = tmp_path / "exp" / "a"
    assert {"run.json", "steps.jsonl", "summary.md", "status.json"} <= {
        p.name for p in run.iterdir()
    }
    assert not (tmp_path / "out" / "runs").exists()
    assert "exp/a/summary.md" in capsys.readouterr().out
    assert train.main(argv) == 2
    assert train.main(["smoke", "--resume=exp/a"]) == 2
    assert "this run is finished" in capsys.readouterr().err
    monkeypatch.setattr(load, "run_policy", lambda _: refuse(True, "no model"))
    assert train.main([*small, "--output-dir=deep/er/b"]) == 2
    assert not (tmp_path / "deep").exists()


def saved(run: RunDir, steps: int, keep: int = 3) -> list[Path]:
    for step in range(steps):
        run.append({"step": step}, [{"step": step}])
        checkpoint.save(run.path, step + 1, {"x": torch.full((3,), float(step))}, keep)
    return checkpoint.complete(run.path)


def test_checkpoints_round_trip_and_prune(run: RunDir) -> None:
    paths = saved(run, 5, keep=2)
    assert [p.name for p in paths] == ["step_000004", "step_000005"]
    point, passed = checkpoint.latest(run.path)
    assert (point.next_step, passed) == (5, [])
    assert torch.equal(point.state["x"], torch.full((3,), 4.0))


def test_pruning_keeps_a_good_checkpoint(run: RunDir) -> None:
    """Step 3's is damaged, a resume goes back to step 2's, the next save keeps one: its own, not the damaged one."""
    paths = saved(run, 3)
    (paths[-1] / "state.pt").write_bytes(b"torn")
    (paths[0] / "manifest.json").unlink()
    assert checkpoint.latest(run.path)[0].next_step == 2
    final = checkpoint.save(run.path, 2, {"x": torch.zeros(1)}, 1)
    assert list((run.path / "resume").iterdir()) == [final]
    assert checkpoint.latest(run.path)[1] == []


def test_checkpoints_are_ordered_by_number(run: RunDir) -> None:
    run.append({"step": 0}, [])
    for step in (999_999, 1_000_000):
        checkpoint.save(run.path, step, {"x": torch.zeros(1)}, 3)
    assert checkpoint.latest(run.path)[0].next_step == 1_000_000


def test_rewind_cuts_later_rows_and_refuses_missing_ones(run: RunDir) -> None:
    paths = saved(run, 3)
    run.append({"step": 3}, [{"step": 3}])
    run.close()
    checkpoint.rewind(run.path, checkpoint.read(paths[1]))
    assert [
        json.loads(line)["step"] for line in (run.path / "steps.jsonl").read_text().splitlines()
    ] == [0, 1]
    with pytest.raises(ValueError, match="rows are missing"):
        checkpoint.require_rows(run.path, checkpoint.read(paths[2]))
    # of a manifest that somebody wrote: no memory is asked for
    sizes = dict.fromkeys(checkpoint.GROWING, 10**17)
    assert [row["step"] for row in checkpoint.rows_before(run.path, 2, sizes)] == [0, 1]
