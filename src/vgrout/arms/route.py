"""route: keep = g − c_use V, quar = c_use V."""

from dataclasses import replace

from vgrout.arms.base import StepGrads
from vgrout.arms.direction_arm import (
    DirectionArm,
    assert_conserved,
    assert_in_span,
    assert_no_hackward,
    fraction_of_modules,
)
from vgrout.config.arm import ArmConfig
from vgrout.tensor_types import Routed


class Route(DirectionArm):
    """Sends the part of g along V to the quarantine."""

    name = "route"
    routes = True

    def __init__(self, *args, cfg: ArmConfig, **kwargs) -> None:
        self._mode = cfg.gate_mode
        super().__init__(*args, cfg=cfg, **kwargs)

    def _split(self, step: StepGrads) -> Routed:
        g = step.total
        keep, quar = self._parts(g, self._mode)
        by_source = [self._parts(part, self._mode)[0] for part in (step.students, step.teachers)]
        assert_conserved(g, keep, quar, {m: v.norm() for m, v in g.items()})
        assert_in_span(quar, self.V)
        if self._mode == "one_sided":
            assert_no_hackward(g, keep, self.V)
        diag = replace(self._diag(step, keep, *by_source), fired=fraction_of_modules([quar[m].any() for m in self.V]))
        return Routed(keep, quar, diag, self.V)
