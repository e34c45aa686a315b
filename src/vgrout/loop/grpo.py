"""Rows → their policy gradients g [N, R], in one forward and backward a micro-batch.

Where rows of g share a prompt, it is read once, and has a backward for each of them.

`policy_gradients` takes a step's rows; `_backward` divides them into micro-batches (micro_batches.py), and for each
lays out the tokens, computes the log-probs (`loss_input`) and the losses (losses.py), and goes backward. Hooks on the
adapted layers collect the gradients in g (model/rollout_grads.py).

A batch is learnt from once, by the policy that sampled it. A rollout is learnt in that view of the adapter (the
quarantine on, or off) that sampled it.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from loguru import logger
from torch import Tensor

from vgrout.config.run import Config
from vgrout.ground import ranks
from vgrout.ground.data import Batch, UpdateRow
from vgrout.loop.loss_metrics import Tally
from vgrout.loop.losses import LossInput, Norm, policy_loss
from vgrout.loop.micro_batches import (
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
    backbone,
    completion_logprobs,
    padded_logprobs,
    pieces_of,
)
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.rollout_grads import PerRolloutGrads, per_rollout_grads

Gradients = Float[Tensor, "N R"]


class PolicyGradients(NamedTuple):
    """What an update learns from, and what was measured with it."""

    # row n: the sum over the rows with `row_of_g` n; None: a gradient or a number is not finite
    g: Gradients | None
    metrics: Mapping[str, float | None]  # columns of the step's row


def policy_gradients(
    policy: Policy,
    batch: Batch,
    cfg: Config,
    teacher_model: LanguageModel | None = None,
) -> PolicyGradients:
    """Compute the gradient on δS of the losses of `batch.rows`: row n of g is the sum over those with `row_of_g` n.

    Every rank computes a part of the rows. All ranks return the same g, and the metrics of all rows.

    The fewer rows g has, the cheaper: each row needs gradient products of its own, and a backward pass of its own
    through the prompt. With packing, what several rows begin with is computed once. Twins are too: students of a
    group with the same answer and advantage. The result matches one padded row a rollout to about 1e-6 in fp32.

    teacher_model: a model with the same vocabulary, needed for --teacher-tau.
    """
    adapter = policy.adapter
    if teacher_model is not None and not teacher_model.packs:
        policy = replace(policy, packs=False)
    merged = Merged([*batch.rows], {})
    if policy.packs:
        merged = merge_twins(batch.rows)
    N = 0
    for row in batch.rows:
        N = max(N, row.row_of_g + 1)
    R = len(adapter)
    g = torch.zeros(N, R, device=policy.device, dtype=adapter.δS.dtype)
    norm = _norm(batch, cfg)
    tally = Tally()
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
            _backward(own_rows, collected, tally, policy, cfg, norm, teacher_model)
        g += collected.flat
    _divide_among_twins(g, merged.twins)
    metrics = tally.metrics()
    total = None
    if _is_finite(g, metrics):
        total = ranks.total(g)
    return PolicyGradients(total, metrics)


def _divide_among_twins(g: Gradients, twins: Mapping[int, Sequence[int]]) -> None:
    """Give each twin an equal part of the gradient that all of them added to the first one's row of g, in place.

    twins: the first one's row → the others' rows.
    """
    for first, others in twins.items():
        of_each = g[first] / (1 + len(others))
        g[[first, *others]] = of_each


def _norm(batch: Batch, cfg: Config) -> Norm:
    """What losses are divided by. In `rollouts` groups without signal count, so that leaving them out does not change
    the scale; `tokens` are those of the rows alone."""
    learnt_from = {row.group for row in batch.rows}
    sizes = {len(group) for group in batch.groups if group.index in learnt_from}
    assert len(sizes) <= 1, (
        f"groups of different sizes {sorted(sizes)}: the constant normaliser G is one number"
    )
    G = max(sizes, default=1)
    tokens = 0
    for row in batch.rows:
        if not row.left_out:
            tokens += len(row.rollout.ids)
    return Norm(
        rollouts=G * cfg.scale.prompts_per_step,
        max_new=cfg.scale.max_new,
        tokens=tokens,
    )


def _backward(
    rows: Sequence[UpdateRow],
    collected: PerRolloutGrads,
    tally: Tally,
    policy: Policy,
    cfg: Config,
    norm: Norm,
    teacher_model: LanguageModel | None,
) -> None:
    """Add the gradients of these rows to `collected`, and what is measured on the way to `tally`."""
    portions = [Portion(rows, None)]
    if policy.packs:
        portions = prompts_apart(policy, rows)
    for portion in portions:
        prefixes = portion.prefixes
        if prefixes is not None:
            prefixes.read(policy.model, backbone(policy.model), collected.announce)
        for part in micro_batches(policy, portion.rows, prefixes):
            batch = as_batch(policy, part, prefixes)
            # said before the forward: which row of g each token adds to
            collected.announce(pieces_of(batch, [row.row_of_g for row in part]), batch.tokens)
            x = loss_input(policy, part, batch, cfg, norm, teacher_model)
            output = policy_loss(x, cfg.loss)
            loss = output.per_rollout.sum()
            loss.backward()
            tally.add(part, batch, x, output)
        if prefixes is not None:
            prefixes.backward()  # through the prompts, once for each row of g


def _is_finite(g: Gradients, metrics: Mapping[str, float | None]) -> bool:
    """Whether the update may be learnt from: its gradients on every rank, its loss, and all that was measured."""
    measured = True
    for number in metrics.values():
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
    teacher_model: LanguageModel | None,
) -> LossInput:
    """Run a forward of the policy on `rows`, and where the loss asks for it of the reference and the teacher model."""
    loss = cfg.loss
    rollouts = [row.rollout for row in rows]
    logp = completion_logprobs(policy.model, batch)
    own = logp.detach()
    by_sampler = [rollout.logp for rollout in rollouts]
    # The ratio is 1 on demonstrations, which this run's sampler did not write, and where the
    # sampler's log-probs are not known.
    has_ratio_1 = [r.source == "teacher" or r.logp is None for r in rollouts]
    recorded = padded_logprobs(by_sampler, own.shape[1], own.device, own.dtype)
    logp_sampler = torch.where(uploaded(has_ratio_1, own.device)[:, None], own, recorded)
    logp_ref = None
    logp_teacher = None
    with torch.no_grad():
        reads_other_models = loss.beta or loss.teacher_tau
        if reads_other_models and isinstance(batch, Packed) and batch.prefixes is not None:
            # The prompts in `batch` were run through this policy, and another model needs them in its own batch.
            # No gradient is taken here, so all rows may have one row of g, and share what they begin with.
            on_one_row = [replace(row, row_of_g=0) for row in rows]
            batch = as_batch(policy, on_one_row)
        if loss.beta:
            with policy.adapter.reference():
                logp_ref = completion_logprobs(policy.model, batch)
        if loss.teacher_tau and teacher_model is not None:
            logp_teacher = completion_logprobs(teacher_model.model, batch)
    advantages = [row.advantage for row in rows]
    return LossInput(
        logp=logp,
        logp_sampler=logp_sampler,
        advantages=uploaded(advantages, policy.device, logp.dtype),
        mask=batch.mask,
        norm=norm,
        logp_ref=logp_ref,
        logp_teacher=logp_teacher,
    )
