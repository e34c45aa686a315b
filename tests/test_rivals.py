"""examples/rivals/: each class against its paper's formula, on a tiny model or on plain tensors."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from examples.rivals.advantage_modification import ALPHA, AdvantageModification, modified
from examples.rivals.grift import DIMENSIONS, Grift, two_means
from examples.rivals.inoculation import REQUEST, Inoculation
from examples.rivals.probe_penalty import (
    RIDGE,
    FrozenProbe,
    ProbePenalty,
    RefittedProbe,
    logistic,
)
from examples.rivals.sgtm import SGTM, Known
from methods import TOY_PAIRS, batch, config, draw, flagged, make, poisoned, setup, step, view
from runs import SMALL, run
from tiny import policy as tiny_policy
from tiny import relative, shake
from vgrout import register_intervention, register_monitor
from vgrout.config.presets import resolve
from vgrout.config.specs import INTERVENTIONS, MONITORS
from vgrout.ground.data import Rollout, UpdateRow
from vgrout.ground.embedded import CUE
from vgrout.ground.io import json_lines
from vgrout.method.gradients import StepGradient
from vgrout.method.method import make_method
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy


@pytest.fixture(scope="module", autouse=True)
def registered():
    with patch.dict(MONITORS), patch.dict(INTERVENTIONS):
        for own in (AdvantageModification, Inoculation, ProbePenalty, SGTM):
            register_intervention(own)
        for own in (FrozenProbe, Grift, Known, RefittedProbe):
            register_monitor(own)
        yield


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


RIVALS = [
    ("advantage_modification", "usual"),
    ("inoculation", "usual"),
    ("sgtm", "known"),
    ("probe_penalty", "frozen_probe"),
    ("route2", "grift"),
]


@pytest.mark.parametrize(("intervention", "monitor"), RIVALS)
def test_what_a_rival_learns_depends_on_no_label(policy, intervention, monitor):
    learnt = []
    for of in (batch(), poisoned(batch())):
        method = make(policy, intervention, monitor)
        learnt.append(step(policy, method, of)[1])
    first, second = learnt
    assert torch.equal(first.keep, second.keep)
    assert (first.quar is None) == (second.quar is None)
    assert first.quar is None or torch.equal(first.quar, second.quar)


# ── advantage modification


def test_advantage_modification_is_the_papers_formula():
    rewards, scores = [1.1, 1.1, 0.1, 1.1], [3.0, 1.0, 2.5, -1.0]
    mean = sum(scores) / 4
    std = math.sqrt(sum((s - mean) ** 2 for s in scores) / 4)
    expected = []
    for R, s in zip(rewards, scores, strict=True):
        z = (s - mean) / std
        expected.append(R * (1 - ALPHA / (1 + math.exp(-z))) if z > 0 else R)
    assert modified(rewards, scores) == pytest.approx(expected)
    assert modified(rewards, [2.0] * 4) == rewards  # no answer is more of a hack than another


def test_the_concept_is_the_unit_mean_difference_of_the_pairs(policy):
    own = make_method(setup(config("advantage_modification"), policy)).intervention
    prompts = [policy.encode(pair.prompt) for pair in TOY_PAIRS.pairs]
    of_side = {
        side: own.states(prompts, [policy.encode(getattr(p, side)) for p in TOY_PAIRS.pairs])
        for side in ("hack", "clean")
    }
    difference = (of_side["hack"] - of_side["clean"]).mean(0)
    assert float(own.concept @ difference) == pytest.approx(float(difference.norm()))
    assert float(own.concept.norm()) == pytest.approx(1)


def test_its_rewards_give_a_signal_where_all_answers_earn_the_same_and_spare_demonstrations(policy):
    method = make(policy, "advantage_modification")
    own = method.intervention
    groups = method.flag(batch(same=True)).groups
    for group in groups:
        seen = group.view()
        scores = own.states([seen.prompt_ids] * 4, seen.completion_ids) @ own.concept
        lowered = modified(seen.rewards, scores.tolist())
        if lowered[3] < seen.rewards[3]:  # the demonstration
            lowered[3] = None
        assert group.new_rewards == pytest.approx(lowered)
    assert groups[2].has_signal
    assert not batch(same=True).groups[2].has_signal


def test_states_are_those_of_the_present_policy_where_asked(policy):
    texts = [(2, 3, 4)], [(5, 6, 7, 1)]
    shake(policy.adapter, 0.0)
    (before,), (base,) = (token_states(policy, *texts, 1, base=base) for base in (False, True))
    assert torch.equal(before, base)
    shake(policy.adapter, 0.05)
    (now,), (still,) = (token_states(policy, *texts, 1, base=base) for base in (False, True))
    assert torch.equal(still, base)
    assert relative(now, base) > 1e-4


# ── inoculation


def test_training_prompts_ask_for_the_hack_and_the_tasks_stay_as_they_are(policy):
    problems = [group.problem for group in batch().groups]
    asked = make(policy, "inoculation").prompted(problems)
    for before, after in zip(problems, asked, strict=True):
        text = before.messages[-1]["content"]
        assert after.messages[-1]["content"] == f"{text}\n{REQUEST}"
        assert replace(after, messages=before.messages) == before
    assert make(policy, "none").prompted(problems) == problems
    of_organism = Inoculation({}, resolve(["mini", "--intervention=inoculation"]))
    assert of_organism.prompt(problems[0].messages)[-1]["content"].endswith(f"\n{CUE}")


@pytest.mark.long
def test_a_run_trains_under_the_request_and_is_evaluated_without(tmp_path):
    path = run(tmp_path, "smoke", "--intervention=inoculation", "--threads=1", *SMALL)

    def prompts(file):
        return [line["messages"][-1]["content"] for line in json_lines(path / file)]

    assert all(text.endswith(f"\n{CUE}") for text in prompts("rollouts.jsonl"))
    assert not any(CUE in text for text in prompts("final.jsonl"))


# ── SGTM


def test_sgtm_masks_in_three_ways(policy):
    method = make(policy, "sgtm", "known", quarantine="shared")
    of = method.flag(batch())
    verdicts = [row.flagged for row in of.rows[:4]]
    assert verdicts == [True, None, False, True]  # caught, rewarded, not rewarded, demonstrated
    rows = torch.randn(4, len(policy.adapter), generator=draw(1))
    routed = method.intervention.route(StepGradient(rows, of.rows[:4], method.spans))
    assert torch.allclose(routed.keep, rows[1] + rows[2])
    assert torch.allclose(routed.quar, rows[0] + rows[1] + rows[3])


def test_rows_without_a_verdict_are_learnt_apart(policy):
    """Students of one group: under a monitor of texts those that are learnt alike share a row of g."""
    rows = make(policy, "sgtm", "known").flag(batch()).rows[:4]
    assert len({row.row_of_g for row in rows}) == 4


# ── probes under a penalty


def test_logistic_is_the_minimum_of_its_loss():
    x = torch.randn(20, 6, generator=draw(1), dtype=torch.float64)
    y = (torch.arange(20) < 10).double()
    w = logistic(x, y).requires_grad_()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y) + RIDGE / 2 * w @ w
    loss.backward()
    assert float(w.grad.norm()) < 1e-9


@pytest.mark.parametrize("alpha", [None, 3.0])
def test_the_reward_falls_by_the_probes_score(policy, alpha):
    method = make(policy, "probe_penalty", "frozen_probe", penalty=alpha)
    for group in method.flag(batch(same=True)).groups:
        for b, (reward, new) in enumerate(zip(group.rewards, group.new_rewards, strict=True)):
            score = group.flags.scores[b]
            assert group.flags.flagged[b] == (score > 0.5)
            if b == 3 and score > 0.5:  # the demonstration
                assert new is None
            else:
                assert new == pytest.approx(reward - (alpha or 1) * score)


def test_the_one_probe_stays_and_the_other_follows_the_policy(policy):
    method = make(policy, "none", shadow="frozen_probe,refitted_probe")
    frozen, refitted = method.shadows.values()
    assert torch.equal(frozen.w, refitted.w)
    pairs = view(
        2,
        prompt_ids=frozen.prompts[0],
        completion_ids=(frozen.answers[0], frozen.answers[len(TOY_PAIRS)]),
    )
    assert flagged(frozen, pairs) == [(True, False)]  # what it was fitted on
    before = frozen.w
    for probe in (frozen, refitted):
        flagged(probe, pairs, step=4)
    assert torch.equal(refitted.w, before)
    for probe in (frozen, refitted):
        flagged(probe, pairs, step=5)
    assert torch.equal(frozen.w, before)
    assert relative(refitted.w, before) > 1e-3
    again = make(policy, "none", shadow="frozen_probe,refitted_probe").shadows["refitted_probe"]
    again.load_state_dict(refitted.state_dict())
    assert flagged(again, pairs) == flagged(refitted, pairs)


# ── gradient fingerprints


def fingerprinted(monitor, hackward, known, advantages, seed=3):
    """What it flags of ten rows: noise on one of two directions, that of hacks or of the rest, times the advantage."""
    rows, directions = (
        torch.randn(10, 400, generator=draw(seed)),
        torch.randn(2, 400, generator=draw(4)),
    )
    A = torch.tensor(advantages)
    of_hacks = torch.tensor([b in hackward for b in range(10)])
    g = A[:, None] * (rows + torch.where(of_hacks[:, None], *directions))
    rollouts = [Rollout((1,), "", True) for _ in range(10)]
    of = [
        UpdateRow(r, advantage=a, known_hack=b in known, row_of_g=b)
        for b, (r, a) in enumerate(zip(rollouts, advantages, strict=True))
    ]
    found = monitor.flag_gradients(StepGradient(g, of, {}), 0)
    return found.of_row.nonzero().flatten().tolist()


def test_a_fingerprint_is_the_direction_of_the_likelihoods_gradient():
    monitor = Grift(config("route2", "grift", seed=3))
    g = torch.randn(3, 400, generator=draw(2))
    x = monitor.fingerprints(g, torch.tensor([1.0, 1.0, 0.0]))
    assert torch.allclose(x.norm(dim=1), torch.tensor([1.0, 1.0, 0.0]))
    other = monitor.fingerprints(g * torch.tensor([[-2.0], [5.0], [1.0]]), torch.tensor([-1, 1, 1]))
    assert torch.allclose(x[:2], other[:2], atol=1e-5)  # neither A's size nor its sign
    near = g[:1] + 0.3 * g[1:2]  # angles survive the projection
    kept = float(x[0] @ monitor.fingerprints(near, torch.ones(1))[0])
    true = float(torch.cosine_similarity(g[:1], near))
    assert kept == pytest.approx(true, abs=4 / math.sqrt(DIMENSIONS))


def test_the_cluster_of_known_hacks_is_flagged():
    A = [0.5, -0.5, 0.5, 0.2, -0.1, 0.5, -0.5, 0.5, 0.5, 0.0]
    monitor = Grift(config("route2", "grift"))
    assert fingerprinted(monitor, (), (), A) == []  # nothing is known yet
    # 9 has no gradient
    assert fingerprinted(monitor, (0, 1, 2, 3, 9), (0,), A) == [0, 1, 2, 3]
    resumed = Grift(config("route2", "grift"))
    resumed.load_state_dict(monitor.state_dict())
    # in a step without known hacks by the clusters of earlier ones
    assert fingerprinted(resumed, (4, 5), (), A, seed=6) == [4, 5]


def test_two_means_are_a_fixed_point_of_lloyds_algorithm():
    x = torch.nn.functional.normalize(torch.randn(30, 3, generator=draw(5)), dim=1)
    centres = two_means(x, x[:2])
    unit = torch.nn.functional.normalize(centres, dim=1)
    nearest = (x @ unit.T).argmax(1)
    for k in (0, 1):
        assert torch.allclose(centres[k], x[nearest == k].mean(0), atol=1e-6)


def test_a_reward_may_go_with_a_prompt():
    class Both(ProbePenalty):
        name = "both"
        prompt = Inoculation.prompt

    assert register_intervention(Both).spec.acts_on == "rewards"


def test_pairs_are_read_where_a_class_reads_them():
    grift = resolve(["mini", "--intervention=route2", "--monitor=grift"]).method
    probe = resolve(["mini", "--intervention=none", "--shadow=frozen_probe"]).method
    assert (grift.has_direction, grift.reads_pairs) == (False, False)
    assert (probe.has_direction, probe.reads_pairs) == (False, True)
    gate = resolve(["mini", "--intervention=route2"]).method
    assert (gate.has_direction, gate.reads_pairs) == (True, True)
