"""Files of a run: atomic writes, refusals, checkpoints that are complete or absent."""

import fcntl
import importlib
import json
import os
import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from loguru import logger

from fake_runs import fake_run
from vgrout import train
from vgrout.__main__ import COMMANDS
from vgrout.config.run import Config
from vgrout.config.settings import RunConfig
from vgrout.ground import ranks
from vgrout.ground.io import (
    Diverged,
    Halted,
    Interrupted,
    NothingRouted,
    atomic_folder,
    held,
    json_lines,
    refuse,
    to_json,
    write_atomic,
)
from vgrout.ground.ranks import RankLost
from vgrout.ground.records import unfinished
from vgrout.ground.scoring import source_of
from vgrout.model.load import load
from vgrout.runs import checkpoint, run_dir
from vgrout.runs.context import RunContext, git
from vgrout.runs.launch import Peer, require_torchrun, resumed_by_torchrun
from vgrout.runs.run_dir import RunDir, last_resumable
from vgrout.runs.tracking import Trackers


@pytest.fixture
def run(tmp_path):
    with RunDir.create("smoke_none_seed1", tmp_path / "out" / "runs") as run:
        yield run


def test_write_atomic_leaves_the_old_file_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_somebody_makes_meanwhile_is_never_taken(tmp_path, monkeypatch):
    """Between the look whether it is there and its making."""
    taken = tmp_path / "mine"
    monkeypatch.setattr(run_dir, "probe_writable", lambda _: taken.mkdir())
    with pytest.raises(ValueError, match=r"--output-dir .*mine: exists"):
        RunDir.create("smoke_none_seed1", tmp_path, taken)
    monkeypatch.setattr(run_dir, "probe_writable", lambda _: None)
    with (
        RunDir.create("smoke_none_seed1", tmp_path) as first,
        RunDir.create("smoke_none_seed1", tmp_path) as second,
    ):
        assert first.path != second.path


# where a link leads nowhere, and a command that would write behind it
DEAD = {
    "out": "train smoke --intervention none",
    "out/runs": "train smoke --intervention none",
    "logs": "train smoke --intervention none",
    "disk": "train smoke --intervention none --output-dir disk/x",
    "disk/deep": "report runs --out disk/deep/x/y",
    "out/sweeps": "sweep study.toml",
    "out/vhack": "direction --model organism",
    "pools": "teacher --model organism --out pools/new",
    "dpo": "iterative_dpo --base-model organism --output-dir dpo/new",
}
STUDY = 'preset = "smoke"\nseeds = [1]\n[[arms]]\nintervention = "none"\n'


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("link", DEAD)
def test_a_link_that_leads_nowhere_is_named_before_anything_is_loaded(
    link, loops, here, monkeypatch, capsys
):
    """A disk that is not mounted, or a link to itself: one line, by the plan too, and no run that spins for ever."""
    monkeypatch.setattr(load, "run_policy", lambda _: pytest.fail("a model is loaded"))
    fake_run(here / "runs", "--intervention=none")
    Path("study.toml").write_text(STUDY)
    place = here / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(place if loops else here / "not" / "mounted")
    name, *argv = DEAD[link].split()
    module, _, function = COMMANDS[name][0].partition(":")
    for more in ([], ["--dry-run"]) if name in ("train", "sweep") else ([],):
        monkeypatch.setattr("sys.argv", [name, *argv, *more])
        assert getattr(importlib.import_module(module), function)() == 2
        line = f"E {place}: a link to {os.readlink(place)}, which is not there; "
        said = capsys.readouterr().err
        assert said.startswith(line)
        assert said.count("\n") == 1
    assert not [*here.glob("out/runs/*")]


ENDED = [OSError(28, "No space"), FileNotFoundError(2, "gone"), RankLost("x"), MemoryError("x")]


@pytest.mark.parametrize("ending", [*ENDED, KeyboardInterrupt(), Interrupted("x"), Halted("x")])
def test_nobody_is_sent_on_to_a_folder_that_is_gone(ending, here, capsys):
    run = RunContext.begin("train smoke", None, "x", None, record={}, trackers=Trackers())
    run.__enter__()
    run.started()
    run.path.rename(here / "renamed")
    run.__exit__(type(ending), ending, None)  # not raised here: this file is somebody's own code
    logger.remove()
    assert run.code == 1
    said = "".join(capsys.readouterr())
    assert f"{run.path} is gone" in said
    assert "--resume" not in said


def test_nan_never_reaches_a_file():
    with pytest.raises(ValueError, match="JSON"):
        to_json({"x": float("nan")})


def test_status_and_latest(run):
    root = run.path.parent
    with pytest.raises(ValueError, match="no unfinished run"):
        last_resumable(root)
    run.write_json("run.json", {})
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


def test_any_number_of_processes_may_ask_whether_a_run_is_written(run):
    """As every task of a job array does; nobody takes another's question for a writer."""
    run.close()
    with ThreadPoolExecutor(4) as pool:  # each opens the file anew, as processes do
        assert not any(pool.map(lambda _: held(run.path), range(2000)))
        with RunDir.reopen(run.path):
            assert all(pool.map(lambda _: held(run.path), range(20)))


def test_who_only_asks_never_keeps_a_run_from_being_written(run, monkeypatch):
    run.close()
    asking = open(run.path / ".lock", "ab")  # noqa: SIM115
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: asking.close())
    with RunDir.reopen(run.path):
        assert asking.closed


def resumable(path, **record):
    """A run's folder with a checkpoint."""
    (path / "resume" / "step_000001").mkdir(parents=True)
    (path / "resume" / "step_000001" / "manifest.json").write_text("{}")
    (path / "status.json").write_text('{"state": "interrupted"}')
    (path / "run.json").write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("file", ["status.json", "run.json"])
@pytest.mark.parametrize("how", ["missing", "damaged", "a list"])
def test_a_folder_that_was_copied_in_part_does_not_stop_the_latest(file, how, tmp_path, warnings):
    whole = resumable(tmp_path / "20261101T000000_x")
    torn = resumable(tmp_path / "20261102T000000_x")
    if how == "missing":
        (torn / file).unlink()
    else:
        (torn / file).write_text("[]" if how == "a list" else "{")
    assert last_resumable(tmp_path) == whole
    assert [line for line in warnings if torn.name in line]


# folder, what run.json has, when it began (hours after 2026-10-25, 00:00 UTC)
BEGUN = {
    "an hour after the clocks went back": (
        "20261025T021000_x",
        {"began_at": "2026-10-25T01:10:00+00:00"},
        1,
    ),
    "in a time zone that lies ahead": (
        "20261025T090000_x",
        {"began_at": "2026-10-25T09:00:00+09:00"},
        0,
    ),
    "in one that lies behind": ("20261024T190000_x", {"began_at": "2026-10-25T03:00:00+00:00"}, 3),
    "older run": ("20261025T020000_x", {}, -3),
    "older run, damaged time": ("20261025T040000_x", {"began_at": "yesterday"}, -2),
    "older run, another type": ("20261025T050000_x", {"began_at": 5}, -1),
    "no time": ("99999999T999999_x", {"began_at": "2026-10-25T06:00:00+00:00"}, 6),
}


def test_the_latest_run_is_the_one_that_began_last(tmp_path):
    """One that does not say when comes before all that do."""
    runs = [*BEGUN.values()]
    random.Random(0).shuffle(runs)
    for name, record, _ in runs:
        resumable(tmp_path / name, **record)
    while runs:
        name, _, _ = max(runs, key=lambda run: run[2])
        assert last_resumable(tmp_path) == tmp_path / name
        runs = [run for run in runs if run[0] != name]
        (tmp_path / name / "status.json").write_text('{"state": "finished"}')


def test_a_run_that_was_killed_is_not_running(run):
    """Its folder is held by no process, whatever its status.json says."""
    run.append({"step": 0}, [])
    run.status("running", 1, "", "")
    assert unfinished(run.path) == "running"
    run.close()
    assert unfinished(run.path) == f"stopped at step 1; go on with --resume {run.path}"
    for state, said in (("failed", "failed"), ("finished", ""), ("halted", "")):
        run.status(state, 1, "", "")
        assert unfinished(run.path) == said


GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
# what is done in a checkout, and whether its code is another one then
EDITS = {
    "nothing": ("true", False),
    "a script beside the code": ("echo 1 > mine.py", False),
    "an ignored file in src": ("echo 1 > src/vgrout/x.pyc", False),
    "a new module": ("echo 1 > src/vgrout/new.py", True),
    "an edited module": ("echo 1 >> src/vgrout/train.py", True),
    "an edited study": ("echo 1 >> study.toml", True),
    "a removed module": ("rm src/vgrout/train.py && echo > src/vgrout/train.py", True),
}


def test_what_makes_a_checkouts_code_another_one(tmp_path):
    package = tmp_path / "src" / "vgrout"
    package.mkdir(parents=True)
    (package / "train.py").write_text("import os\n")
    (tmp_path / "study.toml").write_text("")
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        subprocess.run([*GIT, *words], cwd=tmp_path, check=True)
    for edit, (command, is_edited) in EDITS.items():
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        found = git(package)
        assert len(found["revision"]) == 40
        assert found["dirty"] is is_edited, edit
        subprocess.run(
            "git reset -q --hard && git clean -qfd", shell=True, cwd=tmp_path, check=True
        )


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate")]
)
def test_what_is_not_the_files_fault_is_not_called_so(run, monkeypatch, error):
    (path,) = saved(run, 1)

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(type(error)):
        checkpoint.read(path)
    monkeypatch.setattr(torch, "load", lambda *_, **__: refuse(True, "of another program"))
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.read(path)


def test_ranks_that_torchrun_has_not_started_are_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    require_torchrun()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    require_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="not by torchrun"):
        require_torchrun()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    require_torchrun()


@pytest.mark.long
def test_a_run_in_a_folder_of_ones_own(here, monkeypatch, capsys):
    """--output-dir: out/runs is not made, a second run is refused, and a refused run leaves no run."""
    small = "smoke --intervention=none --steps=1 --final-n-prompts=6 --final-samples=1".split()
    argv = [*small, "--output-dir=exp/a"]
    assert train.main(argv) == 0
    run = here / "exp" / "a"
    assert {"run.json", "steps.jsonl", "summary.md", "status.json"} <= {
        p.name for p in run.iterdir()
    }
    assert not (here / "out" / "runs").exists()
    assert "exp/a/summary.md" in capsys.readouterr().out
    assert train.main(argv) == 2
    assert train.main(["smoke", "--resume=exp/a"]) == 2
    assert "this run is finished" in capsys.readouterr().err
    monkeypatch.setattr(load, "run_policy", lambda _: refuse(True, "no model"))
    assert train.main([*small, "--output-dir=deep/er/b"]) == 2
    assert not (here / "deep" / "er" / "b").exists()
    kept = (here / "logs" / "a.log").read_text()
    assert train.main([*small, "--output-dir=deep/er/a"]) == 2
    assert not (here / "deep" / "er" / "a").exists()
    assert (here / "logs" / "a.log").read_text().startswith(kept), "that of another run"
    long = "y" * 253  # with .log it is too long a name
    assert train.main([*small, f"--output-dir=deep/{long}"]) == 2
    assert not [path for path in (here / "deep").rglob("*") if path.is_file()]


def saved(run, steps, keep=3):
    for step in range(steps):
        run.append({"step": step}, [{"step": step}])
        checkpoint.save(run.path, step + 1, {"x": torch.full((3,), float(step))}, keep)
    return checkpoint.complete(run.path)


def test_checkpoints_round_trip_and_prune(run):
    paths = saved(run, 5, keep=2)
    assert [p.name for p in paths] == ["step_000004", "step_000005"]
    point = next(checkpoint.newest_first(run.path, []))
    assert point.next_step == 5
    assert torch.equal(point.state["x"], torch.full((3,), 4.0))


def test_pruning_keeps_a_good_checkpoint(run):
    """Step 3's is damaged, a resume goes back to step 2's, the next save keeps one: its own, not the damaged one."""
    paths = saved(run, 3)
    (paths[-1] / "state.pt").write_bytes(b"torn")
    (paths[0] / "manifest.json").unlink()
    assert next(checkpoint.newest_first(run.path, [])).next_step == 2
    checkpoint.save(run.path, 2, {"x": torch.zeros(1)}, 1)
    assert list((run.path / "resume").iterdir()) == [paths[1]]
    assert next(checkpoint.newest_first(run.path, [])).next_step == 2


def test_rewind_cuts_later_rows_and_refuses_missing_ones(run):
    paths = saved(run, 3)
    run.append({"step": 3}, [{"step": 3}])
    run.close()
    checkpoint.rewind(run.path, checkpoint.read(paths[1]))
    assert [row["step"] for row in json_lines(run.path / "steps.jsonl")] == [0, 1]
    there = checkpoint.read(paths[1]).sizes
    assert checkpoint.rows_before(run.path, 2, there, lambda row: row["step"]) == [0, 1]
    # the last of a manifest that somebody wrote: no memory is asked for
    for sizes in (checkpoint.read(paths[2]).sizes, dict.fromkeys(checkpoint.GROWING, 10**17)):
        with pytest.raises(ValueError, match="rows are missing"):
            checkpoint.rows_before(run.path, 2, sizes, dict)


@pytest.mark.parametrize("ended", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_is_all_there_or_as_it_was(ended, tmp_path, monkeypatch):
    path = tmp_path / "deep" / "model"
    for text in ("first", "second"):  # the second replaces the first
        with atomic_folder(path, replace=True) as folder:
            (folder / "weights").write_text(text)
        assert (path / "weights").read_text() == text
    with pytest.raises(ZeroDivisionError), atomic_folder(path, replace=True) as folder:
        (folder / "weights").write_text(str(1 / 0))
    with pytest.raises(OSError, match="not empty"), atomic_folder(path) as folder:
        (folder / "weights").write_text("not asked to replace anything")
    replace, calls = os.replace, []

    def ends_at_the_second(a, b):
        calls.append(a)
        if len(calls) == 2:
            raise ended
        replace(a, b)

    monkeypatch.setattr(os, "replace", ends_at_the_second)
    with pytest.raises(type(ended)), atomic_folder(path, replace=True) as folder:
        (folder / "weights").write_text("third")
    assert len(calls) == 3
    assert (path / "weights").read_text() == "second"
    assert [p.name for p in path.parent.iterdir()] == ["model"]


def test_what_a_checkpoint_counts_is_on_the_disk_before_it(run, monkeypatch):
    """After a power cut a file may be shorter than what was written, unless it was synced."""
    run.append({"step": 0}, [{"a": 1}])
    synced = []
    sync = os.fsync

    def noted(fd):
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    checkpoint.save(run.path, 1, {"x": torch.ones(2)}, keep=3)
    manifest = next(i for i, name in enumerate(synced) if "manifest" in name)
    assert {"steps.jsonl", "rollouts.jsonl"} <= {*synced[:manifest]}


# ── after a restart by torchrun

JOB = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


def folder_of(root, name, state, job):
    """A run that this job of torchrun's has begun, and last written."""
    path = root / "out" / "runs" / name
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"torchrun": job}))
    (path / "status.json").write_text(json.dumps({"state": state, "torchrun": job}))
    return path


@pytest.mark.parametrize("size", ["1", "2"])
def test_a_restart_goes_on_with_the_run_of_its_job(size, here, monkeypatch):
    """Whatever else lies beside it, and however damaged; also a job of a single rank."""
    for name, value in {**JOB, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    job = ranks.torchrun_id()
    folder_of(here, "20260101T000000_other", "interrupted", "another/1@x")
    folder_of(here, "20260101T000000_alone", "interrupted", None)
    damaged = folder_of(here, "20260101T000001_copied", "running", job)
    (damaged / "run.json").write_text("")
    (damaged / "status.json").write_text("[")
    assert resumed_by_torchrun(Config()) == Config(), "there is none yet"
    own = folder_of(here, "20260101T000002_own", "running", job)
    assert resumed_by_torchrun(Config()).run.resume == str(own.relative_to(here))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert resumed_by_torchrun(Config()) == Config()


@pytest.mark.parametrize("named", [True, False], ids=["resumed", "begun"])
def test_a_restart_leaves_an_interrupted_run_alone(named, here, monkeypatch):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    own = folder_of(here, "20260101T000002_own", "interrupted", ranks.torchrun_id())
    if named:
        own = own.rename(here / "elsewhere")
    cfg = Config(run=RunConfig(resume=str(own) if named else None))
    with pytest.raises(Interrupted, match="stays so after torchrun's restart"):
        resumed_by_torchrun(cfg)
    (own / "status.json").write_text(json.dumps({"state": "interrupted"}))  # by an earlier job
    assert resumed_by_torchrun(cfg).run.resume == (
        str(own) if named else str(own.relative_to(here))
    )


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (None, 0),
        (Interrupted("x"), 130),
        (KeyboardInterrupt(), 130),
        (Halted("x"), 3),
        (Diverged("x"), 4),
        (NothingRouted("x"), 1),
    ],
)
def test_a_rank_beside_the_first_says_nothing_of_an_end_in_order(ending, code, capsys):
    peer = Peer(None, False)
    with peer:
        if ending is not None:
            raise ending
    assert (peer.code, capsys.readouterr()) == (code, ("", ""))


def test_a_class_without_a_file_is_no_fault():
    """One that was written in a notebook has none, and is not hashed."""
    assert source_of(type("Mine", (), {"__module__": "nowhere"})) is None
    assert source_of(int) is None
    assert source_of(RunDir) == Path(run_dir.__file__)
