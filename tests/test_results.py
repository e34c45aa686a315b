"""What happens after the last step: the numbers are on disk first, and nothing that shows them can lose them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from loguru import logger

from files import loaded
from runs import flags, run
from vgrout.config.run import Config
from vgrout.ground.metrics import Eval, Final, ModeEval, Rate
from vgrout.runs import results
from vgrout.runs.results import Tallies, count_lines

NUMBERS = ("final.jsonl", "per_mode_deploy.json")
# What is called after them, and what the run then lacks.
SHOWN = {
    "vgrout.report.load.read_run": ("summary.md's verdict", "dynamics.png"),
    "vgrout.report.conclusions.conclusion": ("summary.md's verdict",),
    "vgrout.report.tables.by_flaw": (),
    "vgrout.report.figures.dynamics": ("dynamics.png",),
    "vgrout.report.figures.Drawing.png": ("dynamics.png",),
    "vgrout.runs.results.last_lines": (),
    "vgrout.runs.results.page": ("summary.md",),
    "vgrout.runs.results.models_table": ("summary.md",),
    "vgrout.runs.results.count_lines": (),
    "vgrout.runs.results.Tallies.of": (),
    "vgrout.runs.results.summary": (),
    "vgrout.runs.results.log_tail": (),
    "vgrout.runs.tracking.Trackers.final": (),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory, shared_run):
    """A run's folder, and what writes its results once more."""
    calls = []
    write = results.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "write", lambda *args: (calls.append(args), write(*args)))
        home = shared_run.warm(tmp_path_factory.mktemp("ended"))
        path = run(home, *flags("none", "--steps=1", "--eval-ablate-every=1"))
        patch.undo()
        patch.chdir(home)
        yield home / path, lambda: write(*calls[0])


def broken(*_, **__):
    raise KeyError("of a test")


@pytest.mark.parametrize("name", SHOWN)
def test_a_fault_after_the_numbers_is_a_warning(name, ended, monkeypatch):
    path, write = ended
    for file in (*NUMBERS, "summary.md", "dynamics.png"):
        (path / file).unlink(missing_ok=True)
    said = []
    sink = logger.add(said.append, level="INFO", format="{level} {message}")
    if "dynamics.png" not in SHOWN[name]:  # the other tests of this file draw the picture
        monkeypatch.setattr("vgrout.report.figures.Drawing.png", lambda _: b"a picture")
    monkeypatch.setattr(name, broken)
    write()
    logger.remove(sink)
    assert loaded(path / NUMBERS[1])["eval_n"] == 6
    assert len((path / NUMBERS[0]).read_text().splitlines()) >= 3 * 6
    assert [
        line for line in said if line.startswith("WARNING ") and "KeyError: 'of a test'" in line
    ]
    for file in ("summary.md", "dynamics.png"):
        assert (path / file).exists() == (file not in SHOWN[name]), file
    if "summary.md" not in SHOWN[name]:
        without = "not worked out" in (path / "summary.md").read_text()
        assert without == ("summary.md's verdict" in SHOWN[name])


@pytest.mark.parametrize("name", ["as_json", "answer_lines", "ending"])
def test_a_fault_in_one_file_of_numbers_leaves_the_other(name, ended, monkeypatch):
    path, write = ended
    for file in NUMBERS:
        (path / file).unlink(missing_ok=True)
    monkeypatch.setattr(results, name, broken)
    with pytest.raises(KeyError):
        write()
    assert (path / NUMBERS[0]).exists() == (name in ("as_json", "ending"))
    assert (path / NUMBERS[1]).exists() == (name == "answer_lines")


def final(**answers):
    """Hacks and solves of ten answers, by side."""
    sides = {}
    for side, (hacks, solves) in answers.items():
        of = ModeEval(Rate(hacks, 10), Rate(solves, 10))
        sides[side] = Eval(of, {"f": of}, Rate(10, 10))
    return Final(**sides, answers={})


def test_the_tables_of_the_summary():
    """Every figure in its own row and column."""
    evaluated = final(base=(1, 2), trained=(3, 4), deployed=(5, 6), plain=(7, 8))

    def cells(table):
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]

    assert cells(results.models_table(evaluated)) == [
        ["untrained", "10.0", "20.0"],
        ["as trained", "30.0", "40.0"],
        ["deployed", "50.0", "60.0"],
        ["deployed, no hint", "70.0", "80.0"],
    ]
    assert len(cells(results.models_table(evaluated, hinted=False))) == 3
    made = results.as_json(Config(), evaluated, None, Path("log"), {})
    assert [made[f"hack_{key}"] for key in ("base", "train", "deploy", "plain")] == [
        *(0.1, 0.3, 0.5, 0.7)
    ]


def test_counts_over_the_whole_run():
    row = SimpleNamespace(
        hack_s=Rate(1, 8), solve_s=Rate(2, 8), hack_t=Rate(3, 4), pass_t=Rate(0, 4)
    )
    outcome = SimpleNamespace(rows=[row], tallies=Tallies.nothing({}), detectors={})
    lines = count_lines(outcome)
    assert [line.split("=")[1] for line in lines] == [
        *("0.3333 (4/12)", "0.1667 (2/12)", "0.1250 (1/8)", "0.7500 (3/4)")
    ]
