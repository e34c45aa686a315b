"""Gradient surgery along orthonormal, hack-ward oriented rows V: pure functions of one module's tensors.

Signs: g is a gradient of the *loss*, V points where the loss of a hack-rewarding batch changes. So a positive
coefficient c = V g means that a step along -g makes the hack likelier.

Products are written as multiply-and-sum: a matmul may run in TF32 when a caller allows it, and its error of 1e-3
would break the invariants that interventions assert.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.tensor_types import Directions, ModuleGrads

GateMode = Literal["one_sided", "no_gate", "reverse"]
TOLERANCE = 1e-4  # of the invariants, relative to the norms that went in: fp32 sums of some hundred rows
RESCALE_BOUND = 10.0  # a gradient that is nearly all hack-ward leaves noise behind: never blow it up further


class Split(NamedTuple):
    """keep + removed = g, up to rounding."""

    keep: Float[Tensor, " r"]
    removed: Float[Tensor, " r"]


class Rescaled(NamedTuple):
    grad: Float[Tensor, " r"]
    capped: Bool[Tensor, ""]


def along(g: Float[Tensor, " r"], V: Float[Tensor, "k r"]) -> Float[Tensor, " k"]:
    """c = V g."""
    return (V * g).sum(1)


def coefficients(g: Float[Tensor, " r"], V: Float[Tensor, "k r"], mode: GateMode = "one_sided") -> Float[Tensor, " k"]:
    """What is taken along each axis: relu(c) (one_sided), c (no_gate) or 2c (reverse: the part changes sign)."""
    c = along(g, V)
    if mode == "one_sided":
        return c.relu()
    return c if mode == "no_gate" else 2 * c


def split(
    g: Float[Tensor, " r"], V: Float[Tensor, "k r"], mode: GateMode = "one_sided", overshoot: float = 1.0
) -> Split:
    """g into what is kept and the part overshoot · c_use V, which lies in span(V)."""
    removed = overshoot * (coefficients(g, V, mode)[:, None] * V).sum(0)
    return Split(g - removed, removed)


def rescale(grad: Float[Tensor, " r"], norm: Float[Tensor, ""]) -> Rescaled:
    """`grad` stretched to length `norm`, by at most RESCALE_BOUND; a zero vector stays zero and counts as capped."""
    ratio = norm / grad.norm()
    capped = ~(ratio <= RESCALE_BOUND) & (norm > 0)  # written so that 0/0 and x/0 are caught
    factor = torch.where(capped, RESCALE_BOUND, torch.where(norm > 0, ratio, 1.0))
    return Rescaled(grad * factor, capped)


def hackward_cos(g: Float[Tensor, " r"], V: Float[Tensor, "k r"]) -> Float[Tensor, ""]:
    """‖relu(V g)‖ / ‖g‖, with relu before aggregating; NaN where g is zero. A random g has about √(k/2r)."""
    return along(g, V).relu().norm() / g.norm()


def mean_over_modules(values: list[Float[Tensor, ""]]) -> float | None:
    """Mean of the measured ones (NaN: a module without gradient); None where nothing was measured."""
    if not values:
        return None
    mean = torch.stack(values).nanmean().item()
    return None if mean != mean else mean


def cos_pre(grads: ModuleGrads, V: Directions) -> float | None:
    """Mean over modules with a direction and a gradient of ‖relu(V g)‖ / ‖g‖; None where there is none."""
    return mean_over_modules([hackward_cos(grads[m], V_m) for m, V_m in V.items() if m in grads])


def cos_upd(delta: ModuleGrads, V: Directions) -> float | None:
    """The same for the parameter change Δ that the optimiser applied: ‖relu(-V Δ)‖ / ‖Δ‖.

    A step goes against the gradient, so the hack-ward part of a change has the opposite sign. Near 0, unless AdamW's
    preconditioner and momentum carry back what was taken from the gradient.
    """
    return cos_pre({m: -d for m, d in delta.items()}, V)


def fraction_of_modules(flags: list[Tensor]) -> float | None:
    """In which something was taken; None of no module."""
    return torch.stack(flags).float().mean().item() if flags else None


def assert_conserved(g: ModuleGrads, keep: ModuleGrads, quar: ModuleGrads, scale: Mapping[str, Tensor]) -> None:
    """keep + quar = g in every module of `scale`, which holds Σ_b ‖g_b‖: rows may cancel in the sum."""
    for_each = [((keep[m] + quar[m] - g[m]).norm(), s) for m, s in scale.items()]
    _assert_small(for_each, "keep + quar - g")


def assert_in_span(quar: ModuleGrads, V: Directions) -> None:
    """What is routed lies in span(V)."""
    for_each = [
        ((quar[m] - (along(quar[m], rows)[:, None] * rows).sum(0)).norm(), quar[m].norm()) for m, rows in V.items()
    ]
    _assert_small(for_each, "quarantine outside span(V)")


def assert_no_hackward(g: ModuleGrads, keep: ModuleGrads, V: Directions) -> None:
    """V · keep ≤ 0."""
    for_each = [(along(keep[m], rows).max().relu(), g[m].norm()) for m, rows in V.items()]
    _assert_small(for_each, "V·keep above 0")


def _assert_small(errors: list[tuple[Tensor, Tensor]], what: str) -> None:
    """error ≤ TOLERANCE · scale for each pair; one transfer from the device for all."""
    if not errors:
        return
    error, scale = torch.stack([torch.stack(pair) for pair in errors]).T.tolist()
    worst = max(range(len(error)), key=lambda i: error[i] - TOLERANCE * scale[i])
    assert error[worst] <= TOLERANCE * scale[worst], f"{what}: {error[worst]:.3e} against {scale[worst]:.3e}"
