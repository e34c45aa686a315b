"""A table of runs.csv files: means over the seeds of recorded runs.

uv run python docs/runs/cells.py docs/runs/*.csv

A file is a study. Runs of several studies are never put together: an option that a row does not
name had its default at the row's revision, and another study may have run the same seeds again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame, Series, concat, read_csv

from vgrout.report.stats import over_seeds
from vgrout.report.tables import ReportTable, percent

# Runs of one row are equal in these columns …
SAME = ["study", "arm", "control", "settings", "base_weights", "loss", "steps"]
# … of which it shows the first two always, the others where they differ.
ALWAYS = ["arm", "control"]
SHARES = {
    "hack deployed": "hack_deploy",
    "solve deployed": "solve_deploy",
    "solve no hint": "solve_plain",
}


def read_runs(paths: Sequence[Path]) -> DataFrame:
    """Read the rows of runs.csv files as text; files of another kind have none.

    "" stands where something was not measured.
    """
    frames = [DataFrame(columns=["run", *SAME])]
    for path in dict.fromkeys(paths):
        frame = read_csv(path, dtype=str, keep_default_na=False).assign(study=path.stem)
        if set(SAME) <= set(frame.columns):
            frames.append(frame.drop_duplicates("run", keep="last"))
    return concat(frames).fillna("")


def over_all_seeds(paths: Sequence[Path]) -> ReportTable:
    """Make a table with one row for the runs of a study that differ by their seed alone."""
    runs = read_runs(paths)
    differing = [name for name in SAME if runs[name].nunique() > 1 and name not in ALWAYS]
    rows = []
    for _, same in runs.groupby(SAME, sort=False):
        row = {name.replace("_", " "): same[name].iloc[0] for name in [*ALWAYS, *differing]}
        row["seeds"] = str(len(same))
        row["n a side"] = "/".join(sorted(same.n.unique()))
        for name, column in SHARES.items():
            row[name] = mean_share(same[column])
        rows.append(row)
    return ReportTable(
        "Recorded runs",
        f"{len(runs)} runs. %, mean over seeds with its 95 % interval by Student's t (t): the "
        "files have no single answers to draw from. n a side: answers of one run's final "
        "evaluation.",
        rows,
    )


def mean_share(column: Series) -> str:
    """Return the mean of a column's shares over seeds."""
    shares = [float(share) for share in column if share]
    mean = over_seeds(shares)
    return percent(mean)


if __name__ == "__main__":
    table = over_all_seeds([Path(name) for name in sys.argv[1:]])
    print(f"{table.caption}\n\n{table.markdown()}")
