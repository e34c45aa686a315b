"""Monitors that read texts: the probe that is fitted in training, and the rule on syntax trees."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from methods import flagged, view
from tiny import policy as tiny_policy
from tiny import shake
from vgrout.direction.pairs import load_known_correct
from vgrout.envs.code.monitors import SyntaxEdge
from vgrout.method.base import Monitor
from vgrout.method.monitors import WeakDetector
from vgrout.method.online_probe import OnlineProbe, Text
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy


@pytest.fixture(scope="module")
def policy() -> Policy:
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


def probe(policy: Policy, seed_monitor: Monitor, known: Sequence[Text] = RIGHT) -> OnlineProbe:
    return OnlineProbe(policy, seed_monitor, known_correct=known, quantile=0.8)


def test_the_probe_is_fishers_line_between_what_was_flagged_and_known_correct_answers(policy):
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
        want = zip(s, rewarded, strict=True)
        assert found.scores == tuple(pytest.approx(x, rel=1e-6) if on else None for x, on in want)
        read = zip(s, rewarded, v.detector, strict=True)
        assert found.flagged == tuple(seeded or (on and x > threshold) for x, on, seeded in read)
    assert got[0].flagged[0]
    assert (got[0].scores[0] or 0) > threshold, "it reads what it was shown"


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


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def test_rewarded_answers_with_an_edge_that_no_known_correct_one_has_are_flagged():
    rule = SyntaxEdge([fenced(HONEST), fenced(HELPER), fenced(NO_TREE[0])])
    programs = (HONEST, HELPER, *UNUSUAL, *NO_TREE)
    texts, n = tuple(map(fenced, programs)), len(programs)
    assert flagged(rule, view(n, [1.0] * n, texts=texts)) == [tuple(p in UNUSUAL for p in programs)]
    assert flagged(rule, view(n, [0.5] * n, texts=texts)) == [(False,) * n]
