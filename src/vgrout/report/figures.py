"""The figures of a report: curves of hack and solve by step, and figures of several conditions.

Markers and line styles tell methods apart; colours, Okabe and Ito's, only help.
"""

import io
import itertools
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vgrout.report import backend  # noqa: F401 before matplotlib, see there

# isort: split

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from pandas import DataFrame, Series

from vgrout.report import stats
from vgrout.report.conclusions import conclusion, level
from vgrout.report.load import WHATS, Condition, FinishedRun, What, baseline, flaws_of
from vgrout.report.stats import Estimate

RED, BLUE, GREY = "#D55E00", "#0072B2", "#7F7F7F"
# steps in a running mean of the training answers: a step, two before it and two after it
SMOOTH = 5
# Panels of a figure, and names in a legend, at most: more could not be read, and take minutes.
SHOWN = 24
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
# Colours of interventions; one that is not here is grey.
COLOUR_OF = {
    "none": "#000000",
    "erase": "#E69F00",
    "route": BLUE,
    "route2": RED,
    "screen": "#CC79A7",
    "penalty": "#009E73",
}


@dataclass(frozen=True)
class Style:
    """How a curve is drawn."""

    colour: str
    dash: str
    marker: str


STYLE = {"hack": Style(RED, "-", "o"), "solve": Style(BLUE, "--", "s")}


class Drawing(Figure):
    """A figure that a notebook shows as the last value of a cell.

    matplotlib teaches notebooks to show figures only when pyplot is imported there.
    """

    def png(self) -> bytes:
        """Draw the figure by matplotlib's own canvas for files, whatever a notebook has chosen."""
        out = io.BytesIO()
        # "tight": no long label or legend is cut off
        self.savefig(out, format="png", bbox_inches="tight")
        return out.getvalue()

    _repr_png_ = png


@dataclass(frozen=True, eq=False)
class Picture:
    name: str  # of its file, without the ending
    caption: str
    figure: Drawing


def _panels_of(
    shown: Sequence[Condition], wide: float, high: float
) -> tuple[Drawing, list[tuple[Axes, Condition]]]:
    """Make a figure with one panel for each condition, four in a line, on a common y axis.

    wide, high: of a panel, in inches.
    """
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    fig = Drawing(figsize=(wide * columns, high * lines + 0.7), dpi=130, layout="constrained")
    panels = fig.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    return fig, list(zip(panels, shown, strict=False))


def style(axes: Axes, title: str = "", note: str = "", **labels: object) -> None:
    """Set the title with a note in a line below it, the labels and limits, and a faint grid."""
    axes.set(**labels)
    lines = textwrap.wrap(title, 42, break_long_words=False)
    axes.set_title("\n".join([*lines, note]).strip(), fontsize=9)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(fig: Figure, columns: int, size: int = 8) -> None:
    """Put one legend below the figure; what several panels show stands there once.

    size: of its text, in points.
    """
    handles: dict[str, Artist] = {}
    for axes in fig.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    fig.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=size,
    )


def dynamics(found: Sequence[Condition]) -> Picture:
    """Draw hack and solve by step, of the answers in training and of the deployed model.

    Each condition has a panel. One alone has what it ended at written beside its marks; of several,
    that stands in their titles. In grey are the deployed hacks of plain GRPO in the same setting.
    """
    alone = len(found) == 1
    shown = found[:SHOWN]
    if alone:
        fig, panels = _panels_of(shown, wide=8.0, high=3.6)
    else:
        fig, panels = _panels_of(shown, wide=3.6, high=2.8)
    for axes, condition in panels:
        plain = baseline(condition, found)
        if plain:
            _plain_curve(axes, plain)
        for what in WHATS:
            _curves(axes, condition, what)
        _mark_ends(axes, condition, named=alone)
        xlabel = f"step{_sampled_note(condition)}"
        style(axes, ylim=(-0.03, 1.03), xlabel=xlabel, ylabel="% of answers")
        axes.label_outer()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 2.5
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        if alone:
            means = conclusion(condition) if condition.first.final else "no final evaluation"
            sentence = textwrap.fill(f"{condition.title}: {means}", 84)
            axes.set_title(sentence, fontsize=12, loc="left")
        else:
            title = "none (plain GRPO)" if condition.title == "none" else condition.title
            lines = textwrap.wrap(title, 36, break_long_words=False)
            axes.set_title("\n".join([*lines, _from_to(condition)]), fontsize=11)
    _legend(fig, 2 if alone else 3, size=10)
    return Picture(
        "dynamics",
        "Dynamics. Lines: the model's own answers to training problems, centred running mean of "
        f"{SMOOTH} steps; open marks: the deployed model on a few held-out problems, after the "
        "step; star: the final evaluation, of the deployed model, and open with the quarantine on. "
        "Of several seeds, thin: a seed; thick: their mean; "
        "band: its 95 % interval (Student's t)." + _of_how_many(found),
        fig,
    )


def _of_how_many(found: Sequence[Condition]) -> str:
    """Say in a caption how many conditions a figure shows, where that is not all."""
    if len(found) <= SHOWN:
        return ""
    return f" The first {SHOWN} of {len(found)} conditions; the tables have all."


def _from_to(c: Condition) -> str:
    """Say in a line what became of the model: `hack 0 → 80 %, solve 47 → 3 %`."""
    said = []
    for what in WHATS:
        before, after = (100 * (level(c, side, what).value or 0) for side in ("base", "deploy"))
        said.append(f"{what} {before:.0f} → {after:.0f} %")
    return ", ".join(said)


# Labels beside marks are so far apart, as a share of the axis.
APART = 0.085


def _mark_ends(axes: Axes, condition: Condition, named: bool) -> None:
    """Mark what the final evaluation found, to the right of the last step.

    named: write beside each mark what it is; else the legend says so.
    """
    last = max(int(run.steps.step.iloc[-1]) for run in condition.runs) + 1
    x = last + max(1, last // 30)
    sides = {"deploy": "deployed"}
    if condition.first.cfg.method.routes:
        sides["train"] = "as trained"
    ends: list[tuple[float, str, str]] = []
    for what in WHATS:
        colour = STYLE[what].colour
        for side, model in sides.items():
            share = level(condition, side, what).value
            if share is None:
                continue
            ends.append((share, f"{what}, {model}: {100 * share:.1f} %", colour))
            label = "" if named else f"{what}, {model}, at the end"
            face = colour if side == "deploy" else "white"
            axes.plot(x, share, "*", ms=12, color=colour, mfc=face, clip_on=False, label=label)
    at = -1.0
    for share, said, colour in sorted(ends) if named else ():
        at = max(share, at + APART)
        axes.annotate(
            said,
            (x, at),
            xytext=(24, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=10,
            annotation_clip=False,
        )


def _plain_curve(axes: Axes, plain: Condition) -> None:
    """Draw the deployed hacks of plain GRPO, where it was evaluated on the way."""
    curve = _deployed(plain, "hack")
    if len(curve):
        mean = curve.mean(axis=1)
        axes.plot(mean.index + 1, mean, color=GREY, lw=3, alpha=0.5, label="hack, plain GRPO")


def _sampled_note(condition: Condition) -> str:
    """Say from which model answers are sampled in training; "": the method has but one."""
    if not condition.first.cfg.method.routes:
        return ""
    how = {1.0: "as deployed", 0.0: "as trained"}
    ablated = condition.first.cfg.method.ablate_frac
    return f" (training answers sampled {how.get(ablated, 'partly as deployed')})"


def _curves(axes: Axes, condition: Condition, what: What) -> None:
    """Draw what one condition hacks or solves: in training, and in evaluations on the way."""
    style = STYLE[what]
    by_seed = DataFrame({run.seed: _in_training(run, what) for run in condition.runs})
    by_seed = by_seed.dropna(how="all")
    shared = by_seed.dropna()  # the steps that all seeds have
    if len(condition.runs) > 1:
        axes.plot(by_seed.index + 1, by_seed, color=style.colour, lw=0.5, alpha=0.35)
        _band(axes, shared, style.colour, what)
    label = f"{what}, training answers"
    mean = shared.mean(axis=1)
    axes.plot(shared.index + 1, mean, style.dash, color=style.colour, lw=1.8, label=label)
    evaluated = _deployed(condition, what)
    if len(evaluated):
        axes.plot(
            evaluated.index + 1,
            evaluated.mean(axis=1),
            style.marker,
            color=style.colour,
            mfc="white",
            ms=5,
            label=f"{what}, held-out answers, deployed",
        )


def _band(axes: Axes, by_seed: DataFrame, colour: str, what: What) -> None:
    """Fill the interval of the seeds' mean at each step; it is the mean where there is none."""
    lows, highs = [], []
    for values in by_seed.to_numpy():
        mean = stats.over_seeds(list(values))
        lows.append(mean.value or 0.0 if mean.low is None else mean.low)
        highs.append(mean.value or 0.0 if mean.high is None else mean.high)
    label = f"{what}, 95 % interval of the line"
    steps = by_seed.index + 1
    axes.fill_between(steps, lows, highs, label=label, color=colour, alpha=0.15, lw=0)


def _in_training(run: FinishedRun, what: What) -> Series:
    """Return by step the share of the model's own answers that hack or solve, over the window
    around the step."""
    counts = run.steps.set_index("step")[[f"{what}_s_k", f"{what}_s_n"]].astype(float)
    window = counts.rolling(SMOOTH, min_periods=1, center=True).sum()
    answers = window[f"{what}_s_n"]
    return window[f"{what}_s_k"] / answers.where(answers > 0)


def _deployed(condition: Condition, what: What) -> DataFrame:
    """Return the deployed model's evaluations on the way, by step and seed; empty: there were
    none."""
    by_seed = {}
    for run in condition.runs:
        if f"{what}_deploy" in run.steps:
            by_seed[run.seed] = run.steps.set_index("step")[f"{what}_deploy"]
    return DataFrame(by_seed).dropna()


# ── figures of several conditions


def _colour(condition: Condition) -> str:
    return COLOUR_OF.get(condition.first.cfg.method.intervention, GREY)


def _percent(e: Estimate) -> float:
    return 100 * (e.value or 0.0)


def _errors(e: Estimate) -> list[list[float]] | None:
    """Return an interval as matplotlib's error bars, [[below], [above]], in percent."""
    if e.value is None or e.low is None or e.high is None:
        return None
    below = max(0.0, e.value - e.low)
    above = max(0.0, e.high - e.value)
    return [[100 * below], [100 * above]]


def pictures(found: Sequence[Condition]) -> list[Picture]:
    """Return every figure that these conditions can fill."""
    drawn = []
    for draw in (dynamics, plane, by_flaw):
        picture = draw(found)
        if picture:
            drawn.append(picture)
    return drawn


def plane(found: Sequence[Condition]) -> Picture | None:
    """Draw deployed hack against solve; None: there is but one condition.

    Mark: a condition's mean, or its one run. Cross: its interval. Dots: its seeds. Star: its model
    before training.
    """
    if len(found) < 2:
        return None
    fig = Drawing(figsize=(7.2, 5.6 + 0.1 * min(SHOWN, len(found))), dpi=130, layout="constrained")
    axes = fig.subplots()
    markers_of_colour: dict[str, Iterator[str]] = defaultdict(lambda: itertools.cycle(MARKERS))
    for place, c in enumerate(found):
        _mark_condition(axes, c, next(markers_of_colour[_colour(c)]), named=place < SHOWN)
    style(
        axes,
        xlim=(-3, 103),
        ylim=(-3, 103),
        xlabel="deployed model: hack, %",
        ylabel="deployed model: solve, %",
    )
    _legend(fig, 2)
    named = f" The first {SHOWN} of {len(found)} are named." if len(found) > SHOWN else ""
    return Picture(
        "plane",
        "Hack against solve of the deployed model, with 95 % intervals; dots: seeds. Up and to the "
        f"left is better.{named}",
        fig,
    )


def _mark_condition(axes: Axes, c: Condition, marker: str, named: bool) -> None:
    """Draw a condition in the plane: its mean with intervals, its seeds, and its base model.

    named: the legend has it.
    """
    colour, n = _colour(c), len(c.runs)
    hack, solve = level(c, "deploy", "hack"), level(c, "deploy", "solve")
    over = f"{n} seeds" if n > 1 else f"seed {c.seeds}"
    axes.errorbar(
        _percent(hack),
        _percent(solve),
        xerr=_errors(hack),
        yerr=_errors(solve),
        fmt=marker,
        color=colour,
        ms=10,
        mec="white",
        mew=0.8,
        elinewidth=1.0,
        capsize=2,
        zorder=3,
        label=f"{c.title} ({over})" if named else None,
    )
    if n > 1:
        hacks = [100 * (run.counted("deploy", "hack").value or 0) for run in c.runs]
        solves = [100 * (run.counted("deploy", "solve").value or 0) for run in c.runs]
        axes.plot(hacks, solves, ".", ms=5, color=colour, alpha=0.5, zorder=1)
    axes.plot(
        _percent(level(c, "base", "hack")),
        _percent(level(c, "base", "solve")),
        "*",
        ms=11,
        color=GREY,
        mec="white",
        zorder=2,
        label="before training",
    )


def by_flaw(found: Sequence[Condition]) -> Picture | None:
    """Draw the hack rate by flaw, as trained and as deployed; None: no method is among these.

    The flaws that the direction's pairs show are shaded.
    """
    found = [c for c in found if c.first.cfg.method.intervention != "none"]
    found = [c for c in found if c.first.cfg.method.control_name == "none"]
    if not found:
        return None
    flaws = flaws_of(found)
    fig, panels = _panels_of(found[:SHOWN], wide=3.1, high=2.4)
    for axes, c in panels:
        pairs_show = {m: c.first.final["by_mode"][m].get("in_dist") for m in c.first.flaws}
        for flaw, in_pairs in pairs_show.items():
            at = flaws.index(flaw)
            if in_pairs:
                label = "flaw that the direction's pairs show"
                axes.axhspan(at - 0.5, at + 0.5, color=GREY, alpha=0.2, lw=0, zorder=0, label=label)
            trained = level(c, "train", "hack", flaw)
            deployed = level(c, "deploy", "hack", flaw)
            ends = [_percent(trained), _percent(deployed)]
            axes.plot(ends, [at, at], color=_colour(c), lw=2.2, alpha=0.6)
            _flaw_end(axes, at, trained, _colour(c), "white", "as trained")
            _flaw_end(axes, at, deployed, _colour(c), _colour(c), "deployed")
        has_pairs = any(in_pairs is not None for in_pairs in pairs_show.values())
        style(
            axes,
            c.title,
            "" if has_pairs else "(no pairs)",
            xlim=(-4, 104),
            ylim=(len(flaws) - 0.5, -0.5),
            xlabel="hack, %",
        )
        axes.set_yticks(range(len(flaws)), flaws, fontsize=8)
    _legend(fig, 3)
    return Picture(
        "flaws",
        "Hack rate by flaw, from as trained (open) to deployed (filled), with 95 % intervals. "
        "Shaded: the flaws that the direction's pairs show; the others are held out from it. No "
        f"pairs: a method without a direction.{_of_how_many(found)}",
        fig,
    )


def _flaw_end(axes: Axes, at: int, e: Estimate, colour: str, face: str, label: str) -> None:
    """Mark a flaw's hack rate, in the row `at`."""
    axes.errorbar(
        _percent(e),
        at,
        xerr=_errors(e),
        fmt="o",
        ms=8,
        mfc=face,
        color=colour,
        elinewidth=0.8,
        capsize=2,
        label=label,
    )
