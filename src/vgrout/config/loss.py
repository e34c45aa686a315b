"""Settings of the policy-gradient loss, torch-free; each formula is in `vgrout.losses`."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vgrout.config.checks import check, setting, summary

LOSSES: dict[str, str] = {
    "grpo": "ratio clipped at 1 ± ε",
    "dr_grpo": "grpo with --unbiased",
    "dapo": "another upper ε, normalised by the step's tokens",
    "gspo": "one ratio a sequence",
    "cispo": "the ratio is a capped weight, nothing is clipped",
    "dppo_tv": "tokens whose probability moved too far are dropped",
    "icepop": "tokens whose ratio to the sampler is out of range are dropped",
}
if TYPE_CHECKING:  # a checker cannot read a Literal made from a registry
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]


def _positive(default: float) -> Any:
    return setting(default, low=1e-12, below=math.inf, should="be positive and finite")


def _not_negative(default: float) -> Any:
    return setting(default, low=0, below=math.inf, should="be 0 or more and finite")


@dataclass(frozen=True)
class LossConfig:
    """The policy-gradient loss.

    Raises:
        ValueError: a value outside its range, or two that contradict each other.
    """

    loss: Annotated[LossName, tyro.conf.arg(help=summary(LOSSES))] = "grpo"
    clip: float = _positive(0.2)
    """ε of the clipped ratio (grpo, dr_grpo, and dapo's lower side)."""
    beta: float = _not_negative(0.0)
    """Weight of the KL to the adapter at zero."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator."""
    unbiased: bool = True
    """Dr. GRPO: no division by the group's std, constant normaliser G · max_new · P."""
    ratio_support: Literal["full", "sampled"] = "full"
    """Ratios on the full softmax at temperature 1, or on the truncated distribution that was sampled from."""
    clip_high: float = _positive(0.28)
    """dapo: upper ε of the clipped ratio."""
    gspo_low: float = _positive(3e-4)
    """gspo: lower ε of the sequence ratio."""
    gspo_high: float = _positive(4e-4)
    """gspo: upper ε of the sequence ratio."""
    cispo_high: float = _positive(5.0)
    """cispo: largest importance weight."""
    dppo_diff_low: float = _not_negative(0.2)
    """dppo_tv: tokens whose probability fell by more than this since sampling are dropped."""
    dppo_diff_high: float = _not_negative(0.2)
    """dppo_tv: tokens whose probability rose by more than this since sampling are dropped."""
    icepop_low: float = _not_negative(0.2)
    """icepop: smallest ratio that still counts."""
    icepop_high: float = setting(5.0, above=0)
    """icepop: largest ratio that still counts."""
    adv_tau: float = _not_negative(1.0)
    """Scale of the advantages."""
    teacher_tau: float = _not_negative(0.0)
    """Adds τ · (teacher log-prob − log-prob), detached, to each token's advantage; needs --teacher-model."""
    teacher_model: str = ""
    """Model behind --teacher-tau: a folder or hub id with this run's tokenizer, or 'organism'."""
    teacher_correction: Literal["none", "tis", "luffy"] = "none"
    """Teacher rows: none = ratio 1 · tis = truncated importance weight · luffy = policy shaping."""
    tis_cap: float = _positive(2.0)
    """tis: largest importance weight of a teacher token."""
    luffy_gamma: float = _positive(0.1)
    """luffy: γ of f(π) = π / (π + γ)."""

    @property
    def drops(self) -> bool:
        """Whether a token can lose its gradient: in one inner step π is π_old, so only by its ratio to the sampler."""
        return self.loss in ("dppo_tv", "icepop")

    def __post_init__(self) -> None:
        check(self)
        if self.icepop_high <= self.icepop_low:
            raise ValueError(f"--icepop-high {self.icepop_high}: should exceed --icepop-low {self.icepop_low}")
        if self.clip >= 1 and self.loss in ("grpo", "dr_grpo", "dapo"):
            raise ValueError(f"--clip {self.clip}: should be below 1, or the lower side never clips")
        if self.loss == "dr_grpo" and not self.unbiased:
            raise ValueError("--loss dr_grpo with --no-unbiased: dr_grpo is grpo with --unbiased; say --loss grpo")
        if self.loss == "dppo_tv" and self.beta:
            raise ValueError(f"--loss dppo_tv with --beta {self.beta}: it has no KL term; set --beta 0")
        if self.loss == "gspo" and self.teacher_correction != "none":
            raise ValueError(
                f"--loss gspo with --teacher-correction {self.teacher_correction}: its ratio is one a sequence, "
                "the correction is one a token; choose another loss or none"
            )
