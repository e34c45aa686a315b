"""erase: keep = g − overshoot · c_use V, optionally rescaled to ‖g‖."""

from dataclasses import replace

import torch

from vgrout.arms.base import StepGrads
from vgrout.arms.direction_arm import DirectionArm, assert_no_hackward, fraction_of_modules
from vgrout.arms.projection import coefficients, rescale
from vgrout.config.arm import ArmConfig
from vgrout.tensor_types import Routed


class Erase(DirectionArm):
    """Drops the part of g along V (directional ablation of the gradient)."""

    name = "erase"

    def __init__(self, *args, cfg: ArmConfig, **kwargs) -> None:
        self._mode, self._overshoot = cfg.gate_mode, cfg.project_overshoot
        # the shrinkage control reads the share that is kept before any rescaling
        self._preserve = cfg.preserve_magnitude and cfg.control != "shrinkage"
        super().__init__(*args, cfg=cfg, **kwargs)

    def _split(self, step: StepGrads) -> Routed:
        g, mode = step.total, self._mode
        keep, _ = self._parts(g, mode, self._overshoot)
        fired = [coefficients(g[m], V, mode).any() for m, V in self.V.items()]
        by_source = [self._parts(part, mode, self._overshoot)[0] for part in (step.students, step.teachers)]
        capped = []
        if mode == "one_sided" and self._overshoot >= 1:
            assert_no_hackward(g, keep, self.V)
        if self._preserve:
            for m in self.V:
                keep[m], hit = rescale(keep[m], g[m].norm())
                capped.append(hit)
        diag = replace(
            self._diag(step, keep, *by_source),
            fired=fraction_of_modules(fired),
            capped=int(torch.stack(capped).sum()) if capped else None,
        )
        return Routed(keep, None, diag, self.V)
