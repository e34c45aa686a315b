"""The last lines of a run: its model untrained, as trained and as deployed; what that means, in words; and where to
read on."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from vgrout.cli import command
from vgrout.config.presets import recorded
from vgrout.config.run import Config
from vgrout.data import Ungraded
from vgrout.embedded import PLAIN_GRPO, PLAIN_GRPO_SEEDS
from vgrout.metrics import SIDES, Final
from vgrout.table import TOO_FEW, StepRow

ENOUGH = 384  # answers, as in `mini`: a rate near 2 % is then told from one near 5 %
MORE = 4  # times the answers, for about half the width of an interval


def verdict_line(cfg: Config, means: str) -> str:
    """What the run's numbers mean. means: the conclusion of its report."""
    control = cfg.method.control_name
    return f"verdict: {means}" + ("" if control == "none" else f", under --control {control}")


def dropped_lines(cfg: Config, rows: Sequence[StepRow], final: Final) -> list[str]:
    """How much could not be graded, in training and in the final evaluation; []: everything was."""
    lines: list[str] = []
    groups = sum(row.dropped for row in rows)
    if groups:
        of = len(rows) * cfg.scale.prompts_per_step
        lines.append(
            f"dropped: {groups:,} of {of:,} groups were not graded and not learnt from; steps.jsonl says why"
        )
    # two sides may share one list
    lists = {id(answers): answers for answers in final.answers.values()}
    answers = [answer for given in lists.values() for answer in given]
    ungraded = sum(isinstance(answer.grade, Ungraded) for answer in answers)
    if ungraded:
        lines.append(
            f"dropped: {ungraded:,} of {len(answers):,} answers of the final evaluation were not graded"
        )
    return lines


def last_lines(
    cfg: Config, rows: Sequence[StepRow], final: Final, means: str, run: Path, held_out: int
) -> list[str]:
    """The lines.

    Where earlier runs of plain GRPO in this very setting are on record, one more says how they ended;
    where there were too few answers for a verdict, one says how to have more.

    means: the conclusion of the run's report. held_out: test problems that there are.
    """
    lines: list[str] = []
    for name, side in final.sides.items():
        if name != "plain":
            hack, solve = side.hack.percent, side.solve.percent
            lines.append(f"{SIDES[name].title:<11} {hack:>5} % hack  {solve:>5} % solve")
    lines.append(verdict_line(cfg, means))
    lines += dropped_lines(cfg, rows, final)
    if recorded(cfg):
        (hack, *_), (solve, *_) = PLAIN_GRPO["hack"], PLAIN_GRPO["solve"]
        lines.append(
            f"for comparison: plain GRPO ended at {hack} % hack, {solve} % solve in {PLAIN_GRPO_SEEDS} earlier runs"
        )
    folder = shlex.quote(str(run))
    lines.append(f"more: {run / 'summary.md'} · dynamics.png · {command(f'report {folder}')}")
    if TOO_FEW in means and cfg.env.environment == "code":
        flags = _more_answers(cfg, held_out)
        if cfg.env.reward:
            flags += f" --reward={shlex.quote(cfg.env.reward)}"
        lines.append(f"more answers: {command(f'evaluate {folder}{flags}')}")
    return lines


def _more_answers(cfg: Config, held_out: int) -> str:
    """Flags of `vgrout evaluate` for MORE times the answers, and ENOUGH at the least.

    More problems come first: a second answer to a problem tells less than one to another problem.
    """
    asked, samples = cfg.eval.final_n_prompts, cfg.eval.final_samples
    answers = max(ENOUGH, MORE * asked * samples)
    problems = max(1, min(held_out, max(asked, math.ceil(answers / samples))))
    samples = max(samples, math.ceil(answers / problems))
    return f" --n-prompts {problems}" * (problems > asked) + f" --samples {samples}"
