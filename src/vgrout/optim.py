"""A batch's plan → gradients → routed → AdamW on the adapter's two vectors, once or several times (`learn`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.run import Config, OptConfig
from vgrout.grpo import LossMetrics, all_finite, policy_gradients
from vgrout.method import Method
from vgrout.method.projection import cos_upd
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.tensor_types import Routed, Update, UpdatePlan
from vgrout.types import Flags


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

    def step(self, routed: Routed | None, again: bool = False) -> Update | None:
        """Clip both gradients (jointly or apart), step, shrink δS's change by `routed.scale`,
        merge into the weights.

        None, and neither vectors nor moments change: there was nothing to learn from (`routed` is None), or a gradient
        or its norm is not finite. The schedule moves on all the same, but for another update on the batch of the last
        one (`again`), which has that one's learning rate.
        """
        lr = lr_at(self.done - again, self.cfg, self.steps)
        self.done += not again
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
            realised=self.adapter.realised_share(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Moments and position; the vectors themselves are in the adapter's state."""
        return {"step": self.done, "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["step"]
        self._adamw.load_state_dict(state["adamw"])


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a step's updates were. Its numbers are of the first, whose policy is the one that sampled, but for those of
    the clip, which are means over all of them."""

    loss: LossMetrics | None  # None: skipped
    routed: Routed | None  # None: there was nothing to learn from, or it was not finite
    update: Update | None
    skipped: bool  # an update was not finite: neither it nor those after it were made


def learn(
    policy: Policy,
    method: Method,
    optim: Optimizer,
    plan: UpdatePlan,
    flags: Flags,
    cfg: Config,
    teacher: LanguageModel | None = None,
) -> Learnt:
    """--updates-per-batch updates on one plan: the gradients of all its rows, routed and learnt, each time anew.

    Flags of texts are the plan's; monitors of gradients read every update's. flags, teacher: as `Method.route` and
    `policy_gradients` take them.
    """
    old: list[Tensor] = []  # log-probs under the policy that sampled
    losses: list[LossMetrics] = []
    routes: list[Routed | None] = []
    updates: list[Update | None] = []
    for n in range(cfg.loss.updates_per_batch):
        grads, loss = policy_gradients(
            policy,
            plan,
            cfg.loss,
            max_new=cfg.scale.max_new,
            prompts_per_step=cfg.scale.prompts_per_step,
            grad_rows=method.grad_rows,
            sampling=cfg.sampling,
            teacher=teacher,
            packing=cfg.run.packing,
            old=old,
        )
        sound = all_finite(grads, loss)  # a monitor's averages would never recover from a NaN
        routed = method.route(plan, grads, flags) if plan.groups and sound else None
        update = optim.step(routed, again=n > 0)
        losses.append(loss)
        routes.append(routed)
        updates.append(update)
        if update is None:  # nothing to learn, or not finite; nothing has changed
            break
    idle = routes[-1] is not None and routes[-1].idle
    skipped = bool(plan.groups) and updates[-1] is None and not idle
    return Learnt(None if skipped else LossMetrics.of_batch(losses), routes[0], updates[0], skipped)


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
