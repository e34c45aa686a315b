"""The figures: which are drawn from what, and that their points are the numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from fake_runs import STEPS, fake_run
from vgrout.modes import DEALT
from vgrout.report.build import as_png
from vgrout.report.figures import dumbbells, dynamics, gates, pictures
from vgrout.report.runs import cells, load


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for i, seed in enumerate((1, 2)):
        fake_run(tmp_path, "--intervention=none", seed=seed, hack=0.7 + 0.1 * i, onset=6 + 2 * i)
        fake_run(tmp_path, "--intervention=none", "--control=no_loophole", seed=seed, hack=0.0, solve=0.9)
        routed = fake_run(tmp_path, "--intervention=route2", seed=seed, hack=0.1)
        gates = [{"step": 0, "gate": gate, "hacked": hack} for gate, hack in ((1.0, True), (0.9, True), (0.1, False))]
        (routed / "rollouts.jsonl").write_text("".join(json.dumps(g) + "\n" for g in gates))
        fake_run(tmp_path, "--intervention=route2", "--control=haar", seed=seed, hack=0.5 + 0.1 * i, cos=0.1)
    fake_run(tmp_path, "--intervention=erase", seed=1)
    return tmp_path


def test_every_figure_shows_the_numbers(study: Path) -> None:
    drawn = {p.name: p for p in pictures(cells(load([study]).runs))}
    assert drawn.keys() == {"dynamics", "pareto", "modes", "suppression", "gates"}
    assert all(as_png(p).startswith(b"\x89PNG") for p in drawn.values())

    hack = drawn["dynamics"].figure.axes[0]
    (mean,) = (line for line in hack.lines if line.get_label() == "none (2 seeds)")
    # running means of five steps: the seeds hack from steps 6 and 8 on
    expected = [
        np.mean([np.mean([t >= on for t in range(max(0, s - 4), s + 1)]) for on in (6, 8)]) for s in range(STEPS)
    ]
    assert mean.get_ydata() == pytest.approx(expected)

    labels = drawn["pareto"].figure.axes[0].get_legend_handles_labels()[1]
    assert labels[-1] == "base, untrained (2 seeds)"
    assert not any("erase" in label for label in labels), "one seed is in no figure of means"
    points = {c.get_label(): c.lines[0].get_xydata()[0] for c in drawn["pareto"].figure.axes[0].containers}
    assert points["none (2 seeds)"] == pytest.approx([75, 50])

    (axes,) = drawn["suppression"].figure.axes
    points = {c.get_label(): c.lines[0].get_xydata()[0] for c in axes.containers}
    assert points["haar (2 seeds)"] == pytest.approx([0.1, 20])
    assert points["the method (2 seeds)"] == pytest.approx([1.0, 65])

    gate = next(a for a in drawn["gates"].figure.axes if "route2" in a.get_title())
    assert "4 hacks, 2 others" in gate.get_title()


def test_another_gate_has_a_panel_of_its_own(study: Path) -> None:
    for seed in (1, 2):
        for control in ("none", "haar"):
            flags = ("--intervention=route2", "--monitor=band", f"--control={control}")
            fake_run(study, *flags, seed=seed, hack=0.3, cos=None if control == "none" else 0.1)
    drawn = {p.name: p for p in pictures(cells(load([study]).runs))}
    panels = {axes.get_title(): len(axes.containers) for axes in drawn["suppression"].figure.axes}
    assert panels == {"route2": 2, "route2 (pair band)": 2}


def test_every_panel_of_modes_has_its_own_rows_and_shades(tmp_path: Path) -> None:
    """A row's label, its numbers and its shade belong together, whatever stands in the next panel."""
    of_pairs = {"erase": "sentinel", "screen": None, "route2": "exit_code"}
    for arm, shown in of_pairs.items():
        monitor = ["--monitor=pmi"] if arm == "screen" else []
        for seed in (1, 2):
            its = {
                mode: {"train_hack": 0.9, "deploy_hack": 0.1 * i, "in_dist": None if shown is None else mode == shown}
                for i, mode in enumerate(DEALT)
            }
            fake_run(tmp_path, f"--intervention={arm}", *monitor, seed=seed, modes=its)
    (drawn,) = (p for p in pictures(cells(load([tmp_path]).runs)) if p.name == "modes")
    titles = [axes.get_title() for axes in drawn.figure.axes]
    assert titles == ["erase", "screen (pmi)\n(no pairs)", "route2"]
    read = drawn.figure.axes[0]  # its labels stand for the whole line
    label = dict(zip(read.get_yticks(), (t.get_text() for t in read.get_yticklabels()), strict=True))
    for axes, shown in zip(drawn.figure.axes, of_pairs.values(), strict=True):
        points = dict(c.lines[0].get_xydata()[0][::-1] for c in axes.containers if c.get_label() == "deployed")
        assert {label[y]: x for y, x in points.items()} == pytest.approx({m: 10 * i for i, m in enumerate(DEALT)})
        shades = [patch.get_y() + patch.get_height() / 2 for patch in axes.patches]
        assert [label[y] for y in shades] == ([] if shown is None else [shown])


@pytest.mark.long
def test_many_methods_are_all_drawn(tmp_path: Path) -> None:
    """Those without a control come first; plain GRPO and its ceiling are on every page."""
    rates = [round(0.2 + 0.01 * i, 2) for i in range(13)]
    for seed in (1, 2):
        fake_run(tmp_path, "--intervention=none", seed=seed)
        for control in ("no_loophole", "inoculation"):
            fake_run(tmp_path, "--intervention=none", f"--control={control}", seed=seed)
        for share in rates:
            path = fake_run(tmp_path, "--intervention=route2", f"--rollout-ablate-frac={share}", seed=seed)
            (path / "rollouts.jsonl").write_text(json.dumps({"step": 0, "gate": 0.5, "hacked": True}) + "\n")
    arms = [f"route2 ({share:g} deployed)" for share in rates]
    found = cells(load([tmp_path]).runs)
    drawn = {p.name: p for p in (*dynamics(found), dumbbells(found), gates(found)) if p}
    assert [axes.get_title() for axes in drawn["modes"].figure.axes if axes.get_visible()] == [
        f"{arm}\n(no pairs)" for arm in arms
    ]
    titles = [axes.get_title().splitlines()[0] for axes in drawn["gates"].figure.axes if axes.get_visible()]
    assert titles == arms
    pages = [
        [line.get_label().removesuffix(" (2 seeds)") for line in drawn[name].figure.axes[0].lines]
        for name in ("dynamics", "dynamics-2", "dynamics-3", "dynamics-4")
    ]
    named = [[label for label in page if not label.startswith("_")] for page in pages]
    first = ["none", "none · no_loophole"]
    rest = [*arms, "none · inoculation"]
    assert named == [[*first, *rest[at : at + 4]] for at in (0, 4, 8, 12)]
    assert "Dynamics, 2 of 4." in drawn["dynamics-2"].caption


def test_every_base_model_has_its_star(tmp_path: Path) -> None:
    for seed in (1, 2):
        fake_run(tmp_path, "--intervention=none", seed=seed, hack_base=0.0)
        fake_run(tmp_path, "--intervention=route2", seed=seed, hack_base=0.0)
        fake_run(tmp_path, "--intervention=none", seed=seed, weights="abcdef0123", hack_base=0.4)
    (pareto,) = (p for p in pictures(cells(load([tmp_path]).runs)) if p.name == "pareto")
    points = {c.get_label(): c.lines[0].get_xydata()[0][0] for c in pareto.figure.axes[0].containers}
    assert {k: x for k, x in points.items() if k.startswith("base")} == pytest.approx(
        {
            "base (base_weights 00000000), untrained (2 seeds)": 0,
            "base (base_weights abcdef01), untrained (2 seeds)": 40,
        }
    )


def test_a_gate_that_saw_no_hack_is_drawn(tmp_path: Path) -> None:
    for seed in (1, 2):
        path = fake_run(tmp_path, "--intervention=route2", seed=seed)
        (path / "rollouts.jsonl").write_text(json.dumps({"step": 0, "gate": 0.5, "hacked": False}) + "\n")
    (drawn,) = (p for p in pictures(cells(load([tmp_path]).runs)) if p.name == "gates")
    assert "0 hacks, 2 others" in drawn.figure.axes[0].get_title()


@pytest.mark.parametrize("flags", [["--intervention=none"], ["--intervention=screen", "--monitor=labels"]])
def test_a_monitor_without_scores_has_no_gates(flags: list[str], tmp_path: Path) -> None:
    path = fake_run(tmp_path, *flags)
    line = {"step": 0, "score": None, "flagged": False, "hacked": True}
    (path / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    (run,) = load([tmp_path]).runs
    assert run.gates == []


def test_one_run_has_its_curves_and_no_band(tmp_path: Path) -> None:
    fake_run(tmp_path, "--intervention=none", seed=1)
    (drawn,) = pictures(cells(load([tmp_path]).runs))
    assert drawn.name == "dynamics"
    assert "One seed each" in drawn.caption
    assert not any(axes.collections for axes in drawn.figure.axes), "an interval of one seed"
    assert all(axes.lines for axes in drawn.figure.axes)


def test_without_plain_grpo_there_is_no_figure_of_suppression(tmp_path: Path) -> None:
    for seed in (1, 2):
        fake_run(tmp_path, "--intervention=route2", seed=seed)
        fake_run(tmp_path, "--intervention=route2", "--control=haar", seed=seed, cos=0.1)
    names = [p.name for p in pictures(cells(load([tmp_path]).runs))]
    assert names == ["dynamics", "pareto", "modes"]
