"""The figures of a report."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from vgrout.report.dynamics import (
    BLUE,
    GREY,
    RED,
    SHOWN,
    Drawing,
    Picture,
    dynamics,
    legend,
    of_how_many,
    panels_of,
    style,
)

# isort: split

from matplotlib.axes import Axes
from pandas import DataFrame

from vgrout.report.conclusions import compare, level
from vgrout.report.load import Condition, baseline, flaws_of
from vgrout.report.stats import Estimate

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
    for draw in (dynamics, plane, by_flaw, suppression):
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
    legend(fig, 2)
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
    fig, panels = panels_of(found[:SHOWN], wide=3.1, high=2.4)
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
    legend(fig, 3)
    return Picture(
        "flaws",
        "Hack rate by flaw, from as trained (open) to deployed (filled), with 95 % intervals. "
        "Shaded: the flaws that the direction's pairs show; the others are held out from it. No "
        f"pairs: a method without a direction.{of_how_many(found)}",
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


def suppression(found: Sequence[Condition]) -> Picture | None:
    """Draw how much less a method hacks than plain GRPO, over several seeds; None: without
    controls.

    The other axis is the likeness of a control's direction to the real one.
    """
    fig = Drawing(figsize=(7.2, 4.6), dpi=130, layout="constrained")
    axes, markers = fig.subplots(), itertools.cycle(MARKERS)
    has_controls = False
    for c in found:
        cosines = DataFrame([run.likeness for run in c.runs], dtype=float).mean()
        is_control = bool(cosines.notna().all())
        method = c.first.cfg.method
        is_own = method.has_direction and method.control_name == "none"
        plain = baseline(c, found)
        if not plain or len(c.runs) < 2 or not (is_own or is_control):
            continue
        comparison = compare(c, plain, "hack")
        if not comparison.seeds:
            continue
        likeness = 1.0
        if is_control:
            has_controls = True
            likeness, by_chance = cosines
            axes.axvline(by_chance, color=GREY, lw=1, ls=":")
        errors = _errors(comparison.difference)
        axes.errorbar(
            likeness,
            -_percent(comparison.difference),
            yerr=errors and errors[::-1],  # the axis shows minus the difference
            fmt=next(markers),
            ms=8,
            color=_colour(c),
            mfc="white" if is_control else _colour(c),
            elinewidth=0.9,
            capsize=3,
            label=f"{c.title} ({len(c.runs)} seeds)",
        )
    if not has_controls:
        return None
    axes.axhline(0, color="black", lw=0.8)
    style(
        axes,
        xlim=(0, 1.06),
        xlabel="|cos| with the real direction (rms)",
        ylabel="points less hacked, deployed",
    )
    legend(fig, 2)
    return Picture(
        "suppression",
        "Points less hacked than plain GRPO against the likeness of a control's direction to the "
        "real one (root mean square over modules). Filled, at 1: the method itself. Dotted: the "
        "likeness of random directions. Intervals 95 %, seed by seed.",
        fig,
    )
