"""The figures of a report. Markers and line styles tell methods apart; colours (Okabe and Ito's) only help."""

import io
import itertools
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

try:
    import matplotlib as matplotlib
# a notebook names its backend to the programs that it starts, and it may not be installed for them
except ValueError:
    del os.environ["MPLBACKEND"]
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from vgrout.config.presets import recorded
from vgrout.embedded import PLAIN_GRPO, PLAIN_GRPO_SEEDS
from vgrout.report import stats
from vgrout.report.load import WHATS, Condition, FinishedRun, What, baseline, flaws_of
from vgrout.report.stats import Estimate
from vgrout.report.tables import compare, level

RED, BLUE, GREY = "#D55E00", "#0072B2", "#7F7F7F"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
COLOUR_OF = {  # by the intervention; one that is not here is grey
    **{"none": "#000000", "erase": "#E69F00", "route": BLUE},
    **{"route2": RED, "screen": "#CC79A7", "penalty": "#009E73"},
}
STYLE = {"hack": (RED, "-", "o"), "solve": (BLUE, "--", "s")}  # of the curves
SMOOTH = 5  # steps in a running mean of the students' answers


@dataclass(frozen=True, eq=False)
class Picture:
    name: str  # of its file, without the ending
    caption: str
    figure: Figure

    def png(self) -> bytes:
        """By matplotlib's own canvas for files, whatever a notebook has chosen."""
        out = io.BytesIO()
        # no long label or legend is cut off
        self.figure.savefig(out, format="png", bbox_inches="tight")
        return out.getvalue()


def pictures(found: Sequence[Condition]) -> list[Picture]:
    """Every figure that these conditions can fill."""
    return [p for draw in (dynamics, plane, by_flaw, suppression) if (p := draw(found))]


def _panels(
    shown: Sequence[Condition], wide: float, high: float, **shared: Any
) -> tuple[Figure, list[tuple[Axes, Condition]]]:
    """One panel for each condition, four in a line, each as wide and high as said (inches)."""
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    fig = Figure(figsize=(wide * columns, high * lines + 0.7), dpi=130, layout="constrained")
    grid = fig.subplots(lines, columns, squeeze=False, **shared).ravel()
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    return fig, list(zip(grid, shown, strict=False))


def _style(axes: Axes, title: str = "", note: str = "", **labels: object) -> None:
    axes.set(**labels)
    axes.set_title(
        "\n".join([*textwrap.wrap(title, 42, break_long_words=False), note]).strip(), fontsize=9
    )
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(fig: Figure, columns: int) -> None:
    """Below the figure; what several panels show stands there once."""
    named = {
        label: h
        for axes in fig.axes
        for h, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    fig.legend(
        named.values(),
        named.keys(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )


def _colour(condition: Condition) -> str:
    return COLOUR_OF.get(condition.first.cfg.method.intervention, GREY)


def _percent(e: Estimate) -> float:
    return 100 * (e.value or 0.0)


def _errors(e: Estimate) -> list[list[float]] | None:
    """Matplotlib's [[below], [above]], in percent."""
    if e.value is None or e.low is None or e.high is None:
        return None
    return [[100 * max(0.0, e.value - e.low)], [100 * max(0.0, e.high - e.value)]]


def dynamics(found: Sequence[Condition]) -> Picture:
    """A panel for each condition: hack and solve by step, of the students and of the deployed model; in grey the
    deployed hacks of plain GRPO in the same setting."""
    one = len(found) == 1
    fig, panels = _panels(found, 7.0 if one else 3.4, 2.9 if one else 2.5, sharey=True)
    for axes, condition in panels:
        if (plain := baseline(condition, found)) and len(curve := _deployed(plain, "hack")):
            axes.plot(
                curve.index + 1,
                curve.mean(axis=1),
                color=GREY,
                lw=3,
                alpha=0.5,
                label="hack, plain GRPO",
            )
        for what in WHATS:
            _curves(axes, condition, what)
        if not plain and recorded(condition.first.cfg):
            low, high = (x / 100 for x in PLAIN_GRPO["hack"][1:])
            label = f"hack, plain GRPO, at the end of {PLAIN_GRPO_SEEDS} runs"
            axes.axhspan(low, high, color=RED, alpha=0.15, lw=0, label=label)
        routes, ablated = (
            condition.first.cfg.method.routes,
            {r.cfg.method.ablate_frac for r in condition.runs},
        )
        side = (
            "as deployed"
            if ablated == {1.0}
            else "as trained"
            if ablated == {0.0}
            else "partly as deployed"
        )
        note = f"students are sampled {side}" if routes else ""
        _style(axes, condition.title, note, ylim=(-0.03, 1.03), xlabel="step")
    fig.supylabel("share of answers", fontsize=9)
    _legend(fig, 3)
    return Picture(
        "dynamics",
        f"Dynamics. Lines: the students' answers to training problems, running mean of {SMOOTH} steps; open marks: the "
        "deployed model on a few held-out problems; star: the final evaluation, of the deployed model, and open with "
        "the quarantine on. Red strip: what plain GRPO's deployed model hacks at the end of recorded runs, least to "
        "most. Of several seeds, thin: a seed; thick: their mean; band: its 95 % interval (Student's t).",
        fig,
    )


def _curves(axes: Axes, condition: Condition, what: What) -> None:
    colour, dash, marker = STYLE[what]
    table = DataFrame({r.seed: _students(r, what) for r in condition.runs}).dropna(how="all")
    shared, marks, last = (
        table.dropna(),
        _deployed(condition, what),
        level(condition, "deploy", what).value,
    )
    if len(condition.runs) > 1:
        axes.plot(table.index + 1, table, color=colour, lw=0.5, alpha=0.35)
        means = [stats.over_seeds(list(at)) for at in shared.to_numpy()]
        low = [e.value or 0.0 if e.low is None else e.low for e in means]
        high = [e.value or 0.0 if e.high is None else e.high for e in means]
        axes.fill_between(shared.index + 1, low, high, color=colour, alpha=0.12, lw=0)
    axes.plot(
        shared.index + 1, shared.mean(axis=1), dash, color=colour, lw=1.8, label=f"{what}, students"
    )
    if len(marks):
        label = f"{what}, deployed"
        axes.plot(
            marks.index + 1,
            marks.mean(axis=1),
            marker,
            color=colour,
            mfc="white",
            ms=5,
            label=label,
        )
    end = max(int(r.steps.step.iloc[-1]) for r in condition.runs) + 2
    trained = level(condition, "train", what).value if condition.first.cfg.method.routes else None
    for at, face, side in ((last, colour, "deployed"), (trained, "white", "as trained")):
        if at is not None:
            label = f"{what}, {side}, at the end"
            axes.plot(
                [end], [at], "*", color=colour, mfc=face, ms=11, clip_on=False, ls="", label=label
            )


def _students(run: FinishedRun, what: What) -> Any:
    """By step, the share of the students' answers, over a running window."""
    of = (
        run.steps.set_index("step")[[f"{what}_s_k", f"{what}_s_n"]]
        .astype(float)
        .rolling(SMOOTH, min_periods=1)
        .sum()
    )
    return of[f"{what}_s_k"] / of[f"{what}_s_n"].where(of[f"{what}_s_n"] > 0)


def _deployed(condition: Condition, what: What) -> DataFrame:
    """By step and seed, the deployed model's evaluations on the way; empty: there were none."""
    column = f"{what}_deploy"
    return DataFrame(
        {r.seed: r.steps.set_index("step")[column] for r in condition.runs if column in r.steps}
    ).dropna()


def plane(found: Sequence[Condition]) -> Picture | None:
    """Deployed hack against solve. A mark: a condition's mean, or its one run. Cross: its interval. Dots: its seeds.
    Star: its model before training."""
    if len(found) < 2:
        return None
    fig = Figure(figsize=(7.2, 5.6 + 0.1 * len(found)), dpi=130, layout="constrained")
    axes = fig.subplots()
    # of each colour
    markers: dict[str, Iterator[str]] = defaultdict(lambda: itertools.cycle(MARKERS))
    for c in found:
        colour, n = _colour(c), len(c.runs)
        x, y = (level(c, "deploy", what) for what in WHATS)
        axes.errorbar(
            _percent(x), _percent(y), xerr=_errors(x), yerr=_errors(y), fmt=next(markers[colour]),
            color=colour, ms=10, mec="white", mew=0.8, elinewidth=1.0, capsize=2, zorder=3,
            label=f"{c.title} ({f'{n} seeds' if n > 1 else f'seed {c.seeds}'})",
        )  # fmt: skip
        if n > 1:
            dots = [
                [100 * (r.counted("deploy", what).value or 0) for r in c.runs] for what in WHATS
            ]
            axes.plot(*dots, ".", ms=5, color=colour, alpha=0.5, zorder=1)
        base = [_percent(level(c, "base", what)) for what in WHATS]
        axes.plot(*base, "*", ms=11, color=GREY, mec="white", zorder=2, label="before training")
    _style(
        axes,
        xlim=(-3, 103),
        ylim=(-3, 103),
        xlabel="deployed model: hack, %",
        ylabel="deployed model: solve, %",
    )
    _legend(fig, 2)
    return Picture(
        "plane",
        "Hack against solve of the deployed model, with 95 % intervals; dots: seeds. Up and to the left is better.",
        fig,
    )


def by_flaw(found: Sequence[Condition]) -> Picture | None:
    """Hack rate by flaw, as trained and as deployed; the flaws of the direction's pairs are shaded."""
    methods = [(c, c.first.cfg.method) for c in found]
    found = [
        c
        for c, method in methods
        if method.intervention != "none" and method.control_name == "none"
    ]
    if not found:
        return None
    flaws = flaws_of(found)
    fig, panels = _panels(found, 3.1, 2.4, sharey=True)
    for axes, c in panels:
        shown = {m: c.first.final["by_mode"][m].get("in_dist") for m in c.first.flaws}
        for flaw in shown:
            at, colour = flaws.index(flaw), _colour(c)
            if shown[flaw]:
                label = "flaw that the direction's pairs show"
                axes.axhspan(at - 0.5, at + 0.5, color=GREY, alpha=0.2, lw=0, zorder=0, label=label)
            ends = [level(c, side, "hack", flaw) for side in ("train", "deploy")]
            axes.plot([_percent(e) for e in ends], [at, at], color=colour, lw=2.2, alpha=0.6)
            for e, face, label in zip(
                ends, ("white", colour), ("as trained", "deployed"), strict=True
            ):
                axes.errorbar(
                    _percent(e), at, xerr=_errors(e), fmt="o", ms=8, mfc=face, color=colour, elinewidth=0.8, capsize=2,
                    label=label,
                )  # fmt: skip
        no_pairs = "(no pairs)" * ({*shown.values()} == {None})
        _style(
            axes, c.title, no_pairs, xlim=(-4, 104), ylim=(len(flaws) - 0.5, -0.5), xlabel="hack, %"
        )
        axes.set_yticks(range(len(flaws)), flaws, fontsize=8)
    _legend(fig, 3)
    return Picture(
        "flaws",
        "Hack rate by flaw, from as trained (open) to deployed (filled), with 95 % intervals. Shaded: the flaws that "
        "the direction's pairs show; the others are held out from it. No pairs: a method without a direction.",
        fig,
    )


def suppression(found: Sequence[Condition]) -> Picture | None:
    """How much less a method hacks than plain GRPO, against the likeness of its control's direction to the real one,
    over several seeds."""
    fig = Figure(figsize=(7.2, 4.6), dpi=130, layout="constrained")
    axes, markers, controls = fig.subplots(), itertools.cycle(MARKERS), 0
    for c in found:
        cosines = (
            DataFrame([r.row for r in c.runs])[["cos_rms", "cos_chance_rms"]].astype(float).mean()
        )
        plain, method = baseline(c, found), c.first.cfg.method
        own, is_control = (
            method.has_direction and method.control_name == "none",
            cosines.notna().all(),
        )
        if (
            plain
            and len(c.runs) > 1
            and (own or is_control)
            and (less := compare(c, plain, "hack")).seeds
        ):
            controls += is_control
            axes.axvline(cosines.cos_chance_rms, color=GREY, lw=1, ls=":")
            colour, errors = _colour(c), _errors(less.difference)
            axes.errorbar(
                cosines.cos_rms if is_control else 1.0, -_percent(less.difference), yerr=errors and errors[::-1],
                fmt=next(markers), ms=8, color=colour, mfc="white" if is_control else colour, elinewidth=0.9,
                capsize=3, label=f"{c.title} ({len(c.runs)} seeds)",
            )  # fmt: skip
    if not controls:
        return None
    axes.axhline(0, color="black", lw=0.8)
    _style(
        axes,
        xlim=(0, 1.06),
        xlabel="|cos| with the real direction (rms)",
        ylabel="points less hacked, deployed",
    )
    _legend(fig, 2)
    return Picture(
        "suppression",
        "Points less hacked than plain GRPO against the likeness of a control's direction to the real one (root mean "
        "square over modules). Filled, at 1: the method itself. Dotted: the likeness of random directions. Intervals "
        "95 %, seed by seed.",
        fig,
    )
