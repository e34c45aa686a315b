"""Routed gradients → one AdamW step on the adapter's two vectors → Update."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.run import OptConfig
from vgrout.method.projection import cos_upd
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.tensor_types import Routed, Update


class Optimizer:
    """AdamW (arXiv 1711.05101) on δS and δS_hack, linear warm-up, then cosine to 0.

    A vector that gets no gradient (None) is not stepped at all: no decay, no momentum, so an unused δS_hack stays 0.
    Adam ignores a gradient's scale, so δS_hack learns as fast from a fifth of the gradient as δS from the rest.
    """

    def __init__(self, adapter: SvdAdapter, cfg: OptConfig, steps: int) -> None:
        self.adapter, self.cfg, self.steps = adapter, cfg, steps
        self.done = 0  # steps so far, skipped ones included: the schedule follows the trainer's steps
        self._adamw = torch.optim.AdamW(
            [{"params": [adapter.δS]}, {"params": [adapter.δS_hack]}],
            lr=cfg.lr,
            betas=(cfg.adam_beta1, cfg.adam_beta2),
            weight_decay=cfg.weight_decay,
        )

    def step(self, routed: Routed | None) -> Update | None:
        """Clip both gradients (jointly or apart), step, shrink δS's change by `routed.scale`,
        merge into the weights.

        None, and neither vectors nor moments change: there was nothing to learn from (`routed` is None), or a gradient
        or its norm is not finite. The schedule moves on all the same.
        """
        lr = lr_at(self.done, self.cfg, self.steps)
        self.done += 1
        if routed is None or routed.idle:
            return None
        grads = [self.adapter.flat(g) if g is not None else None for g in (routed.keep, routed.quar)]
        norms = [_norm(g) if g is not None else 0.0 for g in grads]
        gn = math.hypot(*norms)
        if not math.isfinite(gn):
            return None
        kept, quarantine = self.adapter.δS, self.adapter.δS_hack
        for parameter, g, norm in zip((kept, quarantine), grads, norms, strict=True):
            clipped = norm if routed.apart else gn
            scale = min(1.0, self.cfg.grad_clip / clipped) if clipped else 1.0
            parameter.grad = (g * scale).to(parameter) if g is not None else None
        for group in self._adamw.param_groups:
            group["lr"] = lr
        before = kept.detach().clone()
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if routed.scale != 1.0:
            with torch.no_grad():
                kept.copy_(before + routed.scale * (kept - before))
        self.adapter.merge()
        delta = self.adapter.by_module(kept.detach() - before)
        return Update(
            gn=gn,
            gn_keep=norms[0],
            gn_quar=norms[1],
            lr=lr,
            delta=delta,
            routed=routed,
            cos_upd=cos_upd(delta, routed.directions) if routed.directions and delta else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Moments and position; the vectors themselves are in the adapter's state."""
        return {"step": self.done, "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["step"]
        self._adamw.load_state_dict(state["adamw"])


def lr_at(step: int, cfg: OptConfig, steps: int) -> float:
    """Peak × (1e-3 → 1 over the warm-up, then ½(1 + cos) → 0 at `steps`); `step` counts from 0."""
    warmup = max(1, int(cfg.warmup_frac * steps))
    if step < warmup:
        return cfg.lr * (1e-3 + (1 - 1e-3) * step / warmup)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * progress))


def _norm(g: Float[Tensor, " R"]) -> float:
    """L2 norm in fp64: the sum of squares of a large finite fp32 gradient must not overflow into a skipped step."""
    return float(torch.linalg.vector_norm(g, dtype=torch.float64))
