"""A table of runs.csv files: means over the seeds of recorded runs. A run that several files hold counts once.

uv run python docs/runs/cells.py docs/runs/*.csv
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pandas import DataFrame, concat, read_csv

from vgrout.report.stats import over_seeds
from vgrout.report.tables import ReportTable, percent

# runs of one row are equal in these
SAME = ["arm", "control", "settings", "base_weights", "loss", "steps"]
SHARES = {
    "hack deployed": "hack_deploy",
    "solve deployed": "solve_deploy",
    "solve no hint": "solve_plain",
}


def read_runs(paths: Sequence[Path]) -> DataFrame:
    """The rows of runs.csv files as text, each run once; "" stands where something was not measured. Files of another
    kind have none."""
    frames = [read_csv(path, dtype=str, keep_default_na=False) for path in paths]
    runs = concat(
        [DataFrame(columns=["run", *SAME]), *(f for f in frames if {*SAME} <= {*f.columns})]
    )
    return runs.drop_duplicates("run", keep="last").fillna("")


def over_all_seeds(paths: Sequence[Path]) -> ReportTable:
    """One row for runs of all files that differ by their seed alone."""
    runs = read_runs(paths)
    shown = ["arm", "control", *(k for k in SAME[2:] if runs[k].nunique() > 1)]
    rows = []
    for _, same in runs.groupby(SAME, sort=False):
        row = {k.replace("_", " "): same[k].iloc[0] for k in shown}
        row |= {"seeds": str(len(same)), "n a side": "/".join(sorted({*same.n}))}
        for name, column in SHARES.items():
            found = over_seeds(shares := [float(x) for x in same[column] if x])
            degenerate = {*shares} in ({0.0}, {1.0})  # every answer of every seed
            row[name] = percent(replace(found, note="DEGENERATE") if degenerate else found)
        rows.append(row)
    return ReportTable(
        "Recorded runs",
        f"{len(runs)} runs. %, mean over seeds with its 95 % interval by Student's t (t): the files have no single "
        "answers to draw from. n a side: answers of one run's final evaluation.",
        rows,
    )


if __name__ == "__main__":
    table = over_all_seeds([Path(name) for name in sys.argv[1:]])
    print(f"{table.caption}\n\n{table.markdown()}")
