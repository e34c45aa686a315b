"""Shared data types that hold tensors.

Index letters: N rows of a step's gradient, k directions of a module, r singular values of a module, R all of the
adapter's; a module is a slice of R.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

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
class Diagnostics:
    """What a method measured in this step. None: it does not measure this."""

    cos_pre: float | None = None  # mean over modules of ‖relu(Vg)‖ / ‖g‖
    cos_pre_s: float | None = None  # … of the student rows' g alone
    cos_pre_t: float | None = None
    cos_post: float | None = None  # … of what δS learns
    cos_post_s: float | None = None  # … of what the student rows alone would leave there
    cos_post_t: float | None = None
    fired: float | None = None  # share of modules where something was removed or routed
    capped: int | None = None  # modules whose magnitude rescaling hit its bound
    tau: float | None = None  # gate: mean threshold over modules
    hkgap: float | None = None  # gate: mean(cos of known hacks) − mean(cos of the rest)
    voting: float | None = None  # gate: share of modules with a threshold
    resid: float | None = None  # gate, band: cosine of what is kept with v
    routed: float | None = (
        None  # of rollouts · modules with a gradient: share sent to the quarantine
    )

    def columns(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Routed:
    """What the two adapter vectors learn in an update: keep → δS, quar → δS_hack. None: that one is not stepped."""

    keep: Gradient | None = None
    quar: Gradient | None = None
    diag: Diagnostics = field(default_factory=Diagnostics)
    # by `Group.index`: as they were acted on
    flags: Mapping[int, Flags] = field(default_factory=dict)
    directions: Directions | None = None  # for cos_upd, measured after the optimiser
    finite: bool = True  # False: the gradient was not, and nothing may be learnt from it
