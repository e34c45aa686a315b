"""Arm × control over seeds, from run directories written by hand."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from vgrout.config import Config, parse
from vgrout.results import controls_table, interval, load, results, with_interval


def write_run(root: Path, hack: float, solve: float, *flags: str, cos: float | None = None, **more: Any) -> Path:
    """A finished run with only what the tables read."""
    cfg: Config = parse(["mini", *flags])
    path = root / f"{len(list(root.iterdir())):03d}_{cfg.run_id}"
    path.mkdir()
    close = None if cos is None else {"median": cos, "p95": 2 * cos, "max": 3 * cos, "rms": cos, "chance_rms": 0.1}
    record = {
        "config": cfg.as_dict(),
        "control": cfg.arm.control_name,
        "direction": {"pairs": more.get("pairs", "run_tests.json"), "cos_with_real": close},
    }
    sides = ("base", "train", "deploy", "plain")
    final = {
        "arm": {"none": "vanilla", "route2": "routing2"}[cfg.arm.intervention],
        "control": cfg.arm.control_name,
        "seed": cfg.run.seed,
        "steps": cfg.scale.steps,
        "eval_n": 384,
        **{f"hack_{s}": hack for s in sides},
        **{f"solve_{s}": solve for s in sides},
        "by_mode": {"run_tests": {f"{s}_hack": hack for s in sides}},
        "gate": more.get("gate"),
    }
    row = {
        "step": 0,
        "hack_s": [0, 8],
        "sec": 1.0,
        "gen": 0.1,
        "grade": 0.1,
        "fb": 0.1,
        "eval": None,
        "routed": more.get("routed"),
    }
    files = {"run.json": record, "per_mode_deploy.json": final, "status.json": {"state": "finished"}}
    for name, data in files.items():
        (path / name).write_text(json.dumps(data))
    (path / "steps.jsonl").write_text(json.dumps(row) + "\n")
    return path


@pytest.fixture
def study(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    root.mkdir()
    for i, seed in enumerate(("41", "42", "43")):
        arm = ("--intervention", "route2", "--seed", seed)
        write_run(root, 0.6 + 0.01 * i, 0.05, "--intervention", "none", "--seed", seed)
        write_run(root, 0.02 * i, 0.5, *arm, routed=0.25, gate={"precision": [3, 4], "recall": [3, 6]})
        write_run(root, 0.3 + 0.02 * i, 0.4, *arm, "--control", "haar", cos=0.07, routed=0.2)
        write_run(root, 0.4 + 0.1 * i, 0.3, *arm, "--control", "placebo_long", cos=0.14 + 0.01 * i)
        write_run(root, 0.5, 0.2, *arm, "--control", "haar", "--route2-gate", "pairs", cos=0.07)
    write_run(root, 0.0, 0.9, "--intervention", "none", "--control", "no_loophole", "--seed", "41")
    return root


def test_arms_with_different_controls_are_different_rows(study: Path) -> None:
    table = controls_table(load(study, "")[0])
    assert [row["arm · control"] for row in table] == [
        "vanilla",
        "vanilla · no_loophole",
        "routing2",
        "routing2 · haar",
        "routing2 · placebo_long",
        "routing2 (pair band) · haar",
    ]
    by_name = {row["arm · control"]: row for row in table}
    assert by_name["routing2 · haar"]["seeds"] == "41,42,43"
    assert by_name["routing2"]["gate precision / recall %"] == "75 / 50"
    assert by_name["routing2"]["hack − own arm"] == "·"  # the arm itself has nothing to be compared with
    assert by_name["routing2 (pair band) · haar"]["hack − own arm"] == "·"  # the τ gate's runs are another arm
    assert by_name["routing2 · haar"]["hack − own arm"] == "30.0 [30.0, 30.0]"  # seed by seed: the seeds cancel
    assert by_name["vanilla · no_loophole"]["deployed hack % [95 %]"] == "0.0 (one seed)"
    assert by_name["routing2 · placebo_long"]["|cos| median / 95 % / rms (chance)"] == "0.15 / 0.30 / 0.15 (0.10)"
    assert by_name["vanilla"]["|cos| median / 95 % / rms (chance)"] == "·"


def test_the_interval_is_students() -> None:
    xs = [0.1, 0.2, 0.6]
    mean, low, high = interval(xs) or (0, 0, 0)
    half = 4.303 * statistics.stdev(xs) / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((0.3, 0.3 - half, 0.3 + half))
    assert with_interval(xs) == "30.0 [0.0, 95.7]"  # cut where a share ends
    assert interval([0.5]) is None
    assert with_interval([None, None]) == "·"
    assert interval([0.0] * 40 + [1.0]) is not None  # beyond the table: the normal one


def test_pairs_that_true_labels_chose_are_named_as_such(tmp_path: Path) -> None:
    write_run(tmp_path, 0.1, 0.5, "--intervention", "route2", pairs="oracle:mine.json")
    (row,) = controls_table(load(tmp_path, "")[0])
    assert row["arm · control"] == "routing2 (pairs chosen by the oracle)"


def test_one_command_prints_all_and_names_what_it_left_out(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished = study / "999_mini_vanilla_seed9"
    unfinished.mkdir()
    (unfinished / "run.json").write_text("{}")
    assert results(study) == 0
    said = capsys.readouterr().out
    assert "routing2 · placebo_long" in said
    assert "999_mini_vanilla_seed9 (unknown)" in said
    assert results(study / "nowhere") == 2
