"""What a person sees: one character for the level, then the message, never tearing a progress bar; and a phase clock
that says so when something stalls."""

import shutil
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from loguru import logger
from tqdm import tqdm

_LETTER = {"TRACE": "T", "DEBUG": "D", "INFO": "I", "SUCCESS": "I", "WARNING": "W", "ERROR": "E", "CRITICAL": "E"}
HEARTBEAT_S = 60.0


def setup(log: Path | None, level: str = "INFO") -> None:
    """stdout from `level` up, through tqdm.write; `log` gets everything at DEBUG with times."""
    logger.remove()
    logger.add(
        lambda line: tqdm.write(line, file=sys.stdout, end=""),
        level=level,
        format=lambda record: _LETTER.get(record["level"].name, "I") + " {message}\n",
        colorize=False,
    )
    if log is not None:
        logger.add(
            LogFile(log), level="DEBUG", format="{time:YYYY-MM-DD HH:mm:ss.SSS} {level:<7} {message}", colorize=False
        )


class LogFile:
    """Appends lines; gives up after the first that cannot be written, saying so once: a full disk is no reason to stop
    or to bury the reason under tracebacks."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: TextIO | None = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, message: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(message)
        except OSError as e:
            self._file = None
            print(f"W {self._path}: cannot be written any more ({e.strerror})", file=sys.stderr)

    def stop(self) -> None:
        """The logger's word for the end of a sink."""
        if self._file is not None:
            self._file.close()


def terminal_width() -> int | None:
    """Columns of the terminal; None through a pipe, where nothing needs to fit."""
    return shutil.get_terminal_size((160, 40)).columns - 2 if sys.stdout.isatty() else None


class Clock:
    """Seconds by phase within a step. Inside `with`, a thread names a phase that lasts over a minute, every minute."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase: tuple[str, float] | None = None
        self._start = time.perf_counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="heartbeat")

    def __enter__(self) -> "Clock":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def reset(self) -> None:
        self.seconds = {}
        self._start = time.perf_counter()

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        start = time.perf_counter()
        self._phase = (phase, start)
        try:
            yield
        finally:
            self._phase = None
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def _watch(self) -> None:
        said = 0
        while not self._stop.wait(HEARTBEAT_S / 12):
            current = self._phase
            beats = int((time.perf_counter() - current[1]) / HEARTBEAT_S) if current else 0
            if current and beats > said:
                logger.info(f"still in {current[0]}: {beats * HEARTBEAT_S:.0f} s")
            said = beats
