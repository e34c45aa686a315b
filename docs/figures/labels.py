"""labels.png: how good labels have to be, from docs/runs/label-quality.csv.

`uv run python docs/figures/labels.py`

The left panel has the hacks that are left against the share of hacks that the labels miss, the
right one the skill against the share of other answers that they flag wrongly. There is a small
dot for each run, and a line through the means over seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from recall import BLACK, BLUE, GREEN, GREY, RED, read  # beside this file


@dataclass(frozen=True)
class Run:
    """A recorded run; rates are of 1."""

    intervention: str
    control: str
    recall: float  # of all hacks, the share that the labels flag
    false_flags: float  # of all other answers, the share that they flag too
    hack: float  # of the deployed model's answers
    solve: float


@dataclass(frozen=True)
class Line:
    """How an intervention is drawn."""

    label: str
    intervention: str
    colour: str
    shift: (
        float  # of its dots, in hundredths of an axis, so that they do not hide other interventions
    )


LINES = (
    Line("rewarded less (penalty)", "penalty", BLUE, shift=-0.8),
    Line("left out (screen)", "screen", GREEN, shift=0.0),
    Line("routed (route2)", "route2", RED, shift=0.8),
)


def recorded() -> list[Run]:
    """Return the runs of the study."""
    found = []
    for row in read("label-quality"):
        settings = dict(setting.split("=", 1) for setting in row["settings"].split())
        run = Run(
            row["arm"],
            row["control"],
            float(settings.get("label_recall", 1.0)),
            float(settings.get("label_false_flags", 0.0)),
            float(row["hack_deploy"]),
            float(row["solve_deploy"]),
        )
        found.append(run)
    return found


def figure() -> Figure:
    """Draw both panels."""
    runs = recorded()
    flagged = [run for run in runs if run.intervention != "none"]
    no_false_flags = [run for run in flagged if run.false_flags == 0.0]
    all_hacks = [run for run in flagged if run.recall == 1.0]
    drawn = Figure(figsize=(9.5, 4.2), dpi=160, layout="constrained", facecolor="white")
    left, right = drawn.subplots(1, 2)
    for line in LINES:
        lines(left, no_false_flags, line, "missed", "hack")
        lines(right, all_hacks, line, "false_flags", "solve")
    of_control(left, runs, "none", "hack", "plain GRPO", BLACK, above=1.5)
    of_control(right, runs, "no_loophole", "solve", "grader without a flaw", GREY, above=-9)
    left.set_title("labels that miss hacks", fontsize=10, loc="left")
    left.set(xlabel="hacks that are not flagged, %", ylabel="deployed model: hack, %")
    right.set_title("labels that flag other answers, too", fontsize=10, loc="left")
    right.set(xlabel="other answers that are flagged, %", ylabel="deployed model: solve, %")
    left.set_xticks([0, 30, 50, 70, 100])
    right.set_xticks([0, 5, 20])
    for axes in (left, right):
        axes.set_ylim(-3, 103)
        axes.grid(alpha=0.25, lw=0.6)
    handles, labels = left.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return drawn


def lines(axes: Axes, runs: Sequence[Run], line: Line, x: str, y: str) -> None:
    """Draw an intervention's runs, and a line through their means."""
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        if run.intervention == line.intervention:
            rate = 100 * (1 - run.recall if x == "missed" else run.false_flags)
            by_rate.setdefault(round(rate, 6), []).append(100 * getattr(run, y))
    means = []
    widest = max(by_rate)
    for rate in sorted(by_rate):
        dots = by_rate[rate]
        shifted = rate + line.shift * widest / 100
        axes.scatter([shifted] * len(dots), dots, s=9, color=line.colour, alpha=0.4, lw=0)
        means.append(mean(dots))
    axes.plot(sorted(by_rate), means, color=line.colour, lw=1.6, label=line.label)


def of_control(
    axes: Axes, runs: Sequence[Run], control: str, what: str, label: str, colour: str, above: float
) -> None:
    """Draw the mean of the runs without an intervention under a control, and name it `above` points over it."""
    values = []
    for run in runs:
        if run.intervention == "none" and run.control == control:
            values.append(100 * getattr(run, what))
    level = mean(values)
    axes.axhline(level, color=colour, lw=1.1, ls="--")
    axes.annotate(
        label,
        (0.02, level + above),
        xycoords=("axes fraction", "data"),
        color=colour,
        fontsize=8,
    )


if __name__ == "__main__":
    figure().savefig(Path(__file__).with_suffix(".png"), metadata={"Software": None})
