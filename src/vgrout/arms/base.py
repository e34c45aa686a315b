"""What every arm is, and plain GRPO by itself: view → plan → route → refresh.

view     what the arm may know of a group: no oracle label, but for the bounds that are named as such
plan     before any gradient: which rollouts are learnt from, with which advantages, under which parameters
route    the finished gradients → what δS learns (keep) and what δS_hack learns (quar)
refresh  after the step: extract the direction again where that is due
"""

from collections.abc import Mapping, Sequence
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
from vgrout.tensor_types import ArmDiag, GradRows, ModuleGrads, RolloutGrads, Routed, UpdatePart, UpdatePlan
from vgrout.types import Batch, Group, GroupView, OracleView, Problem, ProblemView

Views = Sequence[GroupView]  # one a group
Grads = Sequence[Sequence[RolloutGrads]]  # of each part of the plan, of each group: module → [rows, r]
Plan = UpdatePlan | None  # None: one part, all rows
Rewards = tuple[float | None, ...]  # one a rollout; None: left out of its group


@dataclass(frozen=True, slots=True)
class Refresh:
    """State of the direction after a step."""

    age: int | None  # steps since v was extracted; None: the arm has no direction
    overlap: float | None = None  # ‖V_new V_oldᵀ‖²_F / k_old when v was extracted again in this step: 1 same span
    modules: int = 0
    axes: int = 0

    def columns(self) -> dict[str, Any]:
        return {"refr": self.age}


@dataclass(frozen=True, slots=True)
class StepGrads:
    """A step's gradients, group by group and in sum. students + teachers = total.

    `rows` has this rank's rollouts alone (zeros for the others'), the sums are those of all ranks.
    """

    views: Sequence[GroupView]
    rows: Sequence[RolloutGrads]  # one a group
    students: ModuleGrads
    teachers: ModuleGrads
    total: ModuleGrads

    @classmethod
    def of(
        cls,
        views: Sequence[GroupView],
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


class Arm:
    """none: plain GRPO, and the base of all arms.

    Args of the constructor: `sizes` module → r in the model's order, `device` of the gradients, `control`'s name.
    """

    name = "none"
    grad_rows: GradRows = "source"  # the coarsest gradient rows that this arm can do with
    sees: type[GroupView] = GroupView  # exactly this type: no label comes in on a subclass
    provenance: Provenance | None = None  # None: no direction
    own_modules: frozenset[str] = frozenset()  # the quarantine's alone; none: both vectors are in every module

    def __init__(self, sizes: Mapping[str, int], device: torch.device | str = "cpu", control: str = "none") -> None:
        self.sizes, self.device, self.control = dict(sizes), torch.device(device), control

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]
    ) -> "Arm":
        """The arm that `cfg` asks for, on `policy`'s modules. grader, problems: training problems, for an arm that
        has the base model answer some of them first.

        Raises:
            ValueError: files that do not fit this model, in one line.
        """
        return cls(module_sizes(policy), policy.adapter.δS.device, cfg.arm.control_name)

    def view(self, group: Group) -> GroupView:
        """What this arm may know of a group. The one door by which true labels enter, and only where the arm's monitor
        says so: they are on a type of their own, which every other arm refuses."""
        if self.sees is OracleView:
            return group.oracle_view()
        return group.problem_view() if self.sees is ProblemView else group.view()

    def shape_rewards(self, batch: Batch) -> Batch:
        """The batch with the rewards that advantages are made of; as they were paid, but for a baseline."""
        return batch

    def plan(self, views: Sequence[GroupView], step: int = 0) -> UpdatePlan:
        """Before any gradient of step `step`: what is learnt from, in one part or in several."""
        self._require(views)
        return UpdatePlan()

    def route(self, views: Views, grads: Grads, plan: Plan = None, grad_rows: GradRows | None = None) -> Routed:
        """What the adapter's two vectors learn from a step's groups.

        A gradient that is not finite is handed on untouched, for the optimiser to refuse; no gate learns from it.

        grads: of each part of the plan, of each group in the views' order: module → [rows, r].
        grad_rows: what a row is; None: this arm's own `grad_rows`. "rollout" is fine for every arm.
        """
        self._require(views)
        step = self._step_grads(views, _summed(grads), grad_rows)
        return self._split(step) if _finite(step.total) else Routed(keep=step.total, quar=None, diag=ArmDiag())

    def refresh(self, step: int) -> Refresh:
        """After the optimiser of step `step` (from 0): extract v again on the present model when that is due."""
        return Refresh(age=None)

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a resume, between steps; empty for an arm without memory."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` is of another arm or model."""
        if state:
            raise ValueError(f"checkpoint has arm state {sorted(state)[0]!r}, --intervention {self.name} has none")

    def _split(self, step: StepGrads) -> Routed:
        return Routed(keep=step.total, quar=None, diag=ArmDiag())

    def _placed(self, routed: Routed) -> Routed:
        """The same, where the quarantine has modules of its own: δS learns in the others alone, δS_hack there alone."""
        if not self.own_modules:
            return routed

        def only(g: ModuleGrads | None, own: bool) -> ModuleGrads | None:
            if g is None:
                return None
            return {m: v if (m in self.own_modules) == own else torch.zeros_like(v) for m, v in g.items()}

        return replace(routed, keep=only(routed.keep, False), quar=only(routed.quar, True))

    def _step_grads(
        self, views: Sequence[GroupView], rows: Sequence[RolloutGrads], grad_rows: GradRows | None
    ) -> StepGrads:
        given = grad_rows or self.grad_rows
        assert given in ("rollout", self.grad_rows), (given, self.grad_rows)
        return StepGrads.of(views, rows, self.sizes, given, self.device)

    def _require(self, views: Sequence[GroupView]) -> None:
        for view in views:
            assert type(view) is self.sees, (
                f"{type(self).__name__} sees a {self.sees.__name__}, got {type(view).__name__}"
            )


def module_sizes(policy: Policy) -> dict[str, int]:
    """Adapted module → r, in the model's order."""
    adapter = policy.adapter
    return {m: part.numel() for m, part in adapter.by_module(adapter.δS.detach()).items()}


def on_policy(views: Views, part: UpdatePart) -> tuple[UpdatePart, ...]:
    """A part in two, where the deployed model sampled some of its rows: those are learnt with the quarantine off, as
    they were sampled. Learnt with it on they are another policy's, without a ratio (tried: route2 with half of such
    rows under one second moment ends at 3 % solved, without them at 50 %)."""
    asked = part.rows or tuple(tuple(range(len(view))) for view in views)
    quiet, loud = (
        tuple(tuple(b for b in rows if view.deployed[b] == off) for view, rows in zip(views, asked, strict=True))
        for off in (True, False)
    )
    if not any(quiet):
        return (part,)
    return (replace(part, rows=loud), replace(part, rows=quiet, deployed=True))


def _summed(grads: Grads) -> Sequence[RolloutGrads]:
    """The gradients of a plan whose parts share out the rows: in each part the others' are 0."""
    if len(grads) == 1:
        return grads[0]
    return [{m: torch.stack([part[m] for part in of]).sum(0) for m in of[0]} for of in zip(*grads, strict=True)]


def _finite(grads: ModuleGrads) -> bool:
    return bool(torch.stack([v.isfinite().all() for v in grads.values()]).all())
