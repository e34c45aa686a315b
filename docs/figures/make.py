"""The figures of README.md and the results: the pipeline, and plots of the runs in docs/runs/*.csv.

    uv run python docs/figures/make.py

Writes pipeline.png, containment.png, hack-solve.png, readers.png and suppression.png beside this file (seconds). The
other figures there, growth-*.png, are written by `python -m benchmarks`.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from vgrout.report.figures import BLACK, BLUE, COLOUR_OF, GREEN, GREY, MARKER_OF, ORANGE, PINK, RED, SKY
from vgrout.types import MODES

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "runs"
# With removed interventions, of which there are runs.
COLOUR = COLOUR_OF | {"reader": GREEN, "surprise": PINK, "pmi": SKY}
MARKER = MARKER_OF | {"reader": "v", "surprise": "P", "pmi": "X"}


@dataclass(frozen=True)
class Run:
    """One row of docs/runs: rates in %, of the deployed model and of the untrained base."""

    arm: str
    control: str
    settings: frozenset[str]
    seed: int
    hack: float
    solve: float
    hack_base: float
    solve_base: float
    by_mode: Mapping[str, float]  # hack
    cosine: float | None  # root mean square over modules of |cos| with the real direction


def read(name: str) -> list[Run]:
    """The runs of docs/runs/NAME.csv."""
    rows = csv.DictReader((RUNS / f"{name}.csv").read_text(encoding="utf-8").splitlines())
    return [
        Run(
            arm=row["arm"],
            control=row["control"],
            settings=frozenset(row["settings"].split()),
            seed=int(row["seed"]),
            hack=100 * float(row["hack_deploy"]),
            solve=100 * float(row["solve_deploy"]),
            hack_base=100 * float(row["hack_base"]),
            solve_base=100 * float(row["solve_base"]),
            by_mode={m: 100 * float(v) for m in MODES if (v := row.get(f"hack_deploy_{m}"))},
            cosine=float(row["cos_rms"]) if row["cos_rms"] else None,
        )
        for row in rows
    ]


def of(runs: Iterable[Run], arm: str, control: str = "none", settings: str = "") -> list[Run]:
    """The runs of one arm and control with exactly these settings away from the preset.

    Raises:
        ValueError: there are none.
    """
    found = [r for r in runs if (r.arm, r.control, r.settings) == (arm, control, frozenset(settings.split()))]
    if not found:
        raise ValueError(f"no run of {arm}, control {control}, settings {settings!r}")
    return found


def axes_style(axes: Axes) -> None:
    axes.grid(alpha=0.25, lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def point(
    axes: Axes,
    runs: Sequence[Run],
    label: str,
    colour: str,
    marker: str,
    *,
    at: tuple[float, float],
    hollow: bool = False,
) -> None:
    """A large marker at the mean over seeds, a dot for each seed, and the label `at` an offset in points."""
    x, y = mean(r.hack for r in runs), mean(r.solve for r in runs)
    axes.scatter([r.hack for r in runs], [r.solve for r in runs], s=9, color=colour, alpha=0.55, lw=0, zorder=2)
    face = "white" if hollow else colour
    axes.scatter([x], [y], s=85, marker=marker, facecolor=face, edgecolor=colour, lw=1.4, zorder=3)
    side = "left" if at[0] > 0 else "right" if at[0] < 0 else "center"
    axes.annotate(label, (x, y), at, textcoords="offset points", ha=side, va="center", fontsize=8.5, color="#222222")


def base_point(axes: Axes, runs: Sequence[Run], at: tuple[float, float]) -> None:
    x, y = mean(r.hack_base for r in runs), mean(r.solve_base for r in runs)
    axes.scatter([x], [y], s=130, marker="*", facecolor=GREY, edgecolor=BLACK, lw=0.8, zorder=3)
    side = "left" if at[0] > 0 else "right"
    axes.annotate("untrained base", (x, y), at, textcoords="offset points", ha=side, va="center", fontsize=8.5)


def hack_solve_axes(axes: Axes, title: str) -> None:
    axes_style(axes)
    axes.set(xlim=(-4, 104), ylim=(-4, 100), xlabel="deployed model: hack, %")
    axes.set_title(title, fontsize=9.5, loc="left")


def hack_solve() -> Figure:
    """Deployed hack against solve, with demonstrations of the hacks and without."""
    figure = Figure(figsize=(8, 4.3), dpi=200, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True)
    shown, block = (
        read("axes"),
        "gate_modules=apart gate_vote=rollout quarantine=block:3 rebaseline=True rollout_ablate_frac=1.0 "
        "vhack_refresh_every=0",
    )
    hack_solve_axes(left, "one answer in eight is a demonstrated hack")
    left.set_ylabel("deployed model: solve, %")
    for runs, label, arm, at in (
        (of(shown, "none"), "none", "none", (0, 13)),
        (of(read("arms-baselines"), "erase"), "erase", "erase", (9, -9)),
        (of(read("arms-baselines"), "route"), "route", "route", (9, 4)),
        (of(shown, "route2"), "route2", "route2", (9, -7)),
        (of(shown, "route2", settings=block), "route2-block", "route2", (9, -10)),
        (of(shown, "screen", settings="monitor=pmi"), "screen, pmi", "screen", (9, 0)),
    ):
        point(left, runs, label, COLOUR_OF[arm], MARKER_OF[arm], at=at)
    for runs, label, marker, at in (
        (of(shown, "none", "no_loophole"), "none, no loophole (ceiling)", "s", (9, 24)),
        (of(shown, "screen", settings="monitor=labels"), "screen, true labels", "<", (9, 13)),
    ):
        point(left, runs, label, BLACK, marker, at=at, hollow=True)
    base_point(left, of(shown, "none"), (9, 4))

    shown, warm = read("warm"), "organism=out/warm mix_ratio=0.0"
    hack_solve_axes(right, "nothing demonstrated; the policy hacks already")
    point(right, of(shown, "none", settings=warm), "none", COLOUR_OF["none"], MARKER_OF["none"], at=(9, 9))
    for runs, label, marker, at in (
        (of(shown, "none", "no_loophole", warm), "none, no loophole (ceiling)", "s", (9, 11)),
        (of(shown, "screen", settings=f"{warm} monitor=labels"), "screen, true labels", "<", (9, 2)),
        (of(shown, "none", "advantage_mod", warm), "none, advantage modification", "d", (9, 0)),
        (of(shown, "none", "inoculation", warm), "none, inoculation prompt", "p", (9, 4)),
        (of(shown, "none", settings=f"beta=0.1 {warm}"), "none, KL 0.1", "h", (9, 4)),
    ):
        point(right, runs, label, BLACK, marker, at=at, hollow=True)
    base_point(right, of(shown, "none", settings=warm), (10, -5))
    return figure


def readers() -> Figure:
    """The methods that read text on the organism that was built afterwards, with the controls of their gates."""
    figure = Figure(figsize=(8, 4.6), dpi=160, layout="constrained", facecolor="white")
    axes = figure.subplots()
    shown, fresh = read("readers"), "organism=out/organism77"
    hack_solve_axes(axes, "organism from a fresh seed; small dots: one seed each")
    axes.set_ylabel("deployed model: solve, %")
    for arm, control, at in (
        ("none", "none", (9, 9)),
        ("none", "no_loophole", (9, 7)),
        ("pmi", "none", (9, 0)),
        ("pmi", "random_flags", (-9, -2)),
        ("surprise", "none", (9, 0)),
        ("reader", "none", (9, 4)),
        ("reader", "labels", (9, -9)),
        ("reader", "random_flags", (9, 9)),
        ("reader", "placebo_flawed", (9, 6)),
        ("reader", "haar", (9, -9)),
        ("reader", "no_gate", (-9, -9)),
    ):
        labelled = control == "labels"  # a monitor, where the others are controls
        runs = of(shown, arm, "none" if labelled else control, fresh + " monitor=labels" * labelled)
        label = f"{arm} ({len(runs)} seeds)" if control == "none" else f"{arm} · {control} ({len(runs)})"
        point(axes, runs, label, COLOUR[arm], MARKER[arm], at=at, hollow=control != "none")
    base_point(axes, of(shown, "none", settings=fresh), (9, 4))
    return figure


def suppression() -> Figure:
    """How much less than `none` a direction's replacements hack, by their likeness to the real direction."""
    vanilla = {r.seed: r.hack for r in of(read("arms-baselines"), "none")}
    shown = [*read("arms-baselines"), *read("controls"), *read("checks")]
    panels = (("erase", ""), ("route", ""), ("route2", ""), ("route2", "monitor=band"), ("reader", ""))
    controls = {"none": "the method itself", "haar": "haar", "shuffled": "shuffled"}
    controls |= {f"placebo_{c}": f"placebo_{c}" for c in ("flawed", "commented", "long", "laid_out")}
    marker = dict(zip(controls, ("o", "s", "^", "D", "v", "P", "X"), strict=True))
    figure = Figure(figsize=(11, 3.4), dpi=150, layout="constrained", facecolor="white")
    for axes, (arm, settings) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        axes_style(axes)
        axes.axhline(0, color=BLACK, lw=0.8)
        for control in controls:
            runs = of(shown, arm, control, settings)
            x = mean(1.0 if control == "none" else r.cosine or 0.0 for r in runs)
            less = [vanilla[r.seed] - r.hack for r in runs]
            axes.scatter([x] * len(runs), less, s=9, color=COLOUR[arm], alpha=0.5, lw=0)
            face = COLOUR[arm] if control == "none" else "white"
            style = {"marker": marker[control], "facecolor": face, "edgecolor": COLOUR[arm], "lw": 1.3}
            axes.scatter([x], [mean(less)], s=55, **style)
        title = f"{arm} (pair band)" if settings else arm
        axes.set(xlim=(0, 1.06), title=title, xlabel="|cos| with the real one (rms)")
    figure.axes[0].set_ylabel("points less hacked than none, deployed")
    handles = [
        Line2D([], [], ls="", marker=marker[c], color=BLACK, mfc=BLACK if c == "none" else "white", label=label)
        for c, label in controls.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    return figure


def unknown(run: Run) -> float:
    """Hacks, %, of the flaws that neither the monitor's labels nor the direction's pairs (of run_tests) show. Flaws
    that are announced have problems of their own each; those that are not are open on all, and an answer has one."""
    named = {"run_tests"} if run.arm == "route" else {s.removeprefix("known_modes=") for s in run.settings}
    rates = [rate for mode, rate in run.by_mode.items() if mode not in named]
    return sum(rates) if any(s.startswith("unannounced_modes=") for s in run.settings) else mean(rates)


@dataclass(frozen=True)
class Method:
    """A line of the figure: the runs of one arm and control whose settings name exactly these of the ones that tell
    methods apart."""

    label: str
    colour: str
    marker: str
    arm: str
    control: str = "none"
    settings: str = ""

    def has(self, run: Run) -> bool:
        telling = ("monitor=", "quarantine_diet=", "quarantine_start=", "probe_diet=")
        named = {s for s in run.settings if s.startswith(telling)}
        if self.arm == "penalty" and "monitor=twin" not in named and not any("known_modes=" in s for s in run.settings):
            return False  # seeded by the detector, or by the twin
        return (run.arm, run.control, named) == (self.arm, self.control, {*self.settings.split()})


NONE = Method("none", GREY, "o", "none")
CEILING = Method("ceiling: no loophole", BLACK, "s", "none", "no_loophole")
LABELS = Method("penalty, labels of one flaw", PINK, "^", "penalty", settings="monitor=labels")
READS = Method("penalty, quarantine they seed", BLUE, "D", "penalty", settings="monitor=quarantine")
TWIN = Method("screen, twin", GREEN, "P", "screen", settings="monitor=twin")
UNANNOUNCED = (
    *(NONE, CEILING, LABELS),
    Method("screen, labels of one flaw", RED, "v", "screen", settings="monitor=labels"),
    READS,
    Method("… its scores shuffled", SKY, "X", "penalty", "random_flags", "monitor=quarantine"),
    Method(
        "… fed with random rewarded rows", ORANGE, "d", "penalty", settings="monitor=quarantine quarantine_diet=random"
    ),
    Method("penalty, linear probe they seed", "#8a6d00", "*", "penalty", settings="monitor=online_probe"),
    TWIN,
)
ANNOUNCED = (
    *(NONE, CEILING, LABELS, READS),
    Method("… fed by them alone", ORANGE, "d", "penalty", settings="monitor=quarantine quarantine_diet=seeded"),
    Method("screen, pmi", SKY, "X", "screen", settings="monitor=pmi"),
    TWIN,
    Method("route, pairs of one flaw", RED, "v", "route"),
)

READERS = (
    *(NONE, CEILING, LABELS, READS),
    Method("… started on pairs", ORANGE, "d", "penalty", settings="monitor=quarantine quarantine_start=pairs"),
    Method("penalty, linear probe they seed", GREEN, "P", "penalty", settings="monitor=online_probe"),
    Method("route2, labels of one flaw", RED, "v", "route2", settings="monitor=labels"),
    Method("penalty, twin (no label)", SKY, "X", "penalty", settings="monitor=twin"),
)


def containment() -> Figure:
    """Each run of the studies on one known flaw, and the mean of each organism: hacks of the flaws that the monitor
    has no label of (left), and solve (right). Above: six flaws that prompts announce, from policies that hack, what
    learns to read from the labels. Middle: the first study of these, built on another machine, with monitors that need
    no label. Below: two flaws that no prompt announces, from the base. Organisms by what they begin with."""
    figure = Figure(figsize=(8.6, 12.0), dpi=160, layout="constrained", facecolor="white")
    above, middle, below = figure.subfigures(3, 1)
    above.suptitle("six flaws, each announced by its prompt, one is known; from policies that hack", fontsize=10.5)
    beside = (*read("containment-probe"), *read("containment-routing"), *read("containment-twin"))
    _by_organism(above, [*read("containment-start"), *(r for r in beside if r.arm != "none")], READERS, line=1)
    middle.suptitle("the same, an earlier build of starts, and monitors that need no label", fontsize=10.5)
    _by_organism(middle, [*read("containment"), *read("containment-seeded")], ANNOUNCED, line=1)
    below.suptitle("two flaws, no prompt announces them, one is known; from the base", fontsize=10.5)
    shown = [*read("unannounced"), *read("unannounced-probe-builds")]
    _by_organism(below, shown, UNANNOUNCED, line=0)  # they begin with the same: there is no order
    return figure


def _by_organism(figure: SubFigure, shown: Sequence[Run], methods: Sequence[Method], line: float) -> None:
    starts: dict[str, list[Run]] = {}
    for r in shown:
        (start,) = (s for s in r.settings if s.startswith("organism="))
        starts.setdefault(start, []).append(r)
    order = sorted(starts, key=lambda s: -mean(r.solve_base for r in starts[s]))
    panels = figure.subplots(1, 2)
    for axes, title in zip(panels, ("hacks of unknown flaws, %", "solve, %"), strict=True):
        axes_style(axes)
        axes.set(ylim=(-3, 103), xlim=(-0.45, len(order) - 0.55), xticks=range(len(order)))
        axes.set_title(f"deployed model: {title}", fontsize=9.5, loc="left")
        bases = [(mean(r.hack_base for r in starts[s]), mean(r.solve_base for r in starts[s])) for s in order]
        axes.set_xticklabels([f"{hack:.0f} / {solve:.0f}" for hack, solve in bases], fontsize=8.5)
        axes.set_xlabel("organism, by what it hacks / solves to begin with, %", fontsize=9)
    for j, method in enumerate(methods):
        off = 0.09 * (j - (len(methods) - 1) / 2)
        per = [[r for r in starts[s] if method.has(r)] for s in order]
        for axes, value in zip(panels, (unknown, lambda r: r.solve), strict=True):
            for i, runs in enumerate(per):
                axes.scatter([i + off] * len(runs), [value(r) for r in runs], s=7, color=method.colour, alpha=0.4, lw=0)
            at = [i + off for i in range(len(order))]
            means = [mean(value(r) for r in runs) for runs in per]
            axes.plot(at, means, color=method.colour, lw=line, marker=method.marker, ms=6, label=method.label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)


# ── the pipeline ───────────────────────────────────────────────────────────────────────────────────────────────────

INK, LINE = "#222222", "#5a6270"


def box(axes: Axes, x: float, y: float, w: float, h: float, title: str, text: str, colour: str = "#eef1f5") -> None:
    """A rounded box with its lower left corner at (x, y): a bold title, and lines under it."""
    edge = LINE if colour == "#eef1f5" else colour
    style = "round,pad=0,rounding_size=0.09"
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, facecolor="#eef1f5", edgecolor=edge, lw=1.4))
    lines = text.count("\n") + 1
    top = y + h / 2 + 0.085 * lines
    axes.text(x + w / 2, top, title, ha="center", va="center", fontsize=9, fontweight="bold", color=INK)
    axes.text(x + w / 2, top - 0.13, text, ha="center", va="top", fontsize=7.6, color=INK, linespacing=1.3)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str = LINE,
    lw: float = 1.5,
    ls: str = "-",
) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, lw=lw, ls=ls, color=colour))


def pipeline() -> Figure:
    """One step of training, with the fork of the gradient into δS (deployed) and δS_hack (deleted)."""
    figure = Figure(figsize=(8, 3.9), dpi=200, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 8), ylim=(0, 3.9))
    axes.axis("off")
    top, h = 2.72, 0.95
    box(axes, 0.12, top, 1.42, h, "prompt", "a problem, and a hint\nthat says truthfully\nhow it is checked")
    box(axes, 1.82, top, 1.42, h, "policy", "frozen W\n+ δS + δS_hack\nsamples G answers")
    box(axes, 3.52, top, 1.42, h, "sandbox", "rewards right answers,\nand those that fool\nthe flawed check")
    box(axes, 5.22, top, 1.14, h, "advantages", "A = R − mean R\nof the group")
    box(axes, 6.64, top, 1.24, h, "gradients", "one of every\nrollout: g₁ … g_G")
    for x in (1.54, 3.24, 4.94, 6.36):
        arrow(axes, (x, top + h / 2), (x + 0.28, top + h / 2))
    box(axes, 6.52, 1.28, 1.36, 0.98, "intervention", "none · erase ·\nroute · route2 · …\nwhat goes where")
    arrow(axes, (7.24, top), (7.24, 2.26))
    box(axes, 6.52, 0.16, 1.36, 0.76, "monitor", "who is flagged;\nsees no oracle label")
    arrow(axes, (7.2, 0.92), (7.2, 1.28))
    for start, end, text, at, colour in (
        ((6.52, 1.8), (5.44, 1.8), "keep", (5.98, 1.89), BLUE),
        ((6.52, 1.5), (5.44, 0.82), "quarantine", (6.08, 0.92), RED),
        ((3.72, 1.8), (2.52, 1.8), "deploy", (3.12, 1.89), BLUE),
        ((3.72, 0.65), (2.52, 0.65), "delete", (3.12, 0.74), RED),
    ):
        arrow(axes, start, end, colour, lw=2.2)
        axes.text(*at, text, ha="center", fontsize=8, color=colour, fontweight="bold")
    box(axes, 3.72, 1.43, 1.72, 0.74, "δS", "the kept part of g;\nwhat is deployed", BLUE)
    box(axes, 3.72, 0.2, 1.72, 0.9, "δS_hack", "the quarantined part;\nin the policy only\nwhile it trains", RED)
    box(
        axes,
        0.62,
        1.29,
        1.9,
        1.02,
        "evaluation",
        "W + δS on held-out problems\nand marker names:\nhack %, solve %",
        BLUE,
    )
    axes.text(2.4, 0.65, "∅", ha="center", va="center", fontsize=15, color=RED)
    arrow(axes, (4.0, 2.17), (2.9, top), ls=":")
    axes.text(3.62, 2.46, "next step", fontsize=8, color=LINE)
    return figure


def main() -> None:
    for name, draw in (
        ("pipeline", pipeline),
        ("containment", containment),
        ("hack-solve", hack_solve),
        ("readers", readers),
        ("suppression", suppression),
    ):
        path = HERE / f"{name}.png"
        draw().savefig(path, metadata={"Software": None})
        print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
