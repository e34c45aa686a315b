"""Samples from a mixture of teacher p and student q: draws every token from α p + (1 − α) q."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout.model.policy import LanguageModel
from vgrout.model.sampling.decoder import Decoder


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
