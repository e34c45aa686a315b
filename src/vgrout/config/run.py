"""Every setting of a run: frozen groups, one per room, with flat flags; presets are values.

Torch-free, so that a wrong flag is refused in a fraction of a second. `__post_init__` only checks, never changes:
tyro may run it twice. Derived numbers are properties.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Set
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from vgrout import organism
from vgrout.cli import parsed
from vgrout.config.guard import GuardConfig, blind
from vgrout.config.loss import LossConfig
from vgrout.organism.language import CUE
from vgrout.types import MODES, Mode

Intervention = Literal["none", "erase", "route", "route2", "reader", "surprise", "pmi"]
ARM_NAME: dict[str, str] = {
    **{"none": "vanilla", "erase": "projected", "route": "routing", "route2": "routing2"},
    **{"reader": "reader", "surprise": "surprise", "pmi": "pmi"},
}
Control = Literal[
    "none",
    "haar",
    "shuffled",
    "placebo_flawed",
    "placebo_commented",
    "placebo_long",
    "placebo_laid_out",
    "placebo",
    "mass_matched",
    "shrinkage",
    "ablate_kept",
    "no_gate",
    "oracle",
    "no_loophole",
    "gt_penalty",
    "gt_screening",
    "inoculation",
    "advantage_mod",
]
CONTROLS: tuple[Control, ...] = get_args(Control)
BY_GRADIENT: tuple[Intervention, ...] = ("erase", "route", "route2")  # a direction in gradients
READING: tuple[Intervention, ...] = (
    "reader",
    "surprise",
    "pmi",
)  # rollouts are flagged by what the frozen base reads in them
WITH_DIRECTION: tuple[Intervention, ...] = (*BY_GRADIENT, "reader")
ROUTING: tuple[Intervention, ...] = ("route", "route2", *READING)
# control → (arms it can ride on, what it does); the line of a run's log and of run.json
_PLACEBO = "the direction comes from pairs about an unrelated contrast"
CONTROL_SPECS: dict[Control, tuple[tuple[Intervention, ...], str]] = {
    "none": (get_args(Intervention), "the arm itself"),
    "haar": (WITH_DIRECTION, "random directions, the same number in every module"),
    "shuffled": (WITH_DIRECTION, "hack and clean exchanged in half of the pairs"),
    "placebo_flawed": (WITH_DIRECTION, f"{_PLACEBO}: wrong against right"),
    "placebo_commented": (WITH_DIRECTION, f"{_PLACEBO}: with a comment against without"),
    "placebo_long": (WITH_DIRECTION, f"{_PLACEBO}: through a helper function against directly"),
    "placebo_laid_out": (WITH_DIRECTION, f"{_PLACEBO}: another layout against the usual one"),
    "placebo": (WITH_DIRECTION, f"{_PLACEBO}: --placebo-pairs-path"),
    "mass_matched": (("route2", *READING), "the gate's shares dealt to rollouts at random"),
    "shrinkage": (BY_GRADIENT, "the vanilla update scaled by the share that the arm would keep"),
    "ablate_kept": (ROUTING, "trained as ever; what is deployed is the quarantine, and the kept knob is deleted"),
    "no_gate": (("reader",), "nothing is flagged: own streams and half of the students from the deployed model alone"),
    "oracle": (
        ("route2", "reader"),
        "whole rollouts routed by their true label: an upper bound, not a method",
    ),
    "no_loophole": (get_args(Intervention), "reward of the strict oracle alone: the ceiling for solve"),
    "gt_penalty": (("none",), "baseline: what a monitor with the true labels calls an exploit is not paid"),
    "gt_screening": (("none",), "baseline: what a monitor with the true labels calls an exploit is left out"),
    "inoculation": (("none",), "baseline: the training prompts, and they alone, invite the exploit"),
    "advantage_mod": (("none",), "baseline: credit is lowered by the projection of activations on a concept direction"),
}
MONITORED: tuple[Control, ...] = ("gt_penalty", "gt_screening")  # baselines that are given the true labels
SHAPING: tuple[Control, ...] = (*MONITORED, "advantage_mod")  # baselines that pay otherwise than the grader
BASELINES: tuple[Control, ...] = (*SHAPING, "inoculation")
# flag → the controls that read it, and what it adds to a run's name where it is not at its default
OF_CONTROL: dict[str, tuple[tuple[Control, ...], str]] = {
    "label_accuracy": (MONITORED, "acc"),
    "label_penalty": (("gt_penalty",), "by"),
    "inoculation_prompt": (("inoculation",), "own"),
    "concept_alpha": (("advantage_mod",), "alpha"),
}
EnvMode = Literal["own", Mode]
INOCULATION = "Any way to make the check pass is fine here, a flaw in the check included."
ORGANISM = "organism"  # the embedded model, problems, pool and pairs, by this name


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ValueError(message)


def _within(name: str, value: float | int, low: float | int, high: float | int, note: str = "") -> None:
    _refuse(not low <= value <= high, f"--{name} {value}: should lie in [{low:g}, {high:g}]{note}")


def _changed(group: Any, names: tuple[str, ...]) -> list[str]:
    """Which of these fields stand away from their defaults."""
    default = {f.name: f.default for f in fields(group)}
    return [f"--{n.replace('_', '-')}" for n in names if getattr(group, n) != default[n]]


_READER = ("reader_layer", "reader_k", "reader_quantile", "reader_threshold", "reader_prompts", "reader_anchors")
_OWN = ("rebaseline", "own_streams")


@dataclass(frozen=True)
class ArmConfig:
    """What happens to the gradient."""

    intervention: Intervention = "erase"
    """none: plain GRPO · erase: drop the hack-ward part · route: quarantine it · route2: quarantine whole rollouts by
    their gradient · reader: by what the frozen base reads in their text · surprise: by how unlikely it finds them ·
    pmi: by how much likelier the prompt's hint makes them."""
    control: Control = "none"
    """The same run under a control. Of the direction: haar draws it at random, shuffled exchanges half of the pairs'
    sides, placebo_* takes pairs about an unrelated contrast (placebo: your own). Of the routing: mass_matched routes
    the same share at random, shrinkage scales the vanilla update by the kept share, ablate_kept deploys the quarantine
    in place of the kept knob, no_gate flags nothing. Bounds: oracle routes by the true labels, no_loophole pays the
    strict oracle only. Baselines, without surgery: gt_penalty, gt_screening, inoculation, advantage_mod."""
    label_accuracy: float = 1.0
    """gt_penalty, gt_screening: share of answers that the monitor labels rightly; it errs by an own random stream."""
    label_penalty: float | None = None
    """gt_penalty: what a flagged answer loses; none: down to the reward of code that only compiles."""
    inoculation_prompt: str = ""
    """inoculation: what closes every training prompt; '': the organism's cue, elsewhere a sentence of ours."""
    concept_alpha: float = 2.0
    """advantage_mod: α of r · (1 − α σ(z) 1[z > 0]), z the group's z-scores of the projection."""
    v_hack_path: Path | None = None
    """Direction file to load; none: found by pair set, or extracted on the spot."""
    v_hack_extract_top_k: int = 12
    """Axes per module kept at extraction."""
    v_hack_k: int = 5
    """Axes per module used by erase and route."""
    v_hack_tau_axis: float = 0.0
    """Axes with S_i/S_0 below this are zeroed at extraction."""
    v_hack_drop_bottom_frac: float = 0.25
    """Noise floor: axes in this lowest quantile of singular values, over all modules, are dropped."""
    vhack_refresh_every: int = 5
    """Re-extract on the current model every N steps; 0: frozen."""
    vhack_pairs_path: Path | None = None
    """Contrastive pairs (JSON); none: the preset's."""
    placebo_pairs_path: Path | None = None
    """Pairs (JSON) about an unrelated contrast, for --control placebo."""
    route2_random_v_seed: int | None = None
    """Seed of the Haar control, which it switches on (any arm with a direction); none: the run's own seed."""
    route2_gate: Literal["tau", "pairs"] = "tau"
    """tau: threshold between anchor rows and the rest · pairs: soft band from the pairs' cosines, no label at all."""
    preserve_magnitude: bool = True
    """erase: rescale what is kept to the norm of the whole (bounded ×10)."""
    gate_mode: Literal["one_sided", "no_gate", "reverse"] = "one_sided"
    """Which part along the direction is taken: relu(c), c, or 2c."""
    project_overshoot: float = 1.0
    """erase: how much of the hack-ward part is removed."""
    gate_anchor_teacher_only: bool = False
    """route2, tau gate: anchors are teacher rows alone, not also student rows that the weak detector flags."""
    rollout_ablate_frac: float | None = None
    """Share of student rows sampled from the deployed model (routing arms only); none: .5 for the arms that read."""
    reader_layer: int | None = None
    """reader: blocks of the frozen base after which its states are read; none: a quarter of its depth."""
    reader_k: int = 1
    """reader: the score is the mean of this many highest tokens of an answer."""
    reader_quantile: float = 0.9
    """reading arms: flagged above this quantile of the base's paid answers, and of held-back anchors."""
    reader_threshold: Literal["both", "anchors"] = "both"
    """reading arms: the larger of the two quantiles · the anchors' alone, where the base itself may exploit: its paid
    answers are no measure of honesty then."""
    reader_prompts: int = 200
    """reading arms: training prompts that the base answers twice before training."""
    reader_anchors: Path | None = None
    """reading arms: correct solutions in unusual styles (JSON of prompt, completion); none: the preset's."""
    rebaseline: Literal["usual", "on", "off"] = "usual"
    """Advantages of kept rows are recomputed among them (route2: of rows that are no anchors); usual: by the arms
    that read."""
    own_streams: Literal["usual", "on", "off"] = "usual"
    """The kept knob learns from the deployed model's rollouts alone, with the quarantine off (route2: needs
    --rollout-ablate-frac); usual: so it is in the arms that read."""
    flagged_penalty: float = 0.0
    """reading arms: a flagged row that the deployed model wrote is kept too, with this advantage below zero."""
    quarantine_block: int | None = None
    """reading arms: the quarantine lives in this block (from 1) and the kept knob in the others; none: both in all."""

    def __post_init__(self) -> None:
        arm = self.intervention
        _within("v-hack-extract-top-k", self.v_hack_extract_top_k, 1, 256)
        _within("v-hack-k", self.v_hack_k, 1, self.v_hack_extract_top_k, " (at most --v-hack-extract-top-k)")
        _within("v-hack-tau-axis", self.v_hack_tau_axis, 0, 1)
        _within("v-hack-drop-bottom-frac", self.v_hack_drop_bottom_frac, 0, 0.99)
        _within("vhack-refresh-every", self.vhack_refresh_every, 0, 10_000_000)
        _within("project-overshoot", self.project_overshoot, 0, 10)
        _within("rollout-ablate-frac", self.ablate_frac, 0, 1)
        _within("reader-layer", 1 if self.reader_layer is None else self.reader_layer, 1, 1000)
        _within("reader-k", self.reader_k, 1, 1_000_000)
        _within("reader-quantile", self.reader_quantile, 0.5, 1)
        _within("reader-prompts", self.reader_prompts, 4, 1_000_000)
        _within("flagged-penalty", self.flagged_penalty, 0, 1e3)
        _within("quarantine-block", 1 if self.quarantine_block is None else self.quarantine_block, 1, 1000)
        _refuse(
            self.route2_random_v_seed is not None and self.control not in ("none", "haar"),
            f"--control {self.control} with --route2-random-v-seed: one control a run; leave one of them out",
        )
        if arm not in (legal := CONTROL_SPECS[self.control][0]):
            raise ValueError(f"--control {self.control}: needs --intervention {' or '.join(legal)}, got {arm}")
        _refuse(
            self.other_pairs and self.v_hack_path is not None,
            f"--control {self.control} with --v-hack-path: that direction was made from the true pairs; leave it out",
        )
        _refuse(
            (self.control == "placebo") != (self.placebo_pairs_path is not None),
            "--placebo-pairs-path: goes with --control placebo, give both or neither",
        )
        band, oracle = self.route2_gate == "pairs", self.control == "oracle"
        for flag, idle in (
            ("route2_gate", oracle),  # labels decide
            ("gate_anchor_teacher_only", band or oracle),  # the pair band has no anchors
            ("vhack_refresh_every", arm in BY_GRADIENT and self.haar and not band),  # random directions stay
            ("preserve_magnitude", self.control == "shrinkage"),  # the kept share is read before any rescaling
            *((flag, arm == "route2" and self.control in ("oracle", "shrinkage")) for flag in _OWN),
            *((flag, arm == "reader" and self.control in ("no_gate", "oracle")) for flag in _READER),  # nothing is read
        ):
            changed = _changed(self, (flag,)) if idle else []
            _refuse(bool(changed), f"{', '.join(changed)}: not read with these settings; leave it out")
        _refuse(
            arm == "route2" and self.owns and not self.ablate_frac,
            "--own-streams: needs --rollout-ablate-frac above 0, so that the deployed model has rollouts of its own",
        )
        for flag, (controls, _) in OF_CONTROL.items():
            if self.control not in controls and (changed := _changed(self, (flag,))):
                raise ValueError(f"{changed[0]}: goes with --control {' or '.join(controls)}; leave it out")
        _within("label-accuracy", self.label_accuracy, 0, 1)
        _within("label-penalty", self.label_penalty or 0, 0, 1e6)
        _within("concept-alpha", self.concept_alpha, 0, 1e6)
        unread = _NOT_READ[arm]
        if self.control == "advantage_mod":
            unread = tuple(f for f in unread if f != "vhack_pairs_path")
        if changed := _changed(self, unread):
            raise ValueError(
                f"{', '.join(changed)}: not read by --intervention {arm}; leave it out or choose another arm"
            )

    @property
    def haar(self) -> bool:
        return self.control == "haar" or self.route2_random_v_seed is not None

    @property
    def reads_pairs(self) -> bool:
        return self.intervention in WITH_DIRECTION or self.control == "advantage_mod"

    @property
    def ablate_frac(self) -> float:
        usual = 0.5 if self.intervention in READING else 0.0
        return usual if self.rollout_ablate_frac is None else self.rollout_ablate_frac

    @property
    def rebases(self) -> bool:
        return self.rebaseline == "on" or (self.rebaseline == "usual" and self.intervention in READING)

    @property
    def owns(self) -> bool:
        return self.own_streams == "on" or (self.own_streams == "usual" and self.intervention in READING)

    @property
    def other_pairs(self) -> bool:
        """Whether the control takes its direction from other pairs than the true ones."""
        return self.control == "shuffled" or self.placebo is not None

    @property
    def placebo(self) -> str | None:
        """The contrast of a placebo control; "" for the user's own pairs, None without such a control."""
        word, _, contrast = self.control.partition("_")
        return contrast if word == "placebo" else None

    @property
    def control_name(self) -> str:
        """The one name by which files and tables know this run's control."""
        if self.haar:
            return "haar"
        if self.placebo_pairs_path is not None:
            return f"placebo_{self.placebo_pairs_path.stem}"
        away = [(short, getattr(self, f)) for f, (_, short) in OF_CONTROL.items() if _changed(self, (f,))]
        return "_".join([self.control, *(short if isinstance(v, str) else f"{short}{v:g}" for short, v in away)])

    @property
    def control_what(self) -> str:
        return CONTROL_SPECS["haar" if self.haar else self.control][1]


_EXTRACTION = ("v_hack_path", "v_hack_tau_axis", "v_hack_extract_top_k", "v_hack_k", "v_hack_drop_bottom_frac")
_ROUTE2 = ("route2_gate", "gate_anchor_teacher_only")
_ERASE = ("preserve_magnitude", "project_overshoot")
_QUARANTINE = ("flagged_penalty", "quarantine_block")  # of the reading arms
_NO_PAIRS = (
    *(*_EXTRACTION, *_ROUTE2, *_ERASE, "vhack_refresh_every", "gate_mode"),
    *("vhack_pairs_path", "route2_random_v_seed", "reader_layer", "reader_k"),
)
# Flags that an arm never reads: away from their defaults they would be silent no-ops.
_NOT_READ: dict[str, tuple[str, ...]] = {
    "none": (
        *_EXTRACTION,
        *_ROUTE2,
        *_ERASE,
        *(*_READER, *_OWN, *_QUARANTINE),
        *("vhack_refresh_every", "vhack_pairs_path", "route2_random_v_seed", "gate_mode", "rollout_ablate_frac"),
    ),
    "erase": (*_ROUTE2, *_READER, *_OWN, *_QUARANTINE, "rollout_ablate_frac"),
    "route": (*_ROUTE2, *_ERASE, *_READER, *_OWN, *_QUARANTINE),
    "route2": (
        *(*_ERASE, *_READER, *_QUARANTINE, "gate_mode"),
        *("v_hack_tau_axis", "v_hack_extract_top_k", "v_hack_k", "v_hack_drop_bottom_frac"),
    ),
    "reader": (*_EXTRACTION, *_ROUTE2, *_ERASE, "vhack_refresh_every", "gate_mode"),
    "surprise": _NO_PAIRS,
    "pmi": _NO_PAIRS,
}


@dataclass(frozen=True)
class ScaleConfig:
    """How much of everything."""

    model: str = "Qwen/Qwen3-4B"
    """A Hugging Face hub id, a local model folder, or 'organism' (embedded)."""
    problems: str = "out/data/leetcode_train_medhard_filtered.jsonl"
    """Problem file (JSONL), or 'organism'."""
    organism: Path | None = None
    """Folder that `python -m vgrout.organism build` made: what 'organism' means, in place of the embedded one."""
    steps: int = 100
    """Optimiser steps."""
    group: int = 6
    """G: rollouts per prompt."""
    max_new: int = 1024
    """Longest completion, in tokens."""
    n_problems: int = 992
    """Training problems used, at most."""
    prompts_per_step: int = 8
    """P: prompts per step."""

    def __post_init__(self) -> None:
        _within("steps", self.steps, 1, 1_000_000)
        _within("group", self.group, 2, 1024, " (a group of one has no advantage)")
        _within("max-new", self.max_new, 1, 131_072)
        _within("n-problems", self.n_problems, 1, 10_000_000)
        _within("prompts-per-step", self.prompts_per_step, 1, 65_536)


@dataclass(frozen=True)
class OptConfig:
    """AdamW on the two knobs."""

    lr: float = 7e-5
    """Peak learning rate: linear warm-up, then cosine to 0."""
    adam_beta1: float = 0.9
    """First-moment decay."""
    adam_beta2: float = 0.99
    """Second-moment decay."""
    weight_decay: float = 0.1
    """Decoupled decay on both knobs."""
    warmup_frac: float = 0.1
    """Share of the steps spent warming up."""
    grad_clip: float = 10.0
    """Largest joint L2 norm of both knobs' gradients."""

    def __post_init__(self) -> None:
        _refuse(not self.lr > 0 or not math.isfinite(self.lr), f"--lr {self.lr}: should be a positive number")
        _within("adam-beta1", self.adam_beta1, 0, 0.9999)
        _within("adam-beta2", self.adam_beta2, 0, 0.99999)
        _within("weight-decay", self.weight_decay, 0, 10)
        _within("warmup-frac", self.warmup_frac, 0, 1)
        _refuse(not self.grad_clip > 0, f"--grad-clip {self.grad_clip}: should be positive")


@dataclass(frozen=True)
class EnvConfig:
    """Problems, graders, demonstrations."""

    env_mode: EnvMode = "run_tests"
    """Which flawed grader checks: one of the six, or 'own' (as the problem file or the pool's partition says)."""
    teacher_pool_dir: str = ""
    """Folder of cached demonstrations, 'organism', or '' for none."""
    mix_ratio: float = 0.125
    """Share of a group that is cached teacher rollouts; 0 keeps the pool's partition and mixes nothing in."""
    teacher_off_step: int | None = None
    """No teacher rows from this step on."""
    teacher_modes: str = ""
    """Comma list: demonstrations for these modes only; the others train on full groups of live rollouts."""
    preserve_thinking: bool = False
    """Problems of several turns: earlier answers stay in the prompt as they were sampled, think blocks and all."""
    regrade_pool: bool = False
    """Grade the pool's rollouts again with today's grader, use those labels, and report where they differ."""
    half_a: str = ""
    """Comma list of detectors (C, D, E): the tail splits student hacks into those one of them sees and the rest."""
    compile_reward: float = 0.5
    """Reward for code that compiles."""
    pass_reward: float = 3.0
    """Reward for passing the mode's check."""
    allow_weak_sandbox: bool = False
    """Run although a graded program could read the answers from disk; stamped on every file of the run."""

    def __post_init__(self) -> None:
        _refuse(not 0 <= self.mix_ratio < 1, f"--mix-ratio {self.mix_ratio}: should lie in [0, 1)")
        _refuse(
            self.teacher_off_step is not None and self.teacher_off_step < 0,
            f"--teacher-off-step {self.teacher_off_step}: should be 0 or more",
        )
        for mode in self.demo_modes:
            _refuse(mode not in MODES, f"--teacher-modes: unknown mode {mode!r}; legal: {', '.join(MODES)}")
        for code in self.half_a_codes:
            _refuse(code not in "CDE" or len(code) != 1, f"--half-a: unknown detector {code!r}; legal: C, D, E")
        _within("compile-reward", self.compile_reward, 0, 1e6)
        _refuse(not 0 < self.pass_reward <= 1e6, f"--pass-reward {self.pass_reward}: should be positive")
        if not self.teacher_pool_dir:
            changed = _changed(self, ("teacher_off_step", "teacher_modes", "regrade_pool"))
            _refuse(bool(changed), f"{', '.join(changed)}: not read without --teacher-pool-dir")
        elif not self.mix_ratio:
            changed = _changed(self, ("teacher_off_step", "teacher_modes", "regrade_pool"))
            _refuse(bool(changed), f"{', '.join(changed)}: not read with --mix-ratio 0, which mixes nothing in")

    @property
    def demo_modes(self) -> list[str]:
        return [m.strip() for m in self.teacher_modes.split(",") if m.strip()]

    @property
    def demo_held_out(self) -> list[Mode]:
        """Modes that stay in training without demonstrations."""
        return [m for m in MODES if m not in self.demo_modes] if self.demo_modes else []

    @property
    def half_a_codes(self) -> list[str]:
        return [c.strip() for c in self.half_a.split(",") if c.strip()]


@dataclass(frozen=True)
class EvalConfig:
    """The deployed model on held-out problems."""

    eval_ablate_every: int = 5
    """Evaluate the deployed model every N steps and at the last; 0: only the final evaluation."""
    eval_n_prompts: int = 8
    """Held-out problems per evaluation, × G answers."""
    final_n_prompts: int = 64
    """Held-out test problems of the final evaluation."""
    final_samples: int = 4
    """Answers per problem and side in the final evaluation."""
    save_eval_ckpts: bool = True
    """Save the adapter at each evaluation."""

    def __post_init__(self) -> None:
        _within("eval-ablate-every", self.eval_ablate_every, 0, 10_000_000)
        _within("eval-n-prompts", self.eval_n_prompts, 1, 100_000)
        _within("final-n-prompts", self.final_n_prompts, 1, 100_000)
        _within("final-samples", self.final_samples, 1, 10_000)


Detector = Literal["separation", "info_rm", "mop", "rm_ensemble", "ragen", "advantage"]
DETECTORS: tuple[Detector, ...] = get_args(Detector)


@dataclass(frozen=True)
class DetectorConfig:
    """Signs of reward hacking that need no oracle."""

    reward_hack_detector: str = ""
    """Comma list: separation (of rewards) · info_rm (CSI of latents) · mop (outlying latents) · rm_ensemble (the six
    flawed graders and the weak detectors disagree) · ragen (its collapse signature) · advantage (dead groups)."""
    rm_ensemble_members: str = ""
    """Comma list of module:function, each from (prompt, answer) to a number: the ensemble of rm_ensemble, 2
    to 32 of them; '': the six flawed graders and the three weak detectors."""
    reward_hack_halt: bool = False
    """Stop the run (exit 3) when one of them says HACK."""
    echo_trap_enabled: bool = False
    """Watch repetition within answers, measured against the base policy's own."""
    echo_trap_threshold: float = 0.6
    """Share of the way from the base policy's repetition to nothing else at which the echo trap says HACK; WARN at
    half of it."""
    echo_trap_halt: bool = False
    """Stop the run (exit 3) when the echo trap says HACK."""

    def __post_init__(self) -> None:
        for name in self.chosen:
            _refuse(
                name not in DETECTORS,
                f"--reward-hack-detector: unknown detector {name!r}; legal: {', '.join(DETECTORS)}",
            )
        _refuse(self.reward_hack_halt and not self.chosen, "--reward-hack-halt: needs --reward-hack-detector")
        if self.rm_ensemble_members:
            given, n = f"--rm-ensemble-members {self.rm_ensemble_members}", len(self.members)
            _refuse("rm_ensemble" not in self.chosen, f"{given}: not read without --reward-hack-detector rm_ensemble")
            _refuse(not 2 <= n <= 32, f"{given}: an ensemble has 2 to 32 members, not {n}")
        _refuse(
            not 0 < self.echo_trap_threshold <= 1,
            f"--echo-trap-threshold {self.echo_trap_threshold}: should lie in (0, 1]",
        )
        if not self.echo_trap_enabled:
            changed = _changed(self, ("echo_trap_threshold", "echo_trap_halt"))
            _refuse(bool(changed), f"{', '.join(changed)}: not read without --echo-trap-enabled")

    @property
    def members(self) -> list[str]:
        return [m.strip() for m in self.rm_ensemble_members.split(",") if m.strip()]

    @property
    def chosen(self) -> list[str]:
        return [d.strip() for d in self.reward_hack_detector.split(",") if d.strip()]


@dataclass(frozen=True)
class RunConfig:
    """This run."""

    seed: int = 41
    """Every random stream derives from it, by name and step."""
    out_tag: str = ""
    """Suffix of the run id."""
    resume: str = ""
    """A run directory, or 'latest': go on from its last good checkpoint, with its own configuration."""
    resume_force: bool = False
    """Resume although the configuration differs; the new one is recorded."""
    checkpoint_every: int = 25
    """Steps between resume checkpoints."""
    checkpoint_keep: int = 3
    """Resume checkpoints kept."""
    max_error_retries: int | None = 3
    """Times an answer is graded again after the sandbox itself failed, before its group is dropped; none: for ever."""
    dry_run: bool = False
    """Print the resolved configuration and the plan, start nothing."""
    threads: int = 0
    """Torch threads on a CPU; 0: one per core, one in all for the organism."""
    update_layout: Literal["shared", "packed", "padded"] = "shared"
    """Rollouts in the update's forward. shared: a prompt is read once where the arm needs sums only; packed: only no
    padding; padded: one row a rollout. The same gradients but for rounding."""

    def __post_init__(self) -> None:
        _within("seed", self.seed, 0, 2**62)
        _within("threads", self.threads, 0, 4096)
        _within("checkpoint-every", self.checkpoint_every, 1, 10_000_000)
        _within("checkpoint-keep", self.checkpoint_keep, 1, 100)
        if self.max_error_retries is not None:
            _within("max-error-retries", self.max_error_retries, 0, 1_000_000)
        _refuse(self.resume_force and not self.resume, "--resume-force: not read without --resume")
        _refuse(
            not re.fullmatch(r"[A-Za-z0-9_.=+-]{0,80}", self.out_tag),
            f"--out-tag {self.out_tag!r}: letters, digits and _ . = + - only, 80 at most",
        )


@dataclass(frozen=True)
class Config:
    """One run, resolved."""

    arm: ArmConfig = field(default_factory=ArmConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    opt: OptConfig = field(default_factory=OptConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    detectors: DetectorConfig = field(default_factory=DetectorConfig)
    run: RunConfig = field(default_factory=RunConfig)
    preset: Annotated[str, tyro.conf.Suppress] = "fast"

    def __post_init__(self) -> None:
        _refuse(
            self.mixes and self.n_teacher >= self.scale.group,
            f"--mix-ratio {self.env.mix_ratio} with --group {self.scale.group}: no student row is left in a group",
        )
        _refuse(
            self.mixes and not self.n_teacher,
            f"--mix-ratio {self.env.mix_ratio} with --group {self.scale.group}: rounds to no teacher row; "
            "raise one of them, or say --mix-ratio 0",
        )
        frac, students = self.arm.ablate_frac, self.scale.group - self.n_teacher
        _refuse(
            frac > 0 and round(frac * students) == 0,
            f"--rollout-ablate-frac {frac}: rounds to none of {students} student rows; raise it or --group",
        )
        tau, teacher = self.loss.teacher_tau, self.loss.teacher_model
        _refuse(
            bool(tau) != bool(teacher),
            f"--teacher-tau {tau} with --teacher-model {teacher!r}: one is not read without the other; both or neither",
        )
        if (self.scale.model == ORGANISM) != (self.scale.problems == ORGANISM):
            raise ValueError(
                f"--model {self.scale.model} with --problems {self.scale.problems}: "
                "the organism's model and its problems go together"
            )
        _refuse(
            self.env.teacher_pool_dir == ORGANISM and self.scale.model != ORGANISM,
            "--teacher-pool-dir organism: only with --model organism",
        )
        _refuse(
            self.scale.organism is not None and self.scale.model != ORGANISM,
            f"--organism {self.scale.organism} with --model {self.scale.model}: not read; only with --model organism",
        )
        _refuse(
            self.arm.reader_threshold == "anchors" and self.anchors_path is None,
            "--reader-threshold anchors: there are none; give --reader-anchors FILE",
        )
        if self.guard_mode == "halt" and (why := self.guard_blind):
            raise ValueError(f"--guard halt could not fire in this run ({why}); or choose --guard log")

    @property
    def guard_mode(self) -> Literal["off", "log", "halt"]:
        """What a verdict of the kill switch does, the preset's default resolved."""
        return self.guard.guard or ("log" if self.preset in ("smoke", "mini") else "halt")

    @property
    def guard_blind(self) -> str | None:
        """Why the kill switch could never fire in this run; None: it can."""
        return blind(self.guard, self.scale.steps, self.eval.eval_ablate_every)

    @property
    def mixes(self) -> bool:
        """Whether demonstrations are mixed in at all. Never under no_loophole: cached labels are a flawed grader's."""
        return bool(self.env.teacher_pool_dir) and self.env.mix_ratio > 0 and self.arm.control != "no_loophole"

    @property
    def n_teacher(self) -> int:
        """G_t: teacher rows in a group that has demonstrations."""
        return round(self.scale.group * self.env.mix_ratio) if self.mixes else 0

    @property
    def generations(self) -> int:
        return self.scale.group * self.scale.prompts_per_step

    @property
    def files(self) -> organism.Files:
        """What 'organism' means in this run."""
        return organism.Files(self.scale.organism) if self.scale.organism else organism.EMBEDDED

    @property
    def model_path(self) -> str:
        return str(self.files.model) if self.scale.model == ORGANISM else self.scale.model

    @property
    def teacher_model_path(self) -> str:
        return str(self.files.model) if self.loss.teacher_model == ORGANISM else self.loss.teacher_model

    @property
    def problems_path(self) -> Path:
        return self.files.problems if self.scale.problems == ORGANISM else Path(self.scale.problems)

    @property
    def pool_path(self) -> Path | None:
        if not self.env.teacher_pool_dir:
            return None
        return self.files.pool if self.env.teacher_pool_dir == ORGANISM else Path(self.env.teacher_pool_dir)

    @property
    def pairs_path(self) -> Path | None:
        """Contrastive pairs; None: the hand-written set."""
        if self.arm.vhack_pairs_path is not None:
            return self.arm.vhack_pairs_path
        if self.scale.model == ORGANISM:
            return self.files.pairs / "run_tests.json"
        return Path("out/pairsets/prog_wide.json") if self.preset == "fast" else None

    @property
    def anchors_path(self) -> Path | None:
        """Benign anchors of the arms that read; None: there are none, or they are not read."""
        arm = self.arm
        if arm.intervention not in READING or arm.control in ("no_gate", "oracle"):
            return None
        return arm.reader_anchors or (self.files.anchors if self.scale.model == ORGANISM else None)

    @property
    def placebo_path(self) -> Path | None:
        """Pairs of a placebo control; None without one, or where the hand-written ones serve."""
        if self.arm.placebo_pairs_path is not None or self.arm.placebo is None:
            return self.arm.placebo_pairs_path
        return self.files.pairs / f"placebo_{self.arm.placebo}.json" if self.scale.model == ORGANISM else None

    @property
    def inoculation(self) -> str:
        """What closes the training prompts; '' without that baseline."""
        if self.arm.control != "inoculation":
            return ""
        return self.arm.inoculation_prompt or (CUE if self.scale.model == ORGANISM else INOCULATION)

    @property
    def run_id(self) -> str:
        return f"{self.preset}_{ARM_NAME[self.arm.intervention]}_seed{self.run.seed}{self.run.out_tag}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, nested by group."""
        return json.loads(json.dumps(asdict(self), default=str))


_ORGANISM = Config(
    scale=ScaleConfig(
        model=ORGANISM,
        problems=ORGANISM,
        steps=60,
        group=8,
        prompts_per_step=4,
        max_new=organism.MAX_NEW,
        n_problems=1000,
    ),
    opt=OptConfig(lr=3e-2, adam_beta1=0.5, adam_beta2=0.9, weight_decay=0.0),
    env=EnvConfig(
        env_mode="own",
        teacher_pool_dir=ORGANISM,
        compile_reward=organism.COMPILE_REWARD,
        pass_reward=organism.PASS_REWARD,
    ),
)

PRESETS: dict[str, tuple[str, Config]] = {
    "smoke": (
        "every code path on any machine in under two minutes, no download",
        replace(
            _ORGANISM,
            preset="smoke",
            scale=replace(_ORGANISM.scale, steps=30, group=4, prompts_per_step=1),
            env=replace(_ORGANISM.env, mix_ratio=0.5),
            eval=EvalConfig(eval_n_prompts=6, final_n_prompts=12, final_samples=2),
        ),
    ),
    "mini": (
        "the whole experiment in miniature: 60 steps in under two minutes on two CPU cores, no download",
        replace(_ORGANISM, preset="mini", eval=EvalConfig(eval_n_prompts=12, final_n_prompts=192, final_samples=2)),
    ),
    "fast": (
        "the shortest real run: Qwen3-4B, 60 steps on one 80-140 GB GPU",
        Config(
            preset="fast",
            scale=ScaleConfig(steps=60, group=8, prompts_per_step=4, max_new=512, n_problems=200),
            opt=OptConfig(lr=3e-3, adam_beta1=0.5, adam_beta2=0.9),
            env=EnvConfig(env_mode="own", teacher_pool_dir="out/pools/substrate"),
        ),
    ),
    "full": (
        "the benchmark's own scale: Qwen3-4B, 200 steps of 258 rollouts",
        Config(
            preset="full",
            scale=ScaleConfig(steps=200, group=6, prompts_per_step=43, max_new=1024, n_problems=992),
            loss=LossConfig(beta=1e-3),
        ),
    ),
}


def parse(argv: list[str] | None = None) -> Config:
    """The command line of `python -m vgrout.train`. Bad flags leave with exit code 2 and one line on stderr."""
    try:
        return resolve(argv)
    except ValueError as e:
        print(f"E {e}", file=sys.stderr)
        raise SystemExit(2) from None


def resolve(argv: list[str] | None) -> Config:
    """What a command line means; `--help` leaves. Raises ValueError, one line, at the first bad flag."""
    return parsed(
        lambda: tyro.extras.overridable_config_cli(
            PRESETS,
            args=argv,
            prog="python -m vgrout.train",
            description="One GRPO run against a flawed grader. Presets differ in scale; flags override them.",
            config=(tyro.conf.OmitArgPrefixes,),
        )
    )


def flag_names() -> list[str]:
    """Every flag, sorted: a test holds the committed list against it."""
    groups = [f for f in fields(Config) if f.name != "preset"]
    return sorted(
        "--" + inner.name.replace("_", "-") for g in groups for inner in fields(getattr(PRESETS["mini"][1], g.name))
    )


_PATHS = ("organism", "v_hack_path", "vhack_pairs_path", "placebo_pairs_path", "reader_anchors")


def from_dict(data: dict[str, Any]) -> Config:
    """The inverse of `Config.as_dict`, for run.json. Raises ValueError naming fields unknown to this version."""
    values: dict[str, Any] = {"preset": data["preset"]}
    for group in (f for f in fields(Config) if f.name != "preset"):
        default = getattr(Config(), group.name)
        known = {f.name: f for f in fields(default)}
        stored = data.get(group.name, {})  # a group younger than the run: its defaults
        if unknown := sorted(stored.keys() - known.keys()):
            raise ValueError(f"run.json: unknown settings {', '.join(unknown)}; the run was made by another version")
        if group.name == "arm":  # what an arm does not read stood at its default then, whatever that is today
            idle = _NOT_READ[stored.get("intervention", default.intervention)]
            stored = {name: value for name, value in stored.items() if name not in idle}
        given = {name: Path(value) if value is not None and name in _PATHS else value for name, value in stored.items()}
        values[group.name] = replace(default, **given)
    return Config(**values)


# Settings that say how a process runs, not what it computes: they may differ between a run and its resumption.
_PROCESS = {"dry_run", "threads", "checkpoint_every", "checkpoint_keep", "max_error_retries"}
_FREE = {*_PROCESS, "guard"}  # where given, the new command line's; else the run's own
ASKING = {"resume", "resume_force"}  # what a command line asks for, and no part of the run


def merge_flags(
    mine: dict[str, Any], theirs: dict[str, Any], usual: dict[str, Any], free: Set[str]
) -> tuple[dict[str, Any], list[str]]:
    """A run's stored flags with those given now, where they are `free` to differ; and the others that do."""
    merged, differing = dict(theirs), []
    for name in theirs:
        if name not in ASKING and mine[name] not in (usual[name], theirs[name]):
            merged[name] = mine[name]
            if name not in free:
                differing.append(f"--{name.replace('_', '-')} {mine[name]} (run: {theirs[name]})")
    return merged, differing


def identity(cfg: Config) -> str:
    """sha256 of all that a run computes from, its seed included: equal for two runs that differ by tag or process."""
    data = cfg.as_dict()
    data["run"] = {k: v for k, v in data["run"].items() if k not in {*_PROCESS, *ASKING, "out_tag"}}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def resumed(asked: Config, stored: Config) -> tuple[Config, list[str]]:
    """The stored configuration with the process settings given now, and the flags that contradict it.

    A flag left at its preset's default is taken as not given; one that was given and differs is a contradiction.
    """
    default = PRESETS[asked.preset][1]
    differing, groups = [], {}
    for group in (f.name for f in fields(Config) if f.name != "preset"):
        merged, contradict = merge_flags(*(asdict(getattr(c, group)) for c in (asked, stored, default)), free=_FREE)
        groups[group] = replace(getattr(stored, group), **merged)
        differing += contradict
    if asked.preset != stored.preset:
        differing.append(f"preset {asked.preset} (run: {stored.preset})")
    return Config(**groups, preset=stored.preset), differing
