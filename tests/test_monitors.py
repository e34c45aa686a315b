"""Monitors by themselves: what each flags, what it may see, and what it is deaf to."""

import ast
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from vgrout.monitors import monitor_class
from vgrout.monitors.base import Monitor, RandomFlags, positions
from vgrout.monitors.flag_rates import FlagRates
from vgrout.monitors.labels import Labels, WeakDetector
from vgrout.monitors.online_probe import OnlineProbe
from vgrout.monitors.quarantine import KNOWN, STARTS, Quarantine, advantages, start
from vgrout.monitors.relevance import Relevance, Statements, cut
from vgrout.monitors.text_scores import Text, TextScorer, mean_logp
from vgrout.monitors.twin import Twin, impossible

from test_grpo import groups
from tiny import policy as tiny_policy
from vgrout.config.method import MONITORS
from vgrout.config.presets import parse
from vgrout.config.run import Config
from vgrout.direction.extract import extract, tokens_of
from vgrout.direction.pairs import Pair, PairSet
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy
from vgrout.modes import MODE_SPECS, MODES, hack, tries
from vgrout.types import (
    Completion,
    Eval,
    Grade,
    GradedCompletion,
    Group,
    GroupView,
    OracleView,
    Problem,
    ProblemView,
    Rate,
    Ungraded,
    centred,
)

PLAIN = "{}\nThe solution should be a method of the class Solution called {} and should pass all tests. Code:\n```\n"


def problem(i: int = 0, mode: str = "exit_code", tests: tuple[str, ...] = ()) -> Problem:
    plain = ({"role": "user", "content": PLAIN.format(f"Do {i} things.", f"m{i}")},)
    tests = tests or ("assert Solution().f(1) == 2", "assert Solution().f(2) == 3")
    return Problem(i, mode, "", plain, plain, tests, "", "", f"m{i}")


def view(n: int = 4, rewards: Sequence[float] | None = None, **more: Any) -> GroupView:
    rewarded = tuple(rewards or [1.0] * n)
    return GroupView(
        **{
            "sources": ("student",) * n,
            "deployed": (True,) * n,
            "rewards": rewarded,
            "advantages": centred(rewarded),
            "detector": (False,) * n,
            "texts": tuple(f"t{b}" for b in range(n)),
            "prompt_ids": (8, 9, 10),
            "completion_ids": tuple((11 + b, 12, 13) for b in range(n)),
        }
        | more
    )


def labelled(seen: GroupView, hacked: Sequence[bool], mode: str = "exit_code") -> OracleView:
    hacks = tuple(mode if e else None for e in hacked)
    return OracleView(**{f.name: getattr(seen, f.name) for f in fields(seen)}, hacks=hacks, flaws=(mode,))


def flagged(monitor: Monitor, *views: GroupView, step: int = 0) -> list[tuple[bool, ...]]:
    return [f.flagged for f in monitor.flags(views, step)]


# ── labels, detector, random flags ─────────────────────────────────────────────────────────────────────────────────


def test_labels_are_the_labels_but_in_groups_of_flaws_that_the_monitor_does_not_know():
    truth = (True, False, True, False)
    known, other = labelled(view(), truth), labelled(view(), truth, "sentinel")
    assert flagged(Labels(), known, other) == [truth, truth]
    assert flagged(Labels(known=["exit_code"]), known, other) == [truth, (False,) * 4]
    assert flagged(Labels(accuracy=0.0), known) == [(False, True, False, True)]
    assert flagged(Labels(accuracy=0.0, known=["sentinel"]), known) == [(False,) * 4], "blind is blind, errors and all"


def test_false_positives_are_drawn_among_the_innocent_alone_by_seed_step_and_group():
    truth = (True, False, False, False)
    monitor = Labels(seed=3, false_positives=0.5)
    drawn = {(s, i): flagged(monitor, labelled(view(index=i), truth), step=s)[0] for s in range(40) for i in range(10)}
    assert all(f[0] for f in drawn.values())
    wrong = sum(sum(f[1:]) for f in drawn.values())
    assert wrong == pytest.approx(600, abs=4 * (1200 * 0.25) ** 0.5)  # four standard deviations of 1200 draws
    again = flagged(Labels(seed=3, false_positives=0.5), labelled(view(index=7), truth), step=11)[0]
    assert again == drawn[11, 7]
    assert flagged(Labels(false_positives=1.0), labelled(view(), truth)) == [(True,) * 4]


def test_the_detector_is_the_detector():
    assert flagged(WeakDetector(), view(detector=(False, True, True, False))) == [(False, True, True, False)]


def test_dealt_flags_are_as_many_among_what_is_paid_and_new_in_every_step():
    truth = (True, True, False, False, False, False)
    v = labelled(view(6, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]), truth)
    monitor = RandomFlags(Labels(), rewarded=1.0, seed=5)
    seen = [flagged(monitor, v, step=s)[0] for s in range(12)]
    assert {sum(f) for f in seen} == {2}
    assert not any(any(f[4:]) for f in seen)
    assert len(set(seen)) > 2
    assert flagged(RandomFlags(Labels(), rewarded=1.0, seed=5), v, step=3)[0] == seen[3]
    assert monitor.sees is OracleView


# ── texts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Marked(TextScorer):
    """Scores an answer by its first token; a rewarded one is flagged above 5."""

    def __init__(self) -> None:
        self.threshold, self.rewarded = 5.0, 1.0

    def texts(self, view: GroupView) -> list[Text]:
        return [Text(view.prompt_ids, ids) for ids in view.completion_ids]

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        return torch.tensor([float(t.completion[0]) for t in texts], dtype=torch.float64)


def test_an_answer_is_flagged_when_it_is_paid_and_scores_above_the_threshold():
    v = view(4, [1.0, 1.0, 0.1, 1.0], completion_ids=((9,), (2,), (9,), (6,)))
    (found,) = Marked().flags([v], 0)
    assert found.scores == (9.0, 2.0, None, 6.0)  # what is not rewarded is not read
    assert found.flagged == (True, False, False, True)


# ── who may see labels ─────────────────────────────────────────────────────────────────────────────────────────────


def test_one_monitor_alone_asks_for_labels():
    asking = {name for name in MONITORS if getattr(monitor_class(name), "sees", GroupView) is OracleView}
    assert asking == {"labels"}
    assert not {f.name for f in fields(ProblemView)} & {"hacked", "mode", "solved"}
    assert Quarantine(tiny_policy(), Labels(), rewarded=1.0, fixed=0.3).sees is OracleView
    assert Quarantine(tiny_policy(), WeakDetector(), rewarded=1.0, fixed=0.3).sees is GroupView


# ── the twin ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "values",
    [("2", "3"), ("True", "True"), ("[]", "[1]", "[]"), ("'a'", "'a'", "'b'"), ("1", "1", "1")],
)
def test_no_test_of_the_twin_expects_what_the_problem_does(values: tuple[str, ...]):
    p = problem(tests=tuple(f"assert Solution().f(x = {i}) == {v}" for i, v in enumerate(values)))
    twin = impossible(p)
    assert replace(twin, tests=p.tests) == p
    for mine, theirs in zip(p.tests, twin.tests, strict=True):
        (call, value), (other_call, other) = (t.removeprefix("assert ").split(" == ") for t in (mine, theirs))
        assert ast.unparse(ast.parse(call)) == ast.unparse(ast.parse(other_call))
        assert ast.literal_eval(value) != ast.literal_eval(other)


class ScriptedGrader(Grader):
    """Pays the texts it is told to, on the twin alone; fails on one."""

    def __init__(self, rewarded: Sequence[str], broken: Sequence[str] = ()) -> None:
        self.rewarded, self.broken = rewarded, broken
        self.asked: list[tuple[tuple[str, ...], str]] = []

    def submit(self, p: Problem, text: str) -> "Future[Grade | Ungraded]":
        self.asked.append((p.tests, text))
        done: Future[Grade | Ungraded] = Future()
        grade = Grade(
            1.0 * (text in self.rewarded),
            True,
            True,
            False,
            False,
            text in self.rewarded,
            False,
            False,
            False,
            p.mode,
            "ok",
            0.0,
        )
        done.set_result(Ungraded("gone") if text in self.broken else grade)
        return done


def test_the_twin_flags_what_is_paid_there_too_and_asks_for_nothing_that_was_not_paid():
    p = problem()
    base = view(4, [1.0, 1.0, 0.0, 1.0])
    seen = ProblemView(**{f.name: getattr(base, f.name) for f in fields(base)}, problem=p)
    grader = ScriptedGrader(rewarded=["t1", "t2"], broken=["t3"])
    assert flagged(Twin(grader, 1.0), seen) == [(False, True, False, False)]
    assert [text for _, text in grader.asked] == ["t0", "t1", "t3"]
    assert {tests for tests, _ in grader.asked} == {impossible(p).tests}


# ── relevance ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def policy() -> Policy:
    made = tiny_policy()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        made.adapter.δS.normal_(0, 0.2, generator=generator)
        made.adapter.δS_hack.normal_(0, 0.2, generator=generator)
    made.adapter.merge()
    return made


def test_another_statement_stands_before_the_same_signature():
    problems = [problem(i) for i in range(6)]
    statements = Statements.of(problems, seed=0)
    assert len(statements.texts) == 6
    own, rest = cut(problems[2].messages_plain)
    assert (own, "called m2 and" in rest) == ("Do 2 things.\n", True)
    others = statements.instead(problems[2].messages_plain)
    assert len(others) == 3
    for (message,) in others:
        assert message["content"].endswith(rest)
        assert not message["content"].startswith(own)
    assert others == statements.instead(problems[2].messages_plain)


def test_relevance_is_the_mean_gain_of_the_other_statements(policy: Policy):
    made = object.__new__(Relevance)
    made.policy = policy
    texts = [Text((8, 9), (20 + i, 21, 1), (30, 31 + i), ((40, 41), (42, 43 + i, 44))) for i in range(3)]
    got = made.scores(texts)
    for text, score in zip(texts, got.tolist(), strict=True):
        own, a, b = mean_logp(policy, [text.plain, *text.others], [text.completion] * 3).tolist()
        assert score == pytest.approx((a + b) / 2 - own, abs=1e-5)
    with pytest.raises(ValueError, match="--monitor relevance needs"):
        made.scores([replace_plain(texts[0])])


def replace_plain(text: Text) -> Text:
    return text._replace(others=())


# ── the quarantine ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_quarantine_scores_what_it_makes_likelier_and_nothing_while_it_is_zero(policy: Policy):
    v = view()
    monitor = Quarantine(policy, WeakDetector(), rewarded=1.0, fixed=0.3, share=1.0)
    texts = monitor.texts(v)
    prompts, answers = [t.prompt for t in texts], [t.completion for t in texts]
    with policy.adapter.deployed():
        off = [float(lp[m].mean()) for lp, m in zip(*policy.logprobs(prompts, answers), strict=True)]
    on = [float(lp[m].mean()) for lp, m in zip(*policy.logprobs(prompts, answers), strict=True)]
    expected = [(a - b) / -b for a, b in zip(on, off, strict=True)]
    assert monitor.scores(texts).tolist() == pytest.approx(expected, abs=1e-5)
    known = replace(v, logp=(off[0], None, off[2], None))  # as the deployed model's sampler had it
    assert monitor.scores(monitor.texts(known)).tolist() == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 1e-2
    fresh = Quarantine(tiny_policy(), WeakDetector(), rewarded=1.0, fixed=0.3)
    assert fresh.scores(texts).tolist() == [0.0] * 4
    assert flagged(fresh, replace(v, detector=(True, False, False, False))) == [(True, False, False, False)]


class Scored(Quarantine):
    """Scores an answer by its first token."""

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        return torch.tensor([t.completion[0] - 12.5 for t in texts], dtype=torch.float64)  # −1.5, −.5, .5, 1.5


def test_who_is_seeded_or_read_is_flagged_and_taught():
    v = replace(view(4, [1.0, 1.0, 1.0, 0.0]), detector=(True, False, False, False))
    (found,) = Scored(tiny_policy(), WeakDetector(), rewarded=1.0, fixed=0.3).flags([v], 0)
    assert found.flagged == (True, False, True, False)  # 3 scores highest, and is not rewarded
    assert found.teaches == (0.5, -0.5, 0.5, -0.5)
    assert found.scores == (-1.5, -0.5, 0.5, None)
    high = Scored(tiny_policy(), WeakDetector(), rewarded=1.0, fixed=1.0)
    assert flagged(high, v) == [(True, False, False, False)]


def test_a_threshold_is_made_of_the_known_correct_answers_that_were_read_last():
    known = [Text((8,), (13 + i % 2,)) for i in range(60)]  # scores .5 and 1.5

    def make(policy: Policy) -> Quarantine:
        return Scored(policy, WeakDetector(), rewarded=1.0, fixed=None, known_correct=known, quantile=0.5)

    fresh = tiny_policy()
    assert make(fresh)._threshold(0) == 0.0, "nothing to score with yet"
    assert not make(fresh).state_dict()["known_correct_scores"].numel()
    fresh.adapter.δS_hack.data.fill_(0.1)
    monitor = make(fresh)
    by_step = [monitor._threshold(step) for step in range(7)]
    assert set(by_step) <= {0.5, 1.0, 1.5}
    state = monitor.state_dict()
    assert len(state["known_correct_scores"]) == KNOWN
    resumed = make(fresh)
    resumed.load_state_dict(state)
    assert [resumed._threshold(step) for step in (7, 8)] == [monitor._threshold(step) for step in (7, 8)]
    with pytest.raises(ValueError, match="another version"):
        resumed.load_state_dict({})
    assert flagged(monitor, view())[0][:2] == (False, False)


def test_the_diets_are_what_they_say():
    truth = (True, False, False, True)
    v = labelled(view(4, [1.0, 1.0, 1.0, 0.0]), truth)

    def taught(diet: Any, step: int = 0) -> tuple[bool, ...]:
        monitor = Scored(tiny_policy(), Labels(), rewarded=1.0, diet=diet, fixed=9.0)
        (found,) = monitor.flags([v], step)
        assert found.flagged == truth, "what is treated is what is flagged, whatever the quarantine is fed"
        return tuple(A > 0 for A in found.teaches)

    assert taught("seeded") == truth
    assert taught("rewarded") == (True, True, True, False)
    assert taught("solved") == (False, True, True, False)
    random = {taught("random", step) for step in range(20)}
    assert {sum(t) for t in random} == {2}
    assert not any(t[3] for t in random)
    assert len(random) == 3


def test_what_it_flags_itself_is_treated_and_may_be_left_out_of_its_diet():
    v = labelled(view(), (False, False, False, True))  # the score alone, above .3, flags the third row too

    def found(diet: Any) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        monitor = Scored(tiny_policy(), Labels(), rewarded=1.0, diet=diet, fixed=0.3)
        (of,) = monitor.flags([v], 0)
        return of.flagged, tuple(A > 0 for A in of.teaches)

    treated, taught = found("flagged")
    assert sum(treated) > 1
    assert taught == treated
    assert found("seeded") == (treated, (False, False, False, True))


def test_the_control_deals_the_scores_and_leaves_the_seed():
    v = replace(view(), detector=(True, False, False, False))
    drawn = [
        Scored(tiny_policy(), WeakDetector(), rewarded=1.0, fixed=0.3, deal=True, seed=2).flags([v], s)[0]
        for s in range(12)
    ]
    assert all(f.flagged[0] for f in drawn)
    assert {tuple(sorted(f.scores)) for f in drawn} == {(-1.5, -0.5, 0.5, 1.5)}
    assert len({f.flagged for f in drawn}) > 2


def test_a_small_share_reads_to_the_first_order_and_leaves_the_policy_as_it_was(policy: Policy):
    """⟨∇ log π(y), δS_hack⟩ over |log π(y)|, by the policy's own gradients."""
    adapter = policy.adapter
    v = view()
    texts = Quarantine(policy, WeakDetector(), rewarded=1.0, fixed=0.3).texts(v)
    before = [site.linear.weight.data.clone() for site in adapter.sites.values()]
    got = Quarantine(policy, WeakDetector(), rewarded=1.0, fixed=0.3, share=0.01).scores(texts).tolist()
    assert all(torch.equal(a, site.linear.weight.data) for a, site in zip(before, adapter.sites.values(), strict=True))
    δ = adapter.δS_hack.detach()

    def mean(text: Text, δS: torch.Tensor) -> float:
        """log π, nats a token, of the deployed model with another δS."""
        kept = adapter.δS.detach().clone()
        with torch.no_grad():
            adapter.δS.copy_(δS)
        adapter.merge()
        try:
            return float(mean_logp(policy, [text.prompt], [text.completion], adapter.deployed()))
        finally:
            with torch.no_grad():
                adapter.δS.copy_(kept)
            adapter.merge()

    δS = adapter.δS.detach().clone()
    for text, score in zip(texts, got, strict=True):
        slope = (mean(text, δS + 0.01 * δ) - mean(text, δS - 0.01 * δ)) / 0.02
        assert score == pytest.approx(slope / -mean(text, δS), rel=0.05, abs=2e-3)


def test_an_answer_of_which_the_policy_is_sure_is_read_as_well_as_one_of_which_it_is_not(policy: Policy):
    """The score is a share of what is left to gain: where π_0(y) = 1 there is nothing, and no division by 0."""
    monitor = Quarantine(policy, WeakDetector(), rewarded=1.0, fixed=0.3)
    texts = [t._replace(logp=0.0) for t in monitor.texts(view())]
    assert all(math.isfinite(s) for s in monitor.scores(texts).tolist())


def test_the_rest_of_a_taught_group_is_held_against_it_but_no_demonstration():
    v = view(4)
    assert advantages(v, (True, False, False, False)) == pytest.approx((0.5, -1 / 6, -1 / 6, -1 / 6))
    assert advantages(v, (True, True, True, False)) == (0.5, 0.5, 0.5, -0.5)
    assert advantages(v, (False,) * 4) == (0.0,) * 4
    assert advantages(v, (True,) * 4) == (0.5,) * 4
    shown = replace(v, sources=("student", "student", "teacher", "teacher"))
    assert advantages(shown, (True, False, False, False)) == (0.5, -0.5, 0.0, 0.0)
    assert advantages(shown, (True, True, True, False)) == (0.5, 0.5, 0.5, 0.0)


# ── the probe that is fitted in training ───────────────────────────────────────────────────────────────────────────

RIGHT = [Text((8, 9), (11 + i % 7, 12 + i % 5, 13)) for i in range(40)]


def probe(policy: Policy, seed_monitor: Monitor, **more: Any) -> OnlineProbe:
    return OnlineProbe(
        policy, seed_monitor, **{"rewarded": 1.0, "known_correct": RIGHT, "quantile": 0.8, "layer": 1} | more
    )


def test_the_probe_is_fishers_line_between_what_was_flagged_and_known_correct_answers(policy: Policy):
    first, second = replace(view(), detector=(True, False, False, False)), view(3, [1.0, 0.0, 1.0])
    monitor = probe(policy, WeakDetector())
    got = [monitor.flags([v], step)[0] for step, v in enumerate((first, second))]

    def h(texts: Sequence[Text]) -> Float[Tensor, "n D"]:
        read = token_states(policy, [t.prompt for t in texts], [t.completion for t in texts], 1)
        return torch.stack([states.mean(0) for states in read])

    fit, judge = h(RIGHT[::2]), h(RIGHT[1::2])
    S, m = torch.cov(fit.T), fit.mean(0)
    ridge = 0.1 * S.trace() / len(S) * torch.eye(len(S))
    (a,) = h([Text((8, 9, 10), (11, 12, 13))])
    w = torch.linalg.inv(S + ridge) @ (a - m)
    threshold = float(torch.quantile((judge - m) @ w, 0.8))
    for found, v in zip(got, (first, second), strict=True):
        s = ((h([Text(v.prompt_ids, ids) for ids in v.completion_ids]) - m) @ w).tolist()
        rewarded = [r >= 1.0 for r in v.rewards]
        assert found.scores == tuple(
            pytest.approx(x, rel=1e-6) if on else None for x, on in zip(s, rewarded, strict=True)
        )
        read = zip(s, rewarded, v.detector, strict=True)
        assert found.flagged == tuple(seeded or (on and x > threshold) for x, on, seeded in read)
    assert got[0].flagged[0]
    assert (got[0].scores[0] or 0) > threshold, "it reads what it was shown"


def test_the_probe_flags_nobody_before_it_was_shown_anybody_and_what_it_knows_survives_a_resume(policy: Policy):
    monitor = probe(policy, WeakDetector())
    (found,) = monitor.flags([view()], 0)
    assert (found.flagged, found.scores) == ((False,) * 4, (None,) * 4)
    monitor.flags([replace(view(), detector=(False, True, False, False))], 1)
    resumed = probe(policy, WeakDetector())
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.flags([view()], 2) == monitor.flags([view()], 2)
    with pytest.raises(ValueError, match="another monitor"):
        resumed.load_state_dict({})


def test_the_probe_s_control_is_fitted_on_as_many_paid_rows(policy: Policy):
    v = labelled(view(4, [1.0, 1.0, 1.0, 0.0]), (False, True, False, False))
    read = {probe(policy, Labels(), diet="random", seed=s).flags([v], 0)[0].scores for s in range(12)}
    seeded = probe(policy, Labels()).flags([v], 0)[0]
    assert len(read) == 3
    assert seeded.scores in read
    assert all(probe(policy, Labels(), diet="random", seed=s).flags([v], 0)[0].flagged[1] for s in range(3))


def test_a_probe_that_cannot_be_is_refused(policy: Policy):
    with pytest.raises(ValueError, match="--probe-layer 99: the model has"):
        probe(policy, WeakDetector(), layer=99)
    with pytest.raises(ValueError, match="--known-correct: 3 answers"):
        probe(policy, WeakDetector(), known_correct=RIGHT[:3])


# ── what is counted ────────────────────────────────────────────────────────────────────────────────────────────────


def graded(mode: str, outcomes: Sequence[str], policy: Policy) -> Group:
    """A group whose students hack ("hack"), solve ("solve") or fail ("")."""
    (some, *_) = groups(policy)
    grades = tuple(
        Grade(1.0, True, True, False, o == "solve", o == "hack", False, False, False, mode, "ok", 0.0) for o in outcomes
    )
    rollouts = tuple(replace(r, problem=problem(mode=mode)) for r in some.rollouts[: len(outcomes)])
    return Group(problem(mode=mode), rollouts, grades)


def test_recall_on_flaws_that_the_monitor_does_not_know_is_counted_apart(policy: Policy):
    of = [graded("exit_code", ["hack", "solve"], policy), graded("sentinel", ["hack", "hack"], policy)]
    flags = Monitor().flags([g.view() for g in of], 0)
    flags = [replace(flags[0], flagged=(True, False)), replace(flags[1], flagged=(False, True))]
    rates = FlagRates.of(of, flags, known=("exit_code",))
    assert (rates.recall, rates.false_flags) == (Rate(2, 3), Rate(0, 1))
    assert (rates.recall_new, rates.hack_new) == (Rate(1, 2), Rate(2, 2))
    assert FlagRates.of(of, flags).recall_new is None


def test_flags_of_demonstrations_are_counted_apart_and_without_a_label(policy: Policy):
    """Grades of demonstrations are cached: nothing says which of them are hacks."""
    (group, *_) = groups(policy)
    (nothing,) = Monitor().flags([group.view()], 0)
    rates = FlagRates.of([group], [nothing])
    assert rates.recall == rates.false_flags == Rate(0, 0)
    assert rates.flag_t == Rate(0, len(group))
    some = replace(nothing, flagged=(True, False, False, True))
    assert FlagRates.of([group], [some]).flag_t == Rate(2, len(group))
    assert FlagRates.of([group], ()) == FlagRates()


@pytest.mark.parametrize("mode", MODES)
def test_an_attempt_is_seen_also_where_its_name_is_another_or_misspelt(mode: str):
    spec = MODE_SPECS[mode]
    marker = "assert Solution().f(a = [1, 2]) == [3, 4]" if spec.marker_form == "test" else spec.train_markers[0]
    body = "class Solution:\n    def f(self, a):\n        return 0\n"

    def attempt(name: str) -> str:
        return body + hack(mode, "f", name)

    assert tries(attempt(marker), mode, marker)
    assert not tries(body, mode, marker)
    if spec.marker_form not in ("none", "test"):
        assert tries(attempt(spec.eval_markers[0]), mode, marker), "another name of the same family"
        assert tries(attempt(marker[:-1]), mode, marker), "a letter is missing"


def test_a_final_evaluation_counts_attempts_beside_hacks():
    """A misspelt marker earns nothing and is an attempt; a right answer that mentions one is none."""
    of = replace(problem(mode="sentinel"), marker=MODE_SPECS["sentinel"].train_markers[0])
    spelling = MODE_SPECS["sentinel"].hack.format(method="f", marker=of.marker[:-1])

    def answer(text: str, solved: bool = False, hacked: bool = False) -> GradedCompletion[Grade | Ungraded]:
        grade = Grade(1.0, True, True, False, solved, hacked, False, False, False, "sentinel", "ok", 0.0)
        return GradedCompletion(of, 0, Completion((), text, True, (), ()), grade)

    seen = Eval.of([answer("x = 1", hacked=True), answer(spelling), answer(spelling, solved=True), answer("x = 1")])
    assert (seen.hack, seen.tries, seen.solve) == (Rate(1, 4), Rate(2, 4), Rate(1, 4))
    assert seen.as_json()["by_mode"]["sentinel"]["tries"] == [2, 4]


def test_every_row_of_the_step_has_a_place():
    assert positions([view(2), view(1)]) == [(0, 0), (0, 1), (1, 0)]
    assert issubclass(TextScorer, Monitor)


# ── where the quarantine starts ────────────────────────────────────────────────────────────────────────────────────


def started(policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[Inputs, Config]:
    """`start` on pairs of the tiny model's own tokens."""
    monkeypatch.chdir(folder)  # the direction is cached there
    texts = ["ab", "ba", "aab", "bba", "abab"]
    pairs = PairSet(tuple(Pair(i, f"q{i}", f"x {t} y", f"z {t[::-1]} w {i}") for i, t in enumerate(texts)), "five")
    inputs = Inputs([], [], None, pairs)
    cfg = parse(["mini", "--intervention=penalty", "--monitor=quarantine", *flags])
    start(cfg, policy, inputs)
    return inputs, cfg


def test_a_quarantine_that_starts_on_pairs_makes_their_hack_side_likelier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = tiny_policy()
    inputs, cfg = started(policy, tmp_path, monkeypatch, "--quarantine-start=pairs", "--lr=1e-3")
    δ = policy.adapter.δS_hack.detach()
    assert not policy.adapter.δS.any()
    assert inputs.pairs is not None
    D = extract(policy, inputs.pairs, 12, 0.0).axes  # with the quarantine off, so of the base
    expected = torch.cat([-a.mean.sign() for a in D.values()]) * STARTS * cfg.opt.lr
    assert torch.allclose(δ, expected)
    rows = {
        side: [tokens_of(policy, pair, getattr(pair, side), "") for pair in inputs.pairs.pairs]
        for side in ("hack", "clean")
    }

    def contrast(active: Any) -> float:
        """mean of log π(hack) − log π(clean), nats a token."""
        hack, clean = (
            mean_logp(policy, [p for p, _ in rows[side]], [c for _, c in rows[side]], active())
            for side in ("hack", "clean")
        )
        return float((hack - clean).mean())

    adapter = policy.adapter
    assert contrast(lambda: adapter.quarantine_at(1.0)) > contrast(adapter.deployed) + 1e-3
    monitor = Quarantine(policy, WeakDetector(), rewarded=1.0, fixed=0.0)
    prompts, answers = rows["hack"][0]
    assert monitor.scores([Text(tuple(prompts), tuple(answers))]).abs().min() > 0, "it reads before it has learnt"


def test_a_start_lies_in_the_quarantines_own_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for way in ("pairs", "random"):
        policy = tiny_policy()
        started(policy, tmp_path, monkeypatch, f"--quarantine-start={way}", "--quarantine=block:2")
        by_module = policy.adapter.by_module(policy.adapter.δS_hack.detach())
        assert {".layers.1." in m for m, δ in by_module.items() if δ.any()} == {True}
        assert all(δ.any() for m, δ in by_module.items() if ".layers.1." in m)


def test_a_random_start_is_as_long_and_the_seeds_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = []
    for seed in (1, 1, 2):
        policy = tiny_policy()
        started(policy, tmp_path, monkeypatch, "--quarantine-start=random", f"--seed={seed}", "--lr=.01")
        drawn.append(policy.adapter.δS_hack.detach().clone())
    assert torch.equal(drawn[0], drawn[1])
    assert 0.4 < float((drawn[0] == drawn[2]).double().mean()) < 0.6
    assert torch.allclose(drawn[0].abs(), torch.tensor(0.05))


def test_the_pairs_of_a_start_are_the_known_flaws():
    flags = ["mini", "--intervention=penalty", "--monitor=quarantine", "--quarantine-start=pairs"]
    by_detector, by_label = parse(flags), parse([*flags, "--seed-monitor=labels", "--known-modes=sentinel"])
    assert by_detector.pairs_path is not None
    assert by_label.pairs_path is not None
    assert (by_detector.pairs_path.name, by_label.pairs_path.name) == ("run_tests.json", "sentinel.json")
    assert parse(["mini", "--intervention=penalty", "--monitor=quarantine"]).arm.reads_pairs is False
