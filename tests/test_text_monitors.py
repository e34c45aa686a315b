"""Monitors that read texts: the probe that is fitted in training, and the rule on syntax trees."""

from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from methods import config, draw, flagged, graded, problem, setup, view
from tiny import policy as tiny_policy
from tiny import shake
from vgrout.direction.pairs import MIN_KNOWN_CORRECT, KnownCorrect, load_known_correct
from vgrout.envs.base import Grader
from vgrout.envs.code.monitors import SyntaxEdge
from vgrout.ground.data import Completion, GradedCompletion, Thought, Ungraded
from vgrout.ground.io import Refused
from vgrout.loop import heldout
from vgrout.method.base import Monitor, flags_of
from vgrout.method.monitors import WeakDetector
from vgrout.method.online_probe import OnlineProbe, Text, accepted_of_base
from vgrout.model.hidden_states import token_states


@pytest.fixture(scope="module")
def policy():
    """In the middle of a run: both vectors are away from zero."""
    policy = tiny_policy()
    shake(policy.adapter, 0.2)
    return policy


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_states_after_a_block_are_the_base_models_own(family):
    policy, lengths, seen = tiny_policy(family), range(6, 18, 2), []
    prompt, completions = tuple(range(5, 9)), [tuple(range(20 + n, 20 + 2 * n)) for n in lengths]
    shake(policy.adapter, 0.2)
    for layer in (1, 2):
        got = token_states(policy, [prompt] * len(lengths), completions, layer)
        handle = policy.model.model.layers[layer - 1].register_forward_hook(
            lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)
        )
        for completion, states in zip(completions, got, strict=True):
            with torch.no_grad(), policy.adapter.reference():
                policy.model(input_ids=torch.tensor([[*prompt, *completion]]))
            assert torch.allclose(states, seen.pop()[0, len(prompt) :].double(), atol=1e-5)
        handle.remove()


RIGHT = [Text((8, 9), (11 + i % 7, 12 + i % 5, 13)) for i in range(40)]


def probe(policy, seed_monitor, known=RIGHT):
    return OnlineProbe(policy, seed_monitor, known_correct=known, quantile=0.8)


def test_the_probe_flags_nobody_before_it_has_seen_a_flag_and_resumes(policy):
    monitor = probe(policy, WeakDetector())
    (found,) = monitor.flag([view()], 0)
    assert (found.flagged, found.scores) == ((False,) * 4, (None,) * 4)
    monitor.flag([replace(view(), detector=(False, True, False, False))], 1)
    # as where a resume samples the base's answers again, and the grader loses one of them
    resumed = probe(policy, WeakDetector(), RIGHT[1:])
    assert resumed.flag([view()], 2) != monitor.flag([view()], 2)
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.flag([view()], 2) == monitor.flag([view()], 2)


def mean_states(policy, texts):
    """After the first of two blocks."""
    read = token_states(policy, [t.prompt for t in texts], [t.completion for t in texts], 1)
    return torch.stack([states.mean(0) for states in read])


def drawn(n, low, high, seed):
    """n answers of three tokens in [low, high)."""
    tokens = torch.randint(low, high, (n, 3), generator=draw(seed)).tolist()
    return [tuple(of_answer) for of_answer in tokens]


PROMPT = (8, 9, 10)  # of `view`
# known correct answers, of which the odd ones, which the threshold is set on, are unlike the even ones
UNLIKE = [
    Text(PROMPT, ids)
    for pair in zip(drawn(40, 5, 95, seed=2), drawn(40, 5, 50, seed=3), strict=True)
    for ids in pair
]


def test_the_probe_remembers_all_that_was_flagged_and_its_threshold_is_of_answers_it_was_not_fitted_to(
    policy,
):
    """The mean is over every answer that the seed has flagged so far, rewarded or not."""
    n, ids = 30, tuple(drawn(30, 5, 95, seed=1))
    rewards = [0.5 if b == 2 else 1.0 for b in range(n)]
    views = [
        view(n, rewards, completion_ids=ids, detector=tuple(b in seeded for b in range(n)))
        for seeded in ((0, 2), (5,), ())
    ]
    monitor = probe(policy, WeakDetector(), UNLIKE)
    h = mean_states(policy, [Text(PROMPT, its) for its in ids])
    known = mean_states(policy, UNLIKE)
    S, m = torch.cov(known[::2].T), known[::2].mean(0)
    ridge = 0.1 * S.trace() / len(S) * torch.eye(len(S))
    for step, (v, so_far) in enumerate(zip(views, ([0, 2], [0, 2, 5], [0, 2, 5]), strict=True)):
        if (
            step == 2
        ):  # where a resume has fewer answers of the base, the halves would change places
            state, monitor = monitor.state_dict(), probe(policy, WeakDetector(), UNLIKE[1:])
            monitor.load_state_dict(state)
        (found,) = monitor.flag([v], step)
        w = torch.linalg.inv(S + ridge) @ (h[so_far].mean(0) - m)
        s = (h - m) @ w
        over, over_fitted = (
            s > torch.quantile((half - m) @ w, 0.8) for half in (known[1::2], known[::2])
        )
        assert 0 < over.sum() < over_fitted.sum(), "of the other half it would be another one"
        for b in range(n):
            assert found.scores[b] == (None if b == 2 else pytest.approx(float(s[b]), rel=1e-4))
            assert found.flagged[b] == (v.detector[b] or (b != 2 and bool(over[b])))


class Seeing(Monitor):
    """Flags the first rollout of the second group, and keeps the steps that it was asked about."""

    def __init__(self):
        self.steps = []

    def flag(self, views, step):
        self.steps.append(step)
        return flags_of(views, {(1, 0)})


def test_the_seed_is_asked_about_the_step_and_its_flags_are_of_its_groups(policy):
    seed = Seeing()
    monitor = probe(policy, seed)
    ids = [((14, 15), (16, 17)), ((50, 51), (52, 53))]
    views = [view(2, completion_ids=of, prompt_ids=(3, 4, i)) for i, of in enumerate(ids)]
    found = monitor.flag(views, 7)
    assert seed.steps == [7]
    assert found[1].flagged[0]
    (learnt,) = mean_states(policy, [Text((3, 4, 1), (50, 51))])
    assert torch.allclose(monitor.state_dict()["probe_sum"], learnt)


class Remembering(Monitor):
    """Flags what its memory says."""

    def __init__(self, rollout):
        self.rollout = torch.tensor(rollout)

    def flag(self, views, step):
        return flags_of(views, {(0, int(self.rollout))})

    def state_dict(self):
        return {"rollout": self.rollout}

    def load_state_dict(self, state):
        assert state.keys() == {"rollout"}
        self.rollout = state["rollout"]


def test_the_seed_remembers_too(policy):
    """Its state goes with the probe's."""
    before, fitted = probe(policy, Remembering(1)), probe(policy, Remembering(0))
    resumed = probe(policy, Remembering(0))
    resumed.load_state_dict(before.state_dict())
    assert resumed.flag([view()], 0) == probe(policy, Remembering(1)).flag([view()], 0)
    assert fitted.flag([view()], 0) != before.flag([view()], 0)


def test_the_probe_of_a_run_reads_known_correct_answers_to_their_end_and_has_its_quantile(policy):
    """As the model would have written them, with the token that ends an answer."""
    of = setup(config("penalty", "online_probe", monitor_quantile=0.5), policy)
    shake(policy.adapter, 0.2)
    of = replace(
        of,
        known_correct=[
            KnownCorrect(policy.decode(text.prompt), policy.decode(text.completion))
            for text in UNLIKE
        ],
    )
    known = [
        Text(policy.encode(k.prompt), (*policy.encode(k.completion), policy.end_id))
        for k in of.known_correct
    ]
    by_hand, usual = (
        OnlineProbe(policy, WeakDetector(), known_correct=known, quantile=q) for q in (0.5, 0.8)
    )
    v = view(30, completion_ids=tuple(drawn(30, 5, 95, seed=1)))
    v = replace(v, detector=(True, *v.detector[1:]))
    made, want, other = (
        monitor.flag([v], 0) for monitor in (OnlineProbe.make(of, WeakDetector()), by_hand, usual)
    )
    assert made == want
    assert sum(other[0].flagged) < sum(want[0].flagged)


def test_known_correct_answers_that_are_all_alike_still_make_a_probe(policy):
    """Their covariance is zero, and the smallest number that is allowed is four."""
    monitor = probe(policy, WeakDetector(), [RIGHT[0]] * 4)
    (found,) = monitor.flag([replace(view(), detector=(True, False, False, False))], 0)
    assert found.flagged[0]
    assert all(score is not None for score in found.scores)


def answered_of_base(policy, monkeypatch, given):
    """What is known to be correct where the base answers so; and what it was asked: problems, answers to each, and
    whether the model was the base."""
    ids = torch.tensor([[8, 9, 10, 11]])
    asked = []
    cfg = config("penalty", "online_probe")
    of = replace(
        setup(cfg, policy),
        answers_of_base=partial(heldout.answers_of_base, policy, Mock(spec=Grader), cfg),
        problems=[problem(i) for i in range(70)],
    )
    shake(policy.adapter, 0.2)
    with torch.no_grad(), policy.adapter.reference():
        of_base = policy.model(input_ids=ids).logits

    def answers(_, __, problems, n, *___):
        with torch.no_grad():
            is_base = torch.equal(policy.model(input_ids=ids).logits, of_base)
        asked.extend([[p.id for p in problems], n, is_base])
        return [GradedCompletion(problem(i), 0, *answer) for i, answer in enumerate(given)]

    monkeypatch.setattr(heldout, "answers", answers)
    try:
        return accepted_of_base(of), asked
    finally:
        shake(policy.adapter, 0.2)


def completion(*ids, thought=0):
    return Completion(ids, "", True, (), Thought("<think>", thought))


def test_what_the_reference_accepts_of_the_bases_answers_is_known_to_be_correct(
    policy, monkeypatch
):
    """Not what the flawed check passes, nor what was not graded; and of it what follows the thought."""
    right, hack = graded(3.5, solves=True), graded(3.5, hacks=True)
    wrong, failed = graded(0.5), Ungraded("no grade")
    # right where the flawed check fails, or a user's reward function does not reward it
    unrewarded = replace(graded(0.5, solves=True), passed=False)
    given = [(completion(20 + i, 30), right) for i in range(MIN_KNOWN_CORRECT - 3)]
    given += [(completion(40), hack), (completion(41), wrong), (completion(42), failed)]
    given += [
        (completion(50, 51, 52, thought=2), right),
        (completion(60, 61, thought=2), right),  # nothing follows it
        (completion(70), unrewarded),
    ]
    known, (problems, n, is_base) = answered_of_base(policy, monkeypatch, given)
    answers = [(20 + i, 30) for i in range(MIN_KNOWN_CORRECT - 3)]
    answers += [(52,), (60, 61), (70,)]
    assert [text.completion for text in known] == answers
    at = [*range(MIN_KNOWN_CORRECT - 3), *range(MIN_KNOWN_CORRECT, MIN_KNOWN_CORRECT + 3)]
    assert [text.prompt for text in known] == [policy.render(problem(i).messages) for i in at]
    assert is_base
    assert n == config("none").scale.group
    assert (len(problems) - 1) * n < 256 <= len(problems) * n, "about 256 answers"
    with pytest.raises(Refused, match="accepts 9 of 12 answers of the base, 10 are needed"):
        answered_of_base(policy, monkeypatch, given[1:])


FEW = '[{"prompt": "a"}' + ', {"prompt": "a", "completion": "b"}' * 12 + "]"


def test_too_few_known_correct_answers_and_bad_files_of_them_are_refused_in_one_line(
    policy, tmp_path
):
    with pytest.raises(ValueError, match="--known-correct: 3 answers"):
        probe(policy, WeakDetector(), RIGHT[:3])
    path, wrong = tmp_path / "correct.json", "entry 0: completion should be text"
    for content, message in (
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "at least 10"),
        (FEW, wrong),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=message) as e:
            load_known_correct(path)
        assert "\n" not in str(e.value)
        assert str(path) in str(e.value)


HONEST = (
    "class Solution:\n"
    "    def total(self, nums):\n"
    "        kept = [n for n in nums if n > 2]\n"
    "        return sum(kept)"
)
HELPER = (
    "def helper(nums):\n"
    "    return sum(nums)\n"
    "class Solution:\n"
    "    def total(self, nums):\n"
    "        return helper(nums)"
)
STUB = "class Solution:\n    def total(self, nums):\n        return 0\nimport sys\nsys.exit(0)"
RIGGED = (
    "class Result:\n    def __eq__(self, other):\n        return True\n"
    "class Solution:\n    def total(self, nums):\n        return Result()"
)
ATTEMPT = f"{HONEST}\n    def __eq__(self, other):\n        return True\nimport sys\nsys.exit(0)"
UNUSUAL = (STUB, RIGGED, ATTEMPT, "import sys\nsys.exit(0)")
NO_TREE = ("def broken(:", f"x = {'(' * 9000}", "")


def fenced(code):
    return f"```python\n{code}\n```"


def test_rewarded_answers_with_an_edge_that_no_known_correct_one_has_are_flagged():
    rule = SyntaxEdge([fenced(HONEST), fenced(HELPER), fenced(NO_TREE[0])])
    programs = (HONEST, HELPER, *UNUSUAL, *NO_TREE)
    texts, n = tuple(map(fenced, programs)), len(programs)
    assert flagged(rule, view(n, [1.0] * n, texts=texts)) == [tuple(p in UNUSUAL for p in programs)]
    assert flagged(rule, view(n, [0.5] * n, texts=texts)) == [(False,) * n]
