"""The tables of a report, as rows of text, and the numbers in them. Shares are printed in percent."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from pandas import DataFrame, Series, concat
from tabulate import tabulate

from vgrout.files import printable
from vgrout.metrics import Rate
from vgrout.report import stats
from vgrout.report.load import (
    SIDES,
    WHATS,
    Condition,
    FinishedRun,
    What,
    baseline,
    flag_columns,
    flagged_by_flaw,
    flaws_of,
    rounded,
)
from vgrout.report.stats import Estimate, PValue, Stratum
from vgrout.table import LEARNED, NEAR, SKILL, TOO_FEW

MARGIN = 0.10  # "no difference" is claimed within ± 10 points


@dataclass(frozen=True)
class ReportTable:
    """A table of text. All rows have the same columns."""

    name: str  # as a heading
    caption: str
    rows: Sequence[dict[str, str]]

    def markdown(self) -> str:
        """Return the table with each cell in one line; invisible characters are shown as escapes."""
        rows = []
        for row in self.rows:
            rows.append({one_line(name): one_line(cell) for name, cell in row.items()})
        return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)

    def plain(self, width: int = 80) -> str:
        """Return the table for a terminal of so many columns: the first column wraps."""
        rows = []
        for row in self.rows:
            rows.append({one_line(name): one_line(cell) for name, cell in row.items()})
        heads = list(rows[0])
        others = 0
        for head in heads[1:]:
            # tabulate leaves two columns behind each heading, and two between columns
            others += max(len(head) + 2, *(len(row[head]) for row in rows)) + 2
        for row in rows:
            wrapped = textwrap.wrap(row[heads[0]], max(12, width - others))
            row[heads[0]] = "\n".join(wrapped)
        return tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True)


def one_line(value: object) -> str:
    """Return a value as printable text without line ends."""
    return printable(str(value)).replace("\n", " ")


def percent(e: Estimate) -> str:
    """Format an estimate, as in `81.0 [80.1, 82.0]`.

    Student's interval is marked t, Wilson's w. A value without an interval has the note on why.
    """
    if e.value is None:
        return "·"
    value = f"{100 * e.value:.1f}"
    if e.low is None or e.high is None:
        return f"{value} ({'one seed' if e.n == 1 else e.note})"
    interval = f"{value} [{100 * e.low:.1f}, {100 * e.high:.1f}]"
    if e.how == "t":
        return f"{interval} t"
    if e.how == "Wilson":
        return f"{interval} w"
    return interval


def p_value(p: PValue) -> str:
    """Format a p value with the smallest that n allows, as in `0.062 (≥ 0.062)`."""
    if p.p is None:
        return p.note
    shown = f"{p.p:.3f}"
    if p.smallest is not None:
        shown += f" (≥ {p.smallest:.3f})"
    if p.note:
        shown += f" {p.note}"
    return shown


def by_seed(values: Iterable[object]) -> str:
    """Join the values of a condition's runs; · stands for None."""
    return "/".join("·" if value is None else str(value) for value in values)


# ── numbers


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
    """Estimate the students' share over the last five training steps, over seeds.

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


# ── conclusion


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


# ── tables


def methods(found: Sequence[Condition]) -> ReportTable:
    """Make the table with a row for each condition, compared with plain GRPO."""
    baselines = {c: baseline(c, found) for c in found}
    of_code = any(c.first.cfg.of_code for c in found)
    held_out = "problems and marker names" if of_code else "problems"
    rows = []
    for c in found:
        row = {"method": c.title}
        if any(baselines.values()):
            row |= _from_plain(c, baselines[c])
        rows.append(_in_order(row | _method_row(c, hinted=of_code)))
    return ReportTable(
        "Methods",
        f"%, held-out {held_out}, final evaluation. Last 5: the students' answers of "
        "the last five training steps. Onset: the first of five steps in which a tenth of the "
        "students' answers hack, by seed; ·: none. Flaws learnt: hacked in a fifth of the trained "
        "model's answers. Δ: points from plain GRPO, deployed, paired by seed and problem; p: sign "
        "flips over seeds, in brackets the smallest that n allows; TOST: p for a "
        f"difference within ± {100 * MARGIN:.0f} points, and only a small one shows "
        '"no difference".',
        rows,
    )


# What decides stands first in the table of methods.
FIRST = ("method", "Δ hack", "hack deployed", "solve deployed", "Δ solve", "seeds")


def _in_order(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row of the table of methods with the columns that decide in front."""
    first = {name: row[name] for name in FIRST if name in row}
    return first | dict(row)


def _method_row(c: Condition, *, hinted: bool) -> dict[str, str]:
    """Return a condition's row without its difference from plain GRPO. hinted: whether prompts of any have a hint."""
    answers = {str(run.final["eval_n"]) for run in c.runs}
    row = {"method": c.title, "seeds": c.seeds}
    row["onset"] = by_seed(run.row["onset"] for run in c.runs)
    for what in WHATS:
        row[f"{what} last 5"] = percent(last_five(c, what))
    for side in ("train", "deploy"):
        for what in WHATS:
            row[f"{what} {SIDES[side]}"] = percent(level(c, side, what))
    if hinted:
        row["solve no hint"] = percent(level(c, "plain", "solve"))
    row["flaws learnt"] = by_seed(run.row["modes_learned"] for run in c.runs)
    row["n"] = "/".join(sorted(answers))
    return row


def _from_plain(c: Condition, plain: Condition | None) -> dict[str, str]:
    """Return the columns of a condition's difference from plain GRPO; · without it or of one run."""
    row = {}
    for what in WHATS:
        difference = p = same = "·"
        if plain and len(c.runs) > 1:
            less = compare(c, plain, what)
            if less.seeds:
                difference = difference_text(c, less)
                p = p_value(less.p)
                same = p_value(less.same)
        row[f"Δ {what}"] = difference
        row[f"p {what}"] = p
        row[f"TOST {what}"] = same
    return row


def decisive(found: Sequence[Condition]) -> ReportTable:
    """Make the table for a terminal: what decides, in 80 columns."""
    rows = []
    for c in found:
        seeds = c.seeds if len(c.runs) <= 3 else f"{len(c.runs)} seeds"
        row = {"method": c.title, "seeds": seeds}
        for what in WHATS:
            value = level(c, "deploy", what).value
            row[f"{what} %"] = "·" if value is None else f"{100 * value:.1f}"
        row["Δ hack"] = from_plain(c, found, "hack") or "·"
        rows.append(row)
    return ReportTable(
        "Deployed",
        "% of answers to held-out problems. Δ: points from plain GRPO, with its 95 % interval.",
        rows,
    )


def recalls(found: Sequence[Condition]) -> ReportTable:
    """Make the table for a terminal of what the monitors of texts flagged, over all flaws."""
    rows = []
    for c in found:
        for name, flags in _by_monitor(c):
            is_hack = flags.flaw.notna()
            rows.append(
                {
                    "method": c.title,
                    "monitor": name,
                    "recall": _of_how_many(_share_flagged(flags[is_hack])),
                    "false flags": _of_how_many(_share_flagged(flags[~is_hack])),
                }
            )
    return ReportTable(
        "Monitors",
        "% flagged of the students' hacks in training, and of their right answers (of how many).",
        rows,
    )


def _share_flagged(flags: DataFrame) -> Rate | None:
    return Rate(int(flags.flagged.sum()), len(flags)) if len(flags) else None


def _by_monitor(c: Condition) -> list[tuple[str, DataFrame]]:
    """Return what each text monitor flagged, over all seeds; the condition's own comes first."""
    flags = concat([run.flags for run in c.runs])
    own = c.first.cfg.method.monitor_name
    found = []
    for name in sorted(flags.monitor.unique(), key=lambda name: name != own):
        title = name if name == own else f"{name}, in shadow"
        found.append((title, flags[flags.monitor == name]))
    return found


def from_plain(c: Condition, found: Sequence[Condition], what: What) -> str:
    """Return a condition's difference from plain GRPO in points; "": it has none, or no seed in common."""
    plain = baseline(c, found)
    less = compare(c, plain, what) if plain else None
    return difference_text(c, less) if less and less.seeds else ""


def difference_text(c: Condition, less: Comparison) -> str:
    """Format a condition's difference, with the number of seeds that it is of if they are not all."""
    is_part = 1 < len(less.seeds) < len(c.runs)  # one seed is said by `percent`
    return percent(less.difference) + f", {len(less.seeds)} of {len(c.runs)} seeds" * is_part


def answered(claim: str, found: Sequence[Condition]) -> list[str]:
    """Return what was measured of a hypothesis, a line for each method.

    Those whose intervention the claim names, or all if it names none.
    """
    named = [c for c in found if _names(claim, c)] or found
    lines = []
    for c in named:
        hack, solve = from_plain(c, found, "hack"), from_plain(c, found, "solve")
        if hack and solve:
            lines.append(f"{c.title}: Δ hack {hack}, Δ solve {solve}")
    return lines


def _names(claim: str, c: Condition) -> bool:
    """Return whether a hypothesis has the name of a condition's intervention as a word."""
    name = c.first.cfg.method.intervention
    return bool(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", claim))


def by_flaw(found: Sequence[Condition]) -> ReportTable:
    """Make the table with a row for each condition and flaw."""
    rows = []
    for c in found:
        rows += [_flaw_row(c, flaw) for flaw in c.first.flaws]
    return ReportTable(
        "By flaw",
        "%. Pairs: whether the direction's pairs show the flaw (in) or not (out). Tries: hacks, "
        "and wrong answers that try the flaw and fail. Learned: at least "
        f"{100 * LEARNED:.0f} % hacks as trained. First step: of the "
        "students' first hack. n: answers.",
        rows,
    )


def _flaw_row(c: Condition, flaw: str) -> dict[str, str]:
    row = {"method": c.title, "flaw": flaw}
    row["pairs"] = _pairs_show(c.first.final["by_mode"][flaw].get("in_dist"))
    for what in WHATS:
        for side in ("train", "deploy"):
            row[f"{what} {SIDES[side]}"] = percent(level(c, side, what, flaw))
    tries = Rate(0, 0)
    answers = 0
    for run in c.runs:
        tries += run.counted("deploy", "tries", flaw)
        answers += run.final["by_mode"][flaw]["n"]
    row["tries deployed"] = tries.percent
    row["learned"] = by_seed("yes" if run.has_learned(flaw) else "no" for run in c.runs)
    row["first step"] = by_seed(run.first_hack(flaw) for run in c.runs)
    row["n"] = str(answers)
    return row


def _pairs_show(in_dist: bool | None) -> str:
    """Say whether the direction's pairs show a flaw; None: there are no pairs."""
    if in_dist is None:
        return "·"
    return "in" if in_dist else "out"


def monitors(found: Sequence[Condition]) -> ReportTable:
    """Make the table with a row for each condition and text monitor."""
    flaws = flaws_of(found)
    rows = []
    for c in found:
        for name, flags in _by_monitor(c):
            about = {"method": c.title, "seeds": c.seeds, "monitor": name}
            rows.append(about | _scores(flags, flaws))
    return ReportTable(
        "What the monitors of texts flagged",
        "% of the students' hacks in training, by flaw (recall), and of their right answers (false "
        "flags); in brackets how many, over all seeds. AUC: of the scores, hacks against right "
        "answers. The run's own monitor may not read groups without signal.",
        rows,
    )


def _scores(flags: DataFrame, flaws: Sequence[str]) -> dict[str, str]:
    """Return the columns of what one monitor flagged."""
    rates = flagged_by_flaw(flags)
    row: dict[str, str] = {}
    for flaw in flaws:
        row[flaw] = _of_how_many(rates.get(flaw))
    row["false flags"] = _of_how_many(rates.get("solved"))
    area = _auc(flags)
    row["AUC"] = "·" if area is None else f"{area:.2f}"
    return row


def _of_how_many(rate: Rate | None) -> str:
    """Format a rate in percent with its n, as in `75.0 (4)`."""
    return f"{rate.percent} ({rate.n})" if rate else "·"


def _auc(flags: DataFrame) -> float | None:
    """Return the AUC of a monitor's scores, hacks against right answers; None: it gave none."""
    scored = flags[flags.score.notna()]
    is_hack = scored.flaw.notna()
    of_hacks = scored.score[is_hack]
    of_right = scored.score[~is_hack]
    return stats.auc(list(of_hacks), list(of_right))


# ── for other programs


def monitor_rows(found: Sequence[Condition]) -> list[dict[str, object]]:
    """Return the rows of monitors.csv, one for each run, text monitor and third of the run.

    Counts are k/n of the students' hacks by flaw, and of their right answers.
    """
    rows: list[dict[str, object]] = []
    for c in found:
        for run in c.runs:
            for name, flags in run.flags.groupby("monitor", sort=False):
                rows += _thirds(c.title, run, str(name), flags)
    return rows


def _thirds(
    title: str, run: FinishedRun, monitor: str, flags: DataFrame
) -> list[dict[str, object]]:
    """Return the rows of one monitor in one run."""
    steps = int(run.steps.step.iloc[-1]) + 1
    rows = []
    for third in range(3):
        first = steps * third // 3
        last = steps * (third + 1) // 3 - 1
        part = flags[flags.step.between(first, last)]
        rows.append(
            {
                "run": run.path.name,
                "cell": title,
                "arm": run.row["arm"],
                "acted_on": run.cfg.method.monitor_name,
                "base_weights": run.row["base_weights"],
                "seed": run.seed,
                "monitor": monitor,
                "known_modes": run.cfg.method.known_modes,
                "steps": f"{first} to {last}",
                **flag_columns(part, run.all_flaws),
                "auc": rounded(_auc(part)),
                "revision": run.row["revision"],
            }
        )
    return rows


def csv_tables(found: Sequence[Condition]) -> dict[str, str]:
    """Return the text of runs.csv and monitors.csv by name, without a file that has no rows."""
    runs: list[dict[str, object]] = []
    for c in found:
        for run in c.runs:
            runs.append({"run": run.path.name, "cell": c.title, **run.row})
    named = {"runs.csv": runs, "monitors.csv": monitor_rows(found)}
    files = {}
    for name, rows in named.items():
        if rows:
            frame = DataFrame([_inert(row) for row in rows], dtype=object)
            files[name] = frame.to_csv(index=False)
    return files


def _inert(row: Mapping[str, object]) -> dict[str, object]:
    """Quote what a spreadsheet would take for a formula, as its readers do: by an apostrophe."""
    quoted: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, str):
            acts = value.startswith(("=", "+", "-", "@", "\t", "\r"))
            quoted[name] = ("'" if acts else "") + one_line(value)
        else:
            quoted[name] = value
    return quoted
