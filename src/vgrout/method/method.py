"""A run's method: one monitor and one intervention, in the order in which the loop calls them.

flag     who is flagged, by monitors of texts
watch    who would be flagged by the monitors in shadow, whose flags are recorded alone
reward   what advantages are computed from
plan     which rows are learnt from, with the quarantine on or off
route    the finished gradients → what δS learns (keep) and what δS_hack learns (quar); monitors of gradients here
refresh  after the step: extract the direction again where that is due
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vgrout.config.run import Config
from vgrout.direction.controls import Provenance
from vgrout.grpo import token_factor
from vgrout.method.base import Grads, Intervention, Monitor, Refresh, StepGrads, Views, learnt, require
from vgrout.method.controls import hinted, shrunk, shuffled
from vgrout.method.gates import GradientMonitor
from vgrout.method.interventions import Route2
from vgrout.method.live_direction import LiveDirection
from vgrout.model.policy import Policy
from vgrout.rng import torch_stream
from vgrout.tensor_types import GradRows, ModuleGrads, Routed, UpdatePart, UpdatePlan
from vgrout.types import Batch, Flags, Group, GroupView, OracleView, ProblemView


class Method:
    """See above. own_modules: the quarantine's alone; none: both vectors are in every module."""

    def __init__(
        self,
        cfg: Config,
        intervention: Intervention,
        monitor: Monitor,
        *,
        own_modules: frozenset[str] = frozenset(),
        policy: Policy | None = None,
        shadows: Mapping[str, Monitor] | None = None,
    ) -> None:
        self.cfg, self.intervention, self.monitor = cfg, intervention, monitor
        self.own_modules, self._policy, self.shadows = own_modules, policy, dict(shadows or {})
        self._on_rewards = cfg.method.changes_rewards

    @property
    def grad_rows(self) -> GradRows:
        """What a row of the gradient has to be."""
        return "rollout" if isinstance(self.monitor, GradientMonitor) else self.intervention.grad_rows

    @property
    def measures(self) -> frozenset[str]:
        """The table's columns for this method alone."""
        return self.intervention.measures | self.monitor.measures

    @property
    def direction(self) -> LiveDirection | None:
        """In gradients; None: there is none."""
        return getattr(self.intervention, "direction", None) or getattr(self.monitor, "direction", None)

    @property
    def provenance(self) -> Provenance | None:
        """Of its direction, or of the pairs that it starts on."""
        return self.direction.provenance if self.direction else self.monitor.provenance

    def view(self, group: Group, monitor: Monitor | None = None) -> GroupView:
        """What the method, or this monitor in its shadow, may know of a group. The one door for true labels, open to a
        monitor that declares it: they are on a type of their own, which all others refuse."""
        sees = (monitor or self.monitor).sees
        if sees is OracleView:
            return group.oracle_view()
        return group.problem_view() if sees is ProblemView else group.view()

    def flag(self, batch: Batch) -> Flags:
        """Who is flagged before any gradient: in all groups if rewards may change, else in those with signal."""
        if not self.cfg.method.spec.reads_flags or isinstance(self.monitor, GradientMonitor):
            return {}
        groups = batch.groups if self._on_rewards else batch.with_signal
        views = self._views(groups)
        flags = self.monitor.flag(views, batch.step)
        if self.cfg.method.random_flags and views:
            top = self.cfg.env.pass_reward
            movable = [[reward >= top for reward in view.rewards] for view in views]
            flags = shuffled(flags, movable, torch_stream(self.cfg.run.seed, "mass-matched", batch.step))
        return {group.index: of for group, of in zip(groups, flags, strict=True)}

    def watch(self, batch: Batch) -> dict[str, Flags]:
        """By monitor in shadow, who it flags, in every group. Nothing else reads it: each has its own state, draws from
        streams that are functions of seed and step, and leaves the model as it was."""
        found = {}
        for name, monitor in self.shadows.items():
            flags = monitor.flag(self._views(batch.groups, monitor), batch.step)
            found[name] = {group.index: of for group, of in zip(batch.groups, flags, strict=True)}
        return found

    def reward(self, batch: Batch, flags: Flags) -> Batch:
        """The batch with the rewards that advantages are computed from: the grader's, unless flags change them."""
        if self._policy is not None and self.cfg.method.control_spec.learns_hinted:
            batch = hinted(batch, self._policy)
        if not self._on_rewards:
            return batch
        return replace(batch, groups=tuple(self._rewarded(group, flags) for group in batch.groups))

    def plan(self, batch: Batch, flags: Flags) -> UpdatePlan:
        """What is learnt from, and which groups are worth a forward: one whose advantages are all 0 teaches nothing,
        unless the monitor's quarantine learns from it, or a monitor of gradients may give it a signal."""
        if isinstance(self.monitor, GradientMonitor) and self._on_rewards:
            ones = tuple((1.0,) * len(group) for group in batch.groups)
            rows = tuple(tuple(range(len(group))) for group in batch.groups)
            return UpdatePlan(batch.groups, (UpdatePart(rows, ones),), batch.step, unit=True)
        owns = self.monitor.owns_quarantine
        groups = tuple(g for g in batch.groups if g.has_signal or (owns and any(flags[g.index].teaches)))
        views = self._views(groups)
        if isinstance(self.monitor, GradientMonitor):
            return UpdatePlan(groups, self.intervention.parts(views, self.monitor.flag(views, batch.step)), batch.step)
        of = [flags[group.index] for group in groups] if flags else []
        parts = self.intervention.parts(views, of)
        if self.monitor.owns_quarantine:  # δS learns with the quarantine off, which learns beside it
            parts = (*(replace(part, deployed=True, learns="kept") for part in parts), self.monitor.part(of))
        return UpdatePlan(groups, parts, batch.step)

    def route(self, plan: UpdatePlan, grads: Grads, flags: Flags) -> Routed:
        """What the adapter's two vectors learn from a step's groups.

        grads: of each part of the plan, of each of its groups in order: module → [rows, r].
        """
        views = self._views(plan.groups)
        of = [flags[group.index] for group in plan.groups] if flags else []
        if self.monitor.owns_quarantine:
            routed = self._with_quarantine(plan, grads, views)
        elif not isinstance(self.monitor, GradientMonitor):
            routed = self.intervention.route(views, grads, plan.parts, of)
        elif plan.unit:
            routed = self._reward_afterwards(plan, grads, views, self.monitor)
        else:
            step = self.intervention.step_grads(views, grads, self.grad_rows)
            assert isinstance(self.intervention, Route2), self.intervention
            routed = self.intervention.divide(step, self.monitor.read(step, plan.step), self.monitor.direction)
        if self.cfg.method.control_spec.shrinks:
            step = self.intervention.step_grads(views, grads, self.grad_rows)
            return shrunk(routed, step.total)
        return self._placed(replace(routed, flags=routed.flags or flags))

    def refresh(self, step: int) -> Refresh:
        """After the optimiser of step `step` (from 0)."""
        refreshed = self.intervention.refresh(step)
        return refreshed if refreshed.age is not None else self.monitor.refresh(step)

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a resume, between steps."""
        return {f"{at}/{key}": value for at, part in self._parts.items() for key, value in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` is of another method or model."""
        for at, part in self._parts.items():
            part.load_state_dict({k.removeprefix(f"{at}/"): v for k, v in state.items() if k.startswith(f"{at}/")})

    @property
    def _parts(self) -> dict[str, Intervention | Monitor]:
        shadows = {f"shadow/{name}": monitor for name, monitor in self.shadows.items()}
        return {"intervention": self.intervention, "monitor": self.monitor, **shadows}

    def _views(self, groups: Sequence[Group], monitor: Monitor | None = None) -> list[GroupView]:
        monitor = monitor or self.monitor
        views = [self.view(group, monitor) for group in groups]
        require(views, monitor.sees, monitor)
        return views

    def _rewarded(self, group: Group, flags: Flags) -> Group:
        if group.index not in flags:
            return group
        return replace(group, shaped=self.intervention.reward(self.view(group), flags[group.index]))

    def _with_quarantine(self, plan: UpdatePlan, grads: Grads, views: Views) -> Routed:
        """Here the quarantine learns beside the kept part: nothing of that one's gradient is routed."""
        keep, quar = learnt(grads, plan.parts, self.intervention.sizes, self.intervention.device, both=False)
        idle = not any(any(view.advantages) for view in views)
        return Routed(None if idle else keep, quar, apart=True)

    def _reward_afterwards(self, plan: UpdatePlan, grads: Grads, views: Views, monitor: GradientMonitor) -> Routed:
        """With one update a batch, a rollout's gradient A u_b is linear in its advantage A: flags are read under its
        old advantage (1 where that is 0), and A' u_b is learnt under its new one."""
        sizes, device = self.intervention.sizes, self.intervention.device
        (unit,) = grads

        def scaled(advantages: Sequence[Sequence[float]]) -> StepGrads:
            factors = [torch.tensor(A, device=device)[:, None] for A in advantages]
            rows = [{m: f * u for m, u in of.items()} for f, of in zip(factors, unit, strict=True)]
            return StepGrads.of(views, rows, sizes, "rollout", device)

        signs = [[math.copysign(1.0, A) if A else 1.0 for A in view.advantages] for view in views]
        shares = monitor.read(scaled(signs), plan.step)
        flags = {view.index: of for view, of in zip(views, shares.flags, strict=True)}
        groups = [self._rewarded(group, flags) for group in plan.groups]
        if not any(group.has_signal for group in groups):
            return Routed(None, flags=flags)
        factor = token_factor(self.cfg.loss, plan.groups, groups)
        step = scaled([[factor * A for A in group.advantages] for group in groups])
        diag = replace(monitor.direction.diagnose(step, step.total, step.students, step.teachers), **shares.readings)
        return Routed(step.total, None, diag, flags, directions=monitor.direction.V)

    def _placed(self, routed: Routed) -> Routed:
        """`routed`, where the quarantine has modules of its own: δS_hack learns there alone, δS in the others alone."""
        if not self.own_modules:
            return routed

        def only(g: ModuleGrads | None, own: bool) -> ModuleGrads | None:
            if g is None:
                return None
            return {m: v if (m in self.own_modules) == own else torch.zeros_like(v) for m, v in g.items()}

        return replace(routed, keep=only(routed.keep, False), quar=only(routed.quar, True))
