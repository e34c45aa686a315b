"""Cells of runs.csv files: means over seeds of runs whose directories need not be there (docs/runs)."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vgrout.config.renamed import current_arm, current_settings, current_value
from vgrout.report.stats import over_seeds
from vgrout.report.tables import Table, TableRow, percent

CELL = ("arm", "control", "settings", "base_weights", "loss", "steps")  # runs of one cell are equal in these
SHARES = {"hack deployed": "hack_deploy", "solve deployed": "solve_deploy", "solve no hint": "solve_plain"}

Recorded = dict[str, str]  # one run: a column's text by its name, "" where it was not measured


def read_runs(path: Path) -> list[Recorded]:
    """The rows of a runs.csv with today's names of arms, controls and settings.

    Raises:
        ValueError: one line, where the file cannot be read or lacks a column.
    """
    try:
        with open(path, encoding="utf-8", newline="") as f:
            rows = list(csv.DictReader(f))
    except (OSError, ValueError, csv.Error) as e:
        raise ValueError(f"{path}: cannot be read as CSV ({e})") from None
    if not rows or (absent := [k for k in ("run", "seed", "n", *CELL, *SHARES.values()) if k not in rows[0]]):
        raise ValueError(f"{path}: " + ("no run in it" if not rows else f"no {', '.join(absent)}: not a runs.csv"))
    if torn := [line for line, row in enumerate(rows, 2) if None in row or None in row.values()]:
        raise ValueError(f"{path}, line {torn[0]}: damaged (not {len(rows[0])} columns)")
    return [_renamed(row) for row in rows]


def _renamed(row: Recorded) -> Recorded:
    arm, control = current_arm(current_value("intervention", row["arm"]), row["control"])
    settings = [word for name in row["settings"].split(" ") for word in _renamed_setting(name, arm)]
    if control == "none" != row["control"]:  # what was a control is a monitor today
        settings.append("monitor=labels")
    return row | {"arm": arm, "control": control, "settings": " ".join(filter(None, settings))}


def _renamed_setting(word: str, arm: str) -> list[str]:
    name, equals, value = word.partition("=")
    settings = current_settings({"intervention": arm, name: value})
    return [f"{new}{equals}{now}" for new, now in settings.items() if new != "intervention"]


def cells_table(paths: Sequence[Path], tag: str = "") -> Table:
    """One row for each cell of all files; a run that several files hold counts once.

    tag: only runs whose name ends with it. Raises ValueError, one line, where none does, or a file cannot be read.
    """
    runs = {row["run"]: row for path in paths for row in read_runs(path) if row["run"].endswith(tag)}
    if not runs:
        raise ValueError(f"{', '.join(map(str, paths))}: no run whose name ends with {tag!r}")
    cells: dict[tuple[str, ...], list[Recorded]] = defaultdict(list)
    for row in runs.values():
        cells[tuple(row[k] for k in CELL)].append(row)
    differing = [k for k, values in zip(CELL, zip(*cells, strict=True), strict=True) if len({*values}) > 1]
    shown = list(dict.fromkeys(("arm", "control", *differing)))
    return Table(
        "Cells",
        f"{len(runs)} runs. %, mean over seeds with its 95 % interval by Student's t (t): the files have no single "
        "answers to draw from. n a side: answers of one run's final evaluation.",
        [_cell_row(rows, shown) for rows in cells.values()],
    )


def _cell_row(rows: Sequence[Recorded], shown: Sequence[str]) -> TableRow:
    row = {k.replace("_", " "): rows[0][k] for k in shown}
    row |= {"seeds": str(len(rows)), "n a side": "/".join(sorted({r["n"] for r in rows}))}
    for name, column in SHARES.items():
        found = over_seeds(shares := [float(r[column]) for r in rows if r[column]])
        same = {*shares} in ({0.0}, {1.0})  # every answer of every seed
        row[name] = percent(replace(found, note="DEGENERATE") if same else found)
    return row
