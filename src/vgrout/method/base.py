"""The base classes of monitors and interventions, each in its plainest form: nothing is flagged, and plain GRPO.

A monitor says which answers are flagged: before the backward, from texts (`Monitor.flag`), or after it, from gradients
(`GradientMonitor` in method/gates.py: `known_hacks` before it, `flag_gradients` after). An intervention says what is
done about it: in the rewards, or in the gradient. Both see a group through a view, which has no labels; only a monitor
that declares it (`sees_labels`) gets one that has.

What the command line, its help and tables know of a class is its row in `vgrout.config.specs`; a class of your own
says the same as class attributes: `name`, `what`, and those fields of `MonitorSpec` or `InterventionSpec` that differ
from their defaults.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.config.run import Config
from vgrout.config.specs import INTERVENTIONS, MONITORS, InterventionSpec, MonitorSpec
from vgrout.ground.data import Flags, GroupView, UpdateRow
from vgrout.ground.tensor_types import Gradient, Routed, Spans
from vgrout.method.live_direction import LiveDirection
from vgrout.method.live_direction import Refresh as Refresh
from vgrout.method.live_direction import Setup as Setup

RowMask = Bool[Tensor, "N 1"]  # of each row of g [N, R]; N rows, R numbers of the adapter
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
    def make(cls, setup: Setup) -> "Monitor":
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


@dataclass(frozen=True)
class GradientFlags:
    """What a gradient monitor flags of a step's rows.

    share: of each row's gradient, in each module of the monitor's direction [N, M], or of whole rows [N, 1].
    of_row: its mean over the modules in which a row has a gradient [N].
    """

    share: Float[Tensor, "N _M"]
    of_row: Float[Tensor, " N"]
    # what it measured, by the table's column
    measured: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class StepGradient:
    """A step's gradients g [N, R] with the rows that they are of, and their sums.

    A row of g is a rollout, or the sum of a group's rollouts of one source that are learnt alike. Rollouts
    have text and source, and no label.
    """

    g: Float[Tensor, "N R"]
    rows: Sequence[UpdateRow]
    spans: Spans  # module → its slice of R
    direction: LiveDirection | None = None  # the intervention's, or the gradient monitor's
    flags: GradientFlags | None = None  # None: the monitor reads texts, and its flags are the rows'

    @cached_property
    def first_rows(self) -> list[UpdateRow]:
        """For each row of g, the first rollout that is in it. All in it have one group and one source."""
        first: dict[int, UpdateRow] = {}
        for row in self.rows:
            first.setdefault(row.row_of_g, row)
        N = len(self.g)
        return [first[n] for n in range(N)]

    def _column(self, values: Sequence[bool]) -> RowMask:
        of_rows = torch.tensor(values, dtype=torch.bool, device=self.g.device)
        return of_rows[:, None]

    @cached_property
    def teacher(self) -> RowMask:
        """Whether a row is of demonstrations [N, 1]."""
        is_teacher = [row.rollout.source == "teacher" for row in self.first_rows]
        return self._column(is_teacher)

    @cached_property
    def flagged(self) -> RowMask:
        """Whether a row is of rollouts that a text monitor flagged [N, 1]."""
        is_flagged = [row.flagged for row in self.first_rows]
        return self._column(is_flagged)

    @cached_property
    def students(self) -> Gradient:
        """Σ over the policy's own rollouts [R]."""
        return self._sum(~self.teacher)

    @cached_property
    def teachers(self) -> Gradient:
        """Σ over the demonstrations [R]."""
        return self._sum(self.teacher)

    @cached_property
    def total(self) -> Gradient:
        """Σ over all rollouts."""
        return self.students + self.teachers

    @cached_property
    def by_source(self) -> Float[Tensor, "3 R"]:
        """Σ over all rollouts, over the policy's own, over the demonstrations: what projections are measured on."""
        return torch.stack((self.total, self.students, self.teachers))

    def _sum(self, mask: RowMask) -> Gradient:
        """Σ over these rows, group by group, so that a group's part is rounded alike in every batch."""
        N, R = self.g.shape
        ends: list[int] = []  # where each group's rows of g end
        for n in range(1, N):
            if self.first_rows[n].group != self.first_rows[n - 1].group:
                ends.append(n)
        ends.append(N)
        total = self.g.new_zeros(R)
        start = 0
        for end in ends:
            of_group = mask[start:end] * self.g[start:end]
            total += of_group.sum(0)
            start = end
        return total


class Intervention(Part):
    """The intervention `none`, plain GRPO, and the base of all others. spans: which part of R a module is."""

    spec: ClassVar[InterventionSpec] = INTERVENTIONS["none"]

    def __init__(self, spans: Spans, cfg: Config) -> None:
        self.spans = spans
        self.cfg = cfg

    @classmethod
    def make(cls, setup: Setup) -> "Intervention":
        """The intervention of a run. Raises Refused, one line, for files that do not fit this model."""
        return cls(setup.spans, setup.cfg)

    def reward(self, view: GroupView, flagged: Sequence[bool]) -> Rewards:
        """The rewards that a group's advantages are computed from, if the monitor looked at it; here the grader's."""
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
        return Routed(keep=step.total)


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
