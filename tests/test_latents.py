"""Density clusters, CSI on answers whose values are known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny import policy
from vgrout.model.hidden_states import ReferenceStats, dbscan, latents


def blob(n, at, seed, d=6, scale=1.0):
    return at + scale * torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def textbook_dbscan(x, eps, min_samples):
    """Seed by seed, with a queue, as in the paper."""
    n = len(x)
    near = [[j for j in range(n) if float((x[i] - x[j]).norm()) <= eps] for i in range(n)]
    label, k = [-1] * n, 0
    for i in range(n):
        if label[i] != -1 or len(near[i]) < min_samples:
            continue
        queue = [i]
        while queue:
            j = queue.pop(0)
            if label[j] == -1:
                label[j] = k
                if len(near[j]) >= min_samples:
                    queue += near[j]
        k += 1
    return label


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 4))
def test_dbscan_is_the_textbooks(places, min_samples, eps):
    """On integers along a line every distance is exact, so both see the same neighbours."""
    x = torch.tensor(places, dtype=torch.float64)[:, None]
    assert dbscan(x, float(eps), min_samples).tolist() == textbook_dbscan(
        x, float(eps), min_samples
    )


def test_csi_by_hand():
    """One tight cluster of five at distance 3 from the nearest reference, and a stray at 5: 5·3 + 1·5."""
    cloud = ReferenceStats(torch.randn(32, 2, generator=torch.Generator().manual_seed(0)))
    cloud.mean, cloud.spread, cloud.eps = torch.zeros(2), torch.ones(2), 0.5
    cloud.x = torch.zeros(1, 2, dtype=torch.float64)
    answers = torch.tensor([[3.0, 0.0]] * 5 + [[0.0, 5.0]])
    assert cloud.csi(answers) == pytest.approx(20.0)


def test_latents_are_means_over_the_completion_under_the_base_model():
    p = policy()
    prompts, completions = [(5, 6, 7), (8, 9), (5, 6, 7, 8)], [(10, 11), (12, 13, 14, 15), (16,)]
    with torch.no_grad():
        expected = []
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt, *completion]])
            hidden = p.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
            expected.append(hidden[len(prompt) - 1 : -1].mean(0))
        p.adapter.δS.add_(0.3)
    p.adapter.merge()
    assert torch.allclose(latents(p, prompts, completions), torch.stack(expected), atol=1e-5)
