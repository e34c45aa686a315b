"""The tables, from run directories whose numbers are known."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from fake_runs import fake_run
from vgrout.report.runs import Cell, cells, load
from vgrout.report.tables import compare, level, monitor_rows, run_rows, tables


def table(root: Path, name: str) -> list[dict[str, str]]:
    return next(list(t.rows) for t in tables(cells(load([root]).runs)) if t.name == name)


def pair(root: Path) -> tuple[Cell, Cell]:
    plain, other = cells(load([root]).runs)
    return other, plain


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for i, seed in enumerate((41, 42, 43)):
        arm = "--intervention=route2"
        gate = {"precision": [3, 4], "recall": [3, 6]}
        fake_run(tmp_path, "--intervention=none", seed=seed, hack=0.6 + 0.1 * i, solve=0.0)
        fake_run(tmp_path, arm, seed=seed, hack=0.1 * i, row={"routed": 0.25}, gate=gate)
        fake_run(tmp_path, arm, "--control=haar", seed=seed, hack=0.3 + 0.1 * i, cos=0.07)
        fake_run(
            tmp_path,
            arm,
            "--control=placebo",
            "--placebo-pairs=long",
            seed=seed,
            hack=0.4 + 0.2 * i,
            cos=0.14 + 0.01 * i,
        )
        fake_run(tmp_path, arm, "--control=haar", "--monitor=band", seed=seed, cos=0.07)
    fake_run(tmp_path, "--intervention=none", "--control=no_loophole", hack=0.0, solve=0.9)
    return tmp_path


def test_controls_are_compared_with_their_own_method(study: Path) -> None:
    rows = {r["method · control"]: r for r in table(study, "Methods and controls")}
    own, haar, band = (rows[n] for n in ("route2", "route2 · haar", "route2 (pair band) · haar"))
    cos = "cos with the real direction: median / 95 % / rms (chance)"
    assert haar["seeds"] == "41,42,43"
    assert own["gate precision / recall"] == "75 / 50"
    assert own["routed"] == "25.0 ± 0.0 (25–25)"
    assert own["Δ hack"] == "·", "the method itself has nothing to be compared with"
    assert band["Δ hack"] == "·", "the τ gate's runs are another method"
    assert haar["Δ hack"] == "30.0 (n too small)", "seed by seed: the seeds cancel, and three are no interval"
    assert rows["route2 · placebo_long"]["Δ hack"] == "50.0 [25.2, 74.8] t"
    assert rows["route2 · placebo_long"]["p hack"] == "0.250 (≥ 0.250) n too small"
    assert rows["route2 · placebo_long"][cos] == "0.15 / 0.30 / 0.15 (0.10)"


def test_single_seeds_have_a_table_of_their_own(study: Path) -> None:
    several = [r["method"] for r in table(study, "Methods")]
    assert "none" in several
    assert "none · no_loophole" not in several
    (alone,) = table(study, "One seed only")
    assert alone["hack deployed"] == "0.0 [0.0, 6.0]"  # Wilson, 0 of 60


def test_against_none_seed_by_seed(study: Path) -> None:
    rows = {r["method"]: r for r in table(study, "Deployed models against plain GRPO's")}
    assert rows["route2"]["Δ hack"] == "-60.0 (n too small)"
    assert rows["route2"]["Δ solve"] == "50.0 (n too small)"
    assert "none" not in rows


def test_pairing_by_problem_narrows_the_interval(tmp_path: Path) -> None:
    """Both methods hack the same problems but a few: what they share cancels."""
    for seed in range(5):
        fake_run(tmp_path, "--intervention=none", seed=seed, hack=0.5, n=120)
        fake_run(tmp_path, "--intervention=route2", seed=seed, hack=0.4, n=120)
    routed, plain = pair(tmp_path)
    found = compare(routed, plain, "hack").difference
    assert found.value == pytest.approx(-0.1)
    assert found.how == "bootstrap"
    width, *apart = (
        (e.high or 0) - (e.low or 0) for e in (found, *(level(c, "deploy", "hack") for c in (routed, plain)))
    )
    assert 0 < width < 0.75 * math.hypot(*apart)


def test_methods_that_never_hack_are_degenerate(tmp_path: Path) -> None:
    for seed in range(6):
        fake_run(tmp_path, "--intervention=none", seed=seed, hack=0.0)
        fake_run(tmp_path, "--intervention=route2", seed=seed, hack=0.0)
    found = compare(*pair(tmp_path), "hack")
    assert (found.difference.note, found.p.note, found.same.note) == ("DEGENERATE",) * 3
    (row,) = table(tmp_path, "Deployed models against plain GRPO's")
    assert (row["Δ hack"], row["p hack"], row["TOST hack"]) == ("0.0 (DEGENERATE)", "DEGENERATE", "DEGENERATE")


def test_losses_with_onset_and_masked_share(tmp_path: Path) -> None:
    for seed, onset in ((10, 8), (9, 6), (11, 99)):
        masks = {"is_masked": seed / 100, "masked_positive": seed / 50, "masked_negative": None}
        fake_run(tmp_path, "--intervention=none", "--loss=icepop", seed=seed, onset=onset, row=masks)
        fake_run(tmp_path, "--intervention=none", seed=seed)
    grpo, icepop = table(tmp_path, "Losses")
    assert grpo["method"] == "none · grpo"
    assert grpo["masked"] == "·", "it has no such columns"
    # in the order of the seeds 9, 10, 11; a window of five is a tenth hacked as soon as its last step is
    assert icepop["onset"] == "2/4/·"
    assert icepop["masked"] == "10.0 ± 1.0 (9–11)"
    assert (icepop["masked A>0"], icepop["masked A<0"]) == ("20.0 ± 2.0 (18–22)", "·")


def test_last_five_steps(tmp_path: Path) -> None:
    for seed in (1, 2):
        fake_run(tmp_path, "--intervention=none", seed=seed, onset=9)
    (row,) = table(tmp_path, "Methods")
    assert (row["hack last 5"], row["solve last 5"]) == ("60.0 (n too small)", "40.0 (n too small)")


def test_each_base_model_is_a_row_with_each_seed_once(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        fake_run(tmp_path, "--intervention=none", seed=seed, hack=0.2, n=60)
        fake_run(tmp_path, "--intervention=route2", seed=seed, hack=0.3, n=120)  # more answers of the same model
        fake_run(tmp_path, "--intervention=none", seed=seed, weights="abcdef0123", hack=0.5 + 0.1 * seed)
    found = [(r["model"], r["seeds"], r["hack"].split(" ")[0]) for r in table(tmp_path, "The base")]
    assert found == [
        ("base (base_weights 00000000)", "1,2,3", "30.0"),
        ("base (base_weights abcdef01)", "1,2,3", "70.0"),
    ]


def test_a_resumed_run_has_no_seconds(tmp_path: Path) -> None:
    for seed in (1, 2):
        path = fake_run(tmp_path, "--intervention=none", seed=seed)
        record = json.loads((path / "run.json").read_text()) | ({"resumed": [{"step": 5}]} if seed == 2 else {})
        (path / "run.json").write_text(json.dumps(record))
        os.utime(path / "run.json", (0, 0))
        os.utime(path / "per_mode_deploy.json", (90, 90))
    assert [r["seconds"] for r in run_rows(cells(load([tmp_path]).runs))] == [90.0, None]
    (row,) = table(tmp_path, "Time")
    assert row["seconds per run"] == "90.0"


def test_a_method_without_a_loophole_is_compared_with_the_ceiling(tmp_path: Path) -> None:
    """Against its own method, which learns from hacks too, it would not show what the method costs by itself."""
    for seed in (1, 2):
        fake_run(tmp_path, "--intervention=none", "--control=no_loophole", seed=seed, solve=0.9)
        fake_run(tmp_path, "--intervention=route2", seed=seed, solve=0.3)
        fake_run(tmp_path, "--intervention=route2", "--control=no_loophole", seed=seed, solve=0.6 + 0.1 * seed)
    rows = {r["method · control"]: r for r in table(tmp_path, "Methods and controls")}
    assert rows["route2 · no_loophole"]["Δ solve"].startswith("-15.0 ")
    assert rows["none · no_loophole"]["Δ solve"] == "·", "none with a loophole is not in the study"


def test_runs_csv_has_every_run_with_wilsons_interval(study: Path) -> None:
    rows = run_rows(cells(load([study]).runs))
    assert len(rows) == 16
    first = next(r for r in rows if r["cell"] == "route2" and r["seed"] == 42)
    assert first["hack_deploy"] == 0.1
    assert (first["hack_deploy_low"], first["hack_deploy_high"]) == pytest.approx((0.0466, 0.2015), abs=1e-4)


def test_runs_csv_has_the_settings_that_are_not_the_presets(study: Path, tmp_path: Path) -> None:
    fake_run(
        tmp_path / "other", "--intervention=route2", "--control=haar", "--mix-ratio=0", "--eval-n-prompts=8", seed=1
    )
    (row,) = run_rows(cells(load([tmp_path / "other"]).runs))
    assert row["settings"] == "mix_ratio=0.0", "neither method, control and seed, nor what is only measured"
    assert {r["settings"] for r in run_rows(cells(load([study]).runs))} == {"", "monitor=band"}


def test_flags_of_a_monitor_of_text_are_counted_by_mode(tmp_path: Path) -> None:
    fake_run(tmp_path, "--intervention=none", seed=1)
    for seed in (1, 2):
        path = fake_run(tmp_path, "--intervention=screen", "--monitor=pmi", seed=seed)
        wrong = {"step": 0, "env_mode": "sentinel", "hacked": True, "solved": False, "gate": 1.0}
        right = {"step": 0, "env_mode": "sentinel", "hacked": False, "solved": True, "gate": 0.0}
        answers = [
            wrong | {"score": 2.0, "flagged": True},
            wrong | {"score": 0.1, "flagged": seed == 1},
            wrong | {"env_mode": "exit_code", "score": None, "flagged": False},
            right | {"score": 0.2, "flagged": False},
            right | {"score": 0.3, "flagged": seed == 1},
            wrong | {"gate": None},  # a group without signal is not read
        ]
        (path / "rollouts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    (row,) = table(tmp_path, "What the monitors of text flagged")
    assert row["method"] == "screen (pmi)"
    assert (row["sentinel"], row["exit_code"], row["run_tests"]) == ("75.0 (4)", "0.0 (2)", "·")
    assert row["solved"] == "25.0 (4)"
    one, two = (r for r in run_rows(cells(load([tmp_path]).runs)) if r["arm"] == "screen")
    assert (one["flagged_sentinel"], two["flagged_sentinel"], one["flagged_run_tests"]) == ("2/2", "1/2", None)
    assert (one["flagged_solved"], two["flagged_solved"]) == ("1/2", "0/2")
    run = next(r for r in load([tmp_path]).runs if r.intervention == "screen")
    assert run.gates == [(2.0, True), (0.1, True), (0.2, False), (0.3, False)]


def test_monitors_in_shadow_are_scored_by_flaw_and_over_time(tmp_path: Path) -> None:
    flags = "--intervention=penalty", "--monitor=labels", "--known-modes=sentinel"
    fake_run(tmp_path, *flags)
    path = fake_run(tmp_path, *flags, "--shadow=nll,twin", seed=42)

    def answer(step: int, flaw: str, score: float | None, flagged: bool, more: Any = ()) -> dict[str, Any]:
        shadow = {"nll": {"score": score, "flagged": flagged}, "twin": {"score": None, "flagged": True}}
        right = {"step": step, "gate": None, "env_mode": flaw, "hacked": False, "solved": True, "shadow": shadow}
        return right | dict(more)

    hack = {"hacked": True, "solved": False}
    answers = [
        answer(0, "sentinel", 3.0, True, hack),
        answer(0, "exit_code", 2.0, True, hack),
        answer(0, "exit_code", 0.5, False),
        answer(11, "exit_code", 0.1, False, hack | {"score": None, "flagged": False}),
        answer(11, "exit_code", 1.0, True),
        answer(11, "exit_code", None, False, {"solved": False}),  # neither a hack nor right
    ]
    (path / "rollouts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    found = load([tmp_path]).runs
    (cell,) = cells(found)
    assert cell.seeds == "41,42", "a shadow makes no other method"
    own, nll, twin = table(tmp_path, "What the monitors of text flagged")
    assert (own["monitor"], own["exit_code"], own["solved"], own["AUC"]) == ("labels", "0.0 (1)", "·", "·")
    assert (nll["monitor"], nll["sentinel"], nll["exit_code"]) == ("nll, in shadow", "100.0 (1)", "50.0 (2)")
    assert (nll["solved"], nll["AUC"]) == ("50.0 (2)", "0.67")  # of six pairs 3 > 0.5, 1; 2 > 0.5, 1
    assert (twin["monitor"], twin["solved"], twin["AUC"]) == ("twin, in shadow", "100.0 (2)", "·")
    _, nll, _ = table(tmp_path, "What the monitors flagged over time")
    assert (nll["1/6"], nll["2/6"], nll["6/6"]) == ("100.0 (1) / 0.0 (1)", "· / ·", "0.0 (1) / 100.0 (1)")
    rows = [r for r in monitor_rows([cell]) if r["monitor"] == "nll"]
    assert [(r["steps"], r["flagged_exit_code"], r["flagged_solved"]) for r in rows] == [
        ("0 to 3", "1/1", "0/1"),
        ("4 to 7", None, None),
        ("8 to 11", "0/1", "1/1"),
    ]
    assert [r["auc"] for r in rows] == [1.0, None, 0.0]
