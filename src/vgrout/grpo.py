"""Rows → their policy gradients g [N, R], in one forward and backward a micro-batch.

The call goes down: `policy_gradients` takes an update's rows, divides them into micro-batches (micro_batches.py), and
for each `_GradientPass` lays out the tokens, computes the log-probs (`loss_input`) and the losses (losses.py), and goes
backward. Hooks on the adapted layers collect the gradients in g (model/rollout_grads.py).

A batch is learnt from in one or more updates (--updates-per-batch), each of them on all of its rollouts. In update n a
rollout b is learnt in that view v of the adapter (the quarantine on, or off) that sampled it, and has the gradient

    g_b⁽ⁿ⁾ = ∇ℒ_b(ρ⁽ⁿ⁾) at θ⁽ⁿ⁾,     ρ_t⁽ⁿ⁾ = π_v(o_t; θ⁽ⁿ⁾) / π_v(o_t; θ⁽¹⁾)

Routing divides Σ_b g_b⁽ⁿ⁾ in every update. Advantages and flags of texts are the batch's in all of them. θ⁽¹⁾ is the
policy that sampled, so ρ is PPO's importance ratio, and ρ⁽¹⁾ = 1.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.data import Batch, UpdateRow
from vgrout.loss_metrics import LossMetrics, Tally
from vgrout.losses import LossInput, Norm, policy_loss
from vgrout.micro_batches import (
    Merged,
    Portion,
    as_batch,
    merge_twins,
    micro_batches,
    prompts_apart,
)
from vgrout.model.attention import uploaded
from vgrout.model.layout import Packed
from vgrout.model.logprobs import (
    PaddedBatch,
    TokenLogprobs,
    backbone,
    completion_logprobs,
    padded_logprobs,
)
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.prefixes import SharedPrefixes
from vgrout.model.rollout_grads import PerRolloutGrads, per_rollout_grads

PerToken = Float[Tensor, "B T"]  # B rollouts, T completion tokens, padded on the right
OfRollouts = Bool[Tensor, " B"]
Gradients = Float[Tensor, "N R"]


@dataclass(frozen=True)
class PolicyGradients:
    """What one update learns from, and what was measured with it."""

    # row n: the sum over the rows with `row_of_g` n; None: a gradient or a number is not finite
    g: Gradients | None
    metrics: LossMetrics
    # by micro-batch, the log-probs under π_old: in a batch's first update its own
    logp_old: Sequence[Tensor]


def policy_gradients(
    policy: Policy,
    batch: Batch,
    cfg: Config,
    teacher: LanguageModel | None = None,
    logp_old: Sequence[Tensor] = (),
) -> PolicyGradients:
    """Compute the gradient on δS of the losses of `batch.rows`: row n of g is the sum over those with `row_of_g` n.

    Every rank computes a part of the rows. All ranks return the same g, and the metrics of all rows.

    The fewer rows g has, the cheaper: each row needs gradient products of its own, and a backward pass of its own
    through the prompt. With packing, what several rows begin with is computed once, and so are twins: students of a
    group with the same answer and advantage. The result matches one padded row a rollout to about 1e-6 in fp32.

    teacher: a model with the same vocabulary, needed for --teacher-tau.
    logp_old: in later updates on one batch, the log-probs that the first one returned. In the first there are none:
        π_old is π, detached, and every ratio is 1, also that of demonstrations.
    """
    adapter = policy.adapter
    packs = policy.packs and (teacher is None or teacher.packs)
    merged = Merged([*batch.rows], {})
    if packs:
        merged = merge_twins(batch.rows)
    N = 0
    for row in batch.rows:
        N = max(N, row.row_of_g + 1)
    R = len(adapter)
    g = torch.zeros(N, R, device=policy.device, dtype=adapter.δS.dtype)
    norm = _norm(batch, cfg)
    update = _GradientPass(policy, cfg, norm, teacher, packs, logp_old)
    for deployed in (False, True):
        rows = [row for row in merged.rows if row.rollout.deployed == deployed]
        costs = [row.tokens for row in rows]
        own = ranks.own(costs)  # the indices of this rank's part
        own_rows = rows[own.start : own.stop]
        if not own_rows:
            continue
        view = nullcontext()
        if deployed:
            view = adapter.deployed()
        with view, per_rollout_grads(adapter, N) as collected:
            update.backward(own_rows, collected)
        g += collected.flat
    _divide_among_twins(g, merged.twins)
    metrics = update.tally.metrics()
    total = None
    if _is_finite(g, metrics):
        total = ranks.total(g)
    return PolicyGradients(total, metrics, update.logp_old)


def _divide_among_twins(g: Gradients, twins: Mapping[int, Sequence[int]]) -> None:
    """Give each twin an equal part of the gradient that all of them added to the first one's row of g, in place.

    twins: the first one's row → the others' rows.
    """
    for first, others in twins.items():
        of_each = g[first] / (1 + len(others))
        g[[first, *others]] = of_each


def _norm(batch: Batch, cfg: Config) -> Norm:
    """What losses are divided by. Groups without signal count, so that leaving them out does not change the scale."""
    learnt_from = {row.group for row in batch.rows}
    sizes = {len(group) for group in batch.groups if group.index in learnt_from}
    assert len(sizes) <= 1, (
        f"groups of different sizes {sorted(sizes)}: the constant normaliser G is one number"
    )
    G = max(sizes, default=1)
    tokens = 0
    for row in batch.rows:
        if not row.left_out:
            tokens += len(row.rollout.completion_ids)
    return Norm(
        rollouts=G * cfg.scale.prompts_per_step,
        max_new=cfg.scale.max_new,
        tokens=tokens,
    )


class _GradientPass:
    """The forwards and backwards of one update, and what is measured on the way."""

    def __init__(
        self,
        policy: Policy,
        cfg: Config,
        norm: Norm,
        teacher: LanguageModel | None,
        packs: bool,
        logp_old: Sequence[Tensor],
    ) -> None:
        """logp_old: by micro-batch, from the batch's first update; empty: this is the first."""
        self.policy = policy
        self.cfg = cfg
        self.norm = norm
        self.teacher = teacher
        self.packs = packs
        self.logp_old_of_first = iter(logp_old)
        self.tally = Tally()
        self.logp_old: list[Tensor] = []  # by micro-batch, as they were used

    def backward(self, rows: Sequence[UpdateRow], collected: PerRolloutGrads) -> None:
        """Add the gradients of these rows to `collected`."""
        model = self.policy.model
        budget = self.policy.budget.tokens
        portions = [Portion(rows, None)]
        if self.packs:
            portions = prompts_apart(self.policy, rows)
        for portion in portions:
            prefixes = portion.prefixes
            if prefixes is not None:
                prefixes.read(model, backbone(model), collected.announce_packed)
            for micro_batch in micro_batches(portion.rows, budget, self.packs, prefixes):
                self._micro_batch(micro_batch, prefixes, collected)
            if prefixes is not None:
                prefixes.backward()

    def _micro_batch(
        self,
        rows: Sequence[UpdateRow],
        prefixes: SharedPrefixes | None,
        collected: PerRolloutGrads,
    ) -> None:
        """One forward and one backward."""
        batch = as_batch(self.policy, rows, self.packs, prefixes)
        # said before the forward: which row of g each token, or each padded row, adds to
        if isinstance(batch, Packed):
            collected.announce_packed(batch.pieces, batch.tokens)
        else:
            collected.announce_rows([row.row_of_g for row in rows])
        old = next(self.logp_old_of_first, None)
        logps, x = loss_input(self.policy, rows, batch, self.cfg, self.norm, self.teacher, old)
        self.logp_old.append(x.logp_old)
        output = policy_loss(x, self.cfg.loss)
        loss = output.per_rollout.sum()
        loss.backward()
        self.tally.add(rows, batch, logps, x, output)


def _is_finite(g: Gradients, metrics: LossMetrics) -> bool:
    """Whether the update may be learnt from: its gradients on every rank, its loss, and all that was measured."""
    measured = True
    for number in metrics.columns().values():
        if number is not None and not math.isfinite(number):
            measured = False
    own_gradients = bool(g.isfinite().all())
    unsound: list[int] = []  # ranks where a gradient is not finite
    if ranks.size() > 1:  # all ranks have to ask
        unsound = ranks.everywhere(own_gradients)
    if unsound:
        named = ", ".join(map(str, unsound))
        logger.warning(f"gradients are not finite on rank {named}")
    return measured and own_gradients and not unsound


def loss_input(
    policy: Policy,
    rows: Sequence[UpdateRow],
    batch: PaddedBatch | Packed,
    cfg: Config,
    norm: Norm,
    teacher: LanguageModel | None,
    old: PerToken | None = None,
) -> tuple[TokenLogprobs, LossInput]:
    """Run one forward of the policy on `rows`; where the loss asks for them, also of the reference and the teacher.

    old: the log-probs under π_old; None: the policy's own.
    """
    loss = cfg.loss
    kind = loss.ratio_support
    support = cfg.sampling if kind == "sampled" else None
    rollouts = [row.rollout for row in rows]
    logps = completion_logprobs(policy.model, batch, support)
    logp = logps.of(kind)
    if old is None:
        old = logp.detach()
    by_sampler = [r.logp_full if kind == "full" else r.logp_sampled for r in rollouts]
    # The ratio is 1 on demonstrations, and where the sampler's log-probs are not known.
    has_ratio_1 = [
        rollout.source == "teacher" or logprobs is None
        for rollout, logprobs in zip(rollouts, by_sampler, strict=True)
    ]
    recorded = padded_logprobs(by_sampler, old.shape[1], old.device, old.dtype)
    logp_sampler = torch.where(uploaded(has_ratio_1, old.device)[:, None], old, recorded)
    logp_ref = None
    logp_teacher = None
    with torch.no_grad():
        others_read = loss.beta or loss.teacher_tau
        if others_read and isinstance(batch, Packed) and batch.prefixes is not None:
            # The prompts in `batch` were run through this policy, and another model needs them in its own batch.
            # Rows share what they begin with if they have one row of g, and no gradient is taken here: so all get 0.
            on_one_row = [replace(row, row_of_g=0) for row in rows]
            batch = as_batch(policy, on_one_row, packs=True)
        if loss.beta:
            with policy.adapter.reference():
                of_reference = completion_logprobs(policy.model, batch, support)
            logp_ref = of_reference.of(kind)
        if loss.teacher_tau and teacher is not None:
            of_teacher = completion_logprobs(teacher.model, batch, support)
            logp_teacher = of_teacher.of(kind)
    advantages = [row.advantage for row in rows]
    return logps, LossInput(
        logp=logp,
        logp_old=old,
        logp_sampler=logp_sampler,
        advantages=uploaded(advantages, policy.device, logp.dtype),
        mask=batch.mask,
        norm=norm,
        logp_ref=logp_ref,
        logp_teacher=logp_teacher,
    )
