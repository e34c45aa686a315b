"""Baselines: the algebra of shaped rewards, then each of them in the program."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vgrout.arms import make_arm
from vgrout.arms.advantage_mod import AdvantageMod, modified
from vgrout.arms.base import Arm
from vgrout.arms.reward_shaping import Penalty, Screen
from vgrout.monitors.activations import activations, concept_direction, concept_layers
from vgrout.monitors.labels import Labels, noisy_labels

import tiny
from runs import SMALL, adapter_bytes
from runs import rows as step_rows
from runs import run as program
from vgrout import rollout as sampling
from vgrout.config.method import BASELINES, CONTROLS, MethodConfig
from vgrout.config.presets import parse
from vgrout.config.run import INOCULATION
from vgrout.data.language import CUE
from vgrout.direction.pairs import Pair, PairSet
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.modes import PLAIN_PHRASE
from vgrout.organism import COMPILE_REWARD, PASS_REWARD
from vgrout.types import Batch, CachedGrade, Grade, Group, GroupView, OracleView, Problem, Rollout

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


def shaped(arm: Arm, of: Group, step: int = 0) -> tuple[float | None, ...] | None:
    """What the arm makes of one group's rewards."""
    (made,) = arm.shape_rewards(Batch((of,), (), (), max(REWARDS), 4, step)).groups
    assert replace(made, shaped=of.shaped, flags=of.flags) == of, "grades and rollouts stay as they are"
    return made.shaped


def penalty(accuracy: float = 1.0, by: float | None = None) -> Penalty:
    return Penalty({}, Labels(0, accuracy), by=by, floor=0.5)


def screening(accuracy: float = 1.0, seed: int = 0) -> Screen:
    return Screen({}, Labels(seed, accuracy))


# ── shaped rewards and advantages ────────────────────────────────────────────────────────────────────────────────────


def test_without_a_baseline_what_counts_is_the_reward() -> None:
    plain = group()
    assert plain.shaped_rewards == plain.counted == plain.rewards == REWARDS
    assert shaped(Arm({}), plain) is None
    assert plain.advantages == tuple(r - sum(REWARDS) / 4 for r in REWARDS)


@pytest.mark.parametrize("unbiased", [True, False])
def test_who_is_screened_counts_neither_in_the_mean_nor_in_the_spread(unbiased: bool) -> None:
    seen = group((None, 3.0, None, 1.0), unbiased=unbiased)
    assert seen.has_signal
    scale = 1.0 if unbiased else 2**0.5 + 1e-4  # the two others lie 1 from their mean
    assert seen.advantages == pytest.approx((0.0, 1 / scale, 0.0, -1 / scale))


@pytest.mark.parametrize("shaped", [(None,) * 4, (None, 2.0, None, None), (None, 2.0, 2.0, None)])
def test_nothing_to_compare_is_no_signal(shaped: tuple[float | None, ...]) -> None:
    silent = group(shaped)
    assert not silent.has_signal
    assert silent.advantages == (0.0,) * 4


def test_penalties_go_down_to_code_that_only_compiles_or_by_what_is_said() -> None:
    g = group()
    assert shaped(penalty(), g) == (0.5, 3.5, 0.5, 0.0)
    assert shaped(penalty(by=2.0), g) == (1.5, 3.5, -1.5, 0.0)
    # an honest answer that earned nothing is not lifted to the floor
    assert shaped(penalty(accuracy=0.0), g) == (3.5, 0.5, 0.5, 0.0)
    assert shaped(screening(), g) == (None, 3.5, None, 0.0)


def test_a_demonstration_is_left_out_rather_than_punished() -> None:
    g = group()
    shown = replace(
        g,
        rollouts=(replace(g.rollouts[0], source="teacher"), *g.rollouts[1:3], replace(g.rollouts[3], source="teacher")),
    )
    for monitor in (penalty(by=2.0), penalty()):
        rewards = shaped(monitor, shown)
        assert rewards is not None
        assert (rewards[0], rewards[1], rewards[3]) == (None, 3.5, 0.0)
        assert rewards[2] == monitor._paid(0.5)


def test_the_monitor_errs_at_its_rate_by_seed_step_and_group() -> None:
    at = [(s, i) for s in range(50) for i in range(20)]
    flags = {(s, i): noisy_labels(LABELS, 0.9, 7, s, i) for s, i in at}
    wrong = sum(f != label for got in flags.values() for f, label in zip(got, LABELS, strict=True))
    assert wrong == pytest.approx(400, abs=4 * math.sqrt(4000 * 0.9 * 0.1))  # four standard deviations of 4000 draws
    assert len({flags[s, 0] for s in range(50)}) > 1 < len({flags[0, i] for i in range(20)})
    assert flags != {(s, i): noisy_labels(LABELS, 0.9, 8, s, i) for s, i in at}
    monitor = screening(0.9, seed=7)
    for s, i in [*at[::-7], *at[::5]]:  # whatever was asked before
        left_out = shaped(monitor, replace(group(), index=i), s)
        assert left_out is not None
        assert tuple(r is None for r in left_out) == flags[s, i]


def test_modified_is_the_papers_formula() -> None:
    got = modified((3.0, 3.0, 0.5, -1.0), (2.0, -2.0, 4.0, -4.0), 2.0)
    z = [s / math.sqrt(10) for s in (2.0, 4.0)]
    assert got == pytest.approx((3 * (1 - 2 / (1 + math.exp(-z[0]))), 3.0, 0.5 * (1 - 2 / (1 + math.exp(-z[1]))), -1.0))
    assert got[0] < 0  # at α = 2 every answer above the mean loses its pay, and more
    flat = modified((1.0, 1.0), (0.01, -0.01), 2.0)  # a spread under the floor is divided by the floor, .1
    assert flat == pytest.approx((1 - 2 / (1 + math.exp(-0.1)), 1.0))
    assert modified((1.0, 2.0), (5.0, -5.0), 0.0) == (1.0, 2.0)
    assert modified((1.0, 2.0), (3.0, 3.0), 2.0) == (1.0, 2.0)


def test_labels_go_to_monitors_alone(policy: Policy) -> None:
    g = group()
    by_activations = AdvantageMod({}, policy=policy, concept=torch.zeros(1), layers=[1], alpha=2.0)
    assert type(screening().view(g)) is OracleView
    for arm in (Arm({}), by_activations):
        assert type(arm.view(g)) is GroupView
        with pytest.raises(AssertionError, match="sees a GroupView, got OracleView"):
            arm.plan([g.oracle_view()])
    with pytest.raises(AssertionError, match="sees a GroupView, got OracleView"):
        by_activations._shaped(g, g.oracle_view())
    with pytest.raises(AssertionError, match="sees a OracleView, got GroupView"):
        screening().plan([g.view()])


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
    baseline = make_arm(cfg, policy, Inputs([], [], None, pairs), None, ())
    assert isinstance(baseline, AdvantageMod)
    assert baseline.layers == [1]
    prompt = tuple(policy.tok(pairs.pairs[0].prompt)["input_ids"])
    answers = tuple(
        replace(r, prompt_ids=prompt, completion_ids=policy.encode_completion(text))
        for r, text in zip(rollouts(), ("abbb", "yxyx", "baba", "xxx"), strict=True)
    )
    rewards = shaped(baseline, replace(group(rewards=(3.0,) * 4), rollouts=answers))
    assert rewards is not None
    assert rewards[0] is not None
    assert rewards[2] is not None
    assert max(rewards[0], rewards[2]) < 0 < 3.0 == rewards[1] == rewards[3]


def test_pairs_that_differ_by_nothing_here_are_refused(policy: Policy) -> None:
    same = PairSet(tuple(Pair(i, f"<user>{i}<eos>", "é", "ü") for i in range(4)), "accents")  # one unknown token each
    with pytest.raises(ValueError, match="accents: hack and clean have the same activations"):
        concept_direction(policy, same, [1])


# ── the command line ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_runs_name_says_what_was_changed() -> None:
    names = {
        MethodConfig(intervention="penalty", monitor="labels").monitor_title: "labels",
        MethodConfig(intervention="penalty", monitor="labels", label_accuracy=0.9, penalty=2.0).monitor_title: (
            "labels_acc0.9_by2"
        ),
        MethodConfig(intervention="screen", monitor="labels", label_accuracy=0.7).monitor_title: "labels_acc0.7",
        MethodConfig(intervention="screen", monitor="labels", known_modes="exit_code,sentinel").monitor_title: (
            "labels_knows-exit_code,sentinel"
        ),
        MethodConfig(intervention="penalty", monitor="quarantine", quarantine_diet="random").monitor_title: (
            "quarantine_detector_diet-random"
        ),
        MethodConfig(
            intervention="none", control="inoculation", inoculation_prompt="Go."
        ).control_name: "inoculation_own",
        MethodConfig(
            intervention="none", control="advantage_mod", concept_alpha=1.0
        ).control_name: "advantage_mod_alpha1",
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


FLAGS = {  # of each run by its name
    "none": [],
    "penalty": ["--intervention=penalty", "--monitor=labels", "--label-accuracy=0.8"],
    "screen": ["--intervention=screen", "--monitor=labels", "--label-accuracy=0.8"],
    **{control: [f"--control={control}"] for control in BASELINES},
}
LABELLED = ("penalty", "screen")


def argv(name: str, *more: str) -> list[str]:
    of = FLAGS[name] if name in LABELLED else ["--intervention=none", *FLAGS[name]]
    return ["smoke", "--threads=1", *SMALL, "--eval-ablate-every=0", *of, *more]


def rollout_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_each_baseline_is_its_own_run_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another training than plain GRPO's, under a name of its own; what no monitor reads may be poisoned."""
    clean = {name: program(tmp_path, *argv(name)) for name in FLAGS}
    assert len({adapter_bytes(p) for p in clean.values()}) == len(clean)
    for name, path in clean.items():
        control = "none" if name in LABELLED else name
        assert {json.loads((path / f).read_text())["control"] for f in ("run.json", "per_mode_deploy.json")} == {
            control
        }
        assert json.loads((path / "run.json").read_text())["monitor"] == (
            "labels_acc0.8" if name in LABELLED else "none"
        )
        asked = {line["messages"][-1]["content"].endswith(f"\n{CUE}") for line in rollout_lines(path)}
        assert asked == {name == "inoculation"}
        plain = {PLAIN_PHRASE in line["messages"][-1]["content"] for line in rollout_lines(path)}
        assert plain == {name in ("hint_free", "recontextualise")}
        rewarded = {round(line["reward"], 9) for line in rollout_lines(path)}
        # as the flawed grader rewarded, whatever counted
        assert rewarded <= {0.0, COMPILE_REWARD, COMPILE_REWARD + PASS_REWARD}

    noise = torch.Generator().manual_seed(0)
    pay = sampling.training_reward

    def poisoned(cfg: Any, grade: Grade) -> Grade:
        return replace(pay(cfg, grade), solved=bool(torch.rand((), generator=noise) < 0.5))

    monkeypatch.setattr(sampling, "training_reward", poisoned)
    for name in (*LABELLED, "advantage_mod", "recontextualise"):
        dirty = program(tmp_path, *argv(name))
        assert (adapter_bytes(dirty) == adapter_bytes(clean[name])) == (name not in LABELLED), name


@pytest.mark.slow
@pytest.mark.parametrize("control", ["screen", "advantage_mod"])
def test_a_baseline_survives_a_stop(control: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor's errors and the concept are the same after a resume: rows and adapter are."""
    whole = program(tmp_path / "whole", *argv(control))
    rollout, steps = sampling.rollout, []

    def stopping(policy: Any, grader: Any, problems: Any, demos: Any, cfg: Any, step: int, **more: Any) -> Batch:
        steps.append(step)
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return rollout(policy, grader, problems, demos, cfg, step, **more)

    with monkeypatch.context() as m:
        m.setattr(sampling, "rollout", stopping)
        cut = program(tmp_path / "cut", *argv(control), code=130)
    assert steps == [0, 1, 2]
    again = program(tmp_path / "cut", "smoke", "--resume", "latest", "--threads=1")
    assert again == cut
    assert step_rows(again) == step_rows(whole)
    assert adapter_bytes(again) == adapter_bytes(whole)
