"""Routed gradients → AdamW on the adapter's two vectors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vgrout.config.run import OptConfig
from vgrout.loss_metrics import LossMetrics
from vgrout.method.projection import cos_upd
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.tensor_types import Routed


class Optimizer:
    """AdamW (arXiv 1711.05101) on δS and δS_hack, linear warm-up, then cosine to 0.

    A vector that gets no gradient (None) is not stepped at all: no decay, no momentum, so an unused δS_hack stays 0.
    Adam ignores a gradient's scale, so δS_hack learns as fast from a fifth of the gradient as δS from the rest.
    """

    def __init__(self, adapter: SvdAdapter, cfg: OptConfig, steps: int) -> None:
        self.adapter, self.cfg, self.steps = adapter, cfg, steps
        # steps so far, skipped ones included: the schedule follows the trainer's steps
        self.done = 0
        self._adamw = torch.optim.AdamW(
            [{"params": [adapter.δS]}, {"params": [adapter.δS_hack]}],
            lr=cfg.lr,
            betas=(cfg.adam_beta1, cfg.adam_beta2),
            weight_decay=cfg.weight_decay,
        )

    def step(
        self, routed: Routed, loss: LossMetrics | None = None, *, again: bool = False
    ) -> "Update":
        """Clip both gradients by their joint norm, step, merge into the weights. loss: what was measured with them.

        Neither vectors nor moments change where there is nothing to learn from, or a gradient or its norm is not
        finite. The schedule moves on all the same, but for another update on the batch of the last one (`again`), which
        has that one's learning rate.
        """
        lr = lr_at(self.done - again, self.cfg, self.steps)
        self.done += not again
        grads = routed.keep, routed.quar
        # in fp64: the sum of squares of a large finite fp32 gradient must not overflow into a
        # skipped step
        norms = [
            float(torch.linalg.vector_norm(g, dtype=torch.float64)) if g is not None else 0.0
            for g in grads
        ]
        gn = math.hypot(*norms)
        if not routed.finite or not math.isfinite(gn):
            return Update(routed, skipped=True)
        if routed.keep is None and routed.quar is None:
            return Update(routed, loss)
        kept, quarantine = self.adapter.δS, self.adapter.δS_hack
        scale = min(1.0, self.cfg.grad_clip / gn) if gn else 1.0
        for parameter, g in zip((kept, quarantine), grads, strict=True):
            parameter.grad = (g * scale).to(parameter) if g is not None else None
        for group in self._adamw.param_groups:
            group["lr"] = lr
        before = kept.detach().clone()
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.adapter.merge()
        delta, V = kept.detach() - before, routed.directions
        return Update(
            routed,
            loss,
            stepped=True,
            gn=gn,
            q_egy=(norms[1] / sum(norms) if any(norms) else 0.0)
            if routed.quar is not None
            else None,
            lr=lr,
            cos_upd=cos_upd(delta, V, self.adapter.spans) if V else None,
            realised=self.adapter.realised_share(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Moments and position; the vectors themselves are in the adapter's state."""
        return {"step": self.done, "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["step"]
        self._adamw.load_state_dict(state["adamw"])


@dataclass(frozen=True, slots=True)
class Update:
    """One step of the optimiser: what was learnt, and what was measured."""

    routed: Routed
    loss: LossMetrics | None = None
    stepped: bool = False  # False: there was nothing to learn from, or it was not finite
    skipped: bool = False  # it was not finite
    gn: float | None = None  # joint L2 norm of both gradients before clipping
    q_egy: float | None = None  # the quarantine's share in the sum of the two norms
    lr: float | None = None
    # hack-ward cosine of the change that AdamW applied to δS, weight decay included
    cos_upd: float | None = None
    # share of what both vectors ask for that is in the weights; None: not measured
    realised: float | None = None

    @classmethod
    def of_batch(cls, updates: Sequence["Update"]) -> "Update":
        """Of a batch's updates the first, whose policy is the one that sampled, with the clip's numbers of them all; no
        number of the loss where one was not finite."""
        skipped = any(update.skipped for update in updates)
        losses = [update.loss for update in updates if update.loss]
        return replace(
            updates[0], skipped=skipped, loss=None if skipped else LossMetrics.of_batch(losses)
        )

    def columns(self) -> dict[str, Any]:
        """The step's columns of loss, method and update."""
        measured = self.routed.diag.columns() if self.stepped else {}
        own = {
            "gn": self.gn,
            "lr": self.lr,
            "q_egy": self.q_egy,
            "cos_upd": self.cos_upd,
            "realised": self.realised,
        }
        return (
            (self.loss.columns() if self.loss else {})
            | measured
            | own
            | {"skipped": int(self.skipped)}
        )


def lr_at(step: int, cfg: OptConfig, steps: int) -> float:
    """Peak × (1e-3 → 1 over the warm-up, then ½(1 + cos) → 0 at `steps`); `step` counts from 0."""
    warmup = max(1, int(cfg.warmup_frac * steps + 1e-9))
    if step < warmup:
        return cfg.lr * (1e-3 + (1 - 1e-3) * step / warmup)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * progress))
