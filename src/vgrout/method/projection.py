"""Gradient surgery along orthonormal, hack-ward oriented rows V.

Pure functions of one module's tensors, then means and invariants over all modules. Shapes: k rows of V, r singular
values of a module, R of all modules; "*n" stands for any axes before (none, or rows of gradients).

Signs: g is a gradient of the *loss*, V points where the loss of a hack-rewarding batch changes. So a positive
coefficient c = V g means that a step along -g makes the hack likelier.

Products are written as multiply-and-sum: a matmul may run in TF32 when a caller allows it, and its error of 1e-3
would break the invariants that interventions assert.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.ground.tensor_types import Directions, Gradient, Spans

GateMode = Literal["one_sided", "no_gate", "reverse"]
# of the invariants, relative to the norms that went in: fp32 sums of some hundred rows
TOLERANCE = 1e-4
# a gradient that is nearly all hack-ward leaves noise behind: never blow it up further
RESCALE_BOUND = 10.0

Scalar = Float[Tensor, ""]
OfModule = Float[Tensor, " r"]  # one module's part of a gradient
OfModules = Float[Tensor, "*n r"]  # … of several gradients
Rows = Float[Tensor, "k r"]  # V of one module
Coefficients = Float[Tensor, "*n k"]
Norms = Float[Tensor, " M"]  # one a module


def along(g: OfModules, V: Rows) -> Coefficients:
    """c = V g."""
    g = g[..., None, :]  # [*n, 1, r]
    products = V * g  # [*n, k, r]
    return products.sum(-1)


def coefficients(g: OfModules, V: Rows, mode: GateMode = "one_sided") -> Coefficients:
    """c_use, what is taken along each axis: relu(c) (one_sided), c (no_gate) or 2c (reverse: the part changes sign)."""
    c = along(g, V)
    if mode == "one_sided":
        return c.relu()
    if mode == "reverse":
        return 2 * c
    return c


def split(
    g: OfModules,
    V: Rows,
    mode: GateMode = "one_sided",
    overshoot: float = 1.0,
) -> tuple[OfModules, OfModules]:
    """What is kept of g, and what is removed: overshoot · c_use V, which lies in span(V). Both add up to g."""
    c = coefficients(g, V, mode)
    parts = c[..., None] * V  # [*n, k, r]
    removed = overshoot * parts.sum(-2)
    return g - removed, removed


def rescale(grad: OfModule, norm: Scalar) -> tuple[OfModule, Bool[Tensor, ""]]:
    """Stretch `grad` to length `norm`, by at most RESCALE_BOUND; a zero vector stays zero and counts as capped.

    Returns the stretched gradient, and whether the bound was hit.
    """
    ratio = norm / grad.norm()
    within = ratio <= RESCALE_BOUND  # False for x/0 and 0/0
    capped = ~within & (norm > 0)
    uncapped = torch.where(norm > 0, ratio, 1.0)
    factor = torch.where(capped, RESCALE_BOUND, uncapped)
    return grad * factor, capped


def hackward_cos(g: OfModule, V: Rows) -> Scalar:
    """‖relu(V g)‖ / ‖g‖, with relu before aggregating; NaN where g is zero. A random g has about √(k/2r)."""
    hackward = along(g, V).relu()
    return hackward.norm() / g.norm()


def mean_over_modules(values: Sequence[Scalar]) -> float | None:
    """Mean of the measured ones (NaN: a module without gradient); None where nothing was measured."""
    if not values:
        return None
    of_modules = torch.stack([*values])
    mean = of_modules.nanmean().item()
    return None if math.isnan(mean) else mean


def cos_pre(g: Gradient, V: Directions, spans: Spans) -> float | None:
    """Mean over modules with a direction and a gradient of ‖relu(V g)‖ / ‖g‖; None where there is none."""
    cosines: list[Tensor] = []
    for module, rows in V.items():
        of_module = g[spans[module]]
        cosines.append(hackward_cos(of_module, rows))
    return mean_over_modules(cosines)


def cos_upd(delta: Gradient, V: Directions, spans: Spans) -> float | None:
    """The same for the parameter change Δ that the optimiser applied: ‖relu(-V Δ)‖ / ‖Δ‖.

    A step goes against the gradient, so the hack-ward part of a change has the opposite sign. Near 0, unless AdamW's
    preconditioner and momentum carry back what was taken from the gradient.
    """
    return cos_pre(-delta, V, spans)


def fraction_of_modules(flags: Sequence[Tensor]) -> float | None:
    """Share of modules whose flag is set; None where there is no module."""
    if not flags:
        return None
    every = torch.stack([*flags])
    return every.float().mean().item()


def module_norms(x: Float[Tensor, "*n R"], spans: Spans) -> Float[Tensor, "*n M"]:
    """‖x‖ in each module."""
    norms: list[Tensor] = []
    for span in spans.values():
        of_module = x[..., span]
        norms.append(of_module.norm(dim=-1))
    return torch.stack(norms, dim=-1)


def assert_conserved(
    g: Gradient,
    keep: Gradient,
    quar: Gradient,
    scale: Norms,
    spans: Spans,
) -> None:
    """Assert keep + quar = g in every module, relative to `scale`, Σ_b ‖g_b‖: rows may cancel in the sum."""
    error = keep + quar - g
    _assert_small(module_norms(error, spans), scale, "keep + quar - g")


def assert_in_span(quar: Gradient, V: Directions, spans: Spans) -> None:
    """Assert that what is routed lies in span(V)."""
    outside: list[Tensor] = []
    norms: list[Tensor] = []
    for module, rows in V.items():
        of_module = quar[spans[module]]
        c = along(of_module, rows)
        inside = (c[:, None] * rows).sum(0)
        outside.append((of_module - inside).norm())
        norms.append(of_module.norm())
    _assert_small(_stacked(outside), _stacked(norms), "quarantine outside span(V)")


def assert_no_hackward(
    g: Gradient,
    keep: Gradient,
    V: Directions,
    spans: Spans,
) -> None:
    """Assert V · keep ≤ 0, relative to ‖g‖."""
    hackward: list[Tensor] = []
    norms: list[Tensor] = []
    for module, rows in V.items():
        span = spans[module]
        c = along(keep[span], rows)
        hackward.append(c.max().relu())
        norms.append(g[span].norm())
    _assert_small(_stacked(hackward), _stacked(norms), "V·keep above 0")


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values) if values else torch.zeros(0)


def _assert_small(error: Norms, scale: Norms, what: str) -> None:
    """Assert error ≤ TOLERANCE · scale in each module; one transfer from the device for all."""
    both = torch.stack((error, scale))
    errors, norms = both.tolist()
    for of_module, norm in zip(errors, norms, strict=True):
        assert of_module <= TOLERANCE * norm, f"{what}: {of_module:.3e} against {norm:.3e}"
