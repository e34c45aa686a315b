"""The two methods of distillation.

MiniLLM minimises the reverse KL on answers that the student samples. ULD minimises the
cross-entropy on the teacher's answers plus a distance between the two models' distributions, which
works across tokenizers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout.config.settings import Sampling
from vgrout.ground.data import GradedAnswer, Rollout
from vgrout.ground.io import NothingAligned, Refused
from vgrout.ground.rng import py_stream
from vgrout.ground.tensor_types import at_least_fp32
from vgrout.imitation.losses import minillm, reverse_kl, topk_distance, wasserstein
from vgrout.imitation.tasks import DistillTask
from vgrout.imitation.token_alignment import aligned, nearest_tokens, token_bytes
from vgrout.imitation.trainable import Trainable
from vgrout.model.layout import Packed
from vgrout.model.logprobs import (
    PaddedBatch,
    collate,
    completion_hidden,
    completion_logprobs,
    head_logits,
    head_logprobs,
    in_chunks,
    log_softmax_at,
    padded_logprobs,
    tokens,
    vocabulary,
)
from vgrout.model.policy import LanguageModel
from vgrout.model.sampling.decoder import Decoder

# ── samples of a mixture: every token is drawn from α p + (1 − α) q, teacher p and student q


class MixedDecoder:
    """Two decoders in lock-step whose logits are the log-probabilities of the mixture."""

    def __init__(self, student: Decoder, teacher: Decoder, ratio: float) -> None:
        self.student = student
        self.teacher = teacher
        self.ratio = ratio
        self.drop_at = max(student.drop_at, teacher.drop_at)

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], room: int, max_new: int
    ) -> Float[Tensor, "P V"]:
        student = self.student.prefill(prompts, room, max_new)
        teacher = self.teacher.prefill(prompts, room, max_new)
        return mixed(student, teacher, self.ratio)

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        return mixed(self.student.step(tokens), self.teacher.step(tokens), self.ratio)

    def keep(self, slots: Sequence[int]) -> None:
        self.student.keep(slots)
        self.teacher.keep(slots)


def mixed(
    student: Float[Tensor, "n Vs"], teacher: Float[Tensor, "n Vt"], ratio: float
) -> Float[Tensor, "n V"]:
    """log(ratio · p + (1 − ratio) · q) from logits, in fp32.

    Only the logits that both heads have are of tokens; the wider head's others are padding.
    """
    V = min(student.shape[-1], teacher.shape[-1])
    logq = student[:, :V].float().log_softmax(-1)
    logp = teacher[:, :V].float().log_softmax(-1)
    if ratio == 1:
        return logp
    return torch.logaddexp(logq + math.log1p(-ratio), logp + math.log(ratio))


@dataclass(frozen=True)
class MixedModel(LanguageModel):
    """The student, with completions that are sampled from the mixture."""

    teacher_model: LanguageModel
    ratio: float  # the teacher's share α, above 0

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return (self, self.teacher_model)

    def decoder(self) -> Decoder:
        return MixedDecoder(super().decoder(), self.teacher_model.decoder(), self.ratio)


def mixed_model(
    student: LanguageModel, teacher_model: LanguageModel, ratio: float
) -> LanguageModel:
    """The mixture as a model to sample from; the student itself at ratio 0."""
    if ratio == 0:
        return student
    of_student = {f.name: getattr(student, f.name) for f in fields(LanguageModel)}
    return MixedModel(**of_student, teacher_model=teacher_model, ratio=ratio)


# ── the methods

# Columns of a step's row: the loss, and what the method measures.
StepLosses = dict[str, Any]


class Method:
    """What both methods need of the two models.

    `behaviour` samples the answers, by `sampling`.
    """

    behaviour: LanguageModel
    sampling: Sampling

    def __init__(
        self, task: DistillTask, student: LanguageModel, teacher_model: LanguageModel
    ) -> None:
        self.task = task
        self.settings = task.settings
        # Both pack their rows if both can, else both pad them.
        packs = student.packs and teacher_model.packs
        self.student = replace(student, packs=packs)
        self.teacher_model = replace(teacher_model, packs=packs)
        self.same_tokens = student.tokenizer_sha256 == teacher_model.tokenizer_sha256 and tokens(
            student.model
        ) == tokens(teacher_model.model)
        # How many logits a row takes while the two models are compared on it.
        self.logits = 3 * (vocabulary(student.model) + vocabulary(teacher_model.model))

    def both_logits(
        self, hidden: Float[Tensor, "n Ds"], teacher_hidden: Float[Tensor, "n Dt"]
    ) -> tuple[Float[Tensor, "n Vs"], Float[Tensor, "n Vt"]]:
        """Student's and teacher's logits, from what their backbones give."""
        return (
            at_least_fp32(head_logits(self.student.model, hidden)),
            at_least_fp32(head_logits(self.teacher_model.model, teacher_hidden)),
        )

    def batches_of(
        self, rollouts: Sequence[Rollout]
    ) -> Iterator[tuple[list[int], PaddedBatch | Packed]]:
        """The batches of these answers of the student, each with its answers' indices."""
        return self.student.batches([r.prompt_ids for r in rollouts], [r.ids for r in rollouts])

    def rollout(self, answer: GradedAnswer) -> Rollout:
        """An answer with the prompt as its sampler read it."""
        return Rollout.of(self.behaviour.render(answer.problem.messages), answer.completion)

    def learn(self, learner: Trainable, answers: Sequence[GradedAnswer], step: int) -> StepLosses:
        """Add the gradient of one step's answers to the learner's."""
        raise NotImplementedError


class MiniLlm(Method):
    """Reverse KL on answers sampled from the mixture of both models, and a language-model anchor.

    The anchor is the language-model loss on a text file; it keeps the student close to plain text.
    """

    # The expectations of the loss are over this distribution.
    sampling = Sampling(temperature=1.0, top_k=0)

    def __init__(
        self, task: DistillTask, student: LanguageModel, teacher_model: LanguageModel
    ) -> None:
        """Check that the two models can be compared token by token.

        Raises:
            Refused: they cannot; their weights are the same and there is no anchor, so that the
                gradient would be zero; or the anchor's text is too short.
        """
        super().__init__(task, student, teacher_model)
        self.weight = self.settings.minillm_pretrain_anchor_weight
        given = f"--teacher {self.settings.teacher}"
        if not self.same_tokens:
            raise Refused(
                f"{given}: has another tokenizer than --student {self.settings.student}, or logits "
                "for other tokens of it; MiniLLM compares them token by token: choose --method uld"
            )
        if not self.weight and same_weights(student, teacher_model):
            raise Refused(
                f"{given}: has the student's own weights, so the gradient is zero; "
                "give another teacher or student"
            )
        self.behaviour = mixed_model(
            student, teacher_model, self.settings.minillm_teacher_mix_ratio
        )
        self.text: tuple[int, ...] = ()  # the anchor's tokens
        if task.anchor:
            self.text = tuple(student.tok(task.anchor, add_special_tokens=False)["input_ids"])
            if len(self.text) < 2:
                raise Refused("--minillm-pretrain-anchor-path: one token, nothing to predict")

    def learn(self, learner: Trainable, answers: Sequence[GradedAnswer], step: int) -> StepLosses:
        """Add the gradient of one step's answers and of the anchor to the learner's."""
        rollouts = [self.rollout(answer) for answer in answers]
        total = sum(len(r.ids) for r in rollouts)
        normalize = self.settings.minillm_length_normalize
        kls: list[Tensor] = []
        losses: list[float] = []
        for part, batch in self.batches_of(rollouts):
            # answers are sampled at temperature 1, from all tokens: log-probs under the full
            # softmax are those of what they were sampled from
            by_sampler = [rollouts[i].logp for i in part]
            sampler = padded_logprobs(by_sampler, batch.mask.shape[1], self.student.device)

            def loss(batch: PaddedBatch | Packed = batch, sampler: Tensor = sampler) -> Tensor:
                logq, logp, kl = self.compare(batch)
                kls.append(kl.detach().sum())
                each = minillm(logq, logp.detach(), sampler, kl, batch.mask, normalize)
                return each.sum() / total

            losses.append(learner.add(batch, loss))
        anchor = self.learn_anchor(learner, step) if self.text else None
        return {
            "loss": sum(losses) + self.weight * (anchor or 0.0),
            "kl": float(torch.stack(kls).sum()) / total,
            "anchor": anchor,
        }

    def compare(
        self, batch: PaddedBatch | Packed
    ) -> tuple[Float[Tensor, "G T"], Float[Tensor, "G T"], Float[Tensor, "G T"]]:
        """The tokens' log-probs under student and teacher, and KL(student ‖ teacher) at their places.

        Only the student's forward carries a gradient.
        """

        def head(h_s: Tensor, h_t: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            s, t = self.both_logits(h_s, h_t)
            return log_softmax_at(s, target), log_softmax_at(t, target), reverse_kl(s, t)

        wanted = batch.wanted
        hidden = completion_hidden(self.student.model, batch)
        with torch.no_grad():
            teacher_hidden = completion_hidden(self.teacher_model.model, batch)
        flat = in_chunks(head, self.logits, hidden, teacher_hidden, batch.target[wanted])
        empty = flat[0].new_zeros(batch.mask.shape)
        logq, logp, kl = (empty.index_put(wanted, x) for x in flat)
        return logq, logp, kl

    def learn_anchor(self, learner: Trainable, step: int) -> float:
        """Add the gradient of the anchor; returns its loss, without weight.

        The loss is on windows of the text, as many as a step has prompts, each of at most `max_new`
        tokens.
        """
        scale = self.task.cfg.scale
        length = min(scale.max_new, len(self.text) - 1)
        stream = py_stream(self.task.cfg.run.seed, "anchor", step)
        first_tokens: list[tuple[int, ...]] = []
        continuations: list[tuple[int, ...]] = []
        for _ in range(scale.prompts_per_step):
            start = stream.randrange(len(self.text) - length)
            first_tokens.append(self.text[start : start + 1])
            continuations.append(self.text[start + 1 : start + length + 1])
        batch = collate(first_tokens, continuations, self.student.device)

        def loss() -> Tensor:
            logp = completion_logprobs(self.student.model, batch)
            return -self.weight * logp.sum() / (length * len(first_tokens))

        return learner.add(batch, loss) / self.weight


@dataclass(frozen=True, slots=True)
class Translation:
    """One answer of the teacher in the tokens of both models."""

    student: Rollout  # in the student's tokens
    teacher: Rollout  # as the teacher sampled it
    aligned: list[tuple[int, int]]  # positions in either answer that can be compared


class Uld(Method):
    """Cross-entropy on the teacher's answers, plus the distance of both distributions.

    The distance is taken at aligned tokens: those that begin at the same byte of the answer.
    """

    def __init__(
        self, task: DistillTask, student: LanguageModel, teacher_model: LanguageModel
    ) -> None:
        """Find out how the two tokenizers correspond.

        Raises:
            Refused: a tokenizer whose tokens cannot be written as bytes; or topk_align, and none of
                the teacher's tokens has the text of one of the student's.
        """
        super().__init__(task, student, teacher_model)
        self.behaviour = teacher_model
        self.sampling = task.cfg.sampling  # the teacher is sampled from as it is deployed
        if not self.same_tokens:
            self.student_bytes = token_bytes(student.tok, student.end_id)
            self.teacher_bytes = token_bytes(teacher_model.tok, teacher_model.end_id)
        if self.settings.uld_top_k is None:
            return
        width = vocabulary(teacher_model.model)
        own = torch.arange(width)
        if not self.same_tokens:
            own = nearest_tokens(self.student_bytes, self.teacher_bytes, width)
        # of each of the teacher's tokens, the student's, or −1
        own = torch.where(own < vocabulary(student.model), own, -1)
        self.student_of = own.to(student.device)
        if int((own >= 0).sum()) <= 1:  # the ends of an answer always correspond
            raise Refused(
                f"--uld-strategy topk_align: no token of --teacher {self.settings.teacher} has the "
                f"text of one of --student {self.settings.student}; choose --uld-strategy wasserstein"
            )

    def translate(self, answer: GradedAnswer) -> Translation | None:
        """A teacher's answer in the student's tokens too; None if it has no token there."""
        rollout = self.rollout(answer)
        ids = rollout.ids
        if self.same_tokens:
            return Translation(rollout, rollout, [(i, i) for i in range(len(ids))])
        text = self.teacher_bytes.text(ids).decode(errors="ignore")
        own = self.student.encode_completion(text, rollout.finished)[: self.task.cfg.scale.max_new]
        if not own:
            return None
        prompt = self.student.render(answer.problem.messages)
        translated = replace(rollout, prompt_ids=prompt, ids=own, logp=None)
        pairs = aligned(self.student_bytes, own, self.teacher_bytes, ids)
        return Translation(translated, rollout, pairs)

    def learn(self, learner: Trainable, answers: Sequence[GradedAnswer], step: int) -> StepLosses:
        """Add the gradient of one step's answers to the learner's.

        Raises:
            NothingAligned: no answer can be written in the student's tokens.
        """
        settings = self.settings
        found = [self.translate(answer) for answer in answers]
        translations = [translation for translation in found if translation is not None]
        if not translations:
            raise NothingAligned(
                f"step {step}: no answer of --teacher {settings.teacher} can be written in the "
                f"tokens of --student {settings.student}",
                "give another --student or --teacher, or a longer --max-new",
            )
        total = sum(len(t.student.ids) for t in translations)
        n_aligned = sum(len(t.aligned) for t in translations)
        share_aligned = aligned_share(translations)
        ces: list[Tensor] = []
        distances: list[Tensor] = []
        losses: list[float] = []
        for part, batch in self.batches_of([t.student for t in translations]):
            chosen = [translations[i] for i in part]

            def loss(
                batch: PaddedBatch | Packed = batch, chosen: Sequence[Translation] = chosen
            ) -> Tensor:
                hidden = completion_hidden(self.student.model, batch)
                target = batch.target[batch.wanted]
                nll = -head_logprobs(self.student.model, hidden, target)
                ces.append(nll.detach().sum())
                value = settings.uld_ce_weight * nll.sum() / total
                rows, teacher_rows = aligned_rows(chosen)
                if not settings.uld_lambda or not rows:
                    return value
                distance = self.distance(hidden[rows], self.teacher_hidden(chosen)[teacher_rows])
                distances.append(distance.detach().sum())
                return value + settings.uld_lambda * distance.sum() / n_aligned

            losses.append(learner.add(batch, loss))
        return {
            "loss": sum(losses),
            "ce": float(torch.stack(ces).sum()) / total,
            "distance": float(torch.stack(distances).sum()) / n_aligned if distances else None,
            "aligned": share_aligned,
        }

    @torch.no_grad()
    def teacher_hidden(self, translations: Sequence[Translation]) -> Float[Tensor, "n D"]:
        """The teacher's `completion_hidden` on its own answers."""
        prompts = [t.teacher.prompt_ids for t in translations]
        completions = [t.teacher.ids for t in translations]
        batch = self.teacher_model.batch(prompts, completions)
        return completion_hidden(self.teacher_model.model, batch)

    def distance(
        self, hidden: Float[Tensor, "n Ds"], teacher_hidden: Float[Tensor, "n Dt"]
    ) -> Float[Tensor, " n"]:
        """Distance of the two models' distributions at each pair of aligned tokens."""
        top_k = self.settings.uld_top_k

        def head(h_s: Tensor, h_t: Tensor) -> tuple[Tensor, ...]:
            s, t = self.both_logits(h_s, h_t)
            if top_k is None:
                return (wasserstein(s, t),)
            return (topk_distance(s, t, top_k, self.student_of),)

        (distance,) = in_chunks(head, self.logits, hidden, teacher_hidden)
        return distance


METHODS: dict[str, type[Method]] = {"minillm": MiniLlm, "uld": Uld}


def same_weights(student: LanguageModel, teacher_model: LanguageModel) -> bool:
    """Whether both models have the same weights, into which an adapter is merged."""
    own, other = list(student.model.parameters()), list(teacher_model.model.parameters())
    return len(own) == len(other) and all(map(torch.equal, own, other))


def aligned_share(translations: Sequence[Translation]) -> float | None:
    """Share of the student's tokens that are aligned, without the first of each answer.

    The first tokens of two answers to one prompt always correspond. None: there are no others.
    """
    after_first = sum(len(t.student.ids) - 1 for t in translations)
    n_aligned = sum(i > 0 for t in translations for i, _ in t.aligned)
    return n_aligned / after_first if after_first else None


def aligned_rows(translations: Sequence[Translation]) -> tuple[list[int], list[int]]:
    """Aligned pairs as rows of the student's and of the teacher's `completion_hidden`.

    The rows of both go answer by answer.
    """
    rows: list[int] = []
    teacher_rows: list[int] = []
    first = teacher_first = 0  # row of the answer's first token
    for t in translations:
        for i, j in t.aligned:
            rows.append(first + i)
            teacher_rows.append(teacher_first + j)
        first += len(t.student.ids)
        teacher_first += len(t.teacher.ids)
    return rows, teacher_rows
