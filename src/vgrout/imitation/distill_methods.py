"""The two methods of distillation.

MiniLLM minimises the reverse KL on answers that the student samples. ULD minimises the
cross-entropy on the teacher's answers plus a distance between the two models' distributions, which
works across tokenizers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict

import torch
from jaxtyping import Float, Int
from loguru import logger
from torch import Tensor

from vgrout.config.sampling import Sampling
from vgrout.data import Rollout, Source
from vgrout.errors import Refused
from vgrout.imitation.distill_task import DistillTask, not_token_by_token, zero_gradient
from vgrout.imitation.losses import minillm, reverse_kl, topk_distance, wasserstein
from vgrout.imitation.mixed_sampling import mixed_model
from vgrout.imitation.token_alignment import aligned, nearest_tokens, token_bytes
from vgrout.imitation.trainable import Trainable
from vgrout.model.layout import Packed
from vgrout.model.logprobs import (
    PaddedBatch,
    collate,
    completion_hidden,
    completion_logprobs,
    head_logits,
    in_chunks,
    log_softmax_at,
    padded_logprobs,
    tokens,
    vocabulary,
)
from vgrout.model.policy import LanguageModel
from vgrout.rng import py_stream
from vgrout.tensor_types import at_least_fp32


class StepLosses(TypedDict):
    """Columns of a step's row: the loss, and what the method measures."""

    loss: float
    kl: NotRequired[float]
    anchor: NotRequired[float | None]
    ce: NotRequired[float]
    distance: NotRequired[float | None]
    aligned: NotRequired[float | None]


class MiniLlm:
    """Reverse KL on answers sampled from the mixture of both models, and a language-model anchor.

    The anchor is the language-model loss on a text file; it keeps the student close to plain text.
    """

    # The expectations of the loss are over this distribution.
    sampling = Sampling(temperature=1.0, top_k=0)
    source: Source = "student"

    def __init__(
        self, task: DistillTask, student: LanguageModel, teacher_model: LanguageModel
    ) -> None:
        """Check that the two models can be compared token by token.

        Raises:
            Refused: they cannot; their weights are the same and there is no anchor, so that the
                gradient would be zero; or the anchor's text is too short.
        """
        self.task = task
        self.settings = task.settings
        self.teacher_model = teacher_model
        if not same_tokens(student, teacher_model):
            raise not_token_by_token(task.settings)
        if not self.settings.minillm_pretrain_anchor_weight and same_weights(
            student, teacher_model
        ):
            raise zero_gradient(task.settings)
        self.text: Int[Tensor, " N"] | None = None
        if task.anchor:
            ids = student.tok(task.anchor, add_special_tokens=False)["input_ids"]
            if len(ids) < 2:
                raise Refused(
                    f"--minillm-pretrain-anchor-path: {len(ids)} tokens, nothing to predict"
                )
            self.text = torch.tensor(ids)

    def behaviour_model(
        self, student: LanguageModel, teacher_model: LanguageModel
    ) -> LanguageModel:
        """The model that answers are sampled from."""
        return mixed_model(student, teacher_model, self.settings.minillm_teacher_mix_ratio)

    def learn(self, learner: Trainable, rollouts: Sequence[Rollout], step: int) -> StepLosses:
        """Add the gradient of one step's answers and of the anchor to the learner's."""
        lm, teacher_model = packed_alike(learner.lm, self.teacher_model)
        total = sum(len(r.completion_ids) for r in rollouts)
        normalize = self.settings.minillm_length_normalize
        kls: list[Tensor] = []
        losses: list[float] = []
        for part, batch in batches_of(lm, rollouts):
            # answers are sampled at temperature 1, from all tokens: log-probs under the full
            # softmax are those of what they were sampled from
            by_sampler = [rollouts[i].logp for i in part]
            sampler = padded_logprobs(by_sampler, batch.mask.shape[1], lm.device)

            def loss(batch: PaddedBatch | Packed = batch, sampler: Tensor = sampler) -> Tensor:
                logq, logp, kl = compared_tokens(lm, teacher_model, batch)
                kls.append(kl.detach().sum())
                each = minillm(logq, logp.detach(), sampler, kl, batch.mask, normalize)
                return each.sum() / total

            losses.append(learner.add(batch, loss))
        anchor = self.learn_anchor(learner, step)
        weight = self.settings.minillm_pretrain_anchor_weight
        return {
            "loss": sum(losses) + weight * (anchor or 0.0),
            "kl": float(torch.stack(kls).sum()) / total,
            "anchor": anchor,
        }

    def learn_anchor(self, learner: Trainable, step: int) -> float | None:
        """Add the gradient of the anchor; returns its loss without weight, None without an anchor.

        The loss is on windows of the text, as many as a step has prompts, each of at most `max_new`
        tokens.
        """
        if self.text is None:
            return None
        scale = self.task.cfg.scale
        weight = self.settings.minillm_pretrain_anchor_weight
        length = min(scale.max_new, len(self.text) - 1)
        stream = py_stream(self.task.cfg.run.seed, "anchor", step)
        first_tokens: list[tuple[int, ...]] = []
        continuations: list[tuple[int, ...]] = []
        for _ in range(scale.prompts_per_step):
            start = stream.randrange(len(self.text) - length)
            window = tuple(self.text[start : start + length + 1].tolist())
            first_tokens.append(window[:1])
            continuations.append(window[1:])
        batch = collate(first_tokens, continuations, learner.lm.device)

        def loss() -> Tensor:
            logp = completion_logprobs(learner.lm.model, batch)
            return -weight * logp.sum() / (length * len(first_tokens))

        return learner.add(batch, loss) / weight


@dataclass(frozen=True, slots=True)
class Translation:
    """One answer of the teacher in the tokens of both models."""

    student: Rollout  # in the student's tokens
    teacher: Rollout  # as the teacher sampled it
    aligned: list[tuple[int, int]]  # positions in either answer that can be compared


class Uld:
    """Cross-entropy on the teacher's answers, plus the distance of both distributions.

    The distance is taken at aligned tokens: those that begin at the same byte of the answer.
    """

    source: Source = "teacher"

    def __init__(
        self, task: DistillTask, student: LanguageModel, teacher_model: LanguageModel
    ) -> None:
        """Find out how the two tokenizers correspond.

        Raises:
            Refused: a tokenizer whose tokens cannot be written as bytes; or topk_align, and none of
                the teacher's tokens has the text of one of the student's.
        """
        self.task = task
        self.settings = task.settings
        self.teacher_model = teacher_model
        self.sampling = task.cfg.sampling  # the teacher is sampled from as it is deployed
        self.same_tokenizer = same_tokens(student, teacher_model)
        if not self.same_tokenizer:
            self.student_bytes = token_bytes(student.tok, student.end_id)
            self.teacher_bytes = token_bytes(teacher_model.tok, teacher_model.end_id)
        if self.settings.uld_top_k is not None:
            width = vocabulary(teacher_model.model)
            if self.same_tokenizer:
                own = torch.arange(width)
            else:
                own = nearest_tokens(self.student_bytes, self.teacher_bytes, width)
            # of each of the teacher's tokens, the student's, or −1
            self.student_of = torch.where(own < vocabulary(student.model), own, -1).to(
                student.device
            )
            if int((self.student_of >= 0).sum()) <= 1:  # the ends of an answer always correspond
                raise Refused(
                    f"--uld-strategy topk_align: no token of --teacher {self.settings.teacher} has the text of one of "
                    f"--student {self.settings.student}; choose --uld-strategy wasserstein"
                )

    def behaviour_model(
        self, student: LanguageModel, teacher_model: LanguageModel
    ) -> LanguageModel:
        """The model that answers are sampled from."""
        return teacher_model

    def translate(self, lm: LanguageModel, rollout: Rollout) -> Translation | None:
        """A teacher's answer in the student's tokens too; None if it has no token there."""
        ids = rollout.completion_ids
        if self.same_tokenizer:
            return Translation(rollout, rollout, [(i, i) for i in range(len(ids))])
        text = self.teacher_bytes.text(ids).decode(errors="ignore")
        own = lm.encode_completion(text, rollout.finished)[: self.task.cfg.scale.max_new]
        if not own:
            return None
        translated = replace(
            rollout,
            prompt_ids=lm.render(rollout.problem.messages),
            completion_ids=own,
            logp=None,
        )
        pairs = aligned(self.student_bytes, own, self.teacher_bytes, ids)
        return Translation(translated, rollout, pairs)

    def learn(
        self, learner: Trainable, rollouts: Sequence[Rollout], step: int
    ) -> StepLosses | None:
        """Add the gradient of one step's answers to the learner's. None: no answer can be written in the student's
        tokens, so there is nothing to learn from."""
        lm, teacher_model = packed_alike(learner.lm, self.teacher_model)
        settings = self.settings
        translations: list[Translation] = []
        for rollout in rollouts:
            translation = self.translate(lm, rollout)
            if translation is not None:
                translations.append(translation)
        total = sum(len(t.student.completion_ids) for t in translations)
        n_aligned = sum(len(t.aligned) for t in translations)
        if not total:
            logger.warning(
                f"step {step}: no answer of the teacher can be written in the student's tokens: nothing to learn from"
            )
            return None
        share_aligned = aligned_share(translations)
        if settings.uld_lambda and share_aligned == 0:
            logger.warning(
                f"step {step}: no token of the teacher's answers but the first is aligned with one of the student's: "
                "the step learns by cross-entropy almost alone"
            )
        ces: list[Tensor] = []
        distances: list[Tensor] = []
        losses: list[float] = []
        for part, batch in batches_of(lm, [t.student for t in translations]):
            chosen = [translations[i] for i in part]

            def loss(
                batch: PaddedBatch | Packed = batch, chosen: Sequence[Translation] = chosen
            ) -> Tensor:
                hidden = completion_hidden(lm.model, batch)
                nll = negative_log_likelihood(lm, hidden, batch)
                ces.append(nll.detach().sum())
                value = settings.uld_ce_weight * nll.sum() / total
                rows, teacher_rows = aligned_rows(chosen)
                if not settings.uld_lambda or not rows:
                    return value
                teacher_hidden = teacher_hidden_states(teacher_model, chosen)
                distance = self.distance(
                    lm, teacher_model, hidden[rows], teacher_hidden[teacher_rows]
                )
                distances.append(distance.detach().sum())
                return value + settings.uld_lambda * distance.sum() / n_aligned

            losses.append(learner.add(batch, loss))
        distance = None
        if distances:
            distance = float(torch.stack(distances).sum()) / n_aligned
        return {
            "loss": sum(losses),
            "ce": float(torch.stack(ces).sum()) / total,
            "distance": distance,
            "aligned": share_aligned,
        }

    def distance(
        self,
        lm: LanguageModel,
        teacher_model: LanguageModel,
        hidden: Float[Tensor, "n Ds"],
        teacher_hidden: Float[Tensor, "n Dt"],
    ) -> Float[Tensor, " n"]:
        """Distance of the two models' distributions at each pair of aligned tokens."""
        top_k = self.settings.uld_top_k

        def head(h_s: Tensor, h_t: Tensor) -> tuple[Tensor, ...]:
            s = at_least_fp32(head_logits(lm.model, h_s))
            t = at_least_fp32(head_logits(teacher_model.model, h_t))
            if top_k is None:
                return (wasserstein(s, t),)
            return (topk_distance(s, t, top_k, self.student_of),)

        (distance,) = in_chunks(head, logits_per_row(lm, teacher_model), hidden, teacher_hidden)
        return distance


METHODS: dict[str, type[MiniLlm] | type[Uld]] = {"minillm": MiniLlm, "uld": Uld}


# ── comparing two models


def same_tokens(student: LanguageModel, teacher_model: LanguageModel) -> bool:
    """Whether both models have the same tokenizer and logits for the same tokens."""
    if student.tokenizer_sha256 != teacher_model.tokenizer_sha256:
        return False
    return tokens(student.model) == tokens(teacher_model.model)


def same_weights(student: LanguageModel, teacher_model: LanguageModel) -> bool:
    """Whether both models have the same weights, into which an adapter is merged."""
    own, other = list(student.model.parameters()), list(teacher_model.model.parameters())
    return len(own) == len(other) and all(map(torch.equal, own, other))


def packed_alike(
    lm: LanguageModel, teacher_model: LanguageModel
) -> tuple[LanguageModel, LanguageModel]:
    """Both models, set to pack their rows if both can, else to pad them."""
    packs = lm.packs and teacher_model.packs
    return replace(lm, packs=packs), replace(teacher_model, packs=packs)


def batches_of(
    lm: LanguageModel, rollouts: Sequence[Rollout]
) -> Iterator[tuple[list[int], PaddedBatch | Packed]]:
    """The batches of these answers, each with its answers' indices."""
    return lm.batches([r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts])


def compared_tokens(
    lm: LanguageModel, teacher_model: LanguageModel, batch: PaddedBatch | Packed
) -> tuple[Float[Tensor, "G T"], Float[Tensor, "G T"], Float[Tensor, "G T"]]:
    """The tokens' log-probs under student and teacher, and KL(student ‖ teacher) at their places.

    Only the student's forward carries a gradient.
    """

    def head(h_s: Tensor, h_t: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        s = at_least_fp32(head_logits(lm.model, h_s))
        t = at_least_fp32(head_logits(teacher_model.model, h_t))
        return log_softmax_at(s, target), log_softmax_at(t, target), reverse_kl(s, t)

    wanted = batch.wanted
    hidden = completion_hidden(lm.model, batch)
    with torch.no_grad():
        teacher_hidden = completion_hidden(teacher_model.model, batch)
    width = logits_per_row(lm, teacher_model)
    flat = in_chunks(head, width, hidden, teacher_hidden, batch.target[wanted])
    empty = flat[0].new_zeros(batch.mask.shape)
    logq, logp, kl = (empty.index_put(wanted, x) for x in flat)
    return logq, logp, kl


def negative_log_likelihood(
    lm: LanguageModel, hidden: Float[Tensor, "n D"], batch: PaddedBatch | Packed
) -> Float[Tensor, " n"]:
    """Negative log-likelihood of every token of the answers, nats."""

    def head(hidden: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return (-log_softmax_at(at_least_fp32(head_logits(lm.model, hidden)), target),)

    (nll,) = in_chunks(head, vocabulary(lm.model), hidden, batch.target[batch.wanted])
    return nll


@torch.no_grad()
def teacher_hidden_states(
    teacher_model: LanguageModel, translations: Sequence[Translation]
) -> Float[Tensor, "n D"]:
    """The teacher's `completion_hidden` on its own answers."""
    prompts = [t.teacher.prompt_ids for t in translations]
    completions = [t.teacher.completion_ids for t in translations]
    return completion_hidden(teacher_model.model, teacher_model.batch(prompts, completions))


def aligned_share(translations: Sequence[Translation]) -> float | None:
    """Share of the student's tokens that are aligned, without the first of each answer.

    The first tokens of two answers to one prompt always correspond. None: there are no others.
    """
    after_first = sum(len(t.student.completion_ids) - 1 for t in translations)
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
        first += len(t.student.completion_ids)
        teacher_first += len(t.teacher.completion_ids)
    return rows, teacher_rows


def logits_per_row(lm: LanguageModel, teacher_model: LanguageModel) -> int:
    """How many logits a row takes while the two models are compared on it."""
    return 3 * (vocabulary(lm.model) + vocabulary(teacher_model.model))
