"""Monitors of gradients: the τ gate against a plain re-implementation, the pair band by hand, votes of modules."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods import SPANS, TWO_GROUPS, group, routed, rows, scores, total, toy
from vgrout.method.gates import BandGate, TauGate

BY_MODULE = {"gate_vote": "module"}


def plain_tau(history, decay=0.9):
    """EMA with start correction, written as its definition: a weighted mean of the steps' means."""
    means = []
    for i in (0, 1):
        seen = [step[i] for step in history if step[i] is not None]
        weights = [decay ** (len(seen) - 1 - j) for j in range(len(seen))]
        means.append(
            sum(w * m for w, m in zip(weights, seen, strict=True)) / sum(weights)
            if seen
            else math.nan
        )
    return means


@given(st.integers(0, 10_000))
@settings(max_examples=15)
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
        want = [
            bool(lv and (a or c > tau))
            for c, lv, a in zip(cos[0].tolist(), live[0], known, strict=True)
        ]
        assert share[0].bool().tolist() == want


@pytest.mark.parametrize(
    ("cosines", "known", "share", "tau"),
    [
        # no known hack: the rest's mean is 0.4, and what lies above half of it is routed
        ([0.9, 0.1, 0.2], [0, 0, 0], [1, 0, 0], 0.2),
        # nothing but known hacks, which are routed whatever τ is
        ([0.6, 0.2], [1, 1], [1, 1], 0.2),
        ([0.8, 0.2], [1, 0], [1, 0], 0.5),  # both: as always
    ],
)
def test_as_in_the_documents_what_was_never_seen_counts_as_0(cosines, known, share, tau):
    live = torch.ones(1, len(known), dtype=torch.bool)
    gate = TauGate(1, absent_is_zero=True)
    assert gate.tau.isnan().all()
    got = gate(torch.tensor([cosines]), live, torch.tensor(known) > 0)
    assert got.tolist() == [share]
    assert gate.tau.item() == pytest.approx(tau)


def test_only_the_documents_settings_count_it_so():
    """Without a known hack, the gate of other settings routes nothing."""
    groups = [(rows(8, 3, (2, 7)), group(8))]
    routes = {}
    for vote, modules in product(("module", "rollout"), ("all", "apart")):
        found = routed(toy("route2", gate_vote=vote, gate_modules=modules), *groups)
        routes[vote, modules] = any(scores(found))
    assert [settings for settings, some in routes.items() if some] == [("module", "all")]


def test_apart_has_no_threshold_where_known_hacks_do_not_lie_above_the_rest():
    """A mislabelled answer below the others: the midpoint lies under them, and would flag them all."""
    cos = torch.tensor([[-0.2, 0.1, 0.2], [0.5, 0.1, 0.2]])
    known = torch.tensor([True, False, False])
    everywhere, apart = (
        TauGate(2, apart=a)(cos, torch.ones(2, 3, dtype=torch.bool), known) for a in (False, True)
    )
    assert everywhere.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert apart.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_a_band_is_linear_and_clamped_and_a_module_without_one_routes_nothing():
    gate = BandGate(torch.tensor([0.1, 0.3, 0.3]), torch.tensor([0.5, 0.3, 0.1]))
    share = gate(torch.tensor([[0.0, 0.1, 0.2, 0.5, 0.9]] * 3), torch.ones(3, 5, dtype=torch.bool))
    assert share.tolist() == [pytest.approx([0, 0, 0.25, 1, 1]), [0] * 5, [0] * 5]


def test_route2_finds_hackward_students_that_no_label_marks():
    found = routed(
        toy("route2", gate_modules="all", **BY_MODULE), (rows(8, 3, (2, 3, 7)), group(8, 1))
    )
    assert found.flags[0].flagged == tuple(i in (2, 3, 7) for i in range(8))
    assert found.flags[0].shares == found.flags[0].scores
    assert found.measured["hkgap"] > 0.5
    assert 0.2 < found.measured["tau"] < 0.8
    assert found.measured["resid"] < 0.5
    assert found.measured["routed"] == pytest.approx(3 / 8, abs=0.1)


def test_known_hacks_are_routed_whatever_their_cosine():
    groups = [(rows(6, 4), group(6, 1, caught=(2,)))]
    both = scores(routed(toy("route2", **BY_MODULE), *groups))
    assert both[2] == both[5] == 1
    teacher_only = scores(
        routed(toy("route2", known_hacks_teacher_only=True, **BY_MODULE), *groups)
    )
    assert teacher_only[5] == 1
    assert teacher_only[2] < 1


def test_the_pair_band_gate_reads_no_label():
    g_b, band = rows(8, 3, (2, 7)), {"monitor": "band", **BY_MODULE}
    a, b = (
        routed(toy("route2", **band), (g_b, g))
        for g in (group(8, 1), group(8, 4, caught=(0, 1, 2, 3)))
    )
    assert scores(a) == scores(b)
    assert min(scores(a)[i] for i in (2, 7)) > 2 * max(scores(a)[i] for i in (0, 1, 3, 4, 5, 6))
    assert "tau" not in a.measured


@pytest.mark.parametrize("monitor", ["gate", "band"])
def test_a_vote_routes_the_whole_rollout_in_modules_without_a_direction_too(monitor):
    by_module, whole = (
        routed(toy("route2", monitor=monitor, gate_vote=vote), *TWO_GROUPS)
        for vote in ("module", "rollout")
    )
    mean = scores(by_module)
    assert scores(whole) == pytest.approx(
        [float(x > 0.5) if monitor == "gate" else x for x in mean]
    )
    g = torch.cat([g_b for g_b, _ in TWO_GROUPS])
    assert torch.allclose(whole.quar, (torch.tensor(scores(whole))[:, None] * g).sum(0), atol=1e-5)
    assert torch.allclose(by_module.keep + by_module.quar, total(*TWO_GROUPS), atol=1e-5)


def test_modules_without_a_threshold_abstain_where_they_may():
    """Where known hacks lie below the rest a module has no threshold. If these are most of them, no majority of all is
    to be had, as along a random direction; the one that has a threshold knows the hack that nobody has caught."""
    shares = {}
    for vote in ("rollout", "abstain"):
        method = toy("route2", gate_vote=vote)
        *others, _ = method.direction.V
        for module in others:
            method.direction.V[module] = -method.direction.V[module]
        found = routed(method, *TWO_GROUPS)
        assert found.measured["voting"] == pytest.approx(1 / (1 + len(others)))
        shares[vote] = scores(found)
    known = [1, 5, 6 + 3, 6 + 4, 6 + 5]
    assert [i for i, share in enumerate(shares["rollout"]) if share] == known
    assert [i for i, share in enumerate(shares["abstain"]) if share] == sorted([*known, 6 + 0])


def test_where_no_module_has_a_threshold_known_hacks_are_flagged_all_the_same():
    method = toy("route2", gate_vote="abstain")
    everything = (rows(4, 1, (3,)), group(4, 3, caught=(0,)))
    assert scores(routed(method, everything)) == [1.0] * 4


def test_a_rollout_without_a_gradient_moves_no_mean():
    """Its reward is its group's mean. It has no cosine, and one NaN would stay in the running means for good."""
    method = toy("route2", gate_modules="all", gate_vote="module")
    g = rows(8, 3, (2, 3, 7))
    g[0] = 0
    got = routed(method, (g, group(8, 1)))
    assert got.measured["hkgap"] is not None
    assert got.measured["routed"] == pytest.approx(3 / 7)
    gate = method.monitor
    assert gate.gate.tau.isfinite().all()


def test_resid_is_the_cosine_of_what_is_kept_with_v():
    method = toy("route2", gate_modules="all", gate_vote="module")
    got = routed(method, (rows(8, 3, (2, 3, 7)), group(8, 1)))
    want = [
        torch.cosine_similarity(got.keep[SPANS[module]], v[0], dim=0).item()
        for module, v in method.direction.V.items()
    ]
    assert got.measured["resid"] == pytest.approx(sum(want) / len(want), abs=1e-5)
