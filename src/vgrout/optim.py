"""Routed gradients → one AdamW step on the two knobs → Update."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.model.svd_adapter import SvdAdapter
from vgrout.tensor_types import ModuleGrads, Routed, Update


class Optimizer:
    """AdamW (arXiv 1711.05101, torch's own) on δS and δS_hack, linear warm-up, then cosine to 0.

    A knob that gets no gradient (None) is not stepped at all: no decay, no momentum, so an unused δS_hack stays 0.
    """

    def __init__(
        self,
        adapter: SvdAdapter,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        warmup_frac: float,
        steps: int,
        grad_clip: float,
    ) -> None:
        self.adapter = adapter
        self.peak, self.steps, self.grad_clip = lr, steps, grad_clip
        self.warmup = max(1, int(warmup_frac * steps))
        self.step = 0  # calls of `apply` so far, skipped ones included: the schedule follows the trainer's steps
        self._adamw = torch.optim.AdamW(
            [{"params": [knob]} for knob in (adapter.δS, adapter.δS_hack)],
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
        )

    def lr_at(self, step: int) -> float:
        return rate(step, self.peak, self.warmup, self.steps)

    def apply(self, routed: Routed) -> Update | None:
        """Clip both knobs' gradients, jointly or apart, step, shrink δS's change by `routed.scale`, refold.

        None if a gradient or its norm is not finite: then neither knobs nor moments have changed.
        """
        lr = self.lr_at(self.step)
        self.step += 1
        grads = [self.adapter.flat(g) if g is not None else None for g in (routed.keep, routed.quar)]
        norms = [_norm(g) if g is not None else 0.0 for g in grads]
        gn = math.hypot(*norms)
        if not math.isfinite(gn):
            return None
        knob, hack = self.adapter.δS, self.adapter.δS_hack
        for parameter, g, norm in zip((knob, hack), grads, norms, strict=True):
            clipped = norm if routed.apart else gn
            scale = min(1.0, self.grad_clip / clipped) if clipped else 1.0
            parameter.grad = (g * scale).to(parameter) if g is not None else None
        for group in self._adamw.param_groups:
            group["lr"] = lr
        before = knob.detach().clone()
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if routed.scale != 1.0:
            with torch.no_grad():
                knob.copy_(before + routed.scale * (knob - before))
        self.adapter.merge()
        delta: ModuleGrads = self.adapter.by_module(knob.detach() - before)
        return Update(gn=gn, gn_keep=norms[0], gn_quar=norms[1], lr=lr, delta=delta)

    def idle(self) -> None:
        """A step without any gradient: the schedule moves on, the knobs do not."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Moments and position; the knobs themselves are in the adapter's state."""
        return {"step": self.step, "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self._adamw.load_state_dict(state["adamw"])


def rate(step: int, peak: float, warmup: int, steps: int) -> float:
    """Peak × (1e-3 → 1 over the warm-up, then ½(1 + cos) → 0 at `steps`); `step` counts from 0."""
    if step < warmup:
        return peak * (1e-3 + (1 - 1e-3) * step / warmup)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def _norm(g: Float[Tensor, " R"]) -> float:
    """L2 norm in fp64: the sum of squares of a large finite fp32 gradient must not overflow into a skipped step."""
    return float(torch.linalg.vector_norm(g, dtype=torch.float64))
