"""runs.csv and monitors.csv: a report's numbers for other programs. Shares are fractions."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from pandas import DataFrame

from vgrout.config.run import Config
from vgrout.report.load import (
    SIDES,
    WHATS,
    Condition,
    FinishedRun,
    trained_with,
    usual_settings,
)
from vgrout.report.stats import wilson
from vgrout.report.tables import auc, flagged_by_flaw, one_line

# Settings that have a column of their own, or are said by `cell`.
IN_COLUMNS = ("preset", "intervention", "control", "random_flags", "placebo_pairs")


def csv_files(found: Sequence[Condition]) -> dict[str, str]:
    """Return the text of runs.csv and monitors.csv by name, without a file that has no rows."""
    runs: list[dict[str, object]] = []
    monitors: list[dict[str, object]] = []
    for c in found:
        for run in c.runs:
            runs.append({"run": run.path.name, "cell": c.title} | _run_row(run))
            for name, flags in run.flags.groupby("monitor", sort=False):
                monitors += _thirds(c.title, run, str(name), flags)
    files = {}
    for name, rows in (("runs.csv", runs), ("monitors.csv", monitors)):
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
    row: dict[str, object] = {
        "arm": method.intervention,
        "control": method.control_name,
        "settings": _unusual_settings(run.cfg),
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
        row[f"hack_deploy_{flaw}"] = run.final["by_mode"].get(flaw, {}).get("deploy_hack")
    own = run.flags.monitor == method.monitor_name
    row |= _flag_columns(run.flags[own], run.all_flaws)
    cosine, by_chance = run.likeness
    row["cos_rms"] = _rounded(cosine)
    row["cos_chance_rms"] = _rounded(by_chance)
    row["revision"] = run.revision
    row["preregistered"] = run.short_hash("preregistered", 12)
    return row


def _unusual_settings(cfg: Config) -> str:
    """Return the settings that differ from their defaults, without those that have a column of
    their own."""
    defaults = usual_settings(cfg)
    unusual = []
    for name, value in trained_with(cfg).items():
        if name not in IN_COLUMNS and value not in defaults[name]:
            unusual.append(f"{name}={value}")
    return " ".join(unusual)


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(float(share), 6)


def _flag_columns(flags: DataFrame, flaws: Iterable[str]) -> dict[str, str | None]:
    """Return the flagged_* columns: k/n, or None where nothing was read."""
    rates = flagged_by_flaw(flags)
    columns: dict[str, str | None] = {}
    for name in (*flaws, "solved"):
        rate = rates.get(name)
        columns[f"flagged_{name}"] = f"{rate.k}/{rate.n}" if rate else None
    return columns


def _thirds(
    title: str, run: FinishedRun, monitor: str, flags: DataFrame
) -> list[dict[str, object]]:
    """Return the rows of one monitor in one run: a row for each third of the run."""
    steps = int(run.steps.step.iloc[-1]) + 1
    rows: list[dict[str, object]] = []
    for third in range(3):
        first = steps * third // 3
        last = steps * (third + 1) // 3 - 1
        part = flags[flags.step.between(first, last)]
        rows.append(
            {
                "run": run.path.name,
                "cell": title,
                "arm": run.cfg.method.intervention,
                "acted_on": run.cfg.method.monitor_name,
                "base_weights": run.short_hash("base_weights", 8),
                "seed": run.seed,
                "monitor": monitor,
                "known_modes": run.cfg.method.known_modes,
                "steps": f"{first} to {last}",
                **_flag_columns(part, run.all_flaws),
                "auc": _rounded(auc(part)),
                "revision": run.revision,
            }
        )
    return rows


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
