"""The base classes of monitors and interventions, each in its plainest form: nothing is flagged, and plain GRPO.

A monitor says which answers are flagged: before the backward, from texts (`Monitor.flag`), or after it, from gradients
(`GradientMonitor` in method/gates.py: `known_hacks` before it, `flag_gradients` after). An intervention says what is
done about it: in the rewards, or in the gradient. Both see a group through a view, which has no labels; only a monitor
that declares it (`sees_labels`) gets one that has.

What the command line, its help and tables know of a class is its row in `vgrout.config.specs`; a class of your own
says the same as class attributes: `name`, `what`, and those fields of `MonitorSpec` or `InterventionSpec` that differ
from their defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from vgrout.config.run import Config
from vgrout.config.specs import INTERVENTIONS, MONITORS, InterventionSpec, MonitorSpec
from vgrout.ground.data import Flags, GroupView, Message, Refresh

if TYPE_CHECKING:  # torch: a class of one's own is imported for the plan too
    from torch import Tensor

    from vgrout.method.gradients import Routed, Spans, StepGradient
    from vgrout.method.live_direction import LiveDirection, Setup

Views = Sequence[GroupView]  # one a group
Rewards = tuple[float | None, ...]  # one a rollout; None: left out of its group
Position = tuple[int, int]  # group, rollout


def under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries whose names begin with this, without it."""
    return {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}


class Part:
    """What monitors and interventions have in common: a direction, and memory."""

    # a column of ground/table.py with when="NAME" is shown if NAME is here
    measures: frozenset[str] = frozenset()

    @property
    def direction(self) -> LiveDirection | None:
        """The hack direction that it uses; None: it has none."""
        return None

    def refresh(self, step: int) -> Refresh:
        """After the optimiser's step number `step` (from 0): extract the direction again where that is due."""
        if self.direction is None:
            return Refresh()
        return self.direction.refresh(step)

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a resume, between steps; empty for one without memory."""
        if self.direction is None:
            return {}
        return self.direction.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore it; a resumed run has the settings of the first one."""
        if self.direction is None:
            assert not state, f"{type(self).__name__} has no state"
        else:
            self.direction.load_state_dict(state)


class Monitor(Part):
    """The monitor `none`, which flags nothing, and the base of all others."""

    spec: ClassVar[MonitorSpec] = MONITORS["none"]

    @classmethod
    def make(cls, setup: Setup) -> Monitor:
        """The monitor of a run. Raises Refused, one line, for files that do not fit this model."""
        return cls()

    @property
    def sees_labels(self) -> bool:
        """Whether it is given true labels, which makes it a bound, and no method."""
        return self.spec.sees_labels

    def step_columns(self, step: int) -> Mapping[str, int]:
        """What it measured while it flagged this step, by the table's column."""
        return {}

    def flag(self, views: Views, step: int) -> list[Flags]:
        """What is flagged, one a group, in the views' order. Every random draw is a function of the run's seed and
        `step`."""
        return flags_of(views, flagged=())


class Intervention(Part):
    """The intervention `none`, plain GRPO, and the base of all others. spans: which part of R a module is."""

    spec: ClassVar[InterventionSpec] = INTERVENTIONS["none"]

    def __init__(self, spans: Spans, cfg: Config) -> None:
        self.spans = spans
        self.cfg = cfg

    @classmethod
    def make(cls, setup: Setup) -> Intervention:
        """The intervention of a run. Raises Refused, one line, for files that do not fit this model."""
        return cls(setup.spans, setup.cfg)

    def prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The prompt under which training samples and learns, demonstrations too; evaluations have the task's own."""
        return messages

    def reward(self, view: GroupView, flagged: Sequence[bool]) -> Rewards:
        """The rewards that a group's advantages are computed from; here the grader's."""
        return view.rewards

    def advantages(
        self,
        view: GroupView,
        set_apart: Sequence[bool],
    ) -> tuple[float, ...]:
        """The advantages that the group is trained with; here those of its rewards.

        set_apart: what is flagged before any gradient; under a gradient monitor, the known hacks. route2 compares the
        others with one another alone.
        """
        return view.advantages

    def route(self, step: StepGradient) -> Routed:
        """What the adapter's two vectors learn from a step's gradient: keep → δS, quar → δS_hack."""
        return step.kept


def positions(views: Views) -> list[Position]:
    """Return the positions of all the step's rollouts."""
    found: list[Position] = []
    for i, view in enumerate(views):
        for b in range(len(view)):
            found.append((i, b))
    return found


def rewarded(views: Views) -> list[Position]:
    """Return the positions of the rollouts that are rewarded in full."""
    return [(i, b) for i, b in positions(views) if views[i].passed[b]]


def flags_of(
    views: Views,
    flagged: Collection[Position],
    scores: Mapping[Position, float] | None = None,
    unjudged: Collection[Position] = (),
) -> list[Flags]:
    """Make flags of rollouts from their positions.

    Args:
        scores: of the rollouts that it scored; None: it has no scores.
        unjudged: those that the monitor was to judge and gave no verdict on.

    Raises:
        ValueError: a position is none of these views.
    """
    strange = {*flagged, *(scores or {}), *unjudged} - {*positions(views)}
    if strange:
        raise ValueError(f"no rollouts of these groups: {strange}")
    flags: list[Flags] = []
    for i, view in enumerate(views):
        is_flagged: list[bool | None] = []
        of_group: list[float | None] = []
        for b in range(len(view)):
            is_flagged.append(None if (i, b) in unjudged else (i, b) in flagged)
            if scores is not None:
                of_group.append(scores.get((i, b)))
        flags.append(Flags(tuple(is_flagged), tuple(of_group)))
    return flags
