"""`python -m vgrout.report`: the folder it writes, and what it refuses."""

import csv
import json
from pathlib import Path

import pytest

from fake_runs import fake_run
from runs import flags, run
from vgrout.config.method import CONTROLS
from vgrout.report.__main__ import main
from vgrout.report.recorded import cells_table, read_runs
from vgrout.report.runs import load

RECORDED = Path(__file__).resolve().parents[1] / "docs" / "runs"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for seed in (1, 2):
        fake_run(root, "--intervention=none", seed=seed, hack=0.8)
        fake_run(root, "--intervention=route2", seed=seed, hack=0.1)
    return root


def test_the_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(runs, "--intervention=none", seed=9, state="interrupted")
    assert main([str(runs)]) == 0
    assert "REFUSED" not in capsys.readouterr().out, "hypotheses are judged where a study declares them"
    assert "## Verdicts" not in (runs / "report" / "report.md").read_text()
    (runs / "plan.json").write_text('{"hypotheses": ["an arm keeps the deployed model from hacking"]}')
    assert main([str(runs)]) == 0
    said = capsys.readouterr().out
    assert "left out: 004_mini_none_seed9 (interrupted)" in said
    assert "REFUSED" in said, "route2 is there without its Haar arm"
    text = (runs / "report" / "report.md").read_text()
    for part in ("## Arms", "## Verdicts", "## Runs", "- none: 000_mini_none_seed1, 002_mini_none_seed2"):
        assert part in text
    with open(runs / "report" / "runs.csv") as f:
        rows = list(csv.DictReader(f))
    assert [r["hack_deploy"] for r in rows] == ["0.8", "0.8", "0.1", "0.1"]
    with open(runs / "report" / "modes.csv") as f:
        assert len(list(csv.DictReader(f))) == 4 * 6 * 4
    assert [p.name for p in runs.iterdir() if p.name.startswith(".")] == []


def test_an_older_report_is_replaced_and_nothing_else(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vgrout.report.__main__.pictures", lambda _: [])
    out = tmp_path / "out"
    assert main([str(runs), "--out", str(out)]) == 0
    (out / "figures" / "stale.png").write_text("")
    assert main([str(runs), "--out", str(out)]) == 0
    assert not (out / "figures" / "stale.png").exists()


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (("thesis.tex",), "thesis.tex"),
        (("report.md", "thesis.tex"), "thesis.tex"),
        (("report.md", "runs.csv", "figures/drawing.svg"), "drawing.svg"),
        (("runs.csv",), "runs.csv"),
    ],
)
def test_a_folder_with_anything_else_in_it_is_left(
    files: tuple[str, ...], named: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text("")
    assert main([str(runs), "--out", str(tmp_path / "mine")]) == 2
    assert f"it holds {named}; name another folder\n" in capsys.readouterr().err
    assert all((tmp_path / "mine" / name).exists() for name in files)


def test_one_seed_in_common_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgrout.report.__main__.pictures", lambda _: [])
    for arm, hack, seeds in (("none", 0.8, (1, 2)), ("route2", 0.1, (2, 3))):
        for seed in seeds:
            fake_run(tmp_path, f"--intervention={arm}", seed=seed, hack=hack)
    assert main([str(tmp_path)]) == 0


def test_a_failure_leaves_the_old_report(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vgrout.report.__main__.pictures", lambda _: [])
    assert main([str(runs)]) == 0
    before = (runs / "report" / "report.md").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vgrout.report.build.write_atomic", full)
    assert main([str(runs)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (runs / "report" / "report.md").read_bytes() == before
    assert [p.name for p in runs.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["nowhere"], "no such folder"),
        (["."], "no run in it"),
        (["runs", "--tag=_x"], "no finished run whose name ends with '_x'"),
        (["runs", "--strict"], "--strict: left out: 004_mini_none_seed9 (failed)"),
        (["runs", "--hypotheses=none.md"], "--hypotheses none.md: none.md cannot be read"),
        (["runs", "some.csv"], "CSV files and folders of runs: give one of the two"),
        (["some.csv", "--strict"], "--strict: not read with CSV files"),
        ([str(RECORDED / "anchors.csv"), "--tag=_x"], "anchors.csv: no run whose name ends with '_x'"),
        (["some.csv"], "some.csv: cannot be read as CSV"),
        (["empty.csv"], "empty.csv: no run in it"),
        (["other.csv"], "other.csv: no arm, control, settings"),
        (["torn.csv"], "torn.csv, line 4: damaged (not 61 columns)"),
    ],
)
def test_refusals_are_one_line(
    runs: Path, argv: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(runs, "--intervention=none", seed=9, state="failed")
    monkeypatch.chdir(runs.parent)
    Path("empty.csv").write_text("")
    Path("torn.csv").write_text((RECORDED / "anchors.csv").read_text()[:2000])
    Path("other.csv").write_text("run,seed,n\n1,2,3\n")
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1


def test_recorded_runs_are_read_under_today_s_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Every CSV of docs/runs, whose arms and controls have the names of earlier versions; those that are gone since
    keep theirs."""
    paths = sorted(RECORDED.glob("*.csv"))
    assert len(paths) == 30
    rows = [row for path in paths for row in read_runs(path)]
    assert len(rows) == 2102  # 1495 of them, of axes.csv and of studies since, with the names of today
    off = [
        r["settings"].split(" ")[0] for r in rows if r["arm"] == "pmi" and r["settings"].split(" ")[0].endswith("=off")
    ]
    assert sorted(off) == ["own_streams=off"] * 3 + ["rebaseline=off"] * 3
    assert {r["arm"] for r in rows} == {
        *("none", "erase", "route", "route2", "reader", "surprise", "pmi", "penalty", "screen", "sgtm")
    }
    assert {r["control"] for r in rows} <= {*CONTROLS, "random_flags", "no_gate"}
    labelled = [r for r in rows if r["arm"] in ("penalty", "screen")]
    of = {word for r in labelled for word in r["settings"].split(" ") if word.startswith("monitor=")}
    named = ("labels", "pmi", "quarantine", "twin", "online_probe", "nll", "probe", "relevance")
    assert of == {f"monitor={name}" for name in named}
    assert not [r for r in rows if r["arm"] == "none" and "monitor" in r["settings"]]
    assert len({r["settings"] for r in labelled}) > 4, "with three accuracies, on two organisms"
    assert sum(int(r["seeds"]) for r in cells_table([*paths, paths[0]]).rows) == 2102, "a run given twice counts once"
    assert main([str(p) for p in paths]) == 0
    assert capsys.readouterr().out.startswith("Cells: 2102 runs. ")


def test_a_recorded_cell_by_hand(tmp_path: Path) -> None:
    """Three seeds of one cell: deployed hack .1, .2, .6 (see the t interval by hand), nothing else to vary."""
    path = tmp_path / "runs.csv"
    head = "run,arm,control,settings,base_weights,loss,steps,seed,n,hack_deploy,solve_deploy,solve_plain"
    runs = (
        f"r{i},routing2,mass_matched,half_a=C,w,grpo,60,{i},96,{hack},1.0," for i, hack in enumerate((0.1, 0.2, 0.6))
    )
    path.write_text("\n".join([head, *runs]))
    (row,) = cells_table([path]).rows
    assert row == {
        "arm": "route2",
        "control": "random_flags",
        "seeds": "3",
        "n a side": "96",
        "hack deployed": "30.0 [0.0, 95.7] t",
        "solve deployed": "100.0 (DEGENERATE)",
        "solve no hint": "·",
    }
    assert read_runs(path)[0]["settings"] == "report_detectors=C"


@pytest.mark.slow
def test_real_runs_from_training_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two seeds of one arm, trained: every file that the trainer writes is one that the report reads."""
    for seed in ("1", "2"):
        run(tmp_path, *flags("route2", "--seed", seed, "--final-n-prompts", "12", "--steps", "3"))
    root = tmp_path / "out" / "runs"
    assert main([str(root), "--strict"]) == 0
    text = (root / "report" / "report.md").read_text()
    assert "no final.jsonl" not in text, "paired by problem"
    assert "preregistered: all 2 runs carry this file's hash" in text
    assert {p.name for p in (root / "report" / "figures").iterdir()} >= {"dynamics.png", "pareto.png", "gates.png"}
    with open(root / "report" / "runs.csv") as f:
        for row in csv.DictReader(f):
            final = json.loads((root / row["run"] / "per_mode_deploy.json").read_text())
            assert float(row["solve_deploy"]) == round(final["solve_deploy"], 6)
    loaded = load([root])
    for r in loaded.runs:
        shares = r.shares("deploy", "solve")
        assert shares is not None
        of_problems = [share for by_problem in shares.values() for share in by_problem.values()]
        assert len(of_problems) == 12
        assert sum(of_problems) / 12 == pytest.approx(r.rate("deploy", "solve"))
    capsys.readouterr()
