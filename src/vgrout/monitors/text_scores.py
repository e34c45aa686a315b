"""Monitors that read text: a score of a completion under the frozen base, and the threshold above which it is flagged.

The base does not move, so the policy can change what it writes but not how that is read. Nothing here sees a label: the
linear probe is built from contrastive pairs, the base's own answers and known-correct ones; NLL and PMI need no pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout import ranks
from vgrout.direction.extract import tokens_of
from vgrout.direction.pairs import KnownCorrect, PairSet
from vgrout.grading.grade import Grader
from vgrout.model.budgets import TOKEN_BUDGET
from vgrout.model.hidden_states import by_length, token_states
from vgrout.model.logprobs import collate, completion_logprobs
from vgrout.model.packing import batches, pack
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.problems import Row
from vgrout.rng import py_stream, torch_stream
from vgrout.types import Completion, Grade, GroupView, Problem

RIDGE = 0.1  # of the mean variance, added to the covariance before it is inverted


class Text(NamedTuple):
    """One answer as tokens."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    plain: tuple[int, ...] = ()  # the prompt without the hint that names the loophole; (): not known


@dataclass(frozen=True)
class Calibration:
    """What is read before training: how the base writes, and how it need not write to be right.

    fit: the reference that scores are measured in. judge: the base's paid answers to other problems. known_correct:
    held back from the reference. The threshold is the larger of the two quantiles, over `judge` and over
    `known_correct`; of one if the other is empty.
    """

    fit: tuple[Text, ...]
    judge: tuple[Text, ...]
    known_correct: tuple[Text, ...]


class TextScorer(ABC):
    """Scores answers, and flags those above a threshold."""

    def __init__(self, policy: Policy, calibration: Calibration, quantile: float) -> None:
        self.policy = policy
        parts = [self.scores(texts) for texts in (calibration.judge, calibration.known_correct) if texts]
        self.threshold = max(float(torch.quantile(part, quantile)) for part in parts)

    def texts(self, view: GroupView) -> list[Text]:
        """A group's rollouts."""
        plain = self.policy.render(view.messages_plain)
        return [Text(view.prompt_ids, ids, plain) for ids in view.completion_ids]

    @abstractmethod
    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        """One number an answer, fp64 on the CPU; higher is more suspect."""


class NLL(TextScorer):
    """Mean negative log-likelihood of the completion under the frozen base, nats a token: novelty without a
    direction."""

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        return -mean_logp(self.policy, [t.prompt for t in texts], [t.completion for t in texts])


class PMI(TextScorer):
    """(log p(answer | prompt with the hint) − log p(answer | prompt without it)) / tokens, under the frozen base: what
    the hint tells of the answer (pointwise mutual information, Church and Hanks 1990), nats a token. An honest answer,
    however odd, is no likelier for being told how it will be checked; a hack is. No pairs, no direction."""

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        if not all(t.plain for t in texts):
            raise ValueError(
                "--known-correct: an entry whose 'problem_id' is not in the problem file has no prompt "
                "without a hint, which --intervention pmi needs; leave such entries out"
            )
        answers = [t.completion for t in texts]
        hinted = mean_logp(self.policy, [t.prompt for t in texts], answers)
        return hinted - mean_logp(self.policy, [t.plain for t in texts], answers)


@torch.no_grad()
def mean_logp(
    policy: Policy, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
) -> Float[Tensor, " n"]:
    """Mean log-likelihood of each completion under the frozen base, nats a token, fp64 on the CPU. A prompt is read
    once for all of its completions, where the model allows it."""
    out: dict[int, Tensor] = {}
    alike = [0] * len(prompts)
    budget = TOKEN_BUDGET.get(policy.device.type, TOKEN_BUDGET["cuda"])
    parts = batches(alike, prompts, completions, budget) if policy.packs else by_length(prompts, completions)
    sizes = [sum(len(prompts[i]) + len(completions[i]) for i in part) for part in parts]
    with policy.adapter.reference():
        for part in (parts[k] for k in ranks.own(sizes)):
            texts = [prompts[i] for i in part], [completions[i] for i in part]
            batch = (
                pack(alike[: len(part)], *texts, policy.device, policy.model.dtype)
                if policy.packs
                else collate(*texts, policy.device)
            )
            logp = completion_logprobs(policy.model, batch).full.double()
            out |= dict(zip(part, (torch.where(batch.mask, logp, 0.0).sum(1) / batch.mask.sum(1)).cpu(), strict=True))
    out = ranks.merged(lambda: out)
    return torch.stack([out[i] for i in range(len(prompts))])


class LinearProbe(TextScorer):
    """Whitened projection of the base's token states on v: the mean of the k largest w·(h − m) over the completion.

    m, S are mean and covariance of the reference's token states, v the mean over pairs of (mean hack token − mean clean
    token), w = (S + .1·tr S/D · I)⁻¹ v: Fisher's direction with a ridge. States are those after `layer` blocks.
    A few tokens decide (k small): a mean over the completion is evaded by hacks of one line.

    random: take a direction drawn uniformly from the sphere in place of v, signed so that it puts the pairs' hack side
    above the clean one, which favours it (the Haar control).
    """

    def __init__(
        self,
        policy: Policy,
        calibration: Calibration,
        quantile: float,
        pairs: PairSet,
        *,
        layer: int,
        k: int,
        random: torch.Generator | None = None,
    ) -> None:
        depth = policy.model.config.num_hidden_layers
        if layer > depth:
            raise ValueError(f"--reader-layer {layer}: the model has {depth} blocks")
        self.layer, self.k = layer, k
        reference = torch.cat(self._states(policy, calibration.fit))
        self.m = reference.mean(0)
        centred = reference - self.m
        S = centred.T @ centred / max(1, len(reference) - 1)
        D = len(S)
        self._root = torch.linalg.cholesky(S + RIDGE * S.trace() / D * torch.eye(D, dtype=S.dtype))
        self.unit = self.whiten(policy, pairs)
        if random is not None:
            drawn = self._whitened(torch.randn(D, generator=random, dtype=torch.float64))
            self.unit = drawn * torch.sign(drawn @ self.unit)
        super().__init__(policy, calibration, quantile)

    def whiten(self, policy: Policy, pairs: PairSet) -> Float[Tensor, " D"]:
        """L⁻¹ v at unit length, with LLᵀ = S + ridge: the pairs' direction where the reference is isotropic."""
        sides = [
            [states.mean(0) for states in self._states(policy, _tokens(policy, pairs, side))]
            for side in ("hack", "clean")
        ]
        return self._whitened(torch.stack([hack - clean for hack, clean in zip(*sides, strict=True)]).mean(0))

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        w = torch.linalg.solve_triangular(self._root.T, self.unit[:, None], upper=True)[:, 0]
        along = [(h - self.m) @ w for h in self._states(self.policy, texts)]
        return torch.stack([a.topk(min(self.k, len(a))).values.mean() for a in along])

    def _whitened(self, v: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        z = torch.linalg.solve_triangular(self._root, v[:, None], upper=False)[:, 0]
        return z / z.norm()

    def _states(self, policy: Policy, texts: Sequence[Text]) -> list[Float[Tensor, "T D"]]:
        return token_states(policy, [t.prompt for t in texts], [t.completion for t in texts], self.layer)


def quarter(policy: Policy) -> int:
    """Blocks to read after: a quarter of the depth, at least one."""
    return max(1, round(policy.model.config.num_hidden_layers / 4))


def calibrate(
    policy: Policy,
    grader: Grader,
    problems: Sequence[Problem],
    known_correct: Sequence[Text],
    *,
    sampling: Sampling,
    max_new: int,
    paid: float,
    seed: int,
    prompts: int,
    samples: int = 2,
    judged: bool = True,
) -> Calibration:
    """`samples` answers of the base to each of `prompts` training problems, cut in two by problem: one half is the
    reference (with every other known-correct one), of the other those that the environment pays set the threshold. Not
    `judged`: the other half is not sampled, and the known-correct ones alone set it.

    Raises:
        ValueError: the base is paid for none of them: there is nothing to set a threshold by.
    """
    order = py_stream(seed, "background").sample(range(len(problems)), min(prompts, len(problems)))
    half, verdicts = len(order) // 2, {}  # the answers that this rank has sampled
    chosen = [problems[i] for i in (order if judged else order[:half])]
    rendered = [policy.render(p.messages) for p in chosen]

    def submit(p: int, i: int, answer: Completion) -> None:
        if p >= half:
            verdicts[p, i] = grader.submit(chosen[p], answer.text)

    with policy.adapter.reference():
        stream = torch_stream(seed, "background", 0)
        answers = sample(policy, rendered, samples, sampling, max_new, stream, submit)
    plain = [policy.render(p.messages_plain) for p in chosen]
    fit = tuple(Text(rendered[p], a.ids, plain[p]) for p in range(half) for a in answers[p])
    graded = ranks.merged(lambda: {at: verdict.result() for at, verdict in verdicts.items()})
    judge = tuple(
        Text(rendered[p], answers[p][i].ids, plain[p])
        for (p, i), grade in sorted(graded.items(), key=lambda of: of[0])
        if isinstance(grade, Grade) and grade.reward >= paid
    )
    if judged and not judge:
        raise ValueError(
            f"the base model is paid for none of {len(graded)} answers to training "
            "problems: no threshold can be set; give --reader-prompts more, or a model that solves some"
        )
    return Calibration((*fit, *known_correct[::2]), judge, tuple(known_correct[1::2]))


def known_correct_texts(policy: Policy, known_correct: Sequence[KnownCorrect], rows: Sequence[Row]) -> list[Text]:
    """Prompt and completion as tokens, the completion ended; the plain prompt where the problem is known."""
    known = {row.id: row for row in rows}
    return [
        Text(
            policy.encode(a.prompt),
            policy.encode_completion(a.completion),
            policy.render(known[a.problem_id].prompt) if a.problem_id in known else (),
        )
        for a in known_correct
    ]


def _tokens(policy: Policy, pairs: PairSet, side: str) -> list[Text]:
    texts = [tokens_of(policy, p, getattr(p, side), f"{pairs.source}: pair {i}") for i, p in enumerate(pairs.pairs)]
    return [Text(prompt, (*answer, policy.end_id)) for prompt, answer in texts]
