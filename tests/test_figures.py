"""The figures: which are drawn from what, and that their points are the numbers."""

import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from fake_runs import STEPS, fake_run, found
from quick import first_quick
from vgrout.envs.code.modes import DEALT
from vgrout.report.figures import MARKERS, dynamics, pictures, plane

NONE, ROUTE2 = "--intervention=none", "--intervention=route2"


def drawn(root):
    return {p.name: p for p in pictures(found(root))}


@pytest.fixture
def study(tmp_path):
    for i, seed in enumerate((1, 2)):
        deploy = {"hack_deploy": 0.25, "solve_deploy": 0.5}
        fake_run(tmp_path, NONE, seed=seed, hack=0.7 + 0.1 * i, onset=6 + 2 * i, row=deploy)
        fake_run(tmp_path, ROUTE2, seed=seed, hack=0.1)
        fake_run(tmp_path, ROUTE2, "--control=haar", seed=seed, hack=0.5 + 0.1 * i, cos=0.1)
    fake_run(tmp_path, "--intervention=erase", seed=1)
    return tmp_path


def test_every_figure_shows_the_numbers_and_every_mark_has_a_legend(study):
    pages = drawn(study)
    assert pages.keys() == {"dynamics", "plane", "flaws"}
    assert all(p.figure.png().startswith(b"\x89PNG") for p in pages.values())

    plain, erase, route2, _ = pages["dynamics"].figure.axes
    lines = {line.get_label(): line for line in plain.lines if not line.get_label().startswith("_")}
    # means of a step and two on either side: the seeds hack from steps 6 and 8 on
    expected = [
        np.mean(
            [np.mean([t >= on for t in range(max(0, s - 2), min(STEPS, s + 3))]) for on in (6, 8)]
        )
        for s in range(STEPS)
    ]
    assert lines["hack, training answers"].get_ydata() == pytest.approx(expected)
    assert list(lines["solve, held-out answers, deployed"].get_ydata()) == [0.5] * STEPS
    assert lines["hack, deployed, at the end"].get_ydata() == [pytest.approx(0.75)]
    assert not erase.collections, "an interval of one seed"
    assert "hack, plain GRPO" in {line.get_label() for line in route2.lines} - lines.keys()
    assert route2.get_title() == "route2\nhack 10 → 10 %, solve 50 → 50 %"
    assert route2.get_xlabel() == "step (training answers sampled as deployed)"
    (legend,) = pages["dynamics"].figure.legends
    marks = [(*axes.lines, *axes.collections) for axes in pages["dynamics"].figure.axes]
    named = {mark.get_label() for of_panel in marks for mark in of_panel}
    assert "hack, 95 % interval of the line" in named, "a band has a name"
    assert {t.get_text() for t in legend.get_texts()} == {
        name for name in named if not name.startswith("_")
    }

    points = {
        c.get_label(): c.lines[0].get_xydata()[0] for c in pages["plane"].figure.axes[0].containers
    }
    assert points["none (2 seeds)"] == pytest.approx([75, 50])
    assert points["erase (seed 1)"] == pytest.approx([50, 50])


@pytest.mark.long
def test_every_panel_of_flaws_has_its_own_rows_and_shades(tmp_path):
    """A row's label, its numbers and its shade belong together, whatever stands in the next panel."""
    of_pairs = {"erase": "sentinel", "screen": None, "route2": "exit_code"}
    for arm, shown in of_pairs.items():
        monitor = ["--monitor=labels"] if arm == "screen" else []
        for seed in (1, 2):
            its = {
                mode: {
                    "train_hack": 0.9,
                    "deploy_hack": 0.1 * i,
                    "in_dist": None if shown is None else mode == shown,
                }
                for i, mode in enumerate(DEALT)
            }
            fake_run(tmp_path, f"--intervention={arm}", *monitor, seed=seed, modes=its)
    panels = drawn(tmp_path)["flaws"].figure.axes
    assert [axes.get_title() for axes in panels] == [
        "erase",
        "screen (labels)\n(no pairs)",
        "route2",
    ]
    label = dict(
        zip(
            panels[0].get_yticks(), (t.get_text() for t in panels[0].get_yticklabels()), strict=True
        )
    )
    for axes, shown in zip(panels, of_pairs.values(), strict=True):
        points = dict(
            c.lines[0].get_xydata()[0][::-1] for c in axes.containers if c.get_label() == "deployed"
        )
        assert {label[y]: x for y, x in points.items()} == pytest.approx(
            {m: 10 * i for i, m in enumerate(DEALT)}
        )
        shades = [patch.get_y() + patch.get_height() / 2 for patch in axes.patches]
        assert [label[y] for y in shades] == ([] if shown is None else [shown])


@pytest.mark.long
def test_many_methods_are_all_drawn_and_told_apart(tmp_path):
    rates = [round(0.01 + 0.01 * i, 2) for i in range(len(MARKERS))]
    for rate in rates:
        fake_run(tmp_path, NONE, f"--lr={rate}")
    methods = found(tmp_path)
    titles = [c.title for c in methods]
    assert len(titles) == len(MARKERS)
    drawn = [a.get_title() for a in dynamics(methods).figure.axes if a.get_visible()]
    first_lines = [title.partition("\n")[0] for title in drawn]
    assert [line.removesuffix(" (plain GRPO)") for line in first_lines] == titles
    picture = plane(methods)
    marks = {
        (c.lines[0].get_marker(), c.lines[0].get_color()) for c in picture.figure.axes[0].containers
    }
    assert len(marks) == len(MARKERS)


def test_one_run_is_a_sentence_with_its_numbers_beside_their_marks(tmp_path):
    rates = {"hack_train": 0.2, "hack_deploy": 0.0, "hack_base": 0.0, "solve_train": 0.7}
    fake_run(tmp_path, ROUTE2, n=384, solve=0.8, **rates)
    picture = dynamics(found(tmp_path))
    (axes,) = picture.figure.axes
    assert axes.get_title(loc="left") == "route2: hacks removed, skill kept (384 answers)"
    assert {text.get_text() for text in axes.texts} == {
        "hack, deployed: 0.0 %",
        "hack, as trained: 20.1 %",
        "solve, deployed: 79.9 %",
        "solve, as trained: 70.1 %",
    }
    heights = sorted(text.xy[1] for text in axes.texts)
    assert min(b - a for a, b in pairwise(heights)) > 0.08, "no label lies on another"
    (legend,) = axes.figure.legends
    assert len(legend.get_texts()) <= 4


def test_what_cannot_be_drawn_is_left_out(tmp_path):
    fake_run(tmp_path, ROUTE2, seed=1)
    (path,) = tmp_path.iterdir()
    assert drawn(path).keys() == {"dynamics", "flaws"}
    (axes,) = drawn(path)["dynamics"].figure.axes
    assert axes.lines
    assert not axes.collections, "one run has no band"


BACKENDS = (
    "module://matplotlib_inline.backend_inline",
    "module://no_such_package.backend_inline",
    *("inline", "no such backend", ""),
)


def said_under(backend, code):
    """What a process that a notebook starts prints."""
    environment = {**os.environ, "MPLBACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("named", first_quick(BACKENDS))
def test_a_notebooks_backend_does_not_matter(named):
    """Not even one that is not installed; and programs that are started from here still find the name."""
    code = (
        "import io, os, vgrout.report.backend; from matplotlib.figure import Figure; "
        "Figure().savefig(picture := io.BytesIO(), format='png'); "
        "print(picture.getvalue()[1:4], os.environ['MPLBACKEND'])"
    )
    assert said_under(named, code) == f"b'PNG' {named}\n"


@pytest.mark.long
def test_the_reports_figures_need_no_backend():
    """pyplot, which alone needs one, is never loaded; a user's own in the same process has the one that they chose."""
    code = (
        "import sys; from vgrout.report.figures import Drawing; "
        "print(Drawing().png()[1:4], 'matplotlib.pyplot' in sys.modules); "
        "import matplotlib.pyplot; print(matplotlib.get_backend())"
    )
    assert said_under("svg", code) == "b'PNG' False\nsvg\n"
    said_under("module://matplotlib_inline.backend_inline", code.partition("import mat")[0])
