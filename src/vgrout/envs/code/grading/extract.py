"""Parsing: the program in a text, the call and the expected value in an assertion. Nothing a model wrote runs here."""

import __future__

import ast
import marshal
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from types import CodeType
from typing import Any, Literal

# What stands before a fence, or behind it, and is not seen: blanks, a no-break space, characters
# without a width.
_BLANK = r"[ \t\u00a0\u200b-\u200d\u2060\ufeff]"
# An opening fence ends its line and stands at the start of one, perhaps in a quotation or as an
# item of a list, or says "python" further on: prose may hold three backticks.
_OPEN = re.compile(
    rf"(?P<prefix>(?:{_BLANK}|>)*+(?:(?:[-*+]|\d{{1,9}}[.)]){_BLANK}++)?+)(?P<fence>```++|~~~++)(?P<info>[^`]*+)$"
    rf"|.*?(?P<mid>```)(?P<word>{_BLANK}*+py[^`]*+)$",
    re.IGNORECASE,
)
# First words behind a fence; python-repl and pycon are sessions.
_PYTHON = re.compile(r"[ci]?py(thon)?[-_\d.]*|\S+\.py")

_NAMED_FLOATS = {"inf": float("inf"), "nan": float("nan")}
_BUILDERS = {"list_node": "list", "tree_node": "tree"}
_NODE_TESTS: dict[str, Literal["list", "tree"]] = {"is_same_list": "list", "is_same_tree": "tree"}

Kind = Literal["plain", "list", "tree"]

MARKED, UNMARKED, FOREIGN = range(3)  # as Python, not at all, as anything else

Block = tuple[int, str]  # how it is marked, its content
Part = tuple[str, CodeType]  # of a program: source, and the same compiled


def _mark(opening: re.Match[str]) -> int:
    (word,) = re.findall(
        r"\A[\W_]*([\w.+#/-]*)", (opening["info"] or opening["word"] or "").lower()
    )
    return (MARKED if _PYTHON.fullmatch(word) else FOREIGN) if word else UNMARKED


def _content(prefix: str, lines: list[str]) -> str:
    """The lines of a block without what its opening fence has before it: marks of a quotation, the indentation that all
    lines share, as far as that of the fence."""
    if quotes := prefix.count(">"):
        lines = [re.sub(rf"^(?:{_BLANK}*+>){{1,{quotes}}}", "", line) for line in lines]
        prefix = prefix.rpartition(">")[2] or " "
    shared = takewhile(
        lambda at: len({*at}) == 1 and at[0] in " \t", zip(*filter(str.strip, lines), strict=False)
    )
    cut = sum(
        column <= _width(prefix)
        for column in accumulate(4 if at[0] == "\t" else 1 for at in shared)
    )
    return "\n".join(line[cut:] for line in lines).removeprefix("\ufeff")


def _width(prefix: str | None) -> int:
    return len((prefix or "").expandtabs(4))


def _fenced(text: str, inner: bool = False) -> Iterator[Block]:
    """Every fenced block that holds anything. A block of another language that is one of blocks stands for these."""
    opening: re.Match[str] | None = None
    lines: list[str] = []
    # The first line that looks like its end, but is shorter, or as far in as in a docstring.
    doubtful: int | None = None

    def block(complete: bool) -> Iterator[Block]:
        assert opening is not None
        mark, content = (
            _mark(opening),
            _content(opening["prefix"] or "", lines if complete else lines[:doubtful]),
        )
        if content.strip():
            within = [] if inner or mark == MARKED else list(_fenced(content, True))
            yield from within or [(mark, content)]

    for line in text.split("\n"):
        found = _OPEN.match(line)
        if opening is not None:
            fence = opening["fence"] or opening["mid"]
            run = rf"(?:{fence[0]}{{3,}}+)"
            closing = re.search(rf"^((?:{_BLANK}|>)*+){run}|(?<!{fence[0]}){run}{_BLANK}*+$", line)
            deep = closing is not None and _width(closing[1]) > _width(opening["prefix"]) + 3
            if closing is None or deep or closing[0].count(fence[0]) < len(fence):
                doubtful = doubtful if closing is None or doubtful is not None else len(lines)
                lines.append(line)
                continue
            # The fence of a next block: this one was left open.
            opens = closing[1] is not None and found is not None and _mark(found) == MARKED
            lines.append(line[: closing.start()])
            yield from block(complete=not opens)
            found = found if opens else None
        opening, lines, doubtful = found, [], None
    if opening is not None:  # the answer was cut off
        yield from block(complete=False)


def blocks(text: str) -> list[Block]:
    """The fenced blocks of an answer, in order: what stands behind its thoughts. An unclosed thought never ends."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").rpartition("</think>")[2]
    return list(_fenced(re.split(r"^[ \t]*+<think>", text, maxsplit=1, flags=re.MULTILINE)[0]))


def bound_names(source: str) -> set[str]:
    """What a program binds anywhere: functions, classes, variables, attributes, imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=alias):
                names.add(alias or name)
    return names


def _compiled(sources: Sequence[str], errors: list[BaseException]) -> list[Part]:
    """Those of these parts of a program that are Python. A __future__ import holds for the parts behind it too."""
    parts, flags = [], 0
    for source in sources:
        try:
            code = compile(source, "<answer>", "exec", flags, dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            errors.append(e)
            continue
        flags |= code.co_flags & __future__.annotations.compiler_flag
        parts.append((source, code))
    return parts


def program(found: Sequence[Block], called: Collection[str]) -> list[Part]:
    """The program in an answer's blocks, in parts that run one after the other: of the readings below, in this order,
    the first that is Python and binds all names that are called; if there is none, the first that is Python.

    Of the blocks that are marked as Python, then of these and the unmarked ones, then of all blocks: every block as a
    part, if each is Python; else all of them as one text; else the blocks that are Python.

    Raises SyntaxError, ValueError, RecursionError or MemoryError, as `compile` does, if no block is Python.
    """
    errors: list[BaseException] = [SyntaxError("no code")]
    readings: list[list[Part]] = []
    tried: list[str] = []
    for marks in (MARKED, UNMARKED, FOREIGN):
        sources = [content for mark, content in found if mark <= marks]
        if sources in ([], tried):
            continue
        tried, parts = sources, _compiled(sources, errors)
        if len(parts) < len(sources) > 1:
            readings.append(_compiled(["\n\n".join(sources)], errors))
        readings.append(parts)
    readings = [parts for parts in readings if parts]
    for parts in readings if len(readings) > 1 else []:
        if {*called} <= set().union(*(bound_names(source) for source, _ in parts)):
            return parts
    if not readings:
        raise errors[-1]
    return readings[0]


@dataclass(frozen=True, slots=True)
class Case:
    """One assertion, taken apart. `call` goes to the child; `expected` stays with the verifier."""

    call: bytes  # marshal of (method of Solution, args, kwargs, has_nodes)
    # exact builtins; for a linked list its values, for a tree as `_level_order` has it
    expected: Any
    kind: Kind  # how a returned value is turned into plain values before it is claimed


class UnsupportedTest(ValueError):
    """An assertion that is not `assert call == literal` (or its ListNode / TreeNode form)."""


def _literal(node: ast.expr, nodes_ok: bool = False) -> Any:
    """The value of a literal, with the names inf and nan. With `nodes_ok`, `list_node([…])` becomes a tagged tuple
    (Ellipsis, builder, values), which the child builds; a bare Ellipsis is refused, so no literal is such a tag."""
    match node:
        case ast.Constant(value=value) if value is not Ellipsis:
            return value
        case ast.Name(id=name) if name in _NAMED_FLOATS:
            return _NAMED_FLOATS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _literal(operand)
            if type(value) in (int, float, complex):
                return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=elts):
            return [_literal(e, nodes_ok) for e in elts]
        case ast.Tuple(elts=elts):
            return tuple(_literal(e, nodes_ok) for e in elts)
        case ast.Set(elts=elts):
            return {_literal(e) for e in elts}
        case ast.Dict(keys=keys, values=values) if all(k is not None for k in keys):
            return {
                _literal(k): _literal(v, nodes_ok)
                for k, v in zip(keys, values, strict=True)
                if k is not None
            }
        case ast.Call(func=ast.Name(id="set"), args=[], keywords=[]):
            return set()
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))], keywords=[]):
            return float(text)
        case ast.Call(func=ast.Name(id=name), args=[values], keywords=[]) if (
            nodes_ok and name in _BUILDERS
        ):
            return (Ellipsis, name, _literal(values))
    raise UnsupportedTest(f"{ast.unparse(node)[:60]!r} is not a literal")


def _call(node: ast.expr) -> bytes:
    match node:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(func=ast.Name(id="Solution"), args=[], keywords=[]), attr=name
            ),
            args=args,
            keywords=keywords,
        ):
            if any(k.arg is None for k in keywords):
                raise UnsupportedTest("** in the call")
            values = [_literal(a, nodes_ok=True) for a in args]
            named = {k.arg: _literal(k.value, nodes_ok=True) for k in keywords}
            has_nodes = any(isinstance(n, ast.Name) and n.id in _BUILDERS for n in ast.walk(node))
            return marshal.dumps((name, values, named, has_nodes))
    raise UnsupportedTest(f"{ast.unparse(node)[:60]!r} is not a call like Solution().method(…)")


def parse_test(test: str) -> Case:
    """Take `assert call == literal` apart, or `assert is_same_list(call, list_node(literal))` and its tree form.

    Raises UnsupportedTest, with what was found instead, for anything else.
    """
    try:
        return _parse(test)
    except (SyntaxError, ValueError) as e:
        raise e if isinstance(e, UnsupportedTest) else UnsupportedTest(f"not Python: {e}") from None
    except (RecursionError, MemoryError):
        raise UnsupportedTest("nested too deeply") from None
    except TypeError as e:  # as in {[1], 2}
        raise UnsupportedTest(f"no literal: {e}") from None


def _level_order(values: list[Any]) -> list[list[Any]]:
    """A tree's literal as it is claimed: [] for no node, [value] for one, without trailing gaps."""
    nodes = [[v] if i == 0 or v is not None else [] for i, v in enumerate(values)]
    while nodes and not nodes[-1]:
        nodes.pop()
    return nodes


def _parse(test: str) -> Case:
    body = ast.parse(test.strip()).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise UnsupportedTest("not a single assert statement")
    match body[0].test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return Case(_call(left), _literal(right), "plain")
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if (
            name in _NODE_TESTS
        ):
            match right:
                case ast.Call(func=ast.Name(id=builder), args=[values], keywords=[]) if (
                    _BUILDERS.get(builder) == _NODE_TESTS[name]
                ):
                    kind, expected = _NODE_TESTS[name], _literal(values)
                    return Case(
                        _call(left), _level_order(expected) if kind == "tree" else expected, kind
                    )
                case ast.Constant(value=None):
                    return Case(_call(left), [], _NODE_TESTS[name])
    raise UnsupportedTest("not of the form `assert call == literal`")
