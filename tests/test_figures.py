"""The figures: which are drawn from what, and that their points are the numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from fake_runs import STEPS, fake_run
from vgrout.analysis.figures import pictures
from vgrout.analysis.report import as_png
from vgrout.analysis.runs import cells, load


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for i, seed in enumerate((1, 2)):
        fake_run(tmp_path, "--intervention=none", seed=seed, hack=0.7 + 0.1 * i, onset=6 + 2 * i)
        fake_run(tmp_path, "--intervention=none", "--control=no_loophole", seed=seed, hack=0.0, solve=0.9)
        routed = fake_run(tmp_path, "--intervention=route2", seed=seed, hack=0.1)
        gates = [
            {"step": 0, "gate": gate, "exploited": hack} for gate, hack in ((1.0, True), (0.9, True), (0.1, False))
        ]
        (routed / "rollouts.jsonl").write_text("".join(json.dumps(g) + "\n" for g in gates))
        fake_run(tmp_path, "--intervention=route2", "--control=haar", seed=seed, hack=0.5 + 0.1 * i, cos=0.1)
    fake_run(tmp_path, "--intervention=erase", seed=1)
    return tmp_path


def test_each_shows_the_numbers(study: Path) -> None:
    drawn = {p.name: p for p in pictures(cells(load([study]).runs))}
    assert drawn.keys() == {"dynamics", "pareto", "modes", "suppression", "gates"}
    assert all(as_png(p).startswith(b"\x89PNG") for p in drawn.values())

    hack = drawn["dynamics"].figure.axes[0]
    (mean,) = (line for line in hack.lines if line.get_label() == "vanilla (2 seeds)")
    # running means of five steps: the seeds exploit from steps 6 and 8 on
    expected = [
        np.mean([np.mean([t >= on for t in range(max(0, s - 4), s + 1)]) for on in (6, 8)]) for s in range(STEPS)
    ]
    assert mean.get_ydata() == pytest.approx(expected)

    labels = drawn["pareto"].figure.axes[0].get_legend_handles_labels()[1]
    assert labels[-1] == "base, untrained (2 seeds)"
    assert not any("projected" in label for label in labels), "one seed is in no figure of means"
    points = {c.get_label(): c.lines[0].get_xydata()[0] for c in drawn["pareto"].figure.axes[0].containers}
    assert points["vanilla (2 seeds)"] == pytest.approx([75, 50])

    (axes,) = drawn["suppression"].figure.axes
    points = {c.get_label(): c.lines[0].get_xydata()[0] for c in axes.containers}
    assert points["haar (2 seeds)"] == pytest.approx([0.1, 20])
    assert points["the arm (2 seeds)"] == pytest.approx([1.0, 65])

    gate = next(a for a in drawn["gates"].figure.axes if "routing2" in a.get_title())
    assert "4 exploits, 2 others" in gate.get_title()


def test_a_gate_of_another_kind_is_no_point_among_the_others(study: Path) -> None:
    for seed in (1, 2):
        for control in ("none", "haar"):
            flags = ("--intervention=route2", "--route2-gate=pairs", f"--control={control}")
            fake_run(study, *flags, seed=seed, hack=0.3, cos=None if control == "none" else 0.1)
    drawn = {p.name: p for p in pictures(cells(load([study]).runs))}
    panels = {axes.get_title(): len(axes.containers) for axes in drawn["suppression"].figure.axes}
    assert panels == {"routing2": 2, "routing2 (pair band)": 2}


def test_a_gate_that_saw_no_exploit_is_drawn(tmp_path: Path) -> None:
    for seed in (1, 2):
        path = fake_run(tmp_path, "--intervention=route2", seed=seed)
        (path / "rollouts.jsonl").write_text(json.dumps({"step": 0, "gate": 0.5, "exploited": False}) + "\n")
    (gates,) = (p for p in pictures(cells(load([tmp_path]).runs)) if p.name == "gates")
    assert "0 exploits, 2 others" in gates.figure.axes[0].get_title()


def test_nothing_is_drawn_from_nothing(tmp_path: Path) -> None:
    fake_run(tmp_path, "--intervention=none", seed=1)
    assert pictures(cells(load([tmp_path]).runs)) == []


def test_without_vanilla_there_is_nothing_to_suppress(tmp_path: Path) -> None:
    for seed in (1, 2):
        fake_run(tmp_path, "--intervention=route2", seed=seed)
        fake_run(tmp_path, "--intervention=route2", "--control=haar", seed=seed, cos=0.1)
    names = [p.name for p in pictures(cells(load([tmp_path]).runs))]
    assert names == ["dynamics", "pareto", "modes"]
