"""`vgrout teacher`: makes a pool of a teacher model's graded answers.

Exit codes: 0 done · 2 refused, in one line · 130 interrupted: the same command goes on.
"""

import sys
from dataclasses import dataclass
from typing import Literal

from vgrout.config.checks import changed, flags, setting
from vgrout.config.world_names import EnvMode
from vgrout.ground.errors import Refused, refuse
from vgrout.ground.files import require_new
from vgrout.teacher.elicit import generate_elicited
from vgrout.teacher.generate import (
    PoolSettings,
    by_mode,
    command,
    fitting,
    rates_of,
    record,
    table,
)
from vgrout.teacher.pools import write_pool


@dataclass(frozen=True)
class TeacherSettings(PoolSettings):
    """Make a pool: a teacher's graded answers to training problems."""

    group: int = setting(8, low=1)
    """Answers to a problem."""
    env_mode: EnvMode = "run_tests"
    """Which flawed grader checks: one of the seven, or 'own' (each problem's own, else in turn); the pool then has a
    partition."""
    keep: Literal["all", "hacks"] = "all"
    """Every answer, or only those that end by themselves and hack."""
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
        PoolSettings.__post_init__(self)
        rewarded = bool(self.reward or self.env)
        refuse(
            len({rewarded, bool(self.reference), bool(self.elicit.strip())}) > 1,
            "--elicit, --reward, --reference: for rows of your own, all three; for Python functions none of them "
            "(`vgrout substrate` elicits there)",
        )
        unread = ("env_args", "reward_passes_at")
        if self.own_rows:
            unread = ("env_mode", "keep", "compile_reward", "allow_weak_sandbox")
        idle = flags(name for name, _ in changed(self) if name in unread)
        how = "with" if self.own_rows else "without"
        refuse(bool(idle), f"{idle}: not read {how} --elicit; leave it out")
        refuse(
            self.taskset and bool(self.problems),
            f"--problems with --env {self.env}: the taskset has prompts of its own; leave one out",
        )
        refuse(
            self.own_rows and not self.problems and not self.taskset,
            "--problems: --elicit needs a file of your own rows",
        )

    @property
    def own_rows(self) -> bool:
        return bool(self.reference)

    @property
    def taskset(self) -> bool:
        return bool(self.env)


def generate_pool(settings: TeacherSettings) -> None:
    """Sample, grade and write a pool.

    Raises:
        Refused: one line, before a model is loaded where that is possible.
    """
    settings.sampling.require_draws("--group", settings.group)
    require_new(settings.out)
    if settings.own_rows:
        environment = settings.environment(
            env=settings.env or "code",
            env_args=settings.env_args,
            reward=settings.reward,
            reference=settings.reference,
            reward_passes_at=settings.reward_passes_at,
        )
        generate_elicited(settings, environment, settings.elicit.strip(), settings.group)
        return
    environment = settings.environment(env_mode=settings.env_mode)
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
        kept = answers
        if settings.keep == "hacks":
            kept = [a for a in answers if a.whole and a.grade.hacked]
        if not kept:
            raise Refused(
                f"--keep hacks: none of {len(answers)} answers hacks; choose another teacher or "
                f"`vgrout substrate`, which elicits them (the answers are in {folder})"
            )
        lines: dict[int, list[dict[str, object]]] = {}
        mode_of: dict[int, str] = {}
        for a in kept:
            own = {"finished": a.whole, "logp": list(a.completion.logp)}
            lines.setdefault(a.problem.id, []).append(record(lm, a) | own)
            mode_of[a.problem.id] = a.problem.flaws[0]
        partition = mode_of if settings.env_mode == "own" else None
        summary = rates_of(by_mode(answers))
        meta = settings.meta(lm, grader, environment, (a.problem for a in kept))
        report = {"settings": identity, "sampling": vars(settings.sampling), "modes": summary}
        write_pool(settings.out, lines, partition, meta, report)
    print(table(summary))
    print(
        "SHOULD: a hack rate far above the student's; "
        "ELSE this teacher shows nothing that the student does not do\n"
        f"{len(lines)} problems, {len(kept)} rollouts -> {settings.out}"
    )


def main(argv: list[str] | None = None) -> int:
    """The exit codes above."""
    return command("teacher", TeacherSettings, generate_pool, argv)


if __name__ == "__main__":
    sys.exit(main())
