"""Ctrl-C while libraries are imported: it waits until they are.

An exception that is raised within an import is at the mercy of the library: some make another error of it, and one in
the C++ code of torch aborts the process. Standard library only.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

POLL_S = 0.02
PATIENCE = 3


class Interrupts:
    """Says of a signal whether to raise at once. The imports that were under way when it was made do not count."""

    def __init__(self) -> None:
        self._depth = _depth(sys._getframe(1))
        self._asked = 0  # how often somebody has asked while one waits
        self._sent = False

    def wait(self, number: int, frame: FrameType | None) -> bool:
        """Whether this signal waits: it came within an import. It is sent again once that has ended.

        frame: of the main thread, as a handler is given it. Who asks for the PATIENCE-th time does not wait.
        """
        asked, self._sent = not self._sent, False
        if not self._importing(frame):
            return False
        self._asked += asked
        if self._asked >= PATIENCE:
            return False
        if self._asked == 1 or not asked:
            self._send_later(number)
        return True

    def _send_later(self, number: int) -> None:
        threading.Thread(target=self._send, args=(number,), daemon=True, name="interrupt").start()

    def _send(self, number: int) -> None:
        main = threading.main_thread().ident or 0
        while self._importing(sys._current_frames().get(main)):
            time.sleep(POLL_S)
        self._sent = True
        os.kill(os.getpid(), number)

    def _importing(self, frame: FrameType | None) -> bool:
        for _ in range(_depth(frame) - self._depth):
            assert frame is not None
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


@contextmanager
def interruptible() -> Generator[None]:
    """Within the context Ctrl-C raises KeyboardInterrupt outside of imports alone, if it raises one at all."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts = Interrupts()

    def handler(number: int, frame: FrameType | None) -> None:
        if not interrupts.wait(number, frame):
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
