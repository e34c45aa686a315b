"""A run of a study with its state: what is on disk, how its process ended, how to go on with it."""

import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vgrout.ground.errors import one_line, refuse
from vgrout.runs.context import DIVERGED, FAILED, FINISHED, HALTED, INTERRUPTED
from vgrout.sweep.ledger import Ledger, RecordedRun
from vgrout.sweep.study_file import PlannedRun

RunState = Literal[
    "to do",
    "queued",
    "running",
    "resumable",
    "finished",
    "halted",
    "diverged",
    "unrouted",
    "interrupted",
    "failed",
]
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
# exit codes after which status.json is this attempt's
WROTE_STATUS = (FAILED, HALTED, DIVERGED, INTERRUPTED)


@dataclass
class Entry:
    """A run of the study with its state."""

    planned: PlannedRun
    files: Mapping[str, str | None]  # hashes of the files that it reads
    state: RunState = "to do"
    run: Path | None = None
    reason: str = ""
    began: float = 0.0  # when its process was started, by time.monotonic()
    log_start: int = 0  # bytes that earlier attempts left in its log

    def look(self, ledger: Ledger) -> None:
        """Update state and run directory from disk. The ledger has been refreshed."""
        found = ledger.find(self.planned.identity, self.files)
        state = found.state if found else "dead"
        self._take(found, "to do" if state == "dead" else state)

    def begins(self, log: Path) -> None:
        """Note when an attempt starts, and where its part of the log does."""
        self.began = time.monotonic()
        self.log_start = log.stat().st_size if log.is_file() else 0

    def end(self, ledger: Ledger, code: int, log: Path) -> None:
        """Update after the run's process has exited with `code`."""
        found = self._find(ledger)
        if found and found.state == "dead" and found.path == self.run:  # from an earlier attempt
            found = None
        if found and found.state in FINAL:
            self._take(found, found.state)
        else:
            self._take(found, ENDED.get(code, "failed"))
        if self.state != "finished":
            if code not in WROTE_STATUS and self.state not in FINAL:
                self.reason = ""  # an earlier attempt's
            self.reason = self.reason or _last_error(log, self.log_start) or f"exit code {code}"
        elif found is None or found.state != "finished":
            self.state = "failed"
            self.reason = "it ended well, but its files or settings are no longer those of the plan"

    def _find(self, ledger: Ledger) -> RecordedRun | None:
        ledger.refresh()
        return ledger.find(self.planned.identity, self.files)

    def _take(self, found: RecordedRun | None, state: RunState) -> None:
        self.state = state
        self.run = found.path if found else None
        self.reason = one_line(found.reason, 300) if found else ""

    @property
    def directory(self) -> Path | None:
        """The run directory, once it has one."""
        return None if self.state in ("to do", "queued") else self.run

    @property
    def flags(self) -> list[str]:
        """The flags of `vgrout train` that start or resume the run."""
        cfg = self.planned.cfg
        if self.state == "resumable" and self.run:
            trust = ["--trust-code"] if cfg.code else []
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
        run = str(self.directory) if self.directory else None
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
