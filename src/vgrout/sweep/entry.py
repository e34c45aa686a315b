"""The runs of a study: what is on disk of them, how their processes ended, how to go on with them.

Runs are found by the identity of their settings and input files, never by name.
"""

import contextlib
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from vgrout.config.run import from_dict, settings_sha256
from vgrout.ground.io import Refused, held, one_line, read_json, refuse
from vgrout.ground.records import began
from vgrout.runs.checkpoint import complete
from vgrout.runs.context import DIVERGED, FINISHED, HALTED, INTERRUPTED
from vgrout.runs.run_dir import RUNS
from vgrout.sweep.study_file import PlannedRun

# State of a run directory. "running": a living process writes it. "dead": it has no checkpoint to
# resume from. Of several runs alike the one with the first of these states is taken, and of those
# the newest.
Found = Literal["finished", "running", "resumable", "halted", "diverged", "unrouted", "dead"]
BEST: tuple[Found, ...] = get_args(Found)
RunState = Found | Literal["to do", "queued", "interrupted", "failed"]
# states of runs that would end the same way again
FINAL: tuple[RunState, ...] = ("finished", "halted", "diverged", "unrouted")
# exit code of `vgrout.train` → what became of the run
ENDED: dict[int, RunState] = {
    FINISHED: "finished",
    HALTED: "halted",
    DIVERGED: "diverged",
    INTERRUPTED: "interrupted",
    -signal.SIGTERM: "interrupted",  # before the run handled signals
}


@dataclass(frozen=True)
class RecordedRun:
    """A run directory. Fields never change; properties look at the disk."""

    path: Path
    began: tuple[datetime, str]
    identity: str  # of the settings that it was started with
    hashes: dict[str, str | None]  # of the files that it read

    def reads(self, files: Mapping[str, str | None]) -> bool:
        """Whether the run read files with these hashes.

        A file that it did not record counts as the same.
        """
        return all(self.hashes.get(name, sha256) == sha256 for name, sha256 in files.items())

    @property
    def state(self) -> Found:
        status = self._status.get("state")
        if status == "finished":
            return "finished"
        if held(self.path):
            return "running"
        for ended in ("halted", "diverged", "unrouted"):
            if status == ended:
                return ended
        return "resumable" if complete(self.path) else "dead"

    @property
    def reason(self) -> str:
        return one_line(self._status.get("reason", ""), 300)

    @property
    def _status(self) -> dict[str, object]:
        with contextlib.suppress(ValueError):
            return read_json(self.path / "status.json")
        return {}


class Ledger:
    """The run directories in out/runs.

    Each run.json is read once; states are read from disk at every use.
    """

    def __init__(self) -> None:
        self._seen: set[Path] = set()
        self._records: dict[str, list[RecordedRun]] = {}  # by identity

    def refresh(self) -> None:
        """Add new run directories. A run whose settings no longer parse is left out."""
        for path in sorted({file.parent for file in RUNS.glob("*/run.json")} - self._seen):
            self._seen.add(path)
            record = _record(path)
            if record is not None:
                self._records.setdefault(record.identity, []).append(record)

    def find(self, identity: str, files: Mapping[str, str | None]) -> RecordedRun | None:
        """The best run of this identity that read these files; None if there is none."""
        alike = [run for run in self._records.get(identity, ()) if run.reads(files)]
        return max(alike, key=lambda run: (-BEST.index(run.state), run.began), default=None)


def _record(path: Path) -> RecordedRun | None:
    try:
        data = read_json(path / "run.json")
        # a halted run that was continued is still the study's
        cfg = from_dict(data.get("begun") or data["config"])
        hashes = dict(data.get("hashes") or {})
    except (Refused, KeyError, TypeError, ValueError, AttributeError):
        return None
    return RecordedRun(path, began(path), settings_sha256(cfg), hashes)


@dataclass
class Entry:
    """A run of the study with its state."""

    planned: PlannedRun
    files: Mapping[str, str | None]  # hashes of the files that it reads
    state: RunState = "to do"
    run: Path | None = None  # its directory, once it has one to go on with
    reason: str = ""
    began: float = 0.0  # when its process was started, by time.monotonic()
    log_start: int = 0  # bytes that earlier attempts left in its log

    def look(self, ledger: Ledger) -> None:
        """Update from disk. The ledger has been refreshed."""
        self.state, self.run, self.reason = "to do", None, ""
        found = ledger.find(self.planned.identity, self.files)
        if found and found.state != "dead":
            self.state, self.run, self.reason = found.state, found.path, found.reason

    def begins(self, log: Path) -> None:
        """Note when an attempt starts, and where its part of the log does."""
        self.began = time.monotonic()
        self.log_start = log.stat().st_size if log.is_file() else 0

    def end(self, ledger: Ledger, code: int, log: Path) -> None:
        """Update after the run's process has exited with `code`."""
        ledger.refresh()
        self.look(ledger)
        if self.state in FINAL:
            return
        self.state = ENDED.get(code, "failed")
        self.reason = _last_error(log, self.log_start) or f"exit code {code}"
        if self.state == "finished":
            self.state = "failed"
            self.reason = "it ended well, but its files or settings are no longer those of the plan"

    @property
    def flags(self) -> list[str]:
        """The flags of `vgrout train` that start or resume the run."""
        cfg = self.planned.cfg
        if self.state == "resumable" and self.run:
            trust = ["--trust-code"] if cfg.own_code else []
            return [cfg.preset, *trust, f"--resume={self.run}"]
        return [*self.planned.flags]

    @property
    def argv(self) -> list[str]:
        """The command of the process that starts or resumes the run."""
        return [sys.executable, "-m", "vgrout.train", *self.flags]

    @property
    def command(self) -> str:
        """The same for a shell; `true` where there is nothing to do."""
        if self.state in (*FINAL, "running"):
            return f"true  # {self.state}: {self.planned.name}"
        refuse(
            any("\n" in flag for flag in self.flags),
            f"{self.planned.name}: a setting has a line break, and --commands a line for each run",
        )
        return shlex.join(["python", "-m", "vgrout.train", *self.flags])

    @property
    def log_name(self) -> str:
        """The log of its attempts: named after the run and, to be unique, its identity."""
        name = re.sub(r"[^\w.=+-]+", "_", self.planned.name, flags=re.ASCII)[:150]
        return f"{name}-{self.planned.identity[:8]}.log"

    def as_json(self) -> dict[str, object]:
        run = str(self.run) if self.run else None
        return {**self.planned.as_json(), "run": run, "state": self.state}


def _last_error(log: Path, since: int) -> str:
    """The last error line of a log, from byte `since` on; "" if there is none."""
    try:
        lines = log.read_bytes()[since:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if line.startswith("E "):
            return one_line(line[2:], 160)
    return ""
