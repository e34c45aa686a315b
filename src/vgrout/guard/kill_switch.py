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

PUBLISHED = GuardConfig(guard_rule="ema", guard_baseline=1)  # the rules as first described
# smallest calibrated limit: below it, the estimator's rounding would fire the switch
KL_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class TripwireStatus:
    """The guard's verdict after an evaluation. None: not measured yet."""

    fire: bool = False
    reason: str = ""  # "latched: …" on every evaluation after the one that fired
    round_idx: int = -1
    proxy_real_gap: float = 0.0
    in_loop_ema: float | None = None
    heldout_ema: float | None = None
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
        seen = self.in_loop_ema is not None
        averages = (
            f"in-loop {self.in_loop_ema:.2f}, held-out {self.heldout_ema:.2f}, " if seen else ""
        )
        why = f"; {self.reason}" if self.reason else ""
        return f"{averages}gap {self.proxy_real_gap:+.2f}, declines in a row {self.streak}{kl}{why}"


class CollapseStopError(RuntimeError):
    """The guard's verdict as an error, for a caller that wants one; `status` is the whole verdict."""

    def __init__(self, status: TripwireStatus) -> None:
        super().__init__(status.reason)
        self.status = status


def kl_token_trust_filter(token_kl: Any, threshold: float = 0.08) -> Any:
    """True for a token to mask out: one that has moved too far to be learnt from, or NaN.

    token_kl: ½ · (log π − log π_old)², a number, an array or a tensor. threshold: the most that is still trusted.
    """
    return (token_kl <= threshold) ^ True


def standard_error(share: float, n: int) -> float:
    """Of a share of n, with one success and one failure added so that it is never 0 (Agresti & Coull 1998)."""
    p = (share * n + 1) / (n + 2)
    return math.sqrt(p * (1 - p) / n)


@dataclass(slots=True)
class _State:
    """What one evaluation passes on to the next."""

    updates: int = 0
    in_loop_ema: float | None = None
    heldout_ema: float | None = None
    kl_ema: float | None = None
    entropy_ema: float | None = None
    reward_std_ema: float | None = None
    in_loop_base: list[float] = field(default_factory=list)
    heldout_base: list[float] = field(default_factory=list)
    streak: int = 0
    reason: str = ""  # why it fired; "" while it has not
    # every rule that was ever broken → its first reason
    fired: dict[str, str] = field(default_factory=dict)
    kl_hard_stop: float = 0.0
    last: TripwireStatus = field(default_factory=TripwireStatus)


class HeldOutGuard:
    """Fires, and stays fired, when in-loop reward and held-out score diverge, or the policy has moved too far.

    Checked from update `min_steps` on, in this order: `kl`, the KL average above its limit; `streak`, held-out falling
    while in-loop rises, `decline_patience` evaluations in a row (one where held-out does not fall clears the count, one
    where it falls while in-loop is flat leaves it); `gap` above `max_proxy_real_gap`, with
    gap = (in-loop average − its baseline) − (held-out average − its baseline). A number that is not finite fires at
    once, even in the warm-up: no comparison with a threshold would ever catch it.
    """

    def __init__(
        self, cfg: GuardConfig = PUBLISHED, min_steps: int | None = None, **settings: Any
    ) -> None:
        """min_steps: the first update that may fire, in place of `guard_warmup`, which here counts updates too.
        settings: fields of `cfg` by name, as in HeldOutGuard(kl_hard_stop=0.05)."""
        self.cfg = replace(
            cfg, **({} if min_steps is None else {"guard_warmup": min_steps}), **settings
        )
        self._state = _State(kl_hard_stop=self.cfg.kl_hard_stop)

    def update(
        self,
        round_idx: int,
        in_loop_reward: float,
        heldout_score: float,
        kl_to_init: float | None = None,
        entropy: float | None = None,
        reward_std: float | None = None,
        *,
        n: int | None = None,
    ) -> TripwireStatus:
        """The verdict after one more evaluation.

        round_idx: of the round or step just done; it is told in the verdict, and two updates may have the same.
        in_loop_reward: mean reward, ÷ the highest possible where the limit of the gap is to mean a share.
        heldout_score: strict score. kl_to_init: nats per token. entropy: nats per token. Entropy and reward_std are
        averaged and decide nothing. n: held-out answers that the score is the share of; without it, a fall within its
        standard error counts as one.

        Raises:
            ValueError: n < 1, or a score over n answers that is no share of them.
        """
        s = self._state
        given = {
            "in_loop_reward": in_loop_reward,
            "heldout_score": heldout_score,
            "kl_to_init": kl_to_init,
        }
        given |= {"entropy": entropy, "reward_std": reward_std}
        broken = [name for name, x in given.items() if x is not None and not math.isfinite(x)]
        if n is not None and not broken and not (n >= 1 and 0 <= heldout_score <= 1):
            raise ValueError(
                f"guard: heldout_score {heldout_score} of {n} answers: should be a share in [0, 1]"
            )
        s.updates += 1
        if not broken:
            self._follow(in_loop_reward, heldout_score, n)
            s.kl_ema, s.entropy_ema = (
                self._ema(s.kl_ema, kl_to_init),
                self._ema(s.entropy_ema, entropy),
            )
            s.reward_std_ema = self._ema(s.reward_std_ema, reward_std)
        not_finite = {"not_finite": f"{', '.join(broken)} not finite at step {round_idx}"}
        broke = not_finite if broken else self._judge(round_idx)
        latched = f"latched: {s.reason}" if s.reason else ""
        s.reason = s.reason or next(iter(broke.values()), "")
        s.fired |= {rule: why for rule, why in broke.items() if rule not in s.fired}
        s.last = TripwireStatus(
            fire=bool(s.reason),
            reason=latched or s.reason,
            round_idx=round_idx,
            proxy_real_gap=self.proxy_real_gap(),
            in_loop_ema=s.in_loop_ema,
            heldout_ema=s.heldout_ema,
            kl_ema=s.kl_ema,
            entropy_ema=s.entropy_ema,
            reward_std_ema=s.reward_std_ema,
            streak=s.streak,
        )
        return s.last

    def proxy_real_gap(self) -> float:
        """How much more in-loop has gained than held-out; 0 before the first update."""
        s = self._state
        if s.in_loop_ema is None or s.heldout_ema is None:
            return 0.0
        return (s.in_loop_ema - fmean(s.in_loop_base)) - (s.heldout_ema - fmean(s.heldout_base))

    @property
    def kl_hard_stop(self) -> float:
        """The limit in force, calibrated or not."""
        return self._state.kl_hard_stop

    @property
    def min_steps(self) -> int:
        return self.cfg.guard_warmup

    @property
    def decline_patience(self) -> int:
        return self.cfg.decline_patience

    @property
    def max_proxy_real_gap(self) -> float:
        return self.cfg.max_proxy_real_gap

    @property
    def ema_alpha(self) -> float:
        return self.cfg.ema_alpha

    def _follow(self, in_loop: float, heldout: float, n: int | None) -> None:
        s = self._state
        # the mean of the first values seeds both averages
        if len(s.in_loop_base) < self.cfg.guard_baseline:
            s.in_loop_base.append(in_loop)
            s.heldout_base.append(heldout)
            s.in_loop_ema, s.heldout_ema = fmean(s.in_loop_base), fmean(s.heldout_base)
            return
        old_in_loop, old_heldout = s.in_loop_ema, s.heldout_ema
        assert old_in_loop is not None
        assert old_heldout is not None
        s.in_loop_ema, s.heldout_ema = (
            self._ema(old_in_loop, in_loop),
            self._ema(old_heldout, heldout),
        )
        # The average falls towards its newest value; under "se" that value must itself lie beyond
        # chance.
        fell = s.heldout_ema < old_heldout - self.cfg.rise_eps
        if self.cfg.guard_rule == "se" and n is not None:
            fell = fell and heldout < old_heldout - standard_error(heldout, n)
        if fell:
            s.streak += s.in_loop_ema > old_in_loop + self.cfg.rise_eps
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
        if s.updates < self.min_steps:
            return {}
        broken = {}
        if s.kl_ema is not None and s.kl_ema > s.kl_hard_stop:
            broken["kl"] = (
                f"KL to the initial policy {s.kl_ema:.4f} > {s.kl_hard_stop:g} nats per token at step {step}"
            )
        if s.streak >= cfg.decline_patience:
            broken["streak"] = (
                f"held-out fell while in-loop rose, {s.streak} evaluations in a row, at step {step}"
            )
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
        return (
            self.halt if rules is None else bool({*rules, "not_finite"} & self._state.fired.keys())
        )

    @property
    def fired(self) -> dict[str, str]:
        """Every rule that was ever broken, in order of time, with its first reason."""
        return dict(self._state.fired)

    def last_status(self) -> TripwireStatus | None:
        """None before the first update."""
        return self._state.last if self._state.updates else None

    def raise_if_fired(self, status: TripwireStatus | None = None) -> None:
        """Raises CollapseStopError with this status, none: the last one, if it fires."""
        status = status or self._state.last
        if status.fire:
            raise CollapseStopError(status)

    def calibrate_kl_threshold(self, baseline_kls: Sequence[float], factor: float = 3.0) -> float:
        """Tighten the KL limit to `factor` × the mean of a healthy run's values; returns the limit in force.

        Raises ValueError on an empty list, on a value that is negative or not finite, on a factor that is not positive.
        """
        if (
            not baseline_kls
            or not all(0 <= x < math.inf for x in baseline_kls)
            or not 0 < factor < math.inf
        ):
            raise ValueError(
                f"calibrate_kl_threshold: {[*baseline_kls]} × {factor}: should be finite and not negative"
            )
        limit = max(KL_FLOOR, factor * fmean(baseline_kls))
        self._state.kl_hard_stop = min(self._state.kl_hard_stop, limit)
        return self.kl_hard_stop

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        known = {k: v for k, v in state.items() if k != "last"}
        self._state = replace(_State(**known), last=TripwireStatus(**state["last"]))
