"""Settings of the policy-gradient loss, torch-free; each formula is in `vgrout.loop.losses`."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro

from vgrout.config.checks import changed, check, refuse_unread, setting, summary
from vgrout.ground.errors import refuse

T = TypeVar("T")


@dataclass(frozen=True)
class LossSpec:
    """One loss: its line in help, and what it does with tokens."""

    what: str
    drops: bool = False  # it drops tokens by their ratio to the sampler
    by_step: bool = False  # divided by the step's tokens


LOSSES: dict[str, LossSpec] = {
    "grpo": LossSpec("every token counts"),
    "dppo_tv": LossSpec(
        "tokens whose probability moved too far are dropped", drops=True, by_step=True
    ),
    "icepop": LossSpec(
        "tokens whose ratio to the sampler is outside [0.2, 5] are dropped",
        drops=True,
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
    unbiased: bool = True
    """Dr. GRPO: no division by the group's std, constant normaliser G · max_new · P."""
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
    def drops(self) -> bool:
        """Whether a token can lose its gradient."""
        return LOSSES[self.loss].drops

    @property
    def learns_at_zero_advantage(self) -> bool:
        """Whether an answer has a gradient even if its advantage is 0, by the KL or by the teacher."""
        return self.beta > 0 or self.teacher_tau > 0

    def __post_init__(self) -> None:
        check(self)
        unread = [name for name, _ in changed(self) if name.startswith("dppo_")]
        if self.loss != "dppo_tv":
            refuse_unread(unread, f"by --loss {self.loss}; leave it out")
        refuse(
            self.loss == "dppo_tv" and self.beta > 0,
            f"--loss dppo_tv with --beta {self.beta}: it has no KL term",
        )
