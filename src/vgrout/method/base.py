"""The base classes of monitors and interventions, each in its plainest form: nothing is flagged, and plain GRPO.

A monitor says which answers are flagged: before the backward, from texts (`flag`), or after it, from gradients
(method/gates.py). An intervention says what is done about it: in the rewards, or in the gradient. What either may know
of a group is a view's type; only a monitor that declares it (`sees_labels`) is given true labels.

Torch is imported where it computes, here and in the classes' modules: a wrong flag never waits for it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vgrout.data import Flags, GroupView, Task, UpdateRow

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vgrout.config.method import Groups
    from vgrout.config.run import Config
    from vgrout.inputs import Inputs
    from vgrout.model.policy import Policy
    from vgrout.tensor_types import Routed, Spans

Views = Sequence[GroupView]  # one a group
Rewards = tuple[float | None, ...]  # one a rollout; None: left out of its group
Position = tuple[int, int]  # group, rollout


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run's method is built from. problems: of training."""

    cfg: "Config"
    policy: "Policy"
    inputs: "Inputs"
    problems: Sequence[Task] = ()

    @property
    def spans(self) -> "Spans":
        """Adapted module → its part of a gradient, in the model's order."""
        return self.policy.adapter.spans

    @property
    def device(self) -> "torch.device":
        return self.policy.adapter.δS.device


@dataclass(frozen=True, slots=True)
class Refresh:
    """State of the direction after a step."""

    age: int | None = None  # steps since v was extracted; None: there is no direction
    # ‖V_new V_oldᵀ‖²_F / k_old when v was extracted again in this step: 1 same span
    overlap: float | None = None
    modules: int = 0
    axes: int = 0

    def columns(self) -> dict[str, Any]:
        return {"refr": self.age}


class Part:
    """What monitors and interventions have in common: what they say of themselves, a direction, and memory."""

    name: ClassVar[str] = "none"
    what: ClassVar[str]
    Settings: ClassVar["Groups"] = ()
    measures: frozenset[str] = frozenset()  # the table's columns for it alone
    direction: Any = None  # in gradients: a LiveDirection; None: it has none

    def refresh(self, step: int) -> Refresh:
        """After the optimiser of step `step` (from 0): extract the direction again on the present model where due."""
        return self.direction.refresh(step) if self.direction else Refresh()

    def state_dict(self) -> "dict[str, Tensor]":
        """What must survive a resume, between steps; empty for one without memory."""
        return self.direction.state_dict() if self.direction else {}

    def load_state_dict(self, state: "Mapping[str, Tensor]") -> None:
        """The inverse, of the same method: a resumed run has its own settings."""
        assert bool(self.direction) or not state, f"{self.name} has no state"
        if self.direction:
            self.direction.load_state_dict(state)


class Monitor(Part):
    """none: flags nothing, and the base of all others."""

    what = "nothing is flagged"
    # and so decides before the backward, or after it
    reads: ClassVar[Literal["texts", "gradients"]] = "texts"
    # of "seed" (another monitor that it learns from), "known correct" (answers)
    needs: ClassVar[tuple[str, ...]] = ()
    sees_labels: bool = False  # a bound, and no method
    # signs random directions in their favour, whenever pairs are read again
    signs_random: ClassVar[bool] = False

    @classmethod
    def make(cls, setup: Setup) -> "Monitor":
        """The monitor of a run. Raises Refused, one line, for files that do not fit this model."""
        return cls()

    def flag(self, views: Views, step: int) -> list[Flags]:
        """One a group, in the views' order. Every random draw is a function of the run's seed and `step`. Of a monitor
        of gradients: what is known before them."""
        return [Flags((False,) * len(view)) for view in views]

    def read(self, step: "StepGradient", number: int) -> None:
        """After the backward of step `number`: put into `step` what is flagged of it; one of texts has said it all."""


class Intervention(Part):
    """none: plain GRPO, and the base of all others. spans: which part of R a module is."""

    what = "plain GRPO"
    acts_on: ClassVar[Literal["nothing", "rewards", "gradient"]] = "nothing"
    reads_flags: ClassVar[bool] = False
    # needs each rollout's own gradient, which costs more than sums
    by_rollout: ClassVar[bool] = False
    usual_monitor: ClassVar[str] = "none"  # where none is named; "": one has to be
    routes: ClassVar[bool] = False  # has a quarantine δS_hack
    has_direction: ClassVar[bool] = False  # of its own, in gradients
    # what None means for the settings that depend on the intervention
    usual: ClassVar[Mapping[str, Any]] = {
        "quarantine": "shared",
        "rollout_ablate_frac": 0.0,
        "rebaseline": False,
        "vhack_refresh_every": 5,
        "gate_vote": "rollout",
        "gate_modules": "apart",
    }
    # the same as the method was first described; {}: no other
    documents: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, spans: "Spans", cfg: "Config", device: "torch.device | str" = "cpu") -> None:
        self.spans, self.cfg, self.device = spans, cfg, device

    @classmethod
    def make(cls, setup: Setup) -> "Intervention":
        """The intervention of a run. Raises Refused, one line, for files that do not fit this model."""
        return cls(setup.spans, setup.cfg, setup.device)

    def reward(self, view: GroupView, flagged: Sequence[bool]) -> Rewards:
        """The rewards that a flagged group's advantages are computed from; here the grader's own."""
        return view.rewards

    def advantages(self, view: GroupView, flagged: Sequence[bool]) -> tuple[float, ...]:
        """By which the group is learnt. flagged: before any gradient."""
        return view.advantages

    def route(self, step: "StepGradient") -> "Routed":
        """What the adapter's two vectors learn from a step's gradient: keep → δS, quar → δS_hack."""
        from vgrout.tensor_types import Routed

        return Routed(keep=step.total)


@dataclass
class StepGradient:
    """A step's gradients g [N, R] with the rows that they are of, and their sums.

    A row of g is a rollout, or the sum of a group's rollouts of one source that are learnt alike. A monitor of
    gradients puts here what it flags: `share` [N, M] in the modules of its direction, or [N, 1] of whole rows.
    """

    g: "Tensor"
    rows: Sequence[UpdateRow]
    spans: "Spans"
    direction: Any = None  # a LiveDirection, the intervention's or the gate's
    share: "Tensor | None" = None
    of_row: "Tensor | None" = None  # [N]: its mean over the modules in which a row has a gradient
    measured: "Mapping[str, float | None]" = field(default_factory=dict)  # by the gate, by column

    @cached_property
    def firsts(self) -> list[UpdateRow]:
        """For each row of g, a rollout that is in it."""
        first: dict[int, UpdateRow] = {}
        for row in self.rows:
            first.setdefault(row.at, row)
        return [first[n] for n in range(len(self.g))]

    def _column(self, of: Callable[[UpdateRow], bool]) -> "Tensor":
        import torch

        return torch.tensor([[of(row)] for row in self.firsts], device=self.g.device)

    @cached_property
    def teacher(self) -> "Tensor":
        """[N, 1]: whether a row is of demonstrations."""
        return self._column(lambda row: row.rollout.source == "teacher")

    @cached_property
    def flagged(self) -> "Tensor":
        """[N, 1]: whether a row is of rollouts that a monitor of texts flagged; under a gate, of known hacks."""
        return self._column(lambda row: row.flagged)

    @cached_property
    def students(self) -> "Tensor":
        """Σ over the policy's own rollouts, [R]."""
        return self._sum(~self.teacher)

    @cached_property
    def teachers(self) -> "Tensor":
        """Σ over the demonstrations, [R]."""
        return self._sum(self.teacher)

    @cached_property
    def total(self) -> "Tensor":
        """Σ over all rollouts, [R]."""
        return self.students + self.teachers

    def _sum(self, mask: "Tensor") -> "Tensor":
        """Σ over these rows, group by group: the order of the sum, and so its rounding, is the batch's."""
        starts = [
            n
            for n, row in enumerate(self.firsts)
            if n == 0 or row.group != self.firsts[n - 1].group
        ]
        sums = self.g.new_zeros(self.g.shape[1])
        for lo, hi in pairwise([*starts, len(self.g)]):
            sums += (mask[lo:hi] * self.g[lo:hi]).sum(0)
        return sums


def positions(views: Views) -> list[Position]:
    """Every rollout of the step."""
    return [(i, b) for i, view in enumerate(views) for b in range(len(view))]


def rewarded(views: Views) -> list[Position]:
    """Those that are rewarded in full."""
    return [(i, b) for i, b in positions(views) if views[i].passed[b]]


def flags_of(
    views: Views, flagged: Collection[Position], scores: Mapping[Position, float] | None = None
) -> list[Flags]:
    """Flags of rollouts by their positions; scores: where they were read."""
    return [
        Flags(
            tuple((i, b) in flagged for b in range(len(view))),
            () if scores is None else tuple(scores.get((i, b)) for b in range(len(view))),
        )
        for i, view in enumerate(views)
    ]
