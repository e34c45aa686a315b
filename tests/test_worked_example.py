"""The worked example of docs/method.md: the page's tables are what the code makes of its made-up gradients."""

from pathlib import Path

import pytest
import torch

from methods import META, graded, problem, routed, toy
from vgrout.direction.extract import Axes, Direction
from vgrout.ground.data import CachedGrade, Group, Rollout

PAGE = Path(__file__).parents[1] / "docs" / "method.md"
LAYERS = ("layer 1", "layer 2", "layer 3")
ANSWERS = ("demonstration, a hack", "own, a hack", "own, right", "own, wrong", "own, wrong")
G = torch.tensor(
    [
        [4, 3, 3, 4, 0, 5],
        [3, 4, 4, 3, -3, 4],
        [-3, 4, 0, 5, 3, 4],
        [0, 5, -4, 3, 5, 0],
        [0, 5, 0, 5, 0, 5],
    ],
    dtype=torch.float32,
)


def the_group():
    """A demonstration and four answers of the policy's own, with the rewards of `mini`."""
    of = problem()
    rollouts = []
    for b, answer in enumerate(ANSWERS):
        source = "student" if answer.startswith("own") else "teacher"
        rollouts.append(Rollout((2, 3), f"t{b}", True, source=source, deployed=True))
    hack, right, wrong = graded(1.1, hacks=True), graded(1.1, solves=True), graded(0.1)
    demonstration = CachedGrade(1.1, True, True, False, True, "test")
    return Group(of, tuple(rollouts), (demonstration, hack, right, wrong, wrong))


def one_step(quarantine_in="", **flags):
    """The method of these flags after the example's step. quarantine_in: the layer of the quarantine's own; "": it
    shares all of them."""
    v, nothing = torch.tensor([1.0, 0.0]), torch.zeros(2)
    axes = {name: Axes(v[None], nothing[:1], v, v, v, nothing[None]) for name in LAYERS}
    sizes = dict.fromkeys(LAYERS, 2)
    method = toy("route2", Direction(axes, META), sizes=sizes, **flags)
    method.own_modules = frozenset({quarantine_in} - {""})
    return method, routed(method, (G, the_group()))


def pair(x):
    """Two whole numbers as the page has them."""
    return f"({', '.join(f'{value:.0f}' for value in x.tolist())})".replace("-", "−")


def number(x):
    return f"{x:.3g}".replace("-", "−")


def learnt(x):
    """The part of each layer, as cells."""
    return " | ".join(pair(part) for part in x.split(2))


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text().partition("## A worked example")[2]


def test_the_flags_and_advantages_of_the_example(page):
    method, after = one_step(quarantine_in="layer 2")
    group = the_group()
    advantages = method.intervention.advantages(group.view(), [True, *[False] * 4])
    gate = method.monitor.gate
    for b, answer in enumerate(ANSWERS):
        cells = []
        for layer, g in enumerate(G[b].split(2)):
            c = (g[0] / g.norm()).item()
            over = c > gate.tau[layer] and gate.gap[layer] > 0
            shown = f"**{number(c)}**" if b == 0 or over else number(c)
            cells.append(f"{pair(g)} · {shown}")
        f = after.flags[0].shares[b]
        row = (str(b), answer, number(group.rewards[b]), number(advantages[b]), *cells, number(f))
        assert f"| {' | '.join(row)} |" in page


def test_the_thresholds_of_the_example(page):
    method, _ = one_step(quarantine_in="layer 2")
    gate = method.monitor.gate
    for name, means in (("μ_hack", gate.means[0]), ("μ_rest", gate.means[1]), ("τ", gate.tau)):
        cells = [number(x) for x in means.tolist()]
        if name == "τ":
            has = [bool(gap > 0) for gap in gate.gap]
            cells = [cell if there else "none" for cell, there in zip(cells, has, strict=True)]
        assert f"| {name} | {' | '.join(cells)} |" in page


@pytest.mark.parametrize(
    ("quarantine_in", "flags"),
    [
        ("layer 2", {}),
        ("", {}),
        ("", {"gate_vote": "module", "gate_modules": "all"}),
    ],
)
def test_what_the_two_vectors_of_the_example_learn(page, quarantine_in, flags):
    _, after = one_step(quarantine_in, **flags)
    assert f"| {learnt(after.keep)} |" in page
    assert f"| {learnt(after.quar)} |" in page


def test_the_columns_of_the_example(page):
    measured = one_step(quarantine_in="layer 2")[1].measured
    for name in ("hkgap", "tau", "routed"):
        assert f"`{name}` {number(measured[name])}" in page
