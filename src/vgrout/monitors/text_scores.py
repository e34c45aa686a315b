"""Monitors that read text: a score of a completion under the frozen base, and the threshold above which it is flagged.

The base does not move, so the policy can change what it writes but not how that is read. Nothing here sees a label: the
linear probe is built from contrastive pairs, the base's own answers and known-correct ones; NLL and PMI need no pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.direction.controls import Provenance, cosine_to_real
from vgrout.direction.extract import tokens_of
from vgrout.direction.pairs import KnownCorrect, PairSet
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.hidden_states import by_length, token_states
from vgrout.model.logprobs import collate, completion_logprobs
from vgrout.model.memory import TOKEN_BUDGET
from vgrout.model.packing import batches, pack
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.monitors.base import Monitor, paid_positions
from vgrout.problems import Row
from vgrout.rng import py_stream, torch_stream
from vgrout.types import Completion, Grade, GroupFlags, GroupView, Message, Problem

RIDGE = 0.1  # of the mean variance, added to the covariance before it is inverted


class Text(NamedTuple):
    """One answer as tokens."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    plain: tuple[int, ...] = ()  # the prompt without the hint that names the loophole; (): not known
    others: tuple[tuple[int, ...], ...] = ()  # plain prompts of other problems with this one's signature
    logp: float | None = None  # the deployed model's, mean a token, where it is known


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


class TextScorer(Monitor, ABC):
    """Scores answers, and flags those above a threshold; in training, of the paid ones.

    paid: the reward from which on a rollout counts as paid; only those can be exploits, and reward is visible.
    """

    paid: float = 0.0
    threshold: float

    def __init__(self, policy: Policy, calibration: Calibration, quantile: float) -> None:
        self.policy = policy
        parts = [self.scores(texts) for texts in (calibration.judge, calibration.known_correct) if texts]
        self.threshold = max(float(torch.quantile(part, quantile)) for part in parts)

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader, problems: Sequence[Problem]
    ) -> "TextScorer":
        """For its threshold the base model answers some training prompts first."""
        made = cls(policy, calibration(cfg, policy, inputs, grader, problems), cfg.arm.monitor_quantile)
        made.paid = cfg.env.pass_reward
        return made

    def texts(self, view: GroupView) -> list[Text]:
        """A group's rollouts."""
        plain = self.policy.render(view.messages_plain)
        return [Text(view.prompt_ids, ids, plain) for ids in view.completion_ids]

    @abstractmethod
    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        """One number an answer, fp64 on the CPU; higher is more suspect."""

    def flags(self, views: Sequence[GroupView], step: int) -> list[GroupFlags]:
        paid = paid_positions(views, self.paid)
        texts = [self.texts(view) for view in views] if paid else []
        read = ranks.from_first(self.scores([texts[i][b] for i, b in paid]).tolist()) if paid else []
        scores = dict(zip(paid, read, strict=True))
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


class LinearProbe(TextScorer):
    """Whitened projection of the base's token states on v: the mean of the k largest w·(h − m) over the completion.

    m, S are mean and covariance of the reference's token states, v the mean over pairs of (mean hack token − mean clean
    token), w = (S + .1·tr S/D · I)⁻¹ v: Fisher's direction with a ridge. States are those after `layer` blocks.
    A few tokens decide (k small): a mean over the completion is evaded by hacks of one line.

    random: take a direction drawn uniformly from the sphere in place of v, signed so that it puts the pairs' hack side
    above the clean one, which favours it (the Haar control).
    """

    name = "probe"

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
            raise ValueError(f"--probe-layer {layer}: the model has {depth} blocks")
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

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader, problems: Sequence[Problem]
    ) -> "LinearProbe":
        arm, seed, pairs = cfg.arm, cfg.run.seed, inputs.pairs
        assert pairs is not None
        used = pairs.shuffled(seed) if arm.control == "shuffled" else inputs.placebo if arm.other_pairs else pairs
        assert used is not None, arm.control
        haar = seed if arm.route2_random_v_seed is None else arm.route2_random_v_seed
        made = cls(
            policy,
            calibration(cfg, policy, inputs, grader, problems),
            arm.monitor_quantile,
            used,
            layer=arm.probe_layer or quarter(policy),
            k=arm.probe_k,
            random=torch_stream(haar, "haar", "reader") if arm.haar else None,
        )
        made.paid = cfg.env.pass_reward
        here, real = {"reader": made.unit[None]}, {"reader": made.whiten(policy, pairs)[None]}
        made.provenance = Provenance(
            pairs=used.source,
            pairs_sha256=used.sha256,
            modules=1,
            axes=1,
            cosine_to_real=cosine_to_real(here, real) if arm.haar or arm.other_pairs else None,
        )
        return made

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


def calibration(
    cfg: Config,
    policy: Policy,
    inputs: Inputs,
    grader: Grader,
    problems: Sequence[Problem],
    others: "Others | None" = None,
) -> Calibration:
    """What a run's monitor reads before training, by the run's settings. Raises ValueError as `calibrate`."""
    known = calibrate(
        policy,
        grader,
        problems,
        known_correct_texts(policy, inputs.known_correct, inputs.rows, others),
        sampling=Sampling(),
        max_new=cfg.scale.max_new,
        paid=cfg.env.pass_reward,
        seed=cfg.run.seed,
        prompts=cfg.arm.monitor_prompts,
        judged=cfg.arm.monitor_threshold == "both",
        others=others,
    )
    logger.info(
        f"read before training: {len(known.fit)} texts as the reference, {len(known.judge)} paid answers and "
        f"{len(known.known_correct)} known-correct ones for the threshold"
    )
    return known


Others = Callable[[Sequence[Message]], list[tuple[Message, ...]]]  # a plain prompt → the same under other statements


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
    others: Others | None = None,
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
    more = [tuple(policy.render(m) for m in others(p.messages_plain)) if others else () for p in chosen]
    fit = tuple(Text(rendered[p], a.ids, plain[p], more[p]) for p in range(half) for a in answers[p])
    graded = ranks.merged(lambda: {at: verdict.result() for at, verdict in verdicts.items()})
    judge = tuple(
        Text(rendered[p], answers[p][i].ids, plain[p], more[p])
        for (p, i), grade in sorted(graded.items(), key=lambda of: of[0])
        if isinstance(grade, Grade) and grade.reward >= paid
    )
    if judged and not judge:
        raise ValueError(
            f"the base model is paid for none of {len(graded)} answers to training "
            "problems: no threshold can be set; give --monitor-prompts more, or a model that solves some"
        )
    return Calibration((*fit, *known_correct[::2]), judge, tuple(known_correct[1::2]))


def known_correct_texts(
    policy: Policy, known_correct: Sequence[KnownCorrect], rows: Sequence[Row], others: Others | None = None
) -> list[Text]:
    """Prompt and completion as tokens, the completion ended; the plain prompts where the problem is known."""
    known = {row.id: row.prompt for row in rows}

    def more(prompt: Sequence[Message]) -> tuple[tuple[int, ...], ...]:
        return tuple(policy.render(m) for m in others(prompt)) if others else ()

    return [
        Text(
            policy.encode(a.prompt),
            policy.encode_completion(a.completion),
            policy.render(known[a.problem_id]) if a.problem_id in known else (),
            more(known[a.problem_id]) if a.problem_id in known else (),
        )
        for a in known_correct
    ]


def _tokens(policy: Policy, pairs: PairSet, side: str) -> list[Text]:
    texts = [tokens_of(policy, p, getattr(p, side), f"{pairs.source}: pair {i}") for i, p in enumerate(pairs.pairs)]
    return [Text(prompt, (*answer, policy.end_id)) for prompt, answer in texts]
