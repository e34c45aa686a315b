"""The nouns that hold tensors."""

from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float
from torch import Tensor

# module name → one gradient row per rollout; the dict's order is the model's order
RolloutGrads = dict[str, Float[Tensor, "G r"]]
ModuleGrads = dict[str, Float[Tensor, " r"]]
Directions = dict[str, Float[Tensor, "k r"]]  # orthonormal rows, oriented hack-ward; k = 1 for v_grad

# what one row of a group's gradient is: a rollout; the students' sum, then the teachers'; the group's sum
Per = Literal["rollout", "source", "group"]
Layout = Literal["shared", "packed", "padded"]  # of rollouts in one forward of the update


@dataclass(frozen=True, slots=True)
class Stream:
    """What one forward and backward learn from: of every group these rows, with these advantages (one for each rollout
    of the group), under the deployed model or under both knobs. None: all rows, the group's own advantages."""

    rows: tuple[tuple[int, ...], ...] | None = None
    advantages: tuple[tuple[float, ...], ...] | None = None
    deployed: bool = False


WHOLE = (Stream(),)  # one policy, all rows


@dataclass(frozen=True, slots=True)
class Reading:
    """What a gate that reads text made of one group's rollouts, in their order."""

    scores: tuple[float | None, ...]  # None: not read; only what is paid can be flagged
    flagged: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ArmDiag:
    """What an arm saw this step. None: this arm does not measure it."""

    cos_pre: float | None = None  # mean over modules of ‖relu(Vg)‖ / ‖g‖
    cos_pre_s: float | None = None  # … of the student rows' g alone
    cos_pre_t: float | None = None
    cos_post: float | None = None  # … of what δS learns
    cos_post_s: float | None = None  # … of what the student rows alone would leave there
    cos_post_t: float | None = None
    fired: float | None = None  # share of modules where something was removed or routed
    rescale_capped: int | None = None  # modules whose magnitude rescaling hit its bound
    tau: float | None = None  # route2: mean threshold over modules
    hkgap: float | None = None  # route2: mean(cos of anchors) − mean(cos of the rest)
    resid: float | None = None  # route2: cosine of what is kept with v
    routed_share: float | None = None  # route2: share of rollouts · modules sent to the quarantine
    # route2: per observed group, the share of modules (or soft weight) that routed each rollout; reporting only
    gate: tuple[tuple[float, ...], ...] = field(default=())
    readings: tuple[Reading, ...] = field(default=())  # reader, surprise: one per observed group; reporting only


@dataclass(frozen=True, slots=True)
class Routed:
    """What the two knobs learn this step: keep → δS, quar → δS_hack. None: that knob is not stepped."""

    keep: ModuleGrads | None
    quar: ModuleGrads | None
    diag: ArmDiag
    directions: Directions | None = None  # for cos_upd, measured after the optimiser
    scale: float = 1.0  # the optimiser multiplies δS's change by this (shrinkage control; AdamW undoes a scaled g)
    apart: bool = False  # each knob clipped by its own norm: they learn from different rollouts


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimiser did. `delta` is the change that AdamW applied to δS, weight decay included."""

    gn: float  # joint L2 norm of both knobs' gradients before clipping
    gn_keep: float
    gn_quar: float
    lr: float
    delta: ModuleGrads

    @property
    def q_egy(self) -> float:
        """Share of gradient norm in the quarantine."""
        total = self.gn_keep + self.gn_quar
        return self.gn_quar / total if total else 0.0
