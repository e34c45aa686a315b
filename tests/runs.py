"""Small runs of the whole program on the embedded organism, and what their files hold."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vgrout.runs.recorder import Recorder
from vgrout.train import main

ARMS = ("none", "erase", "route", "route2")
READS = "screen-pmi"  # of PAIRS, for all whose monitor reads, where there is no time for more
FEW = ["--monitor-prompts", "40"]
# Every monitor and every arm that reads flags, with what differs in a run: name → flags. The other pairs are the same
# two classes put together otherwise (test_axes.py, test_monitors.py).
PAIRS: dict[str, list[str]] = {
    "route2-band": ["route2", "--monitor", "band", "--gate-vote", "rollout", "--vhack-refresh-every", "2"],
    "route2-nll-block": ["route2", "--monitor", "nll", "--quarantine", "block:2", *FEW],
    "route2-labels": ["route2", "--monitor", "labels"],
    "sgtm-detector-block": ["sgtm", "--monitor", "detector", "--quarantine", "block:2"],
    "screen-pmi": ["screen", "--monitor", "pmi", *FEW],
    "screen-probe": ["screen", "--monitor", "probe", *FEW],
    "penalty-relevance": ["penalty", "--monitor", "relevance", *FEW],
    "penalty-twin": ["penalty", "--monitor", "twin", "--random-flags"],
    "penalty-quarantine": [
        "penalty",
        "--monitor",
        "quarantine",
        "--seed-monitor",
        "labels",
        "--known-modes",
        "exit_code",
    ],
    "screen-quarantine": [
        *("screen", "--monitor", "quarantine", "--seed-monitor", "labels", "--quarantine-diet", "random"),
        *("--quarantine-threshold", "0.2", "--quarantine-share", "1", "--quarantine-start", "pairs"),
    ],
    "route2-online-probe": [
        *("route2", "--monitor", "online_probe", "--seed-monitor", "labels", "--known-modes", "exit_code"),
        *("--quarantine", "block:2"),
    ],
}
LABELLED = (
    "route2-labels",
    "penalty-quarantine",
    "screen-quarantine",
    "route2-online-probe",
)  # … that are given true labels
SMALL = ["--steps", "5", "--group", "4", "--prompts-per-step", "2", "--final-n-prompts", "6", "--final-samples", "1"]
QUIET = ["--eval-ablate-every", "0", "--vhack-refresh-every", "2"]
TIMES = ("gen", "grade", "fb", "eval", "sec")
EVALUATED = ("hack_deploy", "solve_deploy", "kl_deploy", "eval", "watch")  # watch: the guard reads each evaluation


def flags(arm: str, *more: str) -> list[str]:
    if arm in PAIRS:
        of, *own = PAIRS[arm]
        return ["smoke", "--intervention", of, "--threads", "1", *SMALL, *QUIET[:2], *own, *more]
    own = [] if arm == "none" else QUIET[2:]
    return ["smoke", "--intervention", arm, "--threads", "1", *SMALL, *QUIET[:2], *own, *more]


def run(folder: Path, *argv: str, code: int = 0, stop_after: int | None = None) -> Path:
    """Run the program in-process with `folder` as working directory; returns its run directory.

    stop_after: the run is asked to stop, as by a signal, when this step is done; it ends with 130.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with stopping(stop_after):
            assert main(list(argv)) == (code if stop_after is None else 130)
    finally:
        os.chdir(before)
    return max((folder / "out" / "runs").iterdir())


@contextmanager
def stopping(after: int | None) -> Iterator[None]:
    record = Recorder.record

    def stop(self: Recorder, row: Any, *rest: Any) -> None:
        self.run.stop.requested = row.step == after
        record(self, row, *rest)

    with pytest.MonkeyPatch.context() as m:
        if after is not None:
            m.setattr(Recorder, "record", stop)
        yield


class SharedRuns:
    """Runs that several tests need, each made once in a session, by whichever of its processes asks first."""

    def __init__(self, folder: Path) -> None:
        """folder: the session's, the same in all its processes."""
        self.folder = folder / "runs"
        self.folder.mkdir(exist_ok=True)

    def __call__(self, *argv: str, stop_after: int | None = None) -> Path:
        """The run directory of this command line. It is for reading: what goes on with it takes a `copy`."""
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

    def copy(self, run: Path, to: Path) -> Path:
        """The run in a working directory of its own, `to`."""
        shutil.copytree(run.parents[2], to, symlinks=True, dirs_exist_ok=True)
        return to / run.relative_to(run.parents[2])

    def warm(self, folder: Path) -> Path:
        """A working directory for runs that finds decomposed weights and directions where the others have left them;
        both are looked up by the hash of what they were made of, and begin cold in every session."""
        for name in ("svd_cache", "vhack"):
            (cache := self.folder.parent / name).mkdir(exist_ok=True)
            (folder / "out").mkdir(parents=True, exist_ok=True)
            (folder / "out" / name).symlink_to(cache)
        return folder


def rows(path: Path, *without: str) -> list[dict[str, Any]]:
    """A run's rows without its timings and the columns named."""
    lines = (path / "steps.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in (*TIMES, *without)} for line in lines]


def adapter_bytes(path: Path) -> bytes:
    """The saved δS, without metadata (which names the configuration)."""
    tensors = load_file(path / "train.safetensors")
    return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
