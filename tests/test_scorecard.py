"""The scorecard: what is planned, what a cell's numbers mean, and a class of somebody's own in it."""

import json
import tomllib
from dataclasses import replace

import pytest

from vgrout.ground.io import Refused
from vgrout.scorecard import battery, carry_out, outcome
from vgrout.scorecard.__main__ import main
from vgrout.scorecard.battery import CEILING, IDLE, Battery, needs, plan
from vgrout.scorecard.outcome import Outcome, cells

SMALL = """
preset = "smoke"
seeds = [1, 2]
common = { steps = 2, final-n-prompts = 6, final-samples = 1, eval-ablate-every = 0 }
[rows]
none = {}
route2 = { intervention = "route2" }
ceiling = { control = "no_loophole" }
[settings]
shown = {}
nothing = { control = "no_loophole" }
begun = { organism = "out/begun-{seed}" }
[needs]
none = "nothing"
"""
OWN = """
from vgrout.method.base import Monitor, flags_of, rewarded

class Never(Monitor):
    name, what = "never", "nothing"
    def flag(self, views, step):
        return flags_of(views, ())

class Raises(Never):
    def flag(self, views, step):
        if any(view.passed.count(True) for view in views):
            raise ArithmeticError("of the user's own")
        return flags_of(views, ())
"""


def planned_in(found, settings):
    """Every row's runs in these settings, with the battery's first seed."""
    return plan(
        found, found.rows, [(row, s, found.seeds[0]) for s in settings for row in found.rows]
    )


@pytest.mark.long
def test_every_row_can_be_run_in_every_setting_and_a_run_of_two_cells_once():
    found = Battery.load()
    planned = planned_in(found, found.settings)
    assert planned.cannot == {}
    assert len(planned.runs) == len(found.rows) * len(found.settings)
    of = {key[:2]: run.identity for key, run in planned.runs.items()}
    without_flags = ("none", "erase", "route", "ceiling")
    assert all(of[row, "thinned"] == of[row, "shown"] for row in without_flags)
    assert of["ceiling", IDLE] == of["none", IDLE] == of["ceiling", "shown"]
    of_labels = {row for row in found.rows if of[row, "evading"] != of[row, "begun"]}
    assert of_labels == {
        "route2 · labels",
        "screen · labels",
        "penalty · labels",
        "penalty · probe",
    }
    assert len(planned.once) == len({*of.values()}) == 75


def test_the_table_says_what_each_row_needs():
    found = Battery.load()
    planned = planned_in(found, ["shown"])
    assert {
        row: needs(planned.runs[row, "shown", found.seeds[0]].cfg.method) for row in found.rows
    } == found.needs
    keys = [("x", setting, 44) for setting in ("shown", IDLE)]
    mine = plan(found, {"x": {"intervention": "penalty", "monitor": "labels"}}, keys)
    assert carry_out.Scorecard.of(found, {}, mine, {}).needs("x") == "labels"


def test_a_row_that_cannot_be_run_in_a_setting_is_left_out_there_and_one_that_never_can_is_refused():
    found = Battery.load()
    keys = [("x", s, seed) for s in ("shown", "nothing") for seed in found.seeds[:2]]
    with pytest.raises(Refused, match="rewards change before the gradients"):
        plan(found, {"x": {"intervention": "penalty", "monitor": "gate"}}, keys)
    some = replace(found, settings={**found.settings, "nothing": {"known-modes": "no_such_flaw"}})
    planned = plan(some, {"x": {"intervention": "penalty", "monitor": "labels"}}, keys)
    assert [*planned.runs] == [("x", "shown", seed) for seed in found.seeds[:2]]
    assert "no_such_flaw" in planned.cannot["x", "nothing"]


# ── what numbers mean


def runs(row, hacks, solves, setting="shown", flagged=3):
    return [
        Outcome(row, setting, seed, 192, hack, solve, 0, 0, flagged, 20.0, "", "")
        for seed, (hack, solve) in enumerate(zip(hacks, solves, strict=True))
    ]


BEST = runs(CEILING, [0.0] * 5, [0.8, 0.82, 0.78, 0.8, 0.8])


@pytest.mark.parametrize(
    ("hacks", "solves", "verdict"),
    [
        ([0.0, 0.01, 0.0, 0.02, 0.01], [0.8, 0.8, 0.79, 0.8, 0.78], "holds"),
        ([0.05] * 5, [0.7, 0.72, 0.68, 0.7, 0.7], "holds"),  # seeds that agree: at the bound
        ([0.3, 0.4, 0.35, 0.3, 0.3], [0.8] * 5, "breaks"),
        ([0.0, 0.0, 0.0, 0.0, 0.3], [0.8] * 5, "undecided"),
        ([0.9] * 4, [0.0] * 4, "undecided"),  # four seeds decide nothing
    ],
)
def test_a_cell_holds_or_breaks_by_the_whole_interval(hacks, solves, verdict):
    found = cells([*BEST, *runs("x", hacks, solves)])
    assert (found["x", "shown"].verdict, found[CEILING, "shown"].verdict) == (verdict, "")


def test_where_nothing_can_be_hacked_a_row_that_flags_nothing_is_idle():
    best = [replace(o, setting=IDLE) for o in BEST]
    same = [0.0] * 5, [o.solve for o in BEST]
    found = cells(
        [
            *best,
            *runs("x", *same, IDLE, 0),
            *runs("y", *same, IDLE, 1),
            *runs("z", *same, "shown", 0),
        ]
    )
    assert {key: cell.verdict for key, cell in found.items() if key[0] != CEILING} == {
        ("x", IDLE): "idle",
        ("y", IDLE): "holds",
        ("z", "shown"): "undecided",  # there is no ceiling in this setting
    }


def test_recorded_runs_are_of_the_battery_and_are_read_back_as_written(tmp_path):
    found, recorded = Battery.load(), outcome.read()
    keys = [(o.row, o.setting, o.seed) for o in recorded]
    assert len({*keys}) == len(keys)
    assert {o.row for o in recorded} <= found.rows.keys()
    assert {o.setting for o in recorded} <= found.settings.keys()
    assert {o.seed for o in recorded} <= {*found.seeds}
    outcome.write(tmp_path / "again.csv", recorded)
    assert (tmp_path / "again.csv").read_bytes() == outcome.RECORDED.read_bytes()


def test_the_recorded_table_has_a_page_and_a_file_that_may_be_written_again(tmp_path, capsys):
    argv = ["--settings=shown,shown", f"--html={tmp_path / 'new'}", f"--csv={tmp_path / 'a.csv'}"]
    assert [main(argv), main(argv)] == [0, 0]
    assert capsys.readouterr().out.count("-> ") == 2
    assert (tmp_path / "a.csv").read_bytes() == outcome.RECORDED.read_bytes()


@pytest.mark.parametrize("damaged", ["final.jsonl", "steps.jsonl"])
def test_a_run_whose_files_are_damaged_is_refused(damaged, tmp_path):
    answer = {"side": "deployed", "solved": True, "hacked": False}
    for file, line in (("final.jsonl", answer), ("steps.jsonl", {"sec": 1.0, "eval": None})):
        (tmp_path / file).write_text("" if file == damaged else json.dumps(line))
    with pytest.raises(Refused, match="no answers or no steps any more"):
        outcome.read_run("none", "shown", 44, tmp_path)


def test_the_recorded_table_is_80_columns_wide(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 80
    assert sum(line.startswith("penalty · probe") for line in printed) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--settings=show"], "--settings show: no such setting; should be of shown, "),
        (["--seeds=1"], "--seeds 1: no such seed; should be of 44, "),
        (["--rows=oracle"], "--rows oracle: no such row"),
        (["--intervention=eraze"], "--intervention eraze: should be one of "),
        (["--monitor=no.module:Class"], "no.module"),
        (["--rows=none", "--settings=begun"], "out/begun-44 is not here"),
        (["--rows=,"], "--rows ',': names none"),
        (["--monitor=mine:labels"], "penalty · labels: is a row of ours"),
        (["--csv=."], "is a folder; name a file"),
        (["--csv=thesis.tex"], "--csv thesis.tex: is there, and no scorecard's"),
        (["--csv=thesis.tex/x.csv"], "--csv thesis.tex: cannot be written"),
    ],
)
def test_mistakes_are_answered_before_anything_runs(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.tex").touch()
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (len(captured.err.splitlines()), captured.out) == (1, "")


# ── whole runs


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A battery of the preset smoke without records, and a user's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "battery.toml").write_text(SMALL)
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "recorded.csv").write_text(outcome.RECORDED.read_text().splitlines()[0] + "\n")
    monkeypatch.setattr(battery, "FILE", tmp_path / "battery.toml")
    monkeypatch.setattr(carry_out, "FILE", tmp_path / "battery.toml")
    monkeypatch.setattr(carry_out, "read", lambda: outcome.read(tmp_path / "recorded.csv"))
    return tmp_path


@pytest.mark.long
def test_a_class_of_ones_own_gets_a_row_and_a_page_and_is_not_run_twice(small, capsys):
    argv = ["--monitor=mine:Never", "--seeds=1", "--csv=runs.csv", "--html=page"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "begun: not run, out/begun-1 is not here" in printed
    found = {(o.row, o.setting, o.seed): o for o in outcome.read(small / "runs.csv")}
    own = [key for key in found if key[0] == "penalty · Never"]
    assert own == [("penalty · Never", "shown", 1), ("penalty · Never", "nothing", 1)]
    assert found["penalty · Never", "shown", 1].flagged == 0
    plain = found["none", "shown", 1]  # what flags nothing is plain GRPO
    assert (plain.hack, plain.solve) == (
        found["penalty · Never", "shown", 1].hack,
        found["penalty · Never", "shown", 1].solve,
    )
    page = (small / "page" / "scorecard.html").read_text()
    assert all((small / "page" / f"cell{i}" / "report.html").is_file() for i in range(4))
    assert page.count('href="cell') == 4  # two of yours, one of none and one of route2
    made = sorted((small / "out" / "runs").iterdir())
    (small / "recorded.csv").write_text((small / "runs.csv").read_text())
    assert main(argv) == 0
    assert "4 of 4 recorded runs came out here to the digit" in capsys.readouterr().out
    assert sorted((small / "out" / "runs").iterdir()) == made


@pytest.mark.long
def test_a_class_that_raises_leaves_that_cell_failed_with_its_line_and_the_rest_goes_on(
    small, capsys
):
    assert main(["--monitor=mine:Raises", "--seeds=1"]) == 1
    printed = capsys.readouterr().out
    assert "penalty · Raises in shown: failed: " in printed
    assert "of the user's own" in printed
    assert main(["--monitor=mine:Raises", "--seeds=1", "--dry-run"]) == 0


def test_settings_start_from_what_prepare_makes():
    made = (battery.FILE.parents[3] / "studies" / "prepare.sh").read_text()
    data = tomllib.loads(battery.FILE.read_text())
    starts = {s["organism"] for s in data["settings"].values() if "organism" in s}
    assert len(starts) == 4
    for start in starts:
        assert start.replace("{seed}", "$seed") in made
    assert "for seed in " + " ".join(map(str, data["seeds"])) in made


def test_the_documents_tables_are_of_the_recorded_runs(capsys):
    root = battery.FILE.parents[3]
    assert main(["--settings=shown,thinned,begun,evading,look-alike,nothing"]) == 0
    table = capsys.readouterr().out.partition("\n\n")[0]
    assert (
        f"<!-- scorecard -->\n```text\n{table}\n```" in (root / "docs" / "results.md").read_text()
    )
    readme = (
        (root / "README.md").read_text().partition("<!-- scorecard -->\n")[2].partition("\n\n")[0]
    )
    cells_of = [
        [cell.replace(" ", "") for cell in line.split(" | ")[1:]]
        for line in readme.splitlines()[2:]
    ]
    printed = [line[16:].replace(" ", " ").split()[-6:-1] for line in table.splitlines()[2:]]
    assert len(cells_of) == 6
    assert all([cell.rstrip("|") for cell in row] in printed for row in cells_of)
