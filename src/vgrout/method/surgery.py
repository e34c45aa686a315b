"""Interventions along a direction in the summed gradient, whoever is flagged.

erase    keep = g − overshoot · c_use V, optionally rescaled to ‖g‖
route    keep = g − c_use V              quar = c_use V
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vgrout.config.run import Config
from vgrout.direction.extract import Direction
from vgrout.method.base import Intervention, Refresh, Setup, StepGrads, Views, on_policy
from vgrout.method.live_direction import LiveDirection
from vgrout.method.projection import (
    assert_conserved,
    assert_in_span,
    assert_no_hackward,
    coefficients,
    fraction_of_modules,
    rescale,
    split,
)
from vgrout.tensor_types import Directions, ModuleGrads, Routed, UpdatePart
from vgrout.types import GroupFlags


def first_axes(cfg: Config, direction: Direction) -> Directions:
    """The first k axes of each module."""
    return direction.select(cfg.method.v_hack_k, cfg.method.v_hack_drop_bottom_frac)


class Surgery(Intervention):
    """Base of both."""

    def __init__(
        self, sizes: Mapping[str, int], cfg: Config, device: torch.device | str = "cpu", *, direction: LiveDirection
    ) -> None:
        super().__init__(sizes, cfg, device)
        self.direction, self.mode = direction, cfg.method.gate_mode

    @classmethod
    def make(cls, setup: Setup) -> "Surgery":
        return cls(setup.sizes, setup.cfg, setup.device, direction=LiveDirection.make(setup, first_axes))

    def refresh(self, step: int) -> Refresh:
        return self.direction.refresh(step)

    def state_dict(self) -> dict[str, Tensor]:
        return self.direction.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.direction.load_state_dict(state)

    @abstractmethod
    def split(self, step: StepGrads) -> Routed: ...

    def _split(self, g: ModuleGrads, overshoot: float = 1.0) -> tuple[ModuleGrads, ModuleGrads]:
        """What surgery along V keeps of g, and what it removes; modules without a direction pass through."""
        keep, removed = dict(g), {m: torch.zeros_like(v) for m, v in g.items()}
        for m, V in self.direction.V.items():
            keep[m], removed[m] = split(g[m], V, self.mode, overshoot)
        return keep, removed


class Erase(Surgery):
    """Drops the part of g along V (directional ablation of the gradient)."""

    name = "erase"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        method = self.cfg.method
        self.overshoot = method.project_overshoot
        # the shrinkage control reads the share that is kept before any rescaling
        self.preserves = method.preserve_magnitude and not method.control_spec.shrinks
        self.measures = frozenset({"erase"} if self.preserves else ())

    def split(self, step: StepGrads) -> Routed:
        g, V = step.total, self.direction.V
        keep, _ = self._split(g, self.overshoot)
        fired = [coefficients(g[m], rows, self.mode).any() for m, rows in V.items()]
        by_source = [self._split(part, self.overshoot)[0] for part in (step.students, step.teachers)]
        capped = []
        if self.mode == "one_sided" and self.overshoot >= 1:
            assert_no_hackward(g, keep, V)
        if self.preserves:
            for m in V:
                keep[m], hit = rescale(keep[m], g[m].norm())
                capped.append(hit)
        diag = replace(
            self.direction.diagnose(step, keep, *by_source),
            fired=fraction_of_modules(fired),
            capped=int(torch.stack(capped).sum()) if capped else None,
        )
        return Routed(keep, None, diag, directions=V)


class Route(Surgery):
    """Sends the part of g along V to the quarantine."""

    name = "route"

    def parts(self, views: Views, flags: Sequence[GroupFlags]) -> tuple[UpdatePart, ...]:
        return on_policy(views, UpdatePart())

    def split(self, step: StepGrads) -> Routed:
        g, V = step.total, self.direction.V
        keep, quar = self._split(g)
        by_source = [self._split(part)[0] for part in (step.students, step.teachers)]
        assert_conserved(g, keep, quar, {m: v.norm() for m, v in g.items()})
        assert_in_span(quar, V)
        if self.mode == "one_sided":
            assert_no_hackward(g, keep, V)
        diag = replace(
            self.direction.diagnose(step, keep, *by_source), fired=fraction_of_modules([quar[m].any() for m in V])
        )
        return Routed(keep, quar, diag, directions=V)
