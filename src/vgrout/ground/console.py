"""Console, log file, and the clock of a step's phases. A console line is the message, after W or E for a warning or an
error, and never breaks a progress bar."""

import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TextIO

from loguru import logger
from tqdm import tqdm

from vgrout.ground.io import drop_stdout, make_folder, printable, spelled

_LETTER = {"WARNING": "W ", "ERROR": "E ", "CRITICAL": "E "}
HEARTBEAT_S = 60.0  # between two signs of life


def setup(log: Path | None) -> None:
    """Send log lines to stdout, from INFO up and through tqdm.write, and to the file `log`, with times and DEBUG."""
    logger.remove()
    logger.add(
        Lines(log),
        level="INFO",
        format=lambda record: _LETTER.get(record["level"].name, "") + "{message}\n",
        colorize=False,
    )
    if log is not None:
        logger.add(
            LogFile(log),
            level="DEBUG",
            format="{time:YYYY-MM-DD HH:mm:ss.SSS} {level:<7} {message}",
            colorize=False,
        )


class Lines:
    """Standard output, line by line, until it takes no more (a closed pipe, a full disk): then one line on stderr says
    so, and the run goes on."""

    last: ClassVar[float] = 0.0  # when the last line was written, by time.perf_counter

    def __init__(self, log: Path | None) -> None:
        self._log, self._open = log, True

    def write(self, message: str) -> None:
        """Print above a progress bar."""
        Lines.last = time.perf_counter()
        if not self._open:
            return
        try:
            tqdm.write(spelled(printable(message)), file=sys.stdout, end="")
            sys.stdout.flush()
        except OSError as e:
            self._open = False
            drop_stdout()
            where = f"; this goes on, its log is {self._log}" if self._log else ""
            print(
                f"W standard output cannot be written any more ({e.strerror}){where}",
                file=sys.stderr,
            )


class LogFile:
    """A log file that gives up, with one line on stderr, at the first line that cannot be written: a full disk must not
    stop a run or bury the reason under tracebacks."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self._path = path
        self._file: TextIO | None = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, message: str) -> None:
        """Append one line."""
        if self._file is None:
            return
        try:
            self._file.write(printable(message))
        except OSError as e:
            self._file = None
            print(f"W {self._path}: cannot be written any more ({e.strerror})", file=sys.stderr)

    def stop(self) -> None:
        """Close the file; loguru calls this at the end."""
        if self._file is not None:
            self._file.close()


def progress(items: Iterable[object], desc: str, unit: str) -> tqdm:
    """A bar on a terminal, drawn anew as one waits; elsewhere only each minute."""
    every = 0.1 if sys.stderr.isatty() else HEARTBEAT_S
    often = {"mininterval": every, "maxinterval": max(10.0, every), "delay": every}
    return tqdm(items, desc=desc, unit=unit, **often)


def notebook_bars() -> type[tqdm] | None:
    """The bars that a Jupyter notebook shows: tqdm's widget where ipywidgets is installed, and text otherwise. None:
    this code does not run in a notebook."""
    if not _in_notebook():
        return None
    with warnings.catch_warnings():
        # it asks for ipywidgets, in a red box and whichever library is first to import this; text will do
        warnings.filterwarnings("ignore", "IProgress not found")
        from tqdm import auto
    return auto.tqdm


def _in_notebook() -> bool:
    """Whether the shell is that of a Jupyter kernel, or of a class made from it, as Colab's is. IPython is asked only
    where something has loaded it already: nothing else runs in a kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


def step_bar(bars: type[tqdm] | None, steps: range, hidden: bool) -> tqdm:
    """A bar of a run's steps, on a terminal or below a notebook's cell.

    bars: of `notebook_bars`.
    """
    at = {"initial": steps.start, "total": steps.stop}
    layout = "{n_fmt} of {total_fmt} steps |{bar:24}| {elapsed} gone, about {remaining} left"
    if bars is None:
        return tqdm(**at, bar_format=layout, leave=False, disable=hidden or None)
    if bars.status_printer is not tqdm.status_printer:  # tqdm's widget has a width of its own
        layout = layout.replace(":24", "")
    # with the lines that are logged, and not in the red box of errors; drawn anew at every update
    of_cell = {"file": sys.stdout, "mininterval": 0, "miniters": 1}
    return bars(**at, bar_format=layout + "{postfix}", **of_cell)


class Clock:
    """Seconds by phase within a step. Inside `with` a thread logs a minute in which nothing else was said."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase: tuple[str, float] | None = None  # its name, when it began
        self._start = time.perf_counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="heartbeat")

    def __enter__(self) -> "Clock":
        self._phase = ("loading", time.perf_counter())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def begin(self, phase: str) -> None:
        """Say that a phase before the steps begins."""
        self._phase = (phase, time.perf_counter())
        logger.info(f"{phase} …")

    def reset(self) -> None:
        """A new step begins."""
        self.seconds = {}
        self._start = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start

    def columns(self) -> dict[str, object]:
        """The step table's columns of time."""
        parts = {name: self.seconds.get(name, 0.0) for name in ("gen", "grade", "fb")}
        return parts | {"eval": self.seconds.get("eval"), "sec": self.total}

    @contextmanager
    def __call__(self, phase: str, total: int = 0) -> Generator[Callable[[], object]]:
        """Add the block's time to `phase`. total: answers of a phase that has a bar on a terminal; the block is given
        what counts one of them."""
        start = time.perf_counter()
        self._phase = (phase, start)
        hidden = None if total else True
        try:
            with tqdm(desc=phase, total=total, unit="answer", leave=False, disable=hidden) as bar:
                yield bar.update
        finally:
            self._phase = None
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def _watch(self) -> None:
        while not self._stop.wait(HEARTBEAT_S / 120):
            current, now = self._phase, time.perf_counter()
            if current is not None and now - max(current[1], Lines.last) >= HEARTBEAT_S:
                logger.info(f"{current[0]}: {now - current[1]:.0f} s")
