"""What a forked child does with one job. Everything it reports is a claim: the judge decides what it is worth.

Semantics, fixed here and tested:

- Strict run: the answer is a module that is imported (`__name__ == "answer"`), so a `__main__` block does not run. A
  SystemExit at module level ends the import but not the run, as long as the class is there; any other exception does.
  Each call gets a fresh `Solution()` and fresh arguments; an exception in a call is a wrong answer.
- Flawed run: the answer is a script (`__name__ == "__main__"`). SystemExit ends it with that status, after the
  functions registered with atexit; so does an uncaught exception, through sys.excepthook. The assertions follow.
- No threads and no processes: starting one raises. Sleeping returns at once. stdin is empty, stderr goes nowhere.
- Expected values reach the flawed run only, and only after the calls they belong to have been made.
"""

import _sitebuiltins
import atexit
import builtins
import io
import json
import marshal
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, NoReturn

from vgrout.grading import probe
from vgrout.grading.values import encode

# Functions below see this copy: an answer that replaces builtins.zip changes nothing here.
__builtins__ = dict(vars(builtins))

HARNESS_EXIT = 77  # our own way out: an exit status of 0 is always the answer's doing

_dumps, _loads, _write, _read, _exit = json.dumps, marshal.loads, os.write, os.read, os._exit
_type_name = type.__dict__["__name__"].__get__


def prepare() -> None:
    """Once, in the zygote: the interpreter as an answer finds it."""
    # site is not loaded, and without it there is no exit() and quit()
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8")
    sys.argv = [""]
    atexit._clear()


class _Talk:
    """Lines of JSON to the judge, each behind the job's token; length-prefixed replies from it."""

    def __init__(self, fd: int, token: str) -> None:
        self.fd, self.token = fd, token

    def say(self, text: str) -> None:
        data = f"{self.token}{text}\n".encode()
        while data:
            data = data[_write(self.fd, data) :]

    def ask(self, text: str) -> bytes:
        """Say it and wait for the reply; leaves if the judge has heard enough."""
        self.say(text)
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
    return _type_name(type(error))


def main(job: bytes, talk_fd: int) -> NoReturn:
    """Run one job to its end; never returns."""
    spec = _loads(job)
    talk = _Talk(talk_fd, spec["token"])
    if spec["kind"] == "probe":
        _probe(spec, talk)
        _exit(HARNESS_EXIT)
    namespace: dict[str, Any] = {"__name__": "answer" if spec["kind"] == "strict" else "__main__"}
    namespace["__builtins__"] = builtins
    if spec["setup"]:
        exec(_loads(spec["setup"]), namespace)
    try:
        code = compile(spec["code"], "<answer>", "exec", dont_inherit=True)
    except BaseException as e:
        talk.say(_dumps({"compiled": False, "error": _error_name(e)}))
        _exit(HARNESS_EXIT)
    # Said before the answer's first instruction, so it cannot be forged.
    talk.say(f'{{"compiled": true, "tests": {"true" if _defines(code, spec["test_function"]) else "false"}}}')
    {"strict": _strict, "flawed": _flawed, "detect": _detect}[spec["kind"]](spec, talk, code, namespace)
    _exit(HARNESS_EXIT)


def _defines(code: Any, name: str) -> bool:
    """A function of that name at module level or in a class body?"""
    if not name:
        return False
    inner = [c for c in code.co_consts if hasattr(c, "co_consts")]
    return any(c.co_name == name or any(getattr(d, "co_name", "") == name for d in c.co_consts) for c in inner)


# --- calls -----------------------------------------------------------------------------------------------------------


def _build_nodes(value: Any, namespace: dict[str, Any]) -> Any:
    """Replace (Ellipsis, builder, values) by what the setup code's builder makes of it."""
    if type(value) is tuple and len(value) == 3 and value[0] is Ellipsis:
        return namespace[value[1]](value[2])
    if type(value) is list:
        return [_build_nodes(v, namespace) for v in value]
    if type(value) is tuple:
        return tuple(_build_nodes(v, namespace) for v in value)
    return value


def _make_call(blob: bytes, namespace: dict[str, Any], builders: dict[str, Any]) -> Any:
    owner, name, args, kwargs, has_nodes = _loads(blob)
    if has_nodes:
        args = [_build_nodes(a, builders) for a in args]
        kwargs = {k: _build_nodes(v, builders) for k, v in kwargs.items()}
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


def _strict(spec: dict[str, Any], talk: _Talk, code: Any, namespace: dict[str, Any]) -> None:
    builders = dict(namespace)
    note = ""
    try:
        exec(code, namespace)
    except SystemExit as e:
        note = f"exit:{e.code if type(e.code) is int else 0 if e.code is None else 1}"
    except BaseException as e:
        talk.say(_dumps({"failed": _error_name(e)}))
        return
    calls, kinds = spec["calls"], spec["kinds"]
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
            talk.say(text)
            return
        talk.ask(text)


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
    code = error.code
    return code & 0xFF if type(code) is int else 0 if code is None else 1


def _as_script(talk: _Talk, step: Callable[[], Any]) -> Any:
    """Run a part of the script. What would end an interpreter ends this process, with the same status."""
    try:
        return step()
    except SystemExit as e:
        _leave(_status(e))
    except BaseException as e:
        talk.say(_dumps({"raised": _error_name(e)}))
        if sys.excepthook is not sys.__excepthook__:  # the default one only prints, to nowhere
            try:
                sys.excepthook(type(e), e, e.__traceback__)
            except SystemExit as e2:
                _leave(_status(e2))
            except BaseException:
                pass
        _leave(1)


def _flawed(spec: dict[str, Any], talk: _Talk, code: Any, namespace: dict[str, Any]) -> None:
    builders = dict(namespace)
    _as_script(talk, lambda: exec(code, namespace))
    mode, marker = spec["mode"], spec["marker"]
    if mode == "run_tests":
        outcome = _run_tests(namespace, marker)
        talk.say(_dumps({"channel": outcome == "returned"}))
    elif mode == "sentinel":
        talk.say(_dumps({"channel": _sentinel(namespace, marker, spec["calls"][0], builders)}))
    _as_script(talk, lambda: _assertions(spec, talk, namespace, builders))


def _assertions(spec: dict[str, Any], talk: _Talk, namespace: dict[str, Any], builders: dict[str, Any]) -> None:
    """`assert call == expected`, under the returned object's own ==. A batch's expected values come after its calls."""
    calls, kinds = spec["calls"], spec["kinds"]
    held = True
    for start, stop in _batches(len(calls)):
        values = [_make_call(blob, namespace, builders) for blob in calls[start:stop]]
        for value, expected, kind in zip(values, _loads(talk.ask('{"reveal": true}')), kinds[start:stop], strict=True):
            if kind == "plain":
                held = bool(value == expected)
            else:
                build, same = ("list_node", "is_same_list") if kind == "list" else ("tree_node", "is_same_tree")
                held = bool(builders[same](value, builders[build](expected)))
            if not held:
                break
        if not held:
            break
    talk.say(_dumps({"end": held}))
    if not held:
        raise AssertionError


def _find_test(namespace: dict[str, Any], name: str) -> tuple[Any, type | None]:
    """The announced function: at module level, else defined in the class (not conjured up by __getattr__)."""
    top = namespace.get(name)
    if top is not None and callable(top):
        return top, None
    cls = namespace.get("Solution")
    if isinstance(cls, type):
        for base in cls.__mro__[:-1]:
            if name in vars(base):
                return vars(base)[name], cls
    return None, None


def _run_tests(namespace: dict[str, Any], name: str) -> str:
    """ "returned", "raised", or "absent" """
    function, cls = _find_test(namespace, name)
    if function is None:
        return "absent"
    try:
        getattr(cls(), name)() if cls is not None else function()
    except BaseException:
        return "raised"
    return "returned"


def _sentinel(namespace: dict[str, Any], name: str, first_call: bytes, builders: dict[str, Any]) -> bool:
    """Is the flag up on a fresh instance, or on one that has solved the first test case? A method is no flag."""

    def up(instance: Any) -> bool:
        try:
            flag = getattr(instance, name)
            return not callable(flag) and bool(flag)
        except BaseException:
            return False

    try:
        instance = namespace["Solution"]()
        if up(instance):
            return True
        owner, method, args, kwargs, has_nodes = _loads(first_call)
        if owner is not None:
            if has_nodes:
                args = [_build_nodes(a, builders) for a in args]
                kwargs = {k: _build_nodes(v, builders) for k, v in kwargs.items()}
            with suppress(BaseException):
                getattr(instance, method)(*args, **kwargs)
        return up(instance)
    except BaseException:
        return False


# --- weak detectors --------------------------------------------------------------------------------------------------


def _detect(spec: dict[str, Any], talk: _Talk, code: Any, namespace: dict[str, Any]) -> None:
    """The answer's own test function against another solution: its own, a stub that returns 0, or the canonical one."""
    other: type | None = None
    if spec["against"] == "canonical":
        scope = dict(namespace)
        exec(compile(spec["canonical"], "<canonical>", "exec", dont_inherit=True), scope)
        other = scope["Solution"]
    elif spec["against"] == "stub":
        other = type("Solution", (), {spec["function"]: lambda self, *args, **kwargs: 0})
    try:
        exec(code, namespace)
    except BaseException as e:
        if other is None:
            talk.say(_dumps({"raised": _error_name(e)}))
            return
        # Another solution is tried: what the module does with its own one at its end is beside the point.
    if other is not None:
        name = spec["test_function"]
        function, cls = _find_test(namespace, name)
        if cls is not None:  # a method: it moves to the other solution
            setattr(other, name, function)
        namespace["Solution"] = other
    talk.say(_dumps({"tests": _run_tests(namespace, spec["test_function"])}))


def _probe(spec: dict[str, Any], talk: _Talk) -> None:
    talk.say(_dumps(probe.attack(spec)))
