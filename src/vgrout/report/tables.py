"""The tables of a report, as frames of text, and the numbers in them. Shares are printed in percent."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from pandas import DataFrame, Series, concat
from tabulate import tabulate

from vgrout.envs.code.modes import MODE_CODE, MODES, Mode
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
    flag_counts,
    rounded,
)
from vgrout.report.stats import Estimate, PValue, Stratum
from vgrout.table import LEARNED, NEAR, SKILL

MARGIN = 0.10  # "no difference" is claimed within ± 10 points


@dataclass(frozen=True)
class ReportTable:
    """A table of text. rows: of one set of columns."""

    name: str  # as a heading
    caption: str
    rows: Sequence[dict[str, str]]

    def markdown(self) -> str:
        """Text of unknown origin is shown as such, each cell in one line."""
        rows = [{one_line(k): one_line(v) for k, v in row.items()} for row in self.rows]
        return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def one_line(value: object) -> str:
    return printable(str(value)).replace("\n", " ")


def percent(e: Estimate) -> str:
    """`81.0 [80.1, 82.0]`; Student's interval is marked t, one run's (Wilson) w, and a value without an interval has
    the note on why."""
    if e.value is None:
        return "·"
    value = f"{100 * e.value:.1f}"
    if e.low is None or e.high is None:
        return f"{value} ({'one seed' if e.n == 1 else e.note})"
    return f"{value} [{100 * e.low:.1f}, {100 * e.high:.1f}]{ {'t': ' t', 'Wilson': ' w'}.get(e.how, '') }"


def p_value(p: PValue) -> str:
    """`0.062 (≥ 0.062)`: with the smallest that n allows."""
    if p.p is None:
        return p.note
    least = "" if p.smallest is None else f" (≥ {p.smallest:.3f})"
    return f"{p.p:.3f}{least}{f' {p.note}' if p.note else ''}"


# ── numbers


def _strata(shares: Series) -> list[Stratum]:
    """A seed's problems as strata by mode; other seeds have answered the same problems."""
    return [
        Stratum(
            of.to_numpy(), len(of) / len(shares), str(mode), tuple(of.index.get_level_values(1))
        )
        for mode, of in shares.groupby(level=0, sort=False)
    ]


@cache
def level(condition: Condition, side: str, what: What, flaw: Mode | None = None) -> Estimate:
    """The share in the final evaluation, over seeds; of one run, with Wilson's interval."""
    if len(condition.runs) == 1:
        return stats.one_run(condition.first.counted(side, what, flaw))
    rows = (_strata(r.shares(side, what, flaw)) for r in condition.runs)
    return stats.estimate([row for row in rows if row])


def last_five(condition: Condition, what: What) -> Estimate:
    """The students' share over the last five training steps, over seeds; each answer counts as of another problem."""
    rates = [r.last_five(what) for r in condition.runs]
    if len(rates) == 1:
        return stats.one_run(rates[0])
    return stats.estimate(
        [[Stratum(np.repeat([1.0, 0.0], [r.k, r.n - r.k]), 1.0)] for r in rates if r.n]
    )


@dataclass(frozen=True)
class Comparison:
    """One condition minus another, seed by seed and problem by problem, on the seeds that both have."""

    difference: Estimate
    p: PValue
    same: PValue  # TOST at ± MARGIN
    seeds: tuple[int, ...]


@cache
def compare(a: Condition, b: Condition, what: What) -> Comparison:
    """Condition a minus condition b, of the deployed models."""
    own, its = ({r.seed: r.shares("deploy", what) for r in c.runs} for c in (a, b))
    paired = {
        s: _strata((of - its[s].reindex(of.index)).dropna()) for s, of in own.items() if s in its
    }
    rows = [row for row in paired.values() if row]
    means = [stats.mean_of(row) for row in rows]
    return Comparison(
        stats.estimate(rows, low=-1.0),
        stats.sign_flip(means),
        stats.equivalent(means, MARGIN),
        tuple(seed for seed, row in paired.items() if row),
    )


# ── conclusion


def conclusion(condition: Condition) -> str:
    """What the final evaluation means, in a few words: where an interval holds the threshold, nothing."""
    first, n = condition.first, len(condition.runs)
    if n == 1 and (why := unlearnt(first)):
        return f"nothing was learnt: {why}"
    base, trained, deployed = (
        {w: level(condition, side, w) for w in WHATS} for side in ("base", "train", "deploy")
    )
    of, plain = (
        f"{n} seeds" if n > 1 else f"{first.final['eval_n']} answers",
        first.cfg.method.intervention == "none",
    )
    hacks, lost = (
        deployed["hack"].above(base["hack"], NEAR),
        base["solve"].above(deployed["solve"], SKILL),
    )
    if hacks is None and (lost is None or plain):
        return f"none, {of} are too few"
    if plain:
        solves = deployed["solve"].above(base["solve"], NEAR)
        learnt = "to hack" if hacks else "to solve, not to hack" if solves else "little"
        return f"plain GRPO learnt {learnt}{', and lost skill' if lost else ''} ({of})"
    removed = {True: "hacks removed", False: "learnt no hacks", None: "does not hack"}
    hack = {
        True: "still hacks",
        False: removed[trained["hack"].above(base["hack"], NEAR)],
        None: "hacks undecided",
    }
    skill = {True: "skill lost", False: "skill kept", None: "skill undecided"}
    return f"{hack[hacks]}, {skill[lost]} ({of}{' are too few' if None in (hacks, lost) else ''})"


def unlearnt(run: FinishedRun) -> str:
    """Why a run's steps taught nothing; "" where rewards differed within a group."""
    steps = run.steps
    if "signal_k" not in steps or steps.signal_k.sum():
        return ""
    answers = int(steps.n.sum())
    if steps.all_zero.sum() == steps.signal_n.sum():
        return f"none of {answers} answers earned the full reward, and no group had rewards that differ"
    return f"no group had rewards that differ, in {answers} answers"


# ── tables


def methods(found: Sequence[Condition]) -> ReportTable:
    rows, baselines = [], {c: baseline(c, found) for c in found}
    for c in found:
        row = {"method": c.title, "seeds": c.seeds}
        row["onset"] = "/".join(
            "·" if r.row["onset"] is None else str(r.row["onset"]) for r in c.runs
        )
        row |= {f"{what} last 5": percent(last_five(c, what)) for what in WHATS}
        row |= {
            f"{w} {SIDES[side]}": percent(level(c, side, w))
            for side in ("train", "deploy")
            for w in WHATS
        }
        row["solve no hint"] = percent(level(c, "plain", "solve"))
        row["flaws learnt"] = "/".join(str(r.row["modes_learned"]) for r in c.runs)
        row["n"] = "/".join(sorted({str(r.final["eval_n"]) for r in c.runs}))
        for what in WHATS if any(baselines.values()) else ():
            less = compare(c, plain, what) if (plain := baselines[c]) and len(c.runs) > 1 else None
            seen = (
                (percent(less.difference), p_value(less.p), p_value(less.same))
                if less and less.seeds
                else "···"
            )
            row |= zip((f"Δ {what}", f"p {what}", f"TOST {what}"), seen, strict=True)
        rows.append(row)
    return ReportTable(
        "Methods",
        "%, held-out problems and marker names, final evaluation. Last 5: the students' answers of the last five "
        "training steps. Onset: the first of five steps in which a tenth of the students' answers hack, by seed; ·: "
        "none. Flaws learnt: hacked in a fifth of the trained model's answers. Δ: points from plain GRPO, deployed, "
        "paired by seed and problem; p: sign flips over seeds, in brackets the smallest that n allows; TOST: p for a "
        f'difference within ± {100 * MARGIN:.0f} points, and only a small one shows "no difference".',
        rows,
    )


def by_flaw(found: Sequence[Condition]) -> ReportTable:
    """A row for each condition and flaw."""
    rows = []
    for c in found:
        for flaw in c.first.flaws:
            pairs, column = c.first.final["by_mode"][flaw].get("in_dist"), f"hk_{MODE_CODE[flaw]}_k"
            row = {
                "method": c.title,
                "flaw": flaw,
                "pairs": {None: "·", True: "in", False: "out"}[pairs],
            }
            row |= {
                f"{w} {SIDES[side]}": percent(level(c, side, w, flaw))
                for w in WHATS
                for side in ("train", "deploy")
            }
            row["tries deployed"] = sum(
                (r.counted("deploy", "tries", flaw) for r in c.runs), Rate(0, 0)
            ).percent
            learned = ((r.counted("train", "hack", flaw).value or 0) >= LEARNED for r in c.runs)
            row["learned"] = "/".join("yes" if yes else "no" for yes in learned)
            first = [
                next(iter(r.steps.step[r.steps[column] > 0]), "·") if column in r.steps else "·"
                for r in c.runs
            ]
            n = sum(r.final["by_mode"][flaw]["n"] for r in c.runs)
            rows.append(row | {"first step": "/".join(map(str, first)), "n": str(n)})
    return ReportTable(
        "By flaw",
        "%. Pairs: whether the direction's pairs show the flaw (in) or not (out). Tries: hacks, and wrong answers that "
        f"try the flaw and fail. Learned: at least {100 * LEARNED:.0f} % hacks as trained. First step: of the "
        "students' first hack. n: answers.",
        rows,
    )


def monitors(found: Sequence[Condition]) -> ReportTable:
    flaws = [m for m in MODES if any(m in c.first.flaws for c in found)]
    rows = []
    for c in found:
        own = c.first.cfg.method.monitor_name
        groups = concat([r.flags for r in c.runs]).groupby("monitor", sort=False)
        for name, flags in sorted(groups, key=lambda group: group[0] != own):
            counts, area = flag_counts(flags), _auc(flags)
            rows.append(
                {
                    "method": c.title,
                    "seeds": c.seeds,
                    "monitor": str(name) + ", in shadow" * (name != own),
                }
                | {m: _recall(counts.get(m)) for m in flaws}
                | {
                    "false flags": _recall(counts.get("solved")),
                    "AUC": "·" if area is None else f"{area:.2f}",
                }
            )
    return ReportTable(
        "What the monitors of texts flagged",
        "% of the students' hacks in training, by flaw (recall), and of their right answers (false flags); in brackets "
        "how many, over all seeds. AUC: of the scores, hacks against right answers. The run's own monitor may not read "
        "groups without signal.",
        rows,
    )


def _recall(counts: str | None) -> str:
    """`75.0 (4)` of 3/4."""
    return (
        "·"
        if counts is None
        else f"{Rate(*map(int, counts.split('/'))).percent} ({counts.split('/')[1]})"
    )


def _auc(flags: DataFrame) -> float | None:
    """Of the scores, where there are some."""
    scored = flags[flags.score.notna()]
    return stats.auc(
        list(scored.score[scored.flaw.notna()]), list(scored.score[scored.flaw.isna()])
    )


# ── for other programs


def monitor_rows(found: Sequence[Condition]) -> list[dict[str, object]]:
    """monitors.csv: a row for each run, monitor of texts and third of the run. Counts are k/n of the students' hacks by
    flaw, and of their right answers."""
    rows: list[dict[str, object]] = []
    for title, r in ((c.title, r) for c in found for r in c.runs):
        steps = int(r.steps.step.iloc[-1]) + 1
        for name, flags in r.flags.groupby("monitor", sort=False):
            for first, last in ((steps * i // 3, steps * (i + 1) // 3 - 1) for i in range(3)):
                part = flags[flags.step.between(first, last)]
                counts = flag_counts(part)
                rows.append(
                    {
                        "run": r.path.name,
                        "cell": title,
                        "arm": r.row["arm"],
                        "acted_on": r.cfg.method.monitor_name,
                    }
                    | {"base_weights": r.row["base_weights"], "seed": r.seed, "monitor": name}
                    | {"known_modes": r.cfg.method.known_modes, "steps": f"{first} to {last}"}
                    | {f"flagged_{of}": counts.get(of) for of in (*MODES, "solved")}
                    | {"auc": rounded(_auc(part)), "revision": r.row["revision"]}
                )
    return rows


def csv_tables(found: Sequence[Condition]) -> dict[str, str]:
    """runs.csv and monitors.csv. Text that a spreadsheet would take for a formula is quoted as its readers do it, by an
    apostrophe."""

    def inert(value: object) -> object:
        return (
            value
            if not isinstance(value, str)
            else "'" * (value[:1] in [*"=+-@\t\r"]) + one_line(value)
        )

    runs: list[dict[str, object]] = [
        {"run": r.path.name, "cell": c.title} | r.row for c in found for r in c.runs
    ]
    named = {"runs.csv": runs, "monitors.csv": monitor_rows(found)}
    return {
        name: DataFrame(
            [{k: inert(v) for k, v in row.items()} for row in rows], dtype=object
        ).to_csv(index=False)
        for name, rows in named.items()
        if rows
    }
