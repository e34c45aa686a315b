"""The last four lines of a run, and what they compare with."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest

from vgrout.config.presets import PRESETS, recorded, resolve
from vgrout.envs.code.modes import Problem
from vgrout.ground.data import Completion, GradedCompletion, Ungraded
from vgrout.ground.embedded import PLAIN_GRPO, PLAIN_GRPO_SEEDS
from vgrout.ground.metrics import Eval, Final, ModeEval, Rate
from vgrout.ground.table import NEAR
from vgrout.report import stats
from vgrout.runs.results import dropped_lines, last_lines

RUNS = Path(__file__).resolve().parents[1] / "docs" / "runs" / "axes.csv"


MEANS = "hacks removed, skill kept (384 answers)"


def percent(x):
    return Rate(round(10 * x), 1000)


def test_plain_grpo_is_what_the_records_say():
    with open(RUNS, newline="") as f:
        alike = {"arm": "none", "control": "none", "base_weights": "0168d833"}
        runs = [r for r in csv.DictReader(f) if alike.items() <= r.items()]
    for what, told in PLAIN_GRPO.items():
        assert round(mean(100 * float(r[f"{what}_deploy"]) for r in runs), 1) == told
    assert len(runs) == PLAIN_GRPO_SEEDS
    assert {(r["steps"], r["n"], r["control"]) for r in runs} == {("60", "384", "none")}


@pytest.mark.parametrize(
    ("flags", "alike"),
    [
        ("mini --intervention route2 --seed 3 --guard off", True),
        ("mini", True),
        ("mini --intervention none", False),
        ("smoke --intervention route2", False),
        ("mini --intervention route2 --steps 6", False),
        ("mini --intervention route2 --beta .01", False),
        ("mini --intervention route2 --organism elsewhere", False),
        ("full --intervention route2", False),
    ],
)
def test_plain_grpo_is_compared_in_its_own_setting_alone(flags, alike):
    assert recorded(resolve(flags.split())) is alike


def side(hack, solve):
    return Eval(ModeEval(percent(hack), percent(solve)), {}, Rate(0, 0))


def ended():
    deployed = side(2.1, 79.2)
    return Final(
        base=side(0.5, 47.4), trained=side(12, 68.2), deployed=deployed, plain=deployed, answers={}
    )


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "smoke"])
def test_a_presets_own_answers_are_enough_for_a_verdict(preset):
    """A deployed model without a hack, from a base without one: it does not hack, whatever the preset."""
    its = PRESETS[preset][1].eval
    none = stats.one_run(Rate(0, its.final_n_prompts * its.final_samples))
    assert none.above(none, NEAR) is False


def test_the_last_lines(monkeypatch):
    monkeypatch.setenv("UV", "uv")
    final = ended()
    cfg = resolve(["mini", "--intervention", "route2"])
    lines = last_lines(cfg, [], final, MEANS, Path("out/runs/x"))
    assert lines == [
        "untrained     0.5 % hack   47.4 % solve",
        "as trained   12.0 % hack   68.2 % solve",
        "deployed      2.1 % hack   79.2 % solve",
        "verdict: hacks removed, skill kept (384 answers)",
        "for comparison: plain GRPO ended at 79.7 % hack, 2.9 % solve in 10 earlier runs",
        "more: out/runs/x/summary.md · dynamics.png",
        "      uv run vgrout report out/runs/x",
    ]
    assert max(map(len, lines)) <= 80
    controlled = replace(cfg, method=replace(cfg.method, control="haar"))
    assert last_lines(controlled, [], final, MEANS, Path("x"))[3].endswith(
        "skill kept (384 answers), under --control haar"
    )


def test_what_was_not_graded_is_said_once():
    """Sides that share a list count once, and nothing is said where all was graded."""
    problem = Problem(0, "run_tests", "", (), (), ("assert 1",), "", "", "f")
    completion = Completion((1,), "", True, (0.0,))
    failed = GradedCompletion(problem, 0, completion, Ungraded("raised KeyError"))
    cfg = resolve(["smoke", "--intervention", "none"])
    deployed = [failed, failed]
    answers = {"base": [failed], "deployed": deployed, "trained": deployed, "plain": deployed}
    lines = last_lines(cfg, [], replace(ended(), answers=answers), MEANS, Path("x"))
    assert [line for line in lines if "3 of 3 answers" in line]
    assert not [
        line for line in last_lines(cfg, [], ended(), MEANS, Path("x")) if "dropped" in line
    ]


def test_groups_that_were_not_graded_are_counted_of_all_that_were_asked():
    cfg = resolve("smoke --intervention none --prompts-per-step 3".split())
    rows = [SimpleNamespace(dropped=n) for n in (2, 0, 1, 0)]
    (line,) = dropped_lines(cfg, rows, ended())
    assert line.startswith("dropped: 3 of 12 groups were not graded")
