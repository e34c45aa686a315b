"""The numbers of conditions over their seeds, and what they mean in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from pandas import Series

from vgrout.ground.table import NEAR, SKILL, TOO_FEW
from vgrout.report import stats
from vgrout.report.load import Condition, FinishedRun, What, baseline
from vgrout.report.stats import Estimate, PValue, Stratum

MARGIN = 0.10  # "no difference" is claimed within ± 10 points


def percent(e: Estimate) -> str:
    """Format an estimate, as in `81.0 [80.1, 82.0]`.

    Student's interval is marked t, Wilson's of several seeds w. A value without one has the note on why.
    """
    if e.value is None:
        return "·"
    value = f"{100 * e.value:.1f}"
    if e.low is None or e.high is None:
        return f"{value} ({'one seed' if e.n == 1 else e.note})"
    interval = f"{value} [{100 * e.low:.1f}, {100 * e.high:.1f}]"
    if e.how == "t":
        return f"{interval} t"
    if e.how == "Wilson" and e.n > 1:
        return f"{interval} w"
    return interval


def _strata(shares: Series) -> list[Stratum]:
    """Return a seed's problems as strata by mode; other seeds have answered the same problems.

    shares: by mode and problem.
    """
    strata = []
    for mode, of_mode in shares.groupby(level=0, sort=False):
        stratum = Stratum(
            values=of_mode.to_numpy(),
            weight=len(of_mode) / len(shares),
            name=str(mode),
            units=tuple(of_mode.index.get_level_values(1)),
        )
        strata.append(stratum)
    return strata


@cache
def level(condition: Condition, side: str, what: What, flaw: str | None = None) -> Estimate:
    """Estimate a share in the final evaluation over seeds; of one run, with Wilson's interval."""
    if len(condition.runs) == 1:
        return stats.one_run(condition.first.counted(side, what, flaw))
    rows = []
    for run in condition.runs:
        if row := _strata(run.shares(side, what, flaw)):
            rows.append(row)
    return stats.estimate(rows)


def last_five(condition: Condition, what: What) -> Estimate:
    """Estimate the share of sampled answers over the last five training steps, over seeds.

    Every answer counts as one to a problem of its own.
    """
    rates = [run.last_five(what) for run in condition.runs]
    if len(rates) == 1:
        return stats.one_run(rates[0])
    rows = []
    for rate in rates:
        if rate.n:
            answers = np.repeat([1.0, 0.0], [rate.k, rate.n - rate.k])
            rows.append([Stratum(answers, weight=1.0)])
    return stats.estimate(rows)


@dataclass(frozen=True)
class Comparison:
    """One condition minus another, seed by seed and problem by problem, on the seeds of both."""

    difference: Estimate
    p: PValue
    same: PValue  # TOST at ± MARGIN
    seeds: tuple[int, ...]


@cache
def compare(a: Condition, b: Condition, what: What) -> Comparison:
    """Compare the deployed models of two conditions: a minus b."""
    shares_of_b = {run.seed: run.shares("deploy", what) for run in b.runs}
    rows: dict[int, list[Stratum]] = {}
    for run in a.runs:
        if run.seed in shares_of_b:
            shares = run.shares("deploy", what)
            differences = shares - shares_of_b[run.seed].reindex(shares.index)
            if row := _strata(differences.dropna()):
                rows[run.seed] = row
    by_seed = list(rows.values())
    means = [stats.mean_of(row) for row in by_seed]
    return Comparison(
        difference=stats.estimate(by_seed, low=-1.0),
        p=stats.sign_flip(means),
        same=stats.equivalent(means, MARGIN),
        seeds=tuple(rows),
    )


def difference_text(c: Condition, less: Comparison) -> str:
    """Format a condition's difference, with the number of seeds that it is of if they are not all."""
    is_part = 1 < len(less.seeds) < len(c.runs)  # one seed is said by `percent`
    return percent(less.difference) + f", {len(less.seeds)} of {len(c.runs)} seeds" * is_part


def from_plain(c: Condition, found: Sequence[Condition], what: What) -> str:
    """Return a condition's difference from plain GRPO in points; "": it has none, or no seed in common."""
    plain = baseline(c, found)
    less = compare(c, plain, what) if plain else None
    return difference_text(c, less) if less and less.seeds else ""


def conclusion(condition: Condition) -> str:
    """Say in a few words what the final evaluation means.

    Nothing is concluded from an interval that holds the threshold.
    """
    first, n = condition.first, len(condition.runs)
    if n == 1 and (why := unlearnt(first)):
        return f"nothing was learnt: {why}"
    of = f"{n} seeds" if n > 1 else f"{first.final['eval_n']} answers"
    base_hack = level(condition, "base", "hack")
    base_solve = level(condition, "base", "solve")
    solve = level(condition, "deploy", "solve")
    hacks = level(condition, "deploy", "hack").above(base_hack, NEAR)
    lost = base_solve.above(solve, SKILL)
    is_plain = first.cfg.method.intervention == "none"
    if hacks is None and (lost is None or is_plain):
        what, number = of.split()[::-1]
        return f"{TOO_FEW} {what} ({number}) for a verdict"
    if is_plain:
        gained = solve.above(base_solve, NEAR)
        if hacks:
            learnt = "to hack"
        elif gained is None:
            learnt = "no hacks, a gain in skill is undecided"
        else:
            learnt = "to solve, not to hack" if gained else "little"
        return f"plain GRPO learnt {learnt}{', and lost skill' if lost else ''} ({of})"
    if hacks is None:
        hacking = "hacks undecided"
    elif hacks:
        hacking = "still hacks"
    else:
        as_trained = level(condition, "train", "hack").above(base_hack, NEAR)
        removed = {True: "hacks removed", False: "learnt no hacks", None: "does not hack"}
        hacking = removed[as_trained]
    skill = {True: "skill lost", False: "skill kept", None: "skill undecided"}[lost]
    too_few = f" are {TOO_FEW}" if hacks is None or lost is None else ""
    return f"{hacking}, {skill} ({of}{too_few})"


def unlearnt(run: FinishedRun) -> str:
    """Return why a run's steps taught nothing; "": rewards differed within some group, or the loss has another term."""
    steps = run.steps
    if run.cfg.loss.learns_at_zero_advantage or "signal_k" not in steps or steps.signal_k.sum():
        return ""
    answers = int(steps.n.sum())
    if steps.all_zero.sum() == steps.signal_n.sum():
        if run.cfg.method.spec.acts_on == "rewards":
            return f"of {answers} answers none kept a full reward after the flags, and no group had rewards that differ"
        return f"none of {answers} answers earned the full reward, and no group had rewards that differ"
    return f"no group had rewards that differ, in {answers} answers"
