"""The templates in docs/ for other schedulers, run as these would, with stand-ins for their commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from quick import first_quick
from test_sweep import TWO, cfg_of, write_run
from vgrout.config.presets import flag_names
from vgrout.sweep.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "docs" / "schedulers"


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of two runs, and `python` and `torchrun` on the path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    stand_in("python", f'exec {sys.executable} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (path := tmp_path / "two.toml").write_text(TWO)
    return path


def stand_in(name, body):
    path = Path("bin") / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def bash(script, *args, **env):
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(
        ["bash", str(TEMPLATES / script), *args], env=os.environ | env, timeout=300, **output
    )
    return done.returncode, done.stdout


@pytest.mark.long
def test_the_list_of_commands_keeps_every_run(study, capsys):
    """A line keeps its number, so that a task keeps its run."""
    study.write_text(TWO.replace("[1, 2]", "[1, 2, 3]"))
    assert main([str(study), "--commands"]) == 0
    lines = [f"python -m vgrout.train smoke --intervention=none --seed={s}" for s in (1, 2, 3)]
    assert capsys.readouterr().out.splitlines() == lines
    write_run(cfg_of(1), "finished", "done")
    write_run(cfg_of(2), "interrupted", "cut", checkpoint=True)
    assert main([str(study), "--commands"]) == 0
    lines[:2] = [
        "true  # finished: none seed 1",
        "python -m vgrout.train smoke --resume=out/runs/cut",
    ]
    assert capsys.readouterr().out.splitlines() == lines
    assert not Path("out/sweeps").exists()


@pytest.mark.long
def test_an_array_task_runs_its_line_of_the_list(study):
    code, output = bash("study.sbatch", str(study), SLURM_ARRAY_TASK_ID="2", EXTRA="--dry-run")
    assert code == 0, output
    assert (
        output.splitlines()[0]
        == "python -m vgrout.train smoke --intervention=none --seed=2 --dry-run"
    )
    assert "smoke_none_seed2: " in output  # what the trainer would do
    assert not Path("out/runs").exists()
    code, output = bash("study.sbatch", str(study), SLURM_ARRAY_TASK_ID="3")
    assert (code, output) == (2, f"E {study} has no run number 3\n")


@pytest.mark.long
def test_an_interrupted_task_is_queued_again(study):
    """SIGTERM to the script, as SLURM sends it, reaches the run, which saves; a run that ends otherwise stays out."""
    stand_in("scontrol", 'echo "scontrol $*"')
    trainer = "trap 'echo saved; exit 130' TERM; kill -TERM $PPID; for i in {1..100}; do sleep 0.1; done; exit 9"
    stand_in(
        "python", f'if [ "$2" = vgrout.sweep ]; then exec {sys.executable} "$@"; fi; {trainer}'
    )
    ids = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7"}
    code, output = bash("study.sbatch", str(study), **ids)
    assert (code, output.splitlines()[1:]) == (130, ["saved", "scontrol requeue 7_1"])
    stand_in("python", f'if [ "$2" = vgrout.sweep ]; then exec {sys.executable} "$@"; fi; exit 3')
    code, output = bash("study.sbatch", str(study), **ids)
    assert (code, len(output.splitlines())) == (3, 1)


def test_torchrun_hands_on_every_flag_after_the_dashes(capsys):
    """Its parser looks at all arguments for its own flags, also at those of the program."""
    parser = torchrun.get_args_parser()
    given = ["smoke", *(part for flag in sorted(flag_names()) for part in (flag, "1"))]
    parsed = parser.parse_args(["-m", "--", "vgrout.train", *given])
    assert (parsed.training_script, parsed.training_script_args) == ("vgrout.train", given)
    with pytest.raises(SystemExit):
        parser.parse_args(["-m", "vgrout.train", *given])
    assert "ambiguous option: --monitor" in capsys.readouterr().err, "the dashes could go"


@pytest.mark.long
def test_several_ranks_are_started_by_torchrun(study):
    stand_in(
        "scontrol", 'if [ "$1" = show ]; then printf "n1\\nn2\\n"; else echo "scontrol $*"; fi'
    )
    stand_in("srun", 'shift; exec "$@"')
    stand_in("torchrun", 'echo "torchrun $*"')
    job = {
        "SLURM_JOB_ID": "9",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    code, output = bash("ranks.sbatch", str(study), RUN="2", EXTRA="--tensor-parallel=4", **job)
    assert code == 0, output
    ranks = (
        "torchrun --nnodes=2 --nproc-per-node=4 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=9"
    )
    trainer = "-m -- vgrout.train smoke --intervention=none --seed=2 --tensor-parallel=4"
    assert output.splitlines()[-1].split() == f"{ranks} --rdzv-endpoint=n1:20009 {trainer}".split()
    write_run(cfg_of(2), "interrupted", "cut", checkpoint=True)
    code, output = bash("ranks.sbatch", str(study), RUN="2", **job)
    assert output.splitlines()[-1].endswith("-m -- vgrout.train smoke --resume=out/runs/cut")
    assert "requeue" not in output, "it was not asked to end: it has failed, and would again"
    stand_in("scancel", 'echo "scancel $*"; touch asked')
    stand_in("torchrun", "kill -TERM $PPID; while [ ! -e asked ]; do sleep 0.1; done; exit 1")
    code, output = bash("ranks.sbatch", str(study), RUN="2", **job)
    assert output.splitlines()[-2:] == ["scancel --signal=TERM 9", "scontrol requeue 9"]
    write_run(cfg_of(2), "finished", "done")
    code, output = bash("ranks.sbatch", str(study), RUN="2", **job)
    assert output.splitlines() == ["true  # finished: none seed 2"]


@pytest.mark.parametrize(
    ("script", "kills_python"),
    first_quick(
        [(script, kills) for script in ("study.sbatch", "ranks.sbatch") for kills in (True, False)]
    ),
)
def test_a_job_that_is_asked_to_end_before_there_is_a_run_is_queued_again(
    study, script, kills_python
):
    stand_in("scontrol", 'if [ "$1" = show ]; then echo n1; else echo "scontrol $*"; fi')
    lines = "exit 143" if kills_python else f'exec {sys.executable} "$@"'
    # the grandparent is the script: its parent is the subshell of $( … )
    stand_in("python", f"kill -TERM $(ps -o ppid= -p $PPID); {lines}")
    ids = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "7"}
    code, output = bash(script, str(study), SLURM_JOB_NODELIST="n1", **ids)
    job = {"study.sbatch": "7_1", "ranks.sbatch": "7"}[script]
    assert (code, output) == (143, f"scontrol requeue {job}\n")


@pytest.mark.parametrize(("code", "again"), first_quick([(143, True), (0, False)]))
def test_a_run_that_dies_of_the_signal_is_queued_again(study, code, again):
    """It does while Python starts; one that has finished meanwhile has ended."""
    stand_in("scontrol", 'echo "scontrol $*"')
    trainer = f"trap 'exit {code}' TERM; kill -TERM $PPID; for i in {{1..100}}; do sleep 0.1; done"
    stand_in(
        "python", f'if [ "$2" = vgrout.sweep ]; then exec {sys.executable} "$@"; fi; {trainer}'
    )
    ids = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7"}
    got, output = bash("study.sbatch", str(study), **ids)
    assert (got, output.splitlines()[1:]) == (code, ["scontrol requeue 7_1"] * again)
