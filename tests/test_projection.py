"""Gradient surgery against definitions written out here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods import (
    META,
    SIZES,
    SPANS,
    TWO_GROUPS,
    draw,
    group,
    routed,
    rows,
    spans_of,
    total,
    toy,
    toy_direction,
)
from vgrout.direction.extract import Direction, axes_of
from vgrout.method.projection import along, coefficients, cos_pre, hackward_cos, rescale, split

EVERY = ("none", "erase", "route", "route2")


def orthonormal(k, r, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.linalg.qr(torch.randn(r, k, generator=generator, dtype=torch.float64))[0]
        .T.float()
        .contiguous()
    )


def vector(r, seed):
    return torch.randn(r, generator=torch.Generator().manual_seed(seed))


shapes = st.tuples(st.integers(1, 6), st.integers(8, 40), st.integers(0, 10_000))


@given(shapes, st.sampled_from(["one_sided", "no_gate", "reverse"]), st.floats(0, 3))
@settings(max_examples=20)
def test_split_adds_up_and_takes_from_the_span_only(shape, mode, overshoot):
    k, r, seed = shape
    V, g = orthonormal(k, r, seed), vector(r, seed + 1)
    keep, removed = split(g, V, mode, overshoot)
    assert torch.allclose(keep + removed, g, atol=1e-6)
    outside = removed - V.T @ (V @ removed)
    # `reverse` with overshoot 3 removes up to 6 g
    assert outside.norm() <= 1e-6 * (g.norm() + removed.norm())


def test_modes_on_a_hand_made_gradient():
    V = torch.eye(3)[:2]
    g = torch.tensor([3.0, -2.0, 5.0])
    assert coefficients(g, V, "one_sided").tolist() == [3, 0]
    assert coefficients(g, V, "no_gate").tolist() == [3, -2]
    assert coefficients(g, V, "reverse").tolist() == [6, -4]
    assert split(g, V, "one_sided")[0].tolist() == [0, -2, 5]
    assert split(g, V, "no_gate")[0].tolist() == [0, 0, 5]
    assert split(g, V, "reverse")[0].tolist() == [-3, 2, 5]
    assert split(g, V, "one_sided", 1.5)[0].tolist() == [-1.5, -2, 5]
    assert along(g, V).tolist() == [3, -2]


def test_hackward_cos_relus_before_it_aggregates():
    V = torch.eye(4)[:2]
    g = torch.tensor([3.0, -12.0, 4.0, 0.0])
    assert hackward_cos(g, V).item() == pytest.approx(3 / 13)  # ‖c‖/‖g‖ would be 0.95
    assert math.isnan(hackward_cos(torch.zeros(4), V).item())


def test_rescale_restores_the_norm_within_its_bound():
    grad = torch.tensor([3.0, 4.0])
    stretched, is_capped = rescale(grad, torch.tensor(10.0))
    assert stretched.tolist() == [6, 8]
    assert not is_capped
    stretched, is_capped = rescale(grad, torch.tensor(51.0))  # would be × 10.2
    assert stretched.norm().item() == pytest.approx(50)
    assert is_capped
    for norm in (1.0, 0.0):
        nothing_left, is_capped = rescale(torch.zeros(2), torch.tensor(norm))
        assert nothing_left.tolist() == [0, 0]
        assert bool(is_capped) == (norm > 0)


PAIR = spans_of({"a": 2, "b": 2, "c": 2, "d": 2})


def test_cos_pre_is_a_mean_over_modules_that_have_a_gradient_and_a_direction():
    V = {
        "a": torch.tensor([[1.0, 0.0]]),
        "b": torch.tensor([[1.0, 0.0]]),
        "c": torch.tensor([[0.0, 1.0]]),
    }
    g = torch.tensor([2.0, 0, 0, 0, 1, 0, 1, 1])
    assert cos_pre(g, V, PAIR) == pytest.approx(0.5)
    assert cos_pre(g, {}, PAIR) is None
    assert cos_pre(g, {"b": V["b"]}, PAIR) is None


# ── in a method, on plain tensors


def test_preserved_magnitude_and_its_bound():
    direction = toy_direction()
    V = direction.select(5, 0.25)
    assert V.keys() == SIZES.keys()
    hackward, noise = (
        torch.cat([of[m] for m in SIZES], 1)
        for of in (
            {m: 100 * axes[:1] for m, axes in V.items()},
            {m: 1e-3 * torch.randn(1, r, generator=draw(3)) for m, r in SIZES.items()},
        )
    )
    got = routed(toy("erase", direction), (torch.cat((hackward, noise)), group(2)))
    assert got.measured["capped"] == 3
    assert all(got.keep[s].norm() < 0.2 for s in SPANS.values()), (
        "else it would be 100 long, all of it noise"
    )
    plain = rows(6, 5, (0,))
    got = routed(toy("erase", direction), (plain, group(6)))
    assert got.measured["capped"] == 0
    for s in SPANS.values():
        assert got.keep[s].norm().item() == pytest.approx(plain.sum(0)[s].norm().item(), rel=1e-4)


@pytest.mark.parametrize("intervention", EVERY)
def test_order_of_modules_and_of_groups_does_not_matter(intervention):
    back, axes = dict(reversed(SIZES.items())), toy_direction().axes

    def turned(g):
        return torch.cat([g[..., SPANS[m]] for m in back], -1)

    forward = routed(toy(intervention), *TWO_GROUPS)
    method = toy(intervention, Direction({m: axes[m] for m in back}, META), sizes=back)
    backward = routed(method, *((turned(g_b), seen) for g_b, seen in reversed(TWO_GROUPS)))
    for one, other in ((forward.keep, backward.keep), (forward.quar, backward.quar)):
        assert one is other is None or torch.allclose(turned(one), other, atol=1e-6)
    for name in (
        "cos_pre",
        "cos_pre_s",
        "cos_pre_t",
        "cos_post",
        "tau",
        "hkgap",
        "resid",
        "routed",
    ):
        assert forward.measured.get(name) == pytest.approx(backward.measured.get(name), abs=1e-6)
    for i, flags in forward.flags.items():
        assert flags.scores == pytest.approx(backward.flags[i].scores)


def test_modules_without_a_direction_pass_through():
    empty = Direction(
        {m: axes_of(torch.ones(5, r), torch.ones(5, r), 3, 12, 0.0) for m, r in SIZES.items()}, META
    )
    method = toy("route", empty)
    assert method.direction.V == {}
    got, plain = routed(method, *TWO_GROUPS), routed(toy("none"), *TWO_GROUPS)
    assert plain.quar is None
    assert got.measured["cos_pre"] is None
    assert torch.equal(got.keep, plain.keep)
    assert not got.quar.any()
    lost = SPANS["m.up_proj"]
    some = Direction({m: a for m, a in toy_direction().axes.items() if m != "m.up_proj"}, META)
    for intervention in EVERY[1:]:
        by_module = {"gate_vote": "module"} if intervention == "route2" else {}
        kept = routed(toy(intervention, some, **by_module), *TWO_GROUPS).keep[lost]
        assert torch.allclose(kept, total(*TWO_GROUPS)[lost], atol=1e-6)


def test_a_broken_invariant_is_loud():
    method = toy("route")
    method.direction.V = {m: 2 * V for m, V in method.direction.V.items()}  # no longer orthonormal
    with pytest.raises(AssertionError, match=r"against"):
        routed(method, *TWO_GROUPS)


@pytest.mark.parametrize("intervention", ["erase", "route", "route2"])
def test_cosines_are_split_by_source(intervention):
    method = toy(intervention)
    students, teachers = rows(4, 1), rows(2, 2, (0, 1))
    both = torch.cat((students, teachers))
    diag = routed(method, (both, group(6, 2))).measured

    def want(g_b):
        sums = [(V, g_b.sum(0)[SPANS[m]]) for m, V in method.direction.V.items()]
        return pytest.approx(
            sum(((V @ g).relu().norm() / g.norm()).item() for V, g in sums) / len(sums), rel=1e-4
        )

    assert (diag["cos_pre"], diag["cos_pre_s"], diag["cos_pre_t"]) == (
        want(both),
        want(students),
        want(teachers),
    )
    assert diag["cos_pre_t"] > 2 * diag["cos_pre_s"]
    assert diag["fired"] == 1
    assert routed(toy(intervention), (rows(4, 3), group(4))).measured["cos_pre_t"] is None
    if intervention == "route2":  # teacher rows are known hacks: nothing of them is kept
        assert diag["cos_post_t"] is None
        assert diag["cos_post_s"] == pytest.approx(diag["cos_post"], abs=1e-6)
    else:
        assert max(diag["cos_post_s"], diag["cos_post_t"]) < 1e-4
