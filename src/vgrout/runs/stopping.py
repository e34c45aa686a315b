"""Signals that ask a run to stop."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import NoReturn

from loguru import logger

INTERRUPTED = 130  # exit code
ONE_REQUEST_S = 2.0  # SIGTERMs within this time ask for one and the same end


def leave(code: int) -> NoReturn:
    """End the process with this exit code, and without a traceback where somebody interrupts that too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


@dataclass
class Stop:
    """Set by the signal handler, read once per step."""

    requested: bool = False


@contextmanager
def stop_on_signals(at_once: Callable[[], bool] = lambda: False) -> Generator[Stop]:
    """Within the context the first signal asks for an end, the second raises KeyboardInterrupt, the third ends the
    process. A SIGTERM right after another one is the same request: the kernel sends one for every thread of a sweep
    that was killed.

    at_once: whether nothing can be lost yet. Then the first one raises already."""
    stop, said = Stop(), SimpleQueue[str]()

    # a thread of its own: a signal may come while a line is logged, and the logger's lock is held
    def say() -> None:
        while line := said.get():
            logger.warning(line)

    raised, terminated = False, -math.inf

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal raised, terminated
        if number == signal.SIGTERM:
            now = time.monotonic()
            if now - terminated < ONE_REQUEST_S:
                return
            terminated = now
        if raised:  # it is cleaning up, and somebody has no time
            os._exit(INTERRUPTED)
        stops_now = stop.requested or at_once()
        stop.requested = True
        if stops_now:
            raised = True
            raise KeyboardInterrupt
        said.put(
            f"{signal.Signals(number).name}: finishing this step, then saving; once more to stop at once"
        )

    # a hangup is no reason to stop where it is ignored (nohup)
    asked = [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (
        signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    )
    thread = threading.Thread(target=say, daemon=True, name="signals")
    thread.start()
    before = {s: signal.signal(s, handler) for s in asked}
    try:
        yield stop
    finally:
        for s, old in before.items():
            signal.signal(s, old)
        said.put("")
        thread.join()
