"""The kill switch and the detectors of one run: one call a step, one place for what they remember.

Nothing here feeds back into training, and no detector sees a label of the strict oracle; only the kill switch sees its
rate on held-out problems.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Any

import torch
from loguru import logger

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.data import Batch, Grade, Group, Rollout, Task
from vgrout.errors import Diverged, Halted
from vgrout.guard.detectors import (
    CSI_BANDS,
    MAX_SKIPPED,
    AdvantageCollapse,
    CollapseTripwire,
    DetectorReading,
    Drop,
    EchoTrap,
    Level,
    State,
    Tracker,
    diverged,
    ensemble_divergence,
)
from vgrout.guard.kill_switch import HeldOutGuard
from vgrout.metrics import Eval, Rate, mean, spaced, students
from vgrout.model.hidden_states import ReferenceStats, latents
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.rng import torch_stream
from vgrout.scoring import scorer
from vgrout.table import StepRow

REFERENCE_ANSWERS = 64  # of the base policy, for latents and for calibrating the echo trap
TEACHERLESS = 16  # of these, for the tripwire of a run without demonstrations
SCORE_EVERY = 5  # steps between two scores of these
LATENT_ROWS = 32  # answers per step whose latents are measured
# mismatch_kl above which the sampler had other weights than the trainer. In half precision |Δ log
# p| is about 0.14 per token, and rounding alone gives 1e-5 on the organism. Else it is about 5e-5;
# rounding gives 1e-13, a first full step 1e-6.
STALE_HALF, STALE = 1e-2, 1e-9
ENSEMBLE_ROWS = 6  # answers per step that the members of an ensemble score


@dataclass(frozen=True)
class Moment:
    """What a step has measured anyway."""

    row: StepRow
    groups: Sequence[Group]
    students: list[tuple[Rollout, Grade]]


class BaseAnswers:
    """The base policy's answers to training problems, sampled once, when first needed, from their own random stream."""

    def __init__(self, cfg: Config, policy: Policy, problems: Sequence[Task], n: int) -> None:
        self.cfg, self.policy, self.problems, self.n = cfg, policy, problems, n
        self._rows: list[tuple[tuple[int, ...], tuple[int, ...], str]] = []  # prompt, answer, text
        self._reference: ReferenceStats | None = None

    @property
    def rows(self) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
        if not self._rows:
            prompts = [
                self.policy.render(self.problems[i % len(self.problems)].messages)
                for i in range(self.n)
            ]
            stream = torch_stream(self.cfg.run.seed, "watch-reference")
            with self.policy.adapter.reference():
                answers = sample(
                    self.policy, prompts, 1, self.cfg.sampling, self.cfg.scale.max_new, stream
                )
            self._rows = [(p, a.ids, a.text) for p, (a,) in zip(prompts, answers, strict=True)]
        return self._rows

    @property
    def reference(self) -> ReferenceStats:
        if self._reference is None:
            prompts, answers, _ = zip(*self.rows, strict=True)
            self._reference = ReferenceStats(latents(self.policy, prompts, answers))
        return self._reference

    @torch.no_grad()
    def logp(self) -> float:
        """Mean log-prob per token of these answers under the current policy."""
        prompts, answers, _ = zip(*self.rows[:TEACHERLESS], strict=True)
        logp, mask = self.policy.logprobs(prompts, answers)
        return float(logp[mask].mean())

    def csi(self, m: Moment) -> float | None:
        """CSI per answer of some of the step's answers, in units of the base policy's."""
        rows = spaced([r for r, _ in m.students], LATENT_ROWS)
        if not rows:
            return None
        x = latents(self.policy, [r.prompt_ids for r in rows], [r.completion_ids for r in rows])
        return self.reference.csi(x) / len(x) / self.reference.base_csi

    def state_dict(self) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
        return self._rows

    def load_state_dict(self, state: list[Any]) -> None:
        self._rows = [(tuple(p), tuple(a), text) for p, a, text in state]


class Guard:
    """`observe` each step; once the run's files are written, `raise_if_diverged`, and at the end `raise_if_halted`."""

    def __init__(
        self,
        cfg: Config,
        policy: Policy,
        problems: Sequence[Task],
        healthy_kl: Sequence[float] = (),
    ) -> None:
        """problems: training problems, for the base policy's answers. healthy_kl: KL of the runs that calibrate the
        limit, nats per token."""
        self.cfg = cfg
        self.mismatch_max = STALE if policy.model.dtype.itemsize >= 4 else STALE_HALF
        self.stale = False  # whether the last step's sampler had other weights than the trainer
        self.kill_switch = HeldOutGuard(cfg.guard, cfg.guard_updates)
        if healthy_kl:
            limit = self.kill_switch.calibrate_kl_threshold(healthy_kl)
            logger.debug(
                f"the guard's KL limit: {limit:.3g} nats a token, from {cfg.guard.kl_calibrate_from}"
            )
        self.members = [scorer(name, "--rm-ensemble-members") for name in cfg.detectors.members]
        wanted = [*cfg.detectors.chosen, *(["echo"] if cfg.detectors.echo_trap_enabled else [])]
        full = bool({"info_rm", "echo"} & set(wanted))
        self.base = BaseAnswers(cfg, policy, problems, REFERENCE_ANSWERS if full else TEACHERLESS)
        self.trackers: dict[str, Tracker] = {}
        self.read: dict[str, Callable[[Moment], DetectorReading]] = {}
        for name in [*wanted, *(["collapse"] if cfg.guard_mode != "off" else [])]:
            self.trackers[name], self.read[name] = self._detector(name)
        self.states: dict[str, State] = {}
        self.rewarded = Rate(0, 0)  # student rows rewarded in full, since the last evaluation
        self.skipped: list[int] = []  # 1 for each of the last steps that was not finite
        self.halted = ""  # why a detector that may halt the run has done so
        self.diverged = ""
        self.readings: dict[str, Any] = {}  # of the last step, for steps.jsonl
        if cfg.guard_mode == "log" and (why := cfg.guard_blind):
            logger.debug(f"the guard cannot fire in this run: {why}")

    def _detector(self, name: str) -> tuple[Tracker, Callable[[Moment], DetectorReading]]:
        """A detector's state, and how it reads a step."""
        match name:
            case "rm_ensemble":
                health = Drop()
                return health, lambda m: health.update(self._ensemble_health(m))
            case "info_rm":
                csi = Level(CSI_BANDS)
                return csi, lambda m: csi.update(self.base.csi(m))
            case "advantage":
                dead = AdvantageCollapse()
                return dead, lambda m: dead.update(m.row.signal.n - m.row.signal.k, m.row.signal.n)
            case "echo":
                echo = EchoTrap(self.cfg.detectors.echo_trap_threshold)
                return echo, lambda m: self._echo(echo, m)
            case "collapse":
                wire = CollapseTripwire()
                # where demonstrations are not what is learnt, their log-prob may fall in a healthy
                # run
                taught = self.cfg.mixes and not self.cfg.method.changes_rewards
                teacherless = not taught or self.cfg.env.teacher_off_step is not None
                return wire, lambda m: wire.update(
                    self._reference_logp(m) if teacherless else m.row.lp_t
                )
        raise AssertionError(name)

    # --- one step
    # ----------------------------------------------------------------------------------------------------

    def observe(self, row: StepRow, batch: Batch, deployed: Eval | None) -> None:
        """Ask every detector and the kill switch, on what this step has measured anyway."""
        m = Moment(row, batch.groups, students(batch.groups))
        self.readings = {}
        self.skipped = [*self.skipped, row.skipped][-MAX_SKIPPED:]
        self._compare_sampler(row)
        if why := diverged(self.skipped):
            self.diverged = f"step {row.step}: {why}"
        for name, read in self.read.items():
            self._note(name, read(m), m)
        if self.cfg.guard_mode != "off":
            self._ask_kill_switch(m, deployed)
        # Detectors read floats of forward passes: should ranks differ in the last bit, rank 0
        # decides.
        verdict = self.halted, self.diverged, self.kill_switch.state_dict()
        self.halted, self.diverged, switch = ranks.from_first(verdict)
        if not ranks.first():
            self.kill_switch.load_state_dict(switch)

    def _compare_sampler(self, row: StepRow) -> None:
        """Warn when the sampler begins to differ from the trainer."""
        if row.mismatch_kl is None:
            return
        was, self.stale = self.stale, row.mismatch_kl > self.mismatch_max
        if self.stale and not was:
            logger.warning(
                f"step {row.step}: mismatch_kl {row.mismatch_kl:.1e} is above {self.mismatch_max:.0e}: the sampler "
                f"does not have the trainer's weights (ratios {row.ratio_min:.3g} to {row.ratio_max:.3g}, mean "
                f"{row.ratio_mean:.3g}). Look at mismatch_kl and ratio_* in steps.jsonl: growing from one step on, the "
                "adapter is not merged; large from step 0, another model, dtype or decoder samples"
            )

    def _note(self, name: str, reading: DetectorReading, m: Moment) -> None:
        """Record a reading, log a change of state, and remember whether it ends the run."""
        if reading.state == "UNDEFINED":
            return
        value = None if reading.value is None else round(reading.value, 6)
        self.readings[name] = [reading.state, value]
        message = f"step {m.row.step}: detector {name} says {reading.state}"
        message += f" ({value:.3g})" if value is not None else ""
        message += f" ({reading.why})" if reading.why else ""
        if reading.state != self.states.get(name, "OK"):
            logger.log("INFO" if reading.state == "OK" else "WARNING", message)
        self.states[name] = reading.state
        if reading.state != "HACK":
            return
        d = self.cfg.detectors
        if name == "collapse":
            tail = m.students[-1][0].text[-300:] if m.students else ""
            self.diverged = f"step {m.row.step}: the policy has collapsed, {reading.why}; its last answer ends …{tail}"
        elif not self.halted and (d.echo_trap_halt if name == "echo" else d.reward_hack_halt):
            self.halted = message

    def _ask_kill_switch(self, m: Moment, deployed: Eval | None) -> None:
        self.rewarded += Rate.of(grade.passed for _, grade in m.students)
        if deployed is None:
            return
        # With a quarantine the training rows are not those of the deployed model: compared with
        # them, a quarantine that has absorbed the hacking would look like a hack.
        proxy = deployed.rewarded if self.cfg.method.routes else self.rewarded
        self.rewarded = Rate(0, 0)
        before, held = self.kill_switch.fired, deployed.solve
        if proxy.value is None or held.value is None:
            return
        entropy = None if m.row.lp_s is None else -m.row.lp_s
        spread = mean(pstdev(group.rewards) for group in m.groups)
        verdict = self.kill_switch.update(
            m.row.step, proxy.value, held.value, deployed.kl, entropy, spread, n=held.n
        )
        self.readings["guard"] = {
            "proxy": proxy.value,
            "held_out": held.value,
            "n": held.n,
            "kl": deployed.kl,
            "gap": verdict.proxy_real_gap,
            "fire": verdict.fire,
            "reason": verdict.reason,
            "rules": [*self.kill_switch.fired],
        }
        logger.debug(f"guard: {verdict.line()}")
        for rule, why in self.kill_switch.fired.items():
            if rule not in before:
                counts = rule in self.cfg.guard.halting or rule == "not_finite"
                logger.warning(f"guard, rule {rule}{'' if counts else ' (warns only)'}: {why}")

    # --- how a run ends
    # ----------------------------------------------------------------------------------------------

    @property
    def halts(self) -> str:
        """Why the run should halt; "": it should not."""
        switch, rules = self.kill_switch, self.cfg.guard.halting
        if self.cfg.guard_mode == "halt" and switch.should_halt(rules):
            return f"guard: {next(why for rule, why in switch.fired.items() if rule in (*rules, 'not_finite'))}"
        return self.halted

    @property
    def ends(self) -> bool:
        """Whether the run ends after this step, so that its state needs a checkpoint."""
        return bool(self.diverged or self.halts)

    def raise_if_diverged(self) -> None:
        """Raises Diverged, with the reason."""
        if self.diverged:
            raise Diverged(self.diverged)

    def raise_if_halted(self) -> None:
        """Raises Halted, with the reason."""
        if why := self.halts:
            raise Halted(why)

    def summary(self) -> str:
        """For the end of the log: who watched, and what was seen."""
        who = ["guard"] if self.cfg.guard_mode != "off" else []
        states = ", ".join(f"{name} {self.states.get(name, 'UNDEFINED')}" for name in self.trackers)
        rules = ", ".join(self.kill_switch.fired)
        gap = (
            f"gap {self.kill_switch.proxy_real_gap():+.2f}{f', fired: {rules}' if rules else ''}"
            if who
            else ""
        )
        return "watched: " + "; ".join(part for part in (gap, states) if part)

    # --- what detectors measure themselves
    # ----------------------------------------------------------------------------

    def _echo(self, trap: EchoTrap, m: Moment) -> DetectorReading:
        if trap.base is None:
            trap.calibrate([text for _, _, text in self.base.rows])
        return trap.update([r.text for r, _ in m.students])

    def _reference_logp(self, m: Moment) -> float | None:
        return None if m.row.step % SCORE_EVERY else self.base.logp()

    def _ensemble_health(self, m: Moment) -> float | None:
        """1 / (1 + divergence) of the members on a few answers."""
        answers = [(r.problem, r.text) for r, _ in spaced(m.students, ENSEMBLE_ROWS)]
        scores = [[member(*answer) for answer in answers] for member in self.members]
        return 1 / (1 + ensemble_divergence(scores)) if answers else None

    # --- memory
    # ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return {
            "guard": self.kill_switch.state_dict(),
            "trackers": {name: tracker.state_dict() for name, tracker in self.trackers.items()},
            "states": dict(self.states),
            "base": self.base.state_dict(),
            "rewarded": self.rewarded.pair,
            "skipped": list(self.skipped),
            "halted": self.halted,
            "diverged": self.diverged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; a detector that the run did not have starts afresh. That a detector has halted the run is kept only
        while the configuration still lets one do so."""
        self.kill_switch.load_state_dict(state["guard"])
        for name, tracker in self.trackers.items():
            if name in state["trackers"]:
                tracker.load_state_dict(state["trackers"][name])
        self.states = {k: v for k, v in state["states"].items() if k in self.trackers}
        self.base.load_state_dict(state["base"])
        self.rewarded, self.skipped, self.diverged = (
            Rate(*state["rewarded"]),
            list(state["skipped"]),
            state["diverged"],
        )
        d = self.cfg.detectors
        self.halted = state["halted"] if d.reward_hack_halt or d.echo_trap_halt else ""
