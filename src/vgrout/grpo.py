"""Rows → their policy gradients g [N, R], in one forward and backward a micro-batch.

A batch is learnt from in N updates (--updates-per-batch), all of them on all of its rollouts. In update n = 1 … N a
rollout b, learnt in that view v of the adapter (the quarantine on, or off) that sampled it, has the gradient

    g_b⁽ⁿ⁾ = ∇ℒ_b(ρ⁽ⁿ⁾) at θ⁽ⁿ⁾,     ρ_t⁽ⁿ⁾ = π_v(o_t; θ⁽ⁿ⁾) / π_v(o_t; θ⁽¹⁾),     keep⁽ⁿ⁾ + quar⁽ⁿ⁾ = Σ_b g_b⁽ⁿ⁾

where advantages and flags of texts are those of the batch, and ρ⁽¹⁾ = 1: θ⁽¹⁾ is the policy that sampled it, so ρ is
PPO's importance ratio.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.config.loss import LossConfig
from vgrout.config.run import Config
from vgrout.data import Batch, Rollout, UpdateRow
from vgrout.losses import LossInput, LossOutput, Norm, policy_loss
from vgrout.metrics import mean
from vgrout.model.attention import uploaded
from vgrout.model.layout import Packed, batches, pack, padded_batches
from vgrout.model.logprobs import PaddedBatch, TokenLogprobs, backbone, collate, completion_logprobs
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.prefixes import Prompts
from vgrout.model.sampling import Sampling

# log-ratios are written down as they are up to e^600: a mean of them is still finite in fp64
RAW_MAX = 600.0


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """One step's numbers, over all its tokens. None: there was no such token."""

    loss: float | None = None
    lp_s: float | None = None  # mean log-prob a token, student rows (full softmax, temperature 1)
    lp_t: float | None = None  # … teacher rows
    kl: float | None = None  # mean per token to the reference; None at beta 0
    # π_trainer / π_sampler, before any clip, over the student tokens
    ratio_min: float | None = None
    ratio_mean: float | None = None
    ratio_max: float | None = None
    # mean ratio − log ratio − 1 over them: 0 if the sampler had the trainer's weights
    mismatch_kl: float | None = None
    # … over all student tokens that lost their policy gradient
    masked_mismatch_kl: float | None = None
    unmasked_mismatch_kl: float | None = None  # … over the others
    # share of tokens that lost their policy gradient to clip or mask
    is_masked: float | None = None
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
            **{
                name: mean(x for u in updates if (x := getattr(u, name)) is not None)
                for name in masked
            },
        )


MEANS = tuple(
    f.name
    for f in fields(LossMetrics)
    if f.name not in ("loss", "ratio_min", "ratio_mean", "ratio_max")
)


def policy_gradients(
    policy: Policy,
    batch: Batch,
    cfg: Config,
    teacher: LanguageModel | None = None,
    old: list[Tensor] | None = None,
) -> tuple[Float[Tensor, "N R"] | None, LossMetrics]:
    """The gradient on δS of the losses of `batch.rows`: row n of g is the sum over those with `at` n. All ranks have
    the same, and the metrics of all. None: a gradient, or what was measured with it, is not finite.

    The fewer rows g has, the cheaper: the weight's gradient is formed once a row, and backward goes through a prompt
    once for every row of its rollouts. Where the model packs, a prompt is read once, and so is what rollouts of one row
    answer alike, and equal students of equal advantage are one row; in fp32 that agrees with a padded row a rollout to
    about 1e-6. Without `old`, π_old is π detached, of demonstrations likewise, so both have ratio 1.

    teacher: a model with the same vocabulary, needed for --teacher-tau.
    old: of several updates on one batch, the log-probs under π_old, a tensor a micro-batch. The first update is given
        an empty list and puts its own there; the others read it.
    """
    size = {len(g) for g in batch.with_signal}
    assert len(size) <= 1, (
        f"groups of different sizes {sorted(size)}: the constant normaliser G is one number"
    )
    norm = Norm(  # groups without signal count, so that leaving them out does not change the scale
        rollouts=max(size, default=1) * cfg.scale.prompts_per_step,
        max_new=cfg.scale.max_new,
        tokens=sum(len(row.rollout.completion_ids) for row in batch.rows),
    )
    support = cfg.sampling if cfg.loss.ratio_support == "sampled" else None
    packs = policy.packs and (teacher is None or teacher.packs)
    rows, twins = _merged(batch.rows) if packs else ([*batch.rows], {})
    n, tally = 1 + max((row.at for row in batch.rows), default=-1), _Tally()
    g = torch.zeros(n, len(policy.adapter), device=policy.device, dtype=policy.adapter.δS.dtype)
    known, own_logps = iter(old or ()), []
    for deployed in (False, True):
        chosen = [row for row in rows if row.rollout.deployed == deployed]
        own = ranks.own([row.tokens for row in chosen])
        if not (chosen := chosen[own.start : own.stop]):
            continue
        view = policy.adapter.deployed() if deployed else nullcontext()
        with view, policy.adapter.per_rollout_grads(n) as collected:
            for together, prompts in prompts_apart(policy, chosen) if packs else [(chosen, None)]:
                if prompts is not None:
                    prompts.read(policy.model, backbone(policy.model), collected.tokens)
                for part in micro_batches(together, policy.budget.tokens, packs, prompts):
                    made = as_batch(policy, part, packs, prompts)
                    if isinstance(made, Packed):
                        collected.tokens(made.pieces, made.tokens)
                    else:
                        collected.rows([row.at for row in part])
                    logps, x = loss_input(
                        policy, part, made, cfg.loss, norm, support, teacher, next(known, None)
                    )
                    own_logps.append(x.logp_old)
                    output = policy_loss(x, cfg.loss)
                    output.per_rollout.sum().backward()
                    tally.add(part, made, logps, x, output)
                if prompts is not None:
                    prompts.backward()
        g += collected.flat
    for first, others in twins.items():
        g[[first, *others]] = g[first] / (1 + len(others))
    if old is not None and not old:
        old += own_logps
    metrics = tally.metrics()
    return (ranks.total(g) if _finite(g, metrics) else None), metrics


def _finite(g: Float[Tensor, "N R"], metrics: LossMetrics) -> bool:
    """Whether the step may be learnt from: every gradient of every rank, the loss and what was measured with it."""
    measured = all(math.isfinite(x) for x in metrics.columns().values() if x is not None)
    fine = bool(g.isfinite().all())
    if unsound := ranks.everywhere(fine) if ranks.size() > 1 else []:
        logger.warning(f"gradients are not finite on rank {', '.join(map(str, unsound))}")
    return measured and fine and not unsound


def _merged(rows: Sequence[UpdateRow]) -> tuple[list[UpdateRow], dict[int, list[int]]]:
    """A group's students that are equal in text, advantage and sampler have one gradient: where each has a row of its
    own, they add to that of the first; that row → the others whose gradient is the same."""
    alone = Counter(row.at for row in rows)
    merged: list[UpdateRow] = []
    known: dict[Hashable, int] = {}
    twins: dict[int, list[int]] = {}
    for row in rows:
        r = row.rollout
        if r.source == "student" and alone[row.at] == 1:
            key = (
                row.group,
                r.prompt_ids,
                r.completion_ids,
                r.deployed,
                r.logp_full is None,
                row.advantage,
            )
            first = known.setdefault(key, row.at)
            if first != row.at:
                twins.setdefault(first, []).append(row.at)
                row = replace(row, at=first)
        merged.append(row)
    return merged, twins


def prompts_apart(
    policy: LanguageModel, rows: Sequence[UpdateRow]
) -> list[tuple[Sequence[UpdateRow], Prompts | None]]:
    """Rows in parts with their prompts, which are read before them: at most half of the budget, or one prompt. None: no
    prompt has two rows of g, so each is read with its answers."""
    of: dict[tuple[int, ...], list[UpdateRow]] = {}
    for row in rows:
        of.setdefault(row.rollout.prompt_ids, []).append(row)
    most = sorted(of, key=lambda prompt: -len({row.at for row in of[prompt]}))
    if len({row.at for row in of[most[0]]}) < 2:
        return [(rows, None)]
    parts: list[list[tuple[int, ...]]] = []
    left = 0
    for prompt in most:
        if not parts or len(prompt) > left:
            parts.append([])
            left = policy.budget.tokens // 2
        parts[-1].append(prompt)
        left -= len(prompt)
    out: list[tuple[Sequence[UpdateRow], Prompts | None]] = []
    for part in parts:
        whole = [row for prompt in part for row in of[prompt]]
        depth = policy.model.config.num_hidden_layers
        begun = Prompts(
            [row.at for row in whole], *_tokens(whole), depth, policy.device, policy.model.dtype
        )
        out.append((whole, begun if begun.ids else None))
    return out


def _tokens(rows: Sequence[UpdateRow]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Prompts and completions."""
    return [row.rollout.prompt_ids for row in rows], [row.rollout.completion_ids for row in rows]


def micro_batches(
    rows: Sequence[UpdateRow], budget: int, packs: bool, read: Prompts | None = None
) -> list[list[UpdateRow]]:
    """Rows for one forward: those that share a prompt together, long ones first, or of similar length with padding; at
    most `budget` tokens, those of the prompts that are read included, or one row."""
    if packs:
        left = budget if read is None else max(1, budget - len(read.ids))
        parts = batches([row.at for row in rows], *_tokens(rows), left, read)
    else:
        parts = padded_batches([row.tokens for row in rows], budget)
    return [[rows[i] for i in part] for part in parts]


def as_batch(
    policy: LanguageModel, rows: Sequence[UpdateRow], packs: bool, read: Prompts | None = None
) -> PaddedBatch | Packed:
    if packs:
        return pack(
            [row.at for row in rows], *_tokens(rows), policy.device, policy.model.dtype, read
        )
    return collate(*_tokens(rows), policy.device)


def loss_input(
    policy: Policy,
    rows: Sequence[UpdateRow],
    batch: PaddedBatch | Packed,
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
    is_teacher = uploaded([r.source == "teacher" for r in rollouts], policy.device)[:, None]
    ref = logp_teacher = None
    with torch.no_grad():
        if (
            isinstance(batch, Packed)
            and batch.prompts is not None
            and (cfg.beta or cfg.teacher_tau)
        ):
            # what was read of the prompts is this policy's; without a gradient the rows may share
            # all that they can
            batch = as_batch(policy, [replace(row, at=0) for row in rows], packs=True)
        if cfg.beta:
            with policy.adapter.reference():
                ref = completion_logprobs(policy.model, batch, support).of(cfg.ratio_support)
        if cfg.teacher_tau and teacher is not None:
            logp_teacher = completion_logprobs(teacher.model, batch, support).of(cfg.ratio_support)
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
    rollouts: Sequence[Rollout], cfg: LossConfig, like: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, " B"]]:
    """The log-probs that came with the rollouts (0 on padding), and which rollouts have them."""
    kept = [r.logp_full if cfg.ratio_support == "full" else r.logp_sampled for r in rollouts]
    T = like.shape[1]
    padded = [[*(lp or ()), *[0.0] * (T - len(lp or ()))] for lp in kept]
    known = uploaded([lp is not None for lp in kept], like.device)
    return uploaded(padded, like.device, like.dtype), known


@dataclass
class _Spread:
    """Count, sum and ends of some numbers: what is reported of them, and what ranks exchange."""

    n: int = 0
    sum: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Tensor) -> "_Spread":
        return (
            cls(len(values), *map(float, (values.sum(), values.min(), values.max())))
            if len(values)
            else cls()
        )

    def __add__(self, other: "_Spread") -> "_Spread":
        # min and max of a NaN depend on the order of their arguments: the sum has it
        return _Spread(
            self.n + other.n,
            self.sum + other.sum,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def mean(self) -> float | None:
        return self.sum / self.n if self.n else None


class _Tally:
    """Collects per-token numbers over micro-batches; one transfer from the device at the end."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []

    @torch.no_grad()
    def add(
        self,
        rows: Sequence[UpdateRow],
        batch: PaddedBatch | Packed,
        logps: TokenLogprobs,
        x: LossInput,
        output: LossOutput,
    ) -> None:
        teacher = uploaded([row.rollout.source == "teacher" for row in rows], x.mask.device)
        sampled = (
            uploaded([row.rollout.logp_full is not None for row in rows], x.mask.device) & ~teacher
        )
        columns = {
            "logp": logps.full,
            "log_ratio": x.logp - x.logp_sampler,
            "low": output.low,
            "high": output.high,
            "teacher": teacher[:, None].expand(x.mask.shape),
            "sampled": sampled[:, None].expand(x.mask.shape),
            "A": x.advantages[:, None].expand(x.mask.shape),
        }
        if output.kl is not None:
            columns["kl"] = output.kl
        self.losses.append(output.per_rollout.sum())
        self.parts.append({key: value[batch.wanted].double() for key, value in columns.items()})

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
        columns = [torch.cat([part[key] for part in self.parts]) for key in self.parts[0]]
        c = dict(zip(self.parts[0], torch.stack(columns).cpu(), strict=True))
        teacher, sampled = c["teacher"] > 0, c["sampled"] > 0
        masked = (c["low"] + c["high"]) > 0
        log_ratio = c["log_ratio"].clamp(-RAW_MAX, RAW_MAX)
        ratio = log_ratio.exp()
        mismatch = ratio - log_ratio - 1
        values = {
            "loss": torch.stack(self.losses).cpu(),
            "ratio": ratio[sampled],
            "lp_s": c["logp"][~teacher],
            "lp_t": c["logp"][teacher],
            "mismatch_kl": mismatch[sampled],
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
