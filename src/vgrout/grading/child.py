"""What a forked child does with one job. Everything that it reports is a claim, which the verifier judges.

Semantics, fixed here and tested:

- Strict run: the answer is a module that is imported (`__name__ == "answer"`), so a `__main__` block does not run. A
  SystemExit at module level ends the import but not the run, as long as the class is there; any other exception does.
  Each call gets a fresh `Solution()` and fresh arguments; an exception in a call is a wrong answer.
- Flawed run: the answer is a script (`__name__ == "__main__"`). SystemExit ends it with that status, after the
  functions registered with atexit; so does an uncaught exception, through sys.excepthook. The assertions follow.
- No threads and no processes: starting one raises. Sleeping returns at once. stdin is empty, stderr goes nowhere.
- Nothing secret is sent here: no expected value, no canonical solution. The flawed run claims its values too, with
  what their own `==` says of decoys. Detector D's child alone is told what a canonical solution returns, which runs in
  another child, behind the verifier. Both are sealed before the first instruction of the answer: no files, no clock.
"""

import _sitebuiltins
import atexit
import builtins
import io
import json
import marshal
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count, pairwise
from types import FunctionType
from typing import Any, NoReturn

from vgrout.grading import probe
from vgrout.grading.values import Decoys, decode_line, encode, plain_value

# Functions below see this copy: an answer that replaces builtins.zip changes nothing here.
__builtins__ = dict(vars(builtins))

HARNESS_EXIT = 77  # our own way out: an exit status of 0 is always the answer's doing

_dumps, _loads, _write, _read, _exit = json.dumps, marshal.loads, os.write, os.read, os._exit
_type_name = type.__dict__["__name__"].__get__


def prepare() -> None:
    """Once, in the fork server: the interpreter as an answer finds it."""
    # site is not loaded, and without it there is no exit() and quit()
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8")
    sys.argv = [""]
    sys.meta_path.insert(0, _Asyncio())
    atexit._clear()


class _Asyncio:
    """An importer of asyncio that replaces its loop by one without socket and selector. A timer is due as soon as
    nothing else is, just as sleeping returns at once elsewhere."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "asyncio.unix_events":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec: Any = next(filter(None, (finder.find_spec(name, path, target) for finder in others)))
        run = spec.loader.exec_module

        def run_and_replace(module: Any) -> None:
            run(module)
            self._replace(module)

        spec.loader.exec_module = run_and_replace
        return spec

    @staticmethod
    def _replace(module: Any) -> None:
        from asyncio.base_events import BaseEventLoop

        class Loop(BaseEventLoop):
            def __init__(self) -> None:
                super().__init__()
                self._selector, self._ahead = self, 0.0

            def select(self, timeout: float | None) -> list[Any]:
                self._ahead += timeout or 0.0
                return []

            def time(self) -> float:
                return super().time() + self._ahead

            def _process_events(self, event_list: list[Any]) -> None:
                pass

            def _write_to_self(self) -> None:
                pass

        for policy in ("_UnixDefaultEventLoopPolicy", "_DefaultEventLoopPolicy", "DefaultEventLoopPolicy"):
            if hasattr(module, policy):
                getattr(module, policy)._loop_factory = Loop


Job = dict[str, Any]  # as the verifier sends it
Names = dict[str, Any]  # the globals of a module


class _Connection:
    """Lines of JSON to the verifier, each behind the job's token; length-prefixed replies from it."""

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


SEALED = ("canonical", "told")  # kinds of jobs whose children are
_IMPORTED = re.compile(r"(?:import|from)[ \t]+([\w., \t]+)")  # once: compiling it takes as long as a fork


def main(data: bytes, connection_fd: int, shut: Callable[[], None]) -> NoReturn:
    """Run one job to its end; never returns. `shut` brings down the last layer of the sandbox."""
    job: Job = _loads(data)
    connection = _Connection(connection_fd, job["token"])
    if job["kind"] == "probe":
        shut()
        connection.send(_dumps((probe.leave if job["first"] else probe.attack)(job)))
        _exit(HARNESS_EXIT)
    namespace: Names = {"__name__": "answer" if job["kind"] in ("strict", "canonical") else "__main__"}
    namespace["__builtins__"] = builtins
    if job["setup"]:
        exec(_loads(job["setup"]), namespace)
    if job["kind"] in SEALED:
        _prepare_for_seal(job["code"])
    shut()
    try:
        try:
            code = compile(job["code"], "<answer>", "exec", dont_inherit=True)
        except SyntaxError:
            if job.get("otherwise", job["code"]) == job["code"]:
                raise
            code = compile(job["otherwise"], "<answer>", "exec", dont_inherit=True)
    except BaseException as e:
        connection.send(_dumps({"compiled": False, "error": _error_name(e)}))
        _exit(HARNESS_EXIT)
    # Sent before the answer's first instruction, so it cannot be forged.
    connection.send(f'{{"compiled": true, "tests": {"true" if _defines(code, job["test_function"]) else "false"}}}')
    kinds = {"strict": _strict, "flawed": _flawed, "detect": _detect, "told": _detect, "canonical": _canonical}
    kinds[job["kind"]](job, connection, code, namespace)
    _exit(HARNESS_EXIT)


def _prepare_for_seal(code: str) -> None:
    """Import what the code names, as long as files can be opened; then every clock is a counter, and no file opens."""
    for names in _IMPORTED.findall(code):
        for name in names.replace(",", " ").split():
            if name.partition(".")[0] in sys.stdlib_module_names and name != "antigravity":  # it opens a browser
                with suppress(Exception):
                    __import__(name)
    looks = count(1)
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"):
        vars(time)[name] = vars(time)[f"{name}_ns"] = lambda *_: next(looks)
    vars(time)["sleep"] = lambda _: None
    vars(builtins)["open"] = vars(io)["open"] = _open_nothing


def _open_nothing(file: Any, mode: str = "r", *_: Any, **__: Any) -> Any:
    """open() for a sealed child, so that tests that write a file go on: what they write is nowhere."""
    if not {*mode} & {*"wax"}:
        raise FileNotFoundError(file)
    return io.BytesIO() if "b" in mode else io.StringIO()


def _defines(code: Any, name: str) -> bool:
    """A function of that name at module level or in a class body?"""
    if not name:
        return False
    inner = [c for c in code.co_consts if hasattr(c, "co_consts")]
    return any(c.co_name == name or any(getattr(d, "co_name", "") == name for d in c.co_consts) for c in inner)


# --- calls -----------------------------------------------------------------------------------------------------------


def _build_nodes(value: Any, namespace: Names) -> Any:
    """Replace (Ellipsis, builder, values) by the nodes that the setup code's builder returns."""
    if type(value) is tuple and len(value) == 3 and value[0] is Ellipsis:
        return namespace[value[1]](value[2])
    if type(value) is list:
        return [_build_nodes(v, namespace) for v in value]
    if type(value) is tuple:
        return tuple(_build_nodes(v, namespace) for v in value)
    return value


def _load_call(blob: bytes, builders: Names) -> tuple[str | None, str, list[Any], dict[str, Any]]:
    """Class or None, name of the method or function, arguments, keyword arguments."""
    owner, name, args, kwargs, has_nodes = _loads(blob)
    if has_nodes:
        args = [_build_nodes(a, builders) for a in args]
        kwargs = {k: _build_nodes(v, builders) for k, v in kwargs.items()}
    return owner, name, args, kwargs


def _make_call(blob: bytes, namespace: Names, builders: Names) -> Any:
    owner, name, args, kwargs = _load_call(blob, builders)
    target = namespace[name] if owner is None else getattr(namespace[owner](), name)
    return target(*args, **kwargs)


def _node_values(value: Any, kind: str) -> Any:
    """A linked list as its values; a binary tree in level order without trailing gaps. Raises on cycles by length."""
    out: list[Any] = []
    if kind == "list":
        while value is not None:
            out.append(value.val)
            value = value.next
            if len(out) > 200_000:
                raise ValueError("cycle")
        return out
    row = [value]
    while row:
        below = []
        for node in row:
            out.append(None if node is None else node.val)
            if node is not None:
                below += [node.left, node.right]
        if len(out) > 200_000:
            raise ValueError("cycle")
        row = below if any(n is not None for n in below) else []
    while out and out[-1] is None:
        out.pop()
    return out


def _batches(n: int) -> list[tuple[int, int]]:
    """1, 1, 2, 4, … calls between two reports: a wrong first answer costs one call, a hundred right ones 8 reports."""
    cuts = [0, 1]
    while cuts[-1] < n:
        cuts.append(cuts[-1] * 2)
    cuts[-1] = n
    return [(a, b) for a, b in pairwise(cuts) if a < b]


# --- strict ----------------------------------------------------------------------------------------------------------


def _strict(job: Job, connection: _Connection, code: Any, namespace: Names) -> None:
    builders = dict(namespace)
    note = ""
    try:
        exec(code, namespace)
    except SystemExit as e:
        note = f"exit:{_status(e)}"
    except BaseException as e:
        connection.send(_dumps({"failed": _error_name(e)}))
        return
    calls, kinds = job["calls"], job["kinds"]
    for start, stop in _batches(len(calls)):
        claims = []
        for i in range(start, stop):
            try:
                value = _make_call(calls[i], namespace, builders)
                claims.append(encode(value if kinds[i] == "plain" else _node_values(value, kinds[i])))
            except BaseException as e:
                claims.append(_dumps({"e": note or _error_name(e)}))
                break
        text = f'{{"claims": [{", ".join(claims)}]}}'
        if stop == len(calls) or len(claims) < stop - start:
            connection.send(text)
            return
        connection.request(text)


def _canonical(job: Job, connection: _Connection, code: Any, namespace: Names) -> None:
    """One call of the canonical solution, with arguments that an answer's tests have claimed."""
    exec(code, namespace)
    args, kwargs = plain_value(job["arguments"])
    try:
        claim = encode(getattr(namespace["Solution"](), job["function"])(*args, **kwargs))
    except Exception as e:
        claim = _dumps({"e": _error_name(e)})
    connection.send(f'{{"claims": [{claim}]}}')


# --- flawed ----------------------------------------------------------------------------------------------------------


def _leave(status: int) -> NoReturn:
    """End as an interpreter does: atexit functions first, which may leave with another status."""
    try:
        atexit._run_exitfuncs()
    except SystemExit as e:
        status = _status(e)
    except BaseException:
        pass
    _exit(status)


def _status(error: SystemExit) -> int:
    code: Any = error.code
    return int.__and__(code, 0xFF) if issubclass(type(code), int) else 0 if code is None else 1


def _as_script(connection: _Connection, step: Callable[[], Any]) -> Any:
    """Run a part of the script. What would end an interpreter ends this process, with the same status."""
    try:
        return step()
    except SystemExit as e:
        _leave(_status(e))
    except BaseException as e:
        connection.send(_dumps({"raised": _error_name(e)}))
        if sys.excepthook is not sys.__excepthook__:  # the default one only prints, to nowhere
            try:
                sys.excepthook(type(e), e, e.__traceback__)
            except SystemExit as e2:
                _leave(_status(e2))
            except BaseException:
                pass
        _leave(1)


def _flawed(job: Job, connection: _Connection, code: Any, namespace: Names) -> None:
    builders = dict(namespace)
    _as_script(connection, lambda: exec(code, namespace))
    if job["mode"] in CHECKS:
        connection.send(_dumps({"channel": _accepts(CHECKS[job["mode"]], job, namespace, builders)}))
    _as_script(connection, lambda: _assertions(job, connection, namespace, builders))


def _assertions(job: Job, connection: _Connection, namespace: Names, builders: Names) -> None:
    """`assert call == expected`, under the returned object's own ==. The expected values stay with the verifier:
    it receives what was returned and what its == says of decoys, and replies whether the assertions would have held."""
    calls, kinds, decoys = job["calls"], job["kinds"], job["decoys"]
    for start, stop in _batches(len(calls)):
        values = [_make_call(blob, namespace, builders) for blob in calls[start:stop]]
        claims = [_node_claim(v, k, decoys) for v, k in zip(values, kinds[start:stop], strict=True)]
        if connection.request(f'{{"values": [{", ".join(claims)}]}}') != b"held":
            raise AssertionError


def _node_claim(value: Any, kind: str, decoys: Decoys) -> str:
    if kind != "plain":
        try:
            value = _node_values(value, kind)
        except Exception as e:
            return _dumps({"e": _error_name(e)})
    return encode(value, decoys)


# --- flawed checks with a function of their own -----------------------------------------------------------------------

Check = Callable[[Job, Names, Names], bool]
CHECKS: dict[str, Check] = {}  # mode → its check


def flawed_check(function: FunctionType) -> FunctionType:
    """Register the check of the mode with the function's name.

    It is called when the script has run, before the assertions, with the job (its "marker", its "calls"), the script's
    names and the setup code's names. True accepts the answer; anything else, exceptions included, refuses it.
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
    return _call_tests(namespace, job["marker"]) == "returned"


@flawed_check
def sentinel(job: Job, namespace: Names, builders: Names) -> bool:
    """Is the attribute truthy on a fresh instance, or after the first test's call on it? A method does not count."""

    def is_set(instance: Any) -> bool:
        try:
            flag = getattr(instance, job["marker"])
            return not callable(flag) and bool(flag)
        except BaseException:
            return False

    instance = namespace["Solution"]()
    if is_set(instance):
        return True
    owner, method, args, kwargs = _load_call(job["calls"][0], builders)
    if owner is not None:
        with suppress(BaseException):
            getattr(instance, method)(*args, **kwargs)
    return is_set(instance)


# A new check goes here: its name is the mode's.


# --- weak detectors --------------------------------------------------------------------------------------------------


def _find_test(namespace: Names, name: str) -> tuple[Any, type | None]:
    """The announced function and, where it is a method, its class; a function conjured up by __getattr__ is none."""
    top = namespace.get(name)
    if top is not None and callable(top):
        return top, None
    cls = namespace.get("Solution")
    if isinstance(cls, type):
        for base in cls.__mro__[:-1]:
            if name in vars(base):
                return vars(base)[name], cls
    return None, None


def _call_tests(namespace: Names, name: str) -> str:
    """ "returned", "raised", or "absent" """
    function, cls = _find_test(namespace, name)
    if function is None:
        return "absent"
    try:
        getattr(cls(), name)() if cls is not None else function()
    except BaseException:
        return "raised"
    return "returned"


def _detect(job: Job, connection: _Connection, code: Any, namespace: Names) -> None:
    """The answer's own test function against its own solution, a stub that returns 0, or, sealed, the canonical one."""
    other: type | None = None
    if job["against"] == "canonical":
        other = type("Solution", (), {job["function"]: _elsewhere(connection)})
    elif job["against"] == "stub":
        other = type("Solution", (), {job["function"]: lambda self, *args, **kwargs: 0})
    try:
        exec(code, namespace)
    except BaseException as e:
        if other is None:
            connection.send(_dumps({"raised": _error_name(e)}))
            return
        # Another solution is tried: that the module fails with its own does not matter.
    if other is not None:
        name = job["test_function"]
        function, cls = _find_test(namespace, name)
        if cls is not None:  # a method: it moves to the other solution
            setattr(other, name, function)
        namespace["Solution"] = other
    connection.send(_dumps({"tests": _call_tests(namespace, job["test_function"])}))


def _elsewhere(connection: _Connection) -> Callable[..., Any]:
    """A method that runs in another child, by way of the verifier: arguments and result cross as plain values."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        claim = decode_line(connection.request(f'{{"call": {encode([list(args), kwargs])}}}'))
        if type(claim) is dict and "e" in claim:
            error = getattr(builtins, claim["e"], None)
            raise error if isinstance(error, type) and issubclass(error, Exception) else Exception(claim["e"])
        try:
            return plain_value(claim)
        except ValueError:  # a result without a plain form: nothing is known
            _exit(HARNESS_EXIT)

    return method
