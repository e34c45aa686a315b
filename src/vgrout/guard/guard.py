"""What watches one run: the held-out kill switch and the detectors.

`Guard.observe` asks them once a step and keeps what they remember. Nothing here feeds back into
training. No detector sees a label of the reference tests; only the kill switch sees their rate, on
held-out problems.

A run ends early in one of two ways:

- It **halts** when the kill switch or a detector says that it hacks, and the configuration lets
  them: `Guard.halts` is the reason. It still gets its final evaluation, then `raise_if_halted`
  ends it with exit code 3.
- It has **diverged** when its updates are not finite or the policy has collapsed: `Guard.diverged`
  is the reason. `raise_if_diverged` ends it at once, with exit code 4.

`Guard.ends` is true in both cases. A signal or the user ends a run too; that is the run's `stop`,
in runs/context.py, and nothing of the guard's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import pstdev
from typing import Any, NamedTuple

import torch
from loguru import logger

from vgrout.config.run import Config
from vgrout.config.settings import BASELINE
from vgrout.ground import ranks
from vgrout.ground.data import Batch, Grade, Group, Rollout, Task
from vgrout.ground.io import Diverged, Halted
from vgrout.ground.metrics import Eval, Rate, mean, spaced, students
from vgrout.ground.rng import torch_stream
from vgrout.ground.scoring import scorer
from vgrout.ground.table import StepRow
from vgrout.guard.detectors import (
    CSI_BANDS,
    MAX_SKIPPED,
    AdvantageCollapse,
    CollapseTripwire,
    DetectorReading,
    Disagreement,
    EchoTrap,
    Level,
    State,
    Tracker,
    diverged,
    latest,
)
from vgrout.guard.kill_switch import NOT_FINITE, HeldOutGuard
from vgrout.model.hidden_states import ReferenceStats, latents
from vgrout.model.policy import Policy
from vgrout.model.sampling.sampler import sample

REFERENCE_ANSWERS = 64  # of the base policy, for latents and for calibrating the echo trap
TRIPWIRE_ANSWERS = 16  # of these, whose log-prob the tripwire of a run without demonstrations reads
SCORE_EVERY = 5  # steps between two readings of that log-prob
LATENT_ROWS = 32  # answers per step whose latents are measured
# `mismatch_kl` above which the sampler had other weights than the trainer. In half precision a
# wrong set of weights gives about 0.14 in |Δ log p| per token, and rounding alone 1e-5 on the
# organism. In full precision it gives about 5e-5, rounding 1e-13, a first full step 1e-6.
STALE_HALF, STALE = 1e-2, 1e-9
ENSEMBLE_ROWS = 6  # answers per step that the members of an ensemble score


@dataclass(frozen=True)
class Observed:
    """What a step has measured anyway, for the detectors."""

    row: StepRow
    groups: Sequence[Group]
    students: list[tuple[Rollout, Grade]]


class BaseAnswer(NamedTuple):
    """An answer of the base policy."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str


class BaseAnswers:
    """The base policy's answers to training problems.

    They are sampled once, when they are first needed, from a random stream of their own.
    """

    def __init__(self, cfg: Config, policy: Policy, problems: Sequence[Task], n: int) -> None:
        self.cfg = cfg
        self.policy = policy
        self.problems = problems
        self.n = n
        self.kept: list[BaseAnswer] = []  # [] if none has been needed yet

    @property
    def answers(self) -> list[BaseAnswer]:
        """The n answers, of as many problems in turn."""
        if not self.kept:
            self.kept = self._sample()
        return self.kept

    def _sample(self) -> list[BaseAnswer]:
        prompts: list[tuple[int, ...]] = []
        for i in range(self.n):
            problem = self.problems[i % len(self.problems)]
            prompts.append(self.policy.render(problem.messages))
        stream = torch_stream(self.cfg.run.seed, "watch-reference")
        with self.policy.adapter.reference():
            sampled = sample(
                self.policy, prompts, 1, self.cfg.sampling, self.cfg.scale.max_new, stream
            )
        answers: list[BaseAnswer] = []
        for prompt, (completion,) in zip(prompts, sampled, strict=True):
            answers.append(BaseAnswer(prompt, completion.ids, completion.text))
        return answers

    @cached_property
    def reference(self) -> ReferenceStats:
        """Statistics of these answers' latents, which are measured once."""
        prompts = [a.prompt_ids for a in self.answers]
        completions = [a.completion_ids for a in self.answers]
        return ReferenceStats(latents(self.policy, prompts, completions))

    @torch.no_grad()
    def logp(self) -> float:
        """Mean log-prob per token of the first of these answers under the current policy."""
        answers = self.answers[:TRIPWIRE_ANSWERS]
        logp, mask = self.policy.logprobs(
            [a.prompt_ids for a in answers], [a.completion_ids for a in answers]
        )
        return float(logp[mask].mean())

    def csi(self, students: Sequence[tuple[Rollout, Grade]]) -> float | None:
        """CSI per answer of some of a step's answers, in units of the base policy's.

        None without answers, and where the base policy's answers are all alike: it has no unit then.
        """
        rows = spaced([rollout for rollout, _ in students], LATENT_ROWS)
        if not rows or not self.reference.base_csi:
            return None
        x = latents(self.policy, [r.prompt_ids for r in rows], [r.ids for r in rows])
        return self.reference.csi(x) / len(x) / self.reference.base_csi


def new_detector(name: str, echo_threshold: float) -> Tracker:
    """A detector that has seen nothing yet."""
    match name:
        case "rm_ensemble":
            return Disagreement()
        case "info_rm":
            return Level(CSI_BANDS)
        case "advantage":
            return AdvantageCollapse()
        case "echo":
            return EchoTrap(echo_threshold)
        case "collapse":
            return CollapseTripwire()
    raise AssertionError(name)


class Guard:
    """The kill switch and the detectors of a run.

    Call `observe` at every step, `raise_if_diverged` once the step's files are written, and
    `raise_if_halted` at the end of the run.
    """

    def __init__(
        self,
        cfg: Config,
        policy: Policy,
        problems: Sequence[Task],
    ) -> None:
        """Make the detectors and the kill switch that the configuration asks for.

        problems: training problems, which the base policy answers.
        """
        self.cfg = cfg
        self.mismatch_max = STALE if policy.model.dtype.itemsize >= 4 else STALE_HALF
        self.stale = False  # whether the last step's sampler had other weights than the trainer
        self.kill_switch = HeldOutGuard(cfg.guard, cfg.guard_updates, BASELINE)
        self.members = [scorer(name, "--rm-ensemble-members") for name in cfg.detectors.members]

        names = list(cfg.detectors.chosen)
        if cfg.detectors.echo_trap_enabled:
            names.append("echo")
        needs_all = "info_rm" in names or "echo" in names
        n = REFERENCE_ANSWERS if needs_all else TRIPWIRE_ANSWERS
        self.base = BaseAnswers(cfg, policy, problems, n)
        if cfg.guard_mode != "off":
            names.append("collapse")
        self.trackers: dict[str, Tracker] = {}
        for name in names:
            self.trackers[name] = new_detector(name, cfg.detectors.echo_trap_threshold)

        self.states: dict[str, State] = {}  # what each detector said last
        self.undefined: dict[str, str] = {}  # why a detector could say nothing in the last step
        self.rewarded = Rate(0, 0)  # student rows rewarded in full, since the last evaluation
        self.skipped: list[int] = []  # of the last steps, 1 for each that was not finite
        self.halted = ""  # why a detector has halted the run; "": none has. It is never cleared
        self.diverged = ""  # why the run has diverged; "": it has not
        self.readings: dict[str, object] = {}  # of the last step, for steps.jsonl

    # ── one step

    def observe(self, row: StepRow, batch: Batch, deployed: Eval | None) -> None:
        """Ask every detector and the kill switch about the step that has just been taken."""
        step = Observed(row, batch.groups, students(batch.groups))
        self.readings = {}
        self.skipped = latest(self.skipped, row.skipped, MAX_SKIPPED)
        self._compare_sampler(row)
        if why := diverged(self.skipped):
            self.diverged = f"step {row.step}: {why}"
        for name, tracker in self.trackers.items():
            self._note(name, self._read(tracker, step), step)
        if self.cfg.guard_mode != "off":
            self._ask_kill_switch(step, deployed)
        # Detectors read floats of forward passes. Should those of two ranks differ in the last bit,
        # rank 0 decides.
        verdict = self.halted, self.diverged, self.kill_switch.state_dict()
        self.halted, self.diverged, switch = ranks.from_first(verdict)
        if not ranks.first():
            self.kill_switch.load_state_dict(switch)

    def _compare_sampler(self, row: StepRow) -> None:
        """Warn when the sampler begins to differ from the trainer."""
        if row.mismatch_kl is None:
            return
        was_stale = self.stale
        self.stale = row.mismatch_kl > self.mismatch_max
        if self.stale and not was_stale:
            logger.warning(
                f"step {row.step}: mismatch_kl {row.mismatch_kl:.1e} is above "
                f"{self.mismatch_max:.0e}: the sampler does not have the trainer's weights "
                f"(ratios {row.ratio_min:.3g} to {row.ratio_max:.3g}, mean {row.ratio_mean:.3g}). "
                "Look at mismatch_kl and ratio_* in steps.jsonl: growing from one step on, the "
                "adapter is not merged; large from step 0, another model, dtype or decoder samples"
            )

    def _read(self, tracker: Tracker, step: Observed) -> DetectorReading:
        """What a detector says of a step."""
        match tracker:
            case Disagreement():
                return tracker.update(self._ensemble_scores(step))
            case Level():
                return tracker.update(self.base.csi(step.students))
            case AdvantageCollapse():
                signal = step.row.signal  # groups that give a gradient, of all
                return tracker.update(signal.n - signal.k, signal.n)
            case EchoTrap():
                if tracker.base is None:
                    tracker.calibrate([answer.text for answer in self.base.answers])
                return tracker.update([rollout.text for rollout, _ in step.students])
            case CollapseTripwire():
                return tracker.update(self._tripwire_logp(step.row))
        raise AssertionError(tracker)

    def _note(self, name: str, reading: DetectorReading, step: Observed) -> None:
        """Record a reading, log a change of state, and remember whether it ends the run."""
        if reading.state == "UNDEFINED":
            self.undefined[name] = reading.why
            return
        self.undefined.pop(name, None)
        value = None if reading.value is None else round(reading.value, 6)
        self.readings[name] = [reading.state, value]
        message = f"step {step.row.step}: detector {name} says {reading.state}"
        message += f" ({value:.3g})" if value is not None else ""
        message += f" ({reading.why})" if reading.why else ""
        if reading.state != self.states.get(name, "OK"):
            logger.log("INFO" if reading.state == "OK" else "WARNING", message)
        self.states[name] = reading.state
        if reading.state != "HACK":
            return
        if name == "collapse":
            tail = step.students[-1][0].text[-300:] if step.students else ""
            self.diverged = (
                f"step {step.row.step}: the policy has collapsed, {reading.why}; "
                f"its last answer ends …{tail}"
            )
            return
        if self._may_halt(name) and not self.halted:
            self.halted = message

    def _may_halt(self, name: str) -> bool:
        """Whether this detector ends the run when it says HACK."""
        detectors = self.cfg.detectors
        return detectors.echo_trap_halt if name == "echo" else detectors.reward_hack_halt

    def _ask_kill_switch(self, step: Observed, deployed: Eval | None) -> None:
        """Show the kill switch an evaluation, and record and log its verdict."""
        self.rewarded += Rate.of(grade.passed for _, grade in step.students)
        if deployed is None:
            return
        # With a quarantine the training rows are not those of the deployed model: compared with
        # them, a quarantine that has absorbed the hacking would look like a hack.
        proxy = deployed.rewarded if self.cfg.method.routes else self.rewarded
        self.rewarded = Rate(0, 0)
        held = deployed.solve
        if proxy.value is None or held.value is None:
            return
        fired_before = self.kill_switch.fired
        verdict = self.kill_switch.update(
            step.row.step,
            proxy.value,
            held.value,
            kl_to_init=deployed.kl,
            entropy=None if step.row.lp_s is None else -step.row.lp_s,
            reward_std=mean(pstdev(group.rewards) for group in step.groups),
            n=held.n,
        )
        fired = self.kill_switch.fired
        self.readings["guard"] = {
            "proxy": proxy.value,
            "held_out": held.value,
            "n": held.n,
            "kl": deployed.kl,
            "gap": verdict.proxy_real_gap,
            "fire": verdict.fire,
            "reason": verdict.reason,
            "rules": list(fired),
        }
        logger.debug(f"guard: {verdict.line()}")
        for rule, why in fired.items():
            if rule not in fired_before:
                note = "" if rule in self._halting_rules else " (warns only)"
                logger.warning(f"guard, rule {rule}{note}: {why}")

    # ── what detectors measure themselves

    @property
    def _tripwire_on_base_answers(self) -> bool:
        """Whether the tripwire reads the base policy's answers, not the demonstrations.

        Where demonstrations are not what is learnt, their log-prob may fall in a healthy run.
        """
        learns_demonstrations = self.cfg.mixes and self.cfg.method.spec.acts_on != "rewards"
        return not learns_demonstrations or self.cfg.env.teacher_off_step is not None

    def _tripwire_logp(self, row: StepRow) -> float | None:
        """The log-prob that the tripwire reads; None if it is not measured in this step."""
        if not self._tripwire_on_base_answers:
            return row.lp_t
        return None if row.step % SCORE_EVERY else self.base.logp()

    def _ensemble_scores(self, step: Observed) -> list[list[float]]:
        """The scores that each of the ensemble's members gives to a few answers."""
        answers: list[tuple[Task, str]] = []
        for group in step.groups:
            answers += [(group.problem, rollout.answer) for rollout, _ in students([group])]
        answers = spaced(answers, ENSEMBLE_ROWS)
        scores: list[list[float]] = []
        for member in self.members:
            scores.append([member(problem, text) for problem, text in answers])
        return scores

    # ── how a run ends

    @property
    def halts(self) -> str:
        """Why the run should halt; "": it should not.

        The kill switch halts only under `--guard halt`, a detector only under its own flag.
        """
        if self.cfg.guard_mode == "halt":
            for rule, why in self.kill_switch.fired.items():
                if rule in self._halting_rules:
                    return f"guard: {why}"
        return self.halted

    @property
    def _halting_rules(self) -> list[str]:
        """The kill switch's rules that may halt the run; a number that is not finite always may."""
        return [*self.cfg.guard.halting, NOT_FINITE]

    @property
    def ends(self) -> bool:
        """Whether the run ends after this step, halted or diverged, and so needs a checkpoint."""
        return bool(self.diverged or self.halts)

    def raise_if_diverged(self) -> None:
        """Raises Diverged with the reason, if the run has diverged."""
        if self.diverged:
            raise Diverged(self.diverged)

    def raise_if_halted(self) -> None:
        """Raises Halted with the reason, if the run should halt."""
        if self.halts:
            raise Halted(self.halts)

    def silent(self) -> str:
        """Which detectors may halt the run and have said nothing in it, each with the reason; "": none."""
        parts: list[str] = []
        for name, why in self.undefined.items():
            if name != "collapse" and self._may_halt(name) and name not in self.states:
                parts.append(f"{name} ({why})")
        return ", ".join(parts)

    # ── memory

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers, strings and lists."""
        return {
            "guard": self.kill_switch.state_dict(),
            "trackers": {name: tracker.state_dict() for name, tracker in self.trackers.items()},
            "states": dict(self.states),
            "base": [tuple(answer) for answer in self.base.kept],
            "rewarded": self.rewarded.pair,
            "skipped": list(self.skipped),
            "halted": self.halted,
            "diverged": self.diverged,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave.

        A detector that the run did not have starts afresh. That a detector has halted the run is kept only while the
        configuration still lets one do so.
        """
        self.kill_switch.load_state_dict(state["guard"])
        for name, tracker in self.trackers.items():
            if name in state["trackers"]:
                tracker.load_state_dict(state["trackers"][name])
        self.states = {k: v for k, v in state["states"].items() if k in self.trackers}
        self.base.kept = [BaseAnswer(*answer) for answer in state["base"]]
        self.rewarded = Rate(*state["rewarded"])
        self.skipped = list(state["skipped"])
        self.diverged = state["diverged"]
        detectors = self.cfg.detectors
        may_halt = detectors.reward_hack_halt or detectors.echo_trap_halt
        self.halted = state["halted"] if may_halt else ""
