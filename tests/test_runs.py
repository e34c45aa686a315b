"""Which run directories become which cells, and what is left out by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fake_runs import fake_run
from verdicts import plain_arms
from vgrout.report.runs import cells, load, paired, partner

NONE, HAAR = "--intervention=none", ("--intervention=route2", "--control=haar")


@pytest.mark.parametrize(
    ("runs", "titles"),
    [
        (
            [
                *((flags, {"seed": seed}) for seed in (10, 9) for flags in ((NONE,), HAAR, (*HAAR, "--monitor=band"))),
                ((NONE, "--lr=0.5"), {"seed": 41}),
                # how often it was looked at changes nothing that it learnt
                ((NONE, "--final-n-prompts=6", "--eval-ablate-every=0"), {"seed": 11}),
            ],
            {
                "none": "9,10,11",
                "none (lr 0.5)": "41",
                "route2 · haar": "9,10",
                "route2 (pair band) · haar": "9,10",
            },
        ),
        # another model at the same path
        (
            [((NONE,), {"seed": 1}), ((NONE,), {"seed": 2}), ((NONE,), {"seed": 3, "weights": "abcdef0123"})],
            {"none (base_weights 00000000)": "1,2", "none (base_weights abcdef01)": "3"},
        ),
        (
            [((NONE, "--steps=60"), {"preset": preset}) for preset in ("mini", "smoke")],
            {"none · mini": "41", "none · smoke": "41"},
        ),
        (
            [((NONE, *more), {}) for more in ((), ("--no-unbiased",), ("--loss=icepop",))],
            {"none · grpo": "41", "none · grpo biased": "41", "none · icepop": "41"},
        ),
        # pairs that true labels chose
        ([(HAAR[:1], {"pairs": "oracle:pairs.json"})], {"route2 (pairs chosen by the oracle)": "41"}),
    ],
)
def test_cells_differ_by_more_than_the_seed_and_their_titles_say_by_what(
    runs: list[tuple[tuple[str, ...], dict[str, Any]]], titles: dict[str, str], tmp_path: Path
) -> None:
    for flags, its in runs:
        fake_run(tmp_path, *flags, **its)
    assert [(c.title, c.seeds) for c in cells(load([tmp_path]).runs)] == [*titles.items()]


@pytest.mark.parametrize("name", ["pairs", "placebo", "known_correct", "direction_file", "teacher_weights"])
def test_an_edited_file_of_the_method_makes_another_cell_with_the_same_partner(name: str, tmp_path: Path) -> None:
    for seed in (1, 2):
        fake_run(tmp_path, "--intervention=none", seed=seed)
        fake_run(tmp_path, "--intervention=route2", seed=seed)  # older runs have noted down no such hash
        fake_run(tmp_path, "--intervention=route2", seed=2 + seed, hashes={name: f"{seed}abcdef01"})
    plain, *others = found = cells(load([tmp_path]).runs)
    assert {(c.title, c.seeds) for c in others} == {
        (f"route2 ({name} not noted)", "1,2"),
        (f"route2 ({name} 1abcdef0)", "3"),
        (f"route2 ({name} 2abcdef0)", "4"),
    }
    assert all(partner(c, found, "none") is plain for c in others)


def test_a_run_from_before_a_setting_existed_has_its_default(tmp_path: Path) -> None:
    old, new = (fake_run(tmp_path, "--intervention=none", seed=s) for s in (1, 2))
    record = json.loads((old / "run.json").read_text())
    del record["config"]["loss"]["beta"]
    (old / "run.json").write_text(json.dumps(record))
    assert [c.seeds for c in cells(load([old, new]).runs)] == ["1,2"]


def test_unfinished_and_superseded_runs_are_named(tmp_path: Path) -> None:
    fake_run(tmp_path, "--intervention=none")
    newer = fake_run(tmp_path, "--intervention=none")
    halted = fake_run(tmp_path, "--intervention=none", seed=2, state="halted")
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "run.json").write_text("{}")
    (tmp_path / "loading").mkdir()
    (tmp_path / "loading" / "status.json").write_text('{"state": "failed"}')
    distilled = fake_run(tmp_path, "--intervention=none", seed=3)
    (distilled / "per_mode_deploy.json").unlink()
    loaded = load([tmp_path, tmp_path])
    assert [r.path for r in loaded.runs] == [newer, halted], "a halted run has a final evaluation, and counts"
    assert loaded.left_out == [
        "000_mini_none_seed41 (older than 001_mini_none_seed41, the same settings and seed)",
        "004_mini_none_seed3 (no per_mode_deploy.json: not a run of vgrout.train)",
        "dead (unknown)",
        "loading (failed)",
    ]
    assert load([tmp_path / "loading"]).left_out == ["loading (failed)"]


def test_a_sweep_is_read_by_its_index(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "out" / "runs", "--intervention=none")
    sweep = tmp_path / "out" / "sweeps" / "arms"
    sweep.mkdir(parents=True)
    entry = {"arm": "none", "seed": 41, "flags": []}
    index = [
        {"name": "a", "run": str(run.relative_to(tmp_path)), "state": "finished", **entry},
        {"name": "b", "run": None, "state": "to do", **entry},
        {"name": "c", "run": "out/runs/gone", "state": "finished", **entry},
    ]
    (sweep / "runs.json").write_text(json.dumps(index))
    loaded = load([sweep])
    assert [r.path for r in loaded.runs] == [run]
    assert loaded.left_out == ["b (to do)", "c (finished: out/runs/gone is not there)"]
    (sweep / "runs.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"runs\.json: damaged"):
        load([sweep])


def test_damage_is_named_with_its_line(tmp_path: Path) -> None:
    path = fake_run(tmp_path, "--intervention=none")
    with open(path / "steps.jsonl", "a") as f:
        f.write('{"step": 12, "ha')
    (why,) = load([tmp_path]).left_out
    assert re.search(r"steps\.jsonl, line 13: damaged", why)


def test_a_run_of_another_version_is_refused(tmp_path: Path) -> None:
    """It is neither read under other names nor counted without what it lacks."""
    path = fake_run(tmp_path, "--intervention=none")
    record = (path / "run.json").read_text()
    (path / "run.json").write_text(record.replace('"lr":', '"learning_rate":'))
    assert "run.json: unknown settings learning_rate; another version made this run" in load([tmp_path]).left_out[0]
    (path / "run.json").write_text(record)
    (path / "final.jsonl").unlink()
    assert "no final.jsonl; another version made this run" in load([tmp_path]).left_out[0]
    (path / "per_mode_deploy.json").write_text("{}")
    assert "per_mode_deploy.json: no arm, control, seed" in load([tmp_path]).left_out[0]


def test_partners_share_all_but_the_method(tmp_path: Path) -> None:
    for seed in (1, 2):
        fake_run(tmp_path, "--intervention=none", seed=seed)
        fake_run(tmp_path, "--intervention=route2", seed=seed)
        fake_run(tmp_path, "--intervention=route2", "--control=haar", seed=seed)
        fake_run(tmp_path, "--intervention=route2", "--control=haar", "--lr=0.5", seed=seed)
    fake_run(tmp_path, "--intervention=route2", "--monitor=band", seed=1)
    found = cells(load([tmp_path]).runs)
    by = {c.title: c for c in found}
    own = by["route2"]
    assert partner(own, found, "none") is by["none"]
    haar = partner(own, found, "route2", "haar")
    assert haar is not None
    assert haar.first.settings["opt"]["lr"] == own.first.settings["opt"]["lr"]
    assert partner(by["route2 (pair band)"], found, "route2", "haar") is None
    assert [(a.seed, b.seed) for a, b in paired(by["route2 (pair band)"], own)] == [(1, 1)]


def test_a_haar_control_serves_every_refresh_interval(tmp_path: Path) -> None:
    for flag in ((), ("--vhack-refresh-every=5",)):
        fake_run(tmp_path, "--intervention=route2", *flag)
        fake_run(tmp_path, "--intervention=route2", "--control=shuffled", *flag)
    fake_run(tmp_path, "--intervention=route2", "--control=haar")
    found = cells(load([tmp_path]).runs)
    every = {c: c.first.settings["method"]["vhack_refresh_every"] for c in found}
    for control in ("none", "shuffled"):
        own = [c for c in found if c.first.control == control]
        assert len(own) == 2
        for c in own:
            other = partner(c, found, "route2", "shuffled" if control == "none" else "none")
            assert other is not None
            assert every[other] == every[c]
            haar = partner(c, found, "route2", "haar")
            assert haar is not None
            assert haar.first.control == "haar"


def test_plain_grpo_with_a_kl_term_is_a_baseline(tmp_path: Path) -> None:
    for seed in (1, 2):
        fake_run(tmp_path, "--intervention=none", seed=seed)
        fake_run(tmp_path, "--intervention=none", "--beta=0.1", seed=seed)
        fake_run(tmp_path, "--intervention=route2", seed=seed)
        fake_run(tmp_path, "--intervention=erase", "--beta=0.3", seed=seed)
    found = cells(load([tmp_path]).runs)
    plain, kl, erase, route2 = found
    assert [c.title for c in found] == ["none", "none (beta 0.1)", "erase", "route2"]
    assert [partner(c, found, "none") for c in found] == [plain, plain, None, plain]
    assert plain_arms(found, "none") == [plain]
    assert (kl.first.learns, erase.first.beta, route2.first.beta) == (plain.first.learns, 0.3, 0.0)


def test_final_answers_are_read_problem_by_problem(tmp_path: Path) -> None:
    (run,) = load([fake_run(tmp_path, "--intervention=none", hack=0.4, solve=0.2, n=30)]).runs
    shares = run.shares("deploy", "hack", {"exit_code"})
    assert list(shares) == ["exit_code"]
    assert sorted(shares["exit_code"].values()) == [0, 0, 0, 1, 1]
    assert run.shares("train", "hack") == run.shares("deploy", "hack"), "without a quarantine they are one model"
    assert sum(sum(of.values()) for of in run.shares("deploy", "solve").values()) == 6
