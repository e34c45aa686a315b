"""What a forked child does with one job. All that it reports is a claim, which the verifier judges.

Semantics, fixed here and tested:

- Strict run: the answer is a module that is imported (`__name__ == "answer"`), so a `__main__`
  block does not run. A SystemExit at module level ends the import of a part, but not the run, as
  long as the class is there. Any other exception ends the run, unless the answer has several parts
  and this one binds nothing of what the tests call. Each call gets a fresh `Solution()` and fresh
  arguments; an exception in a call is a wrong answer.
- Flawed run: the answer is a script (`__name__ == "__main__"`). SystemExit ends it with that
  status; so does an uncaught exception, through sys.excepthook. The assertions follow. However it
  ends, its end is that of an interpreter (`_leave`): atexit, `__del__`, and what is left in the
  buffers of files and streams.
- No threads and no processes: starting one raises. Sleeping returns at once. stdin is empty, stderr
  goes nowhere.
- No expected value is sent to an answer. The flawed run claims its values too, with what their own
  `==` says of decoys. Detector D's child alone is sent the canonical solution, after the answer's
  other children.
"""

import atexit
import builtins
import gc
import io
import json
import linecache
import marshal
import os
import resource
import selectors
import site
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn, TypedDict, cast

from vgrout.envs.code.grading import probe
from vgrout.envs.code.grading.extract import ANSWER_FILE, Part, bound_names, program
from vgrout.envs.code.grading.values import Decoys, encode

# The functions below see this copy: an answer that replaces builtins.zip changes nothing here.
__builtins__ = dict(vars(builtins))

MAX_NODES = 200_000  # of a list or tree
HARNESS_EXIT = 77  # our own way out: an exit status of 0 is always the answer's doing
FLUSH_FAILED = 120  # the status of an interpreter that could not flush its standard streams

# Bound here, so that an answer that replaces them in their modules changes nothing either.
_dumps, _loads = json.dumps, marshal.loads
_write, _read, _exit, _fstat = os.write, os.read, os._exit, os.fstat
_run_exit_functions = atexit._run_exitfuncs
_collect, _living_objects = gc.collect, gc.get_objects
_type_name = type.__dict__["__name__"].__get__
_mro = type.__dict__["__mro__"].__get__
_namespace_of = type.__dict__["__dict__"].__get__


class Job(TypedDict, total=False):
    """What the verifier sends (see `Verifier.prepare`); a kind of job has the keys that it needs."""

    token: str  # before each message, so that no answer's own output is one
    kind: str  # strict, flawed, detect or probe
    program: Sequence[tuple[int, str]]
    called: Sequence[str]
    setup: bytes  # marshal of the setup code, compiled
    calls: Sequence[bytes]
    kinds: Sequence[str]
    builders: Sequence[str]
    test_function: str
    mode: str
    marker: str
    decoys: Decoys
    function: str
    against: str  # own, stub or canonical
    canonical: Sequence[tuple[int, str]]
    first: bool  # of a probe


Names = dict[str, Any]  # the globals of a module


# --- The interpreter, as an answer finds it ------------------------------------------------------

# As `prepare` has left it, whatever an answer makes of it: "stderr", and threading's "_shutdown".
_prepared: dict[str, object] = {}
# Types without a `__del__`, of the objects that the fork server has, by their ids. They are kept, or
# a type of the answer's could get the address, and so the id, of one that has gone.
_without_finalizer: dict[int, type] = {}


def prepare() -> None:
    """Set the interpreter up, once, in the fork server."""
    # What an interpreter has of `site`, which is not run here: exit, quit, copyright, license, credits, help.
    site.setquit()
    site.setcopyright()
    site.sethelper()
    stdin = io.FileIO(0, "r", closefd=False)
    stdin.name = "<stdin>"
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(stdin), "utf-8")
    vars(sys.stdin)["mode"] = "r"
    # An answer that has captured its output restores sys.stdout from sys.__stdout__.
    sys.stdout = sys.__stdout__ = _unbuffered(1, "<stdout>")
    sys.stderr = sys.__stderr__ = _prepared["stderr"] = _unbuffered(2, "<stderr>")
    sys.argv = [ANSWER_FILE]
    sys.orig_argv = [sys.executable, ANSWER_FILE]
    vars(resource)["getrusage"] = _usage
    vars(selectors)["DefaultSelector"] = (
        selectors.PollSelector
    )  # epoll's watches are counted by user
    if sys.version_info < (3, 12):
        vars(sys)["exit"] = _exit_before_3_12
    sys.meta_path.insert(0, _Asyncio())
    atexit._clear()
    _prepared["_shutdown"] = vars(sys.modules["threading"])["_shutdown"]
    _note_types()


def _note_types() -> None:
    """Note the types of all living objects that have no `__del__`."""
    objects = _living_objects()
    kinds = {id(kind): kind for kind in map(type, objects)}
    for number in _finalizers(objects):
        del kinds[number]
    _without_finalizer.update(kinds)


def _unbuffered(fd: int, name: str) -> io.TextIOWrapper:
    """Text that is printed is written at once, so it is there when the process is killed."""
    raw = io.FileIO(fd, "w", closefd=False)
    raw.name = name
    stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
    vars(stream)["mode"] = "w"
    return stream


def _usage(who: int, /) -> resource.struct_rusage:
    """resource.getrusage: CPU times alone. The kernel's would tell whether a file was in memory."""
    user, system, *_ = os.times()
    if who == resource.RUSAGE_CHILDREN:  # there are none
        user = system = 0.0
    return resource.struct_rusage((user, system, *(0,) * 14))


def _exit_before_3_12(status: object = None, /) -> NoReturn:
    """sys.exit, for whose status an interpreter before 3.12 takes any tuple as it is: 1.

    Its own would hand us an exception made of the tuple's items: (0,) would read as 0.
    """
    raise SystemExit(status)


class _Asyncio:
    """An importer of asyncio that replaces its loop by one without socket and selector.

    A timer is due as soon as nothing else is, just as sleeping returns at once elsewhere.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "asyncio.unix_events":
            return None
        spec = self._found_by_others(name, path, target)
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            self._replace_loop(module)

        loader.exec_module = run_and_replace
        return spec

    def _found_by_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec:
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec:
                return spec
        raise ModuleNotFoundError(name)

    @staticmethod
    def _replace_loop(module: Any) -> None:
        # asyncio takes longer to import than most answers take to run: only where one imports it.
        from asyncio.base_events import BaseEventLoop

        class Loop(BaseEventLoop):
            def __init__(self) -> None:
                super().__init__()
                self._selector, self._ahead = self, 0.0

            def select(self, timeout: float | None) -> list[object]:
                self._ahead += timeout or 0.0
                return []

            def time(self) -> float:
                return super().time() + self._ahead

            def _process_events(self, event_list: list[object]) -> None:
                pass

            def _write_to_self(self) -> None:
                pass

        module.DefaultEventLoopPolicy._loop_factory = Loop


# --- One job -------------------------------------------------------------------------------------


class _Connection:
    """Lines of JSON to the verifier, each behind the job's token, and its replies with a length."""

    def __init__(self, fd: int, token: str) -> None:
        self.fd, self.token = fd, token

    def send(self, text: str) -> None:
        data = f"{self.token}{text}\n".encode()
        while data:
            data = data[_write(self.fd, data) :]

    def request(self, text: str) -> bytes:
        """Send and wait for the reply; ends the process if the verifier has closed its end."""
        self.send(text)
        size = int.from_bytes(self._exactly(4), "little")
        return self._exactly(size)

    def _exactly(self, n: int) -> bytes:
        parts = []
        while n > 0:
            part = _read(self.fd, min(n, 1 << 16))
            if not part:
                _exit(HARNESS_EXIT)
            parts.append(part)
            n -= len(part)
        return b"".join(parts)


def _error_name(error: BaseException) -> str:
    return str.encode(_type_name(type(error)), "ascii", "replace").decode()


def main(data: bytes, connection_fd: int) -> NoReturn:
    """Run one job to its end. Every layer of the sandbox is on, for a problem's setup code too."""
    job: Job = _loads(data)
    connection = _Connection(connection_fd, job["token"])
    if job["kind"] == "probe":
        run = probe.leave if job["first"] else probe.attack
        connection.send(_dumps(run(cast("probe.Spec", job))))
        _exit(HARNESS_EXIT)
    # Dataclasses and pickle find a module by its name, unittest and doctest by that of a script.
    module = ModuleType("answer" if job["kind"] == "strict" else "__main__")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    namespace: Names = vars(module)
    namespace["__builtins__"] = builtins
    namespace["__file__"] = ANSWER_FILE
    if job["setup"]:
        try:
            exec(_loads(job["setup"]), namespace)
        except BaseException as e:
            reason = f"{_error_name(e)}: {e}"[:200].rstrip(": ")
            connection.send(_dumps({"setup": f"setup code raises {reason}"}))
            _exit(HARNESS_EXIT)
    for builder in job["builders"]:
        if builder not in namespace:
            reason = f"its tests call {builder}, which its setup code should define"
            connection.send(_dumps({"setup": reason}))
            _exit(HARNESS_EXIT)
    try:
        parts = program(job["program"], job["called"])
    except BaseException as e:
        connection.send(_dumps({"compiled": False, "error": _error_name(e)}))
        _exit(HARNESS_EXIT)
    # So that inspect.getsource finds the answer, which lies in no file.
    lines = "\n".join([source for source, _ in parts]).splitlines(keepends=True)
    linecache.cache[ANSWER_FILE] = (0, None, lines, ANSWER_FILE)
    # Sent before the answer's first instruction, so it cannot be forged.
    tests = any(_defines(code, job["test_function"]) for _, code in parts)
    connection.send(f'{{"compiled": true, "tests": {"true" if tests else "false"}}}')
    kinds = {"strict": _strict, "flawed": _flawed, "detect": _detect}
    kinds[job["kind"]](job, connection, parts, namespace)
    _exit(HARNESS_EXIT)


def _defines(module: CodeType, name: str) -> bool:
    """Is there a function of that name at module level or in a class body?"""
    if not name:
        return False
    for definition in module.co_consts:
        if not hasattr(definition, "co_consts"):
            continue  # a constant, not the code of a function or of a class body
        if definition.co_name == name:
            return True
        for inner in definition.co_consts:
            if getattr(inner, "co_name", "") == name:
                return True
    return False


# --- Calls ---------------------------------------------------------------------------------------


def _build_nodes(value: Any, namespace: Names) -> Any:
    """Replace (Ellipsis, builder, values) by the nodes that the setup code's builder returns."""
    if type(value) is tuple and len(value) == 3 and value[0] is Ellipsis:
        return namespace[value[1]](value[2])
    if type(value) is list:
        return [_build_nodes(v, namespace) for v in value]
    if type(value) is tuple:
        return tuple(_build_nodes(v, namespace) for v in value)
    if type(value) is dict:
        return {k: _build_nodes(v, namespace) for k, v in value.items()}
    return value


def _load_call(blob: bytes, builders: Names) -> tuple[str, list[object], dict[str, object]]:
    """Name of the method, arguments, keyword arguments."""
    name, args, kwargs, has_nodes = _loads(blob)
    if has_nodes:
        args = [_build_nodes(a, builders) for a in args]
        kwargs = {k: _build_nodes(v, builders) for k, v in kwargs.items()}
    return name, args, kwargs


def _make_call(blob: bytes, namespace: Names, builders: Names) -> object:
    name, args, kwargs = _load_call(blob, builders)
    return getattr(namespace["Solution"](), name)(*args, **kwargs)


def _node_values(value: object, kind: str) -> list[object]:
    """The values of a linked list (kind "list") or of a binary tree (kind "tree").

    A tree is in level order: [] for no node and [value] for one, without trailing gaps. A cycle is
    one by its length: raises ValueError.
    """
    values = _list_values(value) if kind == "list" else _tree_values(value)
    if len(values) >= MAX_NODES:
        raise ValueError("cycle")
    if kind == "tree":
        while values and not values[-1]:
            values.pop()
    return values


def _list_values(node: Any) -> list[object]:
    values = []
    while node is not None and len(values) < MAX_NODES:
        values.append(node.val)
        node = node.next
    return values


def _tree_values(root: Any) -> list[object]:
    values = []
    level = [root]
    while level and len(values) < MAX_NODES:
        for node in level:
            values.append([] if node is None else [node.val])
        below = []
        for node in level:
            if node is not None:
                below.append(node.left)
                below.append(node.right)
        level = below if any(node is not None for node in below) else []
    return values


def _batches(n: int) -> list[tuple[int, int]]:
    """Bounds of 1, 1, 2, 4, … calls, between two reports.

    A wrong first answer costs one call, and a hundred right ones 8 reports.
    """
    batches = []
    start, stop = 0, 1
    while start < n:
        stop = min(stop, n)
        batches.append((start, stop))
        start, stop = stop, 2 * stop
    return batches


# --- The strict run ------------------------------------------------------------------------------


def _strict(job: Job, connection: _Connection, parts: list[Part], namespace: Names) -> None:
    builders = dict(namespace)
    exit_note = ""  # with which status the answer left at import: why a class may be missing
    for source, code in parts:
        try:
            exec(code, namespace)
        except SystemExit as e:
            exit_note = f"exit:{_status(e)}"
        except BaseException as e:
            if len(parts) == 1 or bound_names(source) & {*job["called"]}:
                connection.send(_dumps({"failed": _error_name(e)}))
                return
    calls, kinds = job["calls"], job["kinds"]
    for start, stop in _batches(len(calls)):
        claims = []
        for i in range(start, stop):
            try:
                value = _make_call(calls[i], namespace, builders)
                plain = value if kinds[i] == "plain" else _node_values(value, kinds[i])
                claims.append(encode(plain))
            except BaseException as e:
                claims.append(_dumps({"e": exit_note or _error_name(e)}))
                break
        text = f'{{"claims": [{", ".join(claims)}]}}'
        if stop == len(calls) or len(claims) < stop - start:
            connection.send(text)
            return
        connection.request(text)


# --- The flawed run ------------------------------------------------------------------------------


def _status(error: SystemExit) -> int:
    """The exit status that an interpreter ends with. What is no number is printed on stderr."""
    code: object
    try:
        code = error.code
    except BaseException:  # a property of the answer's
        code = error
    if code is None:
        return 0
    if issubclass(type(code), int):
        number = int.__add__(cast("int", code), 0)
        fits_in_a_long = -(1 << 63) <= number < 1 << 63
        return number & 0xFF if fits_in_a_long else 0xFF
    try:
        if sys.stderr is not None:
            print(code, file=sys.stderr)
    except BaseException:
        pass
    return 1


def _leave(status: int) -> NoReturn:
    """End as an interpreter does (Py_FinalizeEx), with this status unless something changes it.

    First what threading and atexit are to call, then the standard streams are flushed, and at last
    every object goes. What one of them raises is lost.
    """
    _quietly(_end_threads)
    _quietly(_run_exit_functions)
    flushed = _flush_streams()
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    _finalize_objects()
    _exit(status if flushed else FLUSH_FAILED)


def _end_threads() -> None:
    """Call what an interpreter's end calls in threading, where that would do anything."""
    threading = vars(sys.modules["threading"])
    end = threading["_shutdown"]
    if end is _prepared["_shutdown"] and not threading["_threading_atexits"]:
        only_this_one = len(threading["_active"]) == 1
        if only_this_one:
            return
    end()


def _quietly(call: Callable[..., object], *arguments: object) -> None:
    try:  # noqa: SIM105 an answer may replace what contextlib has
        call(*arguments)
    except BaseException:
        pass


def _flush_streams() -> bool:
    """Flush whatever is sys.stdout and sys.stderr. False: one of them could not be."""
    flushed = True
    for name in ("stdout", "stderr"):
        stream = vars(sys).get(name)
        if stream is None or _is_closed(stream):
            continue
        try:
            stream.flush()
        except BaseException:
            flushed = False
    return flushed


def _is_closed(stream: Any) -> bool:
    try:
        return bool(stream.closed)
    except BaseException:
        return False


# Files from the outside in. Each writes what is in its buffers into the one below it, which is to be
# open then.
_FILES = (
    (io.TextIOWrapper,),
    (object,),  # whatever else has a `__del__`, such as a file of gzip
    (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair),
    (io.FileIO,),
)

Finalizer = Callable[[object], object]


def _finalize_objects() -> None:
    """Call `__del__` of every object of the answer's that is left.

    That of a file closes it, which writes what is in its buffers. The fork server's own objects are
    frozen, and are not found here. A type is read from its own MRO: an object's `__class__` may
    lie.
    """
    if not _finalizers(_living_objects()):
        return
    _collect()  # what is garbage goes first, in the collector's order
    objects = _living_objects()
    finalizers = _finalizers(objects)
    in_order: list[list[tuple[Finalizer, object]]] = [[] for _ in _FILES]
    for item in objects:
        found = finalizers.get(id(type(item)))
        if found is not None:
            rank, finalizer = found
            in_order[rank].append((finalizer, item))
    for items in in_order:
        for finalizer, item in items:
            _quietly(finalizer, item)


def _finalizers(objects: list[object]) -> dict[int, tuple[int, Finalizer]]:
    """Of each of their types that has a `__del__`: when its objects go, and the function.

    The keys are the types' ids, the former an index of `_FILES`.
    """
    kinds = {id(kind): kind for kind in map(type, objects)}
    finalizers = {}
    for number, kind in kinds.items():
        if number in _without_finalizer:
            continue
        ancestors = _mro(kind)
        for ancestor in ancestors:
            finalizer = _namespace_of(ancestor).get("__del__")
            if finalizer is not None:
                finalizers[number] = _rank(ancestors), finalizer
                break
    return finalizers


def _rank(ancestors: tuple[type, ...]) -> int:
    for rank in (0, 2, 3, 1):  # everything is an object: last
        for kind in _FILES[rank]:
            if any(ancestor is kind for ancestor in ancestors):
                return rank
    raise AssertionError("object is an ancestor of every type")


def _as_script(connection: _Connection, step: Callable[[], object]) -> None:
    """Run a part of the script.

    What would end an interpreter ends this process, with the same status.
    """
    status = _status_after(connection, step)
    if status is not None:
        _leave(status)  # outside of any `except`: an interpreter has let go of the exception


def _status_after(connection: _Connection, step: Callable[[], object]) -> int | None:
    """The status that a part of the script ends the interpreter with; None if it ends nothing."""
    try:
        step()
    except SystemExit as e:
        return _status(e)
    except BaseException as e:
        connection.send(_dumps({"raised": _error_name(e)}))
        return _uncaught(e)
    return None


def _uncaught(error: BaseException) -> int:
    """The status after an uncaught exception, which sys.excepthook may change.

    The default hook only prints, which takes longer than most answers: it is called where somebody
    could see that.
    """
    try:
        if sys.excepthook is not sys.__excepthook__ or _stderr_is_redirected():
            sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as e:
        return _status(e)
    except BaseException:
        pass
    return 1


def _stderr_is_redirected() -> bool:
    """Does what is written to stderr go anywhere else than to /dev/null?"""
    return sys.stderr is not _prepared["stderr"] or not stat.S_ISCHR(_fstat(2).st_mode)


def _flawed(job: Job, connection: _Connection, parts: list[Part], namespace: Names) -> None:
    builders = dict(namespace)
    for _, code in parts:
        _as_script(connection, partial(exec, code, namespace))
    if job["mode"] in CHECKS:
        accepted = _accepts(CHECKS[job["mode"]], job, namespace, builders)
        connection.send(_dumps({"channel": accepted}))
    _as_script(connection, lambda: _assertions(job, connection, namespace, builders))
    _leave(HARNESS_EXIT)


def _assertions(job: Job, connection: _Connection, namespace: Names, builders: Names) -> None:
    """`assert call == expected`, under the returned object's own ==.

    The expected values stay with the verifier: it receives what was returned and what its == says
    of decoys, and replies whether the assertions would have held.
    """
    calls, kinds, decoys = job["calls"], job["kinds"], job["decoys"]
    for start, stop in _batches(len(calls)):
        values = [_make_call(blob, namespace, builders) for blob in calls[start:stop]]
        claims = []
        for value, kind in zip(values, kinds[start:stop], strict=True):
            claims.append(_node_claim(value, kind, decoys))
        if connection.request(f'{{"values": [{", ".join(claims)}]}}') != b"held":
            raise AssertionError


def _node_claim(value: object, kind: str, decoys: Decoys) -> str:
    if kind != "plain":
        try:
            value = _node_values(value, kind)
        except Exception as e:
            return _dumps({"e": _error_name(e)})
    return encode(value, decoys)


# --- Flawed checks with a function of their own --------------------------------------------------

Check = Callable[[Job, Names, Names], bool]
CHECKS: dict[str, Check] = {}  # mode → its check


def flawed_check(function: FunctionType) -> FunctionType:
    """Register the check of the mode with the function's name.

    It is called when the script has run, before the assertions, with the job (its "marker", its
    "calls"), the script's names and the setup code's names. True accepts the answer; anything else,
    exceptions included, refuses it.
    """
    CHECKS[function.__name__] = function
    return function


def _accepts(check: Check, job: Job, namespace: Names, builders: Names) -> bool:
    try:
        return check(job, namespace, builders) is True
    except BaseException:
        return False


@flawed_check
def run_tests(job: Job, namespace: Names, builders: Names) -> bool:
    """Does the announced test function return? What it returns does not matter."""
    return _tests_end(namespace, job["marker"]) == "returned"


@flawed_check
def sentinel(job: Job, namespace: Names, builders: Names) -> bool:
    """Is the attribute truthy on a fresh instance, or after the first test's call on it?

    A method does not count.
    """

    def is_set(instance: object) -> bool:
        try:
            flag = getattr(instance, job["marker"])
            return not callable(flag) and bool(flag)
        except BaseException:
            return False

    instance = namespace["Solution"]()
    if is_set(instance):
        return True
    method, args, kwargs = _load_call(job["calls"][0], builders)
    with suppress(BaseException):
        getattr(instance, method)(*args, **kwargs)
    return is_set(instance)


# A new check goes here: its name is the mode's.


# --- Weak detectors ------------------------------------------------------------------------------


def _find_test(namespace: Names, name: str) -> tuple[Any, type | None]:
    """The announced function and, where it is a method, its class.

    (None, None) if there is none; a function conjured up by __getattr__ is none.
    """
    top = namespace.get(name)
    if top is not None and callable(top):
        return top, None
    cls = namespace.get("Solution")
    if isinstance(cls, type):
        for base in cls.__mro__[:-1]:
            if name in vars(base):
                return vars(base)[name], cls
    return None, None


def _tests_end(namespace: Names, name: str) -> str:
    """How the function of that name ends: "returned", "failed" (an assertion), "raised"; "": there is none."""
    function, cls = _find_test(namespace, name)
    if function is None:
        return ""
    try:
        if cls is None:
            function()
        else:
            getattr(cls(), name)()
    except AssertionError:
        return "failed"
    except BaseException:
        return "raised"
    return "returned"


def _detect(job: Job, connection: _Connection, parts: list[Part], namespace: Names) -> None:
    """The answer's own test function against its own solution, against one that returns 0 (a stub),
    or against the canonical one."""
    against, solution = job["against"], job["function"]
    solve = _canonical_solution(job, namespace) if against == "canonical" else None
    try:
        for _, code in parts:
            exec(code, namespace)
    except BaseException:
        # With another solution it does not matter that the module fails with its own.
        if against == "own":
            return
    name = job["test_function"]
    if against == "stub":
        other = type("Solution", (), {solution: lambda self, *args, **kwargs: 0})
        function, cls = _find_test(namespace, name)
        if cls is not None:  # a method: it moves to the stub
            setattr(other, name, function)
        namespace["Solution"] = other
    if solve is not None:
        # The answer's class stays: its tests may have it under another name, or call its helpers.
        setattr(namespace["Solution"], solution, solve)
    connection.send(_dumps({"end": _tests_end(namespace, name)}))


def _canonical_solution(job: Job, setup: Names) -> Callable[..., object]:
    """The canonical solution as a method of any class. setup: the names of the setup code."""
    module = ModuleType("canonical")
    namespace: Names = vars(module)
    namespace.update(setup, __name__="canonical")
    main = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules["canonical"] = module  # it may look itself up
    for _, code in program(job["canonical"], job["called"]):
        exec(code, namespace)
    sys.modules["__main__"] = main

    def solve(self: object, *args: object, **kwargs: object) -> object:
        return getattr(namespace["Solution"](), job["function"])(*args, **kwargs)

    return solve
