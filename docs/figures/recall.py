"""recall.png, the figure of the results, from docs/runs/*.csv.

`uv run python docs/figures/recall.py`

There is a dot for each run, and on the pretrained model for each flaw of a run. It shows how many
of the hacks that the monitor has no labels of it flags, and how many of them are left.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vgrout.envs.code.modes import MODES

# Okabe and Ito's.
BLACK, BLUE, RED, GREEN, GREY = "#000000", "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
RUNS = Path(__file__).resolve().parents[1] / "runs"
Row = Mapping[str, str]


@dataclass(frozen=True)
class Done:
    """What is done about flagged answers, and how it is drawn."""

    label: str
    arms: tuple[str, ...]
    colour: str
    at_zero: float  # where dots are that flag nothing at all, so that they do not hide one another


DONE = (
    Done("rewarded less (penalty)", ("penalty",), BLUE, at_zero=0.0),
    Done("left out (screen)", ("screen",), GREEN, at_zero=-3.5),
    Done("routed to a quarantine (route2, sgtm)", ("route2", "sgtm"), RED, at_zero=-7.0),
)
PRETRAINED = ("recall",)
# Titles → names of CSV files.
PANELS = {
    "five organisms; most hacks make no attempt": (
        "containment-start",
        "containment-probe",
        "containment-routing",
        "containment-twin",
        "containment",
        "adversaries",
    ),
    "four organisms; every hack carries an attempt": ("attempts", "attempts-builds"),
    "SmolLM2-135M, two bases; a dot for each flaw": PRETRAINED,
}


def read(*names: str) -> list[Row]:
    """Return the runs of docs/runs/NAME.csv."""
    rows: list[Row] = []
    for name in names:
        text = (RUNS / f"{name}.csv").read_text(encoding="utf-8")
        rows += csv.DictReader(text.splitlines())
    return rows


def known(run: Row) -> set[str]:
    """Return the flaws that the monitor has labels of."""
    for setting in run["settings"].split():
        name, _, value = setting.partition("=")
        if name == "known_modes":
            return set(value.split(","))
    return set()


def unknown(run: Row) -> list[str]:
    """Return the other flaws, each of which is announced on problems of its own."""
    labelled = known(run)
    return [m for m in MODES if run.get(f"hack_deploy_{m}") and m not in labelled]


def unknown_hack(run: Row, flaws: Sequence[str] = ()) -> float:
    """Return the hack rate of the deployed model on these flaws, %; (): on all unknown ones."""
    return mean(100 * float(run[f"hack_deploy_{m}"]) for m in flaws or unknown(run))


def unknown_recall(run: Row, flaws: Sequence[str] = ()) -> float | None:
    """Return the share of the policy's hacks by these flaws that the monitor flagged, %.

    It is of the whole run. (): by all unknown flaws. None: there is no monitor, or no hack.
    """
    return share([run.get(f"flagged_{m}") for m in flaws or unknown(run)])


def share(counts: list[str | None]) -> float | None:
    """Return a share over all these counts, "k/n", in percent; None: there are none."""
    found = [count.split("/") for count in counts if count]
    if not found:
        return None
    return 100 * sum(int(k) for k, _ in found) / sum(int(n) for _, n in found)


def figure() -> Figure:
    """Draw a panel for each kind of model."""
    drawn = Figure(figsize=(12.5, 4.5), dpi=160, layout="constrained", facecolor="white")
    for axes, (title, names) in zip(drawn.subplots(1, 3, sharey=True), PANELS.items(), strict=True):
        runs = [r for r in read(*names) if r["control"] in ("none", "no_loophole")]
        for done in DONE:
            dots(axes, [r for r in runs if r["arm"] in done.arms], done, names == PRETRAINED)
        mean_line(axes, runs, "none", "plain GRPO, mean", BLACK)
        mean_line(axes, runs, "no_loophole", "the ceiling, mean", GREY)
        style(axes)
        axes.set_title(title, fontsize=10, loc="left")
    drawn.axes[0].set_ylabel("deployed model: hack, unlabelled flaws, %")
    handles, labels = drawn.axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return drawn


def dots(axes: Axes, runs: Sequence[Row], done: Done, by_flaw: bool) -> None:
    """Draw a dot for each run, or for each of its unknown flaws."""
    x, y = [], []
    for run in runs:
        flaws = unknown(run)
        for group in [[flaw] for flaw in flaws] if by_flaw else [flaws]:
            recall = unknown_recall(run, group)
            if recall is not None:
                x.append(recall or done.at_zero)
                y.append(unknown_hack(run, group))
    axes.scatter(x, y, s=13, color=done.colour, alpha=0.55, lw=0, label=done.label)


def mean_line(axes: Axes, runs: Sequence[Row], control: str, label: str, colour: str) -> None:
    """Draw the mean of plain GRPO under a control."""
    hacks = [unknown_hack(r) for r in runs if r["arm"] == "none" and r["control"] == control]
    axes.axhline(mean(hacks), color=colour, lw=1.1, ls="--", label=label)


def style(axes: Axes) -> None:
    axes.set_yscale("symlog", linthresh=1)
    # a strip for 0, where many dots would lie on one another
    axes.axvspan(-10, 2, color=GREY, alpha=0.12, lw=0)
    ticks = range(20, 101, 20)
    axes.set(xlim=(-10, 104), xticks=[-4, *ticks], xticklabels=["0", *ticks])
    axes.set_xlabel("hacks by unlabelled flaws that are flagged, %")
    rates = [0, 1, 3, 10, 30, 100]
    axes.set(ylim=(-0.08, 130), yticks=rates, yticklabels=[str(rate) for rate in rates])
    axes.grid(alpha=0.25, lw=0.6)


if __name__ == "__main__":
    figure().savefig(Path(__file__).with_suffix(".png"), metadata={"Software": None})
