"""pipeline.png, the picture of docs/method.md: one step of training. `uv run python docs/figures/pipeline.py`"""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

BLUE, RED = "#0072B2", "#D55E00"
INK, LINE, PALE = "#222222", "#5a6270", "#eef1f5"
TOP, HEIGHT = 2.72, 0.95  # of the row of boxes from prompt to gradients

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rounded box with its lower left corner at (x, y): a bold title, and lines under it."""

    x: float
    y: float
    width: float
    height: float
    title: str
    text: str
    edge: str = LINE

    def draw(self, axes: Axes) -> None:
        corner = (self.x, self.y)
        patch = FancyBboxPatch(
            corner,
            self.width,
            self.height,
            boxstyle="round,pad=0,rounding_size=0.09",
            facecolor=PALE,
            edgecolor=self.edge,
            lw=1.4,
        )
        axes.add_patch(patch)
        middle = self.x + self.width / 2
        lines = self.text.count("\n") + 1
        top = self.y + self.height / 2 + 0.085 * lines
        axes.text(
            middle,
            top,
            self.title,
            ha="center",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=INK,
        )
        axes.text(
            middle,
            top - 0.13,
            self.text,
            ha="center",
            va="top",
            fontsize=7.6,
            color=INK,
            linespacing=1.3,
        )


def arrow(
    axes: Axes, start: Point, end: Point, colour: str = LINE, lw: float = 1.5, ls: str = "-"
) -> None:
    patch = FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=11, lw=lw, ls=ls, color=colour
    )
    axes.add_patch(patch)


def named_arrow(
    axes: Axes, start: Point, end: Point, name: str, name_at: Point, colour: str
) -> None:
    """Draw a thick arrow with a word above it."""
    arrow(axes, start, end, colour, lw=2.2)
    axes.text(*name_at, name, ha="center", fontsize=8, color=colour, fontweight="bold")


def pipeline() -> Figure:
    """Draw one step of training.

    The gradient forks into δS, which is deployed, and δS_hack, which is deleted.
    """
    figure = Figure(figsize=(8, 3.9), dpi=200, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 8), ylim=(0, 3.9))
    axes.axis("off")
    draw_rollouts(axes)
    draw_routing(axes)
    draw_ends(axes)
    return figure


def draw_rollouts(axes: Axes) -> None:
    """Draw the row from prompt to gradients."""
    hint = "a problem, and a hint\nthat says truthfully\nhow it is checked"
    rewards = "rewards right answers,\nand those that fool\nthe flawed check"
    for box in (
        Box(0.12, TOP, 1.42, HEIGHT, "prompt", hint),
        Box(1.82, TOP, 1.42, HEIGHT, "policy", "frozen W\n+ δS + δS_hack\nsamples G answers"),
        Box(3.52, TOP, 1.42, HEIGHT, "sandbox", rewards),
        Box(5.22, TOP, 1.14, HEIGHT, "advantages", "A = R − mean R\nof the group"),
        Box(6.64, TOP, 1.24, HEIGHT, "gradients", "one for each\nrollout: g₁ … g_G"),
    ):
        box.draw(axes)
    for x in (1.54, 3.24, 4.94, 6.36):
        arrow(axes, (x, TOP + HEIGHT / 2), (x + 0.28, TOP + HEIGHT / 2))


def draw_routing(axes: Axes) -> None:
    """Draw the monitor and the intervention, and the fork of the gradient."""
    choices = "none · penalty ·\nscreen · route2 · …\nwhat goes where"
    Box(6.52, 1.28, 1.36, 0.98, "intervention", choices).draw(axes)
    arrow(axes, (7.24, TOP), (7.24, 2.26))
    flags = "flags the rollouts\nthat look like hacks"
    Box(6.52, 0.16, 1.36, 0.76, "monitor", flags).draw(axes)
    arrow(axes, (7.2, 0.92), (7.2, 1.28))
    named_arrow(axes, (6.52, 1.8), (5.44, 1.8), "keep", (5.98, 1.89), BLUE)
    named_arrow(axes, (6.52, 1.5), (5.44, 0.82), "quarantine", (6.08, 0.92), RED)
    named_arrow(axes, (3.72, 1.8), (2.52, 1.8), "deploy", (3.12, 1.89), BLUE)
    named_arrow(axes, (3.72, 0.65), (2.52, 0.65), "delete", (3.12, 0.74), RED)


def draw_ends(axes: Axes) -> None:
    """Draw the two parameters, what becomes of each, and the way back to the policy."""
    kept = "the kept part of g;\nwhat is deployed"
    quarantined = "the quarantined part;\nin the policy only\nwhile it trains"
    measured = "W + δS on held-out problems\nand marker names:\nhack %, solve %"
    Box(3.72, 1.43, 1.72, 0.74, "δS", kept, BLUE).draw(axes)
    Box(3.72, 0.2, 1.72, 0.9, "δS_hack", quarantined, RED).draw(axes)
    Box(0.62, 1.29, 1.9, 1.02, "evaluation", measured, BLUE).draw(axes)
    axes.text(2.4, 0.65, "∅", ha="center", va="center", fontsize=15, color=RED)
    arrow(axes, (4.0, 2.17), (2.9, TOP), ls=":")
    axes.text(3.62, 2.46, "next step", fontsize=8, color=LINE)


if __name__ == "__main__":
    pipeline().savefig(Path(__file__).with_suffix(".png"), metadata={"Software": None})
