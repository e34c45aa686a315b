"""The figures of a report. Markers and line styles tell methods apart; colours (Okabe and Ito's, ordered by lightness)
only help. Cells of one seed have only curves, and only where no cell has more."""

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
from matplotlib.text import Annotation

from vgrout.report import stats
from vgrout.report.runs import WHATS, Cell, Run, What, bases, paired, partner
from vgrout.report.stats import Estimate
from vgrout.report.tables import compare, level
from vgrout.types import MODES, Mode

DPI = 130
BLACK, BLUE, RED, GREEN, ORANGE, SKY, PINK, GREY = (
    *("#000000", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#7F7F7F"),
)
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 3)), (0, (3, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "d", "H")
# By the intervention; one that is not here is grey and round.
_INTERVENTIONS = ("none", "erase", "route", "route2", "screen", "penalty", "sgtm")
COLOUR_OF = dict(zip(_INTERVENTIONS, (BLACK, ORANGE, BLUE, RED, SKY, GREEN, PINK), strict=True))
MARKER_OF = dict(zip(_INTERVENTIONS, ("s", "^", "o", "D", "<", ">", "h"), strict=True))
FILL_OF = {"erase": "bottom", "route": "left", "screen": "right", "penalty": "top"}  # of its controls' markers
BOUNDS = ("no_loophole", " (labels)")  # the control and the monitor that bound what is possible
LINES = 9  # on a page of the dynamics
SMOOTH = 5  # steps in a running mean of the students' answers


@dataclass(frozen=True, eq=False)
class Picture:
    name: str  # of its file, without the ending
    caption: str
    figure: Figure


def pictures(cells: Sequence[Cell]) -> list[Picture]:
    """Every figure that these cells can fill. Cells of one seed are drawn only where there are no others, as curves."""
    several = [c for c in cells if len(c.runs) > 1]
    drawn = (draw(several) for draw in (pareto, dumbbells, suppression, gates))
    return [*dynamics(several or cells), *(p for p in drawn if p is not None)]


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
    """The methods, then the controls of plain GRPO, on as many pages as they need; on each the plain cell that most are
    compared with, and its ceiling."""
    shown = [c for c in cells if c.first.control == "none" or c.first.intervention == "none"]
    shown = sorted(shown, key=lambda c: c.first.control != "none")
    compared = [v for c in shown if (v := partner(c, cells, "none"))]
    without = max(compared, key=compared.count, default=None)
    always = [c for c in (without, without and partner(without, cells, "none", "no_loophole")) if c]
    rest = [c for c in shown if c not in always]
    room = LINES - len(always)
    pages = [[*always, *rest[at : at + room]] for at in range(0, len(rest), room)] or [always]
    return [_dynamics(page, i, len(pages)) for i, page in enumerate(pages, 1) if page]


def _dynamics(shown: Sequence[Cell], page: int, pages: int) -> Picture:
    """Thin: a seed. Thick: their mean. Band: its 95 % interval by Student's t."""
    fig = Figure(figsize=(9.5, 5.9), dpi=DPI, layout="constrained")
    colours = dict(zip((c.title for c in shown), _colours(shown), strict=True))
    for column, (side, series) in zip(
        fig.subplots(2, 2, sharex=True, sharey=True).T,
        (("students, as trained, training problems", _students), ("deployed, held-out problems", _deployed)),
        strict=True,
    ):
        for axes, what in zip(column, WHATS, strict=True):
            for cell, dash, marker in zip(shown, itertools.cycle(DASHES), itertools.cycle(MARKERS), strict=False):
                _bundle(axes, cell, series(what), colours[cell.title], dash, marker)
            _style(axes, ylim=(-0.02, 1.02), ylabel=f"{what} rate", title=side if what == "hack" else "")
            axes.title.set_fontsize(10)
        column[-1].set_xlabel("step")
    _legend(fig)
    several = any(len(cell.runs) > 1 for cell in shown)
    lines = (
        "Thin lines: seeds; thick: their mean; band: its 95 % interval (Student's t)." if several else "One seed each."
    )
    return Picture(
        f"dynamics-{page}" if page > 1 else "dynamics",
        f"Dynamics{f', {page} of {pages}' if pages > 1 else ''}. {lines} Students: running mean of {SMOOTH} steps. "
        "During training the deployed model is evaluated on fewer held-out problems than at the end.",
        fig,
    )


def _colours(shown: Sequence[Cell]) -> list[str]:
    """An intervention's own colour for its plain cell, the others in order."""
    taken = {COLOUR_OF.get(c.title) for c in shown}
    rest = itertools.cycle([GREY, *(c for c in (GREEN, PINK, SKY) if c not in taken)])
    return [COLOUR_OF[c.title] if c.title in COLOUR_OF else next(rest) for c in shown]


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


def pareto(cells: Sequence[Cell]) -> Picture | None:
    """Deployed hack against solve; up and to the left is better. Methods and bounds are filled, controls and other
    settings of a method open."""
    if not cells:
        return None

    def kind(cell: Cell) -> str:
        """The control, or the setting in the title's brackets; "": the method itself."""
        control, title = cell.first.control, cell.title
        return control if control != "none" else title[title.index(" (") :] if title.endswith(")") else ""

    fig = Figure(figsize=(9.5, 6.2), dpi=DPI, layout="constrained")
    axes = fig.subplots()
    kinds = dict.fromkeys(k for c in cells if (k := kind(c)) not in ("", *BOUNDS))
    marker_of = dict(zip(kinds, itertools.cycle(MARKERS), strict=False))
    for cell in cells:
        x, y = (level(cell, "deploy", what) for what in WHATS)
        intervention, plain = cell.first.intervention, not kind(cell)
        bound = (plain and intervention == "none") or kind(cell) in BOUNDS
        big = plain or bound
        marker = "*" if bound else MARKER_OF.get(intervention, "o") if plain else marker_of[kind(cell)]
        colour = COLOUR_OF.get(intervention, GREY)
        axes.errorbar(
            100 * (x.value or 0), 100 * (y.value or 0), xerr=_errors(x), yerr=_errors(y), fmt=marker, color=colour,
            ms=17 if bound else 11 if plain else 7, mfc=colour, mec=colour, mew=1.4, mfcalt="white",
            fillstyle="full" if big else FILL_OF.get(intervention, "none"),
            elinewidth=1.0 if big else 0.3, capsize=2 if big else 0, zorder=3 if big else 2,
            label=f"{cell.title} ({len(cell.runs)} seeds)",
        )  # fmt: skip
        if bound:
            _name(axes, cell.title, x, y)
        if big:
            for run in cell.runs:
                axes.plot(
                    100 * (run.rate("deploy", "hack") or 0), 100 * (run.rate("deploy", "solve") or 0), ".", ms=4,
                    color=colour, alpha=0.5, zorder=1,
                )  # fmt: skip
    for base in bases([r for c in cells for r in c.runs]):
        x, y = (level(base, "base", what) for what in WHATS)
        axes.errorbar(
            100 * (x.value or 0), 100 * (y.value or 0), xerr=_errors(x), yerr=_errors(y), fmt="*", ms=17, color=GREY,
            mec="black", label=f"{base.title}, untrained ({len(base.runs)} seeds)", zorder=3,
        )  # fmt: skip
        _name(axes, base.title, x, y)
    _style(axes, xlim=(-3, 103), ylim=(-3, 103), xlabel="deployed model: hack, %", ylabel="deployed model: solve, %")
    _legend(fig)
    return Picture(
        "pareto",
        "Hack against solve of the deployed model, mean over seeds with 95 % intervals; dots: seeds. Stars: bounds "
        "(base, none, no loophole, true labels). Large: the methods; small: controls and other settings, in the "
        "intervention's colour, filled below for erase, left for route, right for screen, above for penalty, open for "
        "the others.",
        fig,
    )


def _name(axes: Axes, name: str, x: Estimate, y: Estimate) -> None:
    """Name a star, unless another star's name is there already; the legend has all names."""
    at = (100 * (x.value or 0), 100 * (y.value or 0))
    if any(abs(at[0] - t.xy[0]) < 25 and abs(at[1] - t.xy[1]) < 5 for t in axes.texts if isinstance(t, Annotation)):
        return
    to_the_left = at[0] > 60
    axes.annotate(
        _wrapped(name, 26), at, (-10, 12) if to_the_left else (10, 7), textcoords="offset points", fontsize=9,
        ha="right" if to_the_left else "left", bbox={"boxstyle": "round,pad=.15", "fc": "white", "lw": 0, "alpha": 0.7},
    )  # fmt: skip


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
