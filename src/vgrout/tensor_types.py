"""Shared data types that hold tensors.

Index letters: k directions of a module, r singular values of a module, G rollouts of a group, R all of the adapter's.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from vgrout.types import Flags, Group

# module name → gradient rows of one group (see GradRows); the dict's order is the model's order
RolloutGrads = dict[str, Float[Tensor, "G r"]]
ModuleGrads = dict[str, Float[Tensor, " r"]]
# orthonormal rows, oriented hack-ward; k = 1 for v_grad. "_": k and r are not the same in every module
Directions = dict[str, Float[Tensor, "_k _r"]]

# what one row of a group's gradient is: a rollout; the students' sum, then the teachers'; the group's sum
GradRows = Literal["rollout", "source", "group"]
Packing = Literal["shared", "packed", "padded"]  # of rollouts in one forward of the update


Learns = Literal["kept", "quarantine", "both"]


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """What one forward and backward learn from: of every group these rows, with these advantages (one for each rollout
    of the group), under the deployed model or with the quarantine on. None: all rows, the group's own advantages."""

    rows: tuple[tuple[int, ...], ...] | None = None
    advantages: tuple[tuple[float, ...], ...] | None = None
    deployed: bool = False
    learns: Learns | None = None  # the vectors that get its gradient; None: the method says so once it has the gradient


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What a step learns from, decided before any gradient."""

    groups: tuple[Group, ...] = ()
    parts: tuple[UpdatePart, ...] = (UpdatePart(),)  # one for each set of rows that is learnt from in its own way
    step: int = 0
    unit: bool = False  # every row's gradient at advantage 1: its advantage is known, and multiplied in, afterwards


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
    resid: float | None = None  # gate, band: cosine of what is kept with v
    routed: float | None = None  # share of rollouts · modules sent to the quarantine

    def columns(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Routed:
    """What the two adapter vectors learn this step: keep → δS, quar → δS_hack. None: that one is not stepped."""

    keep: ModuleGrads | None
    quar: ModuleGrads | None = None
    diag: Diagnostics = field(default_factory=Diagnostics)
    flags: Flags = field(default_factory=dict)  # as they were acted on
    directions: Directions | None = None  # for cos_upd, measured after the optimiser
    scale: float = 1.0  # the optimiser multiplies δS's change by this (shrinkage control; AdamW undoes a scaled g)
    apart: bool = False  # each vector clipped by its own norm: they learn from different rollouts

    @property
    def idle(self) -> bool:
        """Whether nothing is learnt."""
        return self.keep is None and self.quar is None


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimiser did. `delta` is the change that AdamW applied to δS, weight decay included."""

    gn: float  # joint L2 norm of both gradients before clipping
    gn_keep: float
    gn_quar: float
    lr: float
    delta: ModuleGrads
    routed: Routed | None = None  # what was learnt; None: a trainable without a quarantine (distillation)
    cos_upd: float | None = None  # hack-ward cosine of `delta`
    realised: float | None = None  # share of what both vectors ask for that is in the weights; None: not measured

    @property
    def q_egy(self) -> float:
        """Share of gradient norm in the quarantine."""
        total = self.gn_keep + self.gn_quar
        return self.gn_quar / total if total else 0.0

    def columns(self) -> dict[str, Any]:
        """The method's and the update's columns of the step's row."""
        routed = self.routed
        return (routed.diag.columns() if routed else {}) | {
            "gn": self.gn,
            "lr": self.lr,
            "q_egy": self.q_egy if routed and routed.quar is not None else None,
            "cos_upd": self.cos_upd,
            "realised": self.realised,
        }
