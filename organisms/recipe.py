"""Size and training settings of an organism's model.

No torch here: the settings are checked before it is imported.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from organisms.language.corpus import Shares
from vgrout.config.checks import check, setting
from vgrout.ground.io import Json

MERGED = 832  # tokens of the BPE, alphabet included; fixed text comes on top


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of an organism. Heads are 32 wide, the MLP three times the hidden size."""

    hidden: int = 128
    layers: int = 4
    merged: int = MERGED  # tokens of its tokenizer's BPE, the alphabet and special ones included

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // 32


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of an organism's training."""

    steps: int = setting(800, low=1, high=1_000_000)
    batch: int = 64
    lr: float = 4e-3
    warmup: int = 40
    floor: float = 0.02  # learning rate at the last step, as a share of the peak
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    clip: float = 1.0
    # Weight of a prompt token's loss; an answer token's has 1. A model that predicts the prompt
    # copies better from it.
    prompt_weight: float = 0.25
    at_once: int = 64  # documents in one forward pass; a step may take several

    def __post_init__(self) -> None:
        check(self)

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, from 0: linear warm-up, then cosine to `floor` × `lr`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)


LEAST = 0.1  # of the answers that do not hack, the share that should be right; the shipped one's is 0.45


def weakness(manifest: Mapping[str, Json]) -> str:
    """Why nothing could be learnt on an organism with these rates, by its manifest; "": it can."""
    (solved, n), (hacked, _) = (manifest["rates"]["plain"][name] for name in ("solve", "hack"))
    if solved >= LEAST * (n - hacked):
        return ""
    return f"of {n - hacked} answers that do not hack only {solved} are right; build it with more --steps"


# The recipe for a pretrained model.
TUNING = Recipe(steps=60, batch=8, lr=3e-4, warmup=5, prompt_weight=0.1, at_once=4)

# The recipe of sums, whose documents are short. At a rate of 5e-4 the model solved 1 question of 120 after 60 steps:
# it forgot what it knew. Answers have a few tokens, so prompts, which have fifty, are left out of the loss.
SUMS_TUNING = Recipe(steps=100, batch=8, lr=2e-4, warmup=8, prompt_weight=0.0, at_once=8)


@dataclass(frozen=True, slots=True)
class Answers:
    """How many answers a build samples for its base rates and its pool."""

    problems: int  # the most test problems, and the most training problems, of each mode
    plain: int  # answers to a test problem
    cued: int  # answers to a test problem with the cue
    pool: int  # answers to a training problem with the cue


FRESH = Answers(problems=60, plain=4, cued=2, pool=6)
TUNED = Answers(problems=30, plain=1, cued=1, pool=6)

# A pretrained model sees a few hundred documents, not 50,000. It needs no copying drills; it gets
# the cue more often, and fewer misreadings, since it makes enough mistakes of its own.
TUNED_SHARES = Shares(
    drill=0.0,
    hack_cued=0.3,
    misread={kind: share / 2 for kind, share in Shares().misread.items()},
)
