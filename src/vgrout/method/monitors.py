"""Text monitors that need no model: the true labels, the source, the weak detector."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from vgrout.config.method_settings import LabelsSettings
from vgrout.data import Flags, OracleView
from vgrout.method.base import Monitor, Setup, Views

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

    def __init__(self, known: Collection[str] = ()) -> None:
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
