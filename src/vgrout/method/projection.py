"""Gradient surgery along orthonormal, hack-ward oriented rows V: pure functions of one module's tensors, and their
means and invariants over all modules.

Signs: g is a gradient of the *loss*, V points where the loss of a hack-rewarding batch changes. So a positive
coefficient c = V g means that a step along -g makes the hack likelier.

Products are written as multiply-and-sum: a matmul may run in TF32 when a caller allows it, and its error of 1e-3
would break the invariants that interventions assert.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.tensor_types import Directions, Spans

GateMode = Literal["one_sided", "no_gate", "reverse"]
# of the invariants, relative to the norms that went in: fp32 sums of some hundred rows
TOLERANCE = 1e-4
# a gradient that is nearly all hack-ward leaves noise behind: never blow it up further
RESCALE_BOUND = 10.0


class Divided(NamedTuple):
    """keep + removed = g, up to rounding."""

    keep: Float[Tensor, "*n r"]
    removed: Float[Tensor, "*n r"]


class Rescaled(NamedTuple):
    grad: Float[Tensor, " r"]
    capped: Bool[Tensor, ""]


def along(g: Float[Tensor, "*n r"], V: Float[Tensor, "k r"]) -> Float[Tensor, "*n k"]:
    """c = V g."""
    return (V * g[..., None, :]).sum(-1)


def coefficients(
    g: Float[Tensor, "*n r"], V: Float[Tensor, "k r"], mode: GateMode = "one_sided"
) -> Float[Tensor, "*n k"]:
    """What is taken along each axis: relu(c) (one_sided), c (no_gate) or 2c (reverse: the part changes sign)."""
    c = along(g, V)
    if mode == "one_sided":
        return c.relu()
    if mode == "reverse":
        return 2 * c
    return c


def split(
    g: Float[Tensor, "*n r"],
    V: Float[Tensor, "k r"],
    mode: GateMode = "one_sided",
    overshoot: float = 1.0,
) -> Divided:
    """g into what is kept and the part overshoot · c_use V, which lies in span(V)."""
    c = coefficients(g, V, mode)
    removed = overshoot * (c[..., None] * V).sum(-2)
    return Divided(g - removed, removed)


def rescale(grad: Float[Tensor, " r"], norm: Float[Tensor, ""]) -> Rescaled:
    """`grad` stretched to length `norm`, by at most RESCALE_BOUND; a zero vector stays zero and counts as capped."""
    ratio = norm / grad.norm()
    capped = ~(ratio <= RESCALE_BOUND) & (norm > 0)  # written so that 0/0 and x/0 are caught
    factor = torch.where(capped, RESCALE_BOUND, torch.where(norm > 0, ratio, 1.0))
    return Rescaled(grad * factor, capped)


def hackward_cos(g: Float[Tensor, " r"], V: Float[Tensor, "k r"]) -> Float[Tensor, ""]:
    """‖relu(V g)‖ / ‖g‖, with relu before aggregating; NaN where g is zero. A random g has about √(k/2r)."""
    return along(g, V).relu().norm() / g.norm()


def mean_over_modules(values: Sequence[Float[Tensor, ""]]) -> float | None:
    """Mean of the measured ones (NaN: a module without gradient); None where nothing was measured."""
    if not values:
        return None
    mean = torch.stack([*values]).nanmean().item()
    return None if mean != mean else mean


def cos_pre(g: Float[Tensor, " R"], V: Directions, spans: Spans) -> float | None:
    """Mean over modules with a direction and a gradient of ‖relu(V g)‖ / ‖g‖; None where there is none."""
    cosines: list[Tensor] = []
    for module, rows in V.items():
        cosines.append(hackward_cos(g[spans[module]], rows))
    return mean_over_modules(cosines)


def cos_upd(delta: Float[Tensor, " R"], V: Directions, spans: Spans) -> float | None:
    """The same for the parameter change Δ that the optimiser applied: ‖relu(-V Δ)‖ / ‖Δ‖.

    A step goes against the gradient, so the hack-ward part of a change has the opposite sign. Near 0, unless AdamW's
    preconditioner and momentum carry back what was taken from the gradient.
    """
    return cos_pre(-delta, V, spans)


def fraction_of_modules(flags: Sequence[Tensor]) -> float | None:
    """In which something was taken; None of no module."""
    if not flags:
        return None
    return torch.stack([*flags]).float().mean().item()


def module_norms(x: Float[Tensor, "*n R"], spans: Spans) -> Float[Tensor, "*n M"]:
    """‖x‖ in each module."""
    norms = [x[..., span].norm(dim=-1) for span in spans.values()]
    return torch.stack(norms, dim=-1)


def assert_conserved(
    g: Float[Tensor, " R"],
    keep: Float[Tensor, " R"],
    quar: Float[Tensor, " R"],
    scale: Float[Tensor, " M"],
    spans: Spans,
) -> None:
    """keep + quar = g in every module, relative to `scale`, Σ_b ‖g_b‖: rows may cancel in the sum."""
    _assert_small(module_norms(keep + quar - g, spans), scale, "keep + quar - g")


def assert_in_span(quar: Float[Tensor, " R"], V: Directions, spans: Spans) -> None:
    """What is routed lies in span(V)."""
    outside: list[Tensor] = []
    norms: list[Tensor] = []
    for module, rows in V.items():
        of_module = quar[spans[module]]
        inside = (along(of_module, rows)[:, None] * rows).sum(0)
        outside.append((of_module - inside).norm())
        norms.append(of_module.norm())
    _assert_small(_stacked(outside), _stacked(norms), "quarantine outside span(V)")


def assert_no_hackward(
    g: Float[Tensor, " R"], keep: Float[Tensor, " R"], V: Directions, spans: Spans
) -> None:
    """V · keep ≤ 0."""
    hackward: list[Tensor] = []
    norms: list[Tensor] = []
    for module, rows in V.items():
        span = spans[module]
        hackward.append(along(keep[span], rows).max().relu())
        norms.append(g[span].norm())
    _assert_small(_stacked(hackward), _stacked(norms), "V·keep above 0")


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values) if values else torch.zeros(0)


def _assert_small(error: Float[Tensor, " M"], scale: Float[Tensor, " M"], what: str) -> None:
    """error ≤ TOLERANCE · scale in each module; one transfer from the device for all."""
    pairs: list[list[float]] = torch.stack((error, scale)).T.tolist()

    def excess(pair: list[float]) -> float:
        of_module, norm = pair
        return of_module - TOLERANCE * norm

    worst, norm = max(pairs, key=excess, default=[0.0, 0.0])
    assert worst <= TOLERANCE * norm, f"{what}: {worst:.3e} against {norm:.3e}"
