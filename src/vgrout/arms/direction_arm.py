"""Base of the arms that have a direction in gradients (erase, route, route2), and their shrinkage control."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from vgrout.arms.base import Arm, Grads, Plan, Refresh, StepGrads, Views, module_sizes, on_policy
from vgrout.arms.projection import GateMode, along, cos_pre, split
from vgrout.config.arm import ArmConfig
from vgrout.config.run import Config
from vgrout.direction.controls import Provenance, cosine_to_real, haar_like, overlap
from vgrout.direction.extract import Direction, extract, obtain
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.tensor_types import ArmDiag, Directions, GradRows, ModuleGrads, Routed, UpdatePart, UpdatePlan
from vgrout.types import Diverged, GroupView, Problem

TOLERANCE = 1e-4  # of the invariants, relative to the norms that went in: fp32 sums of some hundred rows


class DirectionArm(Arm):
    """An arm with orthonormal hack-ward rows V [k, r] for some modules; the others pass through.

    Args of the constructor: `cfg` the arm's settings, `pick` chooses V from a direction, `again` extracts on the
    present model every `cfg.vhack_refresh_every` steps (None: the direction is frozen), `seed` of the run.
    """

    routes = False  # whether the policy that samples has a quarantine

    def __init__(
        self,
        sizes: Mapping[str, int],
        direction: Direction,
        pick: Callable[[Direction], Directions],
        *,
        cfg: ArmConfig,
        again: Callable[[], Direction] | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(sizes, device, cfg.control_name)
        self._pick, self._again, self._every = pick, again, cfg.vhack_refresh_every if again else 0
        self.V: Directions = {}
        self._take(direction)

    @classmethod
    def chosen(cls, cfg: ArmConfig) -> Callable[[Direction], Directions]:
        """What this arm uses of a direction: the first k axes per module."""
        return lambda d: d.select(cfg.v_hack_k, cfg.v_hack_drop_bottom_frac)

    @classmethod
    def with_direction(
        cls,
        cfg: ArmConfig,
        sizes: Mapping[str, int],
        direction: Direction,
        seed: int,
        *,
        device: torch.device | str = "cpu",
        again: Callable[[], Direction] | None = None,
    ) -> "DirectionArm":
        """The arm with this direction; `again` extracts on the present model, None: frozen.

        Haar: random rows in the shape of the extracted ones. They stay as they are; only the pair band around them
        follows the model, and there each is signed so that the pairs' hack side lies above, which favours the control.
        """
        pick, banded = cls.chosen(cfg), cfg.monitor_name == "band"
        if cfg.haar:
            drawn = haar_like(pick(direction), seed if cfg.route2_random_v_seed is None else cfg.route2_random_v_seed)
            rows = direction.signed(drawn) if banded else drawn
            pick, again = (lambda _: rows), again if banded else None
        return cls(sizes, direction, pick, cfg=cfg, again=again, seed=seed, device=device)

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]
    ) -> "DirectionArm":
        """With its direction loaded, or extracted on the spot. Under a control whose direction is not the real one, the
        real one is obtained too, to say in `provenance` how far they coincide."""
        arm, pairs, seed = cfg.arm, inputs.pairs, cfg.run.seed
        if pairs is None and arm.other_pairs:
            raise ValueError(f"--control {arm.control}: needs the pairs; give --vhack-pairs-path")
        if pairs is None and arm.vhack_refresh_every and not arm.haar:
            raise ValueError(
                "--vhack-refresh-every: needs the pairs; give --vhack-pairs-path, or 0 for a frozen direction"
            )
        top_k, tau_axis = arm.v_hack_extract_top_k, arm.v_hack_tau_axis
        real = direction = obtain(policy, pairs, arm.v_hack_path, top_k, tau_axis)
        if pairs is not None and arm.other_pairs:
            pairs = pairs.shuffled(seed) if arm.control == "shuffled" else inputs.placebo
            assert pairs is not None, arm.control
            direction = obtain(policy, pairs, None, top_k, tau_axis)
        again = partial(extract, policy, pairs, top_k, tau_axis) if pairs is not None else None
        made = cls.with_direction(
            arm, module_sizes(policy), direction, seed, device=policy.adapter.δS.device, again=again
        )
        made.provenance = Provenance(
            pairs=direction.meta.pairs_source,
            pairs_sha256=direction.meta.pairs_sha256,
            modules=len(made.V),
            axes=sum(map(len, made.V.values())),
            cosine_to_real=cosine_to_real(made.V, cls.chosen(arm)(real)) if arm.haar or arm.other_pairs else None,
        )
        return made

    def plan(self, views: Sequence[GroupView], step: int = 0) -> UpdatePlan:
        self._require(views)
        return UpdatePlan(on_policy(views, UpdatePart()) if self.routes else (UpdatePart(),))

    def refresh(self, step: int) -> Refresh:
        done = step + 1
        age = done % self._every if self._every else done
        shared = None
        if self._again and age == 0:
            before = self.V
            try:
                self._take(self._again())
            except ValueError as e:  # the pairs are the same as before: it is the model
                raise Diverged(
                    f"step {step}: the policy has collapsed: no direction can be extracted on it ({e})"
                ) from e
            shared = overlap(self.V, before)
        return Refresh(age, shared, len(self.V), sum(len(rows) for rows in self.V.values()))

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {f"V/{m}": rows.clone() for m, rows in self.V.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        V = {key.removeprefix("V/"): rows for key, rows in state.items() if key.startswith("V/")}
        for m, rows in V.items():
            if m not in self.sizes or rows.shape[1] != self.sizes[m]:
                raise ValueError(f"checkpoint's direction has {m} {[*rows.shape]}, r is {self.sizes.get(m)} here")
        self.V = {m: V[m].to(self.device) for m in self.sizes if m in V}

    def _take(self, direction: Direction) -> None:
        V = {m: rows.to(self.device) for m, rows in self._pick(direction).items()}
        for m, rows in V.items():
            if m not in self.sizes or rows.shape[1] != self.sizes[m]:
                raise ValueError(f"direction has {m} {[*rows.shape]}, this model has r = {self.sizes.get(m)}")
        self.V = {m: V[m] for m in self.sizes if m in V}  # the model's order, whatever the file's

    def _diag(self, step: StepGrads, keep: ModuleGrads, keep_s: ModuleGrads, keep_t: ModuleGrads) -> ArmDiag:
        """What can be read off g and the kept part; keep_s, keep_t: what each source's rows alone would leave."""
        return ArmDiag(
            cos_pre=cos_pre(step.total, self.V),
            cos_pre_s=cos_pre(step.students, self.V),
            cos_pre_t=cos_pre(step.teachers, self.V),
            cos_post=cos_pre(keep, self.V),
            cos_post_s=cos_pre(keep_s, self.V),
            cos_post_t=cos_pre(keep_t, self.V),
        )

    def _parts(self, g: ModuleGrads, mode: GateMode, overshoot: float = 1.0) -> tuple[ModuleGrads, ModuleGrads]:
        """What surgery along V keeps of g, and what it removes; modules without a direction pass through."""
        keep, removed = dict(g), {m: torch.zeros_like(v) for m, v in g.items()}
        for m, V in self.V.items():
            keep[m], removed[m] = split(g[m], V, mode, overshoot)
        return keep, removed


class ShrinkageControl(Arm):
    """The shrinkage control: the vanilla gradient, its *update* scaled by the share that `inner` would have kept.

    The gradient is not scaled, since AdamW would undo that: the optimiser multiplies δS's change by `Routed.scale`.
    Kept share: 1 - routed share for route2, else ‖keep‖ / ‖g‖ over all modules, before any rescaling.
    """

    def __init__(self, inner: DirectionArm) -> None:
        self.inner, self.name, self.grad_rows, self.provenance = inner, inner.name, inner.grad_rows, inner.provenance
        super().__init__(inner.sizes, inner.device, "shrinkage")

    def route(self, views: Views, grads: Grads, plan: Plan = None, grad_rows: GradRows | None = None) -> Routed:
        would = self.inner.route(views, grads, plan, grad_rows)
        routed = super().route(views, grads, plan, grad_rows)
        assert would.keep is not None
        assert routed.keep is not None
        if would.quar is None and would.directions is None:  # not finite: handed on as it is
            return routed
        if would.diag.routed is not None:
            kept = 1 - would.diag.routed
        else:
            whole = _joint_norm(routed.keep)
            kept = min(_joint_norm(would.keep) / whole, 1.0) if whole else 1.0
        diag = replace(would.diag, cos_post=would.diag.cos_pre, resid=None)
        return Routed(routed.keep, None, diag, would.directions, scale=kept)

    def refresh(self, step: int) -> Refresh:
        return self.inner.refresh(step)

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.inner.load_state_dict(state)


def fraction_of_modules(flags: list[Tensor]) -> float | None:
    """In which something was taken; None of no module."""
    return torch.stack(flags).float().mean().item() if flags else None


def assert_conserved(g: ModuleGrads, keep: ModuleGrads, quar: ModuleGrads, scale: dict[str, Tensor]) -> None:
    """keep + quar = g in every module of `scale`, which holds Σ_b ‖g_b‖: rows may cancel in the sum."""
    for_each = [((keep[m] + quar[m] - g[m]).norm(), s) for m, s in scale.items()]
    _assert_small(for_each, "keep + quar - g")


def assert_in_span(quar: ModuleGrads, V: Directions) -> None:
    """What is routed lies in span(V)."""
    for_each = [
        ((quar[m] - (along(quar[m], rows)[:, None] * rows).sum(0)).norm(), quar[m].norm()) for m, rows in V.items()
    ]
    _assert_small(for_each, "quarantine outside span(V)")


def assert_no_hackward(g: ModuleGrads, keep: ModuleGrads, V: Directions) -> None:
    """V · keep ≤ 0."""
    for_each = [(along(keep[m], rows).max().relu(), g[m].norm()) for m, rows in V.items()]
    _assert_small(for_each, "V·keep above 0")


def _assert_small(errors: list[tuple[Tensor, Tensor]], what: str) -> None:
    """error ≤ TOLERANCE · scale for each pair; one transfer from the device for all."""
    if not errors:
        return
    error, scale = torch.stack([torch.stack(pair) for pair in errors]).T.tolist()
    worst = max(range(len(error)), key=lambda i: error[i] - TOLERANCE * scale[i])
    assert error[worst] <= TOLERANCE * scale[worst], f"{what}: {error[worst]:.3e} against {scale[worst]:.3e}"


def _joint_norm(grads: ModuleGrads) -> float:
    return torch.cat(list(grads.values())).norm().item()
