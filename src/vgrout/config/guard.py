"""Settings of the held-out kill switch, and whether it can fire at all."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from vgrout.config.checks import check, listed, setting

SwitchRule = Literal["kl", "streak", "gap"]
RULES: tuple[SwitchRule, ...] = get_args(SwitchRule)


@dataclass(frozen=True)
class GuardConfig:
    """The held-out kill switch."""

    guard: Literal["off", "log", "halt"] | None = None
    """What a verdict does: nothing, a line in the log, or the end of the run after a last evaluation (exit 3); none:
    halt in single runs of fast and full where a rule could halt them, log in smoke, mini and small, in every study,
    and where --intervention none is meant to hack."""
    guard_halt_on: str = setting("streak,gap", words=RULES, word="rule")
    """Comma list: the rules that may halt a run, of kl, streak, gap; the others warn. The default are those that
    raised no false alarm in recorded runs (docs/guard.md)."""
    guard_rule: Literal["ema", "se"] = "se"
    """When held-out counts as falling · ema: its average fell at all · se: the new evaluation lies more than its
    standard error under the average."""
    guard_warmup: int = setting(20, low=0, high=1_000_000)
    """Steps before which the guard does not fire."""
    guard_baseline: int = setting(2, low=1, high=1_000_000)
    """Evaluations averaged as the baseline of both series."""
    ema_alpha: float = setting(0.9, low=0, below=1)
    """Weight of the past in the guard's moving averages."""
    rise_eps: float = setting(1e-4, low=0, below=1)
    """An average that moves by no more than this counts as flat."""
    kl_hard_stop: float = setting(
        0.08, above=0, below=math.inf, should="be a positive number of nats per token"
    )
    """Fires when the average KL of the deployed model to the initial policy exceeds this, nats per token of its
    held-out answers."""
    kl_calibrate_from: str = ""
    """Comma list of folders of healthy runs: the KL limit is three times the mean of theirs, --kl-hard-stop at most."""
    decline_patience: int = setting(3, low=1, high=1_000_000)
    """Fires after so many evaluations in a row with held-out falling while in-loop rises."""
    max_proxy_real_gap: float = setting(0.10, above=0, below=2)
    """Fires when in-loop has gained so much more than held-out, both as shares of the most that can be had."""

    def __post_init__(self) -> None:
        check(self)

    def first_update(self, steps: int, every: int) -> int:
        """Which evaluation of a run is the first that may fire, from 1."""
        return 1 + sum(done < self.guard_warmup for done in evaluations(steps, every))

    @property
    def halting(self) -> list[str]:
        return listed(self.guard_halt_on)

    @property
    def healthy_runs(self) -> list[Path]:
        return [Path(name) for name in listed(self.kl_calibrate_from)]


def evaluations(steps: int, every: int) -> list[int]:
    """After how many steps a run of `steps` is evaluated, each `every` and at the end; every 0: never."""
    return sorted({*range(every, steps + 1, every), steps}) if every > 0 else []


def blind(cfg: GuardConfig, steps: int, every: int) -> str | None:
    """Why this guard could never fire in a run of `steps` with an evaluation each `every` and at the end; None: it can.

    Steps are counted from 1, when they are done.
    """
    if not (at := evaluations(steps, every)):
        return "no evaluation on the way: set --eval-ablate-every"
    if not any(done >= cfg.guard_warmup for done in at[cfg.guard_baseline :]):
        return (
            f"{len(at)} evaluations in {steps} steps, --guard-baseline takes {cfg.guard_baseline} of them and "
            f"--guard-warmup withholds it for {cfg.guard_warmup} steps: lower one of the two, or --eval-ablate-every"
        )
    return None
