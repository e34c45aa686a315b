"""Functions of a user's own, named as `module:function`: how they are imported, called, and what they may return.

    def reward(completion, info):                              # verifiers: arguments by name; async def as well
        return float(info["func_name"] in completion)          # in [0, 1]

    def reward(prompts, completions, **columns): return [...]  # TRL: lists, of one entry or a group's

They are trusted code and run in this process. What they may ask for by name is the environment's to say. Standard
library only.
"""

import asyncio
import importlib.util
import inspect
import itertools
import math
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from vgrout.ground.data import Task
from vgrout.ground.io import Refused, file_sha256, is_own, printable

T = TypeVar("T")

# seconds before a function is asked again; twice as long each time
PAUSE, LONGEST_PAUSE = 0.1, 30.0
TIMEOUT = 60.0  # seconds per call: a judge over a network answers in a few, its retries included
LARGEST = 1e6  # of a score, either way, where it may lie outside [0, 1]
NEAR = 1e-9  # a score this close to 0, 1 or the threshold is meant to be it
BATCHED = {"prompt": "prompts", "completion": "completions"}  # TRL's names


class RewardFailed(Exception):
    """There is no score for an answer: a function raised, took too long, or returned no number that it may."""

    scorer: "Scorer"  # that failed

    @property
    def line(self) -> str:
        """The reason, behind the flag and the name of what failed."""
        return f"{self.scorer.flag} {self.scorer.name} {self}"


class Failures:
    """Logs a function's first failure with its place in somebody's file, then their number at the
    end. Thread-safe."""

    closed = False  # no call that failed is made again

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._lock = threading.Lock()

    def failed(self, e: RewardFailed) -> None:
        """A call has failed, whether it is made again or not."""
        # not above: the sandbox's own tests have the standard library only
        from loguru import logger

        name = f"{e.scorer.flag} {e.scorer.name}"
        with self._lock:
            self._count[name] += 1
            times = self._count[name]
        if times == 1:
            logger.warning(f"{printable(e.line)} ({e.scorer.where}); further failures are counted")
            logger.opt(exception=e.__cause__).debug(f"{name}: its first failure")

    def ended(self) -> None:
        """No function is called any more."""
        with self._lock:
            count, self._count = self._count, Counter()
        if not count:
            return
        from loguru import logger

        for name, times in count.items():
            logger.warning(f"{name} failed {times:,} time{'s' * (times != 1)} in all")


class Scorer(Generic[T]):
    """What gives answers scores: a function of a user's own, or a taskset's rewards together."""

    name: str
    flag: str  # that names it
    batched = False  # whether one call gives the scores of all answers to a prompt

    @property
    def where(self) -> str:
        """Its file, with the line where that is known."""
        raise NotImplementedError

    def called(self, task: Any, answers: Sequence[str]) -> list[T]:
        """The scores of all answers to a prompt, or of a single one where it is not `batched`.

        Raises RewardFailed with the reason, one line.
        """
        raise NotImplementedError

    def scores(
        self,
        task: Any,
        answers: Sequence[str],
        retries: int | None = 0,
        failures: Failures | None = None,
    ) -> list[T | RewardFailed]:
        """For each answer to a prompt its score, or why it has none.

        retries: how often a call that failed is made again; None: until `failures`, which is told of each, is closed.
        """

        def asked(some: Sequence[str]) -> list[T | RewardFailed]:
            for times in itertools.count():
                try:
                    return [*self.called(task, some)]
                except RewardFailed as e:
                    e.scorer = self
                    if failures is not None:
                        failures.failed(e)
                    if times == retries or (failures is not None and failures.closed):
                        return [e] * len(some)
                time.sleep(min(PAUSE * 2**times, LONGEST_PAUSE))
            raise AssertionError("counting has no end")

        if self.batched or len(answers) == 1:
            return asked(answers)
        pool = ThreadPoolExecutor(len(answers))
        try:
            return [score for (score,) in pool.map(asked, ([answer] for answer in answers))]
        finally:
            pool.shutdown(wait=False)


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


# ── modules of a user's own, which may be edited while the process lives, as in a notebook

BEGAN = time.time()
_AS_LOADED: dict[str, str] = {}  # module → sha256 of its file as it was loaded


def forget_edited(modules: Sequence[str]) -> None:
    """Have these modules, and all of the user's own in the same folders, loaded anew if one of them was edited since it
    was loaded. Call it before a run hashes their files, and not while one is under way."""
    before = _own_files()
    for name in modules:
        with suppress(Exception, SystemExit):  # `import_function` will say so
            _import(name)
    files = _own_files()
    named: set[Path] = set()  # the folders of these modules, or of the packages that they are in
    for name in files.keys() & {*modules}:
        above = name.count(".") + (files[name].stem == "__init__")
        named.add(files[name].parents[above])
    near = {name for name, file in files.items() if named & {*file.parents}}
    edited = False
    for name in near:
        file = files[name]
        then, now = _AS_LOADED.get(name), file_sha256(file)
        _AS_LOADED[name] = now
        # a module that was imported elsewhere may have been read before its file was written
        edited |= then != now if then else name in before and file.stat().st_mtime >= BEGAN
    for name in near if edited else ():
        del sys.modules[name]
        package, _, child = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).pop(child, None)
        with suppress(OSError):  # it has the time in whole seconds: a quick edit looks the same
            os.unlink(importlib.util.cache_from_source(files[name]))


def _own_files() -> dict[str, Path]:
    """The user's own modules that are loaded, each with its file. What a notebook or a script has defined itself stays
    as it is."""
    files: dict[str, Path] = {}
    for name, module in [*sys.modules.items()]:
        file = Path(getattr(module, "__file__", None) or "")
        if name != "__main__" and file.is_file() and is_own(str(file)):
            files[name] = file
    return files


def _import(name: str) -> ModuleType:
    """Import a module; the working directory is searched too."""
    search_here()
    return importlib.import_module(name)


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
    module, _, attribute = name.partition(":")
    try:
        function = getattr(_import(module), attribute)
        if not callable(function):
            raise TypeError("it is not a function")
    except (Exception, SystemExit) as e:
        how = ""
        if module.endswith(".py"):
            as_module = module.removesuffix(".py").replace("/", ".").lstrip(".")
            how = f"; give {form}, here {as_module}:{attribute}"
        elif not attribute:
            how = f"; give {form}"
        elif isinstance(e, ModuleNotFoundError) and e.name == module.partition(".")[0]:
            how = f"; searched: {Path.cwd()}, and what is installed"
        raise Refused(f"{flag} {name}: cannot be imported ({in_one_line(e)}){how}") from e
    return function


def source_of(own: object) -> Path | None:
    """The file that a class or a function was written in; None: there is none, as in a notebook."""
    try:
        file = inspect.getsourcefile(own)  # ty: ignore[invalid-argument-type]
    except (OSError, TypeError):
        return None
    return Path(file) if file and Path(file).is_file() else None


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
            failed = _raised(e)
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


def _raised(e: BaseException) -> RewardFailed:
    return RewardFailed(f"raised {in_one_line(e)}")


class ScoringFunction(Scorer[float]):
    """A loaded function that scores answers, in [0, 1] or, where it is not `bounded`, by any finite number.

    Thread-safe. A plain function is called by one thread at a time, always the same one, so that it may run an event
    loop of its own or hold a connection; an async function is awaited for several answers at once.
    """

    def __init__(
        self,
        name: str,
        arguments: Callable[[Any, str], dict[str, object]],
        *,
        flag: str,
        passes_at: float = 1.0,
        timeout: float = TIMEOUT,
        bounded: bool = True,
    ) -> None:
        """name: module:function. arguments: makes of a task and an answer all that it may ask for, afresh for each
        call, so that it may change them. flag: that names it. passes_at: score
        from which on an answer counts as passed. timeout: seconds per call. bounded: whether a score has to lie in
        [0, 1].

        Raises:
            Refused: one line: it cannot be imported.
        """
        self.name, self.flag = name, flag
        self.passes_at, self.timeout, self.bounded = passes_at, timeout, bounded
        self._arguments = arguments
        self._function = import_function(name, flag)
        try:
            parameters = inspect.signature(self._function).parameters.values()
            # a package may hand on what another of its files defines
            written = source_of(inspect.unwrap(self._function))
            module = sys.modules[name.partition(":")[0]]
            self.file = written if written and is_own(str(written)) else Path(str(module.__file__))
            # a resume sees by the hash whether it has changed
            self.sha256 = file_sha256(self.file)
        except (TypeError, ValueError, AttributeError, OSError) as e:
            raise Refused(
                f"{flag} {name}: should be a function in a file of your own ({in_one_line(e)})"
            ) from None
        self.batched = any(p.name in BATCHED.values() for p in parameters)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._asked_for = {p.name for p in by_name}
        # the arguments that it cannot do without
        self.required = frozenset(p.name for p in by_name if p.default is p.empty)
        is_coroutine = inspect.iscoroutinefunction
        self._is_async = is_coroutine(self._function) or is_coroutine(type(self._function).__call__)
        self._one_call = threading.Lock()
        self._thread = _Thread()
        self._awaiter = Awaiter()

    def __reduce__(self) -> tuple[object, ...]:
        """Another rank imports it by itself."""
        flags = {"flag": self.flag, "passes_at": self.passes_at, "timeout": self.timeout}
        made = partial(ScoringFunction, **flags, bounded=self.bounded)
        return made, (self.name, self._arguments)

    @property
    def where(self) -> str:
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        return f"{self.file.name}, line {code.co_firstlineno}" if code else self.file.name

    @property
    def described(self) -> str:
        """It and its file, for the plan."""
        return f"{self.name} of {self.file}, sha256 {self.sha256[:12]}"

    def _parameter(self, name: str) -> str:
        """The name under which a function of this kind asks for an argument."""
        return BATCHED.get(name, name) if self.batched else name

    def called(self, task: Any, answers: Sequence[str]) -> list[float]:
        assert self.batched or len(answers) == 1, f"{self.name} is asked about one answer at a time"
        columns = [self._arguments(task, answer) for answer in answers]
        given: dict[str, object] = {}
        for name in columns[0]:
            parameter = self._parameter(name)
            if self._takes_all or parameter in self._asked_for:
                values = [of_answer[name] for of_answer in columns]
                given[parameter] = values if self.batched else values[0]
        value = self._call(given)
        return [self._number(one) for one in (self._list(value, len(answers)))]

    def _list(self, value: object, n: int) -> list[object]:
        """What a call for n answers returned, for each of them. A generator runs its code here."""
        if not self.batched:
            return [value]
        try:
            found = (
                list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
            )
        except (Exception, SystemExit) as e:
            raise _raised(e) from e
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

    def _call(self, given: Mapping[str, object]) -> object:
        """What the function returns. Raises RewardFailed where it raises or takes too long."""
        if self._is_async:
            return self._awaiter.result(self._function(**given), self.timeout)
        with self._one_call:
            future = self._thread.submit(lambda: self._function(**given))
            try:
                value = _in_time(future, self.timeout)
            except TimeoutError:
                self._thread = _Thread()  # it cannot be ended from outside: it is left behind
                raise RewardFailed(f"took longer than {self.timeout:g} s") from None
        return self._awaiter.result(value, self.timeout) if inspect.isawaitable(value) else value


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
    error = future.exception(timeout)  # while it waits, Ctrl-C is nothing that the function raised
    if error is None:
        return future.result()
    if isinstance(error, RewardFailed):
        raise error
    raise _raised(error) from error


class _Thread:
    """A daemon thread that makes one call after another: the process can end while a call never does. It begins with
    the first one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._runs = False

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Make this call, after those that were submitted before."""
        if not self._runs:
            threading.Thread(target=self._serve, name="reward", daemon=True).start()
            self._runs = True
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
