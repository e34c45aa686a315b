"""A step's groups: the policy's own answers, sampled and graded by `generation`, and its demonstrations."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from loguru import logger

from vgrout.config.run import Config
from vgrout.envs.base import Grader
from vgrout.ground.console import Clock
from vgrout.ground.data import Batch, CachedGrade, Flaw, Grade, Group, Rollout, Task
from vgrout.ground.rng import torch_stream
from vgrout.loop.generation import Submitted, graded, sample_and_submit
from vgrout.model.policy import Policy

# each with the label that came with it
DemosOfProblem = Sequence[tuple[Rollout, CachedGrade]]


def rollout(
    policy: Policy,
    grader: Grader,
    problems: Sequence[Task],
    demonstrations: Sequence[DemosOfProblem],
    cfg: Config,
    step: int,
    *,
    flaws: Iterable[Flaw],
    clock: Clock,
) -> Batch:
    """One step's groups: of each problem the policy's own completions, graded, and its demonstrations.

    A group with a completion that could not be graded is dropped, with its reason. A share of the
    students (--rollout-ablate-frac; all of them under route2) is sampled from the deployed model.

    flaws: those that have a column in the step's table.
    """
    students = [cfg.scale.group - len(of_problem) for of_problem in demonstrations]
    with clock("gen"):
        # with grades on the way; `answers` are the same, graded
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
            group = _group(
                problem,
                index,
                sampled[index],
                grades,
                demonstrations[index],
                cfg,
            )
            groups.append(group)
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
    n_students: Sequence[int],
    cfg: Config,
    step: int,
) -> list[list[Submitted]]:
    """Sample n_students[i] completions of problem i, those by the deployed model last, and submit them."""
    # problem by problem, how many are sampled with the quarantine off, and on
    by_deployed: list[int] = []
    as_trained: list[int] = []
    for n in n_students:
        n_deployed = round(cfg.method.ablate_frac * n)
        by_deployed.append(n_deployed)
        as_trained.append(n - n_deployed)

    def draw(
        counts: Sequence[int],
        purpose: str,
        *,
        deployed: bool,
    ) -> list[list[Submitted]]:
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
        logger.warning(
            f"{where}: {len(lost)} answers ended the process that graded them: {lost[0]}"
        )


def _group(
    problem: Task,
    index: int,
    sampled: Sequence[Submitted],
    grades: Sequence[Grade],
    demonstrations: DemosOfProblem,
    cfg: Config,
) -> Group:
    """The students' rollouts of a problem, then the demonstrations."""
    rollouts = [answer.rollout for answer in sampled]
    all_grades: list[Grade | CachedGrade] = [grade_in_training(cfg, grade) for grade in grades]
    for rollout_of_teacher, label in demonstrations:
        rollouts.append(rollout_of_teacher)
        all_grades.append(label)
    return Group(
        problem,
        tuple(rollouts),
        tuple(all_grades),
        unbiased=cfg.loss.unbiased,
        index=index,
    )


def grade_in_training(cfg: Config, grade: Grade) -> Grade:
    """The grade with the reward of training: the flawed check's; under the control no_loophole, which alone is
    strict, the reference's on the same scale."""
    if not cfg.method.control_spec.strict:
        return grade
    return replace(grade, reward=grade.reward_of_reference, passed=grade.solved)
