"""Monitors that read text: a score of a completion under the frozen base, and the threshold above which it is flagged.

The base does not move, so the policy can change what it writes but not how that is read. Nothing here sees a label.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.direction.pairs import KnownCorrect
from vgrout.method.base import Monitor, Setup, Views, rewarded
from vgrout.model.logprobs import completion_logprobs
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.problems import Row
from vgrout.rng import py_stream, torch_stream
from vgrout.types import Completion, Grade, GroupFlags, GroupView, Ungraded


class Text(NamedTuple):
    """One answer as tokens."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    plain: tuple[int, ...] = ()  # the prompt without the hint that names the loophole; (): not known
    logp: float | None = None  # the deployed model's, mean a token, where it is known


@dataclass(frozen=True)
class Calibration:
    """What the threshold is set by: the larger of the two quantiles, or the one whose texts there are."""

    judge: tuple[Text, ...]  # the base's rewarded answers
    known_correct: tuple[Text, ...]  # in styles that the base need not write


class TextScorer(Monitor, ABC):
    """Scores rewarded answers, and flags those above a threshold.

    top: the reward from which on a rollout counts as rewarded; only those can be hacks, and reward is visible.
    """

    top: float = 0.0
    threshold: float

    def __init__(self, policy: Policy, calibration: Calibration, quantile: float) -> None:
        self.policy = policy
        parts = [self.scores(texts) for texts in (calibration.judge, calibration.known_correct) if texts]
        self.threshold = max(float(torch.quantile(part, quantile)) for part in parts)

    @classmethod
    def make(cls, setup: Setup) -> "TextScorer":
        """For its threshold the base model may answer some training prompts first."""
        monitor = cls(setup.policy, calibration(setup), setup.cfg.method.monitor_quantile)
        monitor.top = setup.cfg.env.pass_reward
        return monitor

    def texts(self, view: GroupView) -> list[Text]:
        """A group's rollouts."""
        plain = self.policy.render(view.messages_plain)
        return [Text(view.prompt_ids, ids, plain) for ids in view.completion_ids]

    @abstractmethod
    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        """One number an answer, fp64 on the CPU; higher is more suspect."""

    def flag(self, views: Views, step: int) -> list[GroupFlags]:
        passing = rewarded(views, self.top)
        texts = [self.texts(view) for view in views] if passing else []
        read = ranks.from_first(self.scores([texts[i][b] for i, b in passing]).tolist()) if passing else []
        scores = dict(zip(passing, read, strict=True))
        return [
            GroupFlags(
                tuple(scores.get((i, b)) for b in range(len(view))),
                tuple((i, b) in scores and scores[i, b] > self.threshold for b in range(len(view))),
            )
            for i, view in enumerate(views)
        ]


class NLL(TextScorer):
    """Mean negative log-likelihood of the completion under the frozen base, nats a token: novelty without a
    direction."""

    name = "nll"

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        return -mean_logp(self.policy, [t.prompt for t in texts], [t.completion for t in texts])


class Length(TextScorer):
    """How few tokens an answer has: a hack can be shorter than any attempt at its problem."""

    name = "length"

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        return -torch.tensor([len(t.completion) for t in texts], dtype=torch.float64)


class PMI(TextScorer):
    """(log p(answer | prompt with the hint) − log p(answer | prompt without it)) / tokens, under the frozen base: what
    the hint tells of the answer (pointwise mutual information, Church and Hanks 1990), nats a token. An honest answer,
    however odd, is no likelier once the prompt says how it will be checked; a hack is. No pairs, no direction."""

    name = "pmi"

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        if not all(t.plain for t in texts):
            raise ValueError(
                "--known-correct: an entry whose 'problem_id' is not in the problem file has no prompt "
                "without a hint, which --monitor pmi needs; leave such entries out"
            )
        answers = [t.completion for t in texts]
        hinted = mean_logp(self.policy, [t.prompt for t in texts], answers)
        return hinted - mean_logp(self.policy, [t.plain for t in texts], answers)


@torch.no_grad()
def mean_logp(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    side: AbstractContextManager[None] | None = None,
) -> Float[Tensor, " n"]:
    """Mean log-likelihood of each completion, nats a token, fp64 on the CPU. A prompt is read once for all of its
    completions, where the model allows it. side: of the policy; None: the frozen base."""
    out: dict[int, Tensor] = {}
    own = ranks.own([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])
    own_prompts, own_completions = prompts[own.start : own.stop], completions[own.start : own.stop]
    with side or policy.adapter.reference():
        for part, batch in policy.batches(own_prompts, own_completions):
            logp = completion_logprobs(policy.model, batch).full.double()
            means = (torch.where(batch.mask, logp, 0.0).sum(1) / batch.mask.sum(1)).cpu()
            out |= dict(zip([own[i] for i in part], means, strict=True))
    of_all = ranks.merged(lambda: out)
    return torch.stack([of_all[i] for i in range(len(prompts))])


def calibration(setup: Setup) -> Calibration:
    """What a run's threshold is set by. Raises ValueError as `rewarded_answers`."""
    method, inputs = setup.cfg.method, setup.inputs
    known_correct = known_correct_texts(setup.policy, inputs.known_correct, inputs.rows)[1::2]
    judge = rewarded_answers(setup) if method.monitor_threshold == "both" else ()
    logger.debug(
        f"read before training: {len(judge)} rewarded answers and {len(known_correct)} known-correct ones for the "
        "threshold"
    )
    return Calibration(judge, tuple(known_correct))


def rewarded_answers(setup: Setup) -> tuple[Text, ...]:
    """The base's rewarded answers, of two each to half of --monitor-prompts training problems.

    The other half is sampled all the same: without it the draws would be others, and so every recorded threshold.

    Raises:
        ValueError: the base is rewarded for none of them: there is nothing to set a threshold by.
    """
    cfg, policy, grader, problems = setup.cfg, setup.policy, setup.grader, setup.problems
    assert grader is not None
    n = min(cfg.method.monitor_prompts, len(problems))
    chosen = [problems[i] for i in py_stream(cfg.run.seed, "background").sample(range(len(problems)), n)]
    rendered = [policy.render(p.messages) for p in chosen]
    verdicts: dict[tuple[int, int], Future[Grade | Ungraded]] = {}  # of the answers that this rank has sampled

    def submit(p: int, i: int, answer: Completion) -> None:
        if p >= n // 2:
            verdicts[p, i] = grader.submit(chosen[p], answer.text)

    with policy.adapter.reference():
        stream = torch_stream(cfg.run.seed, "background", 0)
        answers = sample(policy, rendered, 2, cfg.sampling, cfg.scale.max_new, stream, submit)
    graded = ranks.merged(lambda: {at: verdict.result() for at, verdict in verdicts.items()})
    judge = tuple(
        Text(rendered[p], answers[p][i].ids, policy.render(chosen[p].messages_plain))
        for (p, i), grade in sorted(graded.items(), key=lambda item: item[0])
        if isinstance(grade, Grade) and grade.reward >= cfg.env.pass_reward
    )
    if not judge:
        raise ValueError(
            f"the base model is rewarded for none of {len(graded)} answers to training "
            "problems: no threshold can be set; give --monitor-prompts more, or a model that solves some"
        )
    return judge


def known_correct_texts(policy: Policy, known_correct: Sequence[KnownCorrect], rows: Sequence[Row]) -> list[Text]:
    """Prompt and completion as tokens, the completion ended; the plain prompts where the problem is known."""
    known = {row.id: row.prompt for row in rows}
    return [
        Text(
            policy.encode(a.prompt),
            policy.encode_completion(a.completion),
            policy.render(known[a.problem_id]) if a.problem_id in known else (),
        )
        for a in known_correct
    ]
