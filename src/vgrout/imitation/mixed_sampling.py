"""Sampling from a mixture of teacher p and student q: every token is drawn from α p + (1 − α) q."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout.model.decoder import Decoder
from vgrout.model.policy import LanguageModel


class MixedDecoder:
    """Two decoders in lock-step whose logits are the log-probabilities of the mixture."""

    def __init__(self, student: Decoder, teacher: Decoder, ratio: float) -> None:
        self.both, self.ratio = (student, teacher), ratio
        self.drop_at = max(student.drop_at, teacher.drop_at)

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], room: int, max_new: int
    ) -> Float[Tensor, "P V"]:
        return mixed(*(d.prefill(prompts, room, max_new) for d in self.both), self.ratio)

    def step(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
        return mixed(*(d.step(tokens) for d in self.both), self.ratio)

    def keep(self, slots: Sequence[int]) -> None:
        for decoder in self.both:
            decoder.keep(slots)


def mixed(
    student: Float[Tensor, "n Vs"], teacher: Float[Tensor, "n Vt"], ratio: float
) -> Float[Tensor, "n V"]:
    """log(ratio · p + (1 − ratio) · q) from logits, in fp32; what one head has more of are no tokens."""
    V = min(student.shape[-1], teacher.shape[-1])
    logq, logp = (x[:, :V].float().log_softmax(-1) for x in (student, teacher))
    if ratio == 1:
        return logp
    return torch.logaddexp(logq + math.log1p(-ratio), logp + math.log(ratio))


@dataclass(frozen=True)
class MixedModel(LanguageModel):
    """The student with completions sampled from the mixture. ratio: the teacher's share α, above 0."""

    teacher: LanguageModel
    ratio: float

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return (self, self.teacher)

    def decoder(self) -> Decoder:
        return MixedDecoder(super().decoder(), self.teacher.decoder(), self.ratio)


def mixed_model(student: LanguageModel, teacher: LanguageModel, ratio: float) -> LanguageModel:
    """The mixture as a model to sample from; the student itself at ratio 0."""
    if ratio == 0:
        return student
    return MixedModel(
        **{f.name: getattr(student, f.name) for f in fields(LanguageModel)},
        teacher=teacher,
        ratio=ratio,
    )
