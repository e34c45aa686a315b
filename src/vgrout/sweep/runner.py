"""Runs a study: skips finished runs, resumes interrupted ones, starts the rest, N at a time.

`out/sweeps/NAME/` holds `plan.json` (the study file's hash and every run, frozen when the sweep first starts),
`runs.json` (an entry per run: name, arm, seed, flags, run directory, state) and `logs/`. Runs lie in `out/runs` like
any others and are found by their settings and input files: a run that another study made is not made again.
"""

import json
import os
import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import tyro
from loguru import logger
from tabulate import tabulate
from tqdm import tqdm

from vgrout.config.checks import check, listed, setting
from vgrout.config.presets import register_named
from vgrout.cores import cores
from vgrout.errors import Refused
from vgrout.files import held, hold, probe_writable, read_json, to_json, write_atomic
from vgrout.gpus import visible
from vgrout.inputs import file_hashes
from vgrout.metrics import percent
from vgrout.runs.context import FAILED, FINISHED, INTERRUPTED, Stop, stop_on_signals
from vgrout.runs.preflight import preflight
from vgrout.sweep.entry import FINAL, Entry
from vgrout.sweep.ledger import Ledger
from vgrout.sweep.pueue import Pueue
from vgrout.sweep.ray_cluster import POLL_S, Ray, RayJob
from vgrout.sweep.study_file import StudyFile, load_study_file
from vgrout.sweep.workers import Local, Process

SWEEPS = Path("out/sweeps")
SCHEMA = "sweep_v1"
UnderWay = dict[str, tuple[Process | RayJob, Entry]]  # by the run's name
ELSEWHERE_S = 2.0  # between two looks at runs that other processes are writing


@dataclass(frozen=True)
class SweepSettings:
    """Run a study: arms × overrides × seeds, each run a process. The same command continues after any ending."""

    study: Annotated[Path, tyro.conf.Positional]
    """Study file (TOML); studies/ has examples."""
    dry_run: bool = False
    """Print the runs and their states. Start nothing."""
    commands: bool = False
    """Print every run's command for another scheduler, one per line and always on the same line: the resuming command
    where there is a checkpoint, `true` where the run has ended or is under way. Start nothing."""
    jobs: int | None = setting(None, low=1)
    """Runs at a time, each on a GPU of its own where there are any; none: as many as there are GPUs, or else cores."""
    via: Literal["local", "pueue", "ray"] = "local"
    """Where runs are started: processes on this machine · a pueue queue · a Ray cluster, which shares this folder."""
    ray_address: str = ""
    """The cluster's address; '': start one on this machine."""
    reward: str = ""
    """The study's own --reward, once more: a file's word alone is no reason to import it."""
    rm_ensemble_members: str = ""
    """The same of --rm-ensemble-members."""
    intervention: str = ""
    """Comma list of the module:Class that the study names, once more."""
    monitor: str = ""
    """The same of its monitors."""
    replan: bool = False
    """Continue although the study file is no longer the planned one; the old plan is kept beside the new one."""

    def __post_init__(self) -> None:
        check(self)
        idle = {
            "--jobs": self.jobs and self.via == "pueue",
            "--ray-address": self.ray_address and self.via != "ray",
        }
        if unread := [name for name, given in idle.items() if given]:
            raise Refused(f"{unread[0]}: not read with --via {self.via}; leave it out")


@dataclass
class Sweep:
    """A study being run."""

    study: StudyFile
    entries: list[Entry]
    ledger: Ledger
    folder: Path

    @classmethod
    def of(cls, study: StudyFile) -> "Sweep":
        """Raises Refused, one line, where an input file of some run is missing or wrong."""
        files: dict[str, Mapping[str, str | None]] = {}  # by arm: the same for every seed
        for run in study.runs:
            if run.arm not in files:
                try:
                    files[run.arm] = file_hashes(run.cfg, preflight(run.cfg))
                except Refused as e:
                    raise Refused(f"{study.path}: {run.arm}: {e}") from e.__cause__
        sweep = cls(
            study, [Entry(run, files[run.arm]) for run in study.runs], Ledger(), SWEEPS / study.name
        )
        for entry in sweep.entries:
            entry.look(sweep.ledger)
        return sweep

    @property
    def left(self) -> list[Entry]:
        return [e for e in self.entries if e.state not in FINAL]

    def log(self, entry: Entry) -> Path:
        return self.folder / "logs" / entry.log_name

    # ── the plan

    def plan(self, slots: str) -> list[str]:
        """Every run with its state. slots: how many go at a time."""
        table = [
            {
                "run": e.planned.name,
                "state": e.state,
                "flags": shlex.join(e.planned.flags),
                "directory": e.directory and e.directory.name,
            }
            for e in self.entries
        ]
        counts = Counter(e.state for e in self.entries)
        return [
            *(f"H: {claim}" for claim in self.study.hypotheses),
            tabulate(
                table, headers="keys", tablefmt="simple", disable_numparse=True, missingval="·"
            ),
            f"{len(self.entries)} runs: "
            + ", ".join(f"{n} {state}" for state, n in counts.items()),
            *self.warnings(),
            *self.queued(),
            f"{len(self.left)} left{f', {slots}' * bool(self.left)}",
        ]

    def warnings(self) -> list[str]:
        """A warning where runs were started by different code, not counting runs that must start over."""
        known = (self.ledger.find(e.planned.identity, e.files) for e in self.entries)
        by_code = Counter(r.code or "no checkout" for r in known if r and r.state != "dead")
        if len(by_code) < 2:
            return []
        return [
            "runs started by different code: "
            + ", ".join(f"{n} by {code}" for code, n in by_code.items())
        ]

    def queued(self) -> list[str]:
        """A note on runs that were handed to pueue (says runs.json) and have not started: they may still be queued."""
        path = self.folder / "runs.json"
        try:
            flags = [e["flags"] for e in json.loads(path.read_bytes()) if e["state"] == "queued"]
        # absent or damaged: it is written again
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        n = sum(e.state == "to do" and [*e.planned.flags] in flags for e in self.entries)
        said = f"{n} of these were handed to pueue: if `pueue status` still lists them, they would run twice"
        return [said] if n else []

    def edited(self) -> str:
        """How the study file differs from the planned one, in one line; "": it does not, or nothing was planned."""
        path = self.folder / "plan.json"
        if not path.is_file():
            return ""
        planned = read_json(path)
        try:
            sha256, before = planned["sha256"], {r["identity"] for r in planned["runs"]}
        except (KeyError, TypeError) as e:
            raise Refused(
                f"{path}: damaged ({e!r}); move it away, and the study is planned anew"
            ) from None
        if sha256 == self.study.sha256:
            return ""
        now = {run.identity for run in self.study.runs}
        return (
            f"{self.study.path}: not the file that {path} was made from ({len(now - before)} runs more, "
            f"{len(before - now)} less); give the study another name, or add --replan"
        )

    def freeze(self, replan: bool) -> None:
        """Write plan.json, or compare the study with it. Raises Refused where they differ."""
        path = self.folder / "plan.json"
        if why := self.edited():
            if not replan:
                raise Refused(why)
            os.replace(path, self.folder / f"plan.{read_json(path)['sha256'][:10]}.json")
        elif path.is_file():
            return
        plan = {
            "schema": SCHEMA,
            "name": self.study.name,
            "study": str(self.study.path),
            "sha256": self.study.sha256,
            "hypotheses": [*self.study.hypotheses],
            "runs": [run.as_json() | {"identity": run.identity} for run in self.study.runs],
        }
        write_atomic(path, to_json(plan))

    def write(self) -> None:
        write_atomic(self.folder / "runs.json", to_json([e.as_json() for e in self.entries]))

    # ── carrying it out

    def carry_out(self, workers: Local | Ray) -> int:
        """Start runs until all have ended, or until a signal; then wait while the runs under way save and end."""
        under_way: UnderWay = {}
        try:
            done = len(self.entries) - len(self.left)
            with (
                stop_on_signals() as stop,
                tqdm(
                    total=len(self.entries),
                    initial=done,
                    disable=None,
                    desc=self.study.name,
                    unit="run",
                    smoothing=0,
                ) as bar,
            ):
                self._loop(workers, under_way, stop, bar.update)
            stopped = stop.requested
        except KeyboardInterrupt:
            logger.warning("stopping the runs at once; their last checkpoints stand")
            stopped = True
            _stop(under_way)
            while under_way:
                self._reap(under_way)
                time.sleep(POLL_S)
        except BrokenPipeError:  # a closed pipe: cli_exit ends the process
            raise
        except OSError as e:
            where, why = e.filename or self.folder, e.strerror or e
            logger.error(
                f"{where}: {why}; the runs under way save and end; put it right, then run the same command"
            )
            _stop(under_way)
            while any(job.poll() is None for job, _ in under_way.values()):
                time.sleep(POLL_S)
            return FAILED
        self.write()
        return INTERRUPTED if stopped else self.conclude()

    def _loop(
        self, workers: Local | Ray, under_way: UnderWay, stop: Stop, tick: Callable[[int], object]
    ) -> None:
        waiting = deque(self.left)
        elsewhere: list[Entry] = []  # other processes are writing these
        looked, stopping = time.monotonic(), False
        while under_way or ((waiting or elsewhere) and not stop.requested):
            if stop.requested and not stopping:
                stopping = True
                _stop(under_way)
            while waiting and len(under_way) < workers.slots and not stop.requested:
                entry = waiting.popleft()
                entry.look(self.ledger)
                if entry.state == "running":
                    logger.info(
                        f"{entry.planned.name}: another process is writing {entry.run}; waiting for it"
                    )
                    elsewhere.append(entry)
                elif entry.state in FINAL:
                    self._log_end(entry)
                    tick(1)
                else:
                    entry.begins(self.log(entry))
                    under_way[entry.planned.name] = workers.start(entry, self.log(entry)), entry
                    entry.state = "running"
                    self.write()
            if elsewhere and time.monotonic() - looked > ELSEWHERE_S:
                looked = time.monotonic()
                free = [e for e in elsewhere if e.run is None or not held(e.run)]
                elsewhere = [e for e in elsewhere if e not in free]
                waiting.extendleft(free)
            tick(self._reap(under_way))
            time.sleep(POLL_S)

    def _reap(self, under_way: UnderWay) -> int:
        """Record the runs that have ended; returns how many."""
        ended = 0
        for name, (job, entry) in [*under_way.items()]:
            if (code := job.poll()) is not None:
                del under_way[name]
                entry.end(self.ledger, code, self.log(entry))
                self._log_end(entry)
                self.write()
                ended += 1
        return ended

    def _log_end(self, entry: Entry) -> None:
        """Log how a run ended, in one line."""
        took = (
            f" ({timedelta(seconds=round(time.monotonic() - entry.began))})" if entry.began else ""
        )
        if entry.state != "finished" or entry.run is None:
            logger.warning(f"{entry.planned.name}: {entry.state}: {entry.reason}{took}")
            return
        final = read_json(entry.run / "per_mode_deploy.json")
        hack, solve = (percent(final[f"{what}_deploy"]) for what in ("hack", "solve"))
        logger.info(f"{entry.planned.name}: deployed hack {hack} % / solve {solve} %{took}")

    def conclude(self) -> int:
        """Log how many runs finished, and why the others did not. Returns the exit code."""
        bad = [e for e in self.entries if e.state != "finished"]
        for line in self.warnings():
            logger.warning(line)
        for entry in bad:
            where = " · ".join(str(p) for p in (entry.run, self.log(entry)) if p and p.exists())
            logger.error(
                f"{entry.planned.name}: {entry.state}: {entry.reason or 'see the log'} [{where}]"
            )
        logger.info(
            f"{len(self.entries) - len(bad)} of {len(self.entries)} runs finished: {self.folder / 'runs.json'}"
        )
        return FAILED if bad else FINISHED

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
            f"{added} runs added to the queue; afterwards, for their results, the same command without --via"
        )
        return FINISHED


def _stop(under_way: UnderWay) -> None:
    for job, _ in under_way.values():
        job.terminate()


def run_study(settings: SweepSettings) -> int:
    """Run, plan or enqueue a study. Raises Refused, one line, before the first run starts."""
    own = [
        f"--{kind}={name}"
        for kind in ("intervention", "monitor")
        for name in listed(getattr(settings, kind))
    ]
    register_named(own)
    code = (
        f"--reward={settings.reward}",
        f"--rm-ensemble-members={settings.rm_ensemble_members}",
        *own,
    )
    sweep = Sweep.of(load_study_file(settings.study, code))
    if settings.commands:
        print("\n".join(entry.command for entry in sweep.entries))
        return FINISHED
    gpus = () if settings.via == "ray" else visible()
    if gpus and settings.jobs and settings.jobs > len(gpus):
        raise Refused(
            f"--jobs {settings.jobs}: GPUs {', '.join(gpus)} are here; give at most {len(gpus)}"
        )
    if settings.dry_run:
        on = f", on a GPU each of {', '.join(gpus)}" * bool(gpus)
        print("\n".join(sweep.plan(f"{settings.jobs or len(gpus) or cores()} at a time{on}")))
        if (why := sweep.edited()) and not settings.replan:
            print(why)
        return FINISHED
    # what is not there is refused before anything is written
    queue = Pueue(gpus) if settings.via == "pueue" else None
    with closing(_workers(settings, gpus)) as workers:
        probe_writable(logs := sweep.folder / "logs")
        logs.mkdir(parents=True, exist_ok=True)
        with hold(sweep.folder, "sweep"):
            sweep.freeze(settings.replan)
            for line in (*sweep.warnings(), *sweep.queued()):
                logger.info(line)
            sweep.write()
            return sweep.enqueue(queue) if queue else sweep.carry_out(workers)


def _workers(settings: SweepSettings, gpus: Sequence[str]) -> Local | Ray:
    return (
        Ray(settings.ray_address, settings.jobs)
        if settings.via == "ray"
        else Local(settings.jobs, gpus)
    )
