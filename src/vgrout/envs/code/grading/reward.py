"""A user's reward function, `module:function`, which scores answers in place of the modes' flawed checks.

    def reward(completion, info):                              # verifiers: arguments by name; async def as well
        return float(info["func_name"] in completion)          # in [0, 1]

    def reward(prompts, completions, **columns): return [...]  # TRL: lists, here of one entry

It is trusted code and runs in this process; of an answer it sees only the text. Its parameters may be: prompt (the last
user message), completion and answer (a right one) as texts, info and state as dicts, or any key of info by itself. The
strict oracle does not use it. Standard library only.
"""

import asyncio
import hashlib
import importlib
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from vgrout.data import Problem
from vgrout.errors import Refused

# seconds before a function is asked again; twice as long each time
PAUSE, LONGEST_PAUSE = 0.1, 30.0
TIMEOUT = 60.0  # seconds per call: a judge over a network answers in a few, its retries included
NEAR = 1e-9  # a score this close to 0, 1 or the threshold is meant to be it
BATCHED = {"prompt": "prompts", "completion": "completions"}  # TRL's names


class RewardFailed(Exception):
    """The function gave no reward for an answer: it raised, took too long, or returned no number in [0, 1]."""


def import_function(name: str, flag: str) -> Callable[..., Any]:
    """The function that "module:function" names; the working directory is searched too.

    Raises:
        Refused: one line: it cannot be imported or called; from what the module raised.
    """
    if os.getcwd() not in sys.path:  # a script lacks it, `python -m` does not
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
        if not callable(function):
            raise TypeError("it is not a function")
    except (Exception, SystemExit) as e:
        raise Refused(
            f"{flag} {name}: cannot be imported ({_one_line(e)}); give module:function"
        ) from e
    return function


def scorer(name: str, flag: str) -> Callable[[Problem, str], float]:
    """The function that "module:function" names, from a prompt and an answer, two texts, to a number.

    Raises:
        Refused: one line: it cannot be imported; or, when it is called, it raises (from what it
            raised) or returns no number.
    """
    function = import_function(name, flag)

    def score(problem: Problem, text: str) -> float:
        cause: BaseException | None = None
        try:
            number = float(function(problem.messages[-1]["content"], text))
        except (Exception, SystemExit) as e:  # one's own function may raise anything
            cause, why = e, f"raised {_one_line(e)}"
        else:
            if math.isfinite(number):
                return number
            why = f"returned {number}"
        raise Refused(
            f"{flag} {name}: asked about problem {problem.id}, it {why}; it should return a number"
        ) from cause

    return score


def right_answer(problem: Problem) -> str:
    """An answer with the problem's canonical solution, on which a function is tried."""
    return f"```python\n{problem.canonical}\n```"


def _one_line(e: BaseException) -> str:
    """An exception in one line."""
    text = "".join(c if c.isprintable() else " " for c in f"{type(e).__name__}: {e}")
    return text[:120].rstrip(": ")


def _arguments(problem: Problem, text: str) -> dict[str, Any]:
    """All arguments that a function may take; fresh for each call, so that it may change them."""
    columns = {
        "id": problem.id,
        "mode": problem.mode,
        "marker": problem.marker,
        "messages": [dict(m) for m in problem.messages],
        "tests": list(problem.tests),
        "setup_code": problem.setup_code,
        "func_name": problem.func_name,
    }
    own = {
        "prompt": problem.messages[-1]["content"] if problem.messages else "",
        "completion": text,
    }
    own["answer"] = problem.canonical
    return columns | own | {"info": dict(columns), "state": own | {"info": dict(columns)}}


NAMES = tuple(_arguments(Problem(0, "run_tests", "", (), (), (), "", "", ""), ""))


class RewardFunction:
    """A loaded reward function. Thread-safe: a plain one is called by one thread at a time, an async one is awaited for
    several answers at once.

    name: module:function. passes_at: an answer with at least this score counts as passed.

    Raises Refused, one line, if it cannot be imported or takes other arguments.
    """

    def __init__(
        self, name: str, passes_at: float = 1.0, flag: str = "--reward", timeout: float = TIMEOUT
    ) -> None:
        self.name, self.passes_at, self.timeout, self._flag = name, passes_at, timeout, flag
        self._function = import_function(name, flag)
        try:  # a resume sees by the hash whether it has changed
            parameters = inspect.signature(self._function).parameters.values()
            self.file = Path(str(sys.modules[name.partition(":")[0]].__file__))
            self.sha256 = hashlib.sha256(self.file.read_bytes()).hexdigest()
        except (TypeError, ValueError, AttributeError, OSError) as e:
            raise Refused(
                f"{flag} {name}: should be a function in a file of your own ({_one_line(e)})"
            ) from None
        self._batched = any(p.name in BATCHED.values() for p in parameters)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._named = {
            p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        legal = {self._parameter(n) for n in NAMES}
        single = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        unknown = sorted({p.name for p in single if p.default is p.empty} - legal) or [
            p.name for p in parameters if p.kind is p.POSITIONAL_ONLY
        ]
        if unknown:
            raise Refused(
                f"{flag} {name}: asks for {', '.join(unknown)}; arguments are given by name, and may be "
                + ", ".join(sorted(legal))
            )
        self._is_async = any(
            map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__))
        )
        self._one_call, self._lock = threading.Lock(), threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Another rank imports it by itself."""
        return RewardFunction, (self.name, self.passes_at, self._flag, self.timeout)

    def _parameter(self, name: str) -> str:
        return BATCHED.get(name, name) if self._batched else name

    def score(
        self,
        problem: Problem,
        text: str,
        retries: int | None = 0,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> float:
        """The score of this answer, in [0, 1]. Raises RewardFailed with the reason, one line.

        retries: how often it is asked again after a failure; None: until `gives_up`.
        """
        failed = 0
        while True:
            given = {
                self._parameter(n): [v] if self._batched else v
                for n, v in _arguments(problem, text).items()
            }
            try:
                return self._number(
                    self._call(
                        {n: v for n, v in given.items() if self._takes_all or n in self._named}
                    )
                )
            except RewardFailed:
                if failed == retries or gives_up():
                    raise
            time.sleep(min(PAUSE * 2**failed, LONGEST_PAUSE))
            failed += 1

    def probe(self, problem: Problem, retries: int | None = 0) -> float:
        """The score of the problem's canonical solution.

        Raises Refused, one line, if that fails for good; from what the function raised, if it did.
        """
        try:
            return self.score(problem, right_answer(problem), retries)
        except RewardFailed as e:
            raise Refused(
                f"{self._flag} {self.name}: asked about the canonical solution of problem {problem.id}, it {e}"
            ) from e.__cause__

    def _number(self, value: Any) -> float:
        if self._batched:
            found = self._listed(value)
            if len(found) != 1:
                raise RewardFailed("returned no list with one number for one completion")
            value = found[0]
        try:
            number = float("" if isinstance(value, str | bytes) else value)
        except Exception as e:
            raise RewardFailed(f"returned {type(value).__name__}, not a number") from e
        # A weighted sum of full marks may miss them by a rounding.
        number = next(
            (mark for mark in (self.passes_at, 0.0, 1.0) if abs(number - mark) <= NEAR), number
        )
        if not 0.0 <= number <= 1.0:  # NaN included
            raise RewardFailed(f"returned {number!r}, not a number in [0, 1]")
        return number

    def _listed(self, value: Any) -> list[Any]:
        """What a batched function returned, as a list; [] of anything else.

        A generator runs their code here.
        """
        if not isinstance(value, Iterable) or isinstance(value, str):
            return []
        try:
            return list(value)
        except (Exception, SystemExit) as e:
            raise RewardFailed(f"raised {_one_line(e)}") from e

    def _call(self, given: dict[str, Any]) -> Any:
        async def call() -> Any:
            try:
                value = self._function(**given)
                return await value if inspect.isawaitable(value) else value
            except asyncio.CancelledError:
                raise RewardFailed("was cancelled") from None
            except BaseException as e:  # SystemExit would take the loop along
                raise RewardFailed(f"raised {_one_line(e)}") from e

        with nullcontext() if self._is_async else self._one_call:
            loop = self._running()
            future = asyncio.run_coroutine_threadsafe(call(), loop)
            try:
                return future.result(self.timeout)
            except TimeoutError:
                future.cancel()
                self._leave_if_stuck(loop)
                raise RewardFailed(f"took longer than {self.timeout:g} s") from None

    def _running(self) -> asyncio.AbstractEventLoop:
        """The event loop of the calls, on a daemon thread: the process can end while a call never does."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="reward", daemon=True).start()
            return self._loop

    def _leave_if_stuck(self, loop: asyncio.AbstractEventLoop) -> None:
        """A thread cannot be ended from outside: one that does not return is left behind, and a fresh one started."""
        with suppress(TimeoutError):
            return asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(1.0)
        with self._lock:
            if self._loop is loop:
                self._loop = None
