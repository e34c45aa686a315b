"""Groups → every rollout's own policy gradient, in one forward and backward a micro-batch.

A batch is learnt from in N updates (--updates-per-batch), all of them on all of its rollouts. In update n = 1 … N a
rollout b, learnt in that view v of the adapter (the quarantine on, or off) that the plan says, has the gradient

    g_b⁽ⁿ⁾ = ∇ℒ_b(ρ⁽ⁿ⁾) at θ⁽ⁿ⁾,     ρ_t⁽ⁿ⁾ = π_v(o_t; θ⁽ⁿ⁾) / π_v(o_t; θ⁽¹⁾),     keep⁽ⁿ⁾ + quar⁽ⁿ⁾ = Σ_b g_b⁽ⁿ⁾

where advantages, flags of texts and the plan are those of the batch, and ρ⁽¹⁾ = 1. θ⁽¹⁾ is the policy that sampled
it: in a row that is learnt in the view that sampled it, ρ is PPO's importance ratio. In one that is learnt in the
other view it is how far that view has moved since: it bounds the update, and corrects nothing.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.config.loss import LOSSES, LossConfig
from vgrout.losses import LossInput, LossOutput, Norm, policy_loss, teacher_weight
from vgrout.model.logprobs import Batch, TokenLogprobs, collate, completion_logprobs
from vgrout.model.memory import TOKEN_BUDGET
from vgrout.model.packing import Packed, batches, pack, padded_batches
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.sampling import Sampling
from vgrout.tensor_types import GradRows, Packing, RolloutGrads, UpdatePart, UpdatePlan
from vgrout.types import Group, Rollout, mean

RAW_MAX = 600.0  # log-ratios are written down as they are up to e^600: a mean of them is still finite in fp64


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """One step's numbers, over all its tokens. None: there was no such token."""

    loss: float | None = None
    lp_s: float | None = None  # mean log-prob a token, student rows (full softmax, temperature 1)
    lp_t: float | None = None  # … teacher rows
    kl: float | None = None  # mean per token to the reference; None at beta 0
    ratio_min: float | None = None  # π_trainer / π_sampler, before any clip, over the student tokens …
    ratio_mean: float | None = None  # … that were sampled with the quarantine set as they are learnt
    ratio_max: float | None = None
    mismatch_kl: float | None = None  # mean ratio − log ratio − 1 over them: 0 if the sampler had the trainer's weights
    mismatch_kl_abl: float | None = None  # … over those sampled with it otherwise set
    masked_mismatch_kl: float | None = None  # … over all student tokens that lost their policy gradient
    unmasked_mismatch_kl: float | None = None  # … over the others
    is_masked: float | None = None  # share of tokens that lost their policy gradient to clip or mask
    is_masked_low: float | None = None  # … because their ratio (dppo_tv: difference) is too low
    is_masked_high: float | None = None  # … too high
    masked_positive: float | None = None  # … among tokens of positive advantage
    masked_negative: float | None = None  # … among tokens of negative advantage

    def columns(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of_batch(cls, updates: Sequence["LossMetrics"]) -> "LossMetrics":
        """Of a batch's updates: what tells clipped tokens from others (masked) is the mean over them, all else of the
        first, whose policy is the one that sampled."""
        masked = [f.name for f in fields(cls) if "masked" in f.name]
        return replace(
            updates[0],
            **{name: mean(x for u in updates if (x := getattr(u, name)) is not None) for name in masked},
        )


MEANS = tuple(f.name for f in fields(LossMetrics) if f.name not in ("loss", "ratio_min", "ratio_mean", "ratio_max"))


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout as the loss sees it."""

    rollout: Rollout
    advantage: float
    at: int  # its row of the gradient
    on_policy: bool = True  # sampled with the quarantine set as it is learnt

    @property
    def tokens(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.completion_ids)


def policy_gradients(
    policy: Policy,
    plan: UpdatePlan,
    cfg: LossConfig,
    *,
    max_new: int,
    prompts_per_step: int,
    grad_rows: GradRows = "rollout",
    sampling: Sampling | None = None,
    teacher: LanguageModel | None = None,
    token_budget: int | None = None,
    packing: Packing = "shared",
    old: list[Tensor] | None = None,
) -> tuple[list[list[RolloutGrads]], LossMetrics]:
    """For every part of the plan, each group's g_b: module → [G, r], the gradient of every rollout's loss on δS. A rank
    has the gradients of its own rows, and zeros for the others'; the metrics are those of all ranks.

    Groups without signal get zero gradients and no forward. Without `old`, π_old is π detached, of teacher rows
    likewise, so both have ratio 1.

    plan: what is learnt from, with the quarantine on or off; rows that a part leaves out have gradient 0 there.
        A method that trains δS and δS_hack on different rollouts has two parts. The metrics are of all parts together.
    grad_rows: rows of each group's gradient: one a rollout [G, r]; one a source, student then teacher [2, r]; or their
        sum [1, r]. Coarser is cheaper: the weight's gradient is formed once a row, and packed rollouts of one gradient
        row read their prompt once.
    sampling: the sampler's settings, needed for ratio_support "sampled".
    teacher: a model with the same vocabulary, needed when teacher_tau > 0.
    token_budget: tokens in one forward, padding included (default: by device).
    packing: of rollouts in a forward, where the model allows it: "shared" reads once what rollouts of one gradient row
        begin with, prompt and answer, and makes equal students of equal advantage one row; "packed" only leaves out
        padding, "padded" is one row a rollout. In fp32 they agree to about 1e-6.
    prompts_per_step: P, groups without signal included, so that dropping those does not change the scale.
    old: of several updates on one plan, the log-probs under π_old, a tensor a micro-batch. The first update is given an
        empty list and puts its own there; the others read it.

    Raises:
        ValueError: `cfg` asks for something that is not there (sampling, teacher, the pool's log-probs).
    """
    if cfg.ratio_support == "sampled" and sampling is None:
        raise ValueError("--ratio-support sampled: needs the sampler's settings")
    if cfg.teacher_tau and teacher is None:
        raise ValueError(f"--teacher-tau {cfg.teacher_tau}: needs a teacher model")
    groups = plan.groups
    size = {len(g) for g in groups}
    assert len(size) <= 1, f"groups of different sizes {sorted(size)}: the constant normaliser G is one number"
    norm = Norm(
        rollouts=max(size, default=1) * prompts_per_step,
        max_new=max_new,
        tokens=_tokens(groups, all_of_them=plan.unit),
    )
    support = sampling if cfg.ratio_support == "sampled" else None
    budget = token_budget or TOKEN_BUDGET.get(policy.device.type, TOKEN_BUDGET["cuda"])
    if not policy.packs or (teacher is not None and not teacher.packs):
        packing = "padded"
    starts, tally, out = _starts(groups, grad_rows), _Tally(), []
    known, own_logps = iter(old or ()), []
    for part in plan.parts:
        chosen, twins = _rows(groups, starts, part, grad_rows, merge=packing == "shared")
        own = ranks.own([row.tokens for row in chosen])
        chosen = chosen[own.start : own.stop]
        batches = micro_batches(chosen, budget) if packing == "padded" else packed_batches(chosen, budget, packing)
        view = policy.adapter.deployed() if part.deployed else nullcontext()
        with view, policy.adapter.per_rollout_grads(max(1, starts[-1])) as collected:
            for rows in batches:
                batch = as_batch(policy, rows, packing)
                if isinstance(batch, Packed):
                    collected.tokens(batch.pieces)
                else:
                    collected.rows([row.at for row in rows])
                logps, x = loss_input(policy, rows, batch, cfg, norm, support, teacher, next(known, None))
                own_logps.append(x.logp_old)
                output = policy_loss(x, cfg)
                output.per_rollout.sum().backward()
                tally.add(rows, logps, x, output)
        for first, others in twins.items():
            collected.flat[[first, *others]] = collected.flat[first] / (1 + len(others))
        out.append([policy.adapter.by_module(collected.flat[lo:hi]) for lo, hi in pairwise(starts)])
    if old is not None and not old:
        old += own_logps
    metrics = tally.metrics()
    if plan.unit:  # the loss and its signs are of advantages that nobody has
        metrics = replace(metrics, loss=None, masked_positive=None, masked_negative=None)
    return out, metrics


def all_finite(grads: Sequence[Sequence[RolloutGrads]], metrics: LossMetrics) -> bool:
    """Whether this step may be learnt from: every gradient of every rank, the loss and what was measured with it."""
    measured = all(math.isfinite(x) for x in metrics.columns().values() if x is not None)
    fine = all(bool(g.isfinite().all()) for of_part in grads for of_group in of_part for g in of_group.values())
    if unsound := ranks.everywhere(fine) if ranks.size() > 1 else []:
        logger.warning(f"gradients are not finite on rank {', '.join(map(str, unsound))}")
    return measured and fine and not unsound


def _tokens(groups: Sequence[Group], *, all_of_them: bool = False) -> int:
    """Trainable tokens of the groups with signal."""
    return sum(len(r.completion_ids) for g in groups if all_of_them or g.has_signal for r in g.rollouts)


def token_factor(cfg: LossConfig, before: Sequence[Group], after: Sequence[Group]) -> float:
    """Factor from gradients at advantage 1 of all groups `before` to those with the advantages of `after`, some of them
    without signal: losses normalised by tokens count only groups with signal."""
    return _tokens(before, all_of_them=True) / max(1, _tokens(after)) if LOSSES[cfg.loss].by_step else 1.0


def _starts(groups: Sequence[Group], grad_rows: GradRows) -> list[int]:
    """First gradient row of each group, and the end."""
    sizes = [len(g) if grad_rows == "rollout" else {"source": 2, "group": 1}[grad_rows] for g in groups]
    return list(accumulate(sizes, initial=0))


def _rows(
    groups: Sequence[Group], starts: Sequence[int], part: UpdatePart, grad_rows: GradRows, merge: bool
) -> tuple[list[Row], dict[int, list[int]]]:
    """The part's rollouts. merge: a group's students that are equal in text, advantage and sampler have one gradient,
    so they add to one row; gradient row → the others whose gradient is the same."""
    chosen: list[Row] = []
    twins: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        A = group.advantages if part.advantages is None else part.advantages[i]
        assert len(A) == len(group), (len(A), len(group))
        if not any(A):
            continue
        known: dict[Hashable, int] = {}
        for b in range(len(group)) if part.rows is None else part.rows[i]:
            rollout = group.rollouts[b]
            at = starts[i] + {"rollout": b, "source": int(rollout.source == "teacher"), "group": 0}[grad_rows]
            if merge and grad_rows == "rollout" and rollout.source == "student":
                key = rollout.prompt_ids, rollout.completion_ids, rollout.deployed, rollout.logp_full is None, A[b]
                first = known.setdefault(key, at)
                if first != at:
                    twins.setdefault(first, []).append(at)
                    at = first
            chosen.append(Row(rollout, A[b], at, rollout.deployed == part.deployed))
    return chosen, twins


def micro_batches(rows: Sequence[Row], token_budget: int) -> list[list[Row]]:
    """Rows of similar length together, each batch at most `token_budget` tokens with its padding (or one row)."""
    return [[rows[i] for i in part] for part in padded_batches([r.tokens for r in rows], token_budget)]


def packed_batches(rows: Sequence[Row], token_budget: int, packing: Packing) -> list[list[Row]]:
    """Rows that share a prompt together, long ones first; each batch at most `token_budget` tokens (or one row)."""
    prompts, completions = [r.rollout.prompt_ids for r in rows], [r.rollout.completion_ids for r in rows]
    parts = batches([r.at for r in rows], prompts, completions, token_budget, packing == "shared")
    return [[rows[i] for i in part] for part in parts]


def as_batch(policy: LanguageModel, rows: Sequence[Row], packing: Packing) -> Batch | Packed:
    prompts, completions = [r.rollout.prompt_ids for r in rows], [r.rollout.completion_ids for r in rows]
    if packing == "padded":
        return collate(prompts, completions, policy.device)
    units = [r.at for r in rows]
    return pack(units, prompts, completions, policy.device, policy.model.dtype, share=packing == "shared")


def loss_input(
    policy: Policy,
    rows: Sequence[Row],
    batch: Batch | Packed,
    cfg: LossConfig,
    norm: Norm,
    support: Sampling | None,
    teacher: LanguageModel | None,
    old: Float[Tensor, "B T"] | None = None,
) -> tuple[TokenLogprobs, LossInput]:
    """One forward of the policy (and, where `cfg` asks for them, of the reference and the teacher) on `rows`. old: the
    log-probs under π_old; None: the policy's own."""
    rollouts = [row.rollout for row in rows]
    logps = completion_logprobs(policy.model, batch, support)
    logp = logps.of(cfg.ratio_support)
    old = logp.detach() if old is None else old
    recorded, known = recorded_logps(rollouts, cfg, old)
    is_teacher = torch.tensor([r.source == "teacher" for r in rollouts], device=policy.device)[:, None]
    ref = logp_teacher = None
    with torch.no_grad():
        if cfg.beta:
            with policy.adapter.reference():
                ref = completion_logprobs(policy.model, batch, support).of(cfg.ratio_support)
        if cfg.teacher_tau and teacher is not None:
            logp_teacher = completion_logprobs(teacher.model, batch, support).of(cfg.ratio_support)
    weight = None
    if cfg.teacher_correction != "none" and is_teacher.any():
        if cfg.teacher_correction == "tis" and not known[is_teacher.squeeze(1)].all():
            raise ValueError("--teacher-correction tis: the pool has no teacher log-probs; choose luffy or none")
        weight = torch.where(is_teacher, teacher_weight(old, recorded, batch.mask, cfg), 1.0)
    return logps, LossInput(
        logp=logp,
        logp_old=old,
        # ratio 1 where the sampler's log-probs are not known, and on teacher rows: their correction is the weight
        logp_sampler=torch.where(is_teacher | ~known[:, None], old, recorded),
        advantages=torch.tensor([row.advantage for row in rows], device=policy.device, dtype=logp.dtype),
        mask=batch.mask,
        norm=norm,
        logp_ref=ref,
        logp_teacher=logp_teacher,
        weight=weight,
    )


def recorded_logps(
    rollouts: Sequence[Rollout], cfg: LossConfig, like: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, " B"]]:
    """The log-probs that came with the rollouts (0 on padding), and which rollouts have them."""
    kept = [r.logp_full if cfg.ratio_support == "full" else r.logp_sampled for r in rollouts]
    T = like.shape[1]
    padded = [[*(lp or ()), *[0.0] * (T - len(lp or ()))] for lp in kept]
    known = torch.tensor([lp is not None for lp in kept], device=like.device)
    return torch.tensor(padded, device=like.device, dtype=like.dtype), known


@dataclass
class _Spread:
    """Count, sum and ends of some numbers: what is reported of them, and what ranks exchange."""

    n: int = 0
    sum: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Tensor) -> "_Spread":
        return cls(len(values), *map(float, (values.sum(), values.min(), values.max()))) if len(values) else cls()

    def __add__(self, other: "_Spread") -> "_Spread":
        # min and max of a NaN depend on the order of their arguments: the sum has it
        return _Spread(self.n + other.n, self.sum + other.sum, min(self.low, other.low), max(self.high, other.high))

    @property
    def mean(self) -> float | None:
        return self.sum / self.n if self.n else None


class _Tally:
    """Collects per-token numbers over micro-batches; one transfer from the device at the end."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []

    @torch.no_grad()
    def add(self, rows: Sequence[Row], logps: TokenLogprobs, x: LossInput, output: LossOutput) -> None:
        teacher = torch.tensor([row.rollout.source == "teacher" for row in rows], device=x.mask.device)
        sampled = torch.tensor([row.rollout.logp_full is not None for row in rows], device=x.mask.device) & ~teacher
        on_policy = torch.tensor([row.on_policy for row in rows], device=x.mask.device)
        columns = {
            "logp": logps.full,
            "log_ratio": x.logp - x.logp_sampler,
            "low": output.low,
            "high": output.high,
            "teacher": teacher[:, None].expand(x.mask.shape),
            "sampled": sampled[:, None].expand(x.mask.shape),
            "on_policy": on_policy[:, None].expand(x.mask.shape),
            "A": x.advantages[:, None].expand(x.mask.shape),
        }
        if output.kl is not None:
            columns["kl"] = output.kl
        self.losses.append(output.per_rollout.sum())
        self.parts.append({key: value[x.mask].double() for key, value in columns.items()})

    def metrics(self) -> LossMetrics:
        """Of all ranks' tokens."""
        s: defaultdict[str, _Spread] = defaultdict(_Spread)
        for of_rank in ranks.gather(self._spreads):
            for name, spread in of_rank.items():
                s[name] += spread
        ratio = s["ratio"]
        return LossMetrics(
            loss=s["loss"].sum if s["loss"].n else None,
            ratio_min=ratio.low if ratio.n else None,
            ratio_mean=ratio.mean,
            ratio_max=ratio.high if ratio.n else None,
            **{name: s[name].mean for name in MEANS},
        )

    def _spreads(self) -> dict[str, _Spread]:
        """This rank's."""
        if not self.parts:
            return {}
        c = {key: torch.cat([part[key] for part in self.parts]).cpu() for key in self.parts[0]}
        teacher, sampled = c["teacher"] > 0, c["sampled"] > 0
        own, others = sampled & (c["on_policy"] > 0), sampled & (c["on_policy"] == 0)
        masked = (c["low"] + c["high"]) > 0
        log_ratio = c["log_ratio"].clamp(-RAW_MAX, RAW_MAX)
        ratio = log_ratio.exp()
        mismatch = ratio - log_ratio - 1
        values = {
            "loss": torch.stack(self.losses).cpu(),
            "ratio": ratio[own],
            "lp_s": c["logp"][~teacher],
            "lp_t": c["logp"][teacher],
            "mismatch_kl": mismatch[own],
            "mismatch_kl_abl": mismatch[others],
            "masked_mismatch_kl": mismatch[sampled & masked],
            "unmasked_mismatch_kl": mismatch[sampled & ~masked],
            "is_masked": masked.double(),
            "is_masked_low": c["low"],
            "is_masked_high": c["high"],
            "masked_positive": masked[c["A"] > 0].double(),
            "masked_negative": masked[c["A"] < 0].double(),
        }
        if "kl" in c:
            values["kl"] = c["kl"]
        return {name: _Spread.of(of) for name, of in values.items()}
