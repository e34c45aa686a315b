"""Routed gradients → one AdamW step on the adapter's two vectors → Update."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.run import OptConfig
from vgrout.method.projection import cos_upd
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.tensor_types import Routed, Update

EPS = 1e-8  # of AdamW, torch's default


class SharedAdamW(torch.optim.Optimizer):
    """AdamW on several vectors that add up to one: first moments apart, one second moment, of their gradients' sum.

    AdamW is linear in the gradient but for that denominator. So the sum of the vectors moves as one vector under plain
    AdamW on the sum of the gradients would, however these are split: routing conserves the step, not only the gradient.
    A vector without a gradient (None) has one of 0 and goes on by its momentum; one that never had any stays 0.
    """

    def __init__(
        self, vectors: Sequence[Tensor], *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__([{"params": [v]} for v in vectors], {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update. State of each vector: its first moment; of the first one also what they share."""
        loss = closure() if closure is not None else None
        vectors = [group["params"][0] for group in self.param_groups]
        grads = [torch.zeros_like(v) if v.grad is None else v.grad for v in vectors]
        for v in vectors:
            self.state[v].setdefault("exp_avg", torch.zeros_like(v))
        shared = self.state[vectors[0]]
        shared.setdefault("exp_avg_sq", torch.zeros_like(vectors[0]))
        shared["step"] = shared.get("step", 0) + 1
        b1, b2 = self.param_groups[0]["betas"]
        shared["exp_avg_sq"].mul_(b2).add_((1 - b2) * torch.stack(grads).sum(0).square())
        scale = (shared["exp_avg_sq"] / (1 - b2 ** shared["step"])).sqrt_().add_(EPS)
        for group, v, g in zip(self.param_groups, vectors, grads, strict=True):
            m = self.state[v]["exp_avg"].mul_(b1).add_((1 - b1) * g)
            v.mul_(1 - group["lr"] * group["weight_decay"])
            v.sub_(group["lr"] / (1 - b1 ** shared["step"]) * m / scale)
        return loss


class Optimizer:
    """AdamW (arXiv 1711.05101) on δS and δS_hack, linear warm-up, then cosine to 0.

    --second-moment separate: torch's own on each vector, and one that gets no gradient (None) is not stepped at all: no
    decay, no momentum, so an unused δS_hack stays 0. Adam ignores a gradient's scale, so there δS_hack learns as fast
    from a fifth of the gradient as δS from the rest. shared: `SharedAdamW`; the clip too is that of the sum.
    """

    def __init__(self, adapter: SvdAdapter, cfg: OptConfig, steps: int) -> None:
        self.adapter, self.cfg, self.steps = adapter, cfg, steps
        self.done = 0  # steps so far, skipped ones included: the schedule follows the trainer's steps
        self.shares = cfg.second_moment == "shared"
        vectors = [adapter.δS, adapter.δS_hack]
        how: dict[str, Any] = {
            "lr": cfg.lr,
            "betas": (cfg.adam_beta1, cfg.adam_beta2),
            "weight_decay": cfg.weight_decay,
        }
        self._adamw = (
            SharedAdamW(vectors, **how)
            if self.shares
            else torch.optim.AdamW([{"params": [vector]} for vector in vectors], eps=EPS, **how)
        )

    def step(self, routed: Routed | None) -> Update | None:
        """Clip both gradients (jointly, apart, or by their sum), step, shrink δS's change by `routed.scale`,
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
        whole = [g for g in grads if g is not None]
        gn = _norm(torch.stack(whole).sum(0)) if self.shares else math.hypot(*norms)
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
