"""Settings of the held-out kill switch, and whether it can fire at all."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GuardConfig:
    """The held-out kill switch."""

    guard: Literal["off", "log", "halt"] | None = None
    """What a verdict does: nothing, a line in the log, or the end of the run (exit 3); none: log in smoke and mini,
    halt in fast and full."""
    guard_rule: Literal["ema", "se"] = "se"
    """When held-out counts as falling · ema: its average fell at all · se: the new evaluation lies more than its
    standard error under the average."""
    guard_warmup: int = 20
    """Steps before which the guard does not fire."""
    guard_baseline: int = 2
    """Evaluations averaged as the baseline of both series."""
    kl_hard_stop: float = 0.08
    """Fires when the average KL to the initial policy exceeds this, nats per token (measured with --beta > 0)."""
    decline_patience: int = 3
    """Fires after so many evaluations in a row with held-out falling while in-loop rises."""
    max_proxy_real_gap: float = 0.10
    """Fires when in-loop has gained so much more than held-out, both as shares of the most that can be had."""

    def __post_init__(self) -> None:
        for name, value, low in (
            ("guard-warmup", self.guard_warmup, 0),
            ("guard-baseline", self.guard_baseline, 1),
            ("decline-patience", self.decline_patience, 1),
        ):
            if not low <= value <= 1_000_000:
                raise ValueError(f"--{name} {value}: should lie in [{low}, 1000000]")
        if not (math.isfinite(self.kl_hard_stop) and self.kl_hard_stop > 0):
            raise ValueError(f"--kl-hard-stop {self.kl_hard_stop}: should be a positive number of nats per token")
        if not 0 < self.max_proxy_real_gap < 2:
            raise ValueError(f"--max-proxy-real-gap {self.max_proxy_real_gap}: should lie in (0, 2)")


def blind(cfg: GuardConfig, steps: int, every: int) -> str | None:
    """Why this guard could never fire in a run of `steps` with an evaluation each `every` and at the end; None: it can.

    Steps are counted as done, from 1.
    """
    if every <= 0:
        return "no evaluation on the way: set --eval-ablate-every"
    at = sorted({*range(every, steps + 1, every), steps})
    if not any(done >= cfg.guard_warmup for done in at[cfg.guard_baseline :]):
        return (
            f"{len(at)} evaluations in {steps} steps, --guard-baseline takes {cfg.guard_baseline} of them and "
            f"--guard-warmup withholds it for {cfg.guard_warmup} steps: lower one of the two, or --eval-ablate-every"
        )
    return None
