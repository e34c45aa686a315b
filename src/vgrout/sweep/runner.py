"""Runs a study: skips finished runs, resumes interrupted ones, starts the rest, N at a time.

`out/sweeps/NAME/` holds `plan.json` (the study file's hash and every run, frozen when the sweep first starts),
`runs.json` (an entry per run: name, arm, seed, flags, run directory, state) and `logs/`. Runs lie in `out/runs` like
any others and are found by their settings and input files: a run that another study made is not made again.
"""

import json
import os
import re
import shlex
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from heapq import heapreplace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from loguru import logger
from tabulate import tabulate
from tqdm import tqdm

from vgrout.files import probe_writable, read_json, to_json, write_atomic
from vgrout.grading.grade import cores
from vgrout.inputs import file_hashes
from vgrout.runs.preflight import preflight
from vgrout.runs.run_context import DIVERGED, FAILED, FINISHED, HALTED, INTERRUPTED, Stop, stop_on_signals
from vgrout.runs.run_dir import held, hold
from vgrout.sweep.gpus import POLL_S, Share
from vgrout.sweep.ledger import Ledger, Record, kind
from vgrout.sweep.pueue import Pueue
from vgrout.sweep.ray_cluster import Ray, input_paths, installed
from vgrout.sweep.study_file import Cell, StudyFile, load_study_file
from vgrout.sweep.workers import Attempt, Job, Local, Lost, Workers

SWEEPS = Path("out/sweeps")
SCHEMA = "sweep_v1"
MOST_LOSSES = 3  # of processes or machines by one run; then the run itself is taken to be the cause
State = Literal[
    "to do", "queued", "running", "resumable", "finished", "halted", "diverged", "unrouted", "interrupted", "failed"
]
FINAL: tuple[State, ...] = ("finished", "halted", "diverged", "unrouted")  # would end the same way again
ELSEWHERE_S = 2.0  # between two looks at runs that other processes are writing
# exit code of `vgrout.train` → what became of the run
ENDED: dict[int, State] = {
    **{FINISHED: "finished", HALTED: "halted", DIVERGED: "diverged", INTERRUPTED: "interrupted"},
    -signal.SIGTERM: "interrupted",  # before the run handled signals
}
WROTE_STATUS = (FAILED, HALTED, DIVERGED, INTERRUPTED)  # with these, status.json is this attempt's


@dataclass(frozen=True)
class Cli:
    """Run a study: methods × overrides × seeds, each run a process. The same command continues after any ending."""

    study: Annotated[Path, tyro.conf.Positional]
    """Study file (TOML); studies/ has examples."""
    dry_run: bool = False
    """Print the runs, their states and the estimated time. Start nothing."""
    commands: bool = False
    """Print every run's command for another scheduler, one per line and always on the same line: the resuming command
    where there is a checkpoint, `true` where the run has ended or is under way. Start nothing."""
    jobs: int | None = None
    """Runs at a time, each on a GPU of its own where there are any; none: as many as there are GPUs, or else cores."""
    gpus_per_run: int = 1
    """GPUs of each run, with a rank on each."""
    via: Literal["local", "pueue", "ray"] = "local"
    """Where runs are started: processes on this machine · a pueue queue · a Ray cluster."""
    ray_address: str = ""
    """The cluster's address; '': start one on this machine."""
    reward: str = ""
    """The study's own --reward, once more: a file's word alone is no reason to import it."""
    rm_ensemble_members: str = ""
    """The same of --rm-ensemble-members."""
    replan: bool = False
    """Continue although the study file is no longer the planned one; the old plan is kept beside the new one."""

    def __post_init__(self) -> None:
        if self.jobs is not None and not 1 <= self.jobs <= 4096:
            raise ValueError(f"--jobs {self.jobs}: should lie in [1, 4096]")
        if self.jobs is not None and self.via == "pueue":
            raise ValueError("--jobs: not read with --via pueue; say `pueue parallel N`")
        if not 1 <= self.gpus_per_run <= 1024:
            raise ValueError(f"--gpus-per-run {self.gpus_per_run}: should lie in [1, 1024]")
        if self.gpus_per_run > 1 and (self.commands or self.via == "ray"):
            why = "--commands: torchrun starts the ranks" if self.commands else "--via ray: a run has one GPU"
            raise ValueError(f"--gpus-per-run: not read with {why}")
        if self.commands and self.dry_run:
            raise ValueError("--commands: prints commands alone; leave --dry-run out")
        if self.ray_address and self.via != "ray":
            raise ValueError("--ray-address: not read without --via ray")


@dataclass
class Entry:
    """A run of the study with its state."""

    cell: Cell
    files: Mapping[str, str | None]  # hashes of the files that it reads
    state: State = "to do"
    run: Path | None = None
    reason: str = ""
    log_start: int = 0  # bytes that earlier attempts left in its log
    losses: int = 0  # how often its process or machine was lost

    def look(self, ledger: Ledger) -> None:
        """Update state and run directory from disk."""
        ledger.refresh()
        found = ledger.find(self.cell.identity, self.files)
        self._take(found, "to do" if found is None or found.state == "dead" else found.state)

    def end(self, ledger: Ledger, code: int, log: Path) -> None:
        """Update after the run's process has exited with `code`."""
        ledger.refresh()
        found = ledger.find(self.cell.identity, self.files)
        if found and found.state == "dead" and found.path == self.run:  # from an earlier attempt
            found = None
        self._take(found, "unrouted" if found and found.state == "unrouted" else ENDED.get(code, "failed"))
        if self.state == "finished" and (found is None or found.state != "finished"):
            self.state = "failed"
            self.reason = "it ended well, but its files or settings are no longer those of the plan"
        elif self.state != "finished":
            own = self.reason if code in WROTE_STATUS else ""
            self.reason = own or _last_error(log, self.log_start) or f"exit code {code}"

    def _take(self, found: Record | None, state: State) -> None:
        self.state, self.run = state, found.path if found else None
        self.reason = _one_line(found.reason) if found else ""

    @property
    def directory(self) -> Path | None:
        """The run directory, once it has one."""
        return None if self.state in ("to do", "queued") else self.run

    def attempt(self, log: Path) -> Attempt:
        """The attempt that starts or resumes the run."""
        cfg = self.cell.cfg
        if self.state == "resumable" and self.run:
            return Attempt([cfg.preset, *cfg.repeated, f"--resume={self.run}"], log, self.run, cfg)
        return Attempt(self.cell.flags, log, None, cfg)

    def command(self) -> str:
        """The shell command that starts or resumes the run; `true` where there is nothing to do."""
        if self.state in (*FINAL, "running"):
            return f"true  # {self.state}: {self.cell.name}"
        return shlex.join(["python", "-m", "vgrout.train", *self.attempt(Path()).flags])

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.cell.name,
            "arm": self.cell.method,
            "seed": self.cell.seed,
            "flags": [*self.cell.flags],
            "run": str(self.directory) if self.directory else None,
            "state": self.state,
        }


@dataclass
class Sweep:
    """A study being run."""

    study: StudyFile
    entries: list[Entry]
    ledger: Ledger
    folder: Path
    started: dict[str, float] = field(default_factory=dict)  # name → when its process started

    @classmethod
    def of(cls, study: StudyFile) -> "Sweep":
        """Raises ValueError, one line, where an input file of some run is missing or wrong."""
        files: dict[str, Mapping[str, str | None]] = {}  # by arm: the same for every seed
        for cell in study.cells:
            if cell.method not in files:
                try:
                    files[cell.method] = file_hashes(cell.cfg, preflight(cell.cfg))
                except ValueError as e:
                    raise ValueError(f"{study.path}: {cell.method}: {e}") from None
        sweep = cls(study, [Entry(c, files[c.method]) for c in study.cells], Ledger(), SWEEPS / study.name)
        for entry in sweep.entries:
            entry.look(sweep.ledger)
        return sweep

    @property
    def left(self) -> list[Entry]:
        return [e for e in self.entries if e.state not in FINAL]

    def log(self, entry: Entry) -> Path:
        """The log of a run's attempts, named after the run and, to be unique, its identity."""
        name = re.sub(r"[^\w.=+-]+", "_", entry.cell.name, flags=re.ASCII)[:150]
        return self.folder / "logs" / f"{name}-{entry.cell.identity[:8]}.log"

    # ── the plan ───────────────────────────────────────────────────────────────────────────────────────────────────

    def lines(self, share: Share) -> list[str]:
        """Every run with its state, and the estimated remaining time."""
        table = [
            {
                "run": e.cell.name,
                "state": e.state,
                "flags": shlex.join(e.cell.flags),
                "directory": e.directory and e.directory.name,
            }
            for e in self.entries
        ]
        counts = Counter(e.state for e in self.entries)
        return [
            *(f"H: {claim}" for claim in self.study.hypotheses),
            tabulate(table, headers="keys", tablefmt="simple", disable_numparse=True, missingval="·"),
            f"{len(self.entries)} runs: " + ", ".join(f"{n} {state}" for state, n in counts.items()),
            *self.warnings(),
            *self.queued(),
            self.estimate(share.jobs),
            *share.lines(),
        ]

    def warnings(self) -> list[str]:
        """A warning where runs were started by different code, not counting runs that must start over."""
        known = (self.ledger.find(e.cell.identity, e.files) for e in self.entries)
        by_code = Counter(r.code or "no checkout" for r in known if r and r.state != "dead")
        if len(by_code) < 2:
            return []
        return ["runs started by different code: " + ", ".join(f"{n} by {code}" for code, n in by_code.items())]

    def queued(self) -> list[str]:
        """A note on runs that were handed to pueue (says runs.json) and have not started: they may still be queued."""
        path = self.folder / "runs.json"
        try:
            flags = [e["flags"] for e in json.loads(path.read_bytes()) if e["state"] == "queued"]
        except (OSError, ValueError):  # absent or damaged: it is written again
            return []
        if not (n := sum(e.state == "to do" and [*e.cell.flags] in flags for e in self.entries)):
            return []
        return [f"{n} of these were handed to pueue: if `pueue status` still lists them, they would run twice"]

    def estimate(self, jobs: int) -> str:
        """The remaining time, from finished runs of the same kind; an interrupted run counts in full."""
        left, pace = [e.cell.cfg for e in self.left], self.ledger.pace()
        if not left:
            return "nothing left to run"
        known = [pace[kind(cfg)] * cfg.scale.steps for cfg in left if kind(cfg) in pace]
        busy = [0.0] * jobs  # when each slot is free, if runs start in order
        for seconds in known:
            heapreplace(busy, busy[0] + seconds)
        waves = -(-len(left) // max(1, jobs))
        line = f"about {_time(max(busy))}" if known else "time: no estimate"
        line += f", {jobs} at a time, {waves} wave{'s' * (waves > 1)}"
        if unknown := len(left) - len(known):
            line += f"; no finished run of the same preset and intervention for {unknown} of {len(left)}"
        return line

    def edited(self) -> str:
        """How the study file differs from the planned one, in one line; "": it does not, or nothing was planned."""
        path = self.folder / "plan.json"
        planned = read_json(path) if path.is_file() else {"sha256": self.study.sha256}
        if planned.get("sha256") == self.study.sha256:
            return ""
        before, now = {r["identity"] for r in planned["runs"]}, {c.identity for c in self.study.cells}
        return (
            f"{self.study.path}: not the file that {path} was made from ({len(now - before)} runs more, "
            f"{len(before - now)} less); give the study another name, or add --replan"
        )

    def freeze(self, replan: bool) -> None:
        """Write plan.json, or compare the study with it. Raises ValueError where they differ."""
        path = self.folder / "plan.json"
        if why := self.edited():
            if not replan:
                raise ValueError(why)
            os.replace(path, self.folder / f"plan.{read_json(path)['sha256'][:10]}.json")
        elif path.is_file():
            return
        plan = {
            "schema": SCHEMA,
            "name": self.study.name,
            "study": str(self.study.path),
            "sha256": self.study.sha256,
            "hypotheses": [*self.study.hypotheses],
            "runs": [
                {"name": c.name, "arm": c.method, "seed": c.seed, "flags": [*c.flags], "identity": c.identity}
                for c in self.study.cells
            ],
        }
        write_atomic(path, to_json(plan))

    def write(self) -> None:
        write_atomic(self.folder / "runs.json", to_json([e.as_json() for e in self.entries]))

    # ── carrying it out ────────────────────────────────────────────────────────────────────────────────────────────

    def carry_out(self, workers: Workers) -> int:
        """Start runs until all have ended, or until a signal; then wait while the runs under way save and end."""
        under_way: dict[str, tuple[Job, Entry]] = {}
        try:
            done = len(self.entries) - len(self.left)
            with (
                stop_on_signals() as stop,
                tqdm(
                    total=len(self.entries), initial=done, disable=None, desc=self.study.name, unit="run", smoothing=0
                ) as bar,
            ):
                self._loop(workers, under_way, stop, bar.update)
            stopped = stop.requested
        except KeyboardInterrupt:
            logger.warning("stopping the runs at once; their last checkpoints stand")
            stopped = True
            _stop(under_way)
            while under_way:
                self._reap(under_way, deque())
                time.sleep(POLL_S)
        except BrokenPipeError:  # a closed pipe: cli_exit ends the process
            raise
        except OSError as e:
            where, why = e.filename or self.folder, e.strerror or e
            logger.error(f"{where}: {why}; the runs under way save and end; put it right, then run the same command")
            _stop(under_way)
            while any(_runs(job) for job, _ in under_way.values()):
                time.sleep(POLL_S)
            return FAILED
        self.write()
        return INTERRUPTED if stopped else self.report()

    def _loop(
        self, workers: Workers, under_way: dict[str, tuple[Job, Entry]], stop: Stop, tick: Callable[[int], object]
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
                    logger.info(f"{entry.cell.name}: another process is writing {entry.run}; waiting for it")
                    elsewhere.append(entry)
                elif entry.state in FINAL:
                    self._log_end(entry)
                    tick(1)
                else:
                    self.started[entry.cell.name] = time.monotonic()
                    entry.log_start = _size(self.log(entry))
                    under_way[entry.cell.name] = workers.start(entry.attempt(self.log(entry))), entry
                    entry.state = "running"
                    self.write()
            if elsewhere and time.monotonic() - looked > ELSEWHERE_S:
                looked = time.monotonic()
                free = [e for e in elsewhere if e.run is None or not held(e.run)]
                elsewhere = [e for e in elsewhere if e not in free]
                waiting.extendleft(free)
            tick(self._reap(under_way, waiting))
            time.sleep(POLL_S)

    def _reap(self, under_way: dict[str, tuple[Job, Entry]], waiting: deque[Entry]) -> int:
        """Record the runs that have ended; returns how many. Those whose process was lost wait again."""
        ended = 0
        for name, (job, entry) in [*under_way.items()]:
            try:
                code = job.poll()
            except Lost as e:
                del under_way[name]
                ended += self._lost(entry, str(e), waiting)
                self.write()
                continue
            if code is not None:
                del under_way[name]
                entry.end(self.ledger, code, self.log(entry))
                self._log_end(entry)
                self.write()
                ended += 1
        return ended

    def _lost(self, entry: Entry, why: str, waiting: deque[Entry]) -> bool:
        """Put a run whose process or machine was lost first in the queue. Returns True where it has lost too many."""
        entry.losses += 1
        entry.look(self.ledger)
        if entry.losses < MOST_LOSSES:
            next_ = {"resumable": "goes on from its checkpoint", "running": "is being saved"}
            logger.warning(f"{entry.cell.name}: {why}; it {next_.get(entry.state, 'starts again')}")
            waiting.appendleft(entry)
            return False
        entry.state, entry.reason = "failed", f"{why}; {entry.losses} times so far"
        self._log_end(entry)
        return True

    def _log_end(self, entry: Entry) -> None:
        """Log how a run ended, in one line."""
        since = self.started.get(entry.cell.name)
        took = f" ({_time(time.monotonic() - since)})" if since is not None else ""
        if entry.state != "finished" or entry.run is None:
            logger.warning(f"{entry.cell.name}: {entry.state}: {entry.reason}{took}")
            return
        final = read_json(entry.run / "per_mode_deploy.json")
        hack, solve = (_percent(final[f"{what}_deploy"]) for what in ("hack", "solve"))
        logger.info(f"{entry.cell.name}: deployed hack {hack} / solve {solve}{took}")

    def report(self) -> int:
        """Log how many runs finished, and why the others did not. Returns the exit code."""
        bad = [e for e in self.entries if e.state != "finished"]
        for line in self.warnings():
            logger.warning(line)
        for entry in bad:
            where = " · ".join(str(p) for p in (entry.run, self.log(entry)) if p and p.exists())
            logger.error(f"{entry.cell.name}: {entry.state}: {entry.reason or 'see the log'} [{where}]")
        logger.info(f"{len(self.entries) - len(bad)} of {len(self.entries)} runs finished: {self.folder / 'runs.json'}")
        return FAILED if bad else FINISHED

    def require_ranks(self, share: Share) -> None:
        """Raises ValueError, one line, where a run cannot have a rank on each of its GPUs."""
        for cell in (e.cell for e in self.left if share.gpus):
            where, ranks = f"{self.study.path}: {cell.method}", cell.cfg.run.ranks
            if ranks not in (1, "auto", share.each):
                raise ValueError(f"{where}: --ranks {ranks}, and each rank needs a GPU; add --gpus-per-run {ranks}")
            if share.each > (most := cell.cfg.generations):
                raise ValueError(
                    f"--gpus-per-run {share.each}: {where}: a step has {most} rollouts; give at most {most}"
                )

    def enqueue(self, queue: Pueue, share: Share) -> int:
        """Hand the remaining runs to the queue, except those that it already has."""
        added = 0
        for entry in tqdm(self.left, disable=None, desc="pueue", unit="run"):
            label = f"{self.study.name}: {entry.cell.name} ({entry.cell.identity[:8]})"
            if entry.state != "running":
                if (label, str(Path.cwd())) not in queue.open:
                    queue.add(share.command(entry.attempt(self.log(entry)).argv), label)
                    added += 1
                entry.state = "queued"
                self.write()
        if share.gpus:
            logger.info(f"a run waits until its GPU is free: `pueue parallel {share.jobs}` has as many under way")
        logger.info(f"{added} runs added to the queue; afterwards, for their results, the same command without --via")
        return FINISHED


def _runs(job: Job) -> bool:
    """Whether a job is still under way, when its files can no longer be written."""
    try:
        return job.poll() is None
    except (Lost, OSError):
        return False


def _stop(under_way: Mapping[str, tuple[Job, Entry]]) -> None:
    for job, _ in under_way.values():
        job.terminate()


def _size(path: Path) -> int:
    """A file's bytes; 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0


def _last_error(log: Path, since: int) -> str:
    """The last error line of a log, from byte `since` on."""
    try:
        lines = log.read_bytes()[since:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((_one_line(line[2:]) for line in reversed(lines) if line.startswith("E ")), "")


def _one_line(text: str, most: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def _percent(rate: float | None) -> str:
    return "·" if rate is None else f"{100 * rate:.1f} %"


def _time(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s" if m else f"{s} s"


def run(cli: Cli) -> int:
    """Run, plan or enqueue a study. Raises ValueError, one line, before the first run starts."""
    code = (f"--reward={cli.reward}", f"--rm-ensemble-members={cli.rm_ensemble_members}")
    sweep = Sweep.of(load_study_file(cli.study, code))
    if cli.commands:
        print("\n".join(entry.command() for entry in sweep.entries))
        return FINISHED
    share = Share.of(cli.jobs, cli.gpus_per_run, cores()) if cli.via != "ray" else Share(cli.jobs or cores())
    sweep.require_ranks(share)
    if cli.dry_run:
        print("\n".join(sweep.lines(share)))
        if (why := sweep.edited()) and not cli.replan:
            print(why)
        return FINISHED
    if cli.via == "pueue":
        Pueue()  # what is not there is refused before anything is written
    if cli.via == "ray":
        for entry in sweep.left:
            input_paths(entry.cell.cfg)  # files that cannot be sent are refused before anything starts
        installed()
    probe_writable(logs := sweep.folder / "logs")
    logs.mkdir(parents=True, exist_ok=True)
    with hold(sweep.folder, "sweep"):
        sweep.freeze(cli.replan)
        queued = sweep.queued()
        sweep.write()
        if cli.via == "pueue":
            return sweep.enqueue(Pueue(), share)
        with closing(_workers(cli, share)) as workers:
            for line in (*sweep.warnings(), *queued, sweep.estimate(workers.slots), *share.lines()):
                logger.info(line)
            return sweep.carry_out(workers)


def _workers(cli: Cli, share: Share) -> Workers:
    return Ray(cli.ray_address, cli.jobs) if cli.via == "ray" else Local(share)
