"""Rows → their policy gradients g [N, R], in one forward and backward a micro-batch.

A batch is learnt from in N updates (--updates-per-batch), all of them on all of its rollouts. In update n = 1 … N a
rollout b, learnt in that view v of the adapter (the quarantine on, or off) that sampled it, has the gradient

    g_b⁽ⁿ⁾ = ∇ℒ_b(ρ⁽ⁿ⁾) at θ⁽ⁿ⁾,     ρ_t⁽ⁿ⁾ = π_v(o_t; θ⁽ⁿ⁾) / π_v(o_t; θ⁽¹⁾),     keep⁽ⁿ⁾ + quar⁽ⁿ⁾ = Σ_b g_b⁽ⁿ⁾

where advantages and flags of texts are those of the batch, and ρ⁽¹⁾ = 1: θ⁽¹⁾ is the policy that sampled it, so ρ is
PPO's importance ratio.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.config.loss import LossConfig
from vgrout.config.run import Config
from vgrout.data import Batch, Rollout, UpdateRow
from vgrout.loss_metrics import LossMetrics, Tally
from vgrout.losses import LossInput, Norm, policy_loss
from vgrout.micro_batches import as_batch, merge_twins, micro_batches, prompts_apart
from vgrout.model.attention import uploaded
from vgrout.model.layout import Packed
from vgrout.model.logprobs import PaddedBatch, TokenLogprobs, backbone, completion_logprobs
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.prefixes import Prompts
from vgrout.model.svd_adapter import PerRolloutGrads


@dataclass(frozen=True)
class PolicyGradients:
    """What one update learns from, and what was measured with it."""

    # row n: the gradient of the rows with `at` n; None: a gradient or a number is not finite
    g: Float[Tensor, "N R"] | None
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
    """The gradient on δS of the losses of `batch.rows`: row n of g is the sum over those with `at` n. All ranks have
    the same, and the metrics of all.

    The fewer rows g has, the cheaper: the weight's gradient is formed once a row, and backward goes through a prompt
    once for every row of its rollouts. With packing, shared prompt and answer prefixes are computed once, and so are
    twins: students of a group with the same answer and advantage. That matches one padded row a rollout to about 1e-6
    in fp32.

    teacher: a model with the same vocabulary, needed for --teacher-tau.
    logp_old: of several updates on one batch, the log-probs that the first one returned. Without them π_old is π
        detached, of demonstrations likewise, so all have ratio 1.
    """
    packs = policy.packs and (teacher is None or teacher.packs)
    rows, twins = merge_twins(batch.rows) if packs else ([*batch.rows], {})
    n = 1 + max((row.at for row in batch.rows), default=-1)
    g = torch.zeros(n, len(policy.adapter), device=policy.device, dtype=policy.adapter.δS.dtype)
    update = _Update(policy, cfg, _norm(batch, cfg), teacher, packs, iter(logp_old))
    for deployed in (False, True):
        chosen = [row for row in rows if row.rollout.deployed == deployed]
        own = ranks.own([row.tokens for row in chosen])
        chosen = chosen[own.start : own.stop]
        if not chosen:
            continue
        view = policy.adapter.deployed() if deployed else nullcontext()
        with view, policy.adapter.per_rollout_grads(n) as collected:
            update.backward(chosen, collected)
        g += collected.flat
    _divide_among_twins(g, twins)
    metrics = update.tally.metrics()
    finite = _finite(g, metrics)
    return PolicyGradients(ranks.total(g) if finite else None, metrics, update.logp_old)


def _divide_among_twins(g: Float[Tensor, "N R"], twins: Mapping[int, Sequence[int]]) -> None:
    """The gradient of all twins was added up in the first one's row of g: give each an equal part, in place. twins: the
    first one's row → the others' rows."""
    for first, others in twins.items():
        g[[first, *others]] = g[first] / (1 + len(others))


def _norm(batch: Batch, cfg: Config) -> Norm:
    """What losses are divided by. Groups without signal count, so that leaving them out does not change the scale."""
    sizes = {len(group) for group in batch.with_signal}
    assert len(sizes) <= 1, (
        f"groups of different sizes {sorted(sizes)}: the constant normaliser G is one number"
    )
    return Norm(
        rollouts=max(sizes, default=1) * cfg.scale.prompts_per_step,
        max_new=cfg.scale.max_new,
        tokens=sum(len(row.rollout.completion_ids) for row in batch.rows),
    )


class _Update:
    """The forwards and backwards of one update, and what is measured on the way."""

    def __init__(
        self,
        policy: Policy,
        cfg: Config,
        norm: Norm,
        teacher: LanguageModel | None,
        packs: bool,
        logp_old: Iterator[Tensor],
    ) -> None:
        self.policy = policy
        self.cfg = cfg
        self.norm = norm
        self.teacher = teacher
        self.packs = packs
        self.given = logp_old
        self.tally = Tally()
        self.logp_old: list[Tensor] = []  # by micro-batch

    def backward(self, rows: Sequence[UpdateRow], collected: PerRolloutGrads) -> None:
        """Add the gradients of these rows to `collected`."""
        parts: list[tuple[Sequence[UpdateRow], Prompts | None]] = [(rows, None)]
        if self.packs:
            parts = prompts_apart(self.policy, rows)
        for part, prompts in parts:
            if prompts is not None:
                prompts.read(self.policy.model, backbone(self.policy.model), collected.tokens)
            for micro_batch in micro_batches(part, self.policy.budget.tokens, self.packs, prompts):
                self._micro_batch(micro_batch, prompts, collected)
            if prompts is not None:
                prompts.backward()

    def _micro_batch(
        self, rows: Sequence[UpdateRow], prompts: Prompts | None, collected: PerRolloutGrads
    ) -> None:
        made = as_batch(self.policy, rows, self.packs, prompts)
        # which row of g each token, or each padded row, adds to
        if isinstance(made, Packed):
            collected.tokens(made.pieces, made.tokens)
        else:
            collected.rows([row.at for row in rows])
        old = next(self.given, None)
        logps, x = loss_input(self.policy, rows, made, self.cfg, self.norm, self.teacher, old)
        self.logp_old.append(x.logp_old)
        output = policy_loss(x, self.cfg.loss)
        output.per_rollout.sum().backward()
        self.tally.add(rows, made, logps, x, output)


def _finite(g: Float[Tensor, "N R"], metrics: LossMetrics) -> bool:
    """Whether the step may be learnt from: every gradient of every rank, the loss and what was measured with it."""
    numbers = [x for x in metrics.columns().values() if x is not None]
    measured = all(map(math.isfinite, numbers))
    fine = bool(g.isfinite().all())
    unsound: list[int] = []  # ranks where a gradient is not finite
    if ranks.size() > 1:  # all ranks have to ask
        unsound = ranks.everywhere(fine)
    if unsound:
        logger.warning(f"gradients are not finite on rank {', '.join(map(str, unsound))}")
    return measured and fine and not unsound


def loss_input(
    policy: Policy,
    rows: Sequence[UpdateRow],
    batch: PaddedBatch | Packed,
    cfg: Config,
    norm: Norm,
    teacher: LanguageModel | None,
    old: Float[Tensor, "B T"] | None = None,
) -> tuple[TokenLogprobs, LossInput]:
    """One forward of the policy on `rows` and, where the loss asks for them, of the reference and the teacher.

    old: the log-probs under π_old; None: the policy's own.
    """
    loss = cfg.loss
    support = cfg.sampling if loss.ratio_support == "sampled" else None
    rollouts = [row.rollout for row in rows]
    logps = completion_logprobs(policy.model, batch, support)
    logp = logps.of(loss.ratio_support)
    old = logp.detach() if old is None else old
    recorded, known = recorded_logps(rollouts, loss, old)
    is_teacher = uploaded([r.source == "teacher" for r in rollouts], policy.device)[:, None]
    ref = logp_teacher = None
    with torch.no_grad():
        others_read = loss.beta or loss.teacher_tau
        if others_read and isinstance(batch, Packed) and batch.prompts is not None:
            # The prompts that were read are this policy's. Without a gradient the rows may share all that they can.
            batch = as_batch(policy, [replace(row, at=0) for row in rows], packs=True)
        if loss.beta:
            with policy.adapter.reference():
                ref = completion_logprobs(policy.model, batch, support).of(loss.ratio_support)
        if loss.teacher_tau and teacher is not None:
            logp_teacher = completion_logprobs(teacher.model, batch, support).of(loss.ratio_support)
    return logps, LossInput(
        logp=logp,
        logp_old=old,
        # ratio 1 where the sampler's log-probs are not known, and on demonstrations
        logp_sampler=torch.where(is_teacher | ~known[:, None], old, recorded),
        advantages=uploaded([row.advantage for row in rows], policy.device, logp.dtype),
        mask=batch.mask,
        norm=norm,
        logp_ref=ref,
        logp_teacher=logp_teacher,
    )


def recorded_logps(
    rollouts: Sequence[Rollout], loss: LossConfig, like: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, " B"]]:
    """The log-probs that came with the rollouts (0 on padding), and which rollouts have them."""
    T = like.shape[1]
    padded: list[list[float]] = []
    is_known: list[bool] = []
    for rollout in rollouts:
        logps = rollout.logp_full if loss.ratio_support == "full" else rollout.logp_sampled
        is_known.append(logps is not None)
        row = list(logps or ())
        padding = [0.0] * (T - len(row))
        padded.append(row + padding)
    return uploaded(padded, like.device, like.dtype), uploaded(is_known, like.device)
