"""Parsing: the code in a text, the call and the expected value in an assertion. Nothing a model wrote runs here."""

import ast
import marshal
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

# An opening fence ends its line and stands at the start of one, or says "python" further on: prose may hold three
# backticks. A closing one starts or ends its line, and may be missing where an answer was cut off.
_OPEN = re.compile(r"(?:^[ \t>]*+(```|~~~)[`~]*+|(```)(?=[ \t]*+py))[ \t]*+([^\n`]*+)$", re.MULTILINE)
_CLOSE = {f: re.compile(rf"^[ \t>]*+{f}|{f}[ \t]*+$", re.MULTILINE) for f in ("```", "~~~")}
# Blocks of these languages are no part of the program: how to install or call it, what it prints. An unknown word may
# be one.
_NO_PYTHON = re.compile(
    r"bash|sh|shell|zsh|console|terminal|cmd|bat|powershell|text|txt|plaintext|plain|output|out|result|json|yaml|toml|ini|"
    r"csv|xml|html|css|sql|diff|markdown|md|latex|tex|math|pycon|c|cpp|c\+\+|java|javascript|js|typescript|ts|rust|go"
)

_NAMED_FLOATS = {"inf": float("inf"), "nan": float("nan")}
_BUILDERS = {"list_node": "list", "tree_node": "tree"}
_NODE_TESTS: dict[str, Literal["list", "tree"]] = {"is_same_list": "list", "is_same_tree": "tree"}

Kind = Literal["plain", "list", "tree"]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(first word behind the fence in lower case, content) of every fenced block that holds anything."""
    at = 0
    while opening := _OPEN.search(text, at):
        start = opening.end() + 1
        closing = _CLOSE[opening[1] or opening[2]].search(text, min(start, len(text)))
        content = text[start : closing.start() if closing else len(text)]
        if content.strip():
            yield (opening[3].lower().split() or [""])[0], content
        at = closing.end() if closing else len(text)


def extract_candidates(text: str) -> tuple[str, ...]:
    """The program in an answer; a second one is to be taken if the first is not Python.

    First all fenced blocks joined by a blank line, without those of another language unless there are no others; an
    unclosed last fence counts. Then, if some are marked as Python, these alone. () if every block is empty.
    """
    blocks = list(_blocks(text))
    programs = [(word, content) for word, content in blocks if not _NO_PYTHON.fullmatch(word)] or blocks
    marked = [content for word, content in programs if word.startswith("py")]
    joined = ["\n\n".join(contents) for contents in ([content for _, content in programs], marked) if contents]
    return tuple(dict.fromkeys(joined))


@dataclass(frozen=True, slots=True)
class Case:
    """One assertion, taken apart. `call` goes to the child; `expected` stays with the verifier."""

    call: bytes  # marshal of (method or None, function name, args, kwargs, has_nodes)
    expected: Any  # exact builtins; for a linked list its values, for a tree as `_level_order` has it
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
            return {_literal(k): _literal(v, nodes_ok) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.Call(func=ast.Name(id="set"), args=[], keywords=[]):
            return set()
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))], keywords=[]):
            return float(text)
        case ast.Call(func=ast.Name(id=name), args=[values], keywords=[]) if nodes_ok and name in _BUILDERS:
            return (Ellipsis, name, _literal(values))
    raise UnsupportedTest(f"{ast.unparse(node)[:60]!r} is not a literal")


def _call(node: ast.expr) -> bytes:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name(id=owner), args=[], keywords=[]), attr=name),
            args=args,
            keywords=keywords,
        ):
            target = (owner, name)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            target = (None, name)
        case _:
            raise UnsupportedTest("the left side is not a call like Solution().method(…)")
    if any(k.arg is None for k in keywords):
        raise UnsupportedTest("** in the call")
    values = [_literal(a, nodes_ok=True) for a in args]
    named = {k.arg: _literal(k.value, nodes_ok=True) for k in keywords if k.arg is not None}
    has_nodes = any(
        isinstance(n, ast.Name) and n.id in _BUILDERS
        for a in (*args, *(k.value for k in keywords))
        for n in ast.walk(a)
    )
    return marshal.dumps((*target, values, named, has_nodes))


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
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _NODE_TESTS:
            match right:
                case ast.Call(func=ast.Name(id=builder), args=[values], keywords=[]) if (
                    _BUILDERS.get(builder) == _NODE_TESTS[name]
                ):
                    kind, expected = _NODE_TESTS[name], _literal(values)
                    return Case(_call(left), _level_order(expected) if kind == "tree" else expected, kind)
                case ast.Constant(value=None):
                    return Case(_call(left), [], _NODE_TESTS[name])
    raise UnsupportedTest("not of the form `assert call == literal`")
