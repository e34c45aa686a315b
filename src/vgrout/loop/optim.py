"""Routed gradients → AdamW on the adapter's two vectors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.settings import OptConfig
from vgrout.ground.io import Diverged
from vgrout.ground.tensor_types import Routed
from vgrout.method.projection import cos_upd
from vgrout.model.svd_adapter import SvdAdapter


class Optimizer:
    """AdamW (arXiv 1711.05101) on δS and δS_hack; linear warm-up, then cosine to 0.

    A vector whose gradient is None or exactly 0 is not stepped at all: it neither decays nor
    follows its momentum. So an unused δS_hack stays 0, a step that routes all rollouts leaves δS as
    it is, and one that routes none leaves δS_hack. Adam ignores a gradient's scale, so δS_hack learns as fast
    from a fifth of the gradient as δS from the rest.
    """

    def __init__(self, adapter: SvdAdapter, cfg: OptConfig, steps: int) -> None:
        self.adapter = adapter
        self.cfg = cfg
        self.steps = steps
        # The trainer's steps so far. Skipped ones count: the schedule follows the trainer.
        self.done = 0
        self._adamw = torch.optim.AdamW(
            [{"params": [adapter.δS]}, {"params": [adapter.δS_hack]}],
            lr=cfg.lr,
            betas=(cfg.adam_beta1, cfg.adam_beta2),
            weight_decay=cfg.weight_decay,
        )

    def step(
        self,
        routed: Routed,
        measured: Mapping[str, float | None] | None = None,
    ) -> "Update":
        """Clip both gradients by their joint norm, step, and merge the vectors into the weights.

        Vectors and moments stay as they are if there is nothing to learn from, or if a gradient or
        its norm is not finite. The schedule moves on all the same.

        Raises Diverged where the weights, or the change that the vectors ask for, are no longer finite.

        measured: the loss's columns, which go into the update.
        """
        lr = lr_at(self.done, self.cfg, self.steps)
        self.done += 1
        keep_norm = l2_norm(routed.keep)
        quar_norm = l2_norm(routed.quar)
        gn = math.hypot(keep_norm, quar_norm)  # joint norm
        if not routed.finite or not math.isfinite(gn):
            return Update(routed, skipped=True)  # without the loss, which may be NaN
        if routed.keep is None and routed.quar is None:
            return Update(routed, measured)
        if not gn:
            return Update(routed, measured, gn=gn, lr=lr)

        before = self.adapter.δS.detach().clone()  # for cos_upd
        keep = routed.keep if keep_norm else None
        quar = routed.quar if quar_norm else None
        self._set_gradients(keep, quar, gn)
        self._apply(lr)

        realised = self.adapter.realised_share()
        if realised is not None and not math.isfinite(realised):
            raise Diverged(
                f"step {self.done - 1}: an update at a learning rate of {lr:.1e} overflows: lower --lr"
            )
        q_egy = None
        if routed.quar is not None:
            q_egy = quar_norm / (keep_norm + quar_norm)
        applied = None
        if routed.directions:
            change = self.adapter.δS.detach() - before
            applied = cos_upd(change, routed.directions, self.adapter.spans)
        return Update(
            routed,
            measured,
            stepped=True,
            gn=gn,
            q_egy=q_egy,
            lr=lr,
            cos_upd=applied,
            realised=realised,
        )

    def _set_gradients(
        self,
        keep: Float[Tensor, " R"] | None,
        quar: Float[Tensor, " R"] | None,
        gn: float,
    ) -> None:
        """Give both vectors their gradients, scaled to a joint norm of at most `grad_clip`."""
        scale = 1.0
        if gn > self.cfg.grad_clip:
            scale = self.cfg.grad_clip / gn
        learnt = (
            (self.adapter.δS, keep),
            (self.adapter.δS_hack, quar),
        )
        for vector, g in learnt:
            if g is None:
                vector.grad = None
            else:
                scaled = g * scale
                vector.grad = scaled.to(vector)

    def _apply(self, lr: float) -> None:
        """Step along the gradients, forget them, and bring the weights up to date."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.adapter.merge()

    def state_dict(self) -> dict[str, Any]:
        """Moments and position in the schedule. The vectors are in the adapter's own state."""
        return {"step": self.done, "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["step"]
        self._adamw.load_state_dict(state["adamw"])


@dataclass(frozen=True, slots=True)
class Update:
    """One step of the optimiser: what was learnt, and what was measured."""

    routed: Routed
    measured: Mapping[str, float | None] | None = None
    stepped: bool = False  # False: there was nothing to learn from, or it was not finite
    skipped: bool = False  # it was not finite
    gn: float | None = None  # joint L2 norm of both gradients before clipping
    q_egy: float | None = None  # the quarantine's share in the sum of the two norms
    lr: float | None = None
    # share of the change of δS in this step, weight decay included, that is hack-ward: 0 to 1
    cos_upd: float | None = None
    # the change of the merged weights, in their precision, over the change that δS and δS_hack ask
    # for: 1 is all; None: not measured
    realised: float | None = None

    def columns(self) -> dict[str, Any]:
        """The step's columns of loss, method and update."""
        return {
            **(self.measured or {}),
            **(self.routed.measured if self.stepped else {}),
            "gn": self.gn,
            "lr": self.lr,
            "q_egy": self.q_egy,
            "cos_upd": self.cos_upd,
            "realised": self.realised,
            "skipped": int(self.skipped),
        }


def l2_norm(g: Float[Tensor, " R"] | None) -> float:
    """‖g‖, 0 without a gradient. In fp64: squares of large finite fp32 numbers would overflow."""
    if g is None:
        return 0.0
    return float(torch.linalg.vector_norm(g, dtype=torch.float64))


def lr_at(step: int, cfg: OptConfig, steps: int) -> float:
    """The learning rate of step `step`, counted from 0.

    It rises linearly to `cfg.lr` over the warm-up, from 1e-3 of it, then falls to 0 at `steps` as
    half a cosine.
    """
    warmup = warmup_steps(cfg, steps)
    if step < warmup:
        return cfg.lr * (1e-3 + (1 - 1e-3) * step / warmup)
    after_warmup = max(1, steps - warmup)
    progress = min(1.0, (step - warmup) / after_warmup)
    half_cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.lr * half_cosine


def warmup_steps(cfg: OptConfig, steps: int) -> int:
    """How many of the steps are warm-up: `warmup_frac` of them, but at least one.

    None with a share of 0, and none in a run of a single step: at 1e-3 of the rate it would learn
    nothing.
    """
    if cfg.warmup_frac == 0 or steps == 1:
        return 0
    return max(1, int(cfg.warmup_frac * steps + 1e-9))
