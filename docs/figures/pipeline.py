"""pipeline.png, README's picture: one step of training. `uv run python docs/figures/pipeline.py`"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

BLUE, RED = "#0072B2", "#D55E00"

INK, LINE = "#222222", "#5a6270"


def box(
    axes: Axes,
    x: float,
    y: float,
    w: float,
    h: float,
    title: str,
    text: str,
    colour: str = "#eef1f5",
) -> None:
    """A rounded box with its lower left corner at (x, y): a bold title, and lines under it."""
    edge = LINE if colour == "#eef1f5" else colour
    style = "round,pad=0,rounding_size=0.09"
    axes.add_patch(
        FancyBboxPatch((x, y), w, h, boxstyle=style, facecolor="#eef1f5", edgecolor=edge, lw=1.4)
    )
    lines = text.count("\n") + 1
    top = y + h / 2 + 0.085 * lines
    axes.text(
        x + w / 2, top, title, ha="center", va="center", fontsize=9, fontweight="bold", color=INK
    )
    axes.text(
        x + w / 2, top - 0.13, text, ha="center", va="top", fontsize=7.6, color=INK, linespacing=1.3
    )


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str = LINE,
    lw: float = 1.5,
    ls: str = "-",
) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, lw=lw, ls=ls, color=colour)
    )


def pipeline() -> Figure:
    """One step of training, with the fork of the gradient into δS (deployed) and δS_hack (deleted)."""
    figure = Figure(figsize=(8, 3.9), dpi=200, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 8), ylim=(0, 3.9))
    axes.axis("off")
    top, h = 2.72, 0.95
    box(
        axes,
        0.12,
        top,
        1.42,
        h,
        "prompt",
        "a problem, and a hint\nthat says truthfully\nhow it is checked",
    )
    box(axes, 1.82, top, 1.42, h, "policy", "frozen W\n+ δS + δS_hack\nsamples G answers")
    box(
        axes,
        3.52,
        top,
        1.42,
        h,
        "sandbox",
        "rewards right answers,\nand those that fool\nthe flawed check",
    )
    box(axes, 5.22, top, 1.14, h, "advantages", "A = R − mean R\nof the group")
    box(axes, 6.64, top, 1.24, h, "gradients", "one for each\nrollout: g₁ … g_G")
    for x in (1.54, 3.24, 4.94, 6.36):
        arrow(axes, (x, top + h / 2), (x + 0.28, top + h / 2))
    box(
        axes,
        6.52,
        1.28,
        1.36,
        0.98,
        "intervention",
        "none · penalty ·\nscreen · route2 · …\nwhat goes where",
    )
    arrow(axes, (7.24, top), (7.24, 2.26))
    box(axes, 6.52, 0.16, 1.36, 0.76, "monitor", "flags the rollouts\nthat look like hacks")
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
    box(
        axes,
        3.72,
        0.2,
        1.72,
        0.9,
        "δS_hack",
        "the quarantined part;\nin the policy only\nwhile it trains",
        RED,
    )
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


if __name__ == "__main__":
    pipeline().savefig(Path(__file__).with_suffix(".png"), metadata={"Software": None})
