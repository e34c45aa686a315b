"""Text monitors that need no model: the true labels (or worse ones), the source, the weak detector."""

from collections import Counter
from collections.abc import Collection

from vgrout.config.specs import MONITORS
from vgrout.ground.data import Flags, GroupView, OracleView
from vgrout.ground.rng import py_stream
from vgrout.method.base import Monitor, Views
from vgrout.method.live_direction import Setup


def draws(view: GroupView, seed: int, step: int) -> list[float]:
    """A uniform number in [0, 1) for each answer, by which a flag is set wrongly (`Labels`) or dropped (`Method`).

    It is a function of the run's seed, the step, the problem, and the answer's text, so it depends neither on the order
    of the answers nor on where the run was resumed. Equal texts of a group are counted, and each has its own draw.
    """
    seen: Counter[str] = Counter()
    found: list[float] = []
    for text in view.texts:
        copy = seen[text]  # how many answers before this one have the same text
        stream = py_stream(seed, "label errors", step, view.index, copy, text)
        found.append(stream.random())
        seen[text] += 1
    return found


class Labels(Monitor):
    """Flags by the true labels; demonstrations by the labels they came with.

    known: flaws that it knows; where the check has none of them, nothing is flagged. (): all.
    false_flags: the share of all answers that are no hacks which it flags. The same `draws` decide under every share.
    """

    spec = MONITORS["labels"]

    def __init__(
        self,
        known: Collection[str] = (),
        *,
        false_flags: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.known = frozenset(known)
        self.false_flags = false_flags
        self.seed = seed

    @classmethod
    def make(cls, setup: Setup) -> "Labels":
        method = setup.cfg.method
        return cls(
            method.modes_known,
            false_flags=method.label_false_flags,
            seed=setup.cfg.run.seed,
        )

    def flag(self, views: Views, step: int) -> list[Flags]:
        flags: list[Flags] = []
        for view in views:
            flagged = self._hacks(view)
            if self.false_flags:
                drawn = draws(view, self.seed, step)
                flagged = tuple(
                    hack or draw < self.false_flags
                    for hack, draw in zip(flagged, drawn, strict=True)
                )
            flags.append(Flags(flagged))
        return flags

    def _hacks(self, view: GroupView) -> tuple[bool, ...]:
        """Which answers are hacks that it knows."""
        assert isinstance(view, OracleView)
        if not self.known:
            return view.hacked
        return tuple(flaw in self.known for flaw in view.hacks)


class Source(Monitor):
    """Flags the demonstrations, which are known by their source, and no answer of the policy's own.

    As a control it shows what is left of a method whose monitor detects nothing.
    """

    spec = MONITORS["source"]

    def flag(self, views: Views, step: int) -> list[Flags]:
        flags: list[Flags] = []
        for view in views:
            flagged = tuple(source == "teacher" for source in view.sources)
            flags.append(Flags(flagged))
        return flags


class WeakDetector(Monitor):
    """Flags what the environment's weak detector flags of the policy's own answers; it sees no demonstrations."""

    spec = MONITORS["detector"]

    def flag(self, views: Views, step: int) -> list[Flags]:
        return [Flags(view.detector) for view in views]
