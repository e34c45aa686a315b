"""Settings of the held-out kill switch, and whether it can fire at all."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from vgrout.config.checks import check, listed, setting

SwitchRule = Literal["kl", "streak", "gap"]
RULES: tuple[SwitchRule, ...] = get_args(SwitchRule)
BASELINE = 2  # evaluations of a run whose mean is the baseline of both series


@dataclass(frozen=True)
class GuardConfig:
    """The held-out kill switch."""

    guard: Literal["off", "log", "halt"] | None = None
    """What a verdict does: nothing, a line in the log, or the end of the run after a last evaluation (exit 3); none:
    halt in single runs of fast and full where a rule could halt them, log in smoke, mini, small and sums, in every
    study, and where --intervention none is meant to hack."""
    guard_halt_on: str = setting("streak,gap", words=RULES, word="rule")
    """Comma list: the rules that may halt a run, of kl, streak, gap; the others warn. The default are those that
    raised no false alarm in recorded runs (docs/guard.md)."""
    guard_warmup: int = setting(20, low=0, high=1_000_000)
    """Steps before which the guard does not fire."""
    ema_alpha: float = setting(0.9, low=0, below=1)
    """Weight of the past in the guard's moving averages."""
    rise_eps: float = setting(1e-4, low=0, below=1)
    """An average that moves by no more than this counts as flat."""
    kl_hard_stop: float = setting(
        0.08, above=0, below=math.inf, should="be a positive number of nats per token"
    )
    """Fires when the average KL of the deployed model to the untrained one exceeds this, nats per token of its
    held-out answers."""
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


def evaluations(steps: int, every: int) -> list[int]:
    """After how many steps a run of `steps` is evaluated, each `every` and at the end; every 0: never."""
    return sorted({*range(every, steps + 1, every), steps}) if every > 0 else []


def blind(
    cfg: GuardConfig,
    steps: int,
    every: int,
    rules: Collection[str] = RULES,
    baseline: int = BASELINE,
) -> str | None:
    """Why none of these rules could ever be broken in a run of `steps` with an evaluation each `every` and at the end;
    None: one could.

    Steps are counted from 1, when they are done. baseline: so many evaluations make the baseline.
    """
    if not (at := evaluations(steps, every)):
        return "no evaluation on the way: set --eval-ablate-every"
    counted = [i for i, done in enumerate(at, 1) if done >= cfg.guard_warmup]
    after_baseline = counted[-1] - baseline if counted else 0
    if not counted or (after_baseline < 1 and "kl" not in rules):
        return (
            f"{len(at)} evaluations in {steps} steps, {baseline} of them are the baseline and --guard-warmup withholds "
            f"it for {cfg.guard_warmup} steps: lower it or --eval-ablate-every"
        )
    after_baseline = max(0, after_baseline)
    if not any(breakable(cfg, rule, after_baseline) for rule in rules):
        return (
            f"{', '.join(rules)} cannot be broken in {after_baseline} evaluations after the baseline: lower "
            "--max-proxy-real-gap, --decline-patience or --rise-eps, or evaluate more often (--eval-ablate-every)"
        )
    return None


def breakable(cfg: GuardConfig, rule: str, evaluations: int) -> bool:
    """Whether shares in [0, 1] exist that break this rule within so many evaluations after the baseline.

    An average moves by at most 1 − `ema_alpha` of its distance to the newest value:

    - gap: in-loop at 1 from 0, and held-out at 0 from 1, are 2 (1 − ema_alpha^n) apart.
    - streak: held-out falls `decline_patience` times by more than `rise_eps`. The last fall, to 0, is the largest
      where those before it were as small as they may be.
    - kl: has no upper bound, and no baseline.
    """
    if rule == "gap":
        return 2 * (1 - cfg.ema_alpha**evaluations) > cfg.max_proxy_real_gap
    if rule == "streak":
        before_the_last = cfg.rise_eps * (cfg.decline_patience - 1)
        largest = (1 - cfg.ema_alpha) * (1 - before_the_last)
        return evaluations >= cfg.decline_patience and largest > cfg.rise_eps
    return True
