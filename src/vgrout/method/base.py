"""The base classes of monitors and interventions, each in its plainest form: nobody is flagged, and plain GRPO.

A monitor says who is flagged: before the backward, from texts (`flag`), or after it, from gradients (method/gates.py).
An intervention says what is done about it: in the rewards, in the choice of rows, or in the gradient. What either may
know of a group is a view's type (`sees`); only a monitor that declares it is given true labels.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.direction.controls import Provenance
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.tensor_types import GradRows, ModuleGrads, RolloutGrads, Routed, UpdatePart
from vgrout.types import GroupFlags, GroupView, Problem

Views = Sequence[GroupView]  # one a group
Grads = Sequence[Sequence[RolloutGrads]]  # of each part of a plan, of each group: module → [rows, r]
Rewards = tuple[float | None, ...]  # one a rollout; None: left out of its group
At = tuple[int, int]  # group, rollout


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run's method is built from. problems: of training, for a monitor that has the base answer some of them."""

    cfg: Config
    policy: Policy
    inputs: Inputs
    grader: Grader | None = None
    problems: Sequence[Problem] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Adapted module → r, in the model's order."""
        adapter = self.policy.adapter
        return {m: part.numel() for m, part in adapter.by_module(adapter.δS.detach()).items()}

    @property
    def device(self) -> torch.device:
        return self.policy.adapter.δS.device


@dataclass(frozen=True, slots=True)
class Refresh:
    """State of the direction after a step."""

    age: int | None = None  # steps since v was extracted; None: there is no direction
    overlap: float | None = None  # ‖V_new V_oldᵀ‖²_F / k_old when v was extracted again in this step: 1 same span
    modules: int = 0
    axes: int = 0

    def columns(self) -> dict[str, Any]:
        return {"refr": self.age}


class Monitor:
    """none: flags nobody, and the base of all that decide before the backward."""

    name = "none"
    sees: type[GroupView] = GroupView
    measures: frozenset[str] = frozenset()  # the table's columns for it alone
    owns_quarantine = False  # whether it reads with δS_hack, which then learns from rows that it names (`part`)
    provenance: Provenance | None = None  # of its direction, or of the pairs that it starts on; None: it has neither

    @classmethod
    def make(cls, setup: Setup) -> "Monitor":
        """The monitor of a run. Raises ValueError, one line, for files that do not fit this model."""
        return cls()

    def flag(self, views: Views, step: int) -> list[GroupFlags]:
        """One a group, in the views' order. Every random draw is a function of the run's seed and `step`."""
        return [unscored((False,) * len(view)) for view in views]

    def part(self, flags: Sequence[GroupFlags]) -> UpdatePart:
        """From which rows, by which advantages, the quarantine learns, where it is the monitor's."""
        taught = tuple(tuple(b for b, A in enumerate(of.teaches) if A) for of in flags)
        return UpdatePart(taught, tuple(of.teaches for of in flags), learns="quarantine")

    def refresh(self, step: int) -> Refresh:
        """After the optimiser of step `step` (from 0): extract its direction again on the present model where due."""
        return Refresh()

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a resume, between steps; empty for a monitor without memory."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` is of another monitor."""
        if state:
            raise ValueError(f"checkpoint has monitor state {sorted(state)[0]!r}, --monitor {self.name} has none")


@dataclass(frozen=True, slots=True)
class StepGrads:
    """A step's gradients, group by group and in sum. students + teachers = total.

    `rows` has this rank's rollouts alone (zeros for the others'), the sums are those of all ranks.
    """

    views: Views
    rows: Sequence[RolloutGrads]  # one a group
    students: ModuleGrads
    teachers: ModuleGrads
    total: ModuleGrads

    @classmethod
    def of(
        cls,
        views: Views,
        rows: Sequence[RolloutGrads],
        sizes: Mapping[str, int],
        grad_rows: GradRows,
        device: torch.device,
    ) -> "StepGrads":
        """rows: gradients of each group's rollouts in its view's order, or of its students and its teachers."""
        sums = {m: torch.zeros(2, r, device=device) for m, r in sizes.items()}  # student, teacher
        for view, of_group in zip(views, rows, strict=True):
            assert of_group.keys() == sizes.keys(), sorted(of_group.keys() ^ sizes.keys())
            n = len(view) if grad_rows == "rollout" else 2
            teacher = torch.tensor([s == "teacher" for s in view.sources], device=device)
            masks = torch.stack((~teacher, teacher)).float()[:, :, None]
            for m, g_b in of_group.items():
                assert g_b.shape == (n, sizes[m]), (m, tuple(g_b.shape), n, sizes[m])
                sums[m] += (masks * g_b).sum(1) if grad_rows == "rollout" else g_b
        sums = ranks.total_by_module(sums)
        students, teachers = ({m: both[i] for m, both in sums.items()} for i in (0, 1))
        return cls(views, rows, students, teachers, {m: both.sum(0) for m, both in sums.items()})


class Intervention:
    """none: plain GRPO, and the base of all interventions.

    Args of the constructor: `sizes` module → r in the model's order, `cfg` the run's settings, `device` of the
    gradients.
    """

    name = "none"
    grad_rows: GradRows = "source"  # the coarsest gradient rows that it can do with
    measures: frozenset[str] = frozenset()  # the table's columns for it alone

    def __init__(self, sizes: Mapping[str, int], cfg: Config, device: torch.device | str = "cpu") -> None:
        self.sizes, self.cfg, self.device = dict(sizes), cfg, torch.device(device)

    @classmethod
    def make(cls, setup: Setup) -> "Intervention":
        """The intervention of a run. Raises ValueError, one line, for files that do not fit this model."""
        return cls(setup.sizes, setup.cfg, setup.device)

    def reward(self, view: GroupView, flags: GroupFlags) -> Rewards:
        """The rewards that a flagged group's advantages are computed from; here the grader's own."""
        return view.rewards

    def parts(self, views: Views, flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]:
        """Before any gradient: what is learnt from, in one part or several. flags: () where nothing is flagged yet."""
        return (UpdatePart(),)

    def route(self, views: Views, grads: Grads, parts: Sequence[UpdatePart], flags: Sequence[GroupFlags]) -> Routed:
        """What the adapter's two vectors learn from a step's groups. flags: as in `parts`."""
        return self.split(self.step_grads(views, grads))

    def split(self, step: StepGrads) -> Routed:
        """What they learn from the sum of all parts."""
        return Routed(keep=step.total)

    def refresh(self, step: int) -> Refresh:
        """As a monitor does."""
        return Refresh()

    def step_grads(self, views: Views, grads: Grads, grad_rows: GradRows | None = None) -> StepGrads:
        """A plan's gradients whose parts share out the rows: in each part the others' are 0."""
        rows = grads[0] if len(grads) == 1 else [_summed(of) for of in zip(*grads, strict=True)]
        return StepGrads.of(views, rows, self.sizes, grad_rows or self.grad_rows, self.device)

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a resume, between steps; empty for one without memory."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` is of another intervention or model."""
        if state:
            raise ValueError(f"checkpoint has state {sorted(state)[0]!r}, --intervention {self.name} has none")


def _summed(parts: Sequence[RolloutGrads]) -> RolloutGrads:
    return {m: torch.stack([part[m] for part in parts]).sum(0) for m in parts[0]}


def learnt(
    grads: Grads, parts: Sequence[UpdatePart], sizes: Mapping[str, int], device: torch.device, *, both: bool
) -> tuple[ModuleGrads | None, ModuleGrads | None]:
    """Σ over the rows of the parts from which δS learns, and the same for δS_hack.

    both: a gradient was split in two, so both are stepped as plain GRPO would be; else None where no row counts.
    """
    sums: list[ModuleGrads | None] = []
    for vector in ("kept", "quarantine"):
        taught = [(g, part) for g, part in zip(grads, parts, strict=True) if part.learns in (vector, "both")]
        idle = not both and not any(counts(part) for _, part in taught)
        sums.append(None if idle else total([of_group for g, _ in taught for of_group in g], sizes, device))
    return sums[0], sums[1]


def total(groups: Sequence[RolloutGrads], sizes: Mapping[str, int], device: torch.device) -> ModuleGrads:
    """Σ over all rows of all groups, on all ranks."""
    out = {m: torch.zeros(r, device=device) for m, r in sizes.items()}
    for of_group in groups:
        assert of_group.keys() == sizes.keys(), sorted(of_group.keys() ^ sizes.keys())
        for m, rows in of_group.items():
            out[m] += rows.sum(0)
    return ranks.total_by_module(out)


def counts(part: UpdatePart) -> bool:
    """Whether a part has a gradient at all: one of all zeros would still move a vector, by its momentum."""
    if part.rows is None or part.advantages is None:
        return True
    return any(A[b] for rows, A in zip(part.rows, part.advantages, strict=True) for b in rows)


def on_policy(views: Views, part: UpdatePart) -> tuple[UpdatePart, ...]:
    """A part, split where the deployed model sampled some of its rows: those are learnt as they were sampled, with the
    quarantine off. With it on they would be another policy's rows without a ratio (tried: route2 with half of such rows
    under one second moment ends at 3 % solved, without them at 50 %)."""
    all_rows = part.rows or tuple(tuple(range(len(view))) for view in views)
    quiet, loud = (
        tuple(tuple(b for b in rows if view.deployed[b] == off) for view, rows in zip(views, all_rows, strict=True))
        for off in (True, False)
    )
    if not any(quiet):
        return (part,)
    return (replace(part, rows=loud), replace(part, rows=quiet, deployed=True))


def unscored(flagged: Sequence[bool]) -> GroupFlags:
    """Flags of a monitor that has no scores."""
    return GroupFlags((None,) * len(flagged), tuple(flagged))


def positions(views: Views) -> list[At]:
    """Every rollout of the step."""
    return [(i, b) for i, view in enumerate(views) for b in range(len(view))]


def rewarded(views: Views, top: float) -> list[At]:
    """Those with a reward of at least `top`: reward is visible, and only they can be hacks that are learnt."""
    return [(i, b) for i, b in positions(views) if views[i].rewards[b] >= top]


def at_random(among: Sequence[At], like: Collection[At], generator: torch.Generator) -> set[At]:
    """From each group as many of these rollouts as `like` has in it, or all of them, drawn at random."""
    chosen: set[At] = set()
    for group in dict.fromkeys(i for i, _ in among):
        of_group = [at for at in among if at[0] == group]
        n = min(sum(i == group for i, _ in like), len(of_group))
        chosen |= {of_group[j] for j in torch.randperm(len(of_group), generator=generator).tolist()[:n]}
    return chosen


def require(views: Views, sees: type[GroupView], who: Any) -> None:
    """Asserts the views' exact type: a label that nobody may see comes in on a subclass."""
    for view in views:
        assert type(view) is sees, f"{type(who).__name__} sees a {sees.__name__}, got {type(view).__name__}"
