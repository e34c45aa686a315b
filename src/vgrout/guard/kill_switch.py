"""The held-out kill switch: does the reward that training earns still mean what it should? Stdlib only.

Called once an evaluation. In-loop (proxy) reward is what the flawed grader pays; held-out score is what a strict one
says of problems that are never trained on. Both are shares in [0, 1], so that their difference means something.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from vgrout.config.guard import GuardConfig

KEEP = 0.9  # weight of the past in every moving average
KL_TOKEN_LIMIT = 0.08  # ½·(log ratio)² of one token, nats: the second-order KL of a step that moved it so far
KL_FLOOR = 1e-6  # calibration never asks for less: an estimator's rounding would fire it


class GuardFired(Exception):
    """The guard's verdict as an error, for a caller that wants one."""


@dataclass(frozen=True, slots=True)
class TripwireStatus:
    """What the guard thinks after an evaluation. None: nothing was measured yet."""

    fire: bool = False
    reason: str = ""  # "latched: …" on every evaluation after the one that fired
    step: int = -1
    gap: float = 0.0
    proxy_ema: float | None = None
    held_ema: float | None = None
    kl_ema: float | None = None
    streak: int = 0

    def line(self) -> str:
        """For the log."""
        kl = "" if self.kl_ema is None else f", KL {self.kl_ema:.4f} nats/token"
        averages = "" if self.proxy_ema is None else f"in-loop {self.proxy_ema:.2f}, held-out {self.held_ema:.2f}, "
        why = f"; {self.reason}" if self.reason else ""
        return f"{averages}gap {self.gap:+.2f}, declines in a row {self.streak}{kl}{why}"


def standard_error(share: float, n: int) -> float:
    """Of k of n, with one success and one failure added, so that 0/n and n/n have one too (Agresti & Coull 1998)."""
    p = (share * n + 1) / (n + 2)
    return math.sqrt(p * (1 - p) / n)


def keep_tokens(log_ratios: Sequence[float], limit: float = KL_TOKEN_LIMIT) -> list[bool]:
    """False for a token whose ½·(log-ratio)² exceeds `limit` nats, or is not a number."""
    return [0.5 * x * x <= limit for x in log_ratios]


@dataclass(slots=True)
class _State:
    """All that one evaluation leaves to the next."""

    evaluations: int = 0
    proxy_ema: float | None = None
    held_ema: float | None = None
    kl_ema: float | None = None
    entropy_ema: float | None = None
    reward_std_ema: float | None = None
    proxy_base: list[float] = field(default_factory=list)
    held_base: list[float] = field(default_factory=list)
    streak: int = 0
    reason: str = ""  # why it fired; "" while it has not
    kl_limit: float = 0.0
    last: TripwireStatus = field(default_factory=TripwireStatus)


class HeldOutGuard:
    """Fires, and stays fired, when in-loop reward and held-out score come apart, or when the policy has gone far.

    After the warm-up, in this order: KL average above its limit; held-out falling while in-loop rises, for
    `decline_patience` evaluations running; gap above `max_proxy_real_gap`, with
    gap = (in-loop average − its baseline) − (held-out average − its baseline). A number that is not finite fires at
    once, warm-up or not: compared with a threshold it would be silent for ever.
    """

    def __init__(self, cfg: GuardConfig | None = None) -> None:
        self.cfg = cfg or GuardConfig()
        self._state = _State(kl_limit=self.cfg.kl_hard_stop)

    def update(
        self,
        step: int,
        proxy: float,
        held_out: float,
        n: int,
        kl: float | None = None,
        entropy: float | None = None,
        reward_std: float | None = None,
    ) -> TripwireStatus:
        """One evaluation.

        step: index of the step just done, from 0. proxy: mean in-loop reward ÷ the most that can be earned.
        held_out: strict score over n held-out answers. kl: to the initial policy, nats per token. entropy: nats per
        token. Entropy and reward_std are followed and decide nothing.

        Raises:
            ValueError: a step that does not come after the last one, n < 1, or a share outside [0, 1].
        """
        s = self._state
        if step <= s.last.step:
            raise ValueError(f"guard: step {step} after step {s.last.step}")
        if n < 1:
            raise ValueError(f"guard: {n} held-out answers")
        given = {"proxy": proxy, "held_out": held_out, "kl": kl, "entropy": entropy, "reward_std": reward_std}
        broken = [name for name, x in given.items() if x is not None and not math.isfinite(x)]
        if not broken:
            for name, share in (("proxy", proxy), ("held_out", held_out)):
                if not 0 <= share <= 1:
                    raise ValueError(f"guard: {name} {share} is not a share in [0, 1]")
            self._follow(proxy, held_out, n, kl, entropy, reward_std)
        why = f"{', '.join(broken)} not finite at step {step}" if broken else self._judge(step)
        reason = f"latched: {s.reason}" if s.reason else why
        s.reason = s.reason or why
        s.last = TripwireStatus(bool(reason), reason, step, self.gap, s.proxy_ema, s.held_ema, s.kl_ema, s.streak)
        return s.last

    @property
    def gap(self) -> float:
        """How much more in-loop has gained than held-out; 0 before the first evaluation."""
        s = self._state
        if s.proxy_ema is None or s.held_ema is None:
            return 0.0
        return (s.proxy_ema - fmean(s.proxy_base)) - (s.held_ema - fmean(s.held_base))

    @property
    def kl_limit(self) -> float:
        return self._state.kl_limit

    def _follow(
        self, proxy: float, held: float, n: int, kl: float | None, entropy: float | None, std: float | None
    ) -> None:
        s = self._state
        s.evaluations += 1
        s.kl_ema, s.entropy_ema = _ema(s.kl_ema, kl), _ema(s.entropy_ema, entropy)
        s.reward_std_ema = _ema(s.reward_std_ema, std)
        if s.evaluations <= self.cfg.guard_baseline:  # the mean of the first values seeds both averages
            s.proxy_base.append(proxy)
            s.held_base.append(held)
            s.proxy_ema, s.held_ema = fmean(s.proxy_base), fmean(s.held_base)
            return
        old_proxy, old_held = s.proxy_ema, s.held_ema
        assert old_proxy is not None
        assert old_held is not None
        margin = standard_error(held, n) if self.cfg.guard_rule == "se" else 0.0
        together = held < old_held - margin and proxy > old_proxy  # an average moves towards its newest value
        s.streak = s.streak + 1 if together else 0
        s.proxy_ema, s.held_ema = _ema(old_proxy, proxy), _ema(old_held, held)

    def _judge(self, step: int) -> str:
        s, cfg = self._state, self.cfg
        if step + 1 < cfg.guard_warmup:
            return ""
        if s.kl_ema is not None and s.kl_ema > s.kl_limit:
            return f"KL to the initial policy {s.kl_ema:.4f} > {s.kl_limit:g} nats per token at step {step}"
        if s.streak >= cfg.decline_patience:
            return f"held-out fell while in-loop rose, {s.streak} evaluations in a row, at step {step}"
        if self.gap > cfg.max_proxy_real_gap:
            return f"in-loop gained {self.gap:.2f} more than held-out (limit {cfg.max_proxy_real_gap:g}) at step {step}"
        return ""

    def should_halt(self) -> bool:
        return bool(self._state.reason)

    def last_status(self) -> TripwireStatus:
        return self._state.last

    def raise_if_fired(self) -> None:
        """Raises GuardFired with the reason."""
        if self._state.reason:
            raise GuardFired(self._state.reason)

    def calibrate_kl_threshold(self, values: Sequence[float], factor: float = 3.0) -> float:
        """Tighten the KL limit to `factor` × the mean of what a healthy run shows; returns the limit in force.

        Raises ValueError on an empty list and on anything that is not a positive number.
        """
        if not values:
            raise ValueError("calibrate_kl_threshold: no values")
        if bad := [x for x in (*values, factor) if not (math.isfinite(x) and x > 0)]:
            raise ValueError(f"calibrate_kl_threshold: {bad[0]} is not a positive number")
        self._state.kl_limit = min(self._state.kl_limit, max(KL_FLOOR, factor * fmean(values)))
        return self._state.kl_limit

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises TypeError on the state of another version."""
        self._state = replace(
            _State(**{k: v for k, v in state.items() if k != "last"}), last=TripwireStatus(**state["last"])
        )


def _ema(past: float | None, value: float | None) -> float | None:
    """The next average; the first value seeds it, a missing one leaves it."""
    if past is None or value is None:
        return value if past is None else past
    return KEEP * past + (1 - KEEP) * value
