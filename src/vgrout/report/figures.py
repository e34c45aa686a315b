"""The figures of a report. Markers and line styles tell methods apart; colours (Okabe and Ito's) only help. Cells of
one seed have only curves, and only where no cell has more."""

import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vgrout.report import stats
from vgrout.report.runs import WHATS, Cell, Run, What, bases, paired, partner
from vgrout.report.stats import Estimate
from vgrout.report.tables import compare, level
from vgrout.types import MODES, Mode

DPI = 130
BLACK, BLUE, RED, GREEN, ORANGE, SKY, PINK, GREY = (
    *("#000000", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#7F7F7F"),
)
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
BASES = ("*", "X", "p", "h")  # markers of untrained models
COLOURS = (BLACK, GREEN, RED, BLUE, ORANGE, PINK)  # of a picture's series, in their order
# By the intervention, where each has a panel of its own; one that is not here is grey.
_INTERVENTIONS = ("none", "erase", "route", "route2", "screen", "penalty", "sgtm")
COLOUR_OF = dict(zip(_INTERVENTIONS, (BLACK, ORANGE, BLUE, RED, SKY, GREEN, PINK), strict=True))
SERIES = len(COLOURS)  # in a picture, at most
SMOOTH = 5  # steps in a running mean of the students' answers


@dataclass(frozen=True, eq=False)
class Picture:
    name: str  # of its file, without the ending
    caption: str
    figure: Figure


def pictures(cells: Sequence[Cell]) -> list[Picture]:
    """Every figure that these cells can fill. Cells of one seed are drawn only where there are no others, as curves."""
    several = [c for c in cells if len(c.runs) > 1]
    drawn = (draw(several) for draw in (dumbbells, suppression, gates))
    return [*dynamics(several or cells), *pareto(several), *(p for p in drawn if p is not None)]


def _style(axes: Axes, **labels: object) -> None:
    axes.set(**labels)
    axes.grid(alpha=0.25, lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(fig: Figure) -> None:
    """The first panel's legend below all panels, in as many columns as the longest name allows."""
    handles, labels = fig.axes[0].get_legend_handles_labels()
    columns = max(1, min(4, len(labels), int(13.5 * fig.get_figwidth()) // (max(map(len, labels)) + 8)))
    fig.set_figheight(fig.get_figheight() + 0.19 * -(-len(labels) // columns))
    fig.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _wrapped(title: str, width: int) -> str:
    return textwrap.fill(title, width, break_long_words=False)


# ── dynamics ───────────────────────────────────────────────────────────────────────────────────────────────────────

Series = Callable[[Run], tuple[list[int], list[float]]]


def _students(what: What) -> Series:
    column = {"hack": "hack_s", "solve": "solve_s"}[what]

    def series(run: Run) -> tuple[list[int], list[float]]:
        counts = np.asarray([[row[f"{column}_k"], row[f"{column}_n"]] for row in run.rows], dtype=float)
        window = [counts[max(0, i - SMOOTH + 1) : i + 1].sum(axis=0) for i in range(len(counts))]
        return [row["step"] + 1 for row in run.rows], [k / n if n else np.nan for k, n in window]

    return series


def _deployed(what: What) -> Series:
    def series(run: Run) -> tuple[list[int], list[float]]:
        found = run.evaluations()
        return [step + 1 for step, _, _ in found], [{"hack": h, "solve": s}[what] for _, h, s in found]

    return series


def dynamics(cells: Sequence[Cell]) -> list[Picture]:
    """The methods, then the controls of plain GRPO, on as many pages as they need."""
    shown = [c for c in cells if c.first.control == "none" or c.first.intervention == "none"]
    found = _pages(sorted(shown, key=lambda c: c.first.control != "none"), cells)
    return [_dynamics(page, i, len(found)) for i, page in enumerate(found, 1)]


def _pages(shown: Sequence[Cell], cells: Sequence[Cell], others: int = 0) -> list[list[Cell]]:
    """At most SERIES cells each, with the `others` of every page; on every page the plain cell that most are compared
    with, and its ceiling."""
    compared = [v for c in shown if (v := partner(c, cells, "none"))]
    without = max(compared, key=compared.count, default=None)
    always = [c for c in (without, without and partner(without, cells, "none", "no_loophole")) if c]
    rest = [c for c in shown if c not in always]
    room = max(1, SERIES - others - len(always))
    pages = [[*always, *rest[at : at + room]] for at in range(0, len(rest), room)] or [always]
    return [page for page in pages if page]


def _numbered(name: str, page: int) -> str:
    return f"{name}-{page}" if page > 1 else name


def _of(page: int, pages: int) -> str:
    return f", {page} of {pages}" if pages > 1 else ""


def _dynamics(shown: Sequence[Cell], page: int, pages: int) -> Picture:
    """Thin: a seed. Thick: their mean. Band: its 95 % interval by Student's t."""
    fig = Figure(figsize=(9.5, 5.9), dpi=DPI, layout="constrained")
    for column, (side, series) in zip(
        fig.subplots(2, 2, sharex=True, sharey=True).T,
        (("students, as trained, training problems", _students), ("deployed, held-out problems", _deployed)),
        strict=True,
    ):
        for axes, what in zip(column, WHATS, strict=True):
            for cell, colour, dash, marker in zip(shown, COLOURS, DASHES, MARKERS, strict=False):
                _bundle(axes, cell, series(what), colour, dash, marker)
            _style(axes, ylim=(-0.02, 1.02), ylabel=f"{what} rate", title=side if what == "hack" else "")
            axes.title.set_fontsize(10)
        column[-1].set_xlabel("step")
    _legend(fig)
    several = any(len(cell.runs) > 1 for cell in shown)
    lines = (
        "Thin lines: seeds; thick: their mean; band: its 95 % interval (Student's t)." if several else "One seed each."
    )
    return Picture(
        _numbered("dynamics", page),
        f"Dynamics{_of(page, pages)}. {lines} Students: running mean of {SMOOTH} steps. "
        "During training the deployed model is evaluated on fewer held-out problems than at the end.",
        fig,
    )


def _bundle(axes: Axes, cell: Cell, series: Series, colour: str, dash: object, marker: str) -> None:
    drawn = [series(run) for run in cell.runs]
    for steps, values in drawn:
        axes.plot(steps, values, color=colour, lw=0.5, alpha=0.35)
    shared = sorted(set.intersection(*(set(steps) for steps, _ in drawn)))
    if not shared:
        return
    table = np.asarray([[dict(zip(*d, strict=True))[s] for s in shared] for d in drawn])
    every = max(1, len(shared) // 8)
    if len(drawn) > 1:
        axes.fill_between(shared, *_t_band(table), color=colour, alpha=0.12, lw=0)
    axes.plot(
        shared, table.mean(axis=0), color=colour, ls=dash, lw=2, marker=marker, ms=5, mfc="white", markevery=every,
        label=f"{cell.title} ({len(drawn)} seeds)" if len(drawn) > 1 else f"{cell.title} (seed {cell.seeds})",
    )  # fmt: skip


def _t_band(table: Float[np.ndarray, "seeds steps"]) -> tuple[list[float], list[float]]:
    bands = [
        stats.t_interval(list(column)) if np.ptp(column) > stats.ROUNDING else (column[0], column[0])
        for column in table.T
    ]
    return [max(low, 0.0) for low, _ in bands], [min(high, 1.0) for _, high in bands]


# ── Pareto ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _errors(e: Estimate) -> list[list[float]] | None:
    """Matplotlib's [[below], [above]], in percent."""
    if e.value is None or e.low is None or e.high is None:
        return None
    return [[100 * max(0.0, e.value - e.low)], [100 * max(0.0, e.high - e.value)]]


def pareto(cells: Sequence[Cell]) -> list[Picture]:
    """Deployed hack against solve of the methods and the bounds; controls are in the table of controls."""
    shown = [c for c in cells if c.first.control == "none" or c.first.intervention == "none"]
    untrained = bases([r for c in cells for r in c.runs])
    found = _pages(sorted(shown, key=lambda c: c.first.control != "none"), cells, len(untrained))
    return [_pareto(page, untrained, i, len(found)) for i, page in enumerate(found, 1)]


def _pareto(shown: Sequence[Cell], untrained: Sequence[Cell], page: int, pages: int) -> Picture:
    """A mark: a method's mean. Cross: its interval. Dots: its seeds."""
    fig = Figure(figsize=(7.2, 5.6), dpi=DPI, layout="constrained")
    axes = fig.subplots()
    marks = [(c, c.title, "deploy", *style) for c, *style in zip(shown, COLOURS, MARKERS, strict=False)]
    marks += [(c, f"{c.title}, untrained", "base", GREY, marker) for c, marker in zip(untrained, BASES, strict=False)]
    for cell, title, side, colour, marker in marks:
        x, y = (level(cell, side, what) for what in WHATS)
        axes.errorbar(
            100 * (x.value or 0), 100 * (y.value or 0), xerr=_errors(x), yerr=_errors(y), fmt=marker, color=colour,
            ms=10, mec="white", mew=0.8, elinewidth=1.0, capsize=2, zorder=3, label=f"{title} ({len(cell.runs)} seeds)",
        )  # fmt: skip
        for run in cell.runs:
            at = (100 * (run.rate(side, what) or 0) for what in WHATS)
            axes.plot(*at, ".", ms=5, color=colour, alpha=0.5, zorder=1)
    _style(axes, xlim=(-3, 103), ylim=(-3, 103), xlabel="deployed model: hack, %", ylabel="deployed model: solve, %")
    _legend(fig)
    return Picture(
        _numbered("pareto", page),
        f"Hack against solve of the deployed model{_of(page, pages)}: mean over seeds with 95 % intervals; dots: "
        "seeds. Up and to the left is better.",
        fig,
    )


# ── dumbbells ──────────────────────────────────────────────────────────────────────────────────────────────────────


def dumbbells(cells: Sequence[Cell]) -> Picture | None:
    """Hack rate per mode, as trained and as deployed; the modes of the direction's pairs are shaded."""
    shown = [c for c in cells if c.first.intervention != "none" and c.first.control == "none"]
    if not shown:
        return None
    modes = [m for m in MODES if any(m in c.first.modes for c in shown)]
    fig, panels = _panels(shown, 3.1, 2.6, sharey=True)
    for axes, cell in panels:
        of = {m: cell.first.in_distribution(m) for m in cell.first.modes}
        for at, mode in enumerate(modes):
            if of.get(mode):
                axes.axhspan(at - 0.5, at + 0.5, color=GREY, alpha=0.2, lw=0, zorder=0)
            if mode in of:
                _dumbbell(axes, cell, mode, at)
        _style(axes, xlim=(-4, 104), ylim=(len(modes) - 0.5, -0.5))
        no_pairs = "\n(no pairs)" if None in of.values() else ""
        axes.set_title(_wrapped(cell.title, 46) + no_pairs, fontsize=9)
        axes.set_yticks(range(len(modes)), modes)
        axes.tick_params(labelsize=8)
    fig.supxlabel("hack, %", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    shaded = Patch(color=GREY, alpha=0.2, lw=0, label="mode that the direction's pairs show")
    fig.legend(
        handles=[*handles[:2], shaded], labels=[*labels[:2], shaded.get_label()], loc="outside upper center", ncols=3,
        frameon=False, fontsize=9,
    )  # fmt: skip
    return Picture(
        "modes",
        "Hack rate per mode, from as trained (open) to deployed (filled), mean over seeds with 95 % intervals. Shaded: "
        "the modes that the direction's pairs show; the others are held out from it. No pairs: a method without a "
        "direction.",
        fig,
    )


def _panels(shown: Sequence[Cell], wide: float, high: float, **shared: Any) -> tuple[Figure, list[tuple[Axes, Cell]]]:
    """One panel for each cell, four in a line. wide, high: inches of a panel."""
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    fig = Figure(figsize=(wide * columns, high * lines + 0.5), dpi=DPI, layout="constrained")
    grid = fig.subplots(lines, columns, squeeze=False, **shared).ravel()
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    return fig, list(zip(grid, shown, strict=False))


def _dumbbell(axes: Axes, cell: Cell, mode: Mode, at: int) -> None:
    colour = COLOUR_OF.get(cell.first.intervention, GREY)
    trained, deployed = (level(cell, side, "hack", mode) for side in ("train", "deploy"))
    a, b = (100 * (e.value or 0) for e in (trained, deployed))
    axes.plot([a, b], [at, at], color=colour, lw=2.2, alpha=0.6)
    for value, e, face, label in ((a, trained, "white", "as trained"), (b, deployed, colour, "deployed")):
        axes.errorbar(
            value, at, xerr=_errors(e), fmt="o", ms=8, mfc=face, color=colour, elinewidth=0.8, capsize=2, label=label
        )


# ── suppression against likeness ───────────────────────────────────────────────────────────────────────────────────


def suppression(cells: Sequence[Cell]) -> Picture | None:
    """How much less a method hacks than plain GRPO, against the likeness of its control's direction to the real one."""
    beside: dict[Cell, Cell] = {}  # a cell with a direction → plain GRPO's
    for cell in cells:
        without = partner(cell, cells, "none")
        if (
            without is not None
            and paired(cell, without)
            and (cell.first.cosine_to_real or cell.first.control == "none")
        ):
            beside[cell] = without
    directed = [c for c in beside if c.first.has_direction]
    variants = list(dict.fromkeys(_variant(c) for c in directed if c.first.cosine_to_real))  # another gate is another
    if not variants:
        return None
    fig = Figure(figsize=(3.6 * len(variants) + 0.6, 4.6), dpi=DPI, layout="constrained")
    controls = dict.fromkeys(c.first.control for c in beside if c.first.cosine_to_real)
    marker = dict(zip(controls, itertools.cycle(MARKERS[1:]), strict=False))
    for axes, variant in zip(np.atleast_1d(fig.subplots(1, len(variants), sharey=True)), variants, strict=True):
        own = [c for c in directed if _variant(c) == variant]
        chance = float(np.mean([r.cosine_to_real["chance_rms"] for c in own for r in c.runs if r.cosine_to_real]))
        axes.axvline(chance, color=GREY, lw=1, ls=":")
        axes.annotate("chance", (chance, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=8)
        for cell in own:
            _suppressed(axes, cell, beside[cell], marker.get(cell.first.control, "o"))
        axes.axhline(0, color="black", lw=0.8)
        _style(axes, xlim=(0, 1.06), xlabel="|cos| with the real direction (rms)")
        axes.set_title(_wrapped(variant, 32), pad=16)
        axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1)
    fig.axes[0].set_ylabel("points less hacked than plain GRPO, deployed")
    return Picture(
        "suppression",
        "Suppression against the likeness of a control's direction to the real one (root mean square over modules). "
        "Filled, at 1: the method itself. Dotted: the likeness of random directions. Intervals 95 %, seed by seed. "
        "Shuffled pairs of erase and route span the real axes and vote their signs anew, so they are at 1 too.",
        fig,
    )


def _variant(cell: Cell) -> str:
    """The method's name in tables, without its control."""
    return cell.first.method.split(" · ")[0]


def _suppressed(axes: Axes, cell: Cell, without: Cell, marker: str) -> None:
    e = compare(cell, without, "hack").difference
    plain = cell.first.control == "none"
    cosine_to_real = 1.0 if plain else float(np.mean([r.cosine_to_real["rms"] for r in cell.runs if r.cosine_to_real]))
    errors = _errors(e)
    colour = COLOUR_OF.get(cell.first.intervention, GREY)
    axes.errorbar(
        cosine_to_real, -100 * (e.value or 0), yerr=None if errors is None else errors[::-1], 
        fmt="o" if plain else marker,
        ms=9 if plain else 7, color=colour, mfc=colour if plain else "white", elinewidth=0.9, capsize=3,
        label=f"{'the method' if plain else cell.first.control} ({len(cell.runs)} seeds)",
    )  # fmt: skip


# ── gates ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def gates(cells: Sequence[Cell]) -> Picture | None:
    """Distribution of the gate's values over true hacks and the rest, after training."""
    shown = [c for c in cells if any(r.gates for r in c.runs)]
    if not shown:
        return None
    fig, panels = _panels(shown, 2.9, 2.3)
    for axes, cell in panels:
        found = [pair for r in cell.runs for pair in r.gates]
        limits = (0.0, 1.0) if cell.first.intervention == "route2" else None  # a score has no bounds
        bins = list(np.histogram_bin_edges([at for at, _ in found], bins=20, range=limits))
        hacks, rest = ([at for at, hack in found if hack is label] for label in (True, False))
        of_all = [np.full(len(values), 1 / max(1, len(values))) for values in (rest, hacks)]  # shares of each kind
        axes.hist(rest, bins, weights=of_all[0], color="#BBBBBB", edgecolor="white", lw=0.4, label="not a hack")
        axes.hist(hacks, bins, weights=of_all[1], histtype="step", color="black", lw=1.5, hatch="////", label="hack")
        _style(axes, title=f"{_wrapped(cell.title, 46)}\n{len(hacks)} hacks, {len(rest)} others")
        axes.title.set_fontsize(8)
        axes.tick_params(labelsize=8)
    fig.supxlabel(
        "route2: share of modules in which a rollout was quarantined; monitors of text: its score", fontsize=9
    )
    fig.supylabel("share of its kind", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return Picture(
        "gates",
        "The gate by true label (the strict oracle's, which the gate never sees), students' rollouts of all steps and "
        "seeds. A good gate separates the two: route2's puts hacks at 1 and everything else at 0.",
        fig,
    )
