"""`python -m vgrout.report`: the folder it writes, and what it refuses."""

import csv
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_runs import fake_run
from vgrout.report.__main__ import main

RECORDED = Path(__file__).resolve().parents[1] / "docs" / "runs"


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    for seed in (1, 2):
        fake_run(root, "--intervention=none", seed=seed, hack=0.8)
        fake_run(root, "--intervention=route2", seed=seed, hack=0.1)
    return root


def test_the_folder(runs, capsys):
    fake_run(runs, "--intervention=none", seed=9, state="interrupted")
    (runs / "plan.json").write_text(
        '{"name": "arms", "hypotheses": ["route2 keeps the model from hacking", "all do"]}'
    )
    assert main([str(runs)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("none: "), "the conclusions are first"
    assert "left out: 004_mini_none_seed9 (interrupted)" in output
    assert "H: route2 keeps the model from hacking — route2: Δ hack -70.0" in " ".join(
        output.split()
    )
    assert "H: all do — route2: Δ hack -70.0" in " ".join(output.split()), "it names no method"
    assert output.endswith(f"\n-> {runs / 'report' / 'report.html'}\n")
    assert {p.name for p in (runs / "report").iterdir()} == {"report.html", "runs.csv", "figures"}
    text = (runs / "report" / "report.html").read_text()
    parts = (
        "<h1>arms</h1>",
        "none: ",
        "H: route2 keeps",
        "4 run(s) of ",
        ">Methods</h2>",
        ">By flaw</h2>",
    )
    parts = (
        *parts,
        ">Answers</h2>",
        "none: 000_mini_none_seed1, 002_mini_none_seed2",
        "Left out</h2>",
    )
    compared = ("Δ: points from plain GRPO", "TOST", "marked t")
    assert all(word in text for word in compared)
    assert main([str(runs / "000_mini_none_seed1"), "--out", str(runs / "alone")]) == 0
    alone = (runs / "alone" / "report.html").read_text()
    assert not [word for word in compared if word in alone], "of one run nothing is compared"
    places = [text.index(part) for part in parts]
    assert places == sorted(places), "what, when and what it means, then the numbers"
    assert "Verdicts" not in text, "no judge was given"
    with open(runs / "report" / "runs.csv") as f:
        rows = list(csv.DictReader(f))
    assert [r["hack_deploy"] for r in rows] == ["0.8", "0.8", "0.1", "0.1"]
    assert [p.name for p in runs.iterdir() if p.name.startswith(".")] == []


def test_a_terminal_of_eighty_columns_shows_what_decides(runs, capsys, monkeypatch):
    """Methods with long names: nothing wraps but the names."""
    monkeypatch.setattr("vgrout.report.page.pictures", lambda _: [])
    long = "--known-modes=sentinel", "--shadow=syntax_edge", "--penalty=2.5"
    for seed in (1, 2):
        flags = "--intervention=penalty", "--monitor=labels", "--random-flags"
        fake_run(runs, *flags, *long, seed=seed)
    assert main([str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80, lines
    assert any(line.startswith("route2: ") for line in lines)


def test_an_older_report_is_replaced_and_what_is_not_of_a_report_stays(runs, monkeypatch):
    monkeypatch.setattr("vgrout.report.page.pictures", lambda _: [])
    (stale := runs / "report" / "figures" / "plane.png").parent.mkdir(parents=True)
    (page := runs / "report" / "report.html").write_text("older")
    stale.write_text("")
    (own := runs / "report" / "thesis.tex").write_text("")
    assert main([str(runs)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert not stale.exists()
    assert own.exists()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["runs", "--tag=_x"], "no finished run named *_x"),
        (["runs", "--judge=none.py"], "--judge none.py: no such file"),
    ],
)
def test_refusals_are_one_line(runs, argv, why, monkeypatch, capsys):
    fake_run(runs, "--intervention=none", seed=9, state="failed")
    monkeypatch.chdir(runs.parent)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1


def test_a_folder_without_a_run_is_refused_before_anything_is_imported(tmp_path):
    code = (
        f"import sys; from vgrout.report.__main__ import main; code = main([{str(tmp_path)!r}]); "
        "print(code, {'pandas', 'scipy', 'matplotlib'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2 set()\n"
    assert done.stderr.startswith(f"E {tmp_path}: no run in it")


def test_verdicts_stand_in_the_report(runs, tmp_path, capsys, monkeypatch):
    """And the judge's own tables; what it is given are the runs that differ by their seed alone."""
    (tmp_path / "judge.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from vgrout.report.judge import Verdict\n"
        "from vgrout.report.tables import ReportTable, compare, percent\n"
        "@dataclass\n"
        "class Own:\n"
        "    word: str\n"
        "def judge(conditions):\n"
        "    named = {c.title: c for c in conditions}\n"
        "    less = compare(named['route2'], named['none'], 'hack').difference\n"
        "    return [Verdict('half', 'route2', 'SUPPORTED' if less.value <= -0.5 else 'NOT', percent(less))]\n"
        "def tables(conditions):\n"
        "    return [ReportTable('Seeds', '', [{'of': c.title, 'are': c.seeds} for c in conditions])]\n"
    )
    monkeypatch.setattr("vgrout.report.page.pictures", lambda _: [])
    assert main([str(runs), "--judge", str(tmp_path / "judge.py")]) == 0
    output = capsys.readouterr().out
    assert re.search(r"\| half +\| route2 +\| SUPPORTED +\| -70\.0 ", output)
    assert re.search(r"\| route2 +\| 1,2 +\|", output)
    assert "SUPPORTED" in (runs / "report" / "report.html").read_text()


@pytest.mark.long
def test_recorded_runs_make_one_table():
    recorded = SimpleNamespace(**runpy.run_path(str(RECORDED / "cells.py")))
    paths = sorted(RECORDED.glob("*.csv"))
    rows = [row for path in paths for row in recorded.read_runs([path]).to_dict("records")]
    table = recorded.over_all_seeds([*paths, paths[0]])
    assert sum(int(r["seeds"]) for r in table.rows) == len(rows) > 1000, (
        "a file given twice counts once"
    )
