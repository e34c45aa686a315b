"""Functions of a user's own, named as `module:function`: how they are imported, called, and what they may return.

    def reward(completion, info):                              # verifiers: arguments by name; async def as well
        return float(info["func_name"] in completion)          # in [0, 1]

    def reward(prompts, completions, **columns): return [...]  # TRL: lists, of one entry or a group's

They are trusted code and run in this process. What they may ask for by name is the environment's to say. Standard
library only.
"""

import asyncio
import hashlib
import importlib
import inspect
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from vgrout.data import Task
from vgrout.errors import Refused

T = TypeVar("T")

# seconds before a function is asked again; twice as long each time
PAUSE, LONGEST_PAUSE = 0.1, 30.0
TIMEOUT = 60.0  # seconds per call: a judge over a network answers in a few, its retries included
LARGEST = 1e6  # of a score, either way, where it may lie outside [0, 1]
NEAR = 1e-9  # a score this close to 0, 1 or the threshold is meant to be it
BATCHED = {"prompt": "prompts", "completion": "completions"}  # TRL's names


class RewardFailed(Exception):
    """The function gave no score for an answer: it raised, took too long, or returned no number that it may."""

    where = ""  # FILE, line N of the function, where that is known


class Scoring(Protocol):
    """What gives answers scores: a function, or a package's rewards together."""

    @property
    def flag(self) -> str:
        """The flag that names it."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> str:
        """Its file, with the line where that is known."""
        ...


class FailureObserver:
    """Is told of every failure of a function, also where it is asked again and answers. This one does nothing."""

    def failed(self, function: Scoring, e: RewardFailed) -> None:
        """A call has failed."""

    def ended(self) -> None:
        """The function is not called any more."""


NO_OBSERVER = FailureObserver()


def weights_of(named: str, flag: str) -> dict[str, float]:
    """The functions of a list `module:function=weight …`, each with its weight; 1 where it names none.

    Raises:
        Refused: one line: a function is there twice, or a weight is no number.
    """
    weights: dict[str, float] = {}
    for word in named.replace(",", " ").split():
        name, weighted, given = word.partition("=")
        try:
            weight = float(given) if weighted else 1.0
        except ValueError:
            weight = math.nan
        if not abs(weight) <= LARGEST:  # NaN included
            raise Refused(
                f"{flag} {word}: its weight should be a number up to a million either way, as in {name}=0.5"
            )
        if name in weights:
            raise Refused(f"{flag}: {name} is there twice; name it once")
        weights[name] = weight
    if weights and not any(weights.values()):
        raise Refused(f"{flag} {named}: every weight is 0, so no answer would be rewarded")
    return weights


def search_here() -> None:
    """Have modules of the working directory found: a script lacks it, `python -m` does not."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()


def import_function(name: str, flag: str, form: str = "module:function") -> Callable[..., Any]:
    """The function, or class, that "module:function" names; the working directory is searched too.

    form: how the flag names it, for the message.

    Raises:
        Refused: one line: it cannot be imported or called.
    """
    search_here()
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
        if not callable(function):
            raise TypeError("it is not a function")
    except (Exception, SystemExit) as e:
        how = f"give {form}"
        if module.endswith(".py"):
            as_module = module.removesuffix(".py").replace("/", ".").lstrip(".")
            how += f", here {as_module}:{attribute}"
        raise Refused(f"{flag} {name}: cannot be imported ({in_one_line(e)}); {how}") from e
    return function


def rounded_to(number: float, marks: Iterable[float]) -> float:
    """The mark that a score is meant to be: a weighted sum of full marks may miss them by a rounding."""
    for mark in marks:
        if abs(number - mark) <= NEAR:
            return mark
    return number


def scorer(name: str, flag: str) -> Callable[[Task, str], float]:
    """The function that "module:function" names, from a prompt and an answer, two texts, to a number.

    Raises:
        Refused: one line: it cannot be imported; or, when it is called, it raises or returns no number.
    """
    function = import_function(name, flag)

    def score(task: Task, text: str) -> float:
        failed: RewardFailed
        try:
            number = as_float(function(task.messages[-1]["content"], text))
        except RewardFailed as e:
            failed = e
        except (Exception, SystemExit) as e:  # one's own function may raise anything
            failed = RewardFailed(f"raised {in_one_line(e)}")
            failed.__cause__ = e
        else:
            if math.isfinite(number):
                return number
            failed = RewardFailed(f"returned {number}")
        raise Refused(
            f"{flag} {name}: asked about problem {task.id}, it {failed}; it should return a number"
        ) from failed.__cause__

    return score


def as_float(value: object) -> float:
    """What a function returned, as a number: a text is none, even if it reads like one.

    Raises:
        RewardFailed: it is no number, or a whole one too large for a float.
    """
    try:
        return float("" if isinstance(value, str | bytes) else value)  # ty: ignore[invalid-argument-type]
    except OverflowError as e:
        raise RewardFailed("returned a number too large for a float") from e
    except Exception as e:  # of a class's own __float__
        raise RewardFailed(f"returned {type(value).__name__}, not a number") from e


def in_one_line(e: BaseException) -> str:
    """An exception as a message may quote it."""
    text = "".join(c if c.isprintable() else " " for c in f"{type(e).__name__}: {e}")
    return text[:120].rstrip(": ")


# what Python says where a text is taken for a message, or for a list of them
OF_MESSAGES = ("string indices must be integers", "'str' object has no attribute 'get'")


def _raised(e: BaseException) -> RewardFailed:
    """What a function raised. One that was written for TRL's conversations takes a completion for a list of messages;
    it is told what a completion is here."""
    said = f"raised {in_one_line(e)}"
    if isinstance(e, TypeError | AttributeError) and str(e).startswith(OF_MESSAGES):
        said += '; prompts and completions are texts here: write completion for completion[0]["content"]'
    return RewardFailed(said)


class ScoringFunction:
    """A loaded function that scores answers, in [0, 1] or, where it is not `bounded`, by any finite number.

    Thread-safe. A plain function is called by one thread at a time, always the same one, so that it may run an event
    loop of its own or hold a connection; an async function is awaited for several answers at once.
    """

    def __init__(
        self,
        name: str,
        names: Collection[str] | None,
        *,
        flag: str,
        passes_at: float = 1.0,
        timeout: float = TIMEOUT,
        bounded: bool = True,
    ) -> None:
        """name: module:function. names: the arguments that it may ask for; None: not known yet. passes_at: an answer
        with at least this score counts as passed. timeout: seconds per call. bounded: whether a score has to lie in
        [0, 1].

        Raises:
            Refused: one line: it cannot be imported, or asks for other arguments.
        """
        self.name, self.flag = name, flag
        self.passes_at, self.timeout, self.bounded = passes_at, timeout, bounded
        self._names = names
        self._function = import_function(name, flag)
        try:
            parameters = inspect.signature(self._function).parameters.values()
            self.file = Path(str(sys.modules[name.partition(":")[0]].__file__))
            # a resume sees by the hash whether it has changed
            self.sha256 = hashlib.sha256(self.file.read_bytes()).hexdigest()
        except (TypeError, ValueError, AttributeError, OSError) as e:
            raise Refused(
                f"{flag} {name}: should be a function in a file of your own ({in_one_line(e)})"
            ) from None
        self.batched = any(p.name in BATCHED.values() for p in parameters)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._asked_for = {
            p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        if names is not None:
            self._require_names(parameters, {self._parameter(n) for n in names})
        is_coroutine = inspect.iscoroutinefunction
        self._is_async = is_coroutine(self._function) or is_coroutine(type(self._function).__call__)
        self._lock, self._one_call = threading.Lock(), threading.Lock()
        self._thread: _Thread | None = None
        self._awaiter = Awaiter()

    def __reduce__(self) -> tuple[object, ...]:
        """Another rank imports it by itself."""
        flags = (self.flag, self.passes_at, self.timeout, self.bounded)
        return _loaded, (self.name, self._names, *flags)

    @property
    def required(self) -> frozenset[str]:
        """The arguments that it cannot do without."""
        parameters = inspect.signature(self._function).parameters.values()
        return frozenset(p.name for p in parameters if p.default is p.empty) & self._asked_for

    @property
    def asked_for(self) -> frozenset[str]:
        """The arguments that it names, by the names of columns."""
        columns = {batched: name for name, batched in BATCHED.items()}
        return frozenset(columns.get(name, name) for name in self._asked_for)

    @property
    def where(self) -> str:
        """FILE, line N of the function."""
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        return f"{self.file.name}, line {code.co_firstlineno}" if code else self.file.name

    def _require_names(
        self, parameters: Iterable[inspect.Parameter], legal: Collection[str]
    ) -> None:
        """Raises Refused where the function needs an argument that it is not given, or cannot be given by name."""
        unknown = set[str]()
        for p in parameters:
            variable = p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            if not variable and p.default is p.empty and p.name not in legal:
                unknown.add(p.name)
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if asked := sorted(unknown) or positional:
            raise Refused(
                f"{self.flag} {self.name}: asks for {', '.join(asked)}; arguments are given by name, and may be "
                + ", ".join(sorted(legal))
            )

    def _parameter(self, name: str) -> str:
        """The name under which a function of this kind asks for an argument."""
        return BATCHED.get(name, name) if self.batched else name

    def score_of(
        self,
        arguments: Callable[[], Mapping[str, object]],
        retries: int | None = 0,
        gives_up: Callable[[], bool] = lambda: False,
        observer: FailureObserver = NO_OBSERVER,
    ) -> float:
        """The score of an answer. Raises RewardFailed with the reason, one line.

        arguments: makes all that the function may ask for, afresh for each call, so that it may change them.
        retries: how often it is asked again after a failure; None: until `gives_up`. observer: is told of each failure.
        """
        (score,) = self.scores_of([arguments], retries, gives_up, observer)
        return score

    def scores_of(
        self,
        answers: Sequence[Callable[[], Mapping[str, object]]],
        retries: int | None = 0,
        gives_up: Callable[[], bool] = lambda: False,
        observer: FailureObserver = NO_OBSERVER,
    ) -> list[float]:
        """The scores of several answers, by one call of a function that takes lists. Otherwise as `score_of`."""
        assert self.batched or len(answers) == 1, "one call for each answer"

        def call() -> list[float]:
            value = self._call(self._given([arguments() for arguments in answers]))
            return [self._number(one) for one in self._each(value, len(answers))]

        return asked_again(call, retries, gives_up, partial(observer.failed, self))

    def _given(self, arguments: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """What it asks for, of what there is for each answer."""
        given: dict[str, object] = {}
        for name in arguments[0]:
            parameter = self._parameter(name)
            if self._takes_all or parameter in self._asked_for:
                values = [of_answer[name] for of_answer in arguments]
                given[parameter] = values if self.batched else values[0]
        return given

    def _each(self, value: object, n: int) -> list[object]:
        """What a call for n answers returned, for each of them."""
        if not self.batched:
            return [value]
        found = self._listed(value)
        if len(found) != n:
            of = "one number for one completion" if n == 1 else f"{n} numbers for {n} completions"
            raise RewardFailed(f"returned no list with {of}")
        return found

    def _number(self, value: object) -> float:
        """A returned value as a score. Raises RewardFailed where it is none."""
        number = rounded_to(as_float(value), (self.passes_at, 0.0, 1.0))
        if self.bounded and not 0.0 <= number <= 1.0:  # NaN included
            raise RewardFailed(f"returned {number!r}, not a number in [0, 1]")
        if not abs(number) <= LARGEST:
            raise RewardFailed(f"returned {number!r}, not a finite number")
        return number

    def _listed(self, value: object) -> list[object]:
        """What a batched function returned, as a list; [] of anything else. A generator runs their code here."""
        if not isinstance(value, Iterable) or isinstance(value, str):
            return []
        try:
            return list(value)
        except (Exception, SystemExit) as e:
            raise _raised(e) from e

    def _call(self, given: Mapping[str, object]) -> object:
        """What the function returns. Raises RewardFailed where it raises or takes too long."""
        if self._is_async:
            return self._awaiter.result(self._function(**given), self.timeout)
        with self._one_call:
            value = self._in_thread(lambda: self._function(**given))
        return self._awaiter.result(value, self.timeout) if inspect.isawaitable(value) else value

    def _in_thread(self, call: Callable[[], T]) -> T:
        """A plain call, on the thread that makes them all."""
        with self._lock:
            if self._thread is None:
                self._thread = _Thread()
            thread = self._thread
        try:
            return _in_time(thread.submit(call), self.timeout)
        except TimeoutError:
            with self._lock:  # it cannot be ended from outside: it is left behind
                self._thread = None
            raise RewardFailed(f"took longer than {self.timeout:g} s") from None


class Awaiter:
    """Awaits coroutines, several at once, on one event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def result(self, coroutine: Awaitable[T], timeout: float) -> T:
        """What a coroutine, or another awaitable, returns.

        Raises RewardFailed where it raises, or takes longer than `timeout` seconds.
        """
        with self._lock:
            if self._loop is None:
                # on a daemon thread: the process can end while a call never does
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="reward", daemon=True).start()
            loop = self._loop

        async def guarded() -> T:
            try:
                return await coroutine
            except asyncio.CancelledError:
                raise RewardFailed("was cancelled") from None
            except BaseException as e:  # SystemExit would take the loop along
                raise _raised(e) from e

        future = asyncio.run_coroutine_threadsafe(guarded(), loop)
        try:
            return _in_time(future, timeout)
        except TimeoutError:
            future.cancel()
            self._leave_if_stuck(loop)
            raise RewardFailed(f"took longer than {timeout:g} s") from None

    def _leave_if_stuck(self, loop: asyncio.AbstractEventLoop) -> None:
        """Replace an event loop that a call blocks: its thread cannot be ended from outside and is left behind."""
        with suppress(TimeoutError):
            return asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(1.0)
        with self._lock:
            if self._loop is loop:
                self._loop = None


def _in_time(future: "Future[T]", timeout: float) -> T:
    """The result. Raises TimeoutError, or RewardFailed where the function raised."""
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():  # the function raised one itself
            raise RewardFailed("raised TimeoutError") from None
        raise
    except RewardFailed:
        raise
    except BaseException as e:
        raise _raised(e) from e


def asked_again(
    call: Callable[[], T],
    retries: int | None,
    gives_up: Callable[[], bool],
    failed: Callable[[RewardFailed], object],
) -> T:
    """What a call returns, made again where it fails, after a pause. Raises RewardFailed for the last failure.

    retries: how often; None: until `gives_up`. failed: is told of each failure.
    """
    failures = 0
    while True:
        try:
            return call()
        except RewardFailed as e:
            failed(e)
            if failures == retries or gives_up():
                raise
        time.sleep(min(PAUSE * 2**failures, LONGEST_PAUSE))
        failures += 1


def _loaded(
    name: str,
    names: Collection[str] | None,
    flag: str,
    passes_at: float,
    timeout: float,
    bounded: bool,
) -> ScoringFunction:
    return ScoringFunction(
        name, names, flag=flag, passes_at=passes_at, timeout=timeout, bounded=bounded
    )


class _Thread:
    """A daemon thread that makes one call after another: the process can end while a call never does."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="reward", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Make this call, after those that were submitted before."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def _serve(self) -> None:
        # `asyncio.get_event_loop` gives the main thread a loop; code that was written there finds one here as well.
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as e:  # SystemExit would end the thread
                future.set_exception(e)
