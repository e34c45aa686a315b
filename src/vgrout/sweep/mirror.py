"""A run's files, copied while it writes them: what a machine sends is at every moment a run that could go on.

A run writes its checkpoints behind the rows that they rest on, and `status.json` last. So a sender reads in the other
order (status, checkpoints, all else), and a receiver writes in the run's: whatever cuts the copy short, the files that
are there are as old as those that speak of them, or younger.
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
PRINTED = "printed"  # name of what the run's process prints
GROWING = (".jsonl", ".log", PRINTED)  # ends of names of files that are appended to
TAIL = 4096  # bytes before the new ones that must be as they were, or the file was cut back and is sent whole
Stat = tuple[int, int, int]


@dataclass(frozen=True)
class Piece:
    """What is new of a file: its bytes from `start` on."""

    name: str  # below the folder in which the run was started
    start: int
    data: bytes


@dataclass(frozen=True)
class Changes:
    """Since the last ones, in the order in which they were read."""

    pieces: list[Piece]
    runs: list[str]  # run directories that there are: one, or none yet, or none any more
    checkpoints: list[str]  # of which there are still all files


class Sender:
    """Of the folder in which one run was started: its run directory, its log, what it prints."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sent: dict[str, tuple[Stat, bytes]] = {}  # name → as it was, its last bytes
        self._checkpoints: dict[str, list[Stat]] = {}

    def changes(self) -> Changes:
        """Of one run at most."""
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
        except FileNotFoundError:  # replaced or taken away while it was read: the next time, then
            return
        known = (tail if start else b"") + data
        self._sent[name] = (now.st_ino, start + len(data), now.st_mtime_ns), known[-TAIL:]
        yield Piece(name, start, data)

    def _of_checkpoint(self, path: Path) -> list[Piece]:
        """All of its files, or none."""
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
    """Of one attempt, in this folder: the run directory `run`, to go on with, or a new one; `printed` is appended to.
    The run directory is locked as if a process here were writing it."""

    def __init__(self, run: Path | None, printed: Path) -> None:
        """Raises ValueError, one line, while another process writes the run."""
        self.run, self._new, self._name = run, run is None, run.name if run else ""
        self._lock = hold(run) if run else None
        self._printed, self._base = printed, printed.stat().st_size if printed.is_file() else 0

    def take(self, changes: Changes) -> None:
        """Raises OSError where they cannot be written."""
        if changes.runs and self.run is None:
            self._name = changes.runs[0]
            self.run = _made(self._name)
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
        """The run is written no longer. kept: False where it was refused, and has left nothing behind."""
        if self._lock:
            self._lock.close()
        if not kept and self._new and self.run:
            shutil.rmtree(self.run, ignore_errors=True)
            (LOGS / f"{self.run.name}.log").unlink(missing_ok=True)
            self.run = None

    def _place(self, name: str) -> Path:
        """Where a file of the other machine goes. The run may have another name here, if its own was taken."""
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
        """Whole or not at all, as the run itself writes them."""
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


def _made(name: str) -> Path:
    """A new run directory of this name, or of one like it."""
    stamp, _, run_id = name.partition("_")
    for path in (RUNS / name, *(RUNS / f"{stamp}.{k}_{run_id}" for k in range(1, 1000))):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise OSError(f"{RUNS}: a thousand runs named {name}")
