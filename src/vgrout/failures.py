"""What a run says of functions of somebody's own that fail while it is under way."""

import threading
from collections import Counter

from loguru import logger

from vgrout import faults
from vgrout.files import printable
from vgrout.scoring import FailureObserver, RewardFailed, Scoring

SAID_AGAIN = 10  # every tenth, hundredth, thousandth … failure of a function is said


class LoggedFailures(FailureObserver):
    """Logs a function's first failure with its place in somebody's file, then their number now and then, and at the
    end. Thread-safe."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._lock = threading.Lock()

    def failed(self, function: Scoring, e: RewardFailed) -> None:
        name = f"{function.flag} {function.name}"
        with self._lock:
            self._count[name] += 1
            times = self._count[name]
        if times == 1:
            place = faults.place_of(e.__cause__) or function.where
            logger.warning(f"{name} {printable(str(e))} ({place}); further failures are counted")
            logger.opt(exception=e.__cause__).debug(f"{name}: its first failure")
        elif _is_power(times, SAID_AGAIN):
            logger.warning(f"{name} has failed {times:,} times so far, now it {printable(str(e))}")

    def ended(self) -> None:
        with self._lock:
            count, self._count = self._count, Counter()
        for name, times in count.items():
            logger.warning(f"{name} failed {times:,} time{'s' * (times != 1)} in all")


def _is_power(number: int, base: int) -> bool:
    while number % base == 0:
        number //= base
    return number == 1
