"""A step's gradients as an intervention gets them, and what a monitor flags of their rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.ground.data import UpdateRow
from vgrout.ground.tensor_types import Gradient, Routed, Spans
from vgrout.method.live_direction import LiveDirection

RowMask = Bool[Tensor, "N 1"]  # of each row of g [N, R]; N rows, R numbers of the adapter


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
        is_flagged = [bool(row.flagged) for row in self.first_rows]
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

    @property
    def kept(self) -> Routed:
        """Σ over all rollouts → δS, as plain GRPO learns."""
        return Routed(keep=self.total)

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
