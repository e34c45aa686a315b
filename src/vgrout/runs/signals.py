"""SIGINT and SIGTERM: the first stops the run after its step, the second at once."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from loguru import logger


@dataclass
class Stop:
    """Set by the signal handler, read once per step."""

    requested: bool = False


@contextmanager
def stop_on_signals() -> Generator[Stop]:
    stop = Stop()

    def handler(number: int, _frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        logger.warning(f"{signal.Signals(number).name}: finishing this step, then saving; once more to stop at once")

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for s, old in before.items():
            signal.signal(s, old)
