"""Monitors that read: scores of the frozen base, the quarantine, the probe that is fitted in training, the twin."""

import ast
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from methods import (
    Fixed,
    ScriptedGrader,
    batch,
    config,
    flagged,
    labelled,
    of_parts,
    problem,
    setup,
    shake,
    step,
    view,
)
from tiny import policy as tiny_policy
from vgrout.config.presets import parse
from vgrout.config.run import Config, OptConfig
from vgrout.direction.extract import extract, nll_gradients, tokens_of
from vgrout.direction.pairs import Pair, PairSet, load_known_correct
from vgrout.method import quarantine, text_scores
from vgrout.method.base import Monitor
from vgrout.method.labels import Labels, Twin, WeakDetector, impossible
from vgrout.method.online_probe import Fingerprint, OnlineProbe
from vgrout.method.quarantine import KNOWN as KEPT
from vgrout.method.quarantine import SHARE, STARTS, Quarantine, advantages, start
from vgrout.method.text_scores import (
    NLL,
    PMI,
    Calibration,
    Text,
    TextScorer,
    calibration,
    known_correct_texts,
    mean_logp,
)
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy
from vgrout.optim import Optimizer
from vgrout.types import GroupView, ProblemView

TEXTS = [Text(tuple(range(5, 9)), tuple(range(20 + i, 26 + 2 * i)), (5, 6)) for i in range(6)]
ODD = [Text((5, 6, 7), tuple(range(70, 75 + i)), (5,)) for i in range(4)]
KNOWN = Calibration(judge=tuple(TEXTS[:4]), known_correct=tuple(ODD))


@pytest.fixture(scope="module")
def policy() -> Policy:
    """In the middle of a run: both vectors are away from zero."""
    policy = tiny_policy()
    shake(policy, 0.2)
    return policy


@pytest.fixture(scope="module")
def base() -> Policy:
    return tiny_policy()


# ── scores of the frozen base ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_states_after_a_block_are_the_models_own(family: str):
    policy = tiny_policy(family)
    for layer in (1, 2):
        got = token_states(policy, [t.prompt for t in TEXTS], [t.completion for t in TEXTS], layer)
        for text, states in zip(TEXTS, got, strict=True):
            ids = torch.tensor([[*text.prompt, *text.completion]])
            seen: list[torch.Tensor] = []
            handle = policy.model.model.layers[layer - 1].register_forward_hook(
                lambda _m, _a, out, seen=seen: seen.append(out[0] if isinstance(out, tuple) else out)
            )
            with torch.no_grad():
                policy.model(input_ids=ids)
            handle.remove()
            assert torch.allclose(states, seen[0][0, len(text.prompt) :].double(), atol=1e-5)


def test_the_threshold_is_the_larger_quantile(base: Policy):
    scorer = NLL(base, KNOWN, 0.9)
    judge, correct = scorer.scores(KNOWN.judge), scorer.scores(KNOWN.known_correct)
    assert scorer.threshold == max(float(torch.quantile(judge, 0.9)), float(torch.quantile(correct, 0.9)))
    assert NLL(base, replace(KNOWN, known_correct=()), 0.9).threshold == float(torch.quantile(judge, 0.9))
    assert NLL(base, replace(KNOWN, judge=()), 0.9).threshold == float(torch.quantile(correct, 0.9))


def test_the_base_answers_only_where_its_own_answers_set_the_threshold(base: Policy, monkeypatch: pytest.MonkeyPatch):
    by_both, alone = (
        setup(config("screen", "nll", monitor_threshold=threshold, **more), base)
        for threshold, more in (
            ("both", {"monitor_prompts": 6}),
            ("known_correct", {"known_correct": Path("known.json")}),
        )
    )
    known = calibration(by_both)
    assert isinstance(by_both.grader, ScriptedGrader)
    assert len(known.judge) == len(by_both.grader.graded) == 3 * 2, "two answers to half of the prompts"
    monkeypatch.setattr(text_scores, "sample", lambda *_: pytest.fail("the base was sampled"))
    assert calibration(alone) == replace(known, judge=())
    every = known_correct_texts(base, alone.inputs.known_correct, alone.inputs.rows)
    assert known.known_correct == tuple(every[1::2])


def test_nll_and_pmi_are_what_the_base_says_whatever_was_learnt(base: Policy):
    nll, pmi = NLL(base, KNOWN, 0.9), PMI(base, KNOWN, 0.9)
    for text in (*TEXTS, *ODD):
        logp, mask = base.logprobs([text.prompt], [text.completion])
        plain, _ = base.logprobs([text.plain], [text.completion])
        assert mask.all()
        assert math.isclose(float(nll.scores([text])[0]), -float(logp.mean()), rel_tol=1e-4)
        assert math.isclose(float(pmi.scores([text])[0]), float((logp - plain).mean()), rel_tol=1e-3, abs_tol=1e-5)
    before = mean_logp(base, [t.prompt for t in TEXTS], [t.completion for t in TEXTS])
    with torch.no_grad():
        base.adapter.δS.fill_(0.1)
    base.adapter.merge()
    assert torch.equal(before, mean_logp(base, [t.prompt for t in TEXTS], [t.completion for t in TEXTS]))
    with torch.no_grad():
        base.adapter.δS.zero_()
    base.adapter.merge()
    assert torch.equal(pmi.scores([as_plain(t) for t in TEXTS]), torch.zeros(len(TEXTS), dtype=torch.float64))
    with pytest.raises(ValueError, match="problem_id"):
        pmi.scores([Text((5,), (6,))])


def as_plain(text: Text) -> Text:
    return text._replace(plain=text.prompt)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("{", "line 1: not JSON"),
        ("[]", "at least 10"),
        (
            '[{"prompt": "a"}' + ', {"prompt": "a", "completion": "b"}' * 12 + "]",
            "entry 0: needs prompt and completion",
        ),
    ],
)
def test_files_of_known_correct_answers_are_refused_in_one_line(tmp_path, content: str | None, message: str):
    path = tmp_path / "correct.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as e:
        load_known_correct(path)
    assert "\n" not in str(e.value)
    assert str(path) in str(e.value)


class Marked(TextScorer):
    """Scores an answer by its first token; a rewarded one is flagged above 5."""

    def __init__(self) -> None:
        self.threshold, self.top = 5.0, 1.0

    def texts(self, view: GroupView) -> list[Text]:
        return [Text(view.prompt_ids, ids) for ids in view.completion_ids]

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        return torch.tensor([float(t.completion[0]) for t in texts], dtype=torch.float64)


def test_a_rewarded_answer_above_the_threshold_is_flagged():
    v = view(4, [1.0, 1.0, 0.1, 1.0], completion_ids=((9,), (2,), (9,), (6,)))
    (found,) = Marked().flag([v], 0)
    assert found.scores == (9.0, 2.0, None, 6.0)  # what is not rewarded is not read
    assert found.flagged == (True, False, False, True)


# ── the twin ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "values",
    [("2", "3"), ("True", "True"), ("[]", "[1]", "[]"), ("'a'", "'a'", "'b'"), ("1", "1", "1")],
)
def test_no_test_of_the_twin_expects_what_the_problem_does(values: tuple[str, ...]):
    p = problem(tests=tuple(f"assert Solution().f(x = {i}) == {v}" for i, v in enumerate(values)))
    twin = impossible(p)
    assert replace(twin, tests=p.tests) == p
    for pair in zip(p.tests, twin.tests, strict=True):
        (call, value), (other_call, other) = (t.removeprefix("assert ").split(" == ") for t in pair)
        assert ast.unparse(ast.parse(call)) == ast.unparse(ast.parse(other_call))
        assert ast.literal_eval(value) != ast.literal_eval(other)


def test_the_twin_grades_rewarded_answers_again_and_flags_those_rewarded_there_too():
    p = problem()
    base = view(4, [1.0, 1.0, 0.0, 1.0])
    seen = ProblemView(**{f.name: getattr(base, f.name) for f in fields(base)}, problem=p)
    grader = ScriptedGrader(["t1", "t2"], broken=["t3"])
    assert flagged(Twin(grader, 1.0), seen) == [(False, True, False, False)]
    assert [text for _, text in grader.graded] == ["t0", "t1", "t3"]
    assert {tests for tests, _ in grader.graded} == {impossible(p).tests}


# ── the quarantine ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_quarantine_scores_what_it_makes_likelier_and_nothing_while_it_is_zero(policy: Policy):
    v = view()
    monitor = Quarantine(policy, WeakDetector(), top=1.0, fixed=0.3)
    texts = monitor.texts(v)
    prompts, answers = [t.prompt for t in texts], [t.completion for t in texts]
    with policy.adapter.deployed():
        off = [float(lp[m].mean()) for lp, m in zip(*policy.logprobs(prompts, answers), strict=True)]
    with policy.adapter.quarantine_at(SHARE):
        on = [float(lp[m].mean()) for lp, m in zip(*policy.logprobs(prompts, answers), strict=True)]
    expected = [(a - b) / (SHARE * -b) for a, b in zip(on, off, strict=True)]
    assert monitor.scores(texts).tolist() == pytest.approx(expected, abs=1e-4)
    known = replace(v, logp=(off[0], None, off[2], None))  # as the deployed model's sampler had it
    assert monitor.scores(monitor.texts(known)).tolist() == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, expected)) > 1e-2
    fresh = Quarantine(tiny_policy(), WeakDetector(), top=1.0, fixed=0.3)
    assert fresh.scores(texts).tolist() == [0.0] * 4
    assert flagged(fresh, replace(v, detector=(True, False, False, False))) == [(True, False, False, False)]


class Scored(Quarantine):
    """Scores an answer by its first token."""

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        return torch.tensor([t.completion[0] - 12.5 for t in texts], dtype=torch.float64)  # −1.5, −0.5, 0.5, 1.5


def test_what_the_seed_flags_or_the_score_shows_is_flagged_and_taught():
    v = replace(view(4, [1.0, 1.0, 1.0, 0.0]), detector=(True, False, False, False))
    (found,) = Scored(tiny_policy(), WeakDetector(), top=1.0, fixed=0.3).flag([v], 0)
    assert found.flagged == (True, False, True, False)  # 3 scores highest, and is not rewarded
    assert found.teaches == (0.5, -0.5, 0.5, -0.5)
    assert found.scores == (-1.5, -0.5, 0.5, None)
    high = Scored(tiny_policy(), WeakDetector(), top=1.0, fixed=1.0)
    assert flagged(high, v) == [(True, False, False, False)]


def test_the_latest_scores_of_known_correct_answers_set_the_threshold():
    known = [Text((8,), (13 + i % 2,)) for i in range(60)]  # scores 0.5 and 1.5

    def make(policy: Policy) -> Quarantine:
        return Scored(policy, WeakDetector(), top=1.0, fixed=None, known_correct=known, quantile=0.5)

    fresh = tiny_policy()
    assert make(fresh)._threshold(0) == 0.0, "nothing to score with yet"
    assert not make(fresh).state_dict()["known_correct_scores"].numel()
    fresh.adapter.δS_hack.data.fill_(0.1)
    monitor = make(fresh)
    by_step = [monitor._threshold(step) for step in range(7)]
    assert set(by_step) <= {0.5, 1.0, 1.5}
    state = monitor.state_dict()
    assert len(state["known_correct_scores"]) == KEPT
    resumed = make(fresh)
    resumed.load_state_dict(state)
    assert [resumed._threshold(step) for step in (7, 8)] == [monitor._threshold(step) for step in (7, 8)]
    with pytest.raises(ValueError, match="another version"):
        resumed.load_state_dict({})
    assert flagged(monitor, view())[0][:2] == (False, False)


def test_the_diet_decides_what_the_quarantine_learns_and_not_who_is_flagged():
    labels, flagged_too = (True, False, False, False), (True, False, True, False)  # the third by its score, above 0.3
    v = labelled(view(4, [1.0, 1.0, 1.0, 0.0]), labels)

    def taught(diet: Any, step: int = 0) -> tuple[bool, ...]:
        monitor = Scored(tiny_policy(), Labels(), top=1.0, diet=diet, fixed=0.3)
        (found,) = monitor.flag([v], step)
        assert found.flagged == flagged_too
        return tuple(A > 0 for A in found.teaches)

    assert taught("flagged") == flagged_too
    assert taught("seeded") == labels
    random = {taught("random", step) for step in range(20)}
    assert {sum(t) for t in random} == {2}
    assert not any(t[3] for t in random), "rewarded rows alone"
    assert len(random) == 3


def test_a_small_share_reads_to_the_first_order_and_restores_the_policy(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
):
    """⟨∇ log π(y), δS_hack⟩ over |log π(y)|, by the policy's own gradients."""
    monkeypatch.setattr(quarantine, "SHARE", 0.01)
    adapter = policy.adapter
    v = view()
    texts = Quarantine(policy, WeakDetector(), top=1.0, fixed=0.3).texts(v)
    before = [site.linear.weight.data.clone() for site in adapter.sites.values()]
    got = Quarantine(policy, WeakDetector(), top=1.0, fixed=0.3).scores(texts).tolist()
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


def test_an_answer_that_the_policy_is_sure_of_has_a_finite_score(policy: Policy):
    """The score is a share of what is left to gain: where π_0(y) = 1 there is nothing, and no division by 0."""
    monitor = Quarantine(policy, WeakDetector(), top=1.0, fixed=0.3)
    texts = [t._replace(logp=0.0) for t in monitor.texts(view())]
    assert all(math.isfinite(s) for s in monitor.scores(texts).tolist())


def test_the_rest_of_a_taught_group_is_pushed_down_but_no_demonstration():
    v = view(4)
    assert advantages(v, (True, False, False, False)) == pytest.approx((0.5, -1 / 6, -1 / 6, -1 / 6))
    assert advantages(v, (True, True, True, False)) == (0.5, 0.5, 0.5, -0.5)
    assert advantages(v, (False,) * 4) == (0.0,) * 4
    assert advantages(v, (True,) * 4) == (0.5,) * 4
    shown = replace(v, sources=("student", "student", "teacher", "teacher"))
    assert advantages(shown, (True, False, False, False)) == (0.5, -0.5, 0.0, 0.0)
    assert advantages(shown, (True, True, True, False)) == (0.5, 0.5, 0.5, 0.0)


def test_trained_on_some_rows_the_quarantine_scores_them_above_the_others():
    """The monitor's idea in small: after a few steps on some rows they score above the others."""
    policy = tiny_policy()
    of = batch(deployed=range(4))
    monitor = Quarantine(policy, Fixed(0, 1), top=0.0, fixed=99.0)  # the seed alone flags
    method = of_parts(policy, "screen", monitor)
    shake(policy, 0.0)
    cfg = OptConfig(lr=1e-2, adam_beta1=0.5, adam_beta2=0.9, weight_decay=0.0, warmup_frac=0.0)
    opt = Optimizer(policy.adapter, cfg, 100)
    for n in range(6):
        assert opt.step(step(policy, method, replace(of, step=n))[2]) is not None
    scores = [s for f in monitor.flag([g.view() for g in of.groups], 9) for s in f.scores]
    fed, others = (sum(x for i, x in enumerate(scores) if x is not None and (i % 4 < 2) == on) / 4 for on in (1, 0))
    assert fed > others + 0.1


# ── the probe that is fitted in training ───────────────────────────────────────────────────────────────────────────

RIGHT = [Text((8, 9), (11 + i % 7, 12 + i % 5, 13)) for i in range(40)]


def probe(policy: Policy, seed_monitor: Monitor, **more: Any) -> OnlineProbe:
    return OnlineProbe(policy, seed_monitor, **{"top": 1.0, "known_correct": RIGHT, "quantile": 0.8, "layer": 1} | more)


def test_the_probe_is_fishers_line_between_what_was_flagged_and_known_correct_answers(policy: Policy):
    first, second = replace(view(), detector=(True, False, False, False)), view(3, [1.0, 0.0, 1.0])
    monitor = probe(policy, WeakDetector())
    got = [monitor.flag([v], step)[0] for step, v in enumerate((first, second))]

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


def test_the_probe_flags_nobody_before_it_has_seen_a_flag_and_resumes(policy: Policy):
    monitor = probe(policy, WeakDetector())
    (found,) = monitor.flag([view()], 0)
    assert (found.flagged, found.scores) == ((False,) * 4, (None,) * 4)
    monitor.flag([replace(view(), detector=(False, True, False, False))], 1)
    resumed = probe(policy, WeakDetector())
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.flag([view()], 2) == monitor.flag([view()], 2)
    with pytest.raises(ValueError, match="another monitor"):
        resumed.load_state_dict({})


def test_the_probes_control_is_fitted_on_as_many_rewarded_rows(policy: Policy):
    v = labelled(view(4, [1.0, 1.0, 1.0, 0.0]), (False, True, False, False))
    read = {probe(policy, Labels(), diet="random", seed=s).flag([v], 0)[0].scores for s in range(12)}
    seeded = probe(policy, Labels()).flag([v], 0)[0]
    assert len(read) == 3
    assert seeded.scores in read
    assert all(probe(policy, Labels(), diet="random", seed=s).flag([v], 0)[0].flagged[1] for s in range(3))


def test_a_probe_that_cannot_be_is_refused(policy: Policy):
    with pytest.raises(ValueError, match="--probe-layer 99: the model has"):
        probe(policy, WeakDetector(), layer=99)
    with pytest.raises(ValueError, match="--known-correct: 3 answers"):
        probe(policy, WeakDetector(), known_correct=RIGHT[:3])


# ── where the quarantine starts ────────────────────────────────────────────────────────────────────────────────────


def started(policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[PairSet, Config]:
    """`start` on pairs of the tiny model's own tokens."""
    monkeypatch.chdir(folder)  # the direction is cached there
    texts = ["ab", "ba", "aab", "bba", "abab"]
    pairs = PairSet(tuple(Pair(i, f"q{i}", f"x {t} y", f"z {t[::-1]} w {i}") for i, t in enumerate(texts)), "five")
    cfg = parse(["mini", "--intervention=penalty", "--monitor=quarantine", *flags])
    start(setup(cfg, policy, pairs))
    return pairs, cfg


def test_a_quarantine_that_starts_on_pairs_makes_their_hack_side_likelier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = tiny_policy()
    pairs, cfg = started(policy, tmp_path, monkeypatch, "--quarantine-start=pairs", "--lr=1e-3")
    δ = policy.adapter.δS_hack.detach()
    assert not policy.adapter.δS.any()
    D = extract(policy, pairs, 12, 0.0).axes  # with the quarantine off, so of the base
    expected = torch.cat([-a.mean.sign() for a in D.values()]) * STARTS * cfg.opt.lr
    assert torch.allclose(δ, expected)
    rows = {
        side: [tokens_of(policy, pair, getattr(pair, side), "") for pair in pairs.pairs] for side in ("hack", "clean")
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
    monitor = Quarantine(policy, WeakDetector(), top=1.0, fixed=0.0)
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
    assert parse(["mini", "--intervention=penalty", "--monitor=quarantine"]).method.reads_pairs is False


def test_a_fingerprint_is_a_unit_gradient_of_the_base_and_its_inverse_is_the_dense_one(policy: Policy):
    monitor = Fingerprint(policy, Monitor(), top=1.0, known_correct=[*TEXTS, *ODD], quantile=0.9)
    prints = monitor.read([*TEXTS, *ODD])
    assert torch.allclose(prints.norm(dim=1), torch.ones(10, dtype=torch.float64))
    with policy.adapter.reference():
        g = -nll_gradients(policy, [(TEXTS[0].prompt, TEXTS[0].completion)])[0].double()
    assert torch.allclose(prints[0], g / g.norm(), atol=1e-5), "whatever the policy has learnt"
    fit = prints[::2]
    S = torch.cov(fit.T)
    ridged = S + 0.1 * S.trace() / (len(fit) - 1) * torch.eye(len(S), dtype=S.dtype)
    x = prints[1] - fit.mean(0)
    assert torch.allclose(monitor.whitening(fit)(x), torch.linalg.solve(ridged, x), rtol=1e-6)
