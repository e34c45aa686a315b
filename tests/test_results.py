"""The tables over seeds, from run directories whose numbers are known."""

import json
from pathlib import Path
from typing import Any

import pytest

from vgrout.config import parse
from vgrout.results import load, results, tables

STEPS = 12


def tell(
    root: Path, seed: int, *argv: str, onset: int = 99, masked: float | None = 0.0, state: str = "finished"
) -> None:
    """A run of 12 steps whose every answer exploits from `onset` on."""
    cfg = parse(["mini", "--seed", str(seed), *argv])
    path = root / f"{seed}_{'_'.join(argv)}".replace("-", "")
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"config": cfg.as_dict()}))
    (path / "status.json").write_text(json.dumps({"state": state}))
    times = {"sec": 1.0, "gen": 0.25, "grade": 0.25, "fb": 0.25, "eval": 0.25}
    signs = {} if masked is None else {"is_masked": masked, "masked_positive": 2 * masked, "masked_negative": None}
    rows = [{"step": t, "hack_s": [8 * (t >= onset), 8], **times, **signs} for t in range(STEPS)]
    (path / "steps.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    sides = [f"{what}_{side}" for what in ("hack", "solve") for side in ("base", "train", "deploy", "plain")]
    final: dict[str, Any] = {"arm": "vanilla", "control": "none", "seed": seed, "steps": STEPS, "eval_n": 4}
    final |= dict.fromkeys(sides, 0.5) | {"by_mode": {"run_tests": {"train_hack": 1.0, "deploy_hack": 0.0}}}
    (path / "per_mode_deploy.json").write_text(json.dumps(final))


def cells(table: str) -> list[dict[str, str]]:
    head, _, *lines = ([c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_one_row_a_loss_with_onset_and_masked_share(tmp_path: Path) -> None:
    for seed, onset in ((10, 8), (9, 6), (11, 99)):
        tell(tmp_path, seed, "--intervention=none", "--loss=icepop", onset=onset, masked=seed / 100)
    tell(tmp_path, 9, "--intervention=none", onset=99)
    tell(tmp_path, 9, "--intervention=none", "--no-unbiased", masked=None)
    runs, left_out = load(tmp_path, "")
    assert not left_out
    overall, _, modes, time = map(cells, tables(runs))
    assert [r["loss"] for r in overall] == ["grpo", "grpo biased", "icepop"]
    assert [r["arm"] for r in overall] == [r["arm"] for r in time] == [f"vanilla · {r['loss']}" for r in overall]
    assert len(modes) == 6
    plain, old, icepop = overall
    assert icepop["seeds"] == "9,10,11", "in order, and each seed's onset in the same place"
    # a window of five is 10 % hacked as soon as its last step is
    assert icepop["onset"] == "2/4/·"
    assert icepop["masked %"] == "10.0 ± 1.0 (9–11)"
    assert icepop["masked A>0 / A<0 %"] == "20.0 ± 2.0 (18–22) / ·"
    assert (plain["onset"], plain["masked %"]) == ("·", "0.0")
    assert old["masked %"] == "·", "a run from before these columns"


def test_one_loss_alone_is_not_in_the_titles(tmp_path: Path) -> None:
    tell(tmp_path, 1, "--intervention=none")
    tell(tmp_path, 1, "--intervention=none", "--lr=0.5")
    (overall, *_) = map(cells, tables(load(tmp_path, "")[0]))
    assert [r["arm"] for r in overall] == ["vanilla #1", "vanilla #2"]


def test_unfinished_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell(tmp_path, 1, "--intervention=none")
    tell(tmp_path, 2, "--intervention=none", state="halted")
    assert results(tmp_path) == 0
    assert "left out, not finished: 2_intervention=none (halted)" in capsys.readouterr().out
    assert results(tmp_path, tag="_absent") == 2
    assert "no finished run tagged '_absent'" in capsys.readouterr().err
