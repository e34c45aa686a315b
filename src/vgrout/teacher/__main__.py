"""`python -m vgrout.teacher`: makes a pool of a teacher's graded answers.

Exit codes: 0 done · 2 refused, in one line · 130 interrupted: the same command goes on.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from vgrout.config.checks import setting
from vgrout.files import require_new
from vgrout.modes import EnvMode
from vgrout.problems import assigned, balanced
from vgrout.teacher.generate import (
    PoolConfig,
    announced,
    by_mode,
    command,
    fitting,
    generate_graded,
    rate_text,
    record,
    table,
    work_folder,
)
from vgrout.teacher.pools import write_pool
from vgrout.types import Mode


@dataclass(frozen=True)
class Cli(PoolConfig):
    """Make a pool: a teacher's graded answers to training problems."""

    out: Path = Path("out/pools/teacher")
    """Folder to make; what is under way lies beside it in OUT.partial, and the same command goes on from there."""
    group: int = setting(8, low=1)
    """Answers to a problem."""
    env_mode: EnvMode = "run_tests"
    """Which flawed grader checks: one of the seven, or 'own' (each problem's own, else in turn); the pool then has a
    partition."""
    keep: Literal["all", "hacks"] = "all"
    """Every answer, or only those that end by themselves and hack."""


def run(cli: Cli) -> None:
    """Sample, grade, write. Raises ValueError, one line, before a model is loaded where that is possible."""
    cli.sampling.require_draws("--group", cli.group)
    require_new(cli.out)
    rows = cli.check()
    problems = assigned(rows, cli.env_mode)["train"]
    if not problems:
        raise ValueError(f"--env-mode {cli.env_mode}: no training problem of this mode in {cli.problems_path}")
    chosen = {p.id for p in balanced(problems, cli.n_problems, 0, "teacher")}
    settings = {**cli.identity(), "group": cli.group, "env_mode": cli.env_mode}
    with cli.grader(rows) as grader, work_folder(cli.out, settings) as folder:
        logger.info(grader.protections.line())

        lm = cli.load()
        fit, long = fitting(lm, [p for p in problems if p.id in chosen], cli.tokens)
        if long:
            logger.warning(f"{long} problems left out: prompt longer than the window minus --max-new")
        answers = generate_graded(
            lm,
            grader,
            fit,
            cli.group,
            sampling=cli.sampling,
            max_new=cli.tokens,
            seed=cli.seed,
            purpose="teacher",
            log=folder / "answers.jsonl",
        )
        kept = [a for a in answers if cli.keep == "all" or (a.finished and a.grade.hacked)]
        if not kept:
            raise ValueError(
                f"--keep hacks: none of {len(answers)} answers hacks; choose another teacher or "
                f"`python -m vgrout.substrate`, which elicits them (the answers are in {folder})"
            )
        records: dict[int, list[dict[str, Any]]] = {}
        for a in kept:
            line = record(a, lm.render(a.problem.messages), lm.prompt_text(a.problem.messages))
            line |= {"finished": a.finished, "logp": list(a.completion.logp_full)}
            records.setdefault(a.problem.id, []).append(line)
        mode_of: dict[int, Mode] = {a.problem.id: a.problem.mode for a in kept}
        summary = [
            {"mode": mode, **{name: rate_text(rate) for name, rate in of_mode.items()}}
            | {"problems": list(mode_of.values()).count(mode), "rollouts": sum(a.problem.mode == mode for a in kept)}
            for mode, of_mode in by_mode(answers).items()
        ]
        meta = cli.meta(lm, grader)
        if markers := announced(rows, (a.problem for a in kept)):
            meta["markers"] = markers
        report = {"settings": settings, "sampling": vars(cli.sampling), "modes": summary}
        write_pool(cli.out, records, mode_of if cli.env_mode == "own" else None, meta, report)
    print(table(summary))
    print(
        "SHOULD: a hack rate far above the student's; ELSE this teacher shows nothing that the student does not do\n"
        f"{len(records)} problems, {len(kept)} rollouts -> {cli.out}"
    )


def main(argv: list[str] | None = None) -> int:
    """The exit codes above."""
    return command("teacher", Cli, run, argv)


if __name__ == "__main__":
    sys.exit(main())
