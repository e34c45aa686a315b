"""A run's method: one monitor and one intervention, in the order in which the loop calls them.

flag     what is flagged, by monitors of texts; what advantages are computed from; the rows that are learnt from
route    the gradients of these rows → what δS learns (keep) and what δS_hack learns (quar); monitors of gradients here
refresh  after the step: extract the direction again where that is due
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from vgrout.config.run import Config
from vgrout.data import Batch, Flags, Group, GroupView, OracleView, UpdateRow
from vgrout.direction.controls import Provenance
from vgrout.method.base import Intervention, Monitor, Part, Refresh, StepGradient
from vgrout.method.controls import shuffled
from vgrout.method.live_direction import LiveDirection
from vgrout.model.policy import Policy, modules_of_block
from vgrout.rng import torch_stream
from vgrout.tensor_types import Routed


class Method:
    """See above. shadows: monitors whose flags are recorded, and change nothing: each has its own state, draws from
    streams that are functions of seed and step, and leaves the model as it was."""

    def __init__(
        self,
        cfg: Config,
        intervention: Intervention,
        monitor: Monitor,
        policy: Policy,
        *,
        shadows: Mapping[str, Monitor] | None = None,
    ) -> None:
        self.cfg, self.intervention, self.monitor, self.policy = cfg, intervention, monitor, policy
        self.shadows = dict(shadows or {})
        self.spans, block = policy.adapter.spans, cfg.method.quarantine_block
        self.own_modules = frozenset(
            modules_of_block(policy, self.spans, block) if block is not None else ()
        )

    @property
    def measures(self) -> frozenset[str]:
        """The table's columns for this method alone."""
        return self.intervention.measures | self.monitor.measures

    @property
    def direction(self) -> LiveDirection | None:
        """In gradients; None: there is none."""
        return self.intervention.direction or self.monitor.direction

    @property
    def provenance(self) -> Provenance | None:
        """Of its direction."""
        return self.direction.provenance if self.direction else None

    def flag(self, batch: Batch) -> Batch:
        """The batch with what is flagged before any gradient, the rewards that advantages are computed from, and the
        rows that are learnt from: those of groups whose rewards differ, as every advantage of the others is 0."""
        groups = self._shadowed(self._flagged(batch), batch.step)
        if self.intervention.acts_on == "rewards":
            groups = tuple(map(self._rewarded, groups))
        with_signal = [group for group in groups if group.has_signal]
        return replace(batch, groups=groups, rows=tuple(self._rows(with_signal, batch.step)))

    def view(self, group: Group, monitor: Monitor | None = None) -> GroupView:
        """What the method, or this monitor in its shadow, may know of a group. The one door for true labels, open to a
        monitor that declares it: they are on a type of their own, which all others refuse."""
        return group.oracle_view() if (monitor or self.monitor).sees_labels else group.view()

    def route(self, batch: Batch, g: Float[Tensor, "N R"] | None) -> Routed:
        """What the adapter's two vectors learn from the gradients of the batch's rows; None: they are not finite."""
        if g is None:
            return Routed(finite=False)
        if not batch.rows:
            return Routed()
        step = StepGradient(g, batch.rows, self.spans, self.direction)
        flags = {group.index: group.flags for group in batch.groups if group.flags}
        self.monitor.read(step, batch.step)
        if step.of_row is not None:
            flags = _flags(step)
        elif self.intervention.routes:
            flags = {
                index: replace(of, shares=tuple(map(float, of.flagged)))
                for index, of in flags.items()
            }
        return self._placed(replace(self.intervention.route(step), flags=flags))

    def refresh(self, step: int) -> Refresh:
        """After the optimiser of step `step` (from 0)."""
        refreshed = self.intervention.refresh(step)
        return refreshed if refreshed.age is not None else self.monitor.refresh(step)

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a resume, between steps."""
        return {
            f"{at}/{key}": value
            for at, part in self._parts.items()
            for key, value in part.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises Refused where `state` is of another method or model."""
        for at, part in self._parts.items():
            part.load_state_dict(
                {k.removeprefix(f"{at}/"): v for k, v in state.items() if k.startswith(f"{at}/")}
            )

    @property
    def _parts(self) -> dict[str, Part]:
        shadows = {f"shadow/{name}": monitor for name, monitor in self.shadows.items()}
        return {"intervention": self.intervention, "monitor": self.monitor, **shadows}

    def _views(self, groups: Sequence[Group], monitor: Monitor) -> list[GroupView]:
        sees = OracleView if monitor.sees_labels else GroupView
        views = [self.view(group, monitor) for group in groups]
        for view in views:  # their exact type: a label that nobody may see comes in on a subclass
            assert type(view) is sees, (
                f"{type(monitor).__name__} sees a {sees.__name__}, got {type(view).__name__}"
            )
        return views

    def _flagged(self, batch: Batch) -> tuple[Group, ...]:
        """By a monitor of texts: in all groups if rewards may change, else in those with signal."""
        if not self.intervention.reads_flags or self.monitor.reads == "gradients":
            return batch.groups
        looked_at = batch.groups if self.intervention.acts_on == "rewards" else batch.with_signal
        views = self._views(looked_at, self.monitor)
        flags = self.monitor.flag(views, batch.step)
        if self.cfg.method.random_flags and views:
            flags = shuffled(
                flags,
                [view.passed for view in views],
                torch_stream(self.cfg.run.seed, "mass-matched", batch.step),
            )
        of = {group.index: flag for group, flag in zip(looked_at, flags, strict=True)}
        return tuple(replace(group, flags=of.get(group.index)) for group in batch.groups)

    def _rewarded(self, group: Group) -> Group:
        assert group.flags is not None
        return replace(group, shaped=self.intervention.reward(group.view(), group.flags.flagged))

    def _shadowed(self, groups: Sequence[Group], step: int) -> tuple[Group, ...]:
        """Every group with the flags of the monitors in shadow."""
        said = {name: m.flag(self._views(groups, m), step) for name, m in self.shadows.items()}
        return tuple(
            replace(group, shadows={name: flags[i] for name, flags in said.items()})
            for i, group in enumerate(groups)
        )

    def _rows(self, groups: Sequence[Group], step: int) -> list[UpdateRow]:
        """A row of g is a rollout where gradients decide or the intervention asks for it, else the sum of those that
        are learnt alike."""
        by_gradient, by_flag = (
            self.monitor.reads == "gradients",
            self.intervention.acts_on == "gradient",
        )
        by_rollout = by_gradient or self.intervention.by_rollout
        known = (
            self.monitor.flag(self._views(groups, self.monitor), step)
            if by_gradient
            else [g.flags for g in groups]
        )
        rows: list[UpdateRow] = []
        at: dict[tuple[object, ...], int] = {}
        for group, flags in zip(groups, known, strict=True):
            flagged = flags.flagged if flags else (False,) * len(group)
            advantages = self.intervention.advantages(group.view(), flagged)
            for b, (rollout, flag, A) in enumerate(
                zip(group.rollouts, flagged, advantages, strict=True)
            ):
                alike = (b,) if by_rollout else (rollout.source, by_flag and flag)
                n = at.setdefault((group.index, *alike), len(at))
                rows.append(UpdateRow(rollout, group.index, A, flag, n))
        return rows

    def _placed(self, routed: Routed) -> Routed:
        """`routed`, where the quarantine has modules of its own: δS_hack learns there alone, δS in the others alone."""
        if not self.own_modules:
            return routed

        def only(g: Tensor | None, own: bool) -> Tensor | None:
            if g is not None:
                g = g.clone()
                for m, span in self.spans.items():
                    if (m in self.own_modules) != own:
                        g[span] = 0
            return g

        return replace(routed, keep=only(routed.keep, False), quar=only(routed.quar, True))


def _flags(step: StepGradient) -> dict[int, Flags]:
    """By group, what a gate flags: rollouts of which more than half is flagged."""
    assert step.of_row is not None
    shares: dict[int, list[float]] = {}
    for row, share in zip(step.rows, step.of_row.tolist(), strict=True):
        shares.setdefault(row.group, []).append(share)
    return {
        index: Flags(tuple(x > 0.5 for x in of), scores=tuple(of), shares=tuple(of))
        for index, of in shares.items()
    }
