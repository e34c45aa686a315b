"""Sample and grade n answers to problems: the one place where both are done.

Training, evaluation, pools, distillation, preference rounds and `vgrout sample` come here:

- `sample_and_submit` samples; each answer's grade is on its way when it returns.
- `graded` waits for these grades.
- `generate_graded` goes through many problems batch by batch, with a log from which a killed process goes on.

An answer is graded, without its thought, while others are still being sampled. A grader that fails is asked again by
its environment, so what comes back without a grade has none for good.
"""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vgrout.config.settings import Sampling
from vgrout.envs.base import Grader
from vgrout.ground import ranks
from vgrout.ground.console import progress
from vgrout.ground.data import (
    Completion,
    Grade,
    Graded,
    GradedAnswer,
    GradedCompletion,
    Rollout,
    Task,
    Thought,
    Ungraded,
    Verdict,
)
from vgrout.ground.io import whole_lines
from vgrout.ground.rng import torch_stream
from vgrout.ground.thoughts import thought_of, to_grade
from vgrout.model.policy import LanguageModel
from vgrout.model.sampling import sampler

BATCH = 192  # answers that `generate_graded` samples at once: a kill loses at most these

Logged = dict[str, Any]  # a graded answer as the log stores it


@dataclass(frozen=True, slots=True)
class Submitted:
    """A rollout whose grade is on its way."""

    problem: Task
    sample: int  # which of the problem's completions: 0 … n − 1
    rollout: Rollout
    verdict: Future[Verdict] | None  # None: another rank has it, or nothing grades it


def sample_and_submit(
    lm: LanguageModel,
    grader: Grader | None,
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
    on_completion: called as each one ends. grader: None: nothing is graded.
    """
    verdicts: dict[tuple[int, int], Future[Verdict]] = {}
    prompts = [lm.render(problem.messages) for problem in problems]
    in_thought = [lm.opens_thought(problem.messages) for problem in problems]
    held: dict[int, dict[int, str]] = {}  # what is graded of whole groups, by problem and place
    grader_of_groups: Any = grader if getattr(grader, "by_group", False) else None

    def submit(p: int, i: int, completion: Completion) -> None:
        given = to_grade(completion.text, in_thought[p], lm.marks)
        if grader_of_groups is not None:
            held.setdefault(p, {})[i] = given
        elif grader is not None:
            verdicts[p, i] = grader.submit(problems[p], given)
        if on_completion is not None:
            on_completion()

    sampled = sampler.sample(
        lm, prompts, n, sampling, max_new, stream, submit, whole_prompts=bool(grader_of_groups)
    )
    for p, given in sorted(held.items()):
        places = sorted(given)  # not in the order in which they ended
        of_group = grader_of_groups.submit_group(problems[p], [given[i] for i in places])
        verdicts |= {(p, i): verdict for i, verdict in zip(places, of_group, strict=True)}
    submitted: list[list[Submitted]] = []
    for p, completions in enumerate(sampled):
        of_problem: list[Submitted] = []
        for i, one in enumerate(completions):
            thought = thought_of(lm.decode, one.ids, one.text, in_thought[p], lm.marks)
            completion = replace(one, thought=thought)
            rollout = Rollout.of(prompts[p], completion, deployed=deployed)
            of_problem.append(Submitted(problems[p], i, rollout, verdicts.get((p, i))))
        submitted.append(of_problem)
    return submitted


def graded(submitted: Sequence[Sequence[Submitted]]) -> list[list[GradedAnswer]]:
    """Waits for the grades, on every rank for those of all."""

    def own_grades() -> dict[tuple[int, int], Verdict]:
        grades: dict[tuple[int, int], Verdict] = {}
        for p, of_problem in enumerate(submitted):
            for i, answer in enumerate(of_problem):
                if answer.verdict is not None:
                    grades[p, i] = answer.verdict.result()
        return grades

    grades = ranks.merged(own_grades)
    with_grades: list[list[GradedAnswer]] = []
    for p, of_problem in enumerate(submitted):
        given: list[GradedAnswer] = []
        for i, answer in enumerate(of_problem):
            given.append(
                GradedCompletion(answer.problem, answer.sample, answer.rollout, grades[p, i])
            )
        with_grades.append(given)
    return with_grades


# ── many answers, with a log


def generate_graded(
    lm: LanguageModel,
    grader: Grader,
    problems: Sequence[Task],
    n: int,
    *,
    max_new: int,
    seed: int,
    purpose: str,
    sampling: Sampling,
    log: Path | None = None,
    label: str | None = None,
) -> list[Graded]:
    """Sample and grade n answers to each problem; they come back in the problems' order.

    A batch's random stream depends only on (seed, purpose, batch), so the answers are the same
    whether they were sampled in one go or in ten.

    purpose: name of the random stream. log: JSONL, one batch a line; batches that are complete
    there are not sampled again. label: of the progress bar.

    Raises:
        RuntimeError: an answer could not be graded, retries included.
    """
    logged_batches: list[list[list[Logged]]] = []
    if log is not None:
        logged_batches = [json.loads(line) for line in whole_lines(log)]
    problems_per_batch = max(1, BATCH // n)
    starts = range(0, len(problems), problems_per_batch)
    found: list[Graded] = []
    for number, start in enumerate(progress(starts, desc=label or purpose, unit="batch")):
        part = problems[start : start + problems_per_batch]
        if number < len(logged_batches):
            batch = logged_batches[number]
        else:
            submitted = sample_and_submit(
                lm,
                grader,
                part,
                n,
                sampling=sampling,
                max_new=max_new,
                stream=torch_stream(seed, purpose, number),
            )
            batch: list[list[Logged]] = []
            for of_problem in graded(submitted):
                batch.append([_to_log(answer) for answer in of_problem])
            if log is not None:
                _append(log, batch)
        for problem, of_problem in zip(part, batch, strict=True):
            for i, answer in enumerate(of_problem):
                found.append(_from_log(problem, i, answer))
    return found


def _to_log(answer: GradedAnswer) -> Logged:
    """An answer as the log stores it. Raises RuntimeError if it has no grade."""
    if isinstance(answer.grade, Ungraded):
        raise RuntimeError(
            f"problem {answer.problem.id}: could not be graded ({answer.grade.reason})"
        )
    return {
        "ids": answer.ids,
        "text": answer.text,
        "finished": answer.completion.finished,
        "logp": answer.completion.logp,
        "grade": asdict(answer.grade),
        "thought": asdict(answer.thought),
    }


def _from_log(problem: Task, sample: int, logged: Logged) -> Graded:
    completion = Completion(
        ids=tuple(logged["ids"]),
        text=logged["text"],
        finished=logged["finished"],
        logp=tuple(logged["logp"]),
        thought=Thought(**logged.get("thought", {})),
    )
    return GradedCompletion(problem, sample, completion, Grade(**logged["grade"]))


def _append(log: Path, batch: Sequence[Sequence[Logged]]) -> None:
    """Write a batch to the log, and to the disk before the next one is sampled."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(batch) + "\n")
        file.flush()
        os.fsync(file.fileno())
