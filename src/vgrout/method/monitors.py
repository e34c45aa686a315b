"""Monitors of texts that need no model: the true labels, the source, the weak detector, a rule on syntax trees."""

import ast
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from vgrout.config.method_settings import LabelsSettings, ReferencesSettings
from vgrout.data import Flags, OracleView
from vgrout.envs.code.grading.extract import blocks, program
from vgrout.envs.code.modes import Mode
from vgrout.method.base import Monitor, Setup, Views, flags_of, rewarded

if TYPE_CHECKING:
    from vgrout.data import GroupView


class Labels(Monitor):
    """The true labels; for demonstrations the cached ones.

    known: flaws that it knows; where the check has none of them, nothing is flagged. (): all.
    """

    name = "labels"
    what = "true labels, with blind spots: a bound, never a method"
    Settings = (LabelsSettings,)
    sees_labels = True

    def __init__(self, known: Collection[Mode] = ()) -> None:
        self.known = frozenset(known)

    @classmethod
    def make(cls, setup: Setup) -> "Labels":
        return cls(setup.cfg.method.modes_known)

    def flag(self, views: Views, step: int) -> list[Flags]:
        return [Flags(self._of(view)) for view in views]

    def _of(self, view: "GroupView") -> tuple[bool, ...]:
        assert isinstance(view, OracleView)
        if self.known and not self.known & {*view.flaws}:
            return (False,) * len(view)
        return tuple(
            flaw is not None and (not self.known or flaw in self.known) for flaw in view.hacks
        )


class Source(Monitor):
    """Demonstrations, which are known by their source, and no answer of the policy's own: what is left of a method
    whose monitor detects nothing."""

    name = "source"
    what = "demonstrations alone: a control, never a method"

    def flag(self, views: Views, step: int) -> list[Flags]:
        return [Flags(tuple(source == "teacher" for source in view.sources)) for view in views]


class WeakDetector(Monitor):
    """The weak detector's verdict on the policy's own answers; it is not run on demonstrations."""

    name = "detector"
    what = "the weak detector alone"

    def flag(self, views: Views, step: int) -> list[Flags]:
        return [Flags(view.detector) for view in views]


class SyntaxEdge(Monitor):
    """Somewhere in the tree a node has a child of a type that it has in no known correct answer. An answer without a
    tree, or whose tree is too deep to build, is left alone. No model, no label, no score."""

    name = "syntax_edge"
    what = "rewarded answers with a parent → child edge of the syntax tree that no known correct answer has"
    Settings = (ReferencesSettings,)
    needs = ("known correct",)

    def __init__(self, known_correct: Sequence[str]) -> None:
        self.usual = {
            edge for text in known_correct for part in trees(text) for edge in edges(part)
        }

    @classmethod
    def make(cls, setup: Setup) -> "SyntaxEdge":
        return cls([answer.completion for answer in setup.inputs.known_correct])

    def flag(self, views: Views, step: int) -> list[Flags]:
        return flags_of(
            views,
            {
                (i, b)
                for i, b in rewarded(views)
                if self.unusual(views[i].texts[b], views[i].called)
            },
        )

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
