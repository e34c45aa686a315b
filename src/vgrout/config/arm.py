"""Arms and controls: one registry each, from which flags, help, tables and checks derive; and the settings of an arm.

A new arm is a row of `ARMS` and its class in `vgrout.arms`; a new control a row of `CONTROLS`.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vgrout.config.checks import changed, check, check_use, flags, refuse, setting, summary


@dataclass(frozen=True)
class ArmSpec:
    """What an arm is."""

    what: str  # one line
    routes: bool = False  # has a quarantine δS_hack
    direction: Literal["gradient", "text"] | None = None  # made from gradients, or from hidden states
    reads: bool = False  # flags rollouts by what the frozen base finds in their text


ARMS: dict[str, ArmSpec] = {
    "none": ArmSpec("plain GRPO"),
    "erase": ArmSpec("drop the hack-ward part of the gradient", direction="gradient"),
    "route": ArmSpec("quarantine that part", routes=True, direction="gradient"),
    "route2": ArmSpec("quarantine whole rollouts by their gradient", routes=True, direction="gradient"),
    "reader": ArmSpec(
        "quarantine rollouts by what the frozen base reads in their text", routes=True, direction="text", reads=True
    ),
    "surprise": ArmSpec("quarantine rollouts that the frozen base finds unlikely", routes=True, reads=True),
    "pmi": ArmSpec("quarantine rollouts that the prompt's hint makes likelier", routes=True, reads=True),
}
BY_GRADIENT = tuple(name for name, arm in ARMS.items() if arm.direction == "gradient")
WITH_DIRECTION = tuple(name for name, arm in ARMS.items() if arm.direction)
READING = tuple(name for name, arm in ARMS.items() if arm.reads)
ROUTING = tuple(name for name, arm in ARMS.items() if arm.routes)


@dataclass(frozen=True)
class ControlSpec:
    """What a control does, and the arms that it can be a control of."""

    arms: tuple[str, ...]
    what: str  # one line, for help, a run's log and run.json
    baseline: bool = False  # another method, in place of an arm
    shapes: bool = False  # pays otherwise than the grader
    labelled: bool = False  # by a monitor that is given the true labels


def _baseline(what: str, *, shapes: bool = True, labelled: bool = False) -> ControlSpec:
    return ControlSpec(("none",), f"baseline: {what}", baseline=True, shapes=shapes, labelled=labelled)


_PLACEBO = "the direction of pairs about an unrelated contrast"
CONTROLS: dict[str, ControlSpec] = {
    "none": ControlSpec(tuple(ARMS), "the arm itself"),
    "haar": ControlSpec(WITH_DIRECTION, "random directions, the same number in every module"),
    "shuffled": ControlSpec(WITH_DIRECTION, "hack and clean exchanged in half of the pairs"),
    "placebo_flawed": ControlSpec(WITH_DIRECTION, f"{_PLACEBO}: wrong against right"),
    "placebo_commented": ControlSpec(WITH_DIRECTION, f"{_PLACEBO}: with a comment against without"),
    "placebo_long": ControlSpec(WITH_DIRECTION, f"{_PLACEBO}: through a helper function against directly"),
    "placebo_laid_out": ControlSpec(WITH_DIRECTION, f"{_PLACEBO}: another layout against the usual one"),
    "placebo": ControlSpec(WITH_DIRECTION, f"{_PLACEBO}: --placebo-pairs-path"),
    "random_flags": ControlSpec(("route2", *READING), "the gate's shares dealt to rollouts at random"),
    "shrinkage": ControlSpec(BY_GRADIENT, "the update of plain GRPO, scaled by the share that the arm would keep"),
    "deploy_quarantine": ControlSpec(
        ROUTING, "trained as usual; δS_hack, the quarantine, is deployed, and δS, the kept part, is deleted"
    ),
    "no_gate": ControlSpec(("reader",), "nothing is flagged; each policy learns from its own rollouts all the same"),
    "oracle": ControlSpec(
        ("route2", "reader"), "whole rollouts routed by their true label: an upper bound, not a method"
    ),
    "no_loophole": ControlSpec(tuple(ARMS), "reward of the strict oracle alone: the ceiling for solve"),
    "gt_penalty": _baseline("what a monitor with the true labels calls an exploit is not paid", labelled=True),
    "gt_screening": _baseline("what a monitor with the true labels calls an exploit is left out", labelled=True),
    "inoculation": _baseline("the training prompts, and they alone, invite the exploit", shapes=False),
    "advantage_mod": _baseline("credit is lowered by the projection of activations on a concept direction"),
}
MONITORED = tuple(name for name, control in CONTROLS.items() if control.labelled)
SHAPING = tuple(name for name, control in CONTROLS.items() if control.shapes)
BASELINES = tuple(name for name, control in CONTROLS.items() if control.baseline)
BLIND = ("no_gate", "oracle")  # controls under which an arm that reads does not read

if TYPE_CHECKING:  # a checker cannot read a Literal made from a registry
    Intervention = str
    Control = str
else:
    Intervention = Literal[tuple(ARMS)]
    Control = Literal[tuple(CONTROLS)]
_ARMS = summary({name: arm.what for name, arm in ARMS.items()})
_CONTROLS = "The same run under a control. " + summary({name: c.what for name, c in CONTROLS.items()})


def register(name: str, spec: ArmSpec) -> None:
    """Add an arm to this process's registry: flag, help and checks know it from here on.

    It goes with the controls `none` and `no_loophole`; a name that was added here before is replaced.

    Raises:
        ValueError: no name that a flag can have, or one of the package's own arms.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"arm {name!r}: a name of small letters, digits and _")
    if name in ARMS and name not in _REGISTERED:
        raise ValueError(f"arm {name!r}: is one of the package's own; choose another name")
    _REGISTERED.add(name)
    ARMS[name] = spec
    for control in ("none", "no_loophole"):
        was = CONTROLS[control]
        CONTROLS[control] = replace(was, arms=tuple(dict.fromkeys((*was.arms, name))))
    legal: Any = Literal[tuple(ARMS)]  # ty: ignore[invalid-type-form]
    ArmConfig.__annotations__["intervention"] = legal
    ArmConfig.__dataclass_fields__["intervention"].type = legal


_REGISTERED: set[str] = set()


@dataclass(frozen=True)
class ArmConfig:
    """What happens to the gradient."""

    intervention: Annotated[Intervention, tyro.conf.arg(help=_ARMS)] = "erase"
    control: Annotated[Control, tyro.conf.arg(help=_CONTROLS)] = "none"
    label_accuracy: float = setting(1.0, low=0, high=1, controls=MONITORED, suffix="acc")
    """gt_penalty, gt_screening: share of answers that the monitor labels rightly; its errors are drawn at random."""
    label_penalty: float | None = setting(None, low=0, high=1e6, controls=("gt_penalty",), suffix="by")
    """gt_penalty: what a flagged answer loses; none: down to the reward of code that only compiles."""
    inoculation_prompt: str = setting("", controls=("inoculation",), suffix="own")
    """inoculation: what closes every training prompt; '': the organism's cue, elsewhere a sentence of ours."""
    concept_alpha: float = setting(2.0, low=0, high=1e6, controls=("advantage_mod",), suffix="alpha")
    """advantage_mod: α of r · (1 − α σ(z) 1[z > 0]), z the group's z-scores of the projection."""
    v_hack_path: Path | None = setting(None, arms=BY_GRADIENT)
    """Direction file to load; none: found by pair set, or extracted on the spot."""
    v_hack_extract_top_k: int = setting(12, low=1, high=256, arms=("erase", "route"))
    """Axes per module kept at extraction."""
    v_hack_k: int = setting(5, low=1, high="v_hack_extract_top_k", arms=("erase", "route"))
    """Axes per module used by erase and route."""
    v_hack_tau_axis: float = setting(0.0, low=0, high=1, arms=("erase", "route"))
    """Axes with S_i/S_0 below this are zeroed at extraction."""
    v_hack_drop_bottom_frac: float = setting(0.25, low=0, high=0.99, arms=("erase", "route"))
    """Noise floor: axes in this lowest quantile of singular values, over all modules, are dropped."""
    vhack_refresh_every: int = setting(5, low=0, high=10_000_000, arms=BY_GRADIENT)
    """Re-extract on the current model every N steps; 0: frozen."""
    vhack_pairs_path: Path | None = setting(None, arms=WITH_DIRECTION, controls=("advantage_mod",))
    """Contrastive pairs (JSON); none: the preset's."""
    placebo_pairs_path: Path | None = None
    """Pairs (JSON) about an unrelated contrast, for --control placebo."""
    route2_random_v_seed: int | None = setting(None, free="any whole number is a seed", arms=WITH_DIRECTION)
    """Seed of the Haar control, which it switches on (any arm with a direction); none: the run's own seed."""
    route2_gate: Literal["tau", "pairs"] = setting("tau", arms=("route2",), idle_under=("oracle",))
    """tau: threshold between known hacks and the rest · pairs: soft band from the pairs' cosines, no label at all."""
    preserve_magnitude: bool = setting(True, arms=("erase",), idle_under=("shrinkage",))
    """erase: rescale what is kept to the norm of the whole (bounded ×10)."""
    gate_mode: Literal["one_sided", "no_gate", "reverse"] = setting("one_sided", arms=("erase", "route"))
    """Which part along the direction is taken: relu(c), c, or 2c."""
    project_overshoot: float = setting(1.0, low=0, high=10, arms=("erase",))
    """erase: how much of the hack-ward part is removed."""
    known_hacks_teacher_only: bool = setting(False, arms=("route2",), idle_under=("oracle",))
    """route2, tau gate: known hacks are teacher rows alone, not also student rows that the weak detector flags."""
    rollout_ablate_frac: float | None = setting(None, low=0, high=1, arms=ROUTING)
    """Share of student rows sampled from the deployed model (routing arms only); none: .5 for the arms that read."""
    reader_layer: int | None = setting(None, low=1, high=1000, arms=("reader",), idle_under=BLIND)
    """reader: blocks of the frozen base after which its states are read; none: a quarter of its depth."""
    reader_k: int = setting(1, low=1, high=1_000_000, arms=("reader",), idle_under=BLIND)
    """reader: the score is the mean of this many highest tokens of an answer."""
    reader_quantile: float = setting(0.9, low=0.5, high=1, arms=READING, idle_under=BLIND)
    """reading arms: flagged above this quantile of the base's paid answers, and of known correct answers held back."""
    reader_threshold: Literal["both", "known_correct"] = setting("both", arms=READING, idle_under=BLIND)
    """reading arms: the larger of the two quantiles · that of the known correct answers alone, where the base itself
    may exploit: its paid answers are no measure of honesty then."""
    reader_prompts: int = setting(200, low=4, high=1_000_000, arms=READING, idle_under=BLIND)
    """reading arms: training prompts that the base answers twice before training."""
    known_correct: Path | None = setting(None, arms=READING, idle_under=BLIND)
    """reading arms: correct solutions in unusual styles (JSON of prompt, completion); none: the preset's."""
    rebaseline: Literal["usual", "on", "off"] = setting("usual", arms=("route2", *READING))
    """Advantages of kept rows are recomputed among them (route2: of rows that are no known hacks); usual: by the arms
    that read."""
    own_streams: Literal["usual", "on", "off"] = setting("usual", arms=("route2", *READING))
    """δS learns from the deployed model's rollouts alone, with the quarantine off (route2: needs
    --rollout-ablate-frac); usual: so it is in the arms that read."""
    flagged_penalty: float = setting(0.0, low=0, high=1e3, arms=READING)
    """reading arms: a flagged row that the deployed model wrote is kept too, with this advantage below zero."""
    quarantine_block: int | None = setting(None, low=1, high=1000, arms=READING)
    """reading arms: the quarantine lives in this block (from 1) and δS in the others; none: both in all."""

    def __post_init__(self) -> None:
        check(self)
        arm, control = self.intervention, self.control
        refuse(
            self.route2_random_v_seed is not None and control not in ("none", "haar"),
            f"--control {control} with --route2-random-v-seed: one control a run; leave one of them out",
        )
        if arm not in (legal := CONTROLS[control].arms):
            raise ValueError(f"--control {control}: needs --intervention {' or '.join(legal)}, got {arm}")
        refuse(
            self.other_pairs and self.v_hack_path is not None,
            f"--control {control} with --v-hack-path: that direction was made from the true pairs; leave it out",
        )
        refuse(
            (control == "placebo") != (self.placebo_pairs_path is not None),
            "--placebo-pairs-path: goes with --control placebo, give both or neither",
        )
        check_use(self, arm, control)
        band = self.route2_gate == "pairs"
        idle = {
            "known_hacks_teacher_only": band,  # it knows no rollout
            "vhack_refresh_every": arm in BY_GRADIENT and self.haar and not band,  # random directions stay
            **dict.fromkeys(("rebaseline", "own_streams"), arm == "route2" and control in ("oracle", "shrinkage")),
        }
        unread = [name for name, _ in changed(self) if idle.get(name)]
        refuse(bool(unread), f"{flags(unread)}: not read with these settings; leave it out")
        refuse(
            arm == "route2" and self.owns and not self.ablate_frac,
            "--own-streams: needs --rollout-ablate-frac above 0, so that the deployed model has rollouts of its own",
        )

    @property
    def routes(self) -> bool:
        """Whether training samples with a quarantine that is deleted before deployment."""
        return ARMS[self.intervention].routes

    @property
    def haar(self) -> bool:
        return self.control == "haar" or self.route2_random_v_seed is not None

    @property
    def reads_pairs(self) -> bool:
        return self.intervention in WITH_DIRECTION or self.control == "advantage_mod"

    @property
    def reads_text(self) -> bool:
        """Whether rollouts are scored by what the frozen base finds in their text."""
        return self.intervention in READING and self.control not in BLIND

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
        away = [(rule.suffix, getattr(self, name)) for name, rule in changed(self) if rule.suffix is not None]
        return "_".join([self.control, *(f"{s}" if isinstance(v, str) else f"{s}{v:g}" for s, v in away)])

    @property
    def control_what(self) -> str:
        return CONTROLS["haar" if self.haar else self.control].what
