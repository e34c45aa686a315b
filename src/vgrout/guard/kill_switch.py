"""The held-out kill switch: does the reward that training earns still mean what it should? Stdlib only.

Called once per evaluation. The in-loop (proxy) reward is the flawed grader's; the held-out score is the strict grader's
on problems that are never trained on. Both must be measured on the same model and on the same scale, best as shares in
[0, 1]: otherwise their difference would be that of two models or of two units.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from vgrout.config.guard import GuardConfig

KL_FLOOR = 1e-6  # smallest calibrated limit: below it, the estimator's rounding would fire the switch


@dataclass(frozen=True, slots=True)
class TripwireStatus:
    """The guard's verdict after an evaluation. None: not measured yet."""

    fire: bool = False
    reason: str = ""  # "latched: …" on every evaluation after the one that fired
    step: int = -1
    gap: float = 0.0
    proxy_ema: float | None = None
    held_ema: float | None = None
    kl_ema: float | None = None
    entropy_ema: float | None = None
    reward_std_ema: float | None = None
    streak: int = 0

    @property
    def halt(self) -> bool:
        """The same as `fire`."""
        return self.fire

    def line(self) -> str:
        """For the log."""
        kl = "" if self.kl_ema is None else f", KL {self.kl_ema:.4f} nats/token"
        averages = "" if self.proxy_ema is None else f"in-loop {self.proxy_ema:.2f}, held-out {self.held_ema:.2f}, "
        why = f"; {self.reason}" if self.reason else ""
        return f"{averages}gap {self.gap:+.2f}, declines in a row {self.streak}{kl}{why}"


class CollapseStopError(RuntimeError):
    """The guard's verdict as an error, for a caller that wants one; `status` is the whole verdict."""

    def __init__(self, status: TripwireStatus) -> None:
        super().__init__(status.reason)
        self.status = status


def kl_token_trust_filter(log_ratio: Any, limit: float = 0.08) -> Any:
    """Whether a token is near enough to be learnt from: ½ · (log π − log π_old)² ≤ limit; False for NaN. log_ratio: a
    number, an array or a tensor."""
    return 0.5 * log_ratio**2 <= limit


def standard_error(share: float, n: int) -> float:
    """Of a share of n, with one success and one failure added so that it is never 0 (Agresti & Coull 1998)."""
    p = (share * n + 1) / (n + 2)
    return math.sqrt(p * (1 - p) / n)


@dataclass(slots=True)
class _State:
    """What one evaluation passes on to the next."""

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
    fired: dict[str, str] = field(default_factory=dict)  # every rule that was ever broken → its first reason
    kl_limit: float = 0.0
    last: TripwireStatus = field(default_factory=TripwireStatus)


class HeldOutGuard:
    """Fires, and stays fired, when in-loop reward and held-out score diverge, or the policy has moved too far.

    Checked after the warm-up, in this order: `kl`, the KL average above its limit; `streak`, held-out falling while
    in-loop rises, `decline_patience` evaluations in a row (one where held-out does not fall clears the count, one where
    it falls while in-loop is flat leaves it); `gap` above `max_proxy_real_gap`, with
    gap = (in-loop average − its baseline) − (held-out average − its baseline). A number that is not finite fires at
    once, even in the warm-up: no comparison with a threshold would ever catch it.
    """

    def __init__(self, cfg: GuardConfig | None = None, **settings: Any) -> None:
        """settings: fields of `cfg` by name, as in HeldOutGuard(kl_hard_stop=0.05)."""
        self.cfg = replace(cfg or GuardConfig(), **settings)
        self._state = _State(kl_limit=self.cfg.kl_hard_stop)

    def update(
        self,
        round: int,
        in_loop: float,
        heldout: float,
        n: int | None = None,
        kl: float | None = None,
        entropy: float | None = None,
        reward_std: float | None = None,
    ) -> TripwireStatus:
        """The verdict after one more evaluation.

        round: index of the step just done, from 0. in_loop: mean reward, ÷ the highest possible where the limit of the
        gap is to mean a share. heldout: strict score, over n held-out answers; without n, a fall within its standard
        error counts as one. kl: to the initial policy, nats per token. entropy: nats per token. Entropy and reward_std
        are averaged and decide nothing.

        Raises:
            ValueError: a step not after the last one, n < 1, or a `heldout` over n answers that is no share of them.
        """
        s = self._state
        given = {"in_loop": in_loop, "heldout": heldout, "kl": kl, "entropy": entropy, "reward_std": reward_std}
        broken = [name for name, x in given.items() if x is not None and not math.isfinite(x)]
        out_of_range = n is not None and not broken and not (n >= 1 and 0 <= heldout <= 1)
        if round <= s.last.step or out_of_range:
            raise ValueError(
                f"guard: step {round} after {s.last.step}, heldout {heldout} of {n} answers: should be later, and "
                "a share in [0, 1]"
            )
        if not broken:
            self._follow(in_loop, heldout, n, kl, entropy, reward_std)
        broke = {"not_finite": f"{', '.join(broken)} not finite at step {round}"} if broken else self._judge(round)
        latched = f"latched: {s.reason}" if s.reason else ""
        s.reason = s.reason or next(iter(broke.values()), "")
        s.fired |= {rule: why for rule, why in broke.items() if rule not in s.fired}
        s.last = TripwireStatus(
            fire=bool(s.reason),
            reason=latched or s.reason,
            step=round,
            gap=self.proxy_real_gap(),
            proxy_ema=s.proxy_ema,
            held_ema=s.held_ema,
            kl_ema=s.kl_ema,
            entropy_ema=s.entropy_ema,
            reward_std_ema=s.reward_std_ema,
            streak=s.streak,
        )
        return s.last

    def proxy_real_gap(self) -> float:
        """How much more in-loop has gained than held-out; 0 before the first evaluation."""
        s = self._state
        if s.proxy_ema is None or s.held_ema is None:
            return 0.0
        return (s.proxy_ema - fmean(s.proxy_base)) - (s.held_ema - fmean(s.held_base))

    @property
    def kl_limit(self) -> float:
        return self._state.kl_limit

    def _follow(
        self, proxy: float, held: float, n: int | None, kl: float | None, entropy: float | None, std: float | None
    ) -> None:
        s = self._state
        s.evaluations += 1
        s.kl_ema, s.entropy_ema = self._ema(s.kl_ema, kl), self._ema(s.entropy_ema, entropy)
        s.reward_std_ema = self._ema(s.reward_std_ema, std)
        if s.evaluations <= self.cfg.guard_baseline:  # the mean of the first values seeds both averages
            s.proxy_base.append(proxy)
            s.held_base.append(held)
            s.proxy_ema, s.held_ema = fmean(s.proxy_base), fmean(s.held_base)
            return
        old_proxy, old_held = s.proxy_ema, s.held_ema
        assert old_proxy is not None
        assert old_held is not None
        s.proxy_ema, s.held_ema = self._ema(old_proxy, proxy), self._ema(old_held, held)
        # The average falls towards its newest value; under "se" that value must itself lie beyond chance.
        fell = s.held_ema < old_held - self.cfg.rise_eps
        if self.cfg.guard_rule == "se" and n is not None:
            fell = fell and held < old_held - standard_error(held, n)
        if fell:
            s.streak += s.proxy_ema > old_proxy + self.cfg.rise_eps
        else:
            s.streak = 0

    def _ema(self, past: float | None, value: float | None) -> Any:
        """The next average; the first value seeds it, a missing one leaves it."""
        if past is None or value is None:
            return value if past is None else past
        return self.cfg.ema_alpha * past + (1 - self.cfg.ema_alpha) * value

    def _judge(self, step: int) -> dict[str, str]:
        """The rules broken now, in the order of the checks, each with its sentence."""
        s, cfg, gap = self._state, self.cfg, self.proxy_real_gap()
        if step + 1 < cfg.guard_warmup:
            return {}
        broken = {}
        if s.kl_ema is not None and s.kl_ema > s.kl_limit:
            broken["kl"] = f"KL to the initial policy {s.kl_ema:.4f} > {s.kl_limit:g} nats per token at step {step}"
        if s.streak >= cfg.decline_patience:
            broken["streak"] = f"held-out fell while in-loop rose, {s.streak} evaluations in a row, at step {step}"
        if gap > cfg.max_proxy_real_gap:
            limit = f"(limit {cfg.max_proxy_real_gap:g}) at step {step}"
            broken["gap"] = f"in-loop gained {gap:.2f} more than held-out {limit}"
        return broken

    @property
    def halt(self) -> bool:
        """Whether any rule was ever broken."""
        return bool(self._state.reason)

    def should_halt(self, rules: Collection[str] | None = None) -> bool:
        """Whether one of these rules (None: any) was ever broken, or a number was not finite."""
        return self.halt if rules is None else bool({*rules, "not_finite"} & self._state.fired.keys())

    @property
    def fired(self) -> dict[str, str]:
        """Every rule that was ever broken, in order of time, with its first reason."""
        return dict(self._state.fired)

    def last_status(self) -> TripwireStatus | None:
        """None before the first evaluation."""
        return self._state.last if self._state.last.step >= 0 else None

    def raise_if_fired(self) -> None:
        """Raises CollapseStopError with the last status."""
        if self.halt:
            raise CollapseStopError(self._state.last)

    def calibrate_kl_threshold(self, values: Sequence[float], factor: float = 3.0) -> float:
        """Tighten the KL limit to `factor` × the mean of a healthy run's values; returns the limit in force.

        Raises ValueError on an empty list, on a value that is negative or not finite, on a factor that is not positive.
        """
        if not values or not all(0 <= x < math.inf for x in values) or not 0 < factor < math.inf:
            raise ValueError(f"calibrate_kl_threshold: {[*values]} × {factor}: should be finite and not negative")
        self._state.kl_limit = min(self._state.kl_limit, max(KL_FLOOR, factor * fmean(values)))
        return self._state.kl_limit

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore. Raises TypeError on anything else than `state_dict` gives."""
        known = {k: v for k, v in state.items() if k != "last"}
        self._state = replace(_State(**known), last=TripwireStatus(**state["last"]))
