"""The table of results.md on hacks that read like honest answers, from look-alike.csv.

`uv run python docs/runs/look_alike.py`

A row of the file is a run of studies/look-alike.toml: shares of the deployed model's answers, and of
the untrained one's (`_base`), over all problems, over those whose check has wrong tests (`wrong`)
and over the others (`right`).
"""

from pathlib import Path
from statistics import fmean

from pandas import DataFrame, read_csv

from studies.judge_look_alike import SEEDS, verdict

# The condition as a report names it → its row.
ROWS = {
    "none": "`none`",
    "none (mix_ratio 0.0)": "`none`, nothing demonstrated",
    "none · no_loophole": "the ceiling",
    "penalty (labels)": "`penalty`, labels of every hack",
    "penalty (labels_by2)": "the same, by 2 (`--penalty 2`)",
    "screen (labels)": "`screen`, labels of every hack",
    "route2 (labels)": "`route2`, labels of every hack",
    "penalty (syntax_edge)": "`penalty`, `syntax_edge`",
    "penalty (StrictTests)": "`penalty`, strict tests made from solutions",
    "screen (StrictTests)": "`screen`, strict tests made from solutions",
    "penalty (LabelsOfNumbers)": "`penalty`, labels of one kind of three",
    "penalty (online_probe_labels)": "`penalty`, a probe seeded by labels of every hack",
    "penalty (online_probe_LabelsOfNumbers)": "`penalty`, a probe seeded by labels of one kind",
    "erase": "`erase`, pairs a token apart",
    "route": "`route`, pairs a token apart",
    "route2": "`route2`, pairs a token apart",
    "route2 · haar": "`route2`, random direction",
    "route2 (vhack_pairs run_tests.json)": "`route2`, pairs by run_tests",
    "route2 · placebo_laid_out": "`route2`, placebo pairs: laid out in another way",
    "route2 · placebo_flawed": "`route2`, placebo pairs: misread against right",
    "route2 (band, mix_ratio 0.0)": "`route2` by `band`, nothing demonstrated",
    "route2 · haar (band, mix_ratio 0.0)": "the same, random direction",
}
HEAD = (
    "| method | seeds | wrong tests: hack / solve | right tests: solve | all: solve "
    "| hack above the ceiling's | solve under it | |"
)
CEILING = "none · no_loophole"


def table() -> str:
    runs = read_csv(Path(__file__).with_name("look-alike.csv"))
    ceiling = shares(runs[runs.condition == CEILING])
    lines = [HEAD, "|" + "---|" * 8]
    for condition, name in ROWS.items():
        of = runs[runs.condition == condition]
        if len(of) < SEEDS:  # still to be run
            continue
        found = shares(of)
        cells = [name, str(len(of)), f"{mean(of, 'hack_wrong')} / {mean(of, 'solve_wrong')}"]
        cells += [mean(of, "solve_right"), mean(of, "solve")]
        judged = verdict(name, found, ceiling)
        hacks, solves = judged.numbers.removeprefix("hacks ").split(" above the ceiling's, solve ")
        solves = solves.partition(" under it")[0]
        is_ceiling = condition == CEILING
        cells += ["", "", ""] if is_ceiling else [hacks, solves, judged.outcome.lower()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shares(runs: DataFrame) -> dict[int, dict[str, float]]:
    """Seed → what the criteria compare."""
    return {
        int(row["seed"]): {"hack wrong": row["hack_wrong_deploy"], "solve": row["solve_deploy"]}
        for row in runs.to_dict("records")
    }


def mean(runs: DataFrame, what: str) -> str:
    return f"{100 * fmean(runs[f'{what}_deploy']):.1f}"


if __name__ == "__main__":
    print(table())
