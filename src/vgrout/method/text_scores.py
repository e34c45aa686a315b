"""Monitors that read text: a score of a completion under the frozen base, and the threshold above which it is flagged.

The base does not move, so the policy can change what it writes but not how that is read. Nothing here sees a label: the
linear probe is built from contrastive pairs, the base's own answers and known-correct ones; NLL and PMI need no pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.direction.pairs import KnownCorrect
from vgrout.grading.grade import Grader
from vgrout.method.base import Monitor, Setup, Views, rewarded
from vgrout.model.hidden_states import by_length
from vgrout.model.logprobs import collate, completion_logprobs
from vgrout.model.memory import TOKEN_BUDGET
from vgrout.model.packing import batches, pack
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.problems import Row
from vgrout.rng import py_stream, torch_stream
from vgrout.types import Completion, Grade, GroupFlags, GroupView, Problem

RIDGE = 0.1  # of the mean variance, added to the covariance before it is inverted


class Text(NamedTuple):
    """One answer as tokens."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    plain: tuple[int, ...] = ()  # the prompt without the hint that names the loophole; (): not known
    logp: float | None = None  # the deployed model's, mean a token, where it is known


@dataclass(frozen=True)
class Calibration:
    """What is read before training: how the base writes, and how it need not write to be right.

    fit: the reference that scores are measured in. judge: the base's rewarded answers to other problems. known_correct:
    held back from the reference. The threshold is the larger of the two quantiles, over `judge` and over
    `known_correct`; of one if the other is empty.
    """

    fit: tuple[Text, ...]
    judge: tuple[Text, ...]
    known_correct: tuple[Text, ...]


class TextScorer(Monitor, ABC):
    """Scores answers, and flags those above a threshold; in training, of the rewarded ones.

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
        """For its threshold the base model answers some training prompts first."""
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


class PMI(TextScorer):
    """(log p(answer | prompt with the hint) − log p(answer | prompt without it)) / tokens, under the frozen base: what
    the hint tells of the answer (pointwise mutual information, Church and Hanks 1990), nats a token. An honest answer,
    however odd, is no likelier for being told how it will be checked; a hack is. No pairs, no direction."""

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
    mine = ranks.own([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])
    prompts_here, here = prompts[mine.start : mine.stop], completions[mine.start : mine.stop]
    alike = [0] * len(mine)
    budget = TOKEN_BUDGET.get(policy.device.type, TOKEN_BUDGET["cuda"])
    parts = batches(alike, prompts_here, here, budget) if policy.packs else by_length(prompts_here, here)
    with side or policy.adapter.reference():
        for part in parts:
            texts = [prompts_here[i] for i in part], [here[i] for i in part]
            batch = (
                pack(alike[: len(part)], *texts, policy.device, policy.model.dtype)
                if policy.packs
                else collate(*texts, policy.device)
            )
            logp = completion_logprobs(policy.model, batch).full.double()
            means = (torch.where(batch.mask, logp, 0.0).sum(1) / batch.mask.sum(1)).cpu()
            out |= dict(zip([mine[i] for i in part], means, strict=True))
    of_all = ranks.merged(lambda: out)
    return torch.stack([of_all[i] for i in range(len(prompts))])


def calibration(setup: Setup) -> Calibration:
    """What a run's monitor reads before training, by the run's settings. Raises ValueError as `calibrate`."""
    cfg, policy, inputs = setup.cfg, setup.policy, setup.inputs
    assert setup.grader is not None
    known = calibrate(
        policy,
        setup.grader,
        setup.problems,
        known_correct_texts(policy, inputs.known_correct, inputs.rows),
        sampling=Sampling(),
        max_new=cfg.scale.max_new,
        top=cfg.env.pass_reward,
        seed=cfg.run.seed,
        prompts=cfg.method.monitor_prompts,
        judged=cfg.method.monitor_threshold == "both",
    )
    logger.info(
        f"read before training: {len(known.fit)} texts as the reference, {len(known.judge)} rewarded answers and "
        f"{len(known.known_correct)} known-correct ones for the threshold"
    )
    return known


def calibrate(
    policy: Policy,
    grader: Grader,
    problems: Sequence[Problem],
    known_correct: Sequence[Text],
    *,
    sampling: Sampling,
    max_new: int,
    top: float,
    seed: int,
    prompts: int,
    samples: int = 2,
    judged: bool = True,
) -> Calibration:
    """`samples` answers of the base to each of `prompts` training problems, cut in two by problem: one half is the
    reference (with every other known-correct one), of the other those that the environment pays set the threshold. Not
    `judged`: the other half is not sampled, and the known-correct ones alone set it.

    Raises:
        ValueError: the base is rewarded for none of them: there is nothing to set a threshold by.
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
        if isinstance(grade, Grade) and grade.reward >= top
    )
    if judged and not judge:
        raise ValueError(
            f"the base model is rewarded for none of {len(graded)} answers to training "
            "problems: no threshold can be set; give --monitor-prompts more, or a model that solves some"
        )
    return Calibration((*fit, *known_correct[::2]), judge, tuple(known_correct[1::2]))


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
