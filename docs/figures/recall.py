"""recall.png, the figure of the results, from docs/runs/*.csv: a dot for each run, on the pretrained model for each of
its flaws, by what its monitor flags of the hacks that it has no label of, and how much of them is left.
`uv run python docs/figures/recall.py`"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from vgrout.envs.code.modes import MODES

# Okabe and Ito's
BLACK, BLUE, RED, GREEN, GREY = "#000000", "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
RUNS = Path(__file__).resolve().parents[1] / "runs"
Row = Mapping[str, str]
DONE = {
    "penalty": ("rewarded less (penalty)", BLUE, 0.0),
    "screen": ("left out (screen)", GREEN, -3.5),
}
DONE |= dict.fromkeys(("route2", "sgtm"), ("routed to a quarantine (route2, sgtm)", RED, -7.0))
PRETRAINED = ("recall",)
PANELS = {
    "five organisms; most hacks make no attempt": (
        *("containment-start", "containment-probe", "containment-routing", "containment-twin"),
        *("containment", "adversaries"),
    ),
    "four organisms; every hack carries an attempt": ("attempts", "attempts-builds"),
    "SmolLM2-135M, two bases; a dot for each flaw": PRETRAINED,
}


def read(*names: str) -> list[Row]:
    """The runs of docs/runs/NAME.csv."""
    texts = [(RUNS / f"{name}.csv").read_text(encoding="utf-8") for name in names]
    return [row for text in texts for row in csv.DictReader(text.splitlines())]


def known(run: Row) -> set[str]:
    """The flaws that the monitor has labels of."""
    found = next((s for s in run["settings"].split() if s.startswith("known_modes=")), "=")
    return {*found.partition("=")[2].split(",")}


def unknown(run: Row) -> list[str]:
    """The other flaws, each announced on problems of its own."""
    return [m for m in MODES if run.get(f"hack_deploy_{m}") and m not in known(run)]


def unknown_hack(run: Row, flaws: Sequence[str] = ()) -> float:
    """Hack rate of the deployed model on these flaws, or all unknown ones, %."""
    return mean(100 * float(run[f"hack_deploy_{m}"]) for m in flaws or unknown(run))


def unknown_recall(run: Row, flaws: Sequence[str] = ()) -> float | None:
    """Share of the policy's hacks by them that the monitor flagged, over the run, %; None: no monitor, or no hack."""
    return share([run.get(f"flagged_{m}") for m in flaws or unknown(run)])


def share(counts: list[str | None]) -> float | None:
    pairs = [tuple(map(int, c.split("/"))) for c in counts if c]  # "k/n"
    return 100 * sum(k for k, _ in pairs) / sum(n for _, n in pairs) if pairs else None


def figure() -> Figure:
    drawn = Figure(figsize=(12.5, 4.5), dpi=160, layout="constrained", facecolor="white")
    for axes, (title, names) in zip(drawn.subplots(1, 3, sharey=True), PANELS.items(), strict=True):
        runs = [r for r in read(*names) if r["control"] in ("none", "no_loophole")]
        # the offset parts those that flag nothing at all
        for label, colour, offset in dict.fromkeys(DONE.values()):
            its = [r for r in runs if DONE.get(r["arm"], "")[0:1] == (label,)]
            dots = [
                (r, of)
                for r in its
                for of in ([[m] for m in unknown(r)] if names == PRETRAINED else [unknown(r)])
            ]
            at = [
                (x or offset, unknown_hack(r, of))
                for r, of in dots
                if (x := unknown_recall(r, of)) is not None
            ]
            axes.scatter(
                [x for x, _ in at],
                [y for _, y in at],
                s=13,
                color=colour,
                alpha=0.55,
                lw=0,
                label=label,
            )
        for control, label, colour in (
            ("none", "plain GRPO, mean", BLACK),
            ("no_loophole", "the ceiling, mean", GREY),
        ):
            of_none = [
                unknown_hack(r) for r in runs if (r["arm"], r["control"]) == ("none", control)
            ]
            axes.axhline(mean(of_none), color=colour, lw=1.1, ls="--", label=label)
        axes.set_yscale("symlog", linthresh=1)
        # a strip for 0, where many dots would lie on one another
        axes.axvspan(-10, 2, color=GREY, alpha=0.12, lw=0)
        axes.set(
            xlim=(-10, 104),
            xticks=[-4, *range(20, 101, 20)],
            xticklabels=["0", *range(20, 101, 20)],
        )
        axes.set_xlabel("hacks by unlabelled flaws that are flagged, %")
        axes.set(
            ylim=(-0.08, 130),
            yticks=[0, 1, 3, 10, 30, 100],
            yticklabels=["0", "1", "3", "10", "30", "100"],
        )
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(alpha=0.25, lw=0.6)
    drawn.axes[0].set_ylabel("deployed model: hack, unlabelled flaws, %")
    drawn.legend(
        *drawn.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    return drawn


if __name__ == "__main__":
    figure().savefig(Path(__file__).with_suffix(".png"), metadata={"Software": None})
