"""Sweeps: which runs are skipped, resumed and started, and what happens when processes die."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from files import loaded
from runs import rows, status, until
from vgrout import train
from vgrout.config.presets import resolve
from vgrout.envs.code.environment import CodeEnvironment
from vgrout.ground import embedded
from vgrout.ground.io import Refused, hold
from vgrout.runs.inputs import Inputs, file_hashes
from vgrout.sweep import runner as sweeps
from vgrout.sweep.__main__ import main
from vgrout.sweep.runner import Sweep
from vgrout.sweep.study_file import load_study_file

TWO = """
name = "two"
preset = "smoke"
seeds = [1, 2]
[[arms]]
intervention = "none"
"""


def write_run(cfg, state, name="x", *, checkpoint=False, **record):
    """A run directory with what a sweep reads of it."""
    path = Path("out/runs") / name
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"config": cfg.as_dict(), "hashes": {}} | record))
    (path / "status.json").write_text(json.dumps({"state": state, "reason": f"why\n{name}"}))
    (path / "per_mode_deploy.json").write_text(
        json.dumps({"hack_deploy": 0.25, "solve_deploy": None})
    )
    if checkpoint:
        (path / "resume" / "step_000005").mkdir(parents=True)
        (path / "resume" / "step_000005" / "manifest.json").write_text("{}")
    return path


class Hand:
    """Fake workers: each attempt ends at its second poll, as `endings` says for its seed."""

    def __init__(self, endings, slots=1):
        self.endings, self.slots, self.argvs = endings, slots, list[list[str]]()
        self.under_way = self.most = 0

    def start(self, entry, log):
        self.argvs.append(entry.flags)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return Hand.Job(self, entry.flags, log)

    def close(self):
        pass

    class Job:
        def __init__(self, hand, argv, log):
            self.hand, self.argv, self.log, self.looks = hand, argv, log, 0

        def poll(self):
            self.looks += 1
            if self.looks < 2:
                return None
            self.hand.under_way -= 1
            if "--resume" in self.argv[-1]:
                path = Path(self.argv[-1].partition("=")[2])
                (path / "status.json").write_text(json.dumps({"state": "finished"}))
                return 0
            cfg = resolve(self.argv)
            code, state = self.hand.endings[cfg.run.seed]
            if state:
                write_run(
                    cfg, state, f"made_{cfg.run.seed}" + "_again" * (len(self.hand.argvs) > 2)
                )
            else:
                self.log.write_text("I words\nE --seed: no such luck\n")
            return code


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeps, "POLL_S", 0.0)
    path = tmp_path / "two.toml"
    path.write_text(TWO)
    return path


def by_hand(monkeypatch, endings, slots=1):
    hand = Hand(endings, slots)
    monkeypatch.setattr(sweeps, "Local", lambda *_: hand)
    return hand


def index():
    return {
        entry["seed"]: entry for entry in json.loads(Path("out/sweeps/two/runs.json").read_text())
    }


def cfg_of(seed, *flags):
    return resolve(["smoke", "--intervention=none", f"--seed={seed}", *flags])


# ── what is run


def test_all_runs_are_made_and_indexed(study, monkeypatch):
    hand = by_hand(monkeypatch, {1: (0, "finished"), 2: (0, "finished")}, slots=2)
    assert main([str(study)]) == 0
    assert hand.argvs == [["smoke", "--intervention=none", f"--seed={s}"] for s in (1, 2)]
    assert hand.most == 2
    assert index()[2] == {
        "name": "none seed 2",
        "arm": "none",
        "seed": 2,
        "flags": ["smoke", "--intervention=none", "--seed=2"],
        "run": "out/runs/made_2",
        "state": "finished",
    }
    plan = json.loads(Path("out/sweeps/two/plan.json").read_text())
    assert [r["name"] for r in plan["runs"]] == ["none seed 1", "none seed 2"]
    assert main([str(study)]) == 0
    assert len(hand.argvs) == 2  # nothing was left


@pytest.mark.long
def test_finished_runs_are_found_by_settings_and_files(study, monkeypatch):
    write_run(
        cfg_of(1, "--out-tag=_of_another_study", "--checkpoint-every=3"),
        "finished",
        "by_another_name",
    )
    write_run(cfg_of(2, "--lr=0.5"), "finished", "another_lr")
    write_run(cfg_of(2), "finished", "by_force", begun=cfg_of(2, "--lr=0.5").as_dict())
    write_run(cfg_of(2), "finished", "other_problems", hashes={"problems": "0" * 64})
    write_run(cfg_of(2), "finished", "other_model", hashes={"model": "0" * 64})
    write_run(cfg_of(2), "finished", "edited", hashes=["x"])
    old = write_run(cfg_of(2), "finished", "another_version")
    record = loaded(old / "run.json")
    record["config"]["opt"]["momentum"] = 0.9
    (old / "run.json").write_text(json.dumps(record))
    hand = by_hand(monkeypatch, {2: (0, "finished")})
    assert main([str(study)]) == 0
    assert [argv[-1] for argv in hand.argvs] == ["--seed=2"]
    assert index()[1]["run"] == "out/runs/by_another_name"
    assert index()[2]["run"] == "out/runs/made_2"


def test_hash_of_a_remade_organism(tmp_path):
    shutil.copytree(embedded.DATA_DIR, tmp_path / "warm")
    cfg = cfg_of(1, f"--organism={tmp_path / 'warm'}")
    nothing = Inputs(CodeEnvironment(cfg, []))
    before = file_hashes(cfg, nothing)
    (cfg.files.model / "README.md").write_text("a card")
    assert file_hashes(cfg, nothing) == before == file_hashes(cfg_of(1), nothing)
    with open(cfg.files.model / "model.safetensors", "ab") as weights:
        weights.write(b"x")
    assert file_hashes(cfg, nothing)["model"] not in (before["model"], None)


@pytest.mark.long
def test_an_interrupted_run_is_resumed(study, monkeypatch):
    write_run(cfg_of(1), "interrupted", "cut", checkpoint=True)
    write_run(cfg_of(2), "running", "killed", checkpoint=False)  # no checkpoint: started again
    hand = by_hand(monkeypatch, {2: (0, "finished")})
    assert main([str(study)]) == 0
    assert hand.argvs == [
        ["smoke", "--resume=out/runs/cut"],
        ["smoke", "--intervention=none", "--seed=2"],
    ]
    assert index()[1]["run"] == "out/runs/cut"
    assert index()[2]["run"] == "out/runs/made_2"


@pytest.mark.parametrize(
    ("code", "state", "output"),
    [
        (1, "failed", "exit code 1"),
        (2, "", "--seed: no such luck"),
        (3, "halted", "why made_1"),
        (0, "", "it ended well, but its files"),
    ],
)
@pytest.mark.long
def test_a_failure_is_reported_and_the_others_run(study, monkeypatch, capsys, code, state, output):
    hand = by_hand(monkeypatch, {1: (code, state), 2: (0, "finished")})
    assert main([str(study)]) == 1
    assert len(hand.argvs) == 2
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith(f"E none seed 1: {state or 'failed'}: {output}")
    assert last[1].startswith("1 of 2 runs finished")
    assert (index()[1]["state"], index()[2]["state"]) == (state or "failed", "finished")
    assert main([str(study)]) == 1
    # the same command would halt, diverge or route nothing again; whatever failed may not
    assert len(hand.argvs) == (2 if state in ("halted", "diverged", "unrouted") else 3)


@pytest.mark.parametrize(
    ("code", "adds", "output"),
    [
        # its status stays as it was
        (2, "E --resume: changed since: pool\n", "failed: --resume: changed since: pool"),
        (1, "E OSError: the log's word\n", "failed: OSError: the log's word"),
        (-signal.SIGKILL, "I words\n", "failed: exit code -9"),
    ],
)
@pytest.mark.long
def test_reason_is_the_last_attempts(study, monkeypatch, capsys, code, adds, output):
    write_run(cfg_of(1), "interrupted", "cut", checkpoint=True)
    write_run(cfg_of(2), "finished", "done")
    sweep = Sweep.of(load_study_file(study))
    log = sweep.log(sweep.entries[0])
    log.parent.mkdir(parents=True)
    log.write_text("E words of an earlier attempt\n")

    def start(entry, log):
        log.write_text(log.read_text() + adds)
        return types.SimpleNamespace(poll=lambda: code)

    monkeypatch.setattr(
        sweeps,
        "Local",
        lambda *_: types.SimpleNamespace(slots=1, start=start),
    )
    assert main([str(study)]) == 1
    assert (
        capsys.readouterr().out.splitlines()[-2]
        == f"E none seed 1: {output} [out/runs/cut · {log}]"
    )


@pytest.mark.long
def test_sweep_waits_for_a_run_of_another_process(study, monkeypatch):
    path = write_run(cfg_of(1), "running", "elsewhere")
    hand = by_hand(monkeypatch, {2: (0, "finished")})
    lock = hold(path)
    start = hand.start

    def then_it_ends(entry, log):
        (path / "status.json").write_text(json.dumps({"state": "finished"}))
        lock.close()
        return start(entry, log)

    hand.start = then_it_ends
    assert main([str(study)]) == 0
    assert [argv[-1] for argv in hand.argvs] == ["--seed=2"]
    assert index()[1]["run"] == "out/runs/elsewhere"


@pytest.mark.long
def test_a_run_is_visible_while_it_loads(study, monkeypatch):
    """To a sweep of another study with the same run; where loading is refused, there is nothing to resume."""
    flags = load_study_file(study).runs[0].flags
    found = []

    def look(*_):
        sweep = Sweep.of(load_study_file(study))
        found.append((sweep.entries[0].state, sweep.entries[1].state))
        raise Refused("the model is too small")

    monkeypatch.setattr(train, "train", look)
    assert train.main([*flags]) == 2
    assert found == [("running", "to do")]
    assert Sweep.of(load_study_file(study)).entries[0].state == "to do"


def test_two_sweeps_of_one_study_are_refused(study, capsys):
    Path("out/sweeps/two").mkdir(parents=True)
    with hold(Path("out/sweeps/two")):
        assert main([str(study)]) == 2
    assert capsys.readouterr().err == (
        "E out/sweeps/two: another process is writing this sweep; wait for it, or stop it first\n"
    )


# ── the plan


def test_dry_run(study, monkeypatch, capsys):
    write_run(cfg_of(1), "finished")
    monkeypatch.setattr(sweeps, "visible", lambda: ())
    assert main([str(study), "--dry-run", "--jobs", "3"]) == 0
    out = capsys.readouterr().out
    assert "\n2 runs: 1 finished, 1 to do\n1 left, 3 at a time\n" in out
    assert "\neach: vgrout train smoke --intervention=none …\n" in out
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setattr(sweeps, "visible", lambda: ("2", "5"))
    assert main([str(study), "--dry-run"]) == 0
    assert "1 left, 2 at a time, on a GPU each of 2, 5\n" in capsys.readouterr().out
    assert main([str(study), "--dry-run", "--jobs", "3"]) == 2
    assert capsys.readouterr().err == "E --jobs 3: GPUs 2, 5 are here; give at most 2\n"
    assert not Path("out/sweeps").exists()


@pytest.mark.long
def test_a_plan_is_frozen(study, monkeypatch, capsys):
    by_hand(monkeypatch, dict.fromkeys((1, 2, 3), (0, "finished")))
    assert main([str(study)]) == 0
    study.write_text(TWO.replace("[1, 2]", "[1, 3]"))
    capsys.readouterr()
    assert main([str(study)]) == 2
    edited = "(1 runs more, 1 less); give the study another name, or add --replan"
    assert edited in capsys.readouterr().err
    for flags, output in (["--dry-run"], True), (["--dry-run", "--replan"], False):
        assert main([str(study), *flags]) == 0
        assert (edited in capsys.readouterr().out) is output
    assert main([str(study), "--replan"]) == 0
    assert [*index()] == [1, 3]
    assert len([*Path("out/sweeps/two").glob("plan*.json")]) == 2


def test_a_plan_lists_every_missing_file(study, capsys):
    arm = '[[arms]]\nintervention = "erase"\nvhack-pairs-path = "no.json"\nteacher-pool-dir = "b"\n'
    study.write_text(TWO + f'teacher-pool-dir = "a"\n{arm}')
    assert main([str(study), "--dry-run"]) == 2
    out = capsys.readouterr().out
    missing = [line for line in out.splitlines() if line.startswith("missing: ")]
    for name in ("--teacher-pool-dir a:", "--teacher-pool-dir b:", "--vhack-pairs-path no.json:"):
        assert sum(line.startswith(f"missing: {name}") for line in missing) == 1, out
    study.write_text(
        TWO + 'teacher-pool-dir = "a"\nlr = [0.1, 0.2]\n[[arms]]\nintervention = "erase"\n'
    )
    assert main([str(study), "--dry-run"]) == 2


# ── other workers

FAKE_PUEUE = """#!{python}
import json, pathlib, sys
book = pathlib.Path({book!r})
tasks = json.loads(book.read_text())
groups = {{"default"}} | {{task["group"] for task in tasks.values()}}
if sys.argv[1] == "status":
    print(json.dumps({{"tasks": tasks, "groups": dict.fromkeys(groups, {{}})}}))
elif sys.argv[1] == "group":
    assert sys.argv[2:5] == ["add", "--parallel", "1"] and sys.argv[5] not in groups, sys.argv
else:
    word, group = sys.argv[1:], "default"
    assert word[:3] == ["add", "--escape", "--label"], word
    if word[4] == "--group":
        group = word.pop(5)
        word.pop(4)
    assert word[4] == "--", word
    here = str(pathlib.Path.cwd())
    task = {{"label": word[3], "status": "Queued", "path": here, "command": word[5:], "group": group}}
    tasks[str(len(tasks))] = task
    book.write_text(json.dumps(tasks))
"""


@pytest.fixture
def book(tmp_path, monkeypatch):
    """The tasks of a fake pueue, whose client answers as the real one is documented to."""
    client = tmp_path / "bin" / "pueue"
    client.parent.mkdir()
    client.write_text(FAKE_PUEUE.format(python=sys.executable, book=str(tmp_path / "book.json")))
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    (tmp_path / "book.json").write_text("{}")
    return tmp_path / "book.json"


@pytest.mark.long
def test_via_pueue(study, book, monkeypatch, capsys):
    monkeypatch.setattr(sweeps, "visible", lambda: ())
    labels = [f"two: none seed {r.seed} ({r.identity[:8]})" for r in load_study_file(study).runs]
    done = {
        "label": labels[0],
        "status": {"Done": {"result": "Success"}},
        "path": str(study.parent),
        "group": "a",
    }
    elsewhere = {
        "label": labels[1],
        "status": {"Running": {}},
        "path": "/another/checkout",
        "group": "a",
    }
    unnamed = {"label": None, "status": {"Running": {}}, "path": str(study.parent), "group": "a"}
    book.write_text(json.dumps(dict(enumerate([done, elsewhere, unnamed]))))
    assert main([str(study), "--via", "pueue"]) == 0
    added = [*loaded(book).values()][3:]
    assert [(t["label"], t["group"]) for t in added] == [(label, "default") for label in labels]
    assert added[0]["command"][1:] == [
        "-m",
        "vgrout.train",
        "smoke",
        "--intervention=none",
        "--seed=1",
    ]
    assert {e["state"] for e in index().values()} == {"queued"}
    assert main([str(study), "--via", "pueue"]) == 0
    assert len(loaded(book)) == 5  # none twice


def test_each_gpu_has_a_group_of_the_queue(study, book, monkeypatch):
    """The next run goes to the GPU that has the fewest."""
    monkeypatch.setattr(sweeps, "visible", lambda: ("0", "MIG-a", "3"))
    study.write_text(TWO.replace("[1, 2]", "[1, 2, 3, 4]"))
    other = {"label": "x", "status": {"Running": {}}, "path": "/", "group": "gpu-0"}
    book.write_text(json.dumps({"0": other}))
    assert main([str(study), "--via", "pueue"]) == 0
    added = [*loaded(book).values()][1:]
    assert [t["group"] for t in added] == ["gpu-MIG-a", "gpu-3", "gpu-0", "gpu-MIG-a"]
    assert added[0]["command"][:2] == ["env", "CUDA_VISIBLE_DEVICES=MIG-a"]


def test_missing_pueue(study, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main([str(study), "--via", "pueue"]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("E --via pueue: `pueue status` failed ([Errno 2] No such file")
    assert refused.count("\n") == 1


# ── real processes


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(
    sys.platform != "linux", reason="a child outlives its parent where prctl is not"
)
def test_killed_sweep_ends_its_runs(tmp_path):
    child = (
        "import pathlib, signal, sys, time\n"
        "def saved(*_):\n    pathlib.Path('saved').touch(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, saved)\npathlib.Path('ready').touch()\ntime.sleep(60)"
    )
    parent = (
        "import pathlib, sys, time\nfrom vgrout.sweep.workers import spawn\n"
        f"p = spawn([sys.executable, '-c', {child!r}], pathlib.Path('log'), {{}})\n"
        "print(p.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as p:
        pid = int(p.stdout.readline())
        until((tmp_path / "ready").exists)
        p.kill()
        until(lambda: not alive(pid))
    assert (tmp_path / "saved").exists()


STUDY = """
name = "two"
preset = "smoke"
seeds = {seeds}
[common]
steps = {steps}
group = 4
checkpoint-every = 1
eval-ablate-every = 0
final-n-prompts = 6
final-samples = 1
[[arms]]
intervention = "none"
"""


@contextlib.contextmanager
def sweeping(folder, *flags, **environment):
    command = [sys.executable, "-m", "vgrout.sweep", str(folder / "two.toml"), *flags]
    env, pipe = os.environ | environment, subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as p:
        try:
            yield p
        finally:
            p.kill()


def wait(p, seconds=1800.0):
    output, _ = p.communicate(timeout=seconds)
    return p.returncode, output


def runs_of(folder):
    return sorted((folder / "out" / "runs").glob("*_*"))


@pytest.mark.slow
def test_a_sweep_survives_ctrl_c_and_kill_9(tmp_path):
    """Interrupted in its first run, killed in the second, finished by a third sweep: the rows of runs in one go."""
    (tmp_path / "two.toml").write_text(STUDY.format(seeds=[1, 2], steps=8))
    first = lambda: [*tmp_path.glob("out/runs/*/resume/step_*/manifest.json")]  # noqa: E731
    with sweeping(tmp_path, "--jobs", "1") as p:
        until(first, 120)
        p.send_signal(signal.SIGINT)
        code, output = wait(p)
    assert code == 130, output
    (cut,) = runs_of(tmp_path)
    assert status(cut)["state"] == "interrupted"

    with sweeping(tmp_path, "--jobs", "1") as p:
        until(
            lambda: (
                len(runs_of(tmp_path)) == 2
                and [*runs_of(tmp_path)[1].glob("resume/step_*/manifest.json")]
            ),
            240,
        )
        p.kill()
    killed = runs_of(tmp_path)[1]
    # its process was signalled, and saved
    until(lambda: status(killed)["state"] == "interrupted", 60)
    assert status(cut)["state"] == "finished"

    with sweeping(tmp_path, "--jobs", "1") as p:
        code, output = wait(p)
    assert code == 0, output
    assert "2 of 2 runs finished" in output
    assert runs_of(tmp_path) == [cut, killed]  # resumed, not started again
    records = [loaded(r / "run.json") for r in (cut, killed)]
    assert all(len(r["resumed"]) == 1 for r in records)
    assert [e["run"] for e in loaded(tmp_path / "out/sweeps/two/runs.json")] == [
        str(r.relative_to(tmp_path)) for r in (cut, killed)
    ]

    command = [
        sys.executable,
        "-m",
        "vgrout.train",
        *load_study_file(tmp_path / "two.toml").runs[0].flags,
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=240)
    assert rows(runs_of(tmp_path)[-1]) == rows(cut)
