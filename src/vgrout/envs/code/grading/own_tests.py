"""Detector D: an answer's own tests are read, never run, and what they expect is held against the canonical solution.

Read is what needs no line of the answer to be run: calls of the solution with literal arguments, compared with literals
in an `assert`, an `if …: raise` or a method of unittest; names bound to either, loops over literal tables, and the
answer's own test functions that these stand in. All else stays unread, and is never held against an answer.

This runs in a child that runs the canonical solution, and no answer. Every expectation is looked at, also behind one
that fails, and nothing that the solution returned is an argument or the bound of a loop: how long reading takes tells
nothing of these values.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any

# of the canonical solution; all else is bounded by the child's CPU time, memory and stack
MAX_CALLS = 200


class Unread(Exception):
    """This is none of the forms that are read."""


class FunctionEnds(Exception):
    """Reading has come to a return."""


class FunctionMayEnd(FunctionEnds):
    """… or to what is unread and may hold one, or leave a loop."""


class Meaning(Enum):
    """What a name may stand for that is no value."""

    CLASS, INSTANCE, METHOD, TEST_CASE, UNITTEST = range(5)


@dataclass(slots=True)
class Returned:
    """What the canonical solution returned, or what was computed from that; `raised`: it raised, or the computation."""

    value: Any = None
    raised: bool = False


# a name, or "self.name" → a literal's value, Returned, Meaning, or a function of the answer
Bindings = dict[str, Any]

_OPERATORS: dict[type, Callable[..., Any]] = {
    **{
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Is: operator.is_,
        ast.IsNot: operator.is_not,
    },
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{
        ast.In: lambda a, b: a in b,
        ast.NotIn: lambda a, b: a not in b,
        ast.Add: operator.add,
        ast.Sub: operator.sub,
    },
    **{ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos},
}
_FUNCTIONS = (
    abs,
    bool,
    float,
    int,
    isinstance,
    len,
    list,
    max,
    min,
    round,
    set,
    sorted,
    str,
    sum,
    tuple,
)
_OF_LITERALS = (dict, enumerate, zip)
_METHODS = ("items", "keys", "values", "split")  # of literals
# Calls that, unread, change nothing.
_HARMLESS = {
    f.__name__ for f in (*_FUNCTIONS, *_OF_LITERALS, all, any, print, range, repr, reversed, type)
}
_HARMLESS_METHODS = (*_METHODS, "format", "join")
# What cannot be changed, but for tuples and frozensets, which may hold what can.
_FIXED = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(...),
    type,
    type(abs),
    Meaning,
    ast.AST,
)
# unittest's assertions of two values; None is the second of assertIsNone
_COMPARED = dict.fromkeys(
    (f"assert{kind}Equal" for kind in ("", "List", "Tuple", "Dict", "Set", "Sequence")), ast.Eq
) | {
    **{"assertNotEqual": ast.NotEq, "assertIs": ast.Is, "assertIsNot": ast.IsNot},
    **{
        "assertIn": ast.In,
        "assertNotIn": ast.NotIn,
        "assertGreater": ast.Gt,
        "assertGreaterEqual": ast.GtE,
    },
    **{
        "assertLess": ast.Lt,
        "assertLessEqual": ast.LtE,
        "assertIsNone": ast.Is,
        "assertIsNotNone": ast.IsNot,
    },
}


def _almost_equal(a: Any, b: Any, places: int = 7, msg: Any = None, delta: Any = None) -> bool:
    return a == b or (abs(a - b) <= delta if delta is not None else round(abs(a - b), places) == 0)


def _is_value(x: Any) -> bool:
    return not isinstance(x, Returned | Meaning | ast.AST)


def _apply(function: Callable[..., Any], *operands: Any) -> Any:
    """The function's value; Returned, if an operand is. Raises Unread for operands that are no values."""
    returned = [x for x in operands if type(x) is Returned]
    if len(returned) + sum(map(_is_value, operands)) < len(operands):
        raise Unread
    if any(x.raised for x in returned):
        return Returned(raised=True)
    try:
        value = function(*[x.value if type(x) is Returned else x for x in operands])
    except Exception:
        if returned:
            return Returned(raised=True)
        raise Unread from None
    return Returned(value) if returned else value


def _may_change(node: ast.AST) -> bool:
    """Could this, unread, change an object that it names?"""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name not in _HARMLESS
        case ast.Call(func=ast.Attribute(attr=name)):
            return name not in _HARMLESS_METHODS and not name.startswith("assert")
        case ast.Subscript(ctx=ctx) | ast.Attribute(ctx=ctx):
            return not isinstance(ctx, ast.Load)
    return isinstance(node, ast.Call | ast.AugAssign)


def _objects(value: Any) -> Iterator[Any]:
    """The objects in a value that can be changed."""
    if type(value) is Returned:
        value = value.value
    if not isinstance(value, _FIXED):
        if not isinstance(value, tuple | frozenset):
            yield value
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        for part in inside if isinstance(inside, list | tuple | set | frozenset) else ():
            yield from _objects(part)


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement binds or deletes."""
    for n in ast.walk(node):
        match n:
            case ast.Name(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                yield ast.unparse(n)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case ast.ExceptHandler(name=str(name)):
                yield name
            case ast.alias(name=name, asname=alias) if name != "unittest":
                yield alias or name


def _names_unittest(node: ast.AST, names: Bindings) -> bool:
    return any(
        isinstance(n, ast.Name) and names.get(n.id) is Meaning.UNITTEST for n in ast.walk(node)
    )


def _bind(target: ast.AST, value: Any, names: Bindings) -> None:
    match target:
        case ast.Name() | ast.Attribute():
            names[ast.unparse(target)] = value
        case ast.Tuple(elts=elts) | ast.List(elts=elts) if isinstance(value, tuple | list) and len(
            value
        ) == len(elts):
            for part, item in zip(elts, value, strict=True):
                _bind(part, item, names)
        case _:
            raise Unread


class OwnTests:
    """The tests of one answer, as read. solve(*args, **kwargs): the canonical solution, on a fresh instance.

    rejects: some expectation that was read does not hold. unread: how many statements may reject and were not read.
    """

    def __init__(self, function: str, solve: Callable[..., Any]) -> None:
        self.function, self.solve = function, solve
        self.rejects, self.unread, self.calls = False, 0, 0
        self.methods: dict[str, ast.FunctionDef] = {}  # of the answer's Solution
        self.cases: list[ast.ClassDef] = []  # of unittest
        self.changed: dict[int, Any] = {}  # id → an object that something unread may have changed
        self.rebound: set[str] = set()  # names of one function that another may bind
        self.names: Bindings = {f.__name__: f for f in (*_FUNCTIONS, *_OF_LITERALS)}
        self.names |= {"math.inf": math.inf, "unittest": Meaning.UNITTEST}

    def read(self, parts: Sequence[str], name: str) -> None:
        """The test function of that name, of the module or a method of the class, in a program's parts."""
        try:
            self._module(ast.Module([node for part in parts for node in ast.parse(part).body], []))
            own = name in self.names
            self._function(
                self.names[name] if own else self.methods[name], [] if own else [Meaning.INSTANCE]
            )
        except Exception:  # none of that name, too deep for the stack …
            self.unread += 1

    def _module(self, tree: ast.Module) -> None:
        own = {"Solution": Meaning.CLASS, self.function: Meaning.METHOD}
        self.names |= own
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(bases=bases) if any(
                    ast.unparse(base).endswith("TestCase") for base in bases
                ):
                    self.cases.append(node)
                case ast.Global(names=names) | ast.Nonlocal(names=names):
                    self.rebound.update(names)
        for node in tree.body:
            match node:
                case ast.ClassDef(name="Solution", body=body):
                    self.methods = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
                case ast.FunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                    self._statement(node, self.names)
                case ast.Assign() | ast.AnnAssign():
                    with suppress(Unread):
                        self._statement(node, self.names)
                        continue
                    self._forget(node, self.names)
                case _:
                    self._forget(node, self.names)
        self.names |= own

    def _forget(self, node: ast.AST, names: Bindings) -> None:
        """After an unread statement: its names stand for nothing that is known, nor does any name of what it may have
        changed."""
        if any(map(_may_change, ast.walk(node))):
            for n in ast.walk(node):
                if isinstance(n, ast.Name | ast.Attribute):
                    self.changed |= {id(x): x for x in _objects(names.get(ast.unparse(n)))}
        for name in _bound(node):
            names.pop(name, None)

    def _may_reject(self, node: ast.AST) -> bool:
        """Could this statement, unread, raise? Any call may but those of print and of the solution."""
        plain = ("print", "Solution", self.function)
        return any(
            isinstance(n, ast.Assert | ast.Raise)
            or (
                isinstance(n, ast.Call)
                and getattr(n.func, "id", getattr(n.func, "attr", "")) not in plain
            )
            for n in ast.walk(node)
        )

    def _function(self, node: Any, args: list[Any], names: Bindings | None = None) -> None:
        """Read the body of a function that is called with these arguments, where `names` are known around it."""
        around = names or self.names
        match node:
            case ast.FunctionDef(
                args=ast.arguments(args=wanted, vararg=None, kwonlyargs=[]), decorator_list=[]
            ) if len(wanted) == len(args) and not any(map(self._beyond_reading, ast.walk(node))):
                with suppress(FunctionEnds):
                    self._block(
                        node.body, around | {a.arg: v for a, v in zip(wanted, args, strict=True)}
                    )
            case _:
                raise Unread

    def _beyond_reading(self, node: ast.AST) -> bool:
        """In a function: it is a generator, or puts something in the solution's place."""
        replaces = (
            isinstance(node, ast.Attribute)
            and node.attr == self.function
            and isinstance(node.ctx, ast.Store)
        )
        return replaces or isinstance(node, ast.Yield | ast.YieldFrom)

    def _block(self, body: list[ast.stmt], names: Bindings) -> None:
        for at, node in enumerate(body):
            try:
                self._statement(node, names)
                may_end = False
            except FunctionMayEnd:
                may_end = True
            except Unread:
                self.unread += self._may_reject(node)
                self._forget(node, names)
                may_end = any(
                    isinstance(n, ast.Return | ast.Break | ast.Continue) for n in ast.walk(node)
                )
            if may_end:
                self.unread += any(map(self._may_reject, body[at + 1 :]))
                raise FunctionMayEnd

    def _statement(self, node: ast.stmt, names: Bindings) -> None:
        """Read one statement. Raises Unread, FunctionEnds."""
        match node:
            case ast.Expr() | ast.Assign() | ast.Assert() | ast.If(body=[*_, ast.Raise()]) if (
                _names_unittest(node, names)
            ):
                self._unittest()
                for target in node.targets if isinstance(node, ast.Assign) else []:
                    _bind(target, Meaning.UNITTEST, names)
            case ast.Assert(test=test):
                self._expect(test, True, names)
            case ast.If(test=test, body=[*_, ast.Raise()], orelse=[]):
                self._expect(test, False, names)
            case ast.Expr(value=ast.Call() as call):
                self._call_statement(call, names)
            case (
                ast.Assign(targets=[target], value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                _bind(target, self._value(value, names), names)
            case ast.For(target=target, iter=table, body=body, orelse=[]):
                for item in self._literal(table, names):
                    _bind(target, item, names)
                    self._block(body, names)
            case ast.With(
                items=[ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr="subTest")))],
                body=body,
            ):
                self._block(body, names)
            case ast.FunctionDef(name=name):
                names[name] = node
            case ast.Return():
                raise FunctionEnds
            case ast.ClassDef(name=name):
                names.pop(name, None)
            case ast.Import() | ast.ImportFrom():
                self._forget(node, names)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                raise Unread

    def _call_statement(self, call: ast.Call, names: Bindings) -> None:
        match call:
            case ast.Call(func=ast.Name(id="print")):
                for n in ast.walk(call):  # its arguments are computed
                    if n is not call and isinstance(n, ast.Call | ast.NamedExpr):
                        self._value(n, names)
            case ast.Call(
                func=ast.Attribute(attr="assertTrue" | "assertFalse" as name), args=[test, *_]
            ):
                self._expect(test, name == "assertTrue", names)
            case ast.Call(
                func=ast.Attribute(attr="assertAlmostEqual"), args=args, keywords=keywords
            ):
                named = {str(k.arg): self._literal(k.value, names) for k in keywords}
                self._hold(
                    _apply(lambda *a: _almost_equal(*a, **named), *self._values(args, names)), True
                )
            case ast.Call(func=ast.Attribute(attr=name), args=[a, *others]) if name in _COMPARED:
                b = None if "None" in name else self._value(others[0], names)
                self._hold(_apply(_OPERATORS[_COMPARED[name]], self._value(a, names), b), True)
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=args, keywords=[]) if (
                name in self.methods
                and name != self.function
                and self._value(owner, names) is Meaning.INSTANCE
            ):
                self._function(self.methods[name], [Meaning.INSTANCE, *self._values(args, names)])
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if isinstance(
                names.get(name), ast.AST
            ):
                around = None if names[name] is self.names.get(name) else names
                self._function(names[name], self._values(args, names), around)
            case _:
                self._value(call, names)  # it is called, and nothing is expected of it

    def _unittest(self) -> None:
        """Every test of every TestCase, once."""
        cases, self.cases = self.cases, []
        for case in cases:
            methods = {n.name: n for n in case.body if isinstance(n, ast.FunctionDef)}
            for test in (node for name, node in methods.items() if name.startswith("test")):
                names = self.names | {"self": Meaning.TEST_CASE}
                with suppress(FunctionEnds):
                    self._block(methods["setUp"].body if "setUp" in methods else [], names)
                try:
                    self._function(test, [Meaning.TEST_CASE], names)
                except Unread:
                    self.unread += 1

    def _expect(self, test: ast.expr, holds: bool, names: Bindings) -> None:
        match test:
            case ast.BoolOp(op=op, values=values) if isinstance(op, ast.And if holds else ast.Or):
                for value in values:
                    self._expect(value, holds, names)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._expect(operand, not holds, names)
            case _:
                try:
                    self._hold(self._value(test, names), holds)
                except Unread:
                    self.unread += 1
                    self._forget(test, names)

    def _hold(self, found: Any, holds: bool) -> None:
        """Raises Unread for what is no matter of the solution, unless it holds anyway."""
        truth = _apply(bool, found)
        if type(truth) is Returned:
            self.rejects |= truth.raised or truth.value is not holds
        elif truth is not holds:
            raise Unread

    def _literal(self, node: ast.expr, names: Bindings) -> Any:
        value = self._value(node, names)
        if not _is_value(value):
            raise Unread
        return value

    def _values(self, nodes: Sequence[ast.expr], names: Bindings) -> list[Any]:
        out: list[Any] = []
        for node in nodes:
            starred = isinstance(node, ast.Starred)
            out += self._literal(node.value, names) if starred else [self._value(node, names)]
        return out

    def _value(self, node: ast.expr, names: Bindings) -> Any:
        """What an expression stands for, as in Bindings. Raises Unread."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name() | ast.Attribute() if (
                name := ast.unparse(node)
            ) in names and name not in self.rebound:
                if self.changed and any(id(x) in self.changed for x in _objects(names[name])):
                    raise Unread
                return names[name]
            case ast.Attribute(value=owner, attr=self.function) if (
                self._value(owner, names) is Meaning.INSTANCE
            ):
                return Meaning.METHOD
            case ast.List(elts=elts):
                return _apply(lambda *v: [*v], *self._values(elts, names))
            case ast.Tuple(elts=elts):
                return _apply(lambda *v: v, *self._values(elts, names))
            case ast.Set(elts=elts):
                return _apply(lambda *v: {*v}, *self._values(elts, names))
            case ast.Dict(keys=keys, values=values) if None not in keys:
                given = [self._literal(k, names) for k in keys if k is not None]
                return _apply(
                    lambda *v: dict(zip(given, v, strict=True)), *self._values(values, names)
                )
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _apply(_OPERATORS[type(op)], self._value(operand, names))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _apply(
                    _OPERATORS[type(op)], self._value(left, names), self._value(right, names)
                )
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = self._values([left, *others], names)
                pairs = zip(ops, values[:-1], values[1:], strict=True)
                return _apply(
                    lambda *v: all(v), *[_apply(_OPERATORS[type(op)], a, b) for op, a, b in pairs]
                )
            case ast.Subscript(value=whole, slice=at):
                return _apply(operator.getitem, self._value(whole, names), self._value(at, names))
            case ast.Call():
                return self._call(node, names)
        raise Unread

    def _call(self, node: ast.Call, names: Bindings) -> Any:
        match node.func:
            case ast.Attribute(value=owner, attr=name) if name in _METHODS:
                function = getattr(self._literal(owner, names), name, None)
            case _:
                function = self._value(node.func, names)
        args = self._values(node.args, names)
        kwargs: dict[str, Any] = {}
        for k in node.keywords:
            value = self._literal(k.value, names)
            kwargs |= {k.arg: value} if k.arg else value
        if function is Meaning.CLASS and not args and not kwargs:
            return Meaning.INSTANCE
        if function is not Meaning.METHOD:
            plain = all(map(_is_value, args)) or function in _FUNCTIONS
            if not callable(function) or not _is_value(function) or not plain:
                raise Unread
            return _apply(lambda *a: function(*a, **kwargs), *args)
        if not all(map(_is_value, args)) or self.calls == MAX_CALLS:
            raise Unread
        self.calls += 1
        given, named = deepcopy((args, kwargs))
        try:
            return Returned(self.solve(*given, **named))
        except (MemoryError, RecursionError):  # perhaps for want of room
            raise Unread from None
        except Exception:
            return Returned(raised=True)
        finally:
            # the answer's own lists would be others from here on
            if (given, named) != (args, kwargs):
                self._forget(node, names)
