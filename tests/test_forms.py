"""A run whose files are not as the trainer writes them is left out; a fault of the report's own shows its traceback."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fake_runs import fake_run
from vgrout.report.__main__ import main
from vgrout.report.load import conditions, load
from vgrout.report.rollouts import FLAGS, _bits, _flaws, pack
from vgrout.report.tables import by_flaw, csv_tables, methods, monitors

WRONG: tuple[Any, ...] = (None, "x", "\ud800", -1, 1.5, 10**400, True, [], ["x"], {}, {"a": 1})
FILES = ("run.json", "per_mode_deploy.json", "steps.jsonl", "final.jsonl", "rollouts.jsonl")
MISSING = object()


def whole_run(root: Path) -> Path:
    """A run with a text monitor, a monitor in shadow, evaluations, a direction and rollouts."""
    row = {"hack_deploy": 0.5, "solve_deploy": 0.5, "hk_xc_k": 1, "hk_xc_n": 8}
    row |= {"signal_k": 2, "signal_n": 4, "n": 32, "all_zero": 1}
    words = "--intervention=penalty", "--monitor=labels", "--shadow=syntax_edge"
    path = fake_run(root, *words, n=6, cos=0.1, row=row)
    rollout = {"step": 0, "gate": 0.5, "flagged": True, "advantage": 0.1, "problem_id": 1}
    rollout |= {"shadow": {"syntax_edge": {"flagged": True, "score": 1.0}}, "finished": True}
    rollout |= {"env_mode": "exit_code", "marker": "m", "mechanism": "exit_code", "text": "x"}
    rollout |= {"messages": [{"role": "user", "content": "c"}], "prompt": "p", "reward": 1.0}
    rollout |= {"passed": True, "hacked": True, "solved": False}
    (path / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
    return path


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON value has values: the whole, and each member of it, however deep."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*at, index))


def changed(value: Any, at: tuple[Any, ...], to: Any) -> Any:
    """A copy with another value at a place."""
    if not at:
        return None if to is MISSING else to
    copy = json.loads(json.dumps(value))
    inside = copy
    for key in at[:-1]:
        inside = inside[key]
    if to is MISSING:
        del inside[at[-1]]
    else:
        inside[at[-1]] = to
    return copy


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_any_wrong_value_leaves_the_run_out_or_is_harmless(name: str, tmp_path: Path) -> None:
    """Each value of each file in turn, replaced by values of other kinds, or missing."""
    path = whole_run(tmp_path)
    assert len(load([tmp_path])[0]) == 1
    lines = (path / name).read_text().splitlines()
    if name.endswith(".json"):
        lines = ["".join(lines)]
    first = json.loads(lines[0])
    others = [place for place in places(first) if place[:1] != ("config",)]
    if name == "per_mode_deploy.json":  # the flaws are alike
        others = [p for p in others if p[:1] != ("by_mode",) or len(p) < 2 or "exit_code" in p]
    tried = left_out = 0
    for place in others:
        for value in (*WRONG, MISSING):
            text = json.dumps(changed(first, place, value))
            (path / name).write_text("\n".join([text, *lines[1:]]) + "\n")
            runs, why = load([tmp_path])
            found = conditions(runs)
            for table in (methods(found), by_flaw(found), monitors(found)) if found else ():
                table.markdown() if table.rows else None
            csv_tables(found)
            why += pack(found, 1000)["left_out"]
            tried += 1
            left_out += bool(why)
            assert all(line.count("\n") == 0 for line in why)
    print(f"{name}: {tried} wrong values, {left_out} of them leave something out")
    assert tried > 60
    assert left_out > tried / 4


SLIPS = {
    "vgrout.report.load.read_run": KeyError("slip"),
    "vgrout.report.load.FinishedRun.row": AttributeError("slip"),
    "vgrout.report.load._hacked_flaw": TypeError("slip"),
    "vgrout.report.load._read_steps": ValueError("slip"),
    "vgrout.report.load.conditions": IndexError("slip"),
    "vgrout.report.rollouts._bits": ValueError("slip"),
    "vgrout.report.rollouts._prompt": KeyError("slip"),
    "vgrout.report.tables.by_flaw": ValueError("slip"),
    "vgrout.report.figures.dynamics": ValueError("slip"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_of_ours_is_no_files_fault(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole_run(tmp_path)

    def slip(*_: object, **__: object) -> None:
        raise SLIPS[name]

    monkeypatch.setattr(name, property(slip) if name.endswith("row") else slip)
    assert main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "slip" in error.splitlines()[-1]


def test_what_is_no_folder_of_runs_is_not_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tests", "lates", "runz"):
        Path(name).mkdir()
    newest = fake_run(Path("out/runs"), "--intervention=none")
    fake_run(Path("sweepings"), "--intervention=none")
    for typed, said in (
        ("latest", f"no such folder; the newest run is {newest}"),
        ("out/latest", f"no such folder; the newest run is {newest}"),
        ("sweepins", "no such folder; did you mean sweepings?"),
        ("out/rnus", "no such folder; did you mean out/runs?"),
        ("testz", "no such folder, give that of a run, of runs or a sweep"),
    ):
        assert main([typed]) == 2
        assert capsys.readouterr().err == f"E {typed}: {said}\n"


EXITS = ("sys.exit(0)", "sys.exit('why')", "raise GeneratorExit", "raise SystemExit", "exit(3)")


@pytest.mark.parametrize("leaves", EXITS)
@pytest.mark.parametrize("where", ["file", "judge", "tables"])
def test_a_judge_that_exits_does_not_look_like_a_report(
    where: str, leaves: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(tmp_path / "runs", "--intervention=none", n=6)
    bodies = {
        name: f"    {leaves if where == name else 'return []'}" for name in ("judge", "tables")
    }
    text = f"import sys\n{leaves if where == 'file' else ''}\n"
    for name, body in bodies.items():
        text += f"def {name}(conditions):\n{body}\n"
    (tmp_path / "own_judge.py").write_text(text)
    code = main([str(tmp_path / "runs"), "--judge", str(tmp_path / "own_judge.py"), "--rollouts=0"])
    assert code == (2 if where == "file" else 1)
    error = capsys.readouterr().err
    assert "own_judge.py" in error
    assert leaves in error, "the line that left"


def test_facts_about_an_answer_are_bits() -> None:
    bits = [_bits({}), *(_bits({flag: True}) for flag in FLAGS)]
    assert bits == [0, *(2**i for i in range(len(FLAGS)))]


def test_the_flaws_of_all_runs_are_named() -> None:
    one, other = SimpleNamespace(all_flaws={"a": 1}), SimpleNamespace(all_flaws={"b": 2})
    assert _flaws(cast(Any, [one, other])) == {"a": 1, "b": 2}
