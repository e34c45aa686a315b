"""Carry out a study: skip what is finished, go on with what was interrupted, run the rest, N at a time.

`out/sweeps/NAME/` holds `plan.json` (the study file's hash and every run, frozen when the sweep first starts),
`runs.json` (one entry a run: name, arm, seed, flags, run directory, state) and `logs/`. Runs lie in `out/runs` like any
others, and are found there by what they compute: a run that another study made is not made again.
"""

import os
import re
import shlex
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from loguru import logger
from tabulate import tabulate
from tqdm import tqdm

from vgrout.analysis.ledger import Ledger, Record, kind
from vgrout.analysis.study_file import Cell, StudyFile, load_study_file
from vgrout.analysis.workers import POLL_S, Job, Local, Pueue, Ray, Workers
from vgrout.files import write_atomic
from vgrout.launch import DIVERGED, FAILED, FINISHED, HALTED, INTERRUPTED
from vgrout.plan import file_hashes, preflight
from vgrout.run_dir import held, hold, probe_writable, read_json, to_json
from vgrout.signals import Stop, stop_on_signals

SWEEPS = Path("out/sweeps")
SCHEMA = "sweep_v1"
State = Literal["to do", "queued", "running", "resumable", "finished", "halted", "diverged", "interrupted", "failed"]
FINAL: tuple[State, ...] = ("finished", "halted", "diverged")  # the same command would end the same way
ELSEWHERE_S = 2.0  # between looks at runs that other processes are writing
# exit code of `vgrout.train` → what became of the run
ENDED: dict[int, State] = {
    **{FINISHED: "finished", HALTED: "halted", DIVERGED: "diverged", INTERRUPTED: "interrupted"},
    -signal.SIGTERM: "interrupted",  # before it had begun to listen
}


@dataclass(frozen=True)
class Cli:
    """Run a study: arms × seeds × overrides, each run a process. The same command goes on after any ending."""

    study: Annotated[Path, tyro.conf.Positional]
    """Study file (TOML); docs/studies has examples."""
    dry_run: bool = False
    """Print the runs, their states and the time they would take; start nothing."""
    jobs: int | None = None
    """Runs at a time; none: one a core (of the Ray cluster: one a GPU, where it has any)."""
    via: Literal["local", "pueue", "ray"] = "local"
    """Who runs them: processes of this machine · a pueue queue · a Ray cluster that shares this folder."""
    ray_address: str = ""
    """Of the cluster; '': one of this machine's own."""
    replan: bool = False
    """Go on although the study file is no longer the one that was planned; the old plan is kept beside the new."""

    def __post_init__(self) -> None:
        if self.jobs is not None and not 1 <= self.jobs <= 4096:
            raise ValueError(f"--jobs {self.jobs}: should lie in [1, 4096]")
        if self.jobs is not None and self.via == "pueue":
            raise ValueError("--jobs: not read with --via pueue; say `pueue parallel N`")
        if self.ray_address and self.via != "ray":
            raise ValueError("--ray-address: not read without --via ray")


@dataclass
class Entry:
    """A run of the study, and what is known of it."""

    cell: Cell
    files: Mapping[str, str | None]  # hashes of the files that it reads
    state: State = "to do"
    run: Path | None = None
    reason: str = ""

    def look(self, ledger: Ledger) -> None:
        """Bring state and run directory up to date with what lies on disk."""
        ledger.refresh()
        found = ledger.find(self.cell.identity, self.files)
        self._take(found, "to do" if found is None or found.state == "dead" else found.state)

    def end(self, ledger: Ledger, code: int, log: Path) -> None:
        """After its process left with `code`."""
        ledger.refresh()
        found = ledger.find(self.cell.identity, self.files)
        if found and found.state == "dead" and found.path == self.run:  # that was there before
            found = None
        self._take(found, ENDED.get(code, "failed"))
        if self.state == "finished" and (found is None or found.state != "finished"):
            self.state, self.reason = (
                "failed",
                "it ended well, but its files or settings are no longer those of the plan",
            )
        if self.state != "finished":
            self.reason = self.reason or _last_word(log) or f"exit code {code}"

    def _take(self, found: Record | None, state: State) -> None:
        self.state, self.run, self.reason = (
            state,
            found.path if found else None,
            _one_line(found.reason) if found else "",
        )

    @property
    def directory(self) -> Path | None:
        """Where its numbers are, or will be."""
        return None if self.state in ("to do", "queued") else self.run

    @property
    def argv(self) -> list[str]:
        """What to run now."""
        train = [sys.executable, "-m", "vgrout.train"]
        if self.state == "resumable":
            return [*train, self.cell.cfg.preset, f"--resume={self.run}"]
        return [*train, *self.cell.flags]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.cell.name,
            "arm": self.cell.arm,
            "seed": self.cell.seed,
            "flags": [*self.cell.flags],
            "run": str(self.directory) if self.directory else None,
            "state": self.state,
        }


@dataclass
class Sweep:
    """A study under way."""

    study: StudyFile
    entries: list[Entry]
    ledger: Ledger
    folder: Path
    started: dict[str, float] = field(default_factory=dict)  # by name: when its process began

    @classmethod
    def of(cls, study: StudyFile) -> "Sweep":
        """Raises ValueError, one line, where an input file of some run is missing or wrong."""
        files: dict[str, Mapping[str, str | None]] = {}  # the same on every seed
        for cell in study.cells:
            if cell.arm not in files:
                try:
                    files[cell.arm] = file_hashes(cell.cfg, preflight(cell.cfg))
                except ValueError as e:
                    raise ValueError(f"{study.path}: {cell.arm}: {e}") from None
        sweep = cls(study, [Entry(c, files[c.arm]) for c in study.cells], Ledger(), SWEEPS / study.name)
        for entry in sweep.entries:
            entry.look(sweep.ledger)
        return sweep

    @property
    def left(self) -> list[Entry]:
        return [e for e in self.entries if e.state not in FINAL]

    def log(self, entry: Entry) -> Path:
        return self.folder / "logs" / (re.sub(r"[^\w.=+-]+", "_", entry.cell.name, flags=re.ASCII) + ".log")

    # ── the plan ───────────────────────────────────────────────────────────────────────────────────────────────────

    def lines(self, jobs: int) -> list[str]:
        """Every run with its state, and how long the rest would take."""
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
            self.estimate(jobs),
        ]

    def warnings(self) -> list[str]:
        """Runs of one table that were begun by different code."""
        by_code = Counter(r.revision[:10] or "no checkout" for e in self.entries if (r := self._record(e)))
        if len(by_code) < 2:
            return []
        return ["runs begun by different code: " + ", ".join(f"{n} by {code}" for code, n in by_code.items())]

    def _record(self, entry: Entry) -> Record | None:
        return self.ledger.find(entry.cell.identity, entry.files) if entry.run else None

    def estimate(self, jobs: int) -> str:
        """From finished runs of the same preset and arm; a run that was begun counts as whole."""
        left, pace = [e.cell.cfg for e in self.left], self.ledger.pace()
        if not left:
            return "nothing left to run"
        known = [pace[kind(cfg)] * cfg.scale.steps for cfg in left if kind(cfg) in pace]
        said = f"about {_time(sum(known) / min(jobs, len(left)))}, {jobs} at a time" if known else "time: no estimate"
        if unknown := len(left) - len(known):
            said += f"; no finished run of the same preset and arm to go by for {unknown} of {len(left)}"
        return said

    def freeze(self, replan: bool) -> None:
        """Write `plan.json`, or hold it against what was planned before. Raises ValueError where they differ."""
        plan = {
            "schema": SCHEMA,
            "name": self.study.name,
            "study": str(self.study.path),
            "sha256": self.study.sha256,
            "hypotheses": [*self.study.hypotheses],
            "runs": [
                {"name": c.name, "arm": c.arm, "seed": c.seed, "flags": [*c.flags], "identity": c.identity}
                for c in self.study.cells
            ],
        }
        path = self.folder / "plan.json"
        if path.is_file():
            before = read_json(path)
            if before.get("sha256") == self.study.sha256:
                return
            if not replan:
                then = {r["identity"] for r in before["runs"]}
                now = {c.identity for c in self.study.cells}
                raise ValueError(
                    f"{self.study.path}: not the file that {path} was made from ({len(now - then)} runs more, "
                    f"{len(then - now)} less); give the study another name, or add --replan"
                )
            os.replace(path, self.folder / f"plan.{before['sha256'][:10]}.json")
        write_atomic(path, to_json(plan))

    def write(self) -> None:
        write_atomic(self.folder / "runs.json", to_json([e.as_json() for e in self.entries]))

    # ── carrying it out ────────────────────────────────────────────────────────────────────────────────────────────

    def carry_out(self, workers: Workers) -> int:
        """Until every run has ended, or a signal says stop: then the runs under way save, and are waited for."""
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
                self._reap(under_way)
                time.sleep(POLL_S)
        self.write()
        return INTERRUPTED if stopped else self.report()

    def _loop(
        self, workers: Workers, under_way: dict[str, tuple[Job, Entry]], stop: Stop, tick: Callable[[int], object]
    ) -> None:
        waiting = deque(self.left)
        elsewhere: list[Entry] = []  # other processes are writing these
        looked, told = time.monotonic(), False
        while under_way or ((waiting or elsewhere) and not stop.requested):
            if stop.requested and not told:
                told = True
                _stop(under_way)
            while waiting and len(under_way) < workers.slots and not stop.requested:
                entry = waiting.popleft()
                entry.look(self.ledger)
                if entry.state == "running":
                    logger.info(f"{entry.cell.name}: another process is writing {entry.run}; waiting for it")
                    elsewhere.append(entry)
                elif entry.state in FINAL:
                    self._say(entry)
                    tick(1)
                else:
                    self.started[entry.cell.name] = time.monotonic()
                    under_way[entry.cell.name] = workers.start(entry.argv, self.log(entry)), entry
                    entry.state = "running"
                    self.write()
            if elsewhere and time.monotonic() - looked > ELSEWHERE_S:
                looked = time.monotonic()
                free = [e for e in elsewhere if e.run is None or not held(e.run)]
                elsewhere = [e for e in elsewhere if e not in free]
                waiting.extendleft(free)
            tick(self._reap(under_way))
            time.sleep(POLL_S)

    def _reap(self, under_way: dict[str, tuple[Job, Entry]]) -> int:
        """Write down which runs have ended; how many."""
        ended = [(name, code) for name, (job, _) in under_way.items() if (code := job.poll()) is not None]
        for name, code in ended:
            _, entry = under_way.pop(name)
            entry.end(self.ledger, code, self.log(entry))
            self._say(entry)
            self.write()
        return len(ended)

    def _say(self, entry: Entry) -> None:
        """One line a run."""
        since = self.started.get(entry.cell.name)
        took = f" ({_time(time.monotonic() - since)})" if since is not None else ""
        if entry.state != "finished" or entry.run is None:
            logger.warning(f"{entry.cell.name}: {entry.state}: {entry.reason}{took}")
            return
        final = read_json(entry.run / "per_mode_deploy.json")
        hack, solve = (_percent(final[f"{what}_deploy"]) for what in ("hack", "solve"))
        logger.info(f"{entry.cell.name}: deployed hack {hack} / solve {solve}{took}")

    def report(self) -> int:
        """The end: how many finished, and every other one by name with its reason."""
        bad = [e for e in self.entries if e.state != "finished"]
        for entry in bad:
            where = entry.run or self.log(entry)
            logger.error(f"{entry.cell.name}: {entry.state}: {entry.reason or 'see the log'} [{where}]")
        logger.info(f"{len(self.entries) - len(bad)} of {len(self.entries)} runs finished: {self.folder / 'runs.json'}")
        return FAILED if bad else FINISHED

    def enqueue(self, queue: Pueue) -> int:
        """Hand everything that is left to the queue, but for what it has already."""
        added = 0
        for entry in tqdm(self.left, disable=None, desc="pueue", unit="run"):
            label = f"{self.study.name}: {entry.cell.name}"
            if entry.state != "running":
                if label not in queue.open:
                    queue.add(entry.argv, label)
                    added += 1
                entry.state = "queued"
                self.write()
        logger.info(f"{added} runs added to the queue; afterwards, for their results, the same command without --via")
        return FINISHED


def _stop(under_way: Mapping[str, tuple[Job, Entry]]) -> None:
    for job, _ in under_way.values():
        job.stop()


def _last_word(log: Path) -> str:
    """The last error line of a process's log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
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
    """Raises ValueError, one line, for everything that can be refused before the first run starts."""
    sweep = Sweep.of(load_study_file(cli.study))
    if cli.dry_run:
        print("\n".join(sweep.lines(cli.jobs or os.cpu_count() or 1)))
        return FINISHED
    probe_writable(sweep.folder / "logs")
    with hold(sweep.folder, "sweep"):
        sweep.freeze(cli.replan)
        sweep.write()
        if cli.via == "pueue":
            return sweep.enqueue(Pueue())
        with closing(_workers(cli, sweep.folder)) as workers:
            for line in (*sweep.warnings(), sweep.estimate(workers.slots)):
                logger.info(line)
            return sweep.carry_out(workers)


def _workers(cli: Cli, folder: Path) -> Workers:
    if cli.via == "ray":
        return Ray(cli.ray_address, cli.jobs, folder)
    return Local(cli.jobs or os.cpu_count() or 1)
