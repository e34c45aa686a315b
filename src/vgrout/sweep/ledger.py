"""The runs that exist, found by the identity of their settings and input files, never by name."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from vgrout.config.stored import from_dict, settings_sha256
from vgrout.ground.errors import Refused
from vgrout.ground.files import held, read_json
from vgrout.ground.records import began
from vgrout.runs.checkpoint import complete
from vgrout.runs.run_dir import RUNS

# State of a run directory. "running": a living process writes it. "dead": it has no checkpoint to
# resume from. Of several runs alike the one with the first of these states is taken, and of those
# the newest.
Found = Literal["finished", "running", "resumable", "halted", "diverged", "unrouted", "dead"]
BEST: tuple[Found, ...] = get_args(Found)


@dataclass(frozen=True)
class RecordedRun:
    """A run directory. Fields never change; properties look at the disk."""

    path: Path
    began: tuple[datetime, str]
    identity: str  # of the settings that it was started with
    hashes: dict[str, str | None]  # of the files that it read
    code: str  # revision that started it, with "+" if it was edited; "" without a checkout

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
        return str(self._status.get("reason", ""))

    @property
    def _status(self) -> dict[str, object]:
        with contextlib.suppress(ValueError):
            return read_json(self.path / "status.json")
        return {}


class Ledger:
    """The run directories below `root`.

    Each run.json is read once; states are read from disk at every use.
    """

    def __init__(self, root: Path = RUNS) -> None:
        self.root = root
        self._seen: set[Path] = set()
        self._records: dict[str, list[RecordedRun]] = {}  # by identity

    def refresh(self) -> None:
        """Add new run directories. A run whose settings no longer parse is left out."""
        for file in sorted(self.root.glob("*/run.json")):
            path = file.parent
            if path in self._seen:
                continue
            self._seen.add(path)
            record = _record(path)
            if record is not None:
                self._records.setdefault(record.identity, []).append(record)

    def find(self, run: str, files: Mapping[str, str | None]) -> RecordedRun | None:
        """The best run of this identity that read these files; None if there is none."""
        best: tuple[int, tuple[datetime, str]] | None = None
        found: RecordedRun | None = None
        for record in self._records.get(run, ()):
            if not record.reads(files):
                continue
            rank = (-BEST.index(record.state), record.began)
            if best is None or rank > best:
                best, found = rank, record
        return found


def _record(path: Path) -> RecordedRun | None:
    try:
        data = read_json(path / "run.json")
        # a halted run that was continued is still the study's
        cfg = from_dict(data.get("begun") or data["config"])
        git = data.get("git") or {}
        code = str(git.get("revision", ""))[:10] + ("+" if git.get("dirty") else "")
        hashes = dict(data.get("hashes") or {})
    except (Refused, KeyError, TypeError, ValueError, AttributeError):
        return None
    return RecordedRun(path, began(path), settings_sha256(cfg), hashes, code)
