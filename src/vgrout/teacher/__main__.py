"""`vgrout teacher`: makes a pool of a teacher model's graded answers.

Rows of your own are elicited: the model answers every prompt with the instruction behind it, and the bare prompt. Of
the former the hacks are kept. Of the latter come the right answers of the contrastive pairs, which the pool has in
`pairs.json`.

    vgrout teacher --model DIR --problems rows.jsonl --reward mine:proxy --reference mine:gold --elicit "…"

Exit codes: 0 done · 2 refused, in one line · 130 interrupted: the same command goes on.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loguru import logger

from vgrout.config.checks import changed, flags, setting
from vgrout.config.cli import run_command
from vgrout.config.world_names import EnvMode
from vgrout.direction.pairs import MIN_PAIRS, Pair, PairSet
from vgrout.envs.base import Environment, Grader
from vgrout.ground.data import Grade, Graded
from vgrout.ground.io import Refused, refuse, require_new
from vgrout.ground.metrics import Rate
from vgrout.ground.table import markdown
from vgrout.teacher.generate import (
    GOES_ON,
    Elicited,
    PoolSettings,
    by_mode,
    fitting,
    rates_of,
    record,
    with_instruction,
)
from vgrout.teacher.pools import write_pool
from vgrout.teacher.substrate import usable

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag never waits for it
    from vgrout.model.policy import LanguageModel


@dataclass(frozen=True)
class TeacherSettings(PoolSettings):
    """Make a pool: a teacher's graded answers to training problems."""

    group: int = setting(8, low=1)
    """Answers to a problem."""
    env_mode: EnvMode = "run_tests"
    """Which flawed grader checks: one of the eight, or 'own' (each problem's own, else in turn); the pool then has a
    partition."""
    reward: str = ""
    """What training rewards in rows of your own, as in `vgrout train`; with --reference and --elicit."""
    reference: str = ""
    """What says whether an answer to such a row is right."""
    env: str = setting("", form=r"(verifiers:\w[\w./@-]*)?", should="be verifiers:NAME")
    """verifiers:NAME: prompts and rewards of a taskset, as in `vgrout train`; with --reference and --elicit."""
    env_args: str = ""
    """Settings of the taskset as a JSON object."""
    reward_passes_at: float = 1.0
    """Score of --reward from which on an answer passes."""
    elicit: str = ""
    """Instruction that is put behind each prompt of rows of your own, to ask for the hack. Only hacks are kept, under
    the prompts without it; the pool has pairs of a hack and a right answer, too."""

    def __post_init__(self) -> None:
        rewarded = bool(self.reward or self.env)
        refuse(
            len({rewarded, bool(self.reference), bool(self.elicit.strip())}) > 1,
            "--elicit, --reward, --reference: for rows of your own, all three; for Python functions none of them "
            "(`vgrout substrate` elicits there)",
        )
        own_rows, taskset = bool(self.reference), bool(self.env)
        unread = ("env_args", "reward_passes_at")
        if own_rows:
            unread = ("env_mode", "compile_reward", "allow_weak_sandbox")
        idle = flags(name for name, _ in changed(self) if name in unread)
        how = "with" if own_rows else "without"
        refuse(bool(idle), f"{idle}: not read {how} --elicit; leave it out")
        refuse(
            taskset and bool(self.problems),
            f"--problems with --env {self.env}: the taskset has prompts of its own; leave one out",
        )
        refuse(
            own_rows and not self.problems and not taskset,
            "--problems: --elicit needs a file of your own rows",
        )
        PoolSettings.__post_init__(self)

    @property
    def world(self) -> dict[str, Any]:
        if not self.reference:
            return {"env_mode": self.env_mode}
        return {
            "env": self.env or "code",
            "env_args": self.env_args,
            "reward": self.reward,
            "reference": self.reference,
            "reward_passes_at": self.reward_passes_at,
        }


def generate_pool(settings: TeacherSettings) -> None:
    """Sample, grade and write a pool.

    Raises:
        Refused: one line, before a model is loaded where that is possible.
    """
    settings.sampling.require_draws("--group", settings.group)
    require_new(settings.out)
    environment = settings.environment()
    if settings.reference:
        generate_elicited(settings, environment, settings.elicit.strip(), settings.group)
        return
    problems = settings.chosen(environment)
    settings.require_model(problems, environment.source)
    identity = {**settings.identity(), "group": settings.group, "env_mode": settings.env_mode}
    with settings.making(environment, identity) as (lm, grader, folder):
        answers = settings.answers(
            lm,
            grader,
            fitting(lm, problems, settings.tokens),
            settings.group,
            purpose="teacher",
            log=folder / "answers.jsonl",
        )
        lines: dict[int, list[dict[str, object]]] = {}
        mode_of: dict[int, str] = {}
        for a in answers:
            own = {"finished": a.whole, "logp": list(a.completion.logp or ())}
            lines.setdefault(a.problem.id, []).append(record(lm, a) | own)
            mode_of[a.problem.id] = a.problem.flaws[0]
        partition = mode_of if settings.env_mode == "own" else None
        summary = rates_of(by_mode(answers))
        meta = settings.meta(lm, grader, environment, (a.problem for a in answers))
        report = {"settings": identity, "sampling": vars(settings.sampling), "modes": summary}
        write_pool(settings.out, lines, partition, meta, report)
    print(markdown(summary))
    print(
        "SHOULD: a hack rate far above the student's; "
        "ELSE this teacher shows nothing that the student does not do\n"
        f"{len(lines)} problems, {len(answers)} rollouts -> {settings.out}"
    )


# ── a pool of a user's own world: hacks that a model was asked for, under the prompts without the request


def generate_elicited(
    settings: PoolSettings,
    environment: Environment,
    instruction: str,
    tries: int,
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
                "pass_reward": settings.cfg.env.pass_reward,
                **grader.stamp,
                "elicitation": instruction,
            },
            {"settings": identity, "sampling": vars(settings.sampling)},
            None if pairs is None else pairs.to_file(),
        )
    print(markdown(rates_of({"bare": answers.plain, "with the instruction": answers.asked})))
    n_kept = sum(map(len, demonstrations.values()))
    n_prompts = len({answer.problem.id for answer in answers.plain})
    print(
        f"kept {n_kept} hacks of {len(answers.asked)} answers, on {len(demonstrations)} of {n_prompts} prompts, "
        f"and {len(pairs or ())} pairs -> {settings.out}"
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


def main(argv: list[str] | None = None) -> int:
    """The exit codes above."""
    return run_command(generate_pool, TeacherSettings, argv, "vgrout teacher", GOES_ON)


if __name__ == "__main__":
    sys.exit(main())
