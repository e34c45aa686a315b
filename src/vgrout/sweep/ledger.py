"""The runs that exist, found by the identity of their settings and input files, never by name."""

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vgrout.config.run import Config, from_dict, identity
from vgrout.files import read_json
from vgrout.runs.run_dir import RUNS, held

# State of a run directory. "running": a living process writes it. "dead": it has no checkpoint to resume from.
Found = Literal["finished", "running", "resumable", "halted", "diverged", "unrouted", "dead"]
# Of several runs of one cell the one with the first of these states is taken, and of those the newest.
BEST: tuple[Found, ...] = ("finished", "running", "resumable", "halted", "diverged", "unrouted", "dead")


@dataclass(frozen=True)
class Record:
    """A run directory. Fields never change; properties look at the disk."""

    path: Path
    cfg: Config  # that it was started with, or resumed with by force
    identity: str
    hashes: dict[str, str | None]  # of the files that it read
    code: str  # revision that started it, with "+" if it was edited; "" without a checkout

    def reads(self, files: Mapping[str, str | None]) -> bool:
        """Whether the run read files with these hashes; a file that it did not record counts as the same."""
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
        return "resumable" if any(self.path.glob("resume/step_*/manifest.json")) else "dead"

    @property
    def reason(self) -> str:
        return str(self._status.get("reason", ""))

    @property
    def _status(self) -> dict[str, object]:
        with contextlib.suppress(ValueError):
            return read_json(self.path / "status.json")
        return {}

    @property
    def seconds_a_step(self) -> float | None:
        """Time from the first step to the end of the final evaluation ÷ steps. None: unfinished, or resumed."""
        try:
            if read_json(self.path / "run.json").get("resumed") or self._status.get("state") != "finished":
                return None
            took = (self.path / "per_mode_deploy.json").stat().st_mtime - (self.path / "run.json").stat().st_mtime
        except (OSError, ValueError):
            return None
        return took / self.cfg.scale.steps


class Ledger:
    """The run directories below `root`. Each run.json is read once; states are read from disk at every use."""

    def __init__(self, root: Path = RUNS) -> None:
        self.root = root
        self._records: dict[Path, Record | None] = {}
        self._by_identity: dict[str, list[Record]] = defaultdict(list)

    def refresh(self) -> None:
        """Add new run directories. A run whose settings no longer parse is left out."""
        for path in sorted(p.parent for p in self.root.glob("*/run.json")):
            if path not in self._records:
                self._records[path] = record = _record(path)
                if record is not None:
                    self._by_identity[record.identity].append(record)

    def find(self, run: str, files: Mapping[str, str | None]) -> Record | None:
        """The best run of this identity that read these files."""
        alike = [(r.state, r) for r in self._by_identity[run] if r.reads(files)]
        return max(alike, key=lambda found: (-BEST.index(found[0]), found[1].path.name), default=(None, None))[1]

    def pace(self) -> dict[tuple[str, str], float]:
        """Kind of run → seconds per step, median over its finished runs."""
        by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
        for record in filter(None, self._records.values()):
            if (seconds := record.seconds_a_step) is not None:
                by_kind[kind(record.cfg)].append(seconds)
        return {kind: statistics.median(seconds) for kind, seconds in by_kind.items()}


def kind(cfg: Config) -> tuple[str, str]:
    """(preset, intervention): runs of one kind take about the same time per step."""
    return cfg.preset, cfg.method.intervention


def _record(path: Path) -> Record | None:
    try:
        data = read_json(path / "run.json")
        cfg = from_dict(data.get("begun") or data["config"])  # a halted run that was continued is still the study's
        git = data.get("git") or {}
        code = str(git.get("revision", ""))[:10] + ("+" if git.get("dirty") else "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Record(path, cfg, identity(cfg), data.get("hashes") or {}, code)
