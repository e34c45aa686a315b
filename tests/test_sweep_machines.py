"""Sweeps on a Ray cluster: what a task does, and a real cluster that loses a machine."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import until
from test_sweep import STUDY, TWO, cfg_of, runs_of, sweeping, wait, write_run
from vgrout.ground.io import hold
from vgrout.sweep import workers
from vgrout.sweep.entry import Entry
from vgrout.sweep.runner import Sweep
from vgrout.sweep.study_file import load_study_file


class FakeRay:
    """Ray's calls that a job makes. outcome: the task's value or error; None: it runs."""

    class exceptions:
        class RayError(Exception): ...

        class TaskCancelledError(RayError): ...

    def __init__(self, outcome):
        self.outcome = outcome

    def wait(self, tasks, timeout):
        return ([], tasks) if self.outcome is None else (tasks, [])

    def get(self, task):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "code", "logged"),
    [
        (None, None, ""),
        (3, 3, ""),
        (FakeRay.exceptions.TaskCancelledError(), 130, ""),
        (FakeRay.exceptions.RayError("trace\nits machine died"), 1, "E its machine died\n"),
    ],
)
def test_how_a_task_ends(outcome, code, logged, tmp_path):
    log = tmp_path / "log"
    log.touch()
    assert workers.RayJob(FakeRay(outcome), "task", log).poll() == code
    assert log.read_text() == logged


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """A run of a study, whose process writes down its flags, asks to be cancelled once, and ends with 9."""
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TWO)
    note = "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); print(*sys.argv[1:]); signal.pause()"
    monkeypatch.setattr(
        Entry, "argv", property(lambda self: [sys.executable, "-uc", note, *self.flags])
    )
    return Sweep.of(load_study_file(Path("two.toml"))).entries[0]


SLEEP = time.sleep


def cancelled_when_it_runs(monkeypatch):
    """Once its whole line is there, and once: a second signal would meet one that is ending and has no handler."""

    def look(_):
        if Path("log").read_text().endswith("\n"):
            monkeypatch.setattr(workers.time, "sleep", SLEEP)
            raise KeyboardInterrupt

    monkeypatch.setattr(workers.time, "sleep", look)


def test_a_task_that_is_tried_again_goes_on(entry, monkeypatch):
    """On the machine that is left, once the run's lock is free; a cancelled one is asked to save."""
    path = write_run(cfg_of(1), "running", "cut", checkpoint=True)
    lock = hold(path)
    monkeypatch.setattr(
        workers.time, "sleep", lambda _: (lock.close(), cancelled_when_it_runs(monkeypatch))
    )
    assert workers._carry_out(Path.cwd(), entry, Path("log")) == 9
    assert Path("log").read_text() == "smoke --resume=out/runs/cut\n"


def test_a_task_is_not_done_twice(entry):
    write_run(cfg_of(1), "finished", "done")
    assert workers._carry_out(Path.cwd(), entry, Path("log")) == 0
    assert not Path("log").exists()


# Ray's processes would be 15 nicer than others, and starve on a machine that is busy
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "300",
}


def read(path):
    return json.loads(path.read_text())


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed (extra ray)"
)

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
def cluster():
    """Address of a Ray cluster of two machines with a core each, and the process ids of their raylets."""
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
    }
    with subprocess.Popen([sys.executable, "-c", CLUSTER], env=os.environ | RAY, **pipes) as p:
        assert p.stdin is not None
        assert p.stdout is not None
        try:
            address, *pids = p.stdout.readline().split()
            yield address, [*map(int, pids)]
        finally:
            p.stdin.close()
            p.wait(120)


def with_children(pid):
    """A process, its children, and theirs."""
    output = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    return [pid, *(p for child in output.split() for p in with_children(int(child)))]


@pytest.mark.slow
@needs_ray
def test_sweep_over_two_machines_one_of_which_is_lost(tmp_path):
    """All processes of one are killed while both have a run: it goes on at the other, and each is noted once."""
    (tmp_path / "two.toml").write_text(STUDY.format(seeds=[1, 2, 3], steps=30))
    with (
        cluster() as (address, pids),
        sweeping(tmp_path, "--via", "ray", "--ray-address", address, **RAY) as p,
    ):

        def saved():
            manifests = tmp_path.glob("out/runs/*/resume/step_*/manifest.json")
            return {path.parts[-4] for path in manifests}

        until(lambda: p.poll() is not None or len(saved()) == 2, 1200)
        assert not [*tmp_path.glob("out/runs/*/per_mode_deploy.json")], (
            "a run had finished before the machine was lost"
        )
        for pid in with_children(pids[1]):
            os.kill(pid, signal.SIGKILL)
        code, output = wait(p)
    assert code == 0, output
    assert "3 of 3 runs finished" in output
    ledger = read(tmp_path / "out/sweeps/two/runs.json")
    assert [(e["seed"], e["state"]) for e in ledger] == [(s, "finished") for s in (1, 2, 3)]
    assert sorted(tmp_path / e["run"] for e in ledger) == runs_of(tmp_path)
    assert sorted(len(read(r / "run.json").get("resumed", [])) for r in runs_of(tmp_path)) == [
        0,
        0,
        1,
    ]
    for run in runs_of(tmp_path):
        steps = [
            json.loads(line)["step"] for line in (run / "steps.jsonl").read_text().splitlines()
        ]
        assert steps == [*range(30)]
        assert read(run / "status.json")["state"] == "finished"
        assert (tmp_path / "logs" / f"{run.name}.log").exists()
