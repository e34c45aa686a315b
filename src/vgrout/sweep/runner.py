"""Runs a study: skips finished runs, resumes interrupted ones, starts the rest, N at a time.

`out/sweeps/NAME/` holds `plan.json` (the study file's hash and every run, frozen when the sweep
first starts), `runs.json` (an entry per run: name, arm, seed, flags, run directory, state) and
`logs/`. Runs lie in `out/runs` like any others and are found by their settings and input files: a
run that another study made is not made again.
"""

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import tyro
from loguru import logger
from tabulate import tabulate
from tqdm import tqdm

from vgrout.config.checks import check, setting
from vgrout.config.run import settings_sha256
from vgrout.ground.io import (
    Refused,
    held,
    hold,
    make_folder,
    probe_writable,
    read_json,
    reading_once,
    refuse,
    to_json,
    write_atomic,
)
from vgrout.ground.machine import cores, visible
from vgrout.ground.metrics import percent
from vgrout.runs.context import FAILED, FINISHED, INTERRUPTED, REFUSED, Stop, stop_on_signals
from vgrout.runs.inputs import file_hashes
from vgrout.runs.plan import preflight
from vgrout.sweep.entry import FINAL, Entry, Ledger
from vgrout.sweep.study_file import StudyFile, load_study_file
from vgrout.sweep.workers import POLL_S, Local, Process, Pueue

SWEEPS = Path("out/sweeps")
SCHEMA = "sweep_v1"


@dataclass(frozen=True)
class SweepSettings:
    """Run a study: arms × overrides × seeds, each run a process. The same command continues after any
    ending."""

    study: Annotated[Path, tyro.conf.Positional]
    """Study file (TOML); studies/ has examples."""
    dry_run: bool = False
    """Print the runs and their states. Start nothing."""
    commands: bool = False
    """Print every run's command for another scheduler, one per line and always on the same line: the resuming command
    where there is a checkpoint, `true` where the run has ended or is under way. Start nothing."""
    jobs: int | None = setting(None, low=1)
    """Runs at a time, each on a GPU of its own where there are any; none: as many as there are GPUs, or else cores."""
    via: Literal["local", "pueue"] = "local"
    """Where runs are started: processes on this machine · a pueue queue."""
    trust_code: bool = False
    """Import the functions and classes that the study names."""
    replan: bool = False
    """Continue although the study file is no longer the planned one; the old plan is kept beside the new one."""

    def __post_init__(self) -> None:
        check(self)
        on_queue = self.jobs is not None and self.via == "pueue"
        refuse(on_queue, "--jobs: not read with --via pueue; leave it out")


@dataclass
class Sweep:
    """A study being run."""

    study: StudyFile
    entries: list[Entry]
    missing: list[str]  # a line on each file that is not there
    ledger: Ledger = field(default_factory=Ledger)
    under_way: list[tuple[Process, Entry]] = field(default_factory=list)
    elsewhere: set[Path] = field(default_factory=set)  # runs that other processes were writing

    @classmethod
    def of(cls, study: StudyFile, dry_run: bool = False) -> "Sweep":
        """The study with every run's state as it is on disk.

        dry_run: files that are missing are listed in `missing`, and not refused.

        Raises:
            Refused: one line: an input file of some run is missing or wrong.
        """
        missing: list[str] = []
        with reading_once():  # what arms have in common is read and checked for the first of them
            files = _hashes(study, dry_run, missing)
        sweep = cls(study, [Entry(run, files[run.identity]) for run in study.runs], missing)
        sweep.ledger.refresh()
        for entry in sweep.entries:
            entry.look(sweep.ledger)
        return sweep

    @property
    def folder(self) -> Path:
        return SWEEPS / self.study.name

    @property
    def left(self) -> list[Entry]:
        """The runs that have not ended for good."""
        return [e for e in self.entries if e.state not in FINAL]

    def log(self, entry: Entry) -> Path:
        return self.folder / "logs" / entry.log_name

    # ── the plan

    def plan(self, slots: str) -> list[str]:
        """Lines that show every run with its state. slots: how many go at a time."""
        lines = [f"H: {claim}" for claim in self.study.hypotheses]
        rows: list[dict[str, str | None]] = []
        for entry in self.entries:
            directory = entry.run.name if entry.run else None
            rows.append({"run": entry.planned.name, "state": entry.state, "directory": directory})
        lines.append(
            tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True, missingval="·")
        )
        of_first, *of_others = [entry.planned.flags for entry in self.entries]
        of_all = [word for word in of_first if all(word in flags for flags in of_others)]
        lines.append(f"each: vgrout train {shlex.join(of_all)} …")
        states = Counter(entry.state for entry in self.entries)
        counts = ", ".join(f"{n} {state}" for state, n in states.items())
        lines.append(f"{len(self.entries)} runs: {counts}")
        lines += self.study.left_out
        lines += [f"missing: {file}" for file in dict.fromkeys(self.missing)]
        lines.append(f"{len(self.left)} left, {slots}" if self.left else "0 left")
        return lines

    def edited(self) -> str:
        """How the study file differs from the planned one, in one line.

        "" if it does not, or if nothing was planned yet.
        """
        path = self.folder / "plan.json"
        if not path.is_file():
            return ""
        planned = read_json(path)
        if planned["sha256"] == self.study.sha256:
            return ""
        before = {run["identity"] for run in planned["runs"]}
        now = {run.identity for run in self.study.runs}
        return (
            f"{self.study.path}: not the file that {path} was made from "
            f"({len(now - before)} runs more, {len(before - now)} less); "
            "give the study another name, or add --replan"
        )

    def freeze(self, replan: bool) -> None:
        """Write plan.json, or compare the study with it.

        Raises:
            Refused: they differ, and the study may not be planned anew.
        """
        path = self.folder / "plan.json"
        why = self.edited()
        if why:
            refuse(not replan, why)
            os.replace(path, self.folder / f"plan.{read_json(path)['sha256'][:10]}.json")
        elif path.is_file():
            return
        runs = [{**run.as_json(), "identity": run.identity} for run in self.study.runs]
        plan = {
            "schema": SCHEMA,
            "name": self.study.name,
            "study": str(self.study.path),
            "sha256": self.study.sha256,
            "hypotheses": list(self.study.hypotheses),
            "runs": runs,
        }
        write_atomic(path, to_json(plan))

    def write(self) -> None:
        """Write runs.json."""
        runs = [entry.as_json() for entry in self.entries]
        write_atomic(self.folder / "runs.json", to_json(runs))

    # ── carrying it out

    def run(self, workers: Local | Pueue, replan: bool) -> int:
        """Freeze the plan, then run here what is left, or hand it to a queue. Returns the exit code."""
        make_folder(self.folder / "logs")
        with hold(self.folder, "sweep"):
            self.freeze(replan)
            for line in self.study.left_out:
                logger.info(line)
            self.write()
            if isinstance(workers, Pueue):
                return self.enqueue(workers)
            return self.carry_out(workers)

    def carry_out(self, workers: Local) -> int:
        """Start runs until all have ended, or until a signal. Returns the exit code.

        After a signal it waits while the runs under way save and end. However this process ends,
        the runs under way are asked to (`spawn`).
        """
        waiting = self.left
        ended = len(self.entries) - len(waiting)
        with (
            stop_on_signals() as stop,
            tqdm(
                total=len(self.entries),
                initial=ended,
                disable=None,
                desc=self.study.name,
                unit="run",
                smoothing=0,
            ) as bar,
        ):
            self._loop(workers, waiting, stop, bar.update)
        self.write()
        return INTERRUPTED if stop.requested else self.conclude()

    def _loop(
        self, workers: Local, waiting: list[Entry], stop: Stop, tick: Callable[[], object]
    ) -> None:
        """Start and watch runs. tick: called for each that has ended."""
        stopping = False
        while self.under_way or (waiting and not stop.requested):
            if stop.requested and not stopping:
                stopping = True
                for job, _ in self.under_way:
                    job.terminate()
            for entry in list(waiting):
                if stop.requested or len(self.under_way) >= workers.slots:
                    break
                if not self._is_elsewhere(entry):
                    waiting.remove(entry)
                    self._start(workers, entry, tick)
            for job, entry in list(self.under_way):
                code = job.poll()
                if code is not None:
                    self.under_way.remove((job, entry))
                    entry.end(self.ledger, code, self.log(entry))
                    self._ended(entry, tick)
                    self.write()
            time.sleep(POLL_S)

    def _is_elsewhere(self, entry: Entry) -> bool:
        """Look at a run that waits: whether another process is writing it."""
        if entry.run and entry.run in self.elsewhere and held(entry.run):
            return True
        self.ledger.refresh()
        entry.look(self.ledger)
        if entry.state != "running" or entry.run is None:
            return False
        self.elsewhere.add(entry.run)
        logger.info(f"{entry.planned.name}: another process is writing {entry.run}; waiting for it")
        return True

    def _start(self, workers: Local, entry: Entry, tick: Callable[[], object]) -> None:
        """Start a run or go on with it, unless it turns out to have ended."""
        if entry.state in FINAL:
            self._ended(entry, tick)
            return
        log = self.log(entry)
        entry.begins(log)
        self.under_way.append((workers.start(entry, log), entry))
        entry.state = "running"
        self.write()

    def _ended(self, entry: Entry, tick: Callable[[], object]) -> None:
        """Log how a run ended, in one line."""
        tick()
        took = ""
        if entry.began:
            took = f" ({timedelta(seconds=round(time.monotonic() - entry.began))})"
        if entry.state != "finished" or entry.run is None:
            logger.warning(f"{entry.planned.name}: {entry.state}: {entry.reason}{took}")
            return
        final = read_json(entry.run / "per_mode_deploy.json")
        hack, solve = percent(final["hack_deploy"]), percent(final["solve_deploy"])
        logger.info(f"{entry.planned.name}: deployed hack {hack} % / solve {solve} %{took}")

    def conclude(self) -> int:
        """Log how many runs finished, and why the others did not. Returns the exit code."""
        unfinished = [e for e in self.entries if e.state != "finished"]
        for entry in unfinished:
            paths = [p for p in (entry.run, self.log(entry)) if p and p.exists()]
            where = " · ".join(map(str, paths))
            reason = entry.reason or "see the log"
            logger.error(f"{entry.planned.name}: {entry.state}: {reason} [{where}]")
        n = len(self.entries)
        logger.info(f"{n - len(unfinished)} of {n} runs finished: {self.folder / 'runs.json'}")
        return FAILED if unfinished else FINISHED

    def enqueue(self, queue: Pueue) -> int:
        """Hand the remaining runs to the queue, except those that it already has."""
        added = 0
        for entry in tqdm(self.left, disable=None, desc="pueue", unit="run"):
            label = f"{self.study.name}: {entry.planned.name} ({entry.planned.identity[:8]})"
            if entry.state != "running":
                if (label, str(Path.cwd())) not in queue.open:
                    queue.add(entry.argv, label)
                    added += 1
                entry.state = "queued"
                self.write()
        logger.info(
            f"{added} runs added to the queue; when `pueue status` no longer lists them, for their "
            "results, the same command without --via"
        )
        return FINISHED


def _hashes(
    study: StudyFile, dry_run: bool, missing: list[str]
) -> dict[str, Mapping[str, str | None]]:
    """The hashes of each run's files, by the run's identity; all of them are checked.

    missing: gets a line for each file that is not there.

    Raises:
        Refused: as `Sweep.of`.
    """
    of_settings: dict[str, Mapping[str, str | None]] = {}  # which are the same for every seed
    files: dict[str, Mapping[str, str | None]] = {}
    for run in study.runs:
        cfg = replace(run.cfg, run=replace(run.cfg.run, dry_run=dry_run, seed=0))
        settings = settings_sha256(cfg)
        if settings not in of_settings:
            try:
                inputs = preflight(cfg)
            except Refused as e:
                raise Refused(f"{study.path}: {run.arm}: {e}") from e.__cause__
            of_settings[settings] = file_hashes(cfg, inputs)
            missing += inputs.absent
        files[run.identity] = of_settings[settings]
    return files


def run_study(settings: SweepSettings) -> int:
    """Run, plan or enqueue a study. Returns the exit code.

    Raises:
        Refused: one line, before the first run starts.
    """
    study = load_study_file(settings.study, settings.trust_code)
    sweep = Sweep.of(study, settings.dry_run)
    if settings.commands:
        print("\n".join(entry.command for entry in sweep.entries))
        return FINISHED
    gpus = visible()
    workers: Local | Pueue = Local(settings.jobs, gpus)
    probe_writable(sweep.folder / "logs")
    if settings.dry_run:
        slots = f"{settings.jobs or len(gpus) or cores()} at a time"
        if gpus:
            slots += f", on a GPU each of {', '.join(gpus)}"
        print("\n".join(sweep.plan(slots)))
        edited = sweep.edited()
        if edited and not settings.replan:
            print(edited)
        return REFUSED if sweep.missing else FINISHED
    if settings.via == "pueue":
        workers = Pueue(gpus)  # a client that is not there is refused before anything is written
    return sweep.run(workers, settings.replan)
