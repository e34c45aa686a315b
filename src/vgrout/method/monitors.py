"""Text monitors that need no model: the true labels, the source, the weak detector."""

from collections.abc import Collection

from vgrout.config.specs import MONITORS
from vgrout.data import Flags, GroupView, OracleView
from vgrout.method.base import Monitor, Setup, Views


class Labels(Monitor):
    """The true labels; for demonstrations the cached ones.

    known: flaws that it knows; where the check has none of them, nothing is flagged. (): all.
    """

    spec = MONITORS["labels"]

    def __init__(self, known: Collection[str] = ()) -> None:
        self.known = frozenset(known)

    @classmethod
    def make(cls, setup: Setup) -> "Labels":
        return cls(setup.cfg.method.modes_known)

    def flag(self, views: Views, step: int) -> list[Flags]:
        return [Flags(self._hacks(view)) for view in views]

    def _hacks(self, view: GroupView) -> tuple[bool, ...]:
        assert isinstance(view, OracleView)
        if not self.known:
            return view.hacked
        if not self.known & {*view.flaws}:
            return (False,) * len(view)
        return tuple(flaw in self.known for flaw in view.hacks)


class Source(Monitor):
    """Demonstrations, which are known by their source, and no answer of the policy's own: what is left of a method
    whose monitor detects nothing."""

    spec = MONITORS["source"]

    def flag(self, views: Views, step: int) -> list[Flags]:
        return [Flags(tuple(source == "teacher" for source in view.sources)) for view in views]


class WeakDetector(Monitor):
    """The weak detector's verdict on the policy's own answers; it is not run on demonstrations."""

    spec = MONITORS["detector"]

    def flag(self, views: Views, step: int) -> list[Flags]:
        return [Flags(view.detector) for view in views]
