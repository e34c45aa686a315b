"""A table of runs.csv files: means over the seeds of recorded runs. A run that several files hold counts once.

uv run python docs/runs/cells.py docs/runs/*.csv
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vgrout.report.stats import over_seeds
from vgrout.report.tables import Table, TableRow, percent

CELL = ("arm", "control", "settings", "base_weights", "loss", "steps")  # runs of one cell are equal in these
SHARES = {"hack deployed": "hack_deploy", "solve deployed": "solve_deploy", "solve no hint": "solve_plain"}


def read_runs(path: Path) -> list[dict[str, str]]:
    """The rows of a runs.csv; "" stands where something was not measured. None of a file of another kind."""
    with open(path, encoding="utf-8", newline="") as f:
        return [row for row in csv.DictReader(f) if {*CELL} <= {*row}]


def cells_table(paths: Sequence[Path]) -> Table:
    """One row for each cell of all files."""
    runs = {row["run"]: row for path in paths for row in read_runs(path)}
    cells: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
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


def _cell_row(rows: Sequence[dict[str, str]], shown: Sequence[str]) -> TableRow:
    row = {k.replace("_", " "): rows[0][k] for k in shown}
    row |= {"seeds": str(len(rows)), "n a side": "/".join(sorted({r["n"] for r in rows}))}
    for name, column in SHARES.items():
        found = over_seeds(shares := [float(r[column]) for r in rows if r[column]])
        same = {*shares} in ({0.0}, {1.0})  # every answer of every seed
        row[name] = percent(replace(found, note="DEGENERATE") if same else found)
    return row


if __name__ == "__main__":
    table = cells_table([Path(name) for name in sys.argv[1:]])
    print(f"{table.caption}\n\n{table.markdown()}")
