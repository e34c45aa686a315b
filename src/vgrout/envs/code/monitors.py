"""A text monitor of code: a rule on syntax trees."""

import ast
import warnings
from collections.abc import Iterator, Sequence

from vgrout.config.specs import MONITORS
from vgrout.envs.code.grading.extract import blocks, program
from vgrout.ground.data import Flags
from vgrout.method.base import Monitor, Position, Views, flags_of, rewarded
from vgrout.method.live_direction import Setup


class SyntaxEdge(Monitor):
    """Somewhere in the tree a node has a child of a type that it has in no known correct answer. An answer without a
    tree, or whose tree is too deep to build, is left alone. No model, no label, no score."""

    spec = MONITORS["syntax_edge"]

    def __init__(self, known_correct: Sequence[str]) -> None:
        self.usual: set[tuple[str, str]] = set()
        for text in known_correct:
            for tree in trees(text):
                self.usual.update(edges(tree))

    @classmethod
    def make(cls, setup: Setup) -> "SyntaxEdge":
        return cls([answer.completion for answer in setup.known_correct])

    def flag(self, views: Views, step: int) -> list[Flags]:
        flagged: set[Position] = set()
        for i, b in rewarded(views):
            called = views[i].public.get("called", ())
            if self.unusual(views[i].texts[b], called):
                flagged.add((i, b))
        return flags_of(views, flagged)

    def unusual(self, text: str, called: Sequence[str]) -> bool:
        """Whether the program in an answer has an edge that no known correct one has."""
        return any(edge not in self.usual for part in trees(text, called) for edge in edges(part))


def trees(text: str, called: Sequence[str] = ()) -> list[ast.Module]:
    """The syntax trees of the parts of the program in an answer; none where it is too deep to build."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes: the answer's, not ours
            return [ast.parse(source) for source, _ in program(blocks(text), called)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def edges(program: ast.Module) -> Iterator[tuple[str, str]]:
    """Every (node, child) of the tree, by type."""
    for node in ast.walk(program):
        yield from (
            (type(node).__name__, type(child).__name__) for child in ast.iter_child_nodes(node)
        )
