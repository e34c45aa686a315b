"""Settings of the policy-gradient loss, torch-free; each formula is in `vgrout.losses`."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro

from vgrout.config.checks import changed, check, refuse_unread, setting, summary
from vgrout.errors import refuse

T = TypeVar("T")


@dataclass(frozen=True)
class LossSpec:
    """One loss: its line in help, the usual bounds of its ratio, what it is divided by."""

    what: str
    low: float = 0.0  # --clip-low where none is given; 0: no lower bound
    high: float = math.inf  # --clip-high likewise; ∞: no upper bound
    # bounded is the ratio to the sampler; else π/π_old, 1 in a batch's first update
    of_sampler: bool = False
    by_step: bool = False  # divided by the step's tokens


LOSSES: dict[str, LossSpec] = {
    "grpo": LossSpec("ratio clipped at 1 ± ε", low=0.2, high=0.2),
    "dppo_tv": LossSpec(
        "tokens whose probability moved too far are dropped", of_sampler=True, by_step=True
    ),
    "icepop": LossSpec(
        "tokens whose ratio to the sampler is out of range are dropped",
        low=0.2,
        high=5.0,
        of_sampler=True,
        by_step=True,
    ),
}
if TYPE_CHECKING:  # a checker cannot read a Literal made from a registry
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]


def _not_negative(default: T) -> T:
    return setting(default, low=0, below=math.inf, should="be 0 or more and finite")


@dataclass(frozen=True)
class LossConfig:
    """The policy-gradient loss.

    Raises:
        Refused: a value outside its range, or two that contradict each other.
    """

    loss: Annotated[
        LossName, tyro.conf.arg(help=summary({name: spec.what for name, spec in LOSSES.items()}))
    ] = "grpo"
    beta: float = _not_negative(0.0)
    """Weight of the KL (K3) to the adapter at zero."""
    kl_bias_correction: bool = setting(False, needs="beta")
    """Times the ratio to π_old, which makes the KL's gradient that of KL(π ‖ reference); without it, it is that of
    KL(reference ‖ π), as in GRPO as published (docs/method.md)."""
    unbiased: bool = True
    """Dr. GRPO: no division by the group's std, constant normaliser G · max_new · P."""
    ratio_support: Literal["full", "sampled"] = "full"
    """Ratios on the full softmax at temperature 1, or on the truncated distribution that was sampled from."""
    updates_per_batch: int = setting(1, low=1, high=1000)
    """Optimiser updates on each batch of rollouts, all of them on the whole batch (PPO's epochs), at the step's
    learning rate. Ratios are to the policy before the first, which is therefore never clipped."""
    clip_low: float | None = _not_negative(None)
    """ε_low, from --updates-per-batch 2 on: grpo: ratios below 1 − ε_low count no more; icepop, with one update too:
    smallest ratio to the sampler that still counts; none: the loss's own."""
    clip_high: float | None = setting(None, above=0)
    """ε_high, likewise: ratios above 1 + ε_high; icepop: the largest ratio itself."""
    dppo_diff_low: float = _not_negative(0.2)
    """dppo_tv: tokens whose probability fell by more than this since sampling are dropped."""
    dppo_diff_high: float = _not_negative(0.2)
    """dppo_tv: tokens whose probability rose by more than this since sampling are dropped."""
    adv_tau: float = setting(1.0, above=0, below=math.inf)
    """Scale of the advantages, which weighs them against --beta and --teacher-tau. By itself it changes next to
    nothing, since AdamW's steps do not depend on the gradient's scale."""
    teacher_tau: float = _not_negative(0.0)
    """Adds τ · (teacher log-prob − log-prob), detached, to each token's advantage; needs --teacher-model."""
    teacher_model: str = ""
    """Model behind --teacher-tau: a folder or hub id with this run's tokenizer, or 'organism'."""

    @property
    def low(self) -> float:
        """The ratio's lower bound: as given, else the loss's own."""
        return LOSSES[self.loss].low if self.clip_low is None else self.clip_low

    @property
    def high(self) -> float:
        """The ratio's upper bound: as given, else the loss's own."""
        return LOSSES[self.loss].high if self.clip_high is None else self.clip_high

    @property
    def drops(self) -> bool:
        """Whether a token can lose its gradient: by its ratio to the sampler, or, from a batch's second update on, to
        π_old."""
        spec = LOSSES[self.loss]
        return spec.of_sampler or (self.updates_per_batch > 1 and spec.low > 0)

    @property
    def learns_at_zero_advantage(self) -> bool:
        """Whether an answer has a gradient even if its advantage is 0, by the KL or by the teacher."""
        return self.beta > 0 or self.teacher_tau > 0

    def __post_init__(self) -> None:
        check(self)
        spec = LOSSES[self.loss]
        unclipped = self.updates_per_batch == 1 and not spec.of_sampler
        idle = {
            "clip_low": not spec.low or unclipped,
            "clip_high": spec.high == math.inf or unclipped,
            "dppo_diff_low": self.loss != "dppo_tv",
            "dppo_diff_high": self.loss != "dppo_tv",
        }
        unread = [name for name, _ in changed(self) if idle.get(name)]
        refuse_unread(
            unread,
            f"by --loss {self.loss} with --updates-per-batch {self.updates_per_batch}; leave it out",
        )
        top = self.high if spec.of_sampler else 1.0
        refuse(
            spec.low > 0 and self.low >= top, f"--clip-low {self.low}: should be less than {top}"
        )
        refuse(
            self.loss == "dppo_tv" and self.beta > 0,
            f"--loss dppo_tv with --beta {self.beta}: it has no KL term",
        )
