"""Runs killed with SIGKILL at random moments and inside saves, resumed, and compared with the same run unbroken.

`python -m benchmarks kills` prints one line for each method. Survived: every row (timings apart) and every byte of
`train.safetensors` are those of the run that was never killed. Processes are forked from a server that has loaded the
libraries already, so that most of their life is the run's own; they run the program by its own entry point.
"""

import contextlib
import importlib
import json
import multiprocessing as mp
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from tabulate import tabulate
from tqdm import tqdm

from vgrout.config.method import INTERVENTIONS
from vgrout.files import read_json

ARMS = ("none", "erase", "route", "route2", "screen")  # screen, by pmi, for all whose monitor reads
TIMES = {"gen", "grade", "fb", "eval", "sec"}
# Everything on that a run can remember, or that a default run does not touch: demonstrations that end, a refreshed
# direction, the guard, every detector, the KL penalty, the split by detectors; of methods that route, an ablated slice.
EVERYTHING = (
    *("--threads", "1", "--steps", "6", "--group", "4", "--prompts-per-step", "2", "--seed", "7"),
    *("--checkpoint-every", "1", "--checkpoint-keep", "2", "--final-n-prompts", "6", "--final-samples", "1"),
    *("--eval-ablate-every", "2", "--eval-n-prompts", "2", "--guard-warmup", "2", "--guard-baseline", "1"),
    *("--reward-hack-detector", "info_rm,advantage", "--echo-trap-enabled", "--beta", "1e-3"),
    *("--report-detectors", "E,C", "--teacher-off-step", "5"),
)
Phase = Literal["loading", "steps", "saving", "final evaluation"]
PHASES: tuple[Phase, ...] = ("loading", "steps", "saving", "final evaluation")
LIMIT_S = 900.0  # a process that lasts longer hangs


@dataclass(frozen=True)
class Tally:
    """Deaths of one method's runs."""

    intervention: str
    deaths: dict[Phase, int]
    survived: int

    @property
    def tried(self) -> int:
        """Deaths in all."""
        return sum(self.deaths.values())


def _work(folder: str, argv: list[str]) -> None:
    """A process of its own: the program, its output in a file."""
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    raise SystemExit(importlib.import_module("vgrout.train").main(argv))


def _start(folder: Path, argv: Sequence[str]) -> BaseProcess:
    process = _server().Process(target=_work, args=(str(folder), list(argv)), daemon=True)
    process.start()
    return process


def _server() -> mp.context.ForkServerContext:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([f"vgrout.{module}" for module in ("train", "loading", "runs.results")])
    return context


def _finish(folder: Path, process: BaseProcess) -> Path:
    """The run directory of a process that should end well. Raises RuntimeError with the end of its output."""
    process.join(LIMIT_S)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"exit code {process.exitcode}: {(folder / 'output.txt').read_text()[-2000:]}")
    return _newest(folder)


def _newest(folder: Path) -> Path:
    return max((folder / "out" / "runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)


def outcome(run: Path) -> tuple[list[dict[str, object]], bytes]:
    """Results that must not depend on deaths: the rows without their timings, the deployed model's file."""
    lines = (run / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
    return rows, (run / "train.safetensors").read_bytes()


def _wait(process: BaseProcess, folder: Path, rng: random.Random, lifetime_s: float) -> bool:
    """Until a random moment of the process's life, or the first sign of a save after one. False: it ended before."""
    until = time.monotonic() + rng.uniform(0.0, lifetime_s)
    into_a_save = rng.random() < 0.5
    while process.is_alive():
        if time.monotonic() >= until and (not into_a_save or _saving(folder, process)):
            time.sleep(rng.uniform(0.0, 0.004) if into_a_save else 0.0)
            return process.is_alive()
        time.sleep(0.001 if into_a_save else 0.005)
    return False


def _saving(folder: Path, process: BaseProcess) -> bool:
    """Whether half of a file or of a checkpoint of this process is lying there."""
    with contextlib.suppress(OSError):  # folders come and go meanwhile
        patterns = (f"resume/.tmp_*_{process.pid}", f".*.{process.pid}.tmp")
        return any(any(folder.glob(f"out/runs/*/{pattern}")) for pattern in patterns)
    return False


def _phase(folder: Path, process: BaseProcess) -> Phase:
    """What a process that has just died was doing, from the files that it left."""
    if _saving(folder, process):
        return "saving"
    logs = sorted(folder.glob("logs/*.log"))
    log = logs[-1].read_text(encoding="utf-8").rsplit(" argv: ", 1)[-1] if logs else ""
    if "optimiser step" not in log:  # the table's legend comes before the first step
        return "loading"
    return "final evaluation" if "final evaluation on held-out" in log else "steps"


def _next(folder: Path, first: Sequence[str]) -> list[str] | None:
    """The command after a death: go on, or start again where nothing is saved yet. None: it had finished."""
    runs = folder / "out" / "runs"
    run = _newest(folder) if runs.is_dir() and any(runs.iterdir()) else None
    if run is None or not any(run.glob("resume/step_*/manifest.json")):
        return list(first)
    if read_json(run / "status.json")["state"] == "finished":
        return None
    return ["smoke", "--resume", str(run.relative_to(folder))]


def torture(intervention: str, kills: int, root: Path, seed: int = 0) -> Tally:
    """Kill runs of an intervention `kills` times, below `root`; a run that ends in between is followed by another.

    Raises RuntimeError where a resumed process does not end well.
    """
    first = [
        "smoke",
        "--intervention",
        intervention,
        *EVERYTHING,
        *(
            ["--vhack-refresh-every", "2"]
            if INTERVENTIONS[intervention].has_direction or intervention == "route2"
            else []
        ),
        *(["--rollout-ablate-frac", "0.5"] if INTERVENTIONS[intervention].routes else []),
        *(["--monitor", "pmi", "--monitor-prompts", "40"] if intervention == "screen" else []),
    ]
    rng = random.Random(f"{intervention} {seed}")
    reference = root / intervention
    reference.mkdir(parents=True)
    start = time.monotonic()
    expected = outcome(_finish(reference, _start(reference, first)))
    lifetime_s = time.monotonic() - start
    deaths: Counter[Phase] = Counter()
    survived = runs = 0
    with tqdm(total=kills, desc=intervention, disable=None, leave=False) as bar:
        while deaths.total() < kills:
            runs += 1
            folder = root / f"{intervention}.{runs}"
            folder.mkdir()
            (folder / "out").mkdir()
            (folder / "out" / "svd_cache").symlink_to(reference.resolve() / "out" / "svd_cache")
            process: BaseProcess | None = _start(folder, first)
            here = 0
            while process and deaths.total() < kills and _wait(process, folder, rng, lifetime_s):
                process.kill()
                process.join()
                deaths[_phase(folder, process)] += 1
                here += 1
                bar.update()
                argv = _next(folder, first)
                process = _start(folder, argv) if argv else None
            survived += here * (outcome(_finish(folder, process) if process else _newest(folder)) == expected)
    return Tally(intervention, {phase: deaths[phase] for phase in PHASES}, survived)


def table(tallies: Sequence[Tally]) -> str:
    """GitHub markdown."""
    head = ["intervention", "survived / tried", *PHASES]
    rows = [[t.intervention, f"{t.survived}/{t.tried}", *(t.deaths[p] for p in PHASES)] for t in tallies]
    total = ["all", f"{sum(t.survived for t in tallies)}/{sum(t.tried for t in tallies)}"]
    total += [str(sum(t.deaths[p] for t in tallies)) for p in PHASES]
    return tabulate([*rows, total], headers=head, tablefmt="github", disable_numparse=True)


def run(kills: int, interventions: Sequence[str], seed: int) -> list[Tally]:
    """`kills` deaths of each intervention's runs."""
    with tempfile.TemporaryDirectory(prefix="vgrout-kills-", ignore_cleanup_errors=True) as root:
        tallies = []
        for name in interventions:
            tallies.append(done := torture(name, kills, Path(root), seed))
            print(f"{name}: {done.survived}/{done.tried}", flush=True)  # minutes each
        return tallies
