"""The τ gate against a plain re-implementation, the pair band by hand, the dealt shares by counting."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vgrout.monitors.gate import BandGate, TauGate, permuted


def plain_tau(history, decay=0.9):
    """EMA with start correction, written as its definition: a weighted mean of the steps' means."""
    means = []
    for i in (0, 1):
        seen = [step[i] for step in history if step[i] is not None]
        weights = [decay ** (len(seen) - 1 - j) for j in range(len(seen))]
        means.append(sum(w * m for w, m in zip(weights, seen, strict=True)) / sum(weights) if seen else math.nan)
    return means


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_tau_is_the_midpoint_of_two_running_means(seed):
    draw = torch.Generator().manual_seed(seed)
    gate, history = TauGate(1), []
    for _ in range(6):
        cos = torch.rand(1, 8, generator=draw) * 2 - 1
        live = torch.rand(1, 8, generator=draw) > 0.3
        known = torch.rand(8, generator=draw) > 0.6
        share = gate(cos, live, known)
        sides = [cos[0][live[0] & side] for side in (known, ~known)]
        history.append([s.mean().item() if len(s) else None for s in sides])
        known_mean, rest = plain_tau(history)
        assert gate.means[:, 0].tolist() == pytest.approx([known_mean, rest], abs=1e-6, nan_ok=True)
        tau = (known_mean + rest) / 2
        want = [bool(lv and (a or c > tau)) for c, lv, a in zip(cos[0].tolist(), live[0], known, strict=True)]
        assert share[0].bool().tolist() == want


def test_without_known_hacks_there_is_no_threshold_and_nothing_is_routed():
    gate = TauGate(2)
    share = gate(torch.full((2, 3), 0.9), torch.ones(2, 3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool))
    assert not share.any()
    assert gate.tau.isnan().all()


def test_rows_without_a_gradient_move_no_mean_and_go_nowhere():
    cos = torch.tensor([[0.8, 0.0, 0.2, 0.0]])
    known = torch.tensor([True, True, False, False])
    live = torch.tensor([[True, False, True, False]])
    gate = TauGate(1)
    assert gate(cos, live, known).tolist() == [[1, 0, 0, 0]]
    assert gate.tau.item() == pytest.approx(0.5)


def test_the_threshold_survives_a_step_without_known_hacks():
    gate = TauGate(1)
    gate(torch.tensor([[0.8, 0.2]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([True, False]))
    share = gate(torch.tensor([[0.7, 0.1]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([False, False]))
    assert share.tolist() == [[1, 0]]


def test_where_known_hacks_do_not_lie_above_the_rest_there_is_a_threshold_only_in_all_modules():
    """A mislabelled answer below the others: the midpoint lies under them, and would flag them all."""
    cos = torch.tensor([[-0.2, 0.1, 0.2], [0.5, 0.1, 0.2]])
    known = torch.tensor([True, False, False])
    everywhere, apart = (TauGate(2, apart=a)(cos, torch.ones(2, 3, dtype=torch.bool), known) for a in (False, True))
    assert everywhere.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert apart.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_tau_gate_state_goes_round():
    one, two = TauGate(2), TauGate(2)
    cos = torch.rand(2, 5, generator=torch.Generator().manual_seed(1))
    live, known = torch.ones(2, 5, dtype=torch.bool), torch.tensor([True, False, False, True, False])
    one(cos, live, known)
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(cos + 0.1, live, known), two(cos + 0.1, live, known))
    assert torch.equal(one.tau, two.tau)
    with pytest.raises(ValueError, match=r"\(2, 2\), this run has \(2, 3\)"):
        TauGate(3).load_state_dict(one.state_dict())


def test_band_is_linear_between_the_pairs_means_and_clamped():
    gate = BandGate(torch.tensor([0.1]), torch.tensor([0.5]))
    cos = torch.tensor([[0.0, 0.1, 0.2, 0.5, 0.9]])
    assert gate(cos, torch.ones(1, 5, dtype=torch.bool))[0].tolist() == pytest.approx([0, 0, 0.25, 1, 1])


def test_a_module_without_a_band_routes_nothing():
    gate = BandGate(torch.tensor([0.3, 0.3, 0.0]), torch.tensor([0.3, 0.1, 1.0]))
    share = gate(torch.full((3, 2), 0.4), torch.ones(3, 2, dtype=torch.bool))
    assert share.tolist() == [[0, 0], [0, 0], pytest.approx([0.4, 0.4])]


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_permuted_deals_the_same_shares_to_live_rollouts(seed):
    draw = torch.Generator().manual_seed(seed)
    live = (torch.rand(12, generator=draw) > 0.3)[None].expand(3, -1)
    share = torch.where(live, torch.rand(3, 12, generator=draw), 0.0)
    dealt = permuted(share, live, torch.Generator().manual_seed(seed))
    assert not dealt[~live].any()
    for before, after in zip(share, dealt, strict=True):
        assert before.sort().values.tolist() == after.sort().values.tolist()
    columns = {tuple(c) for c in share.T.tolist()}
    assert {tuple(c) for c in dealt.T.tolist()} <= columns  # whole rollouts move, not single modules
    assert torch.equal(dealt, permuted(share, live, torch.Generator().manual_seed(seed)))
