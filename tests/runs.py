"""Small runs of the whole program on the embedded organism, and what their files hold."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from files import loaded
from vgrout.commands.distill import main as distill
from vgrout.commands.iterative_dpo import main as iterative_dpo
from vgrout.config.presets import PRESETS
from vgrout.ground import embedded
from vgrout.model.load.load import load_policy
from vgrout.runs.recorder import Recorder
from vgrout.train import main

ARMS = ("none", "erase", "route", "route2")
READS = "screen-detector"  # stands for all of PAIRS whose monitor reads texts
# the documents' own route2: a quarantine in every module, each of which decides by itself
SHARED = "--quarantine shared --rollout-ablate-frac 0"
PER_MODULE = f"route2 {SHARED} --no-rebaseline"
PROBE = "--monitor online_probe --seed-monitor labels --known-modes exit_code"
# Every monitor and every intervention that reads flags: name → flags. Other pairs combine the same
# classes (test_method.py).
PAIRS = {
    "route2-per-module": f"{PER_MODULE} --gate-modules all --gate-vote module --vhack-refresh-every 2",
    "route2-band": f"{PER_MODULE} --monitor band --gate-vote rollout --vhack-refresh-every 2",
    "route2-labels": f"route2 {SHARED} --monitor labels --rebaseline",
    "route2-online-probe": f"{PER_MODULE} {PROBE} --quarantine block:2 --monitor-quantile 0.9",
    "screen-detector": "screen --monitor detector",
    "screen-source": "screen --monitor source",
    "penalty-syntax-edge": "penalty --monitor syntax_edge --shadow labels",
}
# Runs of settings that no other golden run has: name → flags.
SETTINGS = {
    "none-kl": "none --beta 0.05",
    "route2-icepop": "route2 --quarantine block:-3 --loss icepop",
}
# … those of PAIRS that are given true labels
LABELLED = ("route2-labels", "route2-online-probe")
DISTILLED = (
    "distill --teacher teacher.safetensors --steps 4 --final-samples 1 --prompts-per-step 2 --group 2 "
    "--eval-n-prompts 2 --final-n-prompts 6"
).split()
# Distillation of `teach`'s adapter and rounds of DPO: name → command line.
IMITATIONS = {
    "distill-minillm": [*DISTILLED, *"--minillm-teacher-mix-ratio 0 --eval-every 2".split()],
    "distill-minillm-mixed": DISTILLED,
    "distill-minillm-full": [*DISTILLED, "--full"],
    "distill-uld": [*DISTILLED, "--method", "uld"],
    "distill-uld-topk": [
        *DISTILLED,
        *"--method uld --uld-strategy topk_align --uld-top-k 8".split(),
    ],
    "dpo": (
        "iterative_dpo --base-model organism --output-dir out/dpo/o --rounds 2 --pairs-per-round 10 --samples 4 "
        "--eval-n-prompts 6 --eval-samples 1 --warmup-frac 0 --pairs-per-step 5 --epochs 2"
    ).split(),
}
SMALL = "--steps 5 --group 4 --prompts-per-step 2 --final-n-prompts 6 --final-samples 1".split()
QUIET = "--eval-ablate-every 0 --vhack-refresh-every 2".split()
TIMES = ("gen", "grade", "fb", "eval", "sec")
# watch: the guard reads each evaluation
EVALUATED = ("hack_deploy", "solve_deploy", "kl_deploy", "eval", "watch")


def once(argv):
    """The same command line with each flag's last value alone: tests put their own behind a small run's."""
    found = {"": []}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name = word.partition("=")[0].replace("--no-", "--")
            found.pop(name, None)
        found.setdefault(name, []).append(word)
    return [word for words in found.values() for word in words]


def flags(method, *more):
    """The command line of a small run of one of ARMS, PAIRS or SETTINGS."""
    own = {"none": [], "route2": ["--quarantine=block:-3"]}.get(method, QUIET[2:])
    if known := (PAIRS | SETTINGS).get(method):
        method, *own = known.split()
    return once(
        ["smoke", "--intervention", method, "--threads", "1", *SMALL, *QUIET[:2], *own, *more]
    )


def run(folder, *argv, code=0, stop_after=None):
    """Run the program in-process with `folder` as working directory; returns its run directory.

    stop_after: the run is asked to stop, as by a signal, when this step is done; it ends with 130.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with stopping(stop_after):
            assert main(once(argv)) == (code if stop_after is None else 130)
    finally:
        os.chdir(before)
    return max((folder / "out" / "runs").iterdir())


@contextlib.contextmanager
def stopping(after):
    record = Recorder.record

    def stop(self, row, *rest):
        self.run.stop.requested = row.step == after
        record(self, row, *rest)

    with pytest.MonkeyPatch.context() as m:
        if after is not None:
            m.setattr(Recorder, "record", stop)
        yield


class SharedRuns:
    """Runs that several tests need, each made once in a session, by whichever of its processes asks first."""

    def __init__(self, folder):
        """folder: the session's, the same in all its processes."""
        self.folder = folder / "runs"
        self.folder.mkdir(exist_ok=True)

    def __call__(self, *argv, stop_after=None):
        """The run directory of this command line, to be read only; a test that resumes it takes a `copy`."""
        name = hashlib.sha256(json.dumps([argv, stop_after]).encode()).hexdigest()[:16]
        home = self.folder / name
        with open(self.folder / f"{name}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not home.exists():
                shutil.rmtree(making := self.folder / f"{name}.making", ignore_errors=True)
                self.warm(making)
                run(making, *argv, stop_after=stop_after)
                making.rename(home)
        return max((home / "out" / "runs").iterdir())

    def copy(self, run, to):
        """The run in a working directory of its own, `to`."""
        shutil.copytree(run.parents[2], to, symlinks=True, dirs_exist_ok=True)
        return to / run.relative_to(run.parents[2])

    def warm(self, folder):
        """A working directory whose runs share the session's caches of decomposed weights and directions."""
        for name in ("svd_cache", "vhack"):
            (cache := self.folder.parent / name).mkdir(exist_ok=True)
            (folder / "out").mkdir(parents=True, exist_ok=True)
            (folder / "out" / name).symlink_to(cache)
        return folder


def rows(path, *without):
    """A run's rows without its timings and the columns named."""
    lines = (path / "steps.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in (*TIMES, *without)} for line in lines
    ]


def only_run(folder):
    (path,) = (folder / "out" / "runs").iterdir()
    return path


def status(path):
    """A run's status.json."""
    return loaded(path / "status.json")


def until(condition, seconds=300.0):
    """Wait until `condition` is true; its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def adapter_bytes(path):
    """The saved δS, without metadata (which names the configuration)."""
    tensors = load_file(path / "train.safetensors")
    return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))


def teach(path):
    """An adapter of the organism at this path, far enough from it to be another model."""
    policy = load_policy(embedded.MODEL_DIR, device="cpu", dtype=torch.float32, cache_dir=None)
    with torch.no_grad():
        policy.adapter.δS.copy_(
            0.2 * torch.randn(len(policy.adapter), generator=torch.Generator().manual_seed(0))
        )
    policy.adapter.save(path, {"cfg": json.dumps(PRESETS["smoke"][1].as_dict()), "step": "0"})
    return path


def imitate(folder, command, *argv, code=0):
    """`distill` or `iterative_dpo` in-process with `folder` as working directory; returns the run directory."""
    if command == "distill" and not (folder / "teacher.safetensors").exists():
        teach(folder / "teacher.safetensors")
    with contextlib.chdir(folder):
        assert {"distill": distill, "iterative_dpo": iterative_dpo}[command](list(argv)) == code
    return max((folder / "out" / {"distill": "distill", "iterative_dpo": "dpo"}[command]).iterdir())


def program(folder, command, *argv, code=0, how=""):
    """`distill` or `iterative_dpo` in a process of its own, without run-time checks, which cost more than the run;
    returns its stderr. how: lines of Python before it."""
    lines = f"{how}\nfrom vgrout.commands.{command} import main\nimport sys; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", lines, *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stderr


def imitation_rows(path):
    """A distillation's rows and its sides at the end; of DPO each round's metrics, the first before any round."""
    if (path / "plan.json").exists():
        files = [path / "before.json", *sorted(path.glob("round-*/metrics.json"))]
        return [{k: v for k, v in loaded(f).items() if k not in (*TIMES, "plan")} for f in files]
    return [*rows(path), loaded(path / "final.json")["sides"]]
