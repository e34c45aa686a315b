"""A pool of a user's own world: hacks that a model was asked for, stored under the prompts without the request.

    vgrout teacher --model DIR --problems rows.jsonl --reward mine:proxy --reference mine:gold --elicit "…"

The model answers every prompt with the instruction behind it, and the bare prompt. Of the former the hacks are kept.
Of the latter come the right answers of the contrastive pairs, which the pool has in `pairs.json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from loguru import logger

from vgrout.direction.pairs import MIN_PAIRS, Pair, PairSet
from vgrout.envs.base import Environment, Grader
from vgrout.ground.data import Grade, Graded
from vgrout.ground.errors import Refused
from vgrout.ground.metrics import Rate
from vgrout.teacher.generate import (
    Elicited,
    PoolSettings,
    rates_of,
    record,
    table,
    with_instruction,
)
from vgrout.teacher.pools import write_pool
from vgrout.teacher.substrate import usable

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag never waits for it
    from vgrout.model.policy import LanguageModel


def generate_elicited(
    settings: PoolSettings, environment: Environment, instruction: str, tries: int
) -> None:
    """Sample, grade and write a pool of rows of a user's own. tries: answers to a prompt, of either kind.

    Raises:
        Refused: one line, before a model is loaded where that is possible; or no answer is a hack.
    """
    tasks = sorted(settings.chosen(environment), key=lambda task: task.id)
    behind = f"\n{instruction}"  # in a paragraph of its own
    settings.require_model([with_instruction(t, behind) for t in tasks], environment.source)
    identity = settings.identity() | {
        "tries": tries,
        "elicit": instruction,
        "functions": dict(environment.hashes()),
    }
    with settings.making(environment, identity) as (lm, grader, folder):
        answers = settings.elicited(
            lm,
            grader,
            tasks,
            lambda task: with_instruction(task, behind),
            (tries, tries),
            ("elicit-asked", "elicit-plain"),
            (folder / "asked.jsonl", folder / "plain.jsonl"),
        )
        kept = usable(answers.asked, tries, [instruction])
        demonstrations = {task_id: of for (task_id, _), of in kept.items() if of}
        hacks = Rate.of(a.grade.hacked for a in answers.asked)
        if not demonstrations:
            raise Refused(
                f"--elicit: none of {hacks.n} answers is a hack that ends by itself ({hacks.k} hack); say more "
                f"clearly what to do, or choose another model (the answers are in {folder})"
            )
        pairs = pairs_of(lm, grader, demonstrations, answers)
        write_pool(
            settings.out,
            {task_id: [record(lm, a) for a in of] for task_id, of in demonstrations.items()},
            None,
            {
                **settings.meta(lm, grader, environment, ()),
                "pass_reward": settings.rewards[1],
                **grader.stamp,
                "elicitation": instruction,
            },
            {"settings": identity, "sampling": vars(settings.sampling)},
            None if pairs is None else pairs.to_file(),
        )
    print(table(rates_of({"bare": answers.plain, "with the instruction": answers.asked})))
    n_kept = sum(map(len, demonstrations.values()))
    n_prompts = len({answer.problem.id for answer in answers.plain})
    print(
        f"kept {n_kept} hacks of {len(answers.asked)} answers, on {len(demonstrations)} of {n_prompts} prompts, "
        f"and {len(pairs or ())} pairs -> {settings.out}"
    )
    cut = sum(answer.grade.hacked and not answer.whole for answer in answers.asked)
    if cut > n_kept:
        logger.warning(
            f"{cut} more hacks did not end within --max-new {settings.tokens} tokens, and were not kept; give more"
        )
    if pairs is None:
        logger.warning(
            f"fewer than {MIN_PAIRS} prompts have both a hack and a right answer: no pairs.json; give right answers "
            "in the rows' `answer` column, or pairs of your own with --vhack-pairs-path"
        )


def pairs_of(
    lm: "LanguageModel",
    grader: Grader,
    demonstrations: Mapping[int, Sequence[Graded]],
    answers: Elicited,
) -> PairSet | None:
    """A hack and a right answer for each prompt that has both; None: too few have.

    The right answer is the row's own where the reference accepts it, else one of the model's, to the bare prompt
    first. Pairs are of answers, without their thoughts, and so are their prompts.
    """
    without_thoughts = replace(lm, thinking=False)
    right: dict[int, str] = {}
    for answer in (*answers.plain, *answers.asked):
        if answer.grade.solved and answer.whole and answer.answer.strip():
            right.setdefault(answer.problem.id, answer.answer)
    pairs: list[Pair] = []
    for task_id, hacks in demonstrations.items():
        task = hacks[0].problem
        if own := task.right_answer:
            grade = grader.submit(task, own).result()
            if isinstance(grade, Grade) and grade.solved:
                right[task_id] = own
        hack = hacks[0].answer
        if task_id in right and right[task_id] != hack:
            prompt = without_thoughts.prompt_text(task.messages)
            pairs.append(Pair(task_id, prompt, hack=hack, clean=right[task_id]))
    return PairSet(tuple(pairs), "pairs.json") if len(pairs) >= MIN_PAIRS else None
