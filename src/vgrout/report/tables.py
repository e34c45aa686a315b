"""The tables of a report as rows of text, with shares in percent; and for other programs as CSV, with fractions."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pandas import DataFrame, concat

from vgrout.ground.io import one_line, printable
from vgrout.ground.metrics import Rate
from vgrout.ground.table import LEARNED, markdown
from vgrout.report import stats
from vgrout.report.conclusions import (
    MARGIN,
    compare,
    difference_text,
    last_five,
    level,
    percent,
)
from vgrout.report.load import (
    SIDES,
    WHATS,
    Condition,
    FinishedRun,
    baseline,
    flaws_of,
    unusual_settings,
)
from vgrout.report.stats import PValue, wilson

# What decides stands first in the table of methods.
FIRST = ("method", "Δ hack", "hack deployed", "solve deployed", "Δ solve", "seeds")


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
            rows.append({shown_line(name): shown_line(cell) for name, cell in row.items()})
        return markdown(rows)


def shown_line(value: object) -> str:
    """Return a value as printable text in one line."""
    return printable(one_line(value))


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


# ── methods


def methods(found: Sequence[Condition]) -> ReportTable:
    """Make the table with a row for each condition, compared with plain GRPO."""
    baselines = {c: baseline(c, found) for c in found}
    of_code = any(c.first.cfg.of_code for c in found)
    rows = []
    for c in found:
        row = _method_row(c, hinted=of_code)
        if any(baselines.values()):
            row = _from_plain(c, baselines[c]) | row
        rows.append({name: row[name] for name in (*FIRST, *row) if name in row})
    caption = (
        "% of answers to held-out problems, final evaluation. Last 5: answers of the last five "
        "training steps. Onset: the first of five steps in which a tenth of the answers hack, by "
        "seed; ·: none. Flaws learnt: hacked in a fifth of the trained model's answers."
    )
    if any(baselines.values()):
        caption += (
            " Δ: points from plain GRPO, deployed, paired by seed and problem; p: sign flips over "
            "seeds, in brackets the smallest that n allows; TOST: p for a difference within ± "
            f'{100 * MARGIN:.0f} points, and only a small one shows "no difference".'
        )
    return ReportTable("Methods", caption, rows)


def _method_row(c: Condition, *, hinted: bool) -> dict[str, str]:
    """Return a condition's row without its difference from plain GRPO. hinted: whether prompts of any have a hint."""
    answers = {str(run.final["eval_n"]) for run in c.runs}
    row = {"method": c.title, "seeds": c.seeds}
    row["onset"] = by_seed(run.onset for run in c.runs)
    for what in WHATS:
        row[f"{what} last 5"] = percent(last_five(c, what))
    for side in ("train", "deploy"):
        for what in WHATS:
            row[f"{what} {SIDES[side]}"] = percent(level(c, side, what))
    if hinted:
        row["solve no hint"] = percent(level(c, "plain", "solve"))
    row["flaws learnt"] = by_seed(run.flaws_learnt for run in c.runs)
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


# ── flaws


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
        "first hack in training. n: answers.",
        rows,
    )


def _flaw_row(c: Condition, flaw: str) -> dict[str, str]:
    in_pairs = c.first.final["by_mode"][flaw].get("in_dist")
    row = {"method": c.title, "flaw": flaw}
    row["pairs"] = {None: "·", True: "in", False: "out"}[in_pairs]
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


# ── monitors


def monitors(found: Sequence[Condition]) -> ReportTable:
    """Make the table with a row for each condition and text monitor; the condition's own is first."""
    flaws = flaws_of(found)
    rows = []
    for c in found:
        flags = concat([run.flags for run in c.runs])
        own = c.first.cfg.method.monitor_name
        for name in sorted(flags.monitor.unique(), key=lambda name: name != own):
            of_monitor = flags[flags.monitor == name]
            title = name if name == own else f"{name}, in shadow"
            if unjudged := int(of_monitor.flagged.isna().sum()):
                title += f", {unjudged} unjudged"
            about = {"method": c.title, "seeds": c.seeds, "monitor": title}
            rows.append(about | _scores(of_monitor, flaws))
    return ReportTable(
        "What the monitors of texts flagged",
        "% of the hacks in training (recall), also by flaw, and of their right answers "
        "(false flags); in brackets how many, over all seeds. AUC: of the scores, hacks against "
        "right answers. The run's own monitor may not read groups without signal. Unjudged: it gave "
        "no verdict on them, and no rate counts them.",
        rows,
    )


def _scores(flags: DataFrame, flaws: Sequence[str]) -> dict[str, str]:
    """Return the columns of what one monitor flagged."""
    hacks = flags.flagged[flags.flaw.notna()].dropna()
    rates = _flagged_by_flaw(flags)
    row = {"recall": _of_how_many(Rate(int(hacks.sum()), len(hacks)))}
    for flaw in flaws:
        row[flaw] = _of_how_many(rates.get(flaw))
    row["false flags"] = _of_how_many(rates.get(""))
    area = _auc(flags)
    row["AUC"] = "·" if area is None else f"{area:.2f}"
    return row


def _flagged_by_flaw(flags: DataFrame) -> dict[str, Rate]:
    """Count the flagged hacks by flaw, and under "" the flagged right answers, of those with a verdict."""
    rates = {}
    flags = flags[flags.flagged.notna()]
    for name, flagged in flags.groupby(flags.flaw.fillna(""), sort=False).flagged:
        rates[str(name)] = Rate(int(flagged.sum()), len(flagged))
    return rates


def _of_how_many(rate: Rate | None) -> str:
    """Format a rate in percent with its n, as in `75.0 (4)`."""
    return f"{rate.percent} ({rate.n})" if rate and rate.n else "·"


def _auc(flags: DataFrame) -> float | None:
    """Return the AUC of a monitor's scores, hacks against right answers; None: it gave none."""
    scored = flags[flags.score.notna()]
    is_hack = scored.flaw.notna()
    return stats.auc(list(scored.score[is_hack]), list(scored.score[~is_hack]))


# ── runs.csv and monitors.csv

# Settings that have a column of their own, or are said by `cell`.
IN_COLUMNS = ("preset", "intervention", "control", "random_flags", "placebo_pairs")


def csv_files(found: Sequence[Condition]) -> dict[str, str]:
    """Return the text of runs.csv and monitors.csv by name, without a file that has no rows."""
    runs: list[dict[str, object]] = []
    flagged: list[dict[str, object]] = []
    for c in found:
        for run in c.runs:
            runs.append({"run": run.path.name, "cell": c.title} | _run_row(run))
            for name, flags in run.flags.groupby("monitor", sort=False):
                flagged.append(_monitor_row(c.title, run, str(name), flags))
    files = {}
    for name, rows in (("runs.csv", runs), ("monitors.csv", flagged)):
        if rows:
            frame = DataFrame([_inert(row) for row in rows], dtype=object)
            files[name] = frame.to_csv(index=False)
    return files


def _run_row(run: FinishedRun) -> dict[str, object]:
    """Return a run's row in runs.csv.

    Shares have Wilson's interval. settings: those that differ from the preset's. flagged_*: how
    many (k/n) of the hacks that its text monitor has read it flagged, by flaw, and of the right
    answers (_solved). cos_*: |cos| of a control's direction with the real one over modules, and
    that of random directions.
    """
    method, loss = run.cfg.method, run.cfg.loss
    is_biased = loss.loss == "grpo" and not loss.unbiased
    settings = []
    for name, value in unusual_settings(run.cfg).items():
        if name not in IN_COLUMNS:
            settings.append(f"{name}={value}")
    row: dict[str, object] = {
        "arm": method.intervention,
        "control": method.control_name,
        "settings": " ".join(settings),
        "base_weights": run.short_hash("base_weights", 8),
        "loss": "grpo biased" if is_biased else loss.loss,
        "seed": run.seed,
        "steps": run.cfg.scale.steps,
        "onset": run.onset,
        "hack_last5": run.last_five("hack").value,
        "solve_last5": run.last_five("solve").value,
        "modes_learned": run.flaws_learnt,
        "n": run.final["eval_n"],
    }
    for side, what in itertools.product(SIDES, WHATS):
        name = f"{what}_{side}"
        rate = run.counted(side, what)
        low, high = wilson(rate.k, rate.n) if rate.n else (None, None)
        row[name] = _rounded(run.final.get(name))
        row[f"{name}_low"] = _rounded(low)
        row[f"{name}_high"] = _rounded(high)
    for flaw in run.all_flaws:
        of_flaw = run.final["by_mode"].get(flaw, {}).get("deploy_hack")
        row.setdefault(f"hack_deploy_{flaw}", of_flaw)  # of a flaw `high` or `low` the page alone
    own = run.flags.monitor == method.monitor_name
    row |= _flag_columns(run.flags[own], run.all_flaws)
    cosines = run.direction.get("cos_with_real") or {}
    row["cos_rms"] = _rounded(cosines.get("rms"))
    row["cos_chance_rms"] = _rounded(cosines.get("chance_rms"))
    row["revision"] = run.revision
    row["preregistered"] = run.short_hash("preregistered", 12)
    return row


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(float(share), 6)


def _flag_columns(flags: DataFrame, flaws: Iterable[str]) -> dict[str, str | None]:
    """Return the flagged_* columns: k/n, or None where nothing was read."""
    rates = _flagged_by_flaw(flags)
    columns: dict[str, str | None] = {}
    for name in (*flaws, ""):
        rate = rates.get(name)
        columns[f"flagged_{name or 'solved'}"] = f"{rate.k}/{rate.n}" if rate else None
    return columns


def _monitor_row(title: str, run: FinishedRun, monitor: str, flags: DataFrame) -> dict[str, object]:
    """Return one monitor's row in monitors.csv."""
    return {
        "run": run.path.name,
        "cell": title,
        "arm": run.cfg.method.intervention,
        "acted_on": run.cfg.method.monitor_name,
        "base_weights": run.short_hash("base_weights", 8),
        "seed": run.seed,
        "monitor": monitor,
        "known_modes": run.cfg.method.known_modes,
        **_flag_columns(flags, run.all_flaws),
        "auc": _rounded(_auc(flags)),
        "revision": run.revision,
    }


def _inert(row: Mapping[str, object]) -> dict[str, object]:
    """Quote what a spreadsheet would take for a formula, as its readers do: by an apostrophe."""
    quoted: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, str):
            acts = value.startswith(("=", "+", "-", "@", "\t", "\r"))
            quoted[name] = ("'" if acts else "") + shown_line(value)
        else:
            quoted[name] = value
    return quoted
