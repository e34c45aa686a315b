"""`python -m vgrout.report`: the folder it writes, and what it refuses."""

import csv
import json
import re
import runpy
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest

from fake_runs import fake_run
from runs import flags, run
from vgrout.config.method import CONTROLS
from vgrout.config.run import PLACEBOS
from vgrout.report.__main__ import main
from vgrout.report.runs import load

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guide.md"
RECORDED = GUIDE.parent / "runs"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for seed in (1, 2):
        fake_run(root, "--intervention=none", seed=seed, hack=0.8)
        fake_run(root, "--intervention=route2", seed=seed, hack=0.1)
    return root


def test_the_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(runs, "--intervention=none", seed=9, state="interrupted")
    (runs / "plan.json").write_text('{"name": "arms", "hypotheses": ["an arm keeps the model from hacking"]}')
    assert main([str(runs)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("Methods: "), "the numbers are first"
    assert "left out: 004_mini_none_seed9 (interrupted)" in output
    assert "study arms\nH: an arm keeps the model from hacking\n" in output
    text = (runs / "report" / "report.md").read_text()
    assert text.startswith("# arms\n\n4 runs of "), "what and when, then the numbers"
    for part in ("## Methods", "## Study arms", "## Runs", "- none: 000_mini_none_seed1, 002_mini_none_seed2"):
        assert part in text
    assert "Verdicts" not in text, "no judge was given"
    with open(runs / "report" / "runs.csv") as f:
        rows = list(csv.DictReader(f))
    assert [r["hack_deploy"] for r in rows] == ["0.8", "0.8", "0.1", "0.1"]
    with open(runs / "report" / "modes.csv") as f:
        assert len(list(csv.DictReader(f))) == 4 * 6 * 4
    assert [p.name for p in runs.iterdir() if p.name.startswith(".")] == []


def test_an_older_report_is_replaced(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgrout.report.figures.pictures", lambda _: [])
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
def test_a_folder_with_other_files_is_refused(
    files: tuple[str, ...], named: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (tmp_path / "other" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "other" / name).write_text("")
    assert main([str(runs), "--out", str(tmp_path / "other")]) == 2
    assert f"it holds {named}; name another folder\n" in capsys.readouterr().err
    assert all((tmp_path / "other" / name).exists() for name in files)


def test_cells_with_one_seed_in_common_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgrout.report.figures.pictures", lambda _: [])
    for arm, hack, seeds in (("none", 0.8, (1, 2)), ("route2", 0.1, (2, 3))):
        for seed in seeds:
            fake_run(tmp_path, f"--intervention={arm}", seed=seed, hack=hack)
    assert main([str(tmp_path)]) == 0


def test_a_failure_leaves_the_old_report(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vgrout.report.figures.pictures", lambda _: [])
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
        (["runs", "--judge=none.py"], "--judge none.py: no such file of Python"),
        (["runs", "--judge=runs"], "--judge runs: no such file of Python"),
        (["runs", "--judge=torn.py"], "--judge torn.py: cannot be imported: SyntaxError: "),
        (["runs", "--judge=idle.py"], "--judge idle.py: has no function judge(cells)"),
        (["runs", "--judge=raises.py"], "--judge raises.py: judge(cells) raised ZeroDivisionError: division by zero"),
        (["runs", "--judge=words.py"], "--judge words.py: judge(cells) should return Verdicts, not 'yes'"),
    ],
)
def test_refusals_are_one_line(
    runs: Path, argv: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(runs, "--intervention=none", seed=9, state="failed")
    monkeypatch.chdir(runs.parent)
    for name, text in (
        ("torn", "def judge(:"),
        ("idle", "judge = 1"),
        ("raises", "def judge(cells):\n    return 1 / 0"),
        ("words", "def judge(cells):\n    return ['yes']"),
    ):
        Path(f"{name}.py").write_text(text)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1


def test_the_judge_file_of_the_guide_judges(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(from vgrout.report.judge .*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "judge.py").write_text(block, encoding="utf-8")
    assert main([str(runs), "--judge", str(tmp_path / "judge.py")]) == 0
    output = capsys.readouterr().out
    assert re.search(r"\| half +\| route2 +\| SUPPORTED +\| -70\.0 ", output)
    for name in ("report.md", "report.html"):
        assert "SUPPORTED" in (runs / "report" / name).read_text(encoding="utf-8")


def test_our_own_rules_are_a_judge_file(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs), "--judge", str(GUIDE.parents[1] / "studies" / "verdicts.py")]) == 0
    assert "REFUSED" in capsys.readouterr().out, "route2 is there without its Haar arm"


def test_recorded_runs_have_todays_names() -> None:
    """Interventions, controls and monitors that were removed keep theirs."""
    recorded = SimpleNamespace(**runpy.run_path(str(RECORDED / "cells.py")))
    paths = sorted(RECORDED.glob("*.csv"))
    assert len(paths) == 35
    rows = [row for path in paths for row in recorded.read_runs(path)]
    assert len(rows) == 2116
    assert {r["arm"] for r in rows} == {
        *("none", "erase", "route", "route2", "reader", "surprise", "pmi", "penalty", "screen", "sgtm")
    }
    assert {r["control"] for r in rows} <= {
        *CONTROLS,
        "random_flags",
        *("no_gate", "advantage_mod"),
        *(f"placebo_{p}" for p in PLACEBOS),
    }
    assert not [r["cell"] for r in rows if re.match("vanilla|projected|routing", r["cell"])]
    labelled = [r for r in rows if r["arm"] in ("penalty", "screen")]
    monitors = {word for r in labelled for word in r["settings"].split(" ") if word.startswith("monitor=")}
    named = ("labels", "pmi", "quarantine", "twin", "online_probe", "nll", "probe", "relevance")
    named += ("syntax_edge", "unread_argument")
    assert monitors == {f"monitor={name}" for name in named}
    table = recorded.cells_table([*paths, paths[0]])
    assert sum(int(r["seeds"]) for r in table.rows) == 2116, "a run given twice counts once"
    shrunk = next(r for r in table.rows if (r["arm"], r["control"], r["seeds"]) == ("erase", "shrinkage", "5"))
    by_hand = [float(r["hack_deploy"]) for r in rows if (r["arm"], r["control"]) == ("erase", "shrinkage")]
    assert shrunk["hack deployed"].startswith(f"{100 * mean(by_hand):.1f} [")


@pytest.mark.slow
def test_real_runs_from_training_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two trained seeds: the report reads every file that the trainer writes."""
    for seed in ("1", "2"):
        run(tmp_path, *flags("route2", "--seed", seed, "--final-n-prompts", "12", "--steps", "3"))
    root = tmp_path / "out" / "runs"
    assert main([str(root), "--strict"]) == 0
    text = (root / "report" / "report.md").read_text()
    assert "## Methods" in text
    assert {p.name for p in (root / "report" / "figures").iterdir()} >= {"dynamics.png", "pareto.png", "gates.png"}
    with open(root / "report" / "runs.csv") as f:
        for row in csv.DictReader(f):
            final = json.loads((root / row["run"] / "per_mode_deploy.json").read_text())
            assert float(row["solve_deploy"]) == round(final["solve_deploy"], 6)
    loaded = load([root])
    for r in loaded.runs:
        shares = r.shares("deploy", "solve")
        of_problems = [share for by_problem in shares.values() for share in by_problem.values()]
        assert len(of_problems) == 12
        assert sum(of_problems) / 12 == pytest.approx(r.rate("deploy", "solve"))
    capsys.readouterr()
