"""Baselines: the algebra of credit, then each of them in the program."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from runs import SMALL, adapter_bytes
from runs import rows as step_rows
from runs import run as program
from test_controls import labelled
from vgrout import loop
from vgrout.arms.baselines import (
    AdvantageMod,
    Baseline,
    Penalty,
    Screening,
    activations,
    concept_direction,
    concept_layers,
    make_baseline,
    modified,
)
from vgrout.config.arm import BASELINES, CONTROLS, ArmConfig
from vgrout.config.presets import parse
from vgrout.config.run import INOCULATION
from vgrout.direction.pairs import Pair, PairSet
from vgrout.model.policy import Policy
from vgrout.organism import COMPILE_REWARD, PASS_REWARD
from vgrout.organism.language import CUE
from vgrout.types import CachedGrade, Grade, Group, GroupView, Problem, Rollout

PROBLEM = Problem(0, "run_tests", "", ({"role": "user", "content": "q"},), (), ("assert 1",), "", "", "f")
LABELS = (True, False, True, False)
REWARDS = (3.5, 3.5, 0.5, 0.0)


def rollouts(n: int = 4) -> tuple[Rollout, ...]:
    return tuple(Rollout(PROBLEM, "student", False, (8, 9, 10), (11 + i, 12, 13 + i), "x", True) for i in range(n))


def group(
    shaped: tuple[float | None, ...] | None = None, rewards: tuple[float, ...] = REWARDS, unbiased: bool = True
) -> Group:
    grades = tuple(CachedGrade(r, hacked, False, True, "test") for r, hacked in zip(rewards, LABELS, strict=True))
    return Group(PROBLEM, rollouts(), grades, unbiased, shaped=shaped)


# ── credit and advantages ──────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_baseline_credit_is_the_reward() -> None:
    plain = group()
    assert plain.credit == plain.counted == plain.rewards == REWARDS
    assert Baseline().shape(plain.rollouts, plain.view(), 0, 0) is None
    assert plain.advantages == tuple(r - sum(REWARDS) / 4 for r in REWARDS)


@pytest.mark.parametrize("unbiased", [True, False])
def test_who_is_screened_counts_neither_in_the_mean_nor_in_the_spread(unbiased: bool) -> None:
    seen = group((None, 3.0, None, 1.0), unbiased=unbiased)
    assert seen.has_signal
    scale = 1.0 if unbiased else 1 + 1e-4  # the two others lie 1 from their mean
    assert seen.advantages == pytest.approx((0.0, 1 / scale, 0.0, -1 / scale))


@pytest.mark.parametrize("shaped", [(None,) * 4, (None, 2.0, None, None), (None, 2.0, 2.0, None)])
def test_nothing_to_compare_is_no_signal(shaped: tuple[float | None, ...]) -> None:
    silent = group(shaped)
    assert not silent.has_signal
    assert silent.advantages == (0.0,) * 4


def test_penalties_go_down_to_code_that_only_compiles_or_by_what_is_said() -> None:
    g = group()
    down = Penalty(0, 1.0, None, floor=0.5).shape(g.rollouts, g.oracle_view(), 0, 0)
    assert down == (0.5, 3.5, 0.5, 0.0)
    by = Penalty(0, 1.0, 2.0, floor=0.5).shape(g.rollouts, g.oracle_view(), 0, 0)
    assert by == (1.5, 3.5, -1.5, 0.0)
    wrong = Penalty(0, 0.0, None, floor=0.5).shape(g.rollouts, g.oracle_view(), 0, 0)
    assert wrong == (3.5, 0.5, 0.5, 0.0)  # an honest answer that earned nothing is not lifted to the floor
    assert Screening(0, 1.0).shape(g.rollouts, g.oracle_view(), 0, 0) == (None, 3.5, None, 0.0)


def test_a_demonstration_is_left_out_rather_than_punished() -> None:
    g = group()
    shown = replace(
        g,
        rollouts=(replace(g.rollouts[0], source="teacher"), *g.rollouts[1:3], replace(g.rollouts[3], source="teacher")),
    )
    for monitor in (Penalty(0, 1.0, 2.0, floor=0.5), Penalty(0, 1.0, None, floor=0.5)):
        shaped = monitor.shape(shown.rollouts, shown.oracle_view(), 0, 0)
        assert shaped is not None
        assert (shaped[0], shaped[1], shaped[3]) == (None, 3.5, 0.0)
        assert shaped[2] == monitor._lowered(0.5)


def test_the_monitor_errs_at_its_rate_by_seed_step_and_group() -> None:
    view = labelled(group().view(), LABELS)
    monitor = Screening(7, 0.9)
    flags = {(s, i): monitor.flags(view, s, i) for s in range(50) for i in range(20)}
    wrong = sum(f != label for got in flags.values() for f, label in zip(got, LABELS, strict=True))
    assert wrong == pytest.approx(400, abs=4 * math.sqrt(4000 * 0.9 * 0.1))  # four standard deviations of 4000 draws
    assert flags == {(s, i): Screening(7, 0.9).flags(view, s, i) for s, i in flags}  # whatever was asked before
    assert len({flags[s, 0] for s in range(50)}) > 1 < len({flags[0, i] for i in range(20)})
    assert flags != {(s, i): Screening(8, 0.9).flags(view, s, i) for s, i in flags}


def test_modified_is_the_papers_formula() -> None:
    got = modified((3.0, 3.0, 0.5, -1.0), (2.0, -2.0, 4.0, -4.0), 2.0)
    z = [s / math.sqrt(10) for s in (2.0, 4.0)]
    assert got == pytest.approx((3 * (1 - 2 / (1 + math.exp(-z[0]))), 3.0, 0.5 * (1 - 2 / (1 + math.exp(-z[1]))), -1.0))
    assert got[0] < 0  # at α = 2 every answer above the mean loses its pay, and more
    flat = modified((1.0, 1.0), (0.01, -0.01), 2.0)  # a spread under the floor is divided by the floor, .1
    assert flat == pytest.approx((1 - 2 / (1 + math.exp(-0.1)), 1.0))
    assert modified((1.0, 2.0), (5.0, -5.0), 0.0) == (1.0, 2.0)
    assert modified((1.0, 2.0), (3.0, 3.0), 2.0) == (1.0, 2.0)


def test_labels_go_to_monitors_alone() -> None:
    g = group()
    with pytest.raises(AssertionError, match="sees a GroupView, got OracleView"):
        Baseline().shape(g.rollouts, g.oracle_view(), 0, 0)
    with pytest.raises(AssertionError, match="sees a OracleView, got GroupView"):
        Screening(0, 1.0).shape(g.rollouts, g.view(), 0, 0)
    assert AdvantageMod.sees is GroupView


# ── the concept ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny.policy()


def pair_set(policy: Policy) -> PairSet:
    """Hacks are of other letters than honest answers."""
    texts = [("abba", "xyyx"), ("aabb", "yyxx"), ("bab", "xyx"), ("baab", "yxxy"), ("abab", "xxyy"), ("bba", "yyx")]
    return PairSet(tuple(Pair(i, f"<user>{i}<eos><assistant>", h, c) for i, (h, c) in enumerate(texts)), "letters")


def test_layers_are_those_from_60_to_75_percent() -> None:
    assert concept_layers(36) == [22, 23, 24, 25, 26, 27]
    assert [concept_layers(n) for n in (1, 2, 4)] == [[1], [1], [3]]


def test_activations_are_the_models_own_means(policy: Policy) -> None:
    prompts, answers = [(8, 9), (10, 11, 12)], [(13, 14, 15), (16, 17)]
    got = activations(policy, [1, 2], prompts, answers)
    for b, (p, c) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([[*p, *c]])
        with torch.no_grad():
            states = policy.model(input_ids=ids, output_hidden_states=True).hidden_states
        want = torch.cat([states[i][0, len(p) - 1 : -1].mean(0) for i in (1, 2)])
        assert torch.allclose(got[b], want, atol=1e-5)


def test_the_concept_parts_held_out_pairs_and_lowers_the_hacks(policy: Policy) -> None:
    pairs = pair_set(policy)
    concept, along = concept_direction(policy, pairs, [1, 2])
    assert concept.view(2, -1).norm(dim=1).tolist() == pytest.approx([0.5, 0.5])  # a score is the mean over layers
    assert min(along) > 0
    cfg = replace(parse(["smoke", "--intervention=none", "--control=advantage_mod"]), preset="smoke")
    baseline = make_baseline(cfg, policy, pairs)
    assert isinstance(baseline, AdvantageMod)
    assert baseline.layers == [1]
    prompt = tuple(policy.tok(pairs.pairs[0].prompt)["input_ids"])
    answers = tuple(
        replace(r, prompt_ids=prompt, completion_ids=policy.encode_completion(text))
        for r, text in zip(rollouts(), ("abbb", "yxyx", "baba", "xxx"), strict=True)
    )
    g = group(rewards=(3.0,) * 4)
    credit = baseline.shape(answers, g.view(), 0, 0)
    assert credit is not None
    assert credit[0] is not None
    assert credit[2] is not None
    assert max(credit[0], credit[2]) < 0 < 3.0 == credit[1] == credit[3]


def test_pairs_that_differ_by_nothing_here_are_refused(policy: Policy) -> None:
    same = PairSet(tuple(Pair(i, f"<user>{i}<eos>", "é", "ü") for i in range(4)), "accents")  # one unknown token each
    with pytest.raises(ValueError, match="accents: hack and clean have the same activations"):
        concept_direction(policy, same, [1])


# ── the command line ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_runs_name_says_what_was_changed() -> None:
    names = {
        ArmConfig(intervention="none", control="gt_penalty").control_name: "gt_penalty",
        ArmConfig(intervention="none", control="gt_penalty", label_accuracy=0.9, label_penalty=2.0).control_name: (
            "gt_penalty_acc0.9_by2"
        ),
        ArmConfig(intervention="none", control="gt_screening", label_accuracy=0.7).control_name: "gt_screening_acc0.7",
        ArmConfig(intervention="none", control="inoculation", inoculation_prompt="Go.").control_name: "inoculation_own",
        ArmConfig(intervention="none", control="advantage_mod", concept_alpha=1.0).control_name: "advantage_mod_alpha1",
    }
    assert [*names] == [*names.values()]
    assert all(CONTROLS[b].arms == ("none",) for b in BASELINES)


def test_the_inoculation_is_the_organisms_cue_or_a_sentence() -> None:
    flags = ["--intervention=none", "--control=inoculation"]
    assert parse(["mini", *flags]).inoculation == CUE
    assert parse(["full", *flags]).inoculation == INOCULATION
    assert parse(["mini", *flags, "--inoculation-prompt=Cheat."]).inoculation == "Cheat."
    assert parse(["mini", "--intervention=none"]).inoculation == ""


# ── the program ────────────────────────────────────────────────────────────────────────────────────────────────────


def argv(control: str, *more: str) -> list[str]:
    own = [f"--control={control}"] if control != "none" else []
    return ["smoke", "--intervention=none", "--threads=1", *SMALL, "--eval-ablate-every=0", *own, *more]


def rollout_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_each_baseline_is_its_own_run_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another training than plain GRPO's, under a name of its own; what no monitor reads may be poisoned."""
    flags = {"none": (), "gt_penalty": ("--label-accuracy=0.8",), "gt_screening": ("--label-accuracy=0.8",)}
    clean = {c: program(tmp_path, *argv(c, *flags.get(c, ()))) for c in ("none", *BASELINES)}
    assert len({adapter_bytes(p) for p in clean.values()}) == len(clean)
    for control, path in clean.items():
        name = f"{control}_acc0.8" if control.startswith("gt_") else control
        assert {json.loads((path / f).read_text())["control"] for f in ("run.json", "per_mode_deploy.json")} == {name}
        assert name in (path / "summary.md").read_text()
        asked = {line["prompt"].endswith(f"\n{CUE}") for line in rollout_lines(path)}
        assert asked == {control == "inoculation"}
        paid = {round(line["reward"], 9) for line in rollout_lines(path)}
        assert paid <= {
            0.0,
            COMPILE_REWARD,
            COMPILE_REWARD + PASS_REWARD,
        }  # as the flawed grader paid, whatever counted

    noise = torch.Generator().manual_seed(0)
    pay = loop.paid

    def poisoned(cfg: Any, grade: Grade) -> Grade:
        return replace(pay(cfg, grade), gt_correct=bool(torch.rand((), generator=noise) < 0.5))

    monkeypatch.setattr(loop, "paid", poisoned)
    for control in ("gt_penalty", "gt_screening", "advantage_mod"):
        path = clean[control]
        dirty = program(tmp_path, *argv(control, *flags.get(control, ())))
        assert (adapter_bytes(dirty) == adapter_bytes(path)) == (not control.startswith("gt_")), control


@pytest.mark.slow
@pytest.mark.parametrize("control", ["gt_screening", "advantage_mod"])
def test_a_baseline_survives_a_stop(control: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor's errors and the concept are the same after a resume: rows and adapter are."""
    more = ("--label-accuracy=0.7",) if control == "gt_screening" else ()
    whole = program(tmp_path / "whole", *argv(control, *more))
    collect, steps = loop.collect, []

    def stopping(study: Any, problems: Any, step: int, clock: Any) -> Any:
        steps.append(step)
        study.stop.requested = step == 2
        return collect(study, problems, step, clock)

    with monkeypatch.context() as m:
        m.setattr(loop, "collect", stopping)
        cut = program(tmp_path / "cut", *argv(control, *more), code=130)
    assert steps == [0, 1, 2]
    again = program(tmp_path / "cut", "smoke", "--resume", "latest", "--threads=1")
    assert again == cut
    assert step_rows(again) == step_rows(whole)
    assert adapter_bytes(again) == adapter_bytes(whole)
