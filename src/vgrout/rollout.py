"""Sample and grade: the one place where completions are sampled, for training, evaluation, distillation and pools.

Each completion is graded while the others are still being sampled.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from loguru import logger

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.config.sampling import Sampling
from vgrout.console import Clock
from vgrout.data import (
    Batch,
    CachedGrade,
    Completion,
    Flaw,
    Grade,
    GradedCompletion,
    Group,
    Rollout,
    Task,
    Ungraded,
)
from vgrout.envs.base import Grader
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.sampler import sample
from vgrout.rng import torch_stream

Demonstrations = Sequence[tuple[Rollout, CachedGrade]]  # of one problem


@dataclass(frozen=True, slots=True)
class Submitted:
    """A completion whose grade is on its way."""

    problem: Task
    prompt_ids: tuple[int, ...]
    sample: int  # which of the problem's completions: 0 … n − 1
    completion: Completion
    verdict: Future[Grade | Ungraded] | None  # None: another rank has it


def sample_and_submit(
    lm: LanguageModel,
    grader: Grader,
    problems: Sequence[Task],
    n: int | Sequence[int],
    *,
    sampling: Sampling,
    max_new: int,
    stream: torch.Generator,
    on_completion: Callable[[], object] | None = None,
) -> list[list[Submitted]]:
    """n completions (or n[p]) of each problem by the model as it is, in the problems' order.

    stream: a named CPU stream of random numbers. on_completion: called as each one ends.
    """
    verdicts: dict[tuple[int, int], Future[Grade | Ungraded]] = {}

    def submit(p: int, i: int, completion: Completion) -> None:
        verdicts[p, i] = grader.submit(problems[p], completion.text, in_thought[p])
        if on_completion is not None:
            on_completion()

    prompts = [lm.render(p.messages) for p in problems]
    in_thought = [lm.prompt_text(p.messages).rstrip().endswith("<think>") for p in problems]
    sampled = sample(lm, prompts, n, sampling, max_new, stream, submit)
    return [
        [
            Submitted(problems[p], prompts[p], i, answer, verdicts.get((p, i)))
            for i, answer in enumerate(of_prompt)
        ]
        for p, of_prompt in enumerate(sampled)
    ]


def graded(
    submitted: Sequence[Sequence[Submitted]],
) -> list[list[GradedCompletion[Grade | Ungraded]]]:
    """Waits for the grades, on every rank for those of all."""
    grades = ranks.merged(
        lambda: {
            (p, i): s.verdict.result()
            for p, of_problem in enumerate(submitted)
            for i, s in enumerate(of_problem)
            if s.verdict is not None
        }
    )
    return [
        [
            GradedCompletion(s.problem, s.sample, s.completion, grades[p, i])
            for i, s in enumerate(of_problem)
        ]
        for p, of_problem in enumerate(submitted)
    ]


def rollout(
    policy: Policy,
    grader: Grader,
    problems: Sequence[Task],
    demonstrations: Sequence[Demonstrations],
    cfg: Config,
    step: int,
    *,
    flaws: Iterable[Flaw],
    clock: Clock,
) -> Batch:
    """One step's groups: of each problem the policy's own completions, graded, and its demonstrations.

    A group with a completion that the sandbox could not grade is dropped, with its reason. A share of the students
    (--rollout-ablate-frac) is sampled from the deployed model. flaws: those that the step's row counts by.
    """
    students = [cfg.scale.group - len(d) for d in demonstrations]
    deployed = [round(cfg.method.ablate_frac * n) for n in students]

    def draw(counts: Sequence[int], purpose: str) -> list[list[Submitted]]:
        stream = torch_stream(cfg.run.seed, purpose, step)
        return sample_and_submit(
            policy,
            grader,
            problems,
            counts,
            sampling=cfg.sampling,
            max_new=cfg.scale.max_new,
            stream=stream,
        )

    with clock("gen"):
        on = draw([n - d for n, d in zip(students, deployed, strict=True)], "sample")
        off: list[list[Submitted]] = [[] for _ in problems]
        if any(deployed):
            with policy.adapter.deployed():
                off = draw(deployed, "sample-deployed")

    groups: list[Group] = []
    dropped: list[str] = []
    with clock("grade"):
        drawn = [(*on[p], *off[p]) for p in range(len(problems))]
        for index, (problem, sampled, answers) in enumerate(
            zip(problems, drawn, graded(drawn), strict=True)
        ):
            grades = [a.grade for a in answers]
            if failed := [g for g in grades if isinstance(g, Ungraded)]:
                dropped.append(failed[0].reason)
                logger.warning(
                    f"step {step}, problem {problem.id}: group dropped, not graded: {failed[0].reason}"
                )
                continue
            if lost := [
                g.status for g in grades if isinstance(g, Grade) and g.status.startswith("lost:")
            ]:
                logger.warning(
                    f"step {step}, problem {problem.id}: {len(lost)} answers take their worker along: {lost[0]}"
                )
            rollouts = [
                Rollout.of(problem, s.prompt_ids, s.completion, deployed=i >= len(on[index]))
                for i, s in enumerate(sampled)
            ]
            rewarded: list[Grade | CachedGrade] = [
                training_reward(cfg, g) for g in grades if isinstance(g, Grade)
            ]
            groups.append(
                Group(
                    problem,
                    (*rollouts, *(r for r, _ in demonstrations[index])),
                    (*rewarded, *(g for _, g in demonstrations[index])),
                    unbiased=cfg.loss.unbiased,
                    index=index,
                )
            )
    if not groups:
        logger.warning(f"step {step}: every group was lost; the optimiser is not stepped")
    return Batch(
        tuple(groups),
        tuple(dropped),
        tuple(flaws),
        cfg.generations,
        step,
        tuple(cfg.env.report_detector_codes),
        cfg.method.modes_acted_on,
    )


def training_reward(cfg: Config, grade: Grade) -> Grade:
    """The reward in training: the flawed check's; under no_loophole the reference's, on the same scale."""
    if not cfg.method.control_spec.strict:
        return grade
    return replace(grade, reward=grade.reward_of_reference, passed=grade.solved)
