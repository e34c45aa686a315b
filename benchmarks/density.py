"""How dense the source is: `python -m benchmarks.density [FOLDER]`. Standard library only.

tokens      tokens a line of code; docstrings, comments and blank lines are left out
wide        percent of lines over 100 characters
comps       comprehensions per 1,000 lines
long        functions over 60 lines
nested      functions with more than four blocks inside one another
local       imports inside functions
checking    `if TYPE_CHECKING` blocks
Any         uses of the name
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LONGEST, WIDEST, DEEPEST = 60, 100, 4


@dataclass
class Count:
    """Sums over files."""

    files: int = 0
    lines: int = 0
    code: int = 0
    tokens: int = 0
    wide: int = 0
    comps: int = 0
    long: int = 0
    nested: int = 0
    local: int = 0
    checking: int = 0
    Any: int = 0

    def row(self, name: str) -> str:
        """One line of the table."""
        tokens = self.tokens / max(1, self.code)
        wide = 100 * self.wide / max(1, self.lines)
        comps = 1000 * self.comps / max(1, self.lines)
        return (
            f"{name:<32}{self.files:>6}{self.lines:>8}{tokens:>8.2f}{wide:>7.1f}{comps:>7.1f}"
            f"{self.long:>6}{self.nested:>8}{self.local:>7}{self.checking:>10}{self.Any:>6}"
        )

    def add(self, other: "Count") -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


def docstring_lines(tree: ast.AST) -> set[int]:
    """Numbers of the lines that belong to texts which stand alone: docstrings, also of fields."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


def depth(node: ast.AST) -> int:
    """How many blocks lie inside one another. An `elif` is no deeper than its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        own = int(isinstance(child, BLOCKS) and not is_elif)
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            deepest = max(deepest, own + depth(child))
    return deepest


def count(path: Path) -> Count:
    """The counts of one file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    documented = docstring_lines(tree)
    found = Count(files=1, lines=text.count("\n"))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in documented:
            found.tokens += 1
            code.add(token.start[0])
    found.code = len(code)
    found.wide = sum(len(line) > WIDEST for line in text.splitlines())
    for node in ast.walk(tree):
        found.comps += isinstance(node, COMPREHENSIONS)
        found.Any += isinstance(node, ast.Name) and node.id == "Any"
        if isinstance(node, ast.If):
            found.checking += ast.unparse(node.test).endswith("TYPE_CHECKING")
        if isinstance(node, FUNCTIONS):
            found.long += (node.end_lineno or node.lineno) - node.lineno + 1 > LONGEST
            found.nested += depth(node) > DEEPEST
            found.local += sum(_is_import(inner) for inner in _own_nodes(node))
    return found


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes in a function, without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, FUNCTIONS):
            yield from _own_nodes(child)


def report(root: Path, chosen: Iterable[Path]) -> str:
    """The table: a line for each folder, then all."""
    names = ("files", "lines", "tokens", "wide", "comps", "long", "nested", "local", "checking")
    widths = (6, 8, 8, 7, 7, 6, 8, 7, 10)
    head = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    by_folder: dict[str, Count] = {}
    everything = Count()
    for path in chosen:
        found = count(path)
        by_folder.setdefault(str(path.parent.relative_to(root)), Count()).add(found)
        everything.add(found)
    rows = [found.row(name) for name, found in sorted(by_folder.items())]
    return "\n".join([f"{'':<32}{head}{'Any':>6}", *rows, everything.row("all")])


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "src")
    print(report(folder, sorted(folder.rglob("*.py"))))
