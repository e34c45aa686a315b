"""Text scores of the frozen base: states and log-likelihoods against the model's own, thresholds, calibration."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from vgrout.monitors.text_scores import (
    NLL,
    PMI,
    Calibration,
    LinearProbe,
    Text,
    calibrate,
    known_correct_texts,
    mean_logp,
)

from tiny import policy as tiny_policy
from vgrout.data import organism
from vgrout.direction.pairs import Pair, PairSet, load_known_correct
from vgrout.grading.grade import Grader
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy, load_policy
from vgrout.model.sampling import Sampling
from vgrout.problems import assigned, load_rows

TEXTS = [Text(tuple(range(5, 9)), tuple(range(20 + i, 26 + 2 * i)), (5, 6)) for i in range(6)]
ODD = [Text((5, 6, 7), tuple(range(70, 75 + i)), (5,)) for i in range(4)]
KNOWN = Calibration(fit=tuple(TEXTS), judge=tuple(TEXTS[:4]), known_correct=tuple(ODD))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


def pairs(policy: Policy) -> PairSet:
    """Prompt, hack, clean as text that the tiny tokenizer knows."""
    words = [policy.decode([i]) for i in range(10, 60)]
    return PairSet(
        tuple(Pair(i, words[i], words[20 + i] + words[31], words[20 + i] + words[40 + i]) for i in range(6)), "toy"
    )


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


def test_the_probe_is_fishers_direction_on_the_highest_tokens(policy: Policy):
    scorer = LinearProbe(policy, KNOWN, 0.9, pairs(policy), layer=1, k=2)
    reference = torch.cat(token_states(policy, [t.prompt for t in TEXTS], [t.completion for t in TEXTS], 1))
    S = torch.cov(reference.T)
    D = len(S)
    sides = []
    for side in ("hack", "clean"):
        texts = [
            (policy.tok(p.prompt)["input_ids"], policy.tok(getattr(p, side))["input_ids"]) for p in pairs(policy).pairs
        ]
        states = token_states(policy, [tuple(p) for p, _ in texts], [(*c, policy.end_id) for _, c in texts], 1)
        sides.append(torch.stack([h.mean(0) for h in states]).mean(0))
    w = torch.linalg.inv(S + 0.1 * S.trace() / D * torch.eye(D, dtype=S.dtype)) @ (sides[0] - sides[1])
    (h,) = token_states(policy, [ODD[0].prompt], [ODD[0].completion], 1)
    want = sorted(((h - reference.mean(0)) @ w).tolist())[-2:]
    got = scorer.scores([ODD[0]])[0]
    scale = float(scorer.scores(TEXTS)[0]) / float(
        torch.stack([((token_states(policy, [TEXTS[0].prompt], [TEXTS[0].completion], 1)[0] - reference.mean(0)) @ w)])
        .topk(2)
        .values.mean()
    )
    assert math.isclose(float(got), scale * sum(want) / 2, rel_tol=1e-4)


def test_random_directions_are_signed_for_the_pairs(policy: Policy):
    real = LinearProbe(policy, KNOWN, 0.9, pairs(policy), layer=1, k=1)
    for seed in range(4):
        drawn = LinearProbe(policy, KNOWN, 0.9, pairs(policy), layer=1, k=1, random=torch.Generator().manual_seed(seed))
        assert 0 <= float(drawn.unit @ real.unit) < 0.9
        assert math.isclose(float(drawn.unit.norm()), 1.0, rel_tol=1e-9)


def test_the_threshold_is_the_larger_quantile(policy: Policy):
    scorer = NLL(policy, KNOWN, 0.9)
    judge, correct = scorer.scores(KNOWN.judge), scorer.scores(KNOWN.known_correct)
    assert scorer.threshold == max(float(torch.quantile(judge, 0.9)), float(torch.quantile(correct, 0.9)))
    assert NLL(policy, replace(KNOWN, known_correct=()), 0.9).threshold == float(torch.quantile(judge, 0.9))
    assert NLL(policy, replace(KNOWN, judge=()), 0.9).threshold == float(torch.quantile(correct, 0.9))


class NoGrader(Grader):
    """One that must not be asked."""

    def __init__(self) -> None:
        pass

    def submit(self, *_: Any) -> Any:
        raise AssertionError("an answer was graded")


def test_where_known_correct_answers_alone_set_the_threshold_no_answer_of_the_base_is_graded():
    own = load_policy(organism.MODEL_DIR, device="cpu", dtype=torch.float32, cache_dir=None)
    rows = load_rows(organism.EMBEDDED.problems)
    problems = assigned(rows, "own", {})["train"][:6]
    correct = known_correct_texts(own, load_known_correct(organism.EMBEDDED.known_correct), rows)
    grader = NoGrader()
    usual: dict[str, Any] = {"sampling": Sampling(), "max_new": 12, "rewarded": 1.0, "seed": 3, "prompts": 6}
    known = calibrate(own, grader, problems, correct, **usual, judged=False)
    assert known.judge == ()
    assert known.known_correct == tuple(correct[1::2])
    assert len(known.fit) == 3 * 2 + len(correct[::2])
    with pytest.raises(AssertionError, match="graded"):
        calibrate(own, grader, problems, correct, **usual)


def test_nll_and_pmi_are_what_the_base_says_whatever_was_learnt(policy: Policy):
    nll, pmi = NLL(policy, KNOWN, 0.9), PMI(policy, KNOWN, 0.9)
    for text in (*TEXTS, *ODD):
        logp, mask = policy.logprobs([text.prompt], [text.completion])
        plain, _ = policy.logprobs([text.plain], [text.completion])
        assert mask.all()
        assert math.isclose(float(nll.scores([text])[0]), -float(logp.mean()), rel_tol=1e-4)
        assert math.isclose(float(pmi.scores([text])[0]), float((logp - plain).mean()), rel_tol=1e-3, abs_tol=1e-5)
    before = mean_logp(policy, [t.prompt for t in TEXTS], [t.completion for t in TEXTS])
    with torch.no_grad():
        policy.adapter.δS.fill_(0.1)
    policy.adapter.merge()
    assert torch.equal(before, mean_logp(policy, [t.prompt for t in TEXTS], [t.completion for t in TEXTS]))
    with torch.no_grad():
        policy.adapter.δS.zero_()
    policy.adapter.merge()
    assert torch.equal(pmi.scores([as_plain(t) for t in TEXTS]), torch.zeros(len(TEXTS), dtype=torch.float64))
    with pytest.raises(ValueError, match="problem_id"):
        pmi.scores([Text((5,), (6,))])


def as_plain(text: Text) -> Text:
    return text._replace(plain=text.prompt)


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("content", "said"),
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
def test_files_of_known_correct_answers_are_refused_in_one_line(tmp_path, content: str | None, said: str):
    path = tmp_path / "correct.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=said) as e:
        load_known_correct(path)
    assert "\n" not in str(e.value)
    assert str(path) in str(e.value)
