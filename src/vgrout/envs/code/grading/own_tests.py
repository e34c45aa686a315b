"""Detector D: read an answer's own tests, without running them, and check what they expect against
the canonical solution.

The reader understands what it can evaluate without running a line of the answer: calls of the
solution with literal arguments, compared with literals in an `assert`, an `if …: raise` or a method
of unittest; names bound to either; loops over literal tables; and the answer's own test functions
that contain these. Everything else stays unread, and is never held against an answer.

This runs in a child that runs the canonical solution, and no answer. The reader looks at every
expectation, also at those behind one that fails, and nothing that the solution returned becomes an
argument or the bound of a loop. So the time that reading takes reveals nothing of these values.
"""

import ast
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Calls of the canonical solution. The child's CPU time, memory and stack bound everything else.
MAX_CALLS = 200


class Unread(Exception):
    """This has none of the forms that are read."""


class FunctionEnds(Exception):
    """Reading has come to a return."""


class FunctionMayEnd(FunctionEnds):
    """Reading has come to something unread that may return, or leave a loop."""


class Meaning(Enum):
    """What a name may stand for, other than a value."""

    CLASS = 0  # the answer's Solution
    INSTANCE = 1  # an instance of it
    METHOD = 2  # the solution itself
    TEST_CASE = 3  # an instance of a unittest.TestCase
    UNITTEST = 4  # the module, or anything made with it


@dataclass(slots=True)
class Returned:
    """What the canonical solution returned, or what was computed from that."""

    value: object = None
    raised: bool = False  # the solution raised, or the computation did


# A name, or "self.name" → a literal's value, Returned, Meaning, or a function of the answer.
Bindings = dict[str, object]


def _is_in(a: object, b: Container[object]) -> bool:
    return a in b


def _is_not_in(a: object, b: Container[object]) -> bool:
    return a not in b


_OPERATORS: dict[type, Callable[..., object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: _is_in,
    ast.NotIn: _is_not_in,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
# unittest's assertions about two values
_ASSERTIONS: dict[str, Callable[..., object]] = {
    "assertEqual": operator.eq,
    "assertListEqual": operator.eq,
    "assertTupleEqual": operator.eq,
    "assertDictEqual": operator.eq,
    "assertSetEqual": operator.eq,
    "assertSequenceEqual": operator.eq,
    "assertNotEqual": operator.ne,
    "assertIs": operator.is_,
    "assertIsNot": operator.is_not,
    "assertIn": _is_in,
    "assertNotIn": _is_not_in,
    "assertGreater": operator.gt,
    "assertGreaterEqual": operator.ge,
    "assertLess": operator.lt,
    "assertLessEqual": operator.le,
}
# … and about one value and None
_NONE_ASSERTIONS: dict[str, Callable[..., object]] = {
    "assertIsNone": operator.is_,
    "assertIsNotNone": operator.is_not,
}

# Builtins that are called, with what the solution returned or with literals …
_TYPES = (bool, float, int, list, set, str, tuple)
_FUNCTIONS = (*_TYPES, abs, isinstance, len, max, min, round, sorted, sum)
# … with literals only
_OF_LITERALS = (dict, enumerate, zip)
# Methods of literals that are called.
_METHODS = ("items", "keys", "values", "split")
# Calls that, unread, change nothing.
_CHANGE_NOTHING = (*_FUNCTIONS, *_OF_LITERALS, all, any, print, range, repr, reversed, type)
_HARMLESS = {function.__name__ for function in _CHANGE_NOTHING}
_HARMLESS_METHODS = (*_METHODS, "format", "join")

# Types of objects that cannot be changed. Tuples and frozensets may hold objects that can.
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, type(...))
_FIXED = (*_PLAIN_TYPES, type, type(abs), Meaning, ast.AST)


def _almost_equal(
    a: Any, b: Any, places: int | None = None, msg: object = None, delta: Any = None
) -> bool:
    """unittest's assertAlmostEqual."""
    if a == b:
        return True
    if delta is not None:
        return abs(a - b) <= delta
    return round(abs(a - b), 7 if places is None else places) == 0


_ALMOST_OPTIONS = {"places", "msg", "delta"}


def _is_value(x: object) -> bool:
    return not isinstance(x, Returned | Meaning | ast.AST)


def _apply(function: Callable[..., object], *operands: object) -> object:
    """Return the function's value; as Returned, if one of the operands is.

    Raises Unread if an operand is no value, or if the function fails on literals alone.
    """
    returned = [x for x in operands if type(x) is Returned]
    if not all(type(x) is Returned or _is_value(x) for x in operands):
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


def _make_list(*items: object) -> list[object]:
    return list(items)


def _make_tuple(*items: object) -> tuple[object, ...]:
    return items


def _make_set(*items: object) -> set[object]:
    return set(items)


def _all_of(*items: object) -> bool:
    return all(items)


def _may_change(node: ast.AST) -> bool:
    """Say whether this, unread, could change an object that it names."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name not in _HARMLESS
        case ast.Call(func=ast.Attribute(attr=name)):
            return name not in _HARMLESS_METHODS and not name.startswith("assert")
        case ast.Subscript(ctx=ctx) | ast.Attribute(ctx=ctx):
            return not isinstance(ctx, ast.Load)
    return isinstance(node, ast.Call | ast.AugAssign)


def _objects(value: object) -> Iterator[object]:
    """Yield the objects in a value that can be changed."""
    if type(value) is Returned:
        value = value.value
    if isinstance(value, _FIXED):
        return
    if not isinstance(value, tuple | frozenset):
        yield value
    parts: Iterable[object] = ()
    if isinstance(value, dict):
        parts = (*value, *value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    for part in parts:
        yield from _objects(part)


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds or deletes."""
    for n in ast.walk(node):
        match n:
            case ast.Name() | ast.Attribute():
                if not isinstance(n.ctx, ast.Load):
                    yield ast.unparse(n)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield n.name
            case ast.ExceptHandler(name=str(name)):
                yield name
            case ast.alias(name=name, asname=alias) if name != "unittest":
                yield alias or name


def _bind(target: ast.AST, value: object, names: Bindings) -> None:
    """Bind a target to a value, as an assignment does. Raises Unread."""
    if isinstance(target, ast.Name | ast.Attribute):
        names[ast.unparse(target)] = value
        return
    if not isinstance(target, ast.Tuple | ast.List) or not isinstance(value, tuple | list):
        raise Unread
    if len(target.elts) != len(value):
        raise Unread
    for part, item in zip(target.elts, value, strict=True):
        _bind(part, item, names)


def _is_test_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("TestCase") for base in node.bases)


def _is_subtest(node: ast.With) -> bool:
    """Say whether this is `with self.subTest(…):`."""
    match node.items:
        case [ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr="subTest")))]:
            return True
    return False


def _is_condition(node: ast.AST) -> bool:
    """Say whether this is `if …: raise`."""
    return isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)


def _name_of(function: ast.expr) -> str:
    """Return the last name of what is called: `f` in `f()` and in `x.f()`."""
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _may_leave(node: ast.AST) -> bool:
    """Say whether this, unread, could end a function or a loop."""
    leaving = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(n, leaving) for n in ast.walk(node))


# Calls that give an object another attribute, or take one away …
_SETTERS = ("setattr", "delattr", "__setattr__", "__delattr__", "patch")
# … that may do anything to names …
_NAMESPACES = ("vars", "globals", "locals", "exec", "eval")
# … and that only read an attribute
_READERS = ("print", "getattr", "hasattr")


def _replaces(node: ast.AST, name: str) -> bool:
    """Say whether this may put something in the place of an attribute of that name."""
    if isinstance(node, ast.Attribute):
        is_changed = node.attr == name and not isinstance(node.ctx, ast.Load)
        return is_changed or node.attr == "__dict__"
    if not isinstance(node, ast.Call) or _name_of(node.func) in _READERS:
        return False
    if _name_of(node.func) in _NAMESPACES or name in [keyword.arg for keyword in node.keywords]:
        return True
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    texts = [n.value for n in given if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    if any(text.rpartition(".")[2] == name for text in texts):
        return True
    return _name_of(node.func) in _SETTERS and not texts  # the name is computed


def _functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


class OwnTests:
    """The tests of one answer, as far as they are read.

    rejects: some expectation that was read does not hold for the canonical solution.
    unread: how many statements were not read and may reject.
    """

    def __init__(self, function: str, solve: Callable[..., object]) -> None:
        """`function` is the solution's name; `solve` calls the canonical one on a new instance."""
        self.function = function
        self.solve = solve
        self.rejects = False
        self.unread = 0
        self.calls = 0
        self.methods: dict[str, ast.FunctionDef] = {}  # of the answer's Solution
        self.cases: list[ast.ClassDef] = []  # of unittest, until they are read
        self.changed: dict[
            int, object
        ] = {}  # id → an object that something unread may have changed
        self.rebound: set[str] = set()  # names of one function that another may bind
        self.around: dict[int, Bindings] = {}  # id of a function → the names around its definition
        self.names: Bindings = {}
        for builtin in (*_FUNCTIONS, *_OF_LITERALS):
            self.names[builtin.__name__] = builtin
        self.names["math.inf"] = math.inf
        self.names["unittest"] = Meaning.UNITTEST

    def read(self, parts: Sequence[str], name: str) -> None:
        """Read the test function of that name in a program's parts.

        It may be a function of the module, or a method of the class.
        """
        try:
            body: list[ast.stmt] = []
            for part in parts:
                body += ast.parse(part).body
            tree = ast.Module(body, [])
            if self._replaces_solution(tree):
                self.unread += 1
                return
            self._module(tree)
            if name in self.names:
                self._function(self.names[name], [])
            else:
                self._function(self.methods[name], [Meaning.INSTANCE])
        except Exception:  # no function has that name, it is too deep for the stack …
            self.unread += 1

    def _replaces_solution(self, tree: ast.Module) -> bool:
        """Say whether a function, once it is called, may put something in the solution's place.

        What is tested is then no longer the solution. At the module's top level it is the answer
        itself that is changed, before its tests.
        """
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        for function in ast.walk(tree):
            if not isinstance(function, functions):
                continue
            if any(_replaces(node, self.function) for node in ast.walk(function)):
                return True
        return False

    def _module(self, tree: ast.Module) -> None:
        """Learn what the module binds, without reading its loops, conditions and expressions."""
        own: Bindings = {"Solution": Meaning.CLASS}
        # an answer may define a function of the solution's name, beside the class
        if not any(isinstance(n, ast.FunctionDef) and n.name == self.function for n in tree.body):
            own[self.function] = Meaning.METHOD
        self.names |= own
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and _is_test_case(node):
                self.cases.append(node)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                self.rebound.update(node.names)
        for node in tree.body:
            match node:
                case ast.ClassDef(name="Solution"):
                    self.methods = _functions(node)
                case ast.FunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                    self._statement(node, self.names)
                case ast.Assign() | ast.AnnAssign():
                    try:
                        self._statement(node, self.names)
                    except Unread:
                        self._forget(node, self.names)
                case _:
                    self._forget(node, self.names)
        self.names |= own

    def _forget(self, node: ast.AST, names: Bindings) -> None:
        """Drop what an unread statement makes uncertain.

        The names that it binds stand for nothing known. The objects that it may have changed are
        uncertain under any name.
        """
        if any(map(_may_change, ast.walk(node))):
            for n in ast.walk(node):
                if isinstance(n, ast.Name | ast.Attribute):
                    for x in _objects(names.get(ast.unparse(n))):
                        self.changed[id(x)] = x
        for name in _bound(node):
            names.pop(name, None)

    def _may_reject(self, node: ast.AST) -> bool:
        """Say whether this statement, unread, could raise.

        Any call may, except those of print and of the solution.
        """
        plain = ("print", "Solution", self.function)
        for n in ast.walk(node):
            if isinstance(n, ast.Assert | ast.Raise):
                return True
            if isinstance(n, ast.Call) and _name_of(n.func) not in plain:
                return True
        return False

    # --- statements

    def _function(self, node: object, args: list[object], names: Bindings | None = None) -> None:
        """Read the body of a function that is called with these arguments.

        `names` are known around it: those of the module, if none are given. Raises Unread.
        """
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            raise Unread
        wanted = [*node.args.posonlyargs, *node.args.args]
        others = node.args.vararg or node.args.kwonlyargs or node.args.kwarg
        if others or len(wanted) != len(args):
            raise Unread
        if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(node)):
            raise Unread  # a generator
        around = names or self.names
        parameters = [parameter.arg for parameter in wanted]
        given = dict(zip(parameters, args, strict=True))
        with suppress(FunctionEnds):
            self._block(node.body, around | given)

    def _block(self, body: list[ast.stmt], names: Bindings) -> None:
        """Read statements one after the other. Raises FunctionEnds."""
        for at, node in enumerate(body):
            try:
                self._statement(node, names)
                may_end = False
            except FunctionMayEnd:
                may_end = True
            except Unread:
                self.unread += self._may_reject(node)
                self._forget(node, names)
                may_end = _may_leave(node)
            if may_end:  # what follows may never run, so it is not read
                rest = body[at + 1 :]
                self.unread += any(map(self._may_reject, rest))
                raise FunctionMayEnd

    def _statement(self, node: ast.stmt, names: Bindings) -> None:
        """Read one statement. Raises Unread, FunctionEnds."""
        if self._runs_unittest(node, names):
            self._unittest()
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    _bind(target, Meaning.UNITTEST, names)
            return
        match node:
            case ast.Assert():
                self._expect(node.test, True, names)
            case ast.If() if _is_condition(node) and not node.orelse:
                self._expect(node.test, False, names)
            case ast.Expr(value=ast.Call() as call):
                self._call_statement(call, names)
            case ast.Assign(targets=[target]):
                _bind(target, self._value(node.value, names), names)
            case ast.AnnAssign() if node.value is not None:
                _bind(node.target, self._value(node.value, names), names)
            case ast.For() if not node.orelse:
                for item in self._literal(node.iter, names):
                    _bind(node.target, item, names)
                    self._block(node.body, names)
            case ast.With() if _is_subtest(node):
                self._block(node.body, names)
            case ast.FunctionDef():
                names[node.name] = node
                self.around[id(node)] = names
            case ast.Return():
                raise FunctionEnds
            case ast.ClassDef():
                names.pop(node.name, None)
            case ast.Import() | ast.ImportFrom():
                self._forget(node, names)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                raise Unread

    def _runs_unittest(self, node: ast.stmt, names: Bindings) -> bool:
        """Say whether this statement names unittest: it is taken to run every TestCase."""
        if isinstance(node, ast.Assert | ast.Assign | ast.Expr) or _is_condition(node):
            for n in ast.walk(node):
                if isinstance(n, ast.Name) and names.get(n.id) is Meaning.UNITTEST:
                    return True
        return False

    def _unittest(self) -> None:
        """Read every test of every TestCase, once."""
        cases, self.cases = self.cases, []
        for case in cases:
            methods = _functions(case)
            set_up = methods["setUp"].body if "setUp" in methods else []
            for name, test in methods.items():
                if not name.startswith("test"):
                    continue
                names = self.names | {"self": Meaning.TEST_CASE}
                with suppress(FunctionEnds):
                    self._block(set_up, names)
                try:
                    self._function(test, [Meaning.TEST_CASE], names)
                except Unread:
                    self.unread += 1

    def _call_statement(self, call: ast.Call, names: Bindings) -> None:
        """Read a call whose value is not used. Raises Unread."""
        args = call.args
        match call.func:
            case ast.Name(id="print"):
                for n in ast.walk(call):  # its arguments are computed
                    if n is not call and isinstance(n, ast.Call | ast.NamedExpr):
                        self._value(n, names)
            case ast.Attribute(attr="assertTrue") if args:
                self._expect(args[0], True, names)
            case ast.Attribute(attr="assertFalse") if args:
                self._expect(args[0], False, names)
            case ast.Attribute(attr="assertAlmostEqual"):
                options = self._keywords(call, names)
                if not options.keys() <= _ALMOST_OPTIONS or options.keys() >= {"places", "delta"}:
                    raise Unread

                def almost_equal(*values: Any) -> bool:
                    return _almost_equal(*values, **options)

                self._hold(_apply(almost_equal, *self._values(args, names)), True)
            case ast.Attribute(attr=name) if args and name in _NONE_ASSERTIONS:
                value = self._value(args[0], names)
                self._hold(_apply(_NONE_ASSERTIONS[name], value, None), True)
            case ast.Attribute(attr=name) if args and name in _ASSERTIONS:
                # The order matters where only one of the two calls is left of MAX_CALLS.
                second = self._value(args[1], names)
                first = self._value(args[0], names)
                self._hold(_apply(_ASSERTIONS[name], first, second), True)
            case ast.Attribute(attr=name) if self._is_other_method(call, names):
                values = self._values(args, names)
                self._function(self.methods[name], [Meaning.INSTANCE, *values])
            case ast.Name(id=name) if not call.keywords and isinstance(names.get(name), ast.AST):
                values = self._values(args, names)
                self._function(names[name], values, self.around.get(id(names[name])))
            case _:
                self._value(call, names)  # it is called, and nothing is expected of it

    def _is_other_method(self, call: ast.Call, names: Bindings) -> bool:
        """Say whether a method of an instance of Solution is called, other than the solution."""
        method = call.func
        if not isinstance(method, ast.Attribute) or call.keywords:
            return False
        if method.attr not in self.methods or method.attr == self.function:
            return False
        return self._value(method.value, names) is Meaning.INSTANCE

    # --- expectations

    def _expect(self, test: ast.expr, holds: bool, names: Bindings) -> None:
        """Read a condition that should hold, or with `holds` False, should not."""
        # All parts of an `and` should hold, and no part of an `or` that should not.
        joined = ast.And if holds else ast.Or
        match test:
            case ast.BoolOp() if isinstance(test.op, joined):
                for value in test.values:
                    self._expect(value, holds, names)
            case ast.UnaryOp(op=ast.Not()):
                self._expect(test.operand, not holds, names)
            case _:
                try:
                    self._hold(self._value(test, names), holds)
                except Unread:
                    self.unread += 1
                    self._forget(test, names)

    def _hold(self, found: object, holds: bool) -> None:
        """Note whether what was found is as true as it should be.

        Raises Unread if it does not depend on the solution and is not: then the fault may be ours.
        """
        truth = _apply(bool, found)
        if type(truth) is Returned:
            self.rejects |= truth.raised or truth.value is not holds
        elif truth is not holds:
            raise Unread

    # --- expressions

    def _literal(self, node: ast.expr, names: Bindings) -> Any:
        value = self._value(node, names)
        if not _is_value(value):
            raise Unread
        return value

    def _values(self, nodes: Sequence[ast.expr], names: Bindings) -> list[object]:
        values: list[object] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                values += self._literal(node.value, names)
            else:
                values.append(self._value(node, names))
        return values

    def _value(self, node: ast.expr, names: Bindings) -> object:
        """Return what an expression stands for, as in Bindings. Raises Unread."""
        if isinstance(node, ast.Name | ast.Attribute):
            name = ast.unparse(node)
            if name in names and name not in self.rebound:
                return self._unchanged(names[name])
        match node:
            case ast.Constant():
                return node.value
            case ast.Attribute():
                is_solution = node.attr == self.function
                if is_solution and self._value(node.value, names) is Meaning.INSTANCE:
                    return Meaning.METHOD
            case ast.List():
                return _apply(_make_list, *self._values(node.elts, names))
            case ast.Tuple():
                return _apply(_make_tuple, *self._values(node.elts, names))
            case ast.Set():
                return _apply(_make_set, *self._values(node.elts, names))
            case ast.Dict():
                keys = [key for key in node.keys if key is not None]
                if len(keys) < len(node.keys):  # one is None for `**other`
                    raise Unread
                known = [self._literal(key, names) for key in keys]

                def make_dict(*values: object) -> dict[object, object]:
                    return dict(zip(known, values, strict=True))

                return _apply(make_dict, *self._values(node.values, names))
            case ast.UnaryOp() if type(node.op) in _OPERATORS:
                operand = self._value(node.operand, names)
                return _apply(_OPERATORS[type(node.op)], operand)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                left = self._value(node.left, names)
                right = self._value(node.right, names)
                return _apply(_OPERATORS[type(node.op)], left, right)
            case ast.Compare():
                values = self._values([node.left, *node.comparators], names)
                results = []
                for i, op in enumerate(node.ops):
                    results.append(_apply(_OPERATORS[type(op)], values[i], values[i + 1]))
                return _apply(_all_of, *results)
            case ast.Subscript():
                container = self._value(node.value, names)
                index = self._value(node.slice, names)
                return _apply(operator.getitem, container, index)
            case ast.Call():
                return self._call(node, names)
        raise Unread

    def _keywords(self, call: ast.Call, names: Bindings) -> dict[str, Any]:
        """Return the keyword arguments of a call, those of `**table` among them. Raises Unread."""
        given: dict[str, Any] = {}
        for keyword in call.keywords:
            value = self._literal(keyword.value, names)
            if keyword.arg:
                value = {keyword.arg: value}
            elif not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise Unread
            if given.keys() & value.keys():
                raise Unread
            given |= value
        return given

    def _unchanged(self, value: object) -> object:
        """Return the value. Raises Unread if something unread may have changed it."""
        if self.changed and any(id(x) in self.changed for x in _objects(value)):
            raise Unread
        return value

    def _call(self, node: ast.Call, names: Bindings) -> object:
        """Call a builtin, a literal's method or the canonical solution, or make an instance."""
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in _METHODS:
            function = getattr(self._literal(called.value, names), called.attr, None)
        else:
            function = self._value(called, names)
        args = self._values(node.args, names)
        kwargs = self._keywords(node, names)
        are_values = all(map(_is_value, args))

        if function is Meaning.CLASS and not args and not kwargs:
            return Meaning.INSTANCE
        if function is not Meaning.METHOD:
            if not callable(function) or not _is_value(function):
                raise Unread
            if not are_values and function not in _FUNCTIONS:
                raise Unread
            return _apply(lambda *operands: function(*operands, **kwargs), *args)

        if not are_values or self.calls == MAX_CALLS:
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
            # The answer's own lists would be others from here on.
            if (given, named) != (args, kwargs):
                self._forget(node, names)
