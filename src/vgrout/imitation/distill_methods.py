"""The two methods of distillation: MiniLLM's reverse KL, and ULD's cross-entropy and distance."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout.config.sampling import Sampling
from vgrout.data import Rollout, Source
from vgrout.errors import Refused
from vgrout.imitation.distill_task import DistillTask, not_token_by_token, zero_gradient
from vgrout.imitation.losses import minillm, reverse_kl, topk_distance, wasserstein
from vgrout.imitation.mixed_sampling import mixed_model
from vgrout.imitation.token_alignment import aligned, nearest_tokens, token_bytes
from vgrout.imitation.trainable import Trainable
from vgrout.model.attention import uploaded
from vgrout.model.layout import Packed
from vgrout.model.logprobs import (
    PaddedBatch,
    collate,
    completion_hidden,
    completion_logprobs,
    head_logits,
    in_chunks,
    log_softmax_at,
    tokens,
    vocabulary,
)
from vgrout.model.policy import LanguageModel
from vgrout.rng import py_stream

Numbers = dict[str, Any]  # a step's columns: `loss`, and what the method measures
# student's tokens, teacher's, pairs of aligned ones
Translation = tuple[Rollout, Rollout, list[tuple[int, int]]]


class MiniLlm:
    """Reverse KL on answers sampled from the mixture, and the language-model anchor."""

    sampling = Sampling(temperature=1.0, top_k=0)  # the distribution that its expectations are over
    source: Source = "student"

    def __init__(self, task: DistillTask, student: LanguageModel, teacher: LanguageModel) -> None:
        self.task, self.settings, self.teacher = task, task.settings, teacher
        alike = student.tokenizer_sha256 == teacher.tokenizer_sha256
        if not alike or tokens(student.model) != tokens(teacher.model):
            raise not_token_by_token(task.settings)
        # without adapters
        own, other = list(student.model.parameters()), list(teacher.model.parameters())
        same = len(own) == len(other) and all(map(torch.equal, own, other))
        if same and not self.settings.minillm_pretrain_anchor_weight:
            raise zero_gradient(task.settings)
        self.text: Int[Tensor, " N"] | None = None
        if task.anchor:
            ids = student.tok(task.anchor, add_special_tokens=False)["input_ids"]
            if len(ids) < 2:
                raise Refused(
                    f"--minillm-pretrain-anchor-path: {len(ids)} tokens, nothing to predict"
                )
            self.text = torch.tensor(ids)

    def behaviour_model(self, student: LanguageModel, teacher: LanguageModel) -> LanguageModel:
        """The model that answers are sampled from."""
        return mixed_model(student, teacher, self.settings.minillm_teacher_mix_ratio)

    def learn(self, learner: Trainable, rollouts: Sequence[Rollout], step: int) -> Numbers:
        """Add the gradient of one step's answers."""
        lm, teacher = reading_alike(learner.lm, self.teacher)
        total, kls, losses = sum(len(r.completion_ids) for r in rollouts), [], []

        def head(h_s: Tensor, h_t: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            s, t = wide(head_logits(lm.model, h_s)), wide(head_logits(teacher.model, h_t))
            return log_softmax_at(s, target), log_softmax_at(t, target), reverse_kl(s, t)

        for part, batch in lm.batches(
            [r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts]
        ):
            T, logps = batch.mask.shape[1], [rollouts[i].logp_full or () for i in part]
            sampler = uploaded([[*logp, *[0.0] * (T - len(logp))] for logp in logps], lm.device)

            def loss(batch: PaddedBatch | Packed = batch, sampler: Tensor = sampler) -> Tensor:
                wanted = batch.wanted
                hidden = completion_hidden(lm.model, batch)
                with torch.no_grad():
                    teacher_hidden = completion_hidden(teacher.model, batch)
                width = 3 * (vocabulary(lm.model) + vocabulary(teacher.model))
                flat = in_chunks(head, width, hidden, teacher_hidden, batch.target[wanted])
                empty = flat[0].new_zeros(batch.mask.shape)
                logq, logp, kl = (empty.index_put(wanted, x) for x in flat)
                kls.append(kl.detach().sum())
                normalize = self.settings.minillm_length_normalize
                return (
                    minillm(logq, logp.detach(), sampler, kl, batch.mask, normalize).sum() / total
                )

            losses.append(learner.add(batch, loss))
        anchor = self.learn_anchor(learner, step)
        weight = self.settings.minillm_pretrain_anchor_weight
        loss_in_all = sum(losses) + weight * (anchor or 0.0)
        return {"loss": loss_in_all, "kl": float(torch.stack(kls).sum()) / total, "anchor": anchor}

    def learn_anchor(self, learner: Trainable, step: int) -> float | None:
        """Language-model loss on windows of the text, one per prompt of a step, of at most `max_new` tokens."""
        if self.text is None:
            return None
        scale, weight = self.task.cfg.scale, self.settings.minillm_pretrain_anchor_weight
        n = min(scale.max_new, len(self.text) - 1)
        stream = py_stream(self.task.cfg.run.seed, "anchor", step)
        starts = [stream.randrange(len(self.text) - n) for _ in range(scale.prompts_per_step)]
        windows = [tuple(self.text[i : i + n + 1].tolist()) for i in starts]
        batch = collate([w[:1] for w in windows], [w[1:] for w in windows], learner.lm.device)

        def loss() -> Tensor:
            return (
                -weight
                * completion_logprobs(learner.lm.model, batch).full.sum()
                / (n * len(windows))
            )

        return learner.add(batch, loss) / weight


class Uld:
    """Cross-entropy on the teacher's answers, plus the distance of the two distributions at aligned tokens."""

    source: Source = "teacher"

    def __init__(self, task: DistillTask, student: LanguageModel, teacher: LanguageModel) -> None:
        self.task, self.settings, self.teacher = task, task.settings, teacher
        self.sampling = task.cfg.sampling  # as the teacher is deployed
        alike = student.tokenizer_sha256 == teacher.tokenizer_sha256
        self.same_tokenizer = alike and tokens(student.model) == tokens(teacher.model)
        width = vocabulary(teacher.model)
        if not self.same_tokenizer:
            self.student_bytes = token_bytes(student.tok, student.end_id)
            self.teacher_bytes = token_bytes(teacher.tok, teacher.end_id)
        if self.settings.uld_top_k is not None:
            own = torch.arange(width)  # teacher's token → student's
            if not self.same_tokenizer:
                own = nearest_tokens(self.student_bytes, self.teacher_bytes, width)
            self.student_of = torch.where(own < vocabulary(student.model), own, -1).to(
                student.device
            )

    def behaviour_model(self, student: LanguageModel, teacher: LanguageModel) -> LanguageModel:
        """The model that answers are sampled from."""
        return teacher

    def translate(self, lm: LanguageModel, rollout: Rollout) -> Translation | None:
        """The answer in the student's tokens, and pairs of aligned tokens (student's, teacher's). None: it is empty."""
        ids = rollout.completion_ids
        if self.same_tokenizer:
            return rollout, rollout, [(i, i) for i in range(len(ids))]
        text = self.teacher_bytes.text(ids).decode(errors="ignore")
        own = lm.encode_completion(text, rollout.finished)[: self.task.cfg.scale.max_new]
        prompt = lm.render(rollout.problem.messages)
        translated = replace(
            rollout, prompt_ids=prompt, completion_ids=own, logp_full=None, logp_sampled=None
        )
        return (
            (translated, rollout, aligned(self.student_bytes, own, self.teacher_bytes, ids))
            if own
            else None
        )

    def learn(self, learner: Trainable, rollouts: Sequence[Rollout], step: int) -> Numbers:
        """Add the gradient of one step's answers."""
        (lm, teacher), settings = reading_alike(learner.lm, self.teacher), self.settings
        translations = [t for r in rollouts if (t := self.translate(lm, r)) is not None]
        total = sum(len(translated.completion_ids) for translated, _, _ in translations)
        n_aligned = sum(len(pairs) for _, _, pairs in translations)
        if not total:
            return {"loss": math.nan}
        ces, distances, losses = [], [], []

        def compare(h_s: Tensor, h_t: Tensor) -> tuple[Tensor, ...]:
            s, t = wide(head_logits(lm.model, h_s)), wide(head_logits(teacher.model, h_t))
            if settings.uld_top_k is None:
                return (wasserstein(s, t),)
            return (topk_distance(s, t, settings.uld_top_k, self.student_of),)

        def ce(h_s: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            return (-log_softmax_at(wide(head_logits(lm.model, h_s)), target),)

        own = [translated for translated, _, _ in translations]
        for part, batch in lm.batches([r.prompt_ids for r in own], [r.completion_ids for r in own]):
            whose = [translations[i] for i in part]

            def loss(
                batch: PaddedBatch | Packed = batch, whose: Sequence[Translation] = whose
            ) -> Tensor:
                hidden = completion_hidden(lm.model, batch)
                target = batch.target[batch.wanted]
                (nll,) = in_chunks(ce, vocabulary(lm.model), hidden, target)
                ces.append(nll.detach().sum())
                value = settings.uld_ce_weight * nll.sum() / total
                at, teacher_at = aligned_rows(whose)
                if not settings.uld_lambda or not at:
                    return value
                with torch.no_grad():
                    theirs = (
                        [r.prompt_ids for _, r, _ in whose],
                        [r.completion_ids for _, r, _ in whose],
                    )
                    h_t = completion_hidden(teacher.model, teacher.batch(*theirs))
                width = 3 * (vocabulary(lm.model) + vocabulary(teacher.model))
                (d,) = in_chunks(compare, width, hidden[at], h_t[teacher_at])
                distances.append(d.detach().sum())
                return value + settings.uld_lambda * d.sum() / n_aligned

            losses.append(learner.add(batch, loss))
        return {
            "loss": sum(losses),
            "ce": float(torch.stack(ces).sum()) / total,
            "distance": float(torch.stack(distances).sum()) / n_aligned if distances else None,
            "aligned": n_aligned / total,
        }


METHODS: dict[str, type[MiniLlm] | type[Uld]] = {"minillm": MiniLlm, "uld": Uld}


def reading_alike(lm: LanguageModel, teacher: LanguageModel) -> tuple[LanguageModel, LanguageModel]:
    """Both with their rows packed where both can be, else padded."""
    packs = lm.packs and teacher.packs
    return replace(lm, packs=packs), replace(teacher, packs=packs)


def aligned_rows(translations: Sequence[Translation]) -> tuple[list[int], list[int]]:
    """Aligned pairs as rows of the student's and of the teacher's `completion_hidden`, which go answer by answer."""
    own_rows, other_rows, own, other = [], [], 0, 0
    for translated, rollout, pairs in translations:
        own_rows += [own + i for i, _ in pairs]
        other_rows += [other + j for _, j in pairs]
        own, other = own + len(translated.completion_ids), other + len(rollout.completion_ids)
    return own_rows, other_rows


def wide(logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
    """The logits in fp32 or wider."""
    return logits.float() if logits.dtype != torch.float64 else logits
