"""Copies a run's files while it writes them, so that the copy is at every moment a run that can be resumed.

A run writes checkpoints after the rows that they rely on, and `status.json` last. So a sender reads in reverse order
(status, checkpoints, the rest), and a receiver writes in the run's order: wherever the copy is cut short, no file
refers to something newer than what is there.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vgrout.files import atomic_open
from vgrout.runs.run_dir import RUNS, hold

LOGS = Path("logs")
PRINTED = "printed"  # file with the output of the run's process
GROWING = (".jsonl", ".log", PRINTED)  # name endings of files that are appended to
TAIL = 4096  # last bytes sent; if they have changed, the file was cut back and is sent again in full
Stat = tuple[int, int, int]


@dataclass(frozen=True)
class Piece:
    """New bytes of a file, from `start` on."""

    name: str  # below the folder in which the run was started
    start: int
    data: bytes


@dataclass(frozen=True)
class Changes:
    """What has changed since the last look."""

    pieces: list[Piece]  # in the order in which they were read
    runs: list[str]  # existing run directories: one, or none (not yet, or removed)
    checkpoints: list[str]  # existing checkpoints


class Sender:
    """Reads changes in the folder where one run was started: its run directory, its log, its output."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sent: dict[str, tuple[Stat, bytes]] = {}  # name → its stat and last bytes when it was sent
        self._checkpoints: dict[str, list[Stat]] = {}

    def changes(self) -> Changes:
        runs = sorted(p for p in (self._root / RUNS).glob("*_*") if p.is_dir())
        pieces = [p for run in runs for p in self._of_file(run / "status.json")]
        checkpoints = [p for run in runs for p in sorted(run.glob("resume/step_*"))]
        for path in checkpoints:
            pieces += self._of_checkpoint(path)
        rest = [p for run in runs for p in sorted(run.rglob("*")) if "resume" not in p.relative_to(run).parts]
        for path in (*rest, *sorted((self._root / LOGS).glob("*.log")), self._root / PRINTED):
            if path.name != "status.json" and not path.name.startswith("."):
                pieces += self._of_file(path)
        there = [str(p.relative_to(self._root)) for p in checkpoints if p.is_dir()]
        return Changes(pieces, [run.name for run in runs], there)

    def _of_file(self, path: Path) -> Iterator[Piece]:
        name = str(path.relative_to(self._root))
        try:
            if not path.is_file() or self._sent.get(name, (None, b""))[0] == _stat(path):
                return
            with open(path, "rb") as file:
                now = os.fstat(file.fileno())
                (_, before, _), tail = self._sent.get(name, ((0, 0, 0), b""))
                start = 0
                if tail and path.name.endswith(GROWING) and now.st_size >= before:
                    file.seek(before - len(tail))
                    start = before if file.read(len(tail)) == tail else 0
                file.seek(start)
                data = file.read(now.st_size - start)
        except FileNotFoundError:  # replaced or removed while it was read: sent next time
            return
        known = (tail if start else b"") + data
        self._sent[name] = (now.st_ino, start + len(data), now.st_mtime_ns), known[-TAIL:]
        yield Piece(name, start, data)

    def _of_checkpoint(self, path: Path) -> list[Piece]:
        """All files of a checkpoint, or none."""
        name = str(path.relative_to(self._root))
        try:
            files = sorted(p for p in path.iterdir() if p.is_file())
            now = [_stat(p) for p in files]
            if self._checkpoints.get(name) == now:
                return []
            pieces = [Piece(str(p.relative_to(self._root)), 0, p.read_bytes()) for p in files]
        except FileNotFoundError:  # pruned
            return []
        self._checkpoints[name] = now
        return pieces


def _stat(path: Path) -> Stat:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


class Receiver:
    """Writes one attempt's changes here: to `run`, the directory of a run to resume, or to a new one; output goes
    to the end of `printed`. The run directory is locked as if a process here were writing it."""

    def __init__(self, run: Path | None, printed: Path) -> None:
        """Raises ValueError, one line, while another process writes the run."""
        self.run, self._new, self._name = run, run is None, run.name if run else ""
        self._lock = hold(run) if run else None
        self._printed, self._base = printed, printed.stat().st_size if printed.is_file() else 0

    def take(self, changes: Changes) -> None:
        """Write the changes. Raises OSError where they cannot be written."""
        if changes.runs and self.run is None:
            self._name = changes.runs[0]
            self.run = _make(self._name)
            self._lock = hold(self.run)
        checkpoints: dict[str, list[Piece]] = {}
        for piece in reversed(changes.pieces):
            folder = PurePosixPath(piece.name).parent
            if folder.parent.name == "resume":
                checkpoints.setdefault(str(folder), []).append(piece)
                continue
            if checkpoints and piece.name.endswith("status.json"):
                self._take_checkpoints(checkpoints)
            self._take_file(piece)
        self._take_checkpoints(checkpoints)
        if self.run:
            there = {self._place(name) for name in changes.checkpoints}
            for old in {*self.run.glob("resume/step_*")} - there:
                shutil.rmtree(old, ignore_errors=True)

    def close(self, kept: bool = True) -> None:
        """Unlock the run. kept: False where it was refused; then a new run's directory and log are removed."""
        if self._lock:
            self._lock.close()
        if not kept and self._new and self.run:
            shutil.rmtree(self.run, ignore_errors=True)
            (LOGS / f"{self.run.name}.log").unlink(missing_ok=True)
            self.run = None

    def _place(self, name: str) -> Path:
        """Where a file of the other machine goes. The run has another name here if its own was taken."""
        parts = PurePosixPath(name).parts
        assert ".." not in parts, name
        assert not PurePosixPath(name).is_absolute(), name
        if self.run and parts[:3] == (*RUNS.parts, self._name):
            return self.run.joinpath(*parts[3:])
        if self.run and parts == (*LOGS.parts, f"{self._name}.log"):
            return LOGS / f"{self.run.name}.log"
        return Path(*parts)

    def _take_file(self, piece: Piece) -> None:
        start, path = piece.start, self._place(piece.name)
        if piece.name == PRINTED:
            start, path = self._base + start, self._printed
        path.parent.mkdir(parents=True, exist_ok=True)
        if not start:
            with atomic_open(path) as file:
                file.write(piece.data)
            return
        with open(path, "r+b") as file:
            file.truncate(start)
            file.seek(start)
            file.write(piece.data)

    def _take_checkpoints(self, checkpoints: dict[str, list[Piece]]) -> None:
        """Write each checkpoint completely or not at all, as the run does."""
        for name, pieces in checkpoints.items():
            path = self._place(name)
            temporary = path.with_name(f".tmp_{path.name}_{os.getpid()}")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for piece in pieces:
                with atomic_open(temporary / PurePosixPath(piece.name).name) as file:
                    file.write(piece.data)
            if path.exists():
                shutil.rmtree(path)
            os.replace(temporary, path)
        checkpoints.clear()


def _make(name: str) -> Path:
    """Make a run directory of this name, or of a similar one if it is taken."""
    stamp, _, run_id = name.partition("_")
    for path in (RUNS / name, *(RUNS / f"{stamp}.{k}_{run_id}" for k in range(1, 1000))):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise OSError(f"{RUNS}: a thousand runs named {name}")
