"""Gradient surgery against definitions written out here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from vgrout.arms.projection import along, coefficients, cos_pre, cos_upd, hackward_cos, rescale, split


def orthonormal(k: int, r: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(r, k, generator=generator, dtype=torch.float64))[0].T.float().contiguous()


def vector(r: int, seed: int) -> torch.Tensor:
    return torch.randn(r, generator=torch.Generator().manual_seed(seed))


shapes = st.tuples(st.integers(1, 6), st.integers(8, 40), st.integers(0, 10_000))


@given(shapes, st.sampled_from(["one_sided", "no_gate", "reverse"]), st.floats(0, 3))
@settings(deadline=None, max_examples=60)
def test_split_adds_up_and_takes_from_the_span_only(shape, mode, overshoot):
    k, r, seed = shape
    V, g = orthonormal(k, r, seed), vector(r, seed + 1)
    keep, removed = split(g, V, mode, overshoot)
    assert torch.allclose(keep + removed, g, atol=1e-6)
    outside = removed - V.T @ (V @ removed)
    assert outside.norm() <= 1e-6 * (g.norm() + removed.norm())  # `reverse` with overshoot 3 removes up to 6 g


@given(shapes, st.floats(1, 3))
@settings(deadline=None, max_examples=60)
def test_nothing_hackward_is_left_after_one_sided(shape, overshoot):
    k, r, seed = shape
    V, g = orthonormal(k, r, seed), vector(r, seed + 1)
    assert (V @ split(g, V, "one_sided", overshoot).keep).max() <= 1e-6 * g.norm()


def test_modes_on_a_hand_made_gradient():
    V = torch.eye(3)[:2]
    g = torch.tensor([3.0, -2.0, 5.0])
    assert coefficients(g, V, "one_sided").tolist() == [3, 0]
    assert coefficients(g, V, "no_gate").tolist() == [3, -2]
    assert coefficients(g, V, "reverse").tolist() == [6, -4]
    assert split(g, V, "one_sided").keep.tolist() == [0, -2, 5]
    assert split(g, V, "no_gate").keep.tolist() == [0, 0, 5]
    assert split(g, V, "reverse").keep.tolist() == [-3, 2, 5]
    assert split(g, V, "one_sided", 1.5).keep.tolist() == [-1.5, -2, 5]
    assert along(g, V).tolist() == [3, -2]


def test_hackward_cos_relus_before_it_aggregates():
    V = torch.eye(4)[:2]
    g = torch.tensor([3.0, -12.0, 4.0, 0.0])
    assert hackward_cos(g, V).item() == pytest.approx(3 / 13)  # ‖c‖/‖g‖ would be .95
    assert math.isnan(hackward_cos(torch.zeros(4), V).item())


def test_rescale_restores_the_norm_within_its_bound():
    grad = torch.tensor([3.0, 4.0])
    ok = rescale(grad, torch.tensor(10.0))
    assert ok.grad.tolist() == [6, 8]
    assert not ok.capped
    capped = rescale(grad, torch.tensor(51.0))  # would be × 10.2
    assert capped.grad.norm().item() == pytest.approx(50)
    assert capped.capped
    gone = rescale(torch.zeros(2), torch.tensor(1.0))
    assert gone.grad.tolist() == [0, 0]
    assert gone.capped
    nothing = rescale(torch.zeros(2), torch.tensor(0.0))
    assert nothing.grad.tolist() == [0, 0]
    assert not nothing.capped


def test_cos_pre_is_a_mean_over_modules_that_have_a_gradient_and_a_direction():
    V = {"a": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([[1.0, 0.0]]), "c": torch.tensor([[0.0, 1.0]])}
    grads = {"a": torch.tensor([2.0, 0.0]), "b": torch.zeros(2), "c": torch.tensor([1.0, 0.0]), "d": torch.ones(2)}
    assert cos_pre(grads, V) == pytest.approx(0.5)
    assert cos_pre(grads, {}) is None
    assert cos_pre({"b": torch.zeros(2)}, V) is None


def test_cos_upd_calls_a_step_against_the_hackward_gradient_hackward():
    V = {"a": torch.tensor([[1.0, 0.0]])}
    g = {"a": torch.tensor([2.0, 0.0])}
    assert cos_pre(g, V) == 1
    assert cos_upd({"a": -0.1 * g["a"]}, V) == 1
    assert cos_upd({"a": 0.1 * g["a"]}, V) == 0


def test_random_gradients_read_about_root_k_over_2r():
    V = {"a": orthonormal(5, 500)}
    read = [hackward_cos(vector(500, seed), V["a"]).item() for seed in range(200)]
    assert sum(read) / 200 == pytest.approx(math.sqrt(5 / 1000), rel=0.1)


def test_canary_a_wrong_shape_is_caught():
    with pytest.raises(TypeCheckError):
        along(torch.zeros(3), torch.zeros(2, 4))
