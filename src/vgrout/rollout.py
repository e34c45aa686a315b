"""Sample and grade: the one place where completions are sampled, for training, evaluation, distillation and pools.

Each completion is graded, without its thought, while the others are still being sampled.
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
from vgrout.envs.base import Grader, GroupGrader
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.sampler import sample
from vgrout.rng import torch_stream
from vgrout.thoughts import opens, thought_of, to_grade

# of one problem: each with the label that came with it
Demonstrations = Sequence[tuple[Rollout, CachedGrade]]


@dataclass(frozen=True, slots=True)
class Submitted:
    """A completion whose grade is on its way."""

    problem: Task
    prompt_ids: tuple[int, ...]
    sample: int  # which of the problem's completions: 0 … n − 1
    completion: Completion
    deployed: bool  # sampled with the quarantine off
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
    deployed: bool = False,
    on_completion: Callable[[], object] | None = None,
) -> list[list[Submitted]]:
    """n completions (or n[p]) of each problem by the model as it is, in the problems' order.

    stream: a named CPU stream of random numbers. deployed: whether the model is the deployed one.
    on_completion: called as each one ends.
    """
    verdicts: dict[tuple[int, int], Future[Grade | Ungraded]] = {}
    prompts = [lm.render(problem.messages) for problem in problems]
    in_thought: list[bool] = []
    for problem in problems:
        in_thought.append(opens(lm.prompt_text(problem.messages)))

    # what is graded of whole groups, by problem and place; and whether it goes on with a thought
    held: dict[int, dict[int, tuple[str, bool]]] = {}

    def submit(p: int, i: int, completion: Completion) -> None:
        given = to_grade(grader, completion.text, in_thought[p])
        if isinstance(grader, GroupGrader):
            held.setdefault(p, {})[i] = given
        else:
            verdicts[p, i] = grader.submit(problems[p], *given)
        if on_completion is not None:
            on_completion()

    sampled = sample(lm, prompts, n, sampling, max_new, stream, submit)
    if isinstance(grader, GroupGrader):
        for p, given in sorted(held.items()):
            places = sorted(given)  # not in the order in which they ended
            group = [given[i][0] for i in places]
            of_group = grader.submit_group(problems[p], group, given[places[0]][1])
            verdicts |= {(p, i): verdict for i, verdict in zip(places, of_group, strict=True)}
    submitted: list[list[Submitted]] = []
    for p, completions in enumerate(sampled):
        of_problem: list[Submitted] = []
        for i, sampled_one in enumerate(completions):
            thought = thought_of(lm, sampled_one.ids, sampled_one.text, in_thought[p])
            completion = replace(sampled_one, thought=thought)
            verdict = verdicts.get((p, i))
            of_problem.append(Submitted(problems[p], prompts[p], i, completion, deployed, verdict))
        submitted.append(of_problem)
    return submitted


def graded(
    submitted: Sequence[Sequence[Submitted]],
) -> list[list[GradedCompletion[Grade | Ungraded]]]:
    """Waits for the grades, on every rank for those of all."""

    def own_grades() -> dict[tuple[int, int], Grade | Ungraded]:
        grades: dict[tuple[int, int], Grade | Ungraded] = {}
        for p, of_problem in enumerate(submitted):
            for i, answer in enumerate(of_problem):
                if answer.verdict is not None:
                    grades[p, i] = answer.verdict.result()
        return grades

    grades = ranks.merged(own_grades)
    with_grades: list[list[GradedCompletion[Grade | Ungraded]]] = []
    for p, of_problem in enumerate(submitted):
        answers: list[GradedCompletion[Grade | Ungraded]] = []
        for i, answer in enumerate(of_problem):
            answers.append(
                GradedCompletion(answer.problem, answer.sample, answer.completion, grades[p, i])
            )
        with_grades.append(answers)
    return with_grades


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

    A group with a completion that could not be graded is dropped, with its reason. A share of the
    students (--rollout-ablate-frac) is sampled from the deployed model. flaws: those that the step's
    row counts by.
    """
    students = [cfg.scale.group - len(of_problem) for of_problem in demonstrations]
    with clock("gen"):
        sampled = _sample_students(policy, grader, problems, students, cfg, step)
    groups: list[Group] = []
    dropped: list[str] = []
    with clock("grade"):
        answers = graded(sampled)
        for index, problem in enumerate(problems):
            where = f"step {step}, problem {problem.id}"
            grades: list[Grade] = []
            failed = ""
            for answer in answers[index]:
                if isinstance(answer.grade, Grade):
                    grades.append(answer.grade)
                else:
                    failed = failed or answer.grade.reason
            if failed:
                dropped.append(failed)
                logger.warning(f"{where}: group dropped, not graded: {failed}")
                continue
            _warn_of_lost(where, grades)
            demos = demonstrations[index]
            groups.append(_group(problem, index, sampled[index], grades, demos, cfg))
    if not groups:
        logger.warning(f"step {step}: every group was lost; the optimiser is not stepped")
    return Batch(
        groups=tuple(groups),
        dropped=tuple(dropped),
        flaws=tuple(flaws),
        generations=cfg.generations,
        step=step,
        half_a=tuple(cfg.env.report_detector_codes),
        known=cfg.method.modes_acted_on,
        thinking=cfg.env.thinking,
    )


def _sample_students(
    policy: Policy,
    grader: Grader,
    problems: Sequence[Task],
    students: Sequence[int],
    cfg: Config,
    step: int,
) -> list[list[Submitted]]:
    """So many completions of each problem, those by the deployed model last."""
    by_deployed = [round(cfg.method.ablate_frac * n) for n in students]
    as_trained = [n - d for n, d in zip(students, by_deployed, strict=True)]

    def draw(counts: Sequence[int], purpose: str, *, deployed: bool) -> list[list[Submitted]]:
        return sample_and_submit(
            policy,
            grader,
            problems,
            counts,
            sampling=cfg.sampling,
            max_new=cfg.scale.max_new,
            stream=torch_stream(cfg.run.seed, purpose, step),
            deployed=deployed,
        )

    sampled = draw(as_trained, "sample", deployed=False)
    if any(by_deployed):
        with policy.adapter.deployed():
            more = draw(by_deployed, "sample-deployed", deployed=True)
        sampled = [a + b for a, b in zip(sampled, more, strict=True)]
    return sampled


def _warn_of_lost(where: str, grades: Sequence[Grade]) -> None:
    lost = [grade.status for grade in grades if grade.status.startswith("lost:")]
    if lost:
        logger.warning(f"{where}: {len(lost)} answers take their worker along: {lost[0]}")


def _group(
    problem: Task,
    index: int,
    sampled: Sequence[Submitted],
    grades: Sequence[Grade],
    demonstrations: Demonstrations,
    cfg: Config,
) -> Group:
    """The students' rollouts of a problem, then the demonstrations."""
    rollouts: list[Rollout] = []
    rewarded: list[Grade | CachedGrade] = []
    for answer, grade in zip(sampled, grades, strict=True):
        rollouts.append(
            Rollout.of(
                answer.problem, answer.prompt_ids, answer.completion, deployed=answer.deployed
            )
        )
        rewarded.append(training_reward(cfg, grade))
    for rollout_of_teacher, label in demonstrations:
        rollouts.append(rollout_of_teacher)
        rewarded.append(label)
    return Group(
        problem,
        tuple(rollouts),
        tuple(rewarded),
        unbiased=cfg.loss.unbiased,
        index=index,
    )


def training_reward(cfg: Config, grade: Grade) -> Grade:
    """The reward in training: the flawed check's; under no_loophole the reference's, on the same scale."""
    if not cfg.method.control_spec.strict:
        return grade
    return replace(grade, reward=grade.reward_of_reference, passed=grade.solved)
