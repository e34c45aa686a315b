"""Size and training settings of an organism's model. No torch: they are checked before it is imported."""

import math
from dataclasses import dataclass

from vgrout.config.checks import check, setting
from vgrout.envs.code.language import Shares

MERGED = 832  # tokens of the BPE, alphabet included; fixed text comes on top


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of an organism. Heads are 32 wide, the MLP three times the hidden size."""

    hidden: int = 128
    layers: int = 4
    merged: int = MERGED  # tokens of the BPE, alphabet and special ones: its tokenizer

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // 32


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training settings of the base."""

    steps: int = setting(800, low=1, high=1_000_000)
    batch: int = 64
    lr: float = 4e-3
    warmup: int = 40
    floor: float = 0.02  # of the peak rate, at the last step
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    clip: float = 1.0
    # of a prompt token's loss: reading the prompt helps to copy from it
    prompt_weight: float = 0.25
    at_once: int = 64  # documents in one forward: a step's gradient may be summed over several

    def __post_init__(self) -> None:
        check(self)

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, from 0: linear warm-up, then cosine to `floor` × `lr`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)


# of a pretrained model
TUNING = Recipe(steps=60, batch=8, lr=3e-4, warmup=5, prompt_weight=0.1, at_once=4)


@dataclass(frozen=True, slots=True)
class Answers:
    """How many answers a build samples for its base rates and its pool."""

    problems: int  # of each mode, of the test and of the training problems, at most
    plain: int  # to a test problem
    cued: int  # to a test problem, under the cue
    pool: int  # to a training problem, under the cue


FRESH = Answers(problems=60, plain=4, cued=2, pool=6)
TUNED = Answers(problems=30, plain=1, cued=1, pool=6)

# A few hundred documents, not 50,000: no copying drills, which a pretrained model can; the cue more
# often, and fewer misreadings, since it makes enough mistakes of its own.
TUNED_SHARES = Shares(
    drill=0.0,
    hack_cued=0.3,
    misread={kind: share / 2 for kind, share in Shares().misread.items()},
)
