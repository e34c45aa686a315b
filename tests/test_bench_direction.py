"""The bench's three ways to extract give one answer; its clock is not tested."""

import pytest
import torch

from benchmarks import direction
from benchmarks.rows import Report
from test_direction import PAIRS
from tiny import policy as tiny_policy


@pytest.mark.slow
def test_the_three_ways_agree_and_each_peer_gets_a_row() -> None:
    rows, worst = direction.measure("tiny", tiny_policy(), PAIRS, 1)
    assert worst < 1e-4
    assert [row.against for row in rows] == ["one by one, probe", "one by one, leaf"]
    assert all("10 pairs, tiny" in line for line in Report(rows).markdown().splitlines()[2:])


def test_the_peer_of_the_probe_is_plain_autograd() -> None:
    """The leaf's gradient is that of W + U diag(δS) Vh: not the probe's own arithmetic under another name."""
    policy = tiny_policy()
    (got,) = direction.one_by_one_leaf(policy, PAIRS, "hack")[:1]
    site = next(iter(policy.adapter.sites.values()))
    eps, (prompt, answer) = 1e-2, direction.tokens_of(policy, PAIRS.pairs[0], PAIRS.pairs[0].hack, "")
    batch = direction.collate([prompt], [answer], policy.device)
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            policy.adapter.δS[site.span.start] = sign * eps
            policy.adapter.merge()
            values.append(direction.mean_nll(policy, batch).item())
    assert abs(got[site.span.start].item() - (values[0] - values[1]) / (2 * eps)) < 1e-3
