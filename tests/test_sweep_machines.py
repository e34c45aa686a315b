"""Sweeps on other machines and in forks: copies of files, a Ray cluster that loses a machine, forks of one process."""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runs import rows, until
from test_sweep import STUDY, runs_of, sweeping, wait
from vgrout import console
from vgrout.config.presets import resolve
from vgrout.runs.run_dir import held
from vgrout.sweep import ray_cluster, warm, workers
from vgrout.sweep import runner as sweeps
from vgrout.sweep.__main__ import main
from vgrout.sweep.gpus import Share
from vgrout.sweep.mirror import Receiver, Sender
from vgrout.sweep.ray_cluster import Look, RayJob, input_paths, packed
from vgrout.sweep.workers import Attempt, Lost

NAME = "20260101T000000_smoke_none_seed1"
RUN = f"out/runs/{NAME}"

# ── copies of a run that is being written ──────────────────────────────────────────────────────────────────────────


def write(root: Path, name: str, data: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(".tmp")
    temporary.write_text(data)
    os.replace(temporary, path)


def append(root: Path, name: str, data: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(data)


def checkpoint(root: Path, step: int, keep: int = 2) -> None:
    """As a run writes them: whole under another name first, then older ones go."""
    resume = root / RUN / "resume"
    (resume / ".tmp").mkdir(parents=True)
    (resume / ".tmp" / "state.pt").write_text(f"state {step}")
    (resume / ".tmp" / "manifest.json").write_text(json.dumps({"next_step": step}))
    shutil.rmtree(resume / f"step_{step:06d}", ignore_errors=True)
    (resume / ".tmp").rename(resume / f"step_{step:06d}")
    for old in sorted(resume.glob("step_*"))[:-keep]:
        shutil.rmtree(old)


def content(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): p.read_text()
        for p in sorted(root.rglob("*"))
        if p.is_file() and not p.name.startswith(".")
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


WRITES: dict[str, Callable[[Path, int], None]] = {
    "row": lambda root, n: append(root, f"{RUN}/steps.jsonl", f"row {n}\n" * 3),
    "long": lambda root, n: append(root, f"{RUN}/rollouts.jsonl", f"answer {n}\n" * 600),
    "cut": lambda root, n: os.truncate(root / RUN / "steps.jsonl", (root / RUN / "steps.jsonl").stat().st_size // 2),
    "checkpoint": checkpoint,
    "status": lambda root, n: write(root, f"{RUN}/status.json", json.dumps({"state": "running", "step": n})),
    "printed": lambda root, n: append(root, "printed", f"I line {n}\n"),
    "log": lambda root, n: append(root, f"logs/{NAME}.log", f"debug {n}\n"),
    "nested": lambda root, n: write(root, f"{RUN}/wandb/offline/{n}.bin", str(n)),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["look", *WRITES]), max_size=25))
def test_a_copy_equals_its_original(tmp_path_factory: pytest.TempPathFactory, writes: list[str]) -> None:
    """Whatever is appended, replaced, cut back or pruned between two looks."""
    there, local = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("here")
    with contextlib.chdir(local):
        write(there, f"{RUN}/run.json", "{}")
        append(there, f"{RUN}/steps.jsonl", "row 0\n")
        sender, receiver = Sender(there), Receiver(None, Path("printed"))
        for n, what in enumerate(writes):
            if what == "look":
                receiver.take(sender.changes())
            else:
                WRITES[what](there, n)
        receiver.take(sender.changes())
        assert sender.changes().pieces == []  # nothing is sent twice
        receiver.close()
    assert content(local) == content(there)


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    append(tmp_path, f"{RUN}/rollouts.jsonl", "x" * 100_000)
    sender = Sender(tmp_path)
    assert [len(p.data) for p in sender.changes().pieces] == [100_000]
    append(tmp_path, f"{RUN}/rollouts.jsonl", "y" * 10)
    (piece,) = sender.changes().pieces
    assert (piece.start, piece.data) == (100_000, b"y" * 10)


def test_status_is_read_first_and_written_last(tmp_path: Path, here: Path) -> None:
    """Wherever the copy is cut short, a run is not called finished before its last files are there, and no checkpoint
    comes before its rows."""
    append(tmp_path, f"{RUN}/steps.jsonl", "row\n")
    checkpoint(tmp_path, 1)
    write(tmp_path, f"{RUN}/status.json", json.dumps({"state": "running"}))
    changes = Sender(tmp_path).changes()
    order = [p.name.removeprefix(f"{RUN}/") for p in changes.pieces]
    assert order == ["status.json", "resume/step_000001/manifest.json", "resume/step_000001/state.pt", "steps.jsonl"]
    seen = list[str]()
    receiver = Receiver(None, Path("printed"))
    take_file, take_checkpoints = receiver._take_file, receiver._take_checkpoints

    def file(piece: Any) -> None:
        seen.append(Path(piece.name).name)
        take_file(piece)

    def whole(checkpoints: Any) -> None:
        seen.extend(Path(name).name for name in checkpoints)
        take_checkpoints(checkpoints)

    receiver._take_file, receiver._take_checkpoints = file, whole  # ty: ignore[invalid-assignment]
    receiver.take(changes)
    receiver.close()
    assert seen == ["steps.jsonl", "step_000001", "status.json"]


def test_a_taken_name_is_changed(tmp_path: Path, here: Path) -> None:
    """Two machines may begin runs of one name in one second."""
    write(here, f"{RUN}/run.json", "own")
    write(tmp_path, f"{RUN}/run.json", "other")
    append(tmp_path, f"logs/{NAME}.log", "other")
    receiver = Receiver(None, Path("printed"))
    receiver.take(Sender(tmp_path).changes())
    assert receiver.run == Path("out/runs/20260101T000000.1_smoke_none_seed1")
    assert held(receiver.run)
    receiver.close()
    assert not held(receiver.run)
    assert (here / RUN / "run.json").read_text() == "own"
    assert (receiver.run / "run.json").read_text() == "other"
    assert Path(f"logs/{receiver.run.name}.log").read_text() == "other"


def test_a_refused_run_leaves_nothing(tmp_path: Path, here: Path) -> None:
    write(tmp_path, f"{RUN}/run.json", "{}")
    append(tmp_path, f"logs/{NAME}.log", "x")
    receiver, sender = Receiver(None, Path("printed")), Sender(tmp_path)
    receiver.take(sender.changes())
    shutil.rmtree(tmp_path / RUN)
    (tmp_path / f"logs/{NAME}.log").unlink()
    append(tmp_path, "printed", "E refused\n")
    changes = sender.changes()
    receiver.take(changes)
    receiver.close(kept=bool(changes.runs))
    assert content(here) == {"printed": "E refused\n"}


# ── a cluster, without one ─────────────────────────────────────────────────────────────────────────────────────────


class FakeRay:
    """Ray's calls that a job makes, on one machine that answers at once or is dead."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

    def __init__(self, looks: list[Look]) -> None:
        self.looks, self.dead, self.output = looks, False, list[str]()

    def __getattr__(self, name: str) -> Any:  # an actor's method: node.look.remote()
        def remote(*_: Any) -> str:
            self.output.append(name)
            return name

        return types.SimpleNamespace(remote=remote)

    def wait(self, replies: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return replies, []

    def get(self, reply: str) -> Any:
        if self.dead:
            raise self.exceptions.RayError("the actor died")
        return "box" if reply == "begin" else self.looks.pop(0)

    def kill(self, _: Any) -> None:
        self.output.append("kill")


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_lost_machine_leaves_what_was_copied(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch, with_checkpoint: bool
) -> None:
    monkeypatch.setattr(ray_cluster, "PULL_S", 0.0)
    write(tmp_path, f"{RUN}/status.json", json.dumps({"state": "running", "step": 3}))
    append(tmp_path, f"{RUN}/steps.jsonl", "row\n")
    if with_checkpoint:
        checkpoint(tmp_path, 1)
    ray = FakeRay([Look(None, Sender(tmp_path).changes())])
    job = RayJob(ray, ray, Attempt([], Path("printed")), [])
    assert job.poll() is None
    assert held(here / RUN)
    ray.dead = True
    with pytest.raises(Lost, match="box was lost"):
        job.poll()
    assert not held(here / RUN)
    assert json.loads((here / RUN / "status.json").read_text())["reason"] == "its machine was lost"
    assert (here / RUN / "resume/step_000001/manifest.json").exists() is with_checkpoint


@pytest.mark.long
def test_runs_of_lost_machines_continue_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seed 1 loses one machine after a checkpoint, and goes on from it; seed 2 every one, before it."""
    monkeypatch.setattr(sweeps, "POLL_S", 0.0)
    Path("two.toml").write_text('name = "two"\npreset = "smoke"\nseeds = [1, 2]\n[[arms]]\nintervention = "none"\n')
    started: list[list[str]] = []

    def start(attempt: Attempt) -> Any:
        started.append([*attempt.flags])
        seed = 1 if attempt.resumes else resolve([*attempt.flags]).run.seed

        def poll() -> int:
            path = attempt.resumes or here / f"out/runs/2026_{len(started)}"
            path.mkdir(parents=True, exist_ok=True)
            if not attempt.resumes:
                cfg = resolve([*attempt.flags]).as_dict()
                (path / "run.json").write_text(json.dumps({"config": cfg, "hashes": {}}))
            done = bool(attempt.resumes)
            (path / "status.json").write_text(json.dumps({"state": "finished" if done else "interrupted"}))
            (path / "per_mode_deploy.json").write_text(json.dumps({"hack_deploy": 0.5, "solve_deploy": 0.5}))
            if done:
                return 0
            if seed == 1:
                (path / "resume/step_000001").mkdir(parents=True)
                (path / "resume/step_000001/manifest.json").write_text("{}")
            raise Lost("box was lost")

        return types.SimpleNamespace(poll=poll, terminate=lambda: None)

    workers = types.SimpleNamespace(slots=1, start=start, close=lambda: None)
    monkeypatch.setattr(sweeps, "_workers", lambda *_: workers)
    assert main(["two.toml"]) == 1
    assert [flags[-1] for flags in started] == ["--seed=1", "--resume=out/runs/2026_1", *["--seed=2"] * 3]
    output = capsys.readouterr().out
    assert "W none seed 1: box was lost; it goes on from its checkpoint\n" in output
    assert output.count("none seed 2: box was lost; it starts again") == 2
    ledger = json.loads(Path("out/sweeps/two/runs.json").read_text())
    assert [(e["seed"], e["state"]) for e in ledger] == [(1, "finished"), (2, "failed")]


def test_input_files_are_sent(here: Path, tmp_path: Path) -> None:
    write(here, "pool/a.json", "a")
    write(here, "pool/.lock", "")
    write(here, "own.py", "def pays(): ...")
    cfg = resolve(["smoke", "--intervention=none", "--teacher-pool-dir=pool", "--reward=own:pays", "--mix-ratio=0"])
    assert packed(input_paths(cfg)) == {"own.py": b"def pays(): ...", "pool/a.json": b"a"}
    assert input_paths(resolve(["smoke", "--intervention=none"])) == []  # the bundled organism is every machine's own


def test_input_files_that_cannot_be_sent_are_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(resolve(["smoke"]).files.pool, here.parent / "pool")
    shutil.copytree(here.parent / "pool", here / "pool")
    study = 'name = "two"\npreset = "smoke"\nseeds = [1]\n[[arms]]\nintervention = "none"\nteacher-pool-dir = "{}"\n'
    for folder, output in (
        ("../pool", "../pool lies outside this folder"),
        ("pool", "pool: 0.0 GiB are too much to send"),
    ):
        Path("two.toml").write_text(study.format(folder))
        monkeypatch.setattr(ray_cluster, "SHIPPED", 100)
        assert main(["two.toml", "--via", "ray"]) == 2
        refused = capsys.readouterr().err
        assert output in refused
        assert refused.count("\n") == 1
    assert not Path("out/sweeps").exists()


# ── forks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_runs_are_started_where_they_cannot_be_forked(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[list[str], int | None]] = []

    def refuse(*_: object) -> None:
        raise warm.CannotFork("a thread was started")

    monkeypatch.setattr(warm.Warm, "start", refuse)

    def spawn(argv: list[str], _: Path, threads: int | None) -> subprocess.Popen[bytes]:
        started.append((argv[1:], threads))
        process = subprocess.Popen(["true"])
        process.wait()
        return process

    monkeypatch.setattr(workers, "spawn", spawn)
    local = workers.Local(Share(2))
    console.setup(None)
    for flags in ["smoke", "--seed=1"], ["smoke", "--seed=2"]:
        local.start(Attempt(flags, here / "log"))
    local.close()
    assert started == [(["-m", "vgrout.train", "smoke", f"--seed={s}"], 1) for s in (1, 2)]
    assert capsys.readouterr().out.count("every run imports for itself") == 1  # and not tried again


def test_a_dead_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.get_context("forkserver").Process()
    assert workers.ForkedJob(process).poll() is None
    monkeypatch.setattr(type(process), "exitcode", warm.SERVER_DIED)
    with pytest.raises(Lost):
        workers.ForkedJob(process).poll()


# ── real processes ─────────────────────────────────────────────────────────────────────────────────────────────────

# Ray's processes would be 15 nicer than others, and starve on a machine that is busy
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra ray)")

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1, include_dashboard=False) for _ in range(2)]
print(cluster.address, *(n.all_processes["raylet"][0].process.pid for n in nodes), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextlib.contextmanager
def cluster() -> Iterator[tuple[str, list[int]]]:
    """Address of a Ray cluster of two machines with a core each, and the process ids of their raylets."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], env=os.environ | RAY, **pipes) as p:
        assert p.stdin is not None
        assert p.stdout is not None
        try:
            address, *pids = p.stdout.readline().split()
            yield address, [*map(int, pids)]
        finally:
            p.stdin.close()
            p.wait(120)


@pytest.mark.slow
@needs_ray
def test_sweep_over_two_machines_one_of_which_is_lost(tmp_path: Path) -> None:
    """One raylet is killed while both machines have a run: its run continues on the other machine from what was copied,
    and every run is in the ledger once."""
    (tmp_path / "two.toml").write_text(STUDY.format(seeds=[1, 2, 3], steps=30))
    with cluster() as (address, pids), sweeping(tmp_path, "--via", "ray", "--ray-address", address, **RAY) as p:
        until(lambda: p.poll() is not None or len({*tmp_path.glob("out/runs/*/resume/step_*")}) >= 2, 1200)
        until(lambda: all([*r.glob("resume/step_*/manifest.json")] for r in runs_of(tmp_path)), 1200)
        assert not [*tmp_path.glob("out/runs/*/per_mode_deploy.json")], "a run had finished before the machine was lost"
        os.kill(pids[1], signal.SIGKILL)
        code, output = wait(p)
    assert code == 0, output
    assert "was lost; it goes on from its checkpoint" in output
    assert "3 of 3 runs finished" in output
    ledger = read(tmp_path / "out/sweeps/two/runs.json")
    assert [(e["seed"], e["state"]) for e in ledger] == [(s, "finished") for s in (1, 2, 3)]
    assert sorted(tmp_path / e["run"] for e in ledger) == runs_of(tmp_path)
    assert sorted(len(read(r / "run.json").get("resumed", [])) for r in runs_of(tmp_path)) == [0, 0, 1]
    for run in runs_of(tmp_path):
        steps = [json.loads(line)["step"] for line in (run / "steps.jsonl").read_text().splitlines()]
        assert steps == [*range(30)]
        assert read(run / "status.json")["state"] == "finished"
        assert (tmp_path / "logs" / f"{run.name}.log").exists()


@pytest.mark.slow
@needs_ray
def test_sweep_over_a_local_ray_cluster(tmp_path: Path) -> None:
    """Stopped in its first run, then carried to the end, by processes of a real cluster."""
    (tmp_path / "two.toml").write_text(STUDY.format(seeds=[1, 2], steps=8))
    with sweeping(tmp_path, "--via", "ray", "--jobs", "1", **RAY) as p:
        until(lambda: [*tmp_path.glob("out/runs/*/resume/step_*/manifest.json")], 1200)
        p.send_signal(signal.SIGINT)
        code, output = wait(p)
    assert code == 130, output
    assert [read(r / "status.json")["state"] for r in runs_of(tmp_path)] == ["interrupted"]
    with sweeping(tmp_path, "--via", "ray", "--jobs", "1", **RAY) as p:
        code, output = wait(p)
    assert code == 0, output
    assert "2 of 2 runs finished" in output
    assert [read(r / "status.json")["state"] for r in runs_of(tmp_path)] == ["finished", "finished"]
    assert len(read(runs_of(tmp_path)[0] / "run.json")["resumed"]) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere runs are not forked")
def test_forked_runs_equal_separate_ones(tmp_path: Path) -> None:
    """Rows, exit codes, output, working directory and environment are those of separate processes; a killed run ends
    alone; the process that runs are forked from may die."""
    (tmp_path / "two.toml").write_text(STUDY.format(seeds=[1, 2, 3], steps=12))
    with sweeping(tmp_path, "--jobs", "2") as p:
        run = until(lambda: [*tmp_path.glob("out/runs/*seed1/resume/step_*/manifest.json")], 1200)[0].parents[2]
        pid = read(run / "status.json")["pid"]
        server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        environ = {*Path(f"/proc/{pid}/environ").read_text().split("\0")}
        assert server != p.pid
        assert len(os.listdir(f"/proc/{server}/task")) == 1
        assert Path(f"/proc/{pid}/cwd").resolve() == tmp_path
        assert "OMP_NUM_THREADS=1" in environ
        os.kill(pid, signal.SIGKILL)  # one run
        until(lambda: len(runs_of(tmp_path)) == 3, 1200)
        until(lambda: [*tmp_path.glob("out/runs/*seed3/resume/step_*/manifest.json")], 1200)
        os.kill(server, signal.SIGKILL)  # what the others were forked from
        code, output = wait(p)
    assert code == 1, output
    assert "E none seed 1: failed: exit code -9" in output
    assert "the process that it was forked from has died; it " in output
    assert "2 of 3 runs finished" in output
    with sweeping(tmp_path, "--jobs", "2") as p:
        code, output = wait(p)
    assert code == 0, output
    assert len(runs_of(tmp_path)) == 3
    command = [sys.executable, "-m", "vgrout.train", *read(tmp_path / "out/sweeps/two/runs.json")[1]["flags"]]
    alone = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=600, text=True)
    first, again = sorted(tmp_path.glob("out/runs/*seed2"))
    assert rows(first) == rows(again)
    kept = [key for key in read(again / "run.json") if key not in ("git", "resumed", "hashes", "ranks", "begun")]
    assert {k: read(first / "run.json")[k] for k in kept} == {k: read(again / "run.json")[k] for k in kept}
    assert "deployed hack" in alone.stdout
