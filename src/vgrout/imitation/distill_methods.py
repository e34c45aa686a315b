"""The two methods of distillation: MiniLLM's reverse KL, and ULD's cross-entropy and distance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout.config.sampling import Sampling
from vgrout.grpo import Row, as_batch, micro_batches, packed_batches
from vgrout.imitation.distill_config import Task, not_token_by_token
from vgrout.imitation.losses import minillm, reverse_kl, topk_distance, wasserstein
from vgrout.imitation.mixed_sampling import mixed_model
from vgrout.imitation.token_alignment import aligned, nearest_tokens, token_bytes
from vgrout.imitation.trainable import Trainable
from vgrout.model.logprobs import (
    Batch,
    collate,
    completion_hidden,
    completion_logprobs,
    head_logits,
    in_chunks,
    log_softmax_at,
    vocabulary,
)
from vgrout.model.memory import TOKEN_BUDGET
from vgrout.model.packing import Packed
from vgrout.model.policy import LanguageModel
from vgrout.rng import py_stream
from vgrout.types import Grade, Rollout, Source

Graded = tuple[Rollout, Grade | None]  # None: the sandbox failed


@dataclass(frozen=True, slots=True)
class Measured:
    """One step's numbers; None: the method has no such number."""

    loss: float
    kl: float | None = None
    ce: float | None = None
    distance: float | None = None
    aligned: float | None = None
    anchor: float | None = None

    def columns(self) -> dict[str, Any]:
        """For the step's row."""
        return asdict(self)


class MiniLlm:
    """Reverse KL on answers sampled from the mixture, and the language-model anchor."""

    sampling = Sampling(temperature=1.0, top_k=0)  # the distribution that its expectations are over
    source: Source = "student"

    def __init__(self, task: Task, student: LanguageModel, teacher: LanguageModel) -> None:
        self.task, self.cfg, self.teacher = task, task.cfg.minillm, teacher
        if student.tokenizer_sha256 != teacher.tokenizer_sha256:
            raise not_token_by_token(task.cfg.teacher, f"another tokenizer than --student {task.cfg.student}")
        own, other = vocabulary(student.model), vocabulary(teacher.model)
        if own != other:
            raise not_token_by_token(task.cfg.teacher, f"{other} logits against the student's {own}")
        if not self.cfg.minillm_pretrain_anchor_weight and same_weights(student, teacher):
            raise ValueError(
                f"--teacher {task.cfg.teacher}: has the student's own weights, so the gradient is zero; "
                "give another teacher or student"
            )
        self.text: Int[Tensor, " N"] | None = None
        if task.anchor:
            ids = student.tok(task.anchor, add_special_tokens=False)["input_ids"]
            if len(ids) < 2:
                raise ValueError(f"--minillm-pretrain-anchor-path: {len(ids)} tokens, nothing to predict")
            self.text = torch.tensor(ids)

    def behaviour_model(self, student: LanguageModel, teacher: LanguageModel) -> LanguageModel:
        """The model that answers are sampled from."""
        return mixed_model(student, teacher, self.cfg.minillm_teacher_mix_ratio)

    def learn(self, learner: Trainable, answers: Sequence[Graded], step: int) -> Measured:
        """Add the gradient of one step's answers."""
        lm, teacher = learner.lm, self.teacher
        rows = [Row(rollout, 0.0, 0) for rollout, _ in answers]
        total, kls, losses = sum(len(r.rollout.completion_ids) for r in rows), [], []

        def head(h_s: Tensor, h_t: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            s, t = wide(head_logits(lm.model, h_s)), wide(head_logits(teacher.model, h_t))
            return log_softmax_at(s, target), log_softmax_at(t, target), reverse_kl(s, t)

        for part in microbatches(lm, rows, teacher.packs):
            batch = batched(lm, part, teacher.packs)
            sampler = padded([r.rollout.logp_full or () for r in part], batch)

            def loss(batch: Batch | Packed = batch, sampler: Tensor = sampler) -> Tensor:
                wanted = batch.mask.nonzero(as_tuple=True)
                hidden = completion_hidden(lm.model, batch)
                with torch.no_grad():
                    teacher_hidden = completion_hidden(teacher.model, batch)
                width = 3 * (vocabulary(lm.model) + vocabulary(teacher.model))
                flat = in_chunks(head, width, hidden, teacher_hidden, batch.target[wanted])
                empty = flat[0].new_zeros(batch.mask.shape)
                logq, logp, kl = (empty.index_put(wanted, x) for x in flat)
                kls.append(kl.detach().sum())
                normalize = self.cfg.minillm_length_normalize
                return minillm(logq, logp.detach(), sampler, kl, batch.mask, normalize).sum() / total

            losses.append(learner.add(batch, loss))
        anchor = self._anchor(learner, step)
        weight = self.cfg.minillm_pretrain_anchor_weight
        return Measured(
            loss=sum(losses) + weight * (anchor or 0.0), kl=float(torch.stack(kls).sum()) / total, anchor=anchor
        )

    def _anchor(self, learner: Trainable, step: int) -> float | None:
        """Language-model loss on windows of the text, one per prompt of a step, of at most `max_new` tokens."""
        if self.text is None:
            return None
        n = min(self.task.max_new, len(self.text) - 1)
        stream = py_stream(self.task.cfg.seed, "anchor", step)
        starts = [stream.randrange(len(self.text) - n) for _ in range(self.task.cfg.prompts_per_step)]
        windows = [tuple(self.text[i : i + n + 1].tolist()) for i in starts]
        batch = collate([w[:1] for w in windows], [w[1:] for w in windows], learner.lm.device)
        weight = self.cfg.minillm_pretrain_anchor_weight

        def loss() -> Tensor:
            return -weight * completion_logprobs(learner.lm.model, batch).full.sum() / (n * len(windows))

        return learner.add(batch, loss) / weight


class Uld:
    """Cross-entropy on the teacher's answers, plus the distance of the two distributions at aligned tokens."""

    source: Source = "teacher"

    def __init__(self, task: Task, student: LanguageModel, teacher: LanguageModel) -> None:
        self.task, self.cfg, self.teacher = task, task.cfg.uld, teacher
        self.sampling = task.cfg.sampling  # as the teacher is deployed
        self.same_tokenizer = student.tokenizer_sha256 == teacher.tokenizer_sha256
        width = vocabulary(teacher.model)
        self.student_of: Int[Tensor, " V"] | None = None  # teacher's token → student's
        if not self.same_tokenizer:
            self.student_bytes = token_bytes(student.tok, student.end_id)
            self.teacher_bytes = token_bytes(teacher.tok, teacher.end_id)
        if self.cfg.uld_strategy == "topk_align":
            own = torch.arange(width)
            if not self.same_tokenizer:
                own = nearest_tokens(self.student_bytes, self.teacher_bytes, width)
            self.student_of = torch.where(own < vocabulary(student.model), own, -1).to(student.device)

    def behaviour_model(self, student: LanguageModel, teacher: LanguageModel) -> LanguageModel:
        """The model that answers are sampled from."""
        return teacher

    def translate(self, lm: LanguageModel, rollout: Rollout) -> tuple[Rollout, list[tuple[int, int]]] | None:
        """The answer in the student's tokens, and pairs of aligned tokens (student's, teacher's). None: it is empty."""
        ids = rollout.completion_ids
        if self.same_tokenizer:
            return rollout, [(i, i) for i in range(len(ids))]
        text = self.teacher_bytes.text(ids).decode(errors="ignore")
        own = lm.encode_completion(text, rollout.finished)[: self.task.max_new]
        if not own:
            return None
        translated = Rollout(
            problem=rollout.problem,
            source="teacher",
            deployed=False,
            prompt_ids=lm.render(rollout.problem.messages),
            completion_ids=own,
            text=rollout.text,
            finished=rollout.finished,
        )
        return translated, aligned(self.student_bytes, own, self.teacher_bytes, ids)

    def learn(self, learner: Trainable, answers: Sequence[Graded], step: int) -> Measured:
        """Add the gradient of one step's answers."""
        lm, teacher, cfg = learner.lm, self.teacher, self.cfg
        rows: list[Row] = []
        originals: dict[int, tuple[Rollout, list[tuple[int, int]]]] = {}  # by id of the student's rollout
        for rollout, _ in answers:
            if (translation := self.translate(lm, rollout)) is not None:
                own, pairs = translation
                rows.append(Row(own, 0.0, 0))
                originals[id(own)] = rollout, pairs
        total = sum(len(r.rollout.completion_ids) for r in rows)
        n_aligned = sum(len(pairs) for _, pairs in originals.values())
        if not total:
            return Measured(loss=math.nan)
        ces, distances, losses = [], [], []

        def compare(h_s: Tensor, h_t: Tensor) -> tuple[Tensor, ...]:
            s, t = wide(head_logits(lm.model, h_s)), wide(head_logits(teacher.model, h_t))
            if self.student_of is None or cfg.uld_top_k is None:
                return (wasserstein(s, t),)
            return (topk_distance(s, t, cfg.uld_top_k, self.student_of),)

        def ce(h_s: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            return (-log_softmax_at(wide(head_logits(lm.model, h_s)), target),)

        for part in microbatches(lm, rows, teacher.packs):
            batch = batched(lm, part, teacher.packs)
            whose = [originals[id(r.rollout)] for r in part]

            def loss(batch: Batch | Packed = batch, whose: Sequence[Any] = whose) -> Tensor:
                hidden = completion_hidden(lm.model, batch)
                target = batch.target[batch.mask.nonzero(as_tuple=True)]
                (nll,) = in_chunks(ce, vocabulary(lm.model), hidden, target)
                ces.append(nll.detach().sum())
                value = cfg.uld_ce_weight * nll.sum() / total
                if not cfg.uld_lambda or not n_aligned:
                    return value
                at, teacher_at = aligned_rows(batch.mask.sum(1).tolist(), whose)
                if not at:
                    return value
                with torch.no_grad():
                    other = batched(teacher, [Row(r, 0.0, 0) for r, _ in whose], lm.packs)
                    h_t = completion_hidden(teacher.model, other)
                width = 3 * (vocabulary(lm.model) + vocabulary(teacher.model))
                (d,) = in_chunks(compare, width, hidden[at], h_t[teacher_at])
                distances.append(d.detach().sum())
                return value + cfg.uld_lambda * d.sum() / n_aligned

            losses.append(learner.add(batch, loss))
        return Measured(
            loss=sum(losses),
            ce=float(torch.stack(ces).sum()) / total,
            distance=float(torch.stack(distances).sum()) / n_aligned if distances else None,
            aligned=n_aligned / total,
        )


Method = MiniLlm | Uld
METHODS: dict[str, Callable[[Task, LanguageModel, LanguageModel], Method]] = {"minillm": MiniLlm, "uld": Uld}


def aligned_rows(
    lengths: Sequence[int], whose: Sequence[tuple[Rollout, list[tuple[int, int]]]]
) -> tuple[list[int], list[int]]:
    """Aligned pairs as rows of the student's and of the teacher's `completion_hidden`, which go answer by answer.

    lengths: the student's tokens of each answer. whose: each answer in the teacher's tokens, and its pairs.
    """
    own_rows, other_rows, own, other = [], [], 0, 0
    for n, (rollout, pairs) in zip(lengths, whose, strict=True):
        own_rows += [own + i for i, _ in pairs]
        other_rows += [other + j for _, j in pairs]
        own, other = own + n, other + len(rollout.completion_ids)
    return own_rows, other_rows


def same_weights(a: LanguageModel, b: LanguageModel) -> bool:
    """Whether all parameters are equal, adapters left out."""
    own, other = list(a.model.parameters()), list(b.model.parameters())
    return len(own) == len(other) and all(map(torch.equal, own, other))


def wide(logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
    """The logits in fp32 or wider."""
    return logits.float() if logits.dtype != torch.float64 else logits


def microbatches(lm: LanguageModel, rows: Sequence[Row], also: bool) -> list[list[Row]]:
    """Rows in parts, one forward each. also: whether the other model can be packed too."""
    budget = TOKEN_BUDGET.get(lm.device.type, TOKEN_BUDGET["cuda"])
    return packed_batches(rows, budget, "shared") if lm.packs and also else micro_batches(rows, budget)


def batched(lm: LanguageModel, rows: Sequence[Row], also: bool) -> Batch | Packed:
    """One forward's rows, packed if both models can be (`also`: the other one), so that both read the same layout."""
    return as_batch(lm, rows, "shared" if lm.packs and also else "padded")


def padded(values: Sequence[Sequence[float]], batch: Batch | Packed) -> Float[Tensor, "B T"]:
    """One number per completion token, 0 on padding."""
    out = torch.zeros(batch.mask.shape, dtype=torch.float32, device=batch.mask.device)
    for row, given in zip(out, values, strict=True):
        row[: len(given)] = torch.tensor(given, device=out.device)
    return out
