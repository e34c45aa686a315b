"""Monitors that read no answer: true labels, with errors and blind spots (a bound, never a method), and the weak
detector's verdict."""

from collections.abc import Collection, Sequence

from vgrout.method.base import Monitor, Setup, Views, unscored
from vgrout.rng import py_stream
from vgrout.types import GroupFlags, GroupView, Mode, OracleView


class Labels(Monitor):
    """The true labels; for demonstrations the cached ones.

    accuracy: share of right labels; the others are turned. false_positives: share of the answers without a hack that
    are flagged besides. known: flaws that it knows, with these errors; where the check has none of them, nobody is
    flagged. (): all.
    """

    name = "labels"
    sees = OracleView

    def __init__(
        self, seed: int = 0, accuracy: float = 1.0, false_positives: float = 0.0, known: Collection[Mode] = ()
    ) -> None:
        self.seed, self.accuracy, self.false_positives, self.known = seed, accuracy, false_positives, frozenset(known)

    @classmethod
    def make(cls, setup: Setup) -> "Labels":
        seed, method = setup.cfg.run.seed, setup.cfg.method
        return cls(seed, method.label_accuracy, method.label_false_positives, method.modes_known)

    def flag(self, views: Views, step: int) -> list[GroupFlags]:
        return [self._of(view, step) for view in views]

    def _of(self, view: GroupView, step: int) -> GroupFlags:
        assert isinstance(view, OracleView)
        if self.known and not self.known & {*view.flaws}:
            return unscored((False,) * len(view))
        true = [flaw is not None and (not self.known or flaw in self.known) for flaw in view.hacks]
        flagged = noisy_labels(true, self.accuracy, self.seed, step, view.index)
        if not self.false_positives:
            return unscored(flagged)
        rng = py_stream(self.seed, "monitor-false-positives", step, view.index)
        wrong = [rng.random() < self.false_positives for _ in flagged]
        return unscored([f or (w and not e) for f, w, e in zip(flagged, wrong, view.hacked, strict=True)])


class WeakDetector(Monitor):
    """The weak detector's verdict on the policy's own answers; it is not run on demonstrations."""

    name = "detector"

    def flag(self, views: Views, step: int) -> list[GroupFlags]:
        return [unscored(view.detector) for view in views]


def noisy_labels(labels: Sequence[bool], accuracy: float, seed: int, step: int, group: int) -> tuple[bool, ...]:
    """A group's labels, each turned with probability 1 − accuracy: a function of (seed, step, group, rollout)."""
    rng = py_stream(seed, "monitor", step, group)
    return tuple(label != (rng.random() >= accuracy) for label in labels)
