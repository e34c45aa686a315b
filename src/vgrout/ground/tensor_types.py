"""Shared data types that hold tensors.

Index letters: N rows of a step's gradient, k directions of a module, r singular values of a module, R all of the
adapter's; a module is a slice of R.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.ground.data import Flags

# orthonormal rows, oriented hack-ward; k = 1 for v_grad. "_": k and r are not the same in every
# module
Directions = dict[str, Float[Tensor, "_k _r"]]
Gradient = Float[Tensor, " R"]
Spans = Mapping[str, slice]  # module → its part of R, in the model's order


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True, slots=True)
class Routed:
    """What the two adapter vectors learn in an update: keep → δS, quar → δS_hack. None: that one is not stepped."""

    keep: Gradient | None = None
    quar: Gradient | None = None
    # what the method measured, by the table's column (`StepRow`)
    measured: Mapping[str, float | None] = field(default_factory=dict)
    # by `Group.index`: as they were acted on
    flags: Mapping[int, Flags] = field(default_factory=dict)
    directions: Directions | None = None  # for cos_upd, measured after the optimiser
    finite: bool = True  # False: the gradient was not, and nothing may be learnt from it
