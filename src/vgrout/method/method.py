"""A run's method: one monitor and one intervention, in the order in which the loop calls them.

flag     what text monitors flag; what advantages are computed from; the rows that are learnt from
route    the gradients of these rows → what δS learns (keep) and what δS_hack learns (quar)
         gradient monitors decide here
refresh  after the step: extract the direction again where that is due
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.run import Config
from vgrout.config.specs import INTERVENTIONS, MONITORS, class_of
from vgrout.direction.controls import Provenance
from vgrout.ground import ranks
from vgrout.ground.data import Batch, Flags, Group, GroupView, Refresh, Task, UpdateRow
from vgrout.ground.rng import torch_stream
from vgrout.ground.tensor_types import Routed
from vgrout.method.base import Intervention, Monitor, Part, under
from vgrout.method.gates import GradientMonitor, shuffled
from vgrout.method.gradients import GradientFlags, StepGradient
from vgrout.method.live_direction import LiveDirection, Setup
from vgrout.method.monitors import draws
from vgrout.model.policy import Policy, modules_of_block


def ask(monitor: Monitor, views: Sequence[GroupView], step: int) -> list[Flags]:
    """What a text monitor, which may be somebody's own, flags of the groups: a flag a rollout."""
    if not views:
        return []
    found = monitor.flag(views, step)
    should = (
        "should be a list of Flags, one a group, as flags_of(views, {(group, rollout), …}) makes it"
    )
    returned = f"{type(monitor).__name__}.flag returned {found!r:.200}; it {should}"
    assert isinstance(found, list), returned
    assert all(isinstance(flags, Flags) for flags in found), returned
    assert [len(flags.flagged) for flags in found] == [len(view) for view in views], returned
    plain: list[Flags] = []
    for flags in found:
        flagged = tuple(None if flag is None else bool(flag) for flag in flags.flagged)
        plain.append(replace(flags, flagged=flagged))
    return plain


class Method:
    """One monitor and one intervention, asked in the order above.

    shadows: monitors whose flags are recorded, and change nothing. Each has its own state, draws from streams that are
        functions of seed and step, and leaves the model as it was.
    """

    def __init__(
        self,
        cfg: Config,
        intervention: Intervention,
        monitor: Monitor,
        policy: Policy,
        *,
        shadows: Mapping[str, Monitor] | None = None,
    ) -> None:
        self.cfg = cfg
        self.intervention = intervention
        self.monitor = monitor
        self.policy = policy
        self.shadows = dict(shadows or {})
        self.spans = policy.adapter.spans
        # the block that δS_hack has to itself, from 1, or −1 from the end; None: it shares all with δS
        block = cfg.method.quarantine_block
        self.own_modules: frozenset[str] = frozenset()
        if block is not None:
            modules = modules_of_block(policy, self.spans, block)
            self.own_modules = frozenset(modules)

    @property
    def measures(self) -> frozenset[str]:
        """Groups of columns that this method fills: those with `when=` one of these words in ground/table.py."""
        columns = self.intervention.measures | self.monitor.measures
        for monitor in self.shadows.values():
            columns |= monitor.measures
        return columns

    @property
    def direction(self) -> LiveDirection | None:
        """The hack direction that the intervention or the monitor uses; None: there is none."""
        return self.intervention.direction or self.monitor.direction

    @property
    def provenance(self) -> Provenance | None:
        """Where its direction came from."""
        if self.direction is None:
            return None
        return self.direction.provenance

    def prompted(self, problems: Sequence[Task]) -> list[Task]:
        """The problems with the prompts under which they are trained on."""
        found: list[Any] = []
        for problem in problems:
            messages = tuple(self.intervention.prompt(problem.messages))
            task: Any = problem  # a frozen dataclass
            found.append(replace(task, messages=messages))
        return found

    def flag(self, batch: Batch) -> Batch:
        """Let text monitors flag, and make the table of rows that are learnt from.

        Returns the batch with these flags, with the rewards that advantages are computed from, and with the rows that
        are learnt from: those of groups whose rewards differ, since in the others every advantage is 0; with a KL or a
        teacher model in the loss those of all groups.
        """
        groups = self._flagged(batch)
        groups = self._shadowed(groups, batch.step)
        if self.intervention.spec.acts_on == "rewards":
            groups = tuple(self._with_new_rewards(group) for group in groups)
        learnt_from = groups
        if not self.cfg.loss.learns_at_zero_advantage:
            learnt_from = [group for group in groups if group.has_signal]
        rows = self._rows(learnt_from, batch.step)
        measured: dict[str, int] = {}
        for monitor in (self.monitor, *self.shadows.values()):
            measured |= monitor.step_columns(batch.step)
        return replace(
            batch,
            groups=groups,
            rows=tuple(rows),
            measured=measured,
        )

    def route(self, batch: Batch, g: Float[Tensor, "N R"] | None) -> Routed:
        """Divide the gradients of the batch's rows between the adapter's two vectors. g: None if not finite."""
        if g is None:
            return Routed(finite=False)
        if not batch.rows:
            return Routed()
        step = StepGradient(g, batch.rows, self.spans, self.direction)
        if isinstance(self.monitor, GradientMonitor):
            found, flags = self._flags_of_gradients(self.monitor, step, batch)
            step = replace(step, flags=found)
        else:
            flags = self._flags_of_texts(batch.groups)
        routed = self.intervention.route(step)
        does = f"{type(self.intervention).__name__}.route"
        assert isinstance(routed, Routed), f"{does} returned no Routed: {type(routed)}"
        R = g.shape[1]
        for vector in (routed.keep, routed.quar):
            if vector is not None:
                assert vector.shape == (R,), f"{does} returned {[*vector.shape]}, should be [{R}]"
        if not self.intervention.spec.routes:
            assert routed.quar is None, (
                f"{does} returned quar; its class does not say routes = True"
            )
        return self._placed(replace(routed, flags=flags))

    def _flags_of_gradients(
        self, monitor: GradientMonitor, step: StepGradient, batch: Batch
    ) -> tuple[GradientFlags, dict[int, Flags]]:
        """What a gradient monitor flags of the step's rows, and the same by group. Each rollout has a row of its own.

        The monitor is asked about groups whose rewards differ. The others are in the step for a KL or a teacher model
        alone, and are never flagged.
        """
        rows = batch.rows
        with_signal = {group.index for group in batch.with_signal}
        asked = [n for n, row in enumerate(rows) if row.group in with_signal]  # rows of g, too
        N = len(rows)
        share, of_row = step.g.new_zeros(N, 1), step.g.new_zeros(N)
        if not asked:
            return GradientFlags(share, of_row), {}
        seen = replace(
            step,
            g=step.g if len(asked) == N else step.g[asked],
            rows=[replace(rows[n], row_of_g=place) for place, n in enumerate(asked)],
        )
        found = monitor.flag_gradients(seen, batch.step)
        M = len(step.direction.V) if step.direction else 1  # modules that have a direction
        assert found.share.shape in ((len(asked), M), (len(asked), 1)), found.share.shape
        if self.cfg.method.flags_kept < 1:
            kept: list[
                bool
            ] = []  # of each row asked about: a rollout of these groups, in their order
            for group in batch.with_signal:
                kept += self._kept(group, batch.step)
            mask = torch.tensor(kept).to(found.of_row)
            found = replace(found, share=found.share * mask[:, None], of_row=found.of_row * mask)
        flags = _flags_of_groups([rows[n] for n in asked], found)
        if len(asked) < N:
            share = step.g.new_zeros(N, found.share.shape[1])
            share[asked] = found.share.to(share)
            of_row[asked] = found.of_row.to(of_row)
            found = replace(found, share=share, of_row=of_row)
        return found, flags

    def _flags_of_texts(self, groups: Sequence[Group]) -> dict[int, Flags]:
        """What a text monitor has flagged, by group; where the intervention routes, with shares, which are 0 or 1."""
        flags: dict[int, Flags] = {}
        for group in groups:
            if not group.flags:
                continue
            flags[group.index] = group.flags
            if self.intervention.spec.routes:
                shares = tuple(float(flag) for flag in group.flags.acted_on)
                flags[group.index] = replace(group.flags, shares=shares)
        return flags

    def refresh(self, step: int) -> Refresh:
        """After the optimiser's step number `step` (from 0): the intervention's direction, else the monitor's, is
        extracted again where that is due."""
        refreshed = self.intervention.refresh(step)
        if refreshed.age is not None:
            return refreshed
        return self.monitor.refresh(step)

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a resume, between steps."""
        state: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            for key, value in part.state_dict().items():
                state[f"{name}/{key}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises Refused where `state` is of another method or model."""
        for name, part in self._parts.items():
            part.load_state_dict(under(state, f"{name}/"))

    @property
    def _parts(self) -> dict[str, Part]:
        parts: dict[str, Part] = {
            "intervention": self.intervention,
            "monitor": self.monitor,
        }
        for name, monitor in self.shadows.items():
            parts[f"shadow/{name}"] = monitor
        return parts

    def _views(self, groups: Sequence[Group], monitor: Monitor) -> list[GroupView]:
        """What this monitor may know of the groups.

        This is the only place where true labels go to a monitor. It has to declare that it sees them.
        """
        return [group.view(labels=monitor.sees_labels) for group in groups]

    def _flagged(self, batch: Batch) -> tuple[Group, ...]:
        """The groups with a text monitor's flags.

        It looks at groups with signal, or at all if rewards may change.
        """
        spec = self.intervention.spec
        if not spec.reads_flags or isinstance(self.monitor, GradientMonitor):
            return batch.groups
        looked_at = batch.with_signal
        if spec.acts_on == "rewards" or self.cfg.loss.learns_at_zero_advantage:
            looked_at = batch.groups
        views = self._views(looked_at, self.monitor)
        # Every rank asks its own monitor, and all go by the first one's: two answers of a language
        # model need not agree.
        flags = ranks.from_first(ask(self.monitor, views, batch.step))
        if self.cfg.method.random_flags and views:
            # a control: as many flags, on rewarded rollouts at random
            stream = torch_stream(self.cfg.run.seed, "mass-matched", batch.step)
            movable = [view.passed for view in views]
            flags = shuffled(flags, movable, stream)
        by_group: dict[int, Flags] = {}
        for group, of_group in zip(looked_at, flags, strict=True):
            kept = self._kept(group, batch.step)
            flagged = tuple(
                flag and keep for flag, keep in zip(of_group.flagged, kept, strict=True)
            )
            by_group[group.index] = replace(of_group, flagged=flagged)
        return tuple(replace(group, flags=by_group.get(group.index)) for group in batch.groups)

    def _kept(self, group: Group, step: int) -> list[bool]:
        """Which rollouts may be flagged: --flags-kept drops the flags of the others."""
        share = self.cfg.method.flags_kept
        if share == 1:
            return [True] * len(group)
        return [draw < share for draw in draws(group.view(), self.cfg.run.seed, step)]

    def _with_new_rewards(self, group: Group) -> Group:
        flagged = group.flags.acted_on if group.flags else (False,) * len(group)
        new_rewards = self.intervention.reward(group.view(), flagged)
        return replace(group, new_rewards=tuple(new_rewards))

    def _shadowed(self, groups: Sequence[Group], step: int) -> tuple[Group, ...]:
        """Every group with the flags of the monitors in shadow."""
        flags: dict[str, list[Flags]] = {}
        for name, monitor in self.shadows.items():
            views = self._views(groups, monitor)
            flags[name] = ask(monitor, views, step)
        shadowed: list[Group] = []
        for i, group in enumerate(groups):
            of_group = {name: of_monitor[i] for name, of_monitor in flags.items()}
            shadowed.append(replace(group, shadows=of_group))
        return tuple(shadowed)

    def _rows(self, groups: Sequence[Group], step: int) -> list[UpdateRow]:
        """Make the table that is learnt from: one `UpdateRow` for each rollout.

        A rollout that the intervention leaves out has a row of advantage 0, so that it is measured. Where the loss
        learns at advantage 0 too (a KL, a teacher model), it has none, since it would be learnt from.

        Its `row_of_g` is the row of g that its gradient is added to. Under a gradient monitor, or where the
        intervention asks for it, that row is its own. Otherwise it shares one with the rollouts of its group that have
        its source and, if the intervention acts on the gradient, its flag.
        """
        spec = self.intervention.spec
        reads_gradients = isinstance(self.monitor, GradientMonitor)
        one_each = reads_gradients or spec.by_rollout
        rows: list[UpdateRow] = []
        # what the rollouts of a row of g have in common → its index
        rows_of_g: dict[Hashable, int] = {}
        for group in groups:
            known, flagged = self._known_and_flagged(group)
            # route2 compares the others among themselves. A gradient monitor has flagged nothing yet,
            # a text monitor knows nothing beforehand
            set_apart = [bool(flag) for flag in flagged]
            if reads_gradients:
                kept = self._kept(group, step)
                set_apart = [a and b for a, b in zip(known, kept, strict=True)]
            advantages = self.intervention.advantages(group.view(), set_apart)
            for b, (rollout, A) in enumerate(zip(group.rollouts, advantages, strict=True)):
                left_out = group.learnt_rewards[b] is None
                if left_out and self.cfg.loss.learns_at_zero_advantage:
                    continue
                in_common: Hashable = (group.index, b)
                if not one_each:
                    acted_on = spec.acts_on == "gradient" and flagged[b]
                    in_common = (group.index, rollout.source, acted_on)
                next_row = len(rows_of_g)
                row = UpdateRow(
                    rollout,
                    group.index,
                    float(A),
                    flagged=flagged[b],
                    known_hack=known[b],
                    row_of_g=rows_of_g.setdefault(in_common, next_row),
                    left_out=left_out,
                )
                rows.append(row)
        return rows

    def _known_and_flagged(self, group: Group) -> tuple[Sequence[bool], Sequence[bool | None]]:
        """Which rollouts a gradient monitor knows to hack, and which a text monitor has flagged."""
        nothing = (False,) * len(group)
        if isinstance(self.monitor, GradientMonitor):
            (view,) = self._views([group], self.monitor)
            return self.monitor.known_hacks(view), nothing
        if group.flags is None:
            return nothing, nothing
        return nothing, group.flags.flagged

    def _placed(self, routed: Routed) -> Routed:
        """Where the quarantine has modules of its own, let δS_hack learn in these alone, and δS in the others alone.

        The rest is dropped: keep + quar is then no longer g.
        """
        if not self.own_modules:
            return routed
        others = self.spans.keys() - self.own_modules
        keep = self._without(self.own_modules, routed.keep)
        quar = self._without(others, routed.quar)
        return replace(routed, keep=keep, quar=quar)

    def _without(self, modules: Set[str], g: Tensor | None) -> Tensor | None:
        """The gradient [R] with zeros in these modules."""
        if g is None:
            return None
        g = g.clone()
        for module, span in self.spans.items():
            if module in modules:
                g[span] = 0
        return g


def _flags_of_groups(
    rows: Sequence[UpdateRow],
    gradient_flags: GradientFlags,
) -> dict[int, Flags]:
    """A gradient monitor's flags by group. A rollout counts as flagged where more than half of its gradient is."""
    of_rows: list[float] = gradient_flags.of_row.tolist()
    by_group: dict[int, list[float]] = {}
    for row, share in zip(rows, of_rows, strict=True):
        of_group = by_group.setdefault(row.group, [])
        of_group.append(share)
    flags: dict[int, Flags] = {}
    for index, of_group in by_group.items():
        shares = tuple(of_group)
        flagged = tuple(share > 0.5 for share in shares)
        flags[index] = Flags(flagged, scores=shares, shares=shares)
    return flags


def make_method(setup: Setup) -> Method:
    """A run's method, on its policy's modules.

    Raises:
        Refused: no pairs where they are needed, files that do not fit this model; one line.
    """
    cfg = setup.cfg.method
    intervention = class_of(INTERVENTIONS[cfg.intervention]).make(setup)
    monitor = make_monitor(setup, cfg.monitor_name)
    shadows = {name: make_monitor(setup, name) for name in cfg.in_shadow}
    return Method(setup.cfg, intervention, monitor, setup.policy, shadows=shadows)


def make_monitor(setup: Setup, name: str) -> Monitor:
    """A monitor of this name, with a seed of its own where it learns from one. Raises Refused as `make_method`."""
    spec = MONITORS[name]
    kind: Any = class_of(spec)
    if "seed" not in spec.needs:
        return kind.make(setup)
    return kind.make(setup, seed_monitor=make_monitor(setup, setup.cfg.method.seed_monitor))
