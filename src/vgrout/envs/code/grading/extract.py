"""Parsing: the program in an answer, the call and the expected value in an assertion.

Nothing that a model wrote runs here.
"""

import __future__

import ast
import marshal
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal

# Invisible characters before or behind a fence: blanks, a no-break space, characters without width.
_BLANK = r"[ \t\u00a0\u200b-\u200d\u2060\ufeff]"
# An opening fence ends its line. It is at the start of the line, perhaps in a quotation or as an
# item of a list; further on it has to say "python", because prose may contain three backticks.
_OPEN = re.compile(
    rf"(?P<prefix>(?:{_BLANK}|>)*+(?:(?:[-*+]|\d{{1,9}}[.)]){_BLANK}++)?+)"
    r"(?P<fence>```++|~~~++)(?P<info>[^`]*+)$"
    rf"|.*?(?P<mid>```)(?P<word>{_BLANK}*+py[^`]*+)$",
    re.IGNORECASE,
)
# First words behind a fence that mean Python; python-repl and pycon are sessions.
_PYTHON = re.compile(r"[ci]?py(thon)?[-_\d.]*|\S+\.py")


def _closing(mark: str) -> re.Pattern[str]:
    """Return a pattern of what may close a block: a fence at the start or the end of a line."""
    run = rf"(?:{mark}{{3,}}+)"
    at_start = rf"^((?:{_BLANK}|>)*+){run}"
    at_end = rf"(?<!{mark}){run}{_BLANK}*+$"
    return re.compile(f"{at_start}|{at_end}")


_CLOSE = {"`": _closing("`"), "~": _closing("~")}

_NAMED_FLOATS = {"inf": float("inf"), "nan": float("nan")}
_BUILDERS = {"list_node": "list", "tree_node": "tree"}
_NODE_TESTS: dict[str, Literal["list", "tree"]] = {"is_same_list": "list", "is_same_tree": "tree"}

Kind = Literal["plain", "list", "tree"]

# How a block is marked: as Python, not at all, or as anything else.
MARKED, UNMARKED, FOREIGN = range(3)

ANSWER_FILE = "<answer>"  # the file name of an answer's code

Block = tuple[int, str]  # mark, content
Part = tuple[str, CodeType]  # a part of a program: its source, and the same compiled

# --- the program in an answer


def _mark(opening: re.Match[str]) -> int:
    info = (opening["info"] or opening["word"] or "").lower()
    first = re.match(r"[\W_]*([\w.+#/-]*)", info)
    assert first is not None  # it may be empty
    if not first[1]:
        return UNMARKED
    return MARKED if _PYTHON.fullmatch(first[1]) else FOREIGN


def _width(prefix: str | None) -> int:
    return len((prefix or "").expandtabs(4))


def _content(prefix: str, lines: list[str]) -> str:
    """Return the lines of a block without what its opening fence has before it.

    That is the marks of a quotation, and the indentation that all lines share, as far as that of
    the fence.
    """
    quotes = prefix.count(">")
    if quotes:
        marks = re.compile(rf"^(?:{_BLANK}*+>){{1,{quotes}}}")
        lines = [marks.sub("", line) for line in lines]
        prefix = prefix.rpartition(">")[2] or " "
    cut = _shared_indentation(lines, _width(prefix))
    return "\n".join(line[cut:] for line in lines).removeprefix("\ufeff")


def _shared_indentation(lines: list[str], most: int) -> int:
    """Return how many characters of indentation all lines share, at most `most` columns.

    Lines without text do not count. A tab is 4 columns wide.
    """
    indentation = 0
    columns = 0
    with_text = [line for line in lines if line.strip()]
    for characters in zip(*with_text, strict=False):
        character = characters[0]
        if len(set(characters)) > 1 or character not in " \t":
            break
        columns += 4 if character == "\t" else 1
        if columns > most:
            break
        indentation += 1
    return indentation


@dataclass(slots=True)
class _OpenBlock:
    """A block whose end has not been found yet."""

    opening: re.Match[str]
    lines: list[str] = field(default_factory=list)
    # Number of lines before the first that looks like the block's end, but is not: its fence is
    # shorter than the opening one, or as far in as in a docstring.
    doubtful: int | None = None

    def closed_by(self, line: str) -> re.Match[str] | None:
        """Return the fence in this line that closes the block; remember a doubtful one."""
        fence = self.opening["fence"] or self.opening["mid"]
        closing = _CLOSE[fence[0]].search(line)
        if closing is None:
            return None
        is_deep = _width(closing[1]) > _width(self.opening["prefix"]) + 3
        if is_deep or closing[0].count(fence[0]) < len(fence):
            if self.doubtful is None:
                self.doubtful = len(self.lines)
            return None
        return closing

    def blocks(self, complete: bool, inner: bool) -> Iterator[Block]:
        """Yield this block, if it holds anything, or the blocks within it.

        A block that is not `complete` ends before the first doubtful line. With `inner`, this block
        is itself within another, and is not searched.
        """
        lines = self.lines if complete else self.lines[: self.doubtful]
        mark = _mark(self.opening)
        content = _content(self.opening["prefix"] or "", lines)
        if not content.strip():
            return
        within = [] if inner or mark == MARKED else list(_fenced(content, True))
        if within:
            yield from within
        else:
            yield mark, content


def _opening_of_next(line: str, closing: re.Match[str]) -> re.Match[str] | None:
    """Return the fence of the next block, where it is what closes this one.

    A fence marked as Python at the start of a line opens a block: the one before was left open.
    """
    opening = None if closing[1] is None else _OPEN.match(line)
    return opening if opening is not None and _mark(opening) == MARKED else None


def _fenced(text: str, inner: bool = False) -> Iterator[Block]:
    """Yield every fenced block that holds anything.

    A block of another language that contains fenced blocks stands for these.
    """
    block: _OpenBlock | None = None
    for line in text.split("\n"):
        if block is None:
            opening = _OPEN.match(line)
            block = None if opening is None else _OpenBlock(opening)
            continue
        closing = block.closed_by(line)
        if closing is None:
            block.lines.append(line)
            continue
        opening = _opening_of_next(line, closing)
        block.lines.append(line[: closing.start()])
        yield from block.blocks(opening is None, inner)
        block = None if opening is None else _OpenBlock(opening)
    if block is not None:  # the answer was cut off
        yield from block.blocks(False, inner)


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of an answer, in order."""
    return list(_fenced(text.replace("\r\n", "\n").replace("\r", "\n")))


def bound_names(source: str) -> set[str]:
    """Return what a program binds anywhere: functions, classes, variables, attributes, imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                names.add(node.attr)
            case ast.alias():
                names.add(node.asname or node.name)
    return names


def _compiled(sources: Sequence[str], errors: list[BaseException]) -> list[Part]:
    """Compile the parts of a program that are Python; add the errors of the others to `errors`.

    A __future__ import holds for the parts behind it too, and the numbers of the lines go on.
    """
    parts = []
    flags = 0
    lines_before = 0
    for source in sources:
        try:
            numbered = "\n" * lines_before + source
            code = compile(numbered, ANSWER_FILE, "exec", flags, dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            errors.append(e)
            continue
        flags |= code.co_flags & __future__.annotations.compiler_flag
        parts.append((source, code))
        lines_before += source.count("\n") + 1
    return parts


def program(found: Sequence[Block], called: Collection[str]) -> list[Part]:
    """Return the program in an answer's blocks, in parts that run one after the other.

    The blocks can be read in several ways. The first reading that is Python and binds all names
    that are called is chosen; if there is none, the first that is Python. The readings, in this
    order: of the blocks that are marked as Python, then of these and the unmarked ones, then of all
    blocks,

    - every block as a part, if each is Python;
    - else all of them as one text;
    - else the blocks that are Python.

    Raises SyntaxError, ValueError, RecursionError or MemoryError, as `compile` does, if no block is
    Python.
    """
    errors: list[BaseException] = [SyntaxError("no code")]
    readings: list[list[Part]] = []
    tried: list[str] = []
    for marks in (MARKED, UNMARKED, FOREIGN):
        sources = [content for mark, content in found if mark <= marks]
        if not sources or sources == tried:
            continue
        tried = sources
        parts = _compiled(sources, errors)
        if len(parts) < len(sources) > 1:
            readings.append(_compiled(["\n\n".join(sources)], errors))
        readings.append(parts)
    readings = [parts for parts in readings if parts]
    if not readings:
        raise errors[-1]
    if len(readings) > 1:
        for parts in readings:
            bound: set[str] = set()
            for source, _ in parts:
                bound |= bound_names(source)
            if bound.issuperset(called):
                return parts
    return readings[0]


# --- the call and the expected value in an assertion


@dataclass(frozen=True, slots=True)
class Case:
    """One assertion, taken apart. `call` goes to the child; `expected` stays with the verifier."""

    call: bytes  # marshal of (method of Solution, args, kwargs, has_nodes)
    # Exact builtins. For a linked list its values, for a tree as `_level_order` has it.
    expected: Any
    kind: Kind  # how a returned value is turned into plain values before it is claimed
    # The functions of the setup code that make the call's arguments: list_node, tree_node.
    builders: frozenset[str] = frozenset()


class UnsupportedTest(ValueError):
    """An assertion that is not `assert call == literal` (or its ListNode / TreeNode form)."""


def _literal(node: ast.expr, nodes_ok: bool = False) -> Any:
    """Return the value of a literal, in which the names inf and nan may occur.

    With `nodes_ok`, `list_node([…])` becomes a tagged tuple (Ellipsis, builder, values), which the
    child builds. A bare Ellipsis is refused, so no literal is such a tag.
    """
    match node:
        case ast.Constant() if node.value is not Ellipsis:
            return node.value
        case ast.Name() if node.id in _NAMED_FLOATS:
            return _NAMED_FLOATS[node.id]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            value = _literal(node.operand)
            if type(value) in (int, float, complex):
                return -value if isinstance(node.op, ast.USub) else value
        case ast.List():
            return [_literal(item, nodes_ok) for item in node.elts]
        case ast.Tuple():
            return tuple(_literal(item, nodes_ok) for item in node.elts)
        case ast.Set():
            return {_literal(item) for item in node.elts}
        case ast.Dict() if None not in node.keys:  # None stands for `**other`
            out = {}
            for key, value in zip(node.keys, node.values, strict=True):
                assert key is not None
                known = _literal(key)
                out[known] = _literal(value, nodes_ok)
            return out
        case ast.Call():
            name, args = _named_call(node)
            if name == "set" and not args:
                return set()
            if name == "float" and len(args) == 1:
                number = args[0]
                if isinstance(number, ast.Constant) and isinstance(number.value, str):
                    return float(number.value)
            if nodes_ok and name in _BUILDERS and len(args) == 1:
                return (Ellipsis, name, _literal(args[0]))
    raise UnsupportedTest(f"{ast.unparse(node)[:60]!r} is not a literal")


def _named_call(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return the name and the arguments of `name(…)`; ("", []) for anything else."""
    if not isinstance(node, ast.Call) or node.keywords or not isinstance(node.func, ast.Name):
        return "", []
    return node.func.id, node.args


def _call(node: ast.expr, builders: frozenset[str]) -> bytes:
    """Return `Solution().method(…)` as Case has it. builders: those in it."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=method)):
            if _named_call(owner) == ("Solution", []):
                if any(keyword.arg is None for keyword in node.keywords):
                    raise UnsupportedTest("** in the call")
                args = [_literal(arg, nodes_ok=True) for arg in node.args]
                kwargs = {k.arg: _literal(k.value, nodes_ok=True) for k in node.keywords}
                return marshal.dumps((method, args, kwargs, bool(builders)))
    found = ast.unparse(node)[:60]
    raise UnsupportedTest(f"{found!r} is not a call like Solution().method(…)")


def _builders_in(call: ast.expr, test: str) -> frozenset[str]:
    """Return which of list_node and tree_node a call's arguments are made with."""
    if not any(name in test for name in _BUILDERS):  # walking a tree is most of the work
        return frozenset()
    names = [node.id for node in ast.walk(call) if isinstance(node, ast.Name)]
    return frozenset(_BUILDERS.keys() & names)


def parse_test(test: str) -> Case:
    """Take `assert call == literal` apart, or one with linked lists or trees.

    These have the form `assert is_same_list(call, list_node(literal))`, or the same for a tree.

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


def _parse(test: str) -> Case:
    body = ast.parse(test.strip()).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise UnsupportedTest("not a single assert statement")
    condition = body[0].test
    match condition:
        case ast.Compare(left=call, ops=[ast.Eq()], comparators=[literal]):
            builders = _builders_in(call, test)
            return Case(_call(call, builders), _literal(literal), "plain", builders)
    name, args = _named_call(condition)
    if name in _NODE_TESTS and len(args) == 2:
        return _parse_nodes(_NODE_TESTS[name], *args, test)
    raise _not_of_the_form()


def _parse_nodes(
    kind: Literal["list", "tree"],
    call: ast.expr,
    nodes: ast.expr,
    test: str,
) -> Case:
    in_call = _builders_in(call, test)
    if isinstance(nodes, ast.Constant) and nodes.value is None:
        return Case(_call(call, in_call), [], kind, in_call)
    builder, args = _named_call(nodes)
    if _BUILDERS.get(builder) != kind or len(args) != 1:
        raise _not_of_the_form()
    expected = _literal(args[0])
    sent = _call(call, in_call)
    expected = _level_order(expected) if kind == "tree" else expected
    return Case(sent, expected, kind, in_call)


def _not_of_the_form() -> UnsupportedTest:
    return UnsupportedTest("not of the form `assert call == literal`")


def _level_order(values: list[object]) -> list[list[object]]:
    """Return a tree's literal as it is claimed.

    That is [] for no node and [value] for one, without gaps at the end.
    """
    nodes = []
    for i, value in enumerate(values):
        is_node = i == 0 or value is not None
        nodes.append([value] if is_node else [])
    while nodes and not nodes[-1]:
        nodes.pop()
    return nodes
