"""The held-out kill switch: does the reward that training earns still mean what it should?

It is asked once per evaluation. The in-loop (proxy) reward is the flawed grader's; the held-out
score is the strict grader's, on problems that are never trained on. Both must be measured on the
same model and on the same scale, best as shares in [0, 1]: otherwise their difference would be that
of two models or of two units. Standard library only.

A rule is broken at an evaluation; the switch has **fired** once any rule was broken, and stays so.
Whether a run then halts is the caller's choice, by `should_halt` or `raise_if_fired`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from vgrout.config.settings import GuardConfig

USUAL = GuardConfig()
SCORES = ("in_loop_reward", "heldout_score")
# The smallest calibrated limit: below it, the estimator's rounding would fire the switch.
KL_FLOOR = 1e-6
NOT_FINITE = "not_finite"  # the rule that a number which is NaN or infinite breaks


@dataclass(frozen=True, slots=True)
class TripwireStatus:
    """The switch's verdict after an evaluation. None: not measured yet."""

    fire: bool = False  # whether any rule was broken, now or before
    reason: str = ""  # "latched: …" on every evaluation after the one that fired
    step: int = -1  # the round or step of that evaluation
    proxy_real_gap: float = 0.0
    in_loop_ema: float | None = None
    heldout_ema: float | None = None
    kl_ema: float | None = None
    entropy_ema: float | None = None
    reward_std_ema: float | None = None
    streak: int = 0

    @property
    def halt(self) -> bool:
        """The same as `fire`, under the name that it was published with."""
        return self.fire

    @property
    def round_idx(self) -> int:
        """The same as `step`, for a caller that counts rounds."""
        return self.step

    def line(self) -> str:
        """The verdict as a line of the log."""
        line = ""
        if self.in_loop_ema is not None:
            line += f"in-loop {self.in_loop_ema:.2f}, held-out {self.heldout_ema:.2f}, "
        line += f"gap {self.proxy_real_gap:+.2f}, declines in a row {self.streak}"
        if self.kl_ema is not None:
            line += f", KL {self.kl_ema:.4f} nats/token"
        if self.reason:
            line += f"; {self.reason}"
        return line


class CollapseStopError(RuntimeError):
    """The switch's verdict as an error, for a caller that wants one. `status` is the verdict."""

    def __init__(self, status: TripwireStatus) -> None:
        super().__init__(status.reason)
        self.status = status


def kl_token_trust_filter(logratio_sq_half: Any, threshold: float = 0.08) -> Any:
    """True for a token to mask out: one that has moved too far to be learnt from, or is NaN.

    logratio_sq_half: ½ · (log π − log π_old)², a number, an array or a tensor. threshold: the
    largest value that is still trusted.
    """
    return (logratio_sq_half <= threshold) ^ True


def as_number(x: Any) -> float:
    """A plain number: of a numpy scalar, an array or a tensor of one number, also one with a gradient."""
    return float(x.item() if hasattr(x, "item") else x)


def standard_error(share: float, n: int) -> float:
    """Standard error of a share of n, about the centre of Agresti & Coull (1998).

    One success and one failure are added, so that it is never 0.
    """
    p = (share * n + 1) / (n + 2)
    return math.sqrt(p * (1 - p) / n)


@dataclass(slots=True)
class _State:
    """What one evaluation passes on to the next."""

    kl_hard_stop: float
    updates: int = 0
    # By the names of `update`: the first values, whose mean seeds the average, and the average.
    first: dict[str, list[float]] = field(default_factory=dict)
    averages: dict[str, float] = field(default_factory=dict)
    streak: int = 0
    # Every rule that was ever broken, with its first reason.
    fired: dict[str, str] = field(default_factory=dict)
    last: TripwireStatus = field(default_factory=TripwireStatus)


class HeldOutGuard:
    """Fires when in-loop reward and held-out score diverge, or the policy has moved too far.

    Once it has fired, it stays so. From update `min_steps` on these rules are checked, in this
    order:

    - `kl`: the KL average is above its limit.
    - `streak`: held-out fell while in-loop rose, `decline_patience` evaluations in a row. An
      evaluation where held-out does not fall clears the count; one where it falls while in-loop is
      flat leaves it.
    - `gap`: (in-loop average − its baseline) − (held-out average − its baseline) is above
      `max_proxy_real_gap`.

    A number that is not finite fires at once, even in the warm-up: no comparison with a threshold
    would ever catch it.
    """

    def __init__(
        self,
        cfg: GuardConfig = USUAL,
        min_steps: int | None = None,
        baseline: int = 1,
        rise_eps: float = 1e-4,
        **settings: Any,
    ) -> None:
        """Make a switch that has seen nothing.

        min_steps: the first update that may fire; it takes the place of `guard_warmup`, which
        counts updates here too. baseline: the mean of so many first values of both scores is their
        baseline. rise_eps: an average that moves by no more than this counts as flat.
        settings: fields of `cfg` by name, as in HeldOutGuard(kl_hard_stop=0.05).

        Raises:
            TypeError: `cfg` is no GuardConfig, or there is no setting of that name.
            ValueError: a setting is out of its range.
        """
        if not isinstance(cfg, GuardConfig):
            raise TypeError(
                f"HeldOutGuard({cfg!r}): should be a GuardConfig; give a setting by its name, as in "
                "HeldOutGuard(kl_hard_stop=0.08)"
            )
        if min_steps is not None:
            settings["guard_warmup"] = min_steps
        for name, value in settings.items():
            if hasattr(value, "item"):  # of numpy or torch
                settings[name] = value.item()
        cfg = replace(cfg, **settings)
        self.min_steps = cfg.guard_warmup
        self.decline_patience = cfg.decline_patience
        self.max_proxy_real_gap = cfg.max_proxy_real_gap
        self.ema_alpha = cfg.ema_alpha
        self.rise_eps = rise_eps
        self.baseline = baseline
        self._state = _State(as_number(cfg.kl_hard_stop))

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

        Args:
            round_idx: number of the round or step just done. The verdict repeats it; two updates
                may have the same.
            in_loop_reward: mean reward, divided by the highest possible if the limit of the gap is
                to mean a share.
            heldout_score: strict score.
            kl_to_init: nats per token.
            entropy: nats per token. It is averaged and decides nothing, as is reward_std.
            reward_std: standard deviation of the rewards of a prompt.
            n: number of held-out answers that the score is a share of. Without it, a fall within
                the score's standard error counts as a fall.

        Raises:
            ValueError: n < 1, or a score over n answers that is no share of them.
        """
        round_idx = int(as_number(round_idx))
        given = {"in_loop_reward": in_loop_reward, "heldout_score": heldout_score}
        optional = {"kl_to_init": kl_to_init, "entropy": entropy, "reward_std": reward_std}
        given |= {name: x for name, x in optional.items() if x is not None}
        measured = {name: as_number(x) for name, x in given.items()}
        n = None if n is None else int(as_number(n))
        not_finite = [name for name, x in measured.items() if not math.isfinite(x)]
        held_out = measured["heldout_score"]
        if n is not None and not not_finite and not (n >= 1 and 0 <= held_out <= 1):
            raise ValueError(
                f"guard: heldout_score {held_out} of {n} answers: should be a share in [0, 1]"
            )
        s = self._state
        s.updates += 1
        if not_finite:
            broken = {NOT_FINITE: f"{', '.join(not_finite)} not finite at step {round_idx}"}
        else:
            self._follow(measured, n)
            broken = self._broken_rules(round_idx)
        reason = f"latched: {next(iter(s.fired.values()))}" if s.fired else ""
        for rule, why in broken.items():
            reason = reason or why
            s.fired.setdefault(rule, why)
        s.last = TripwireStatus(
            fire=self.should_halt(),
            reason=reason,
            step=round_idx,
            proxy_real_gap=self.proxy_real_gap(),
            in_loop_ema=s.averages.get("in_loop_reward"),
            heldout_ema=s.averages.get("heldout_score"),
            kl_ema=s.averages.get("kl_to_init"),
            entropy_ema=s.averages.get("entropy"),
            reward_std_ema=s.averages.get("reward_std"),
            streak=s.streak,
        )
        return s.last

    def proxy_real_gap(self) -> float:
        """How much more the in-loop average has gained than held-out's; 0 before any update."""
        if not self._state.averages:
            return 0.0
        return self._gain("in_loop_reward") - self._gain("heldout_score")

    def _gain(self, name: str) -> float:
        return self._state.averages[name] - fmean(self._state.first[name])

    @property
    def kl_hard_stop(self) -> float:
        """The limit in force, calibrated or not, in nats per token. It can be set, wider too.

        Raises:
            ValueError: when it is set to what is no positive number.
        """
        return self._state.kl_hard_stop

    @kl_hard_stop.setter
    def kl_hard_stop(self, limit: float) -> None:
        limit = as_number(limit)
        if not 0 < limit < math.inf:
            raise ValueError(f"guard: kl_hard_stop {limit}: should be a positive number")
        self._state.kl_hard_stop = limit

    def _follow(self, measured: Mapping[str, float], n: int | None) -> None:
        """Update the averages and the count of declines."""
        s = self._state
        before = dict(s.averages)
        seeding = len(s.first.get("heldout_score", [])) < self.baseline
        for name, value in measured.items():
            first = s.first.setdefault(name, [])
            if len(first) < (self.baseline if name in SCORES else 1):
                first.append(value)
                s.averages[name] = fmean(first)
            else:
                s.averages[name] = self.ema_alpha * before[name] + (1 - self.ema_alpha) * value
        if seeding:
            return
        # The average falls towards its newest value. Of a share of n answers that value must itself
        # lie beyond chance.
        held_out, average = measured["heldout_score"], before["heldout_score"]
        fell = s.averages["heldout_score"] < average - self.rise_eps
        if n is not None:
            fell = fell and held_out < average - standard_error(held_out, n)
        rose = s.averages["in_loop_reward"] > before["in_loop_reward"] + self.rise_eps
        if not fell:
            s.streak = 0
        elif rose:
            s.streak += 1

    def _broken_rules(self, step: int) -> dict[str, str]:
        """The rules broken now, in the order of the checks, each with its reason."""
        s = self._state
        if s.updates < self.min_steps:
            return {}
        broken: dict[str, str] = {}
        kl = s.averages.get("kl_to_init", 0.0)
        if kl > s.kl_hard_stop:
            broken["kl"] = (
                f"KL to the untrained model {kl:.4f} > {s.kl_hard_stop:g} nats per token "
                f"at step {step}"
            )
        if s.streak >= self.decline_patience:
            broken["streak"] = (
                f"held-out fell while in-loop rose, {s.streak} evaluations without a recovery, at step {step}"
            )
        gap = self.proxy_real_gap()
        if gap > self.max_proxy_real_gap:
            broken["gap"] = (
                f"in-loop gained {gap:.2f} more than held-out "
                f"(limit {self.max_proxy_real_gap:g}) at step {step}"
            )
        return broken

    def should_halt(self) -> bool:
        """Whether the switch has fired: any rule was ever broken."""
        return bool(self._state.fired)

    @property
    def fired(self) -> dict[str, str]:
        """Every rule that was ever broken with its first reason, in order of time."""
        return dict(self._state.fired)

    def last_status(self) -> TripwireStatus | None:
        """The verdict after the last update; None before the first."""
        return self._state.last if self._state.updates else None

    def raise_if_fired(self, status: TripwireStatus | None = None) -> None:
        """Raises CollapseStopError if this verdict, or without one the last, says that it fired."""
        status = status or self._state.last
        if status.fire:
            raise CollapseStopError(status)

    def calibrate_kl_threshold(self, baseline_kls: Sequence[float], factor: float = 3.0) -> float:
        """Tighten the KL limit to `factor` × the mean of a healthy run's values.

        Returns the limit in force, which is never looser than before.

        Raises:
            ValueError: an empty list, a value that is negative or not finite, or a factor that is
                not positive.
        """
        values = [as_number(x) for x in baseline_kls]
        factor = as_number(factor)
        if not values:
            raise ValueError("calibrate_kl_threshold: no value; give a healthy run's KLs")
        if not all(0 <= x < math.inf for x in values) or not 0 < factor < math.inf:
            raise ValueError(
                f"calibrate_kl_threshold: {values} × {factor}: should be finite and not negative"
            )
        limit = max(KL_FLOOR, factor * fmean(values))
        self._state.kl_hard_stop = min(self._state.kl_hard_stop, limit)
        return self.kl_hard_stop

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps: plain numbers, strings and lists, whatever numbers were given."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._state = _State(**state)
        self._state.last = TripwireStatus(**state["last"])
