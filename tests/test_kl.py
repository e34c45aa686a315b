"""KL from the deployed model to the base: exact, and zero where nothing was learnt."""

import pytest
import torch
from torch.nn.functional import kl_div

import tiny
from vgrout.model.policy import Policy

PROMPTS = [(3, 4, 5), (7, 8, 9, 10)]
ANSWERS = [(8, 9, 3), (5,)]


def logits(policy: Policy) -> list[torch.Tensor]:
    """Of every position that predicts an answer's token, row by row."""
    out = []
    for p, a in zip(PROMPTS, ANSWERS, strict=True):
        with torch.no_grad():
            out.append(policy.model(input_ids=torch.tensor([[*p, *a]])).logits[0, len(p) - 1 : -1])
    return out


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_kl_is_the_sum_over_the_vocabulary(family: str) -> None:
    policy = tiny.policy(family)
    assert policy.kl_to_base(PROMPTS, ANSWERS).tolist() == [0.0] * 4
    base = logits(policy)
    tiny.shake(policy.adapter, 0.1)

    def by_hand() -> list[float]:
        p, q = (torch.cat(rows).log_softmax(-1) for rows in (logits(policy), base))
        return kl_div(q, p, log_target=True, reduction="none").sum(1).tolist()

    assert policy.kl_to_base(PROMPTS, ANSWERS).tolist() == pytest.approx(by_hand(), rel=1e-4)
    trained = sum(by_hand())
    with policy.adapter.deployed():
        assert policy.kl_to_base(PROMPTS, ANSWERS).tolist() == pytest.approx(by_hand(), rel=1e-4)
        assert sum(by_hand()) < trained
    with policy.adapter.reference():
        assert policy.kl_to_base(PROMPTS, ANSWERS).tolist() == [0.0] * 4
