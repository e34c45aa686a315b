"""Arms, monitors and controls: one registry each, from which flags, help, tables and checks derive; and the settings of
an arm.

Two choices make a method: who is flagged (a monitor), and what is done about it (an arm). A new one of either is a row
here and its class in `vgrout.monitors` or `vgrout.arms`; a new control is a row of `CONTROLS`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vgrout.config.checks import Rule, changed, check, check_use, flags, listed, refuse, setting, summary
from vgrout.modes import MODES, Mode


@dataclass(frozen=True)
class MonitorSpec:
    """What a monitor is."""

    what: str  # one line
    at: str = ""  # "file:Class" in vgrout/monitors
    direction: Literal["gradient", "text"] | None = None
    scores: bool = False  # scores texts, and flags paid rollouts above a threshold
    calibrates: bool = False  # … for which the base answers some training prompts first
    seeded: bool = False  # learns to read from what a seed monitor flags


MONITORS: dict[str, MonitorSpec] = {
    "none": MonitorSpec("nothing is flagged"),
    "gate": MonitorSpec("cosine of a rollout's gradient above τ, and known hacks", "gate:Gate", direction="gradient"),
    "band": MonitorSpec(
        "softly, where that cosine lies between the pairs' clean and hack sides", "gate:Band", direction="gradient"
    ),
    "labels": MonitorSpec("true labels, with errors and blind spots: a bound, never a method", "labels:Labels"),
    "detector": MonitorSpec("the weak detector alone", "labels:WeakDetector"),
    "pmi": MonitorSpec(
        "answers that the prompt's hint makes likelier, to the frozen base",
        "text_scores:PMI",
        scores=True,
        calibrates=True,
    ),
    "nll": MonitorSpec("answers that the frozen base finds unlikely", "text_scores:NLL", scores=True, calibrates=True),
    "probe": MonitorSpec(
        "answers whose hidden states in the frozen base lie along the pairs' direction",
        "text_scores:LinearProbe",
        direction="text",
        scores=True,
        calibrates=True,
    ),
    "relevance": MonitorSpec(
        "answers that their own problem makes no likelier than others do, to the frozen base",
        "relevance:Relevance",
        scores=True,
        calibrates=True,
    ),
    "twin": MonitorSpec("answers that are paid on an impossible twin of the problem too", "twin:Twin"),
    "quarantine": MonitorSpec(
        "what a seed monitor flags, and paid answers that the quarantine makes likelier",
        "quarantine:Quarantine",
        scores=True,
        seeded=True,
    ),
    "online_probe": MonitorSpec(
        "what a seed monitor flags, and paid answers whose hidden states in the frozen base are more like those than "
        "like known correct ones",
        "online_probe:OnlineProbe",
        scores=True,
        seeded=True,
    ),
}
_SEEDS = tuple(name for name, m in MONITORS.items() if name != "none" and not m.seeded and m.direction != "gradient")
_BEFORE = (*_SEEDS, "online_probe")  # decide before any gradient, for any arm
SEEDED = tuple(name for name, monitor in MONITORS.items() if monitor.seeded)


@dataclass(frozen=True)
class ArmSpec:
    """What an arm is."""

    what: str  # one line
    at: str = ""  # "file:Class" in vgrout/arms; "" of an arm that `register` added
    by_flags: str = ""  # … where the monitor decides before the gradient; "": the same
    routes: bool = False  # has a quarantine δS_hack, whatever flags
    direction: Literal["gradient", "text"] | None = None  # made from gradients, or from hidden states
    monitors: tuple[str, ...] = ("none",)  # that it goes with, the usual one first; "" first: one has to be named


ARMS: dict[str, ArmSpec] = {
    "none": ArmSpec("plain GRPO", "base:Arm"),
    "erase": ArmSpec("drop the hack-ward part of the gradient", "erase:Erase", direction="gradient"),
    "route": ArmSpec("quarantine that part", "route:Route", routes=True, direction="gradient"),
    "screen": ArmSpec(
        "leave flagged rollouts out of their group", "reward_shaping:Screen", monitors=("", *_BEFORE, "quarantine")
    ),
    "penalty": ArmSpec("pay flagged rollouts less", "reward_shaping:Penalty", monitors=("", *_BEFORE, "quarantine")),
    "route2": ArmSpec(
        "quarantine the gradient of flagged rollouts",
        "route2:Route2",
        "flagged:FlaggedRoute2",
        routes=True,
        monitors=("gate", "band", *_BEFORE),
    ),
    "sgtm": ArmSpec(
        "flagged rollouts train the quarantine, those sampled without it the kept part, the rest both (Selective "
        "Gradient Masking)",
        "flagged:SGTM",
        routes=True,
        monitors=("", *_BEFORE),
    ),
}


CALIBRATED = tuple(name for name, monitor in MONITORS.items() if monitor.calibrates)


def _usual_direction(arm: ArmSpec) -> Literal["gradient", "text"] | None:
    return arm.direction or (MONITORS[arm.monitors[0]].direction if arm.monitors[0] else None)


BY_GRADIENT = tuple(name for name, arm in ARMS.items() if _usual_direction(arm) == "gradient")
WITH_DIRECTION = tuple(name for name, arm in ARMS.items() if _usual_direction(arm))
ROUTING = tuple(name for name, arm in ARMS.items() if arm.routes)
FLAGGED = tuple(name for name, arm in ARMS.items() if "labels" in arm.monitors)  # arms that any monitor can serve
FORMS = ("shared", "block:N", "lora:R")  # of the quarantine


@dataclass(frozen=True)
class ControlSpec:
    """What a control does, and the arms that it can be a control of."""

    arms: tuple[str, ...]
    what: str  # one line, for help, a run's log and run.json
    baseline: bool = False  # another method, in place of an arm
    shapes: bool = False  # pays otherwise than the grader
    at: str = ""  # "file:Class" in vgrout/arms, where it is another class than the arm's
    of: tuple[str, ...] = ()  # it replaces a direction of these kinds: the arm or its monitor has to have one


def _baseline(what: str, *, shapes: bool = False, at: str = "") -> ControlSpec:
    return ControlSpec(("none",), f"baseline: {what}", baseline=True, shapes=shapes, at=at)


def _other(what: str) -> ControlSpec:
    return ControlSpec(tuple(dict.fromkeys((*WITH_DIRECTION, *FLAGGED))), what, of=("gradient", "text"))


_PLACEBO = "the direction of pairs about an unrelated contrast"
CONTROLS: dict[str, ControlSpec] = {
    "none": ControlSpec(tuple(ARMS), "the arm itself"),
    "haar": _other("random directions, the same number in every module"),
    "shuffled": _other("hack and clean exchanged in half of the pairs"),
    "placebo_flawed": _other(f"{_PLACEBO}: wrong against right"),
    "placebo_commented": _other(f"{_PLACEBO}: with a comment against without"),
    "placebo_long": _other(f"{_PLACEBO}: through a helper function against directly"),
    "placebo_laid_out": _other(f"{_PLACEBO}: another layout against the usual one"),
    "placebo": _other(f"{_PLACEBO}: --placebo-pairs-path"),
    "shrinkage": ControlSpec(
        BY_GRADIENT, "the update of plain GRPO, scaled by the share that the arm would keep", of=("gradient",)
    ),
    "deploy_quarantine": ControlSpec(
        ROUTING, "trained as usual; δS_hack, the quarantine, is deployed, and δS, the kept part, is deleted"
    ),
    "no_loophole": ControlSpec(tuple(ARMS), "reward of the strict oracle alone: the ceiling for solve"),
    "inoculation": _baseline("the training prompts, and they alone, invite the exploit"),
    "advantage_mod": _baseline(
        "credit is lowered by the projection of activations on a concept direction",
        shapes=True,
        at="advantage_mod:AdvantageMod",
    ),
    "hint_free": _baseline("the training prompts, and they alone, do not say how answers are checked"),
    "recontextualise": _baseline(
        "sampled from prompts that do not say how answers are checked, learnt under those that do",
        at="recontextualise:Recontextualise",
    ),
}
SHAPING = tuple(name for name, control in CONTROLS.items() if control.shapes)
BASELINES = tuple(name for name, control in CONTROLS.items() if control.baseline)

if TYPE_CHECKING:  # a checker cannot read a Literal made from a registry
    Intervention = str
    Control = str
    MonitorName = str
    Seed = str
else:
    Intervention = Literal[tuple(ARMS)]
    Control = Literal[tuple(CONTROLS)]
    MonitorName = Literal["usual", *MONITORS]
    Seed = Literal["none", *_SEEDS]
_ARMS = summary({name: arm.what for name, arm in ARMS.items()})
_MONITORS = (
    "Who is flagged; usual: the arm's own (route2: gate; screen, penalty and sgtm have none and need one). "
    + summary({name: monitor.what for name, monitor in MONITORS.items()})
)
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
    """Who is flagged, and what happens to the gradient."""

    intervention: Annotated[Intervention, tyro.conf.arg(help=_ARMS)] = "erase"
    monitor: Annotated[MonitorName, tyro.conf.arg(help=_MONITORS)] = "usual"
    control: Annotated[Control, tyro.conf.arg(help=_CONTROLS)] = "none"
    random_flags: bool = setting(False, arms=FLAGGED)
    """The monitor's flags are dealt anew at random, as many: a control of which rollouts are flagged."""
    label_accuracy: float = setting(1.0, low=0, high=1, monitors=("labels",), suffix="acc")
    """labels: share of answers that the monitor labels rightly; its errors are drawn at random."""
    label_false_positives: float = setting(0.0, low=0, high=1, monitors=("labels",), suffix="fp")
    """labels: share of the answers that are no exploits that it flags all the same, drawn at random."""
    known_modes: str = setting("", words=MODES, word="mode", monitors=("labels",), suffix="knows-")
    """labels: comma list of the flaws that it knows; to the others it is blind. '': all of them."""
    seed_monitor: Seed = setting("detector", monitors=SEEDED)
    """quarantine, online_probe: who flags what it cannot read yet; it learns to read from what is flagged."""
    quarantine_share: float = setting(0.1, low=0.001, high=1, monitors=("quarantine",))
    """quarantine: the share ε of it that is on while it reads; a small one reads to the first order, and in bf16
    is lost to rounding."""
    quarantine_threshold: float | None = setting(None, low=-100, high=100, monitors=("quarantine",))
    """quarantine: an answer is flagged above this score, (log π_ε − log π_0) / (ε |log π_0|); None: above the
    --monitor-quantile of known correct answers, drawn and read anew in every step."""
    quarantine_diet: Literal["flagged", "seeded", "random", "paid", "solved"] = setting(
        "flagged", monitors=("quarantine",), suffix="diet-"
    )
    """quarantine: what it is trained on: what is flagged · what the seed monitor flags alone. Controls: as many paid
    answers of the same groups at random · all that is paid · what is paid and, by the true labels, no exploit."""
    quarantine_start: Literal["zero", "pairs", "random"] = setting("zero", monitors=("quarantine",), suffix="start-")
    """quarantine: what it is before it has learnt anything: nothing · five steps along what tells hack from clean in
    contrastive pairs, so that it reads from the first step on. Control: five steps along random signs."""
    saturated_groups: bool = setting(True, arms=("screen", "penalty"))
    """screen, penalty: groups in which every answer earns the same are looked at too: a flag may give them signal."""
    penalty: float | None = setting(None, low=0, high=1e6, arms=("penalty",), suffix="by")
    """penalty: what a flagged answer loses; none: down to the reward of code that only compiles."""
    inoculation_prompt: str = setting("", controls=("inoculation",), suffix="own")
    """inoculation: what closes every training prompt; '': the organism's cue, elsewhere a sentence of ours."""
    concept_alpha: float = setting(2.0, low=0, high=1e6, controls=("advantage_mod",), suffix="alpha")
    """advantage_mod: α of r · (1 − α σ(z) 1[z > 0]), z the group's z-scores of the projection."""
    v_hack_path: Path | None = setting(None, arms=("erase", "route"), monitors=("gate", "band"))
    """Direction file to load; none: found by pair set, or extracted on the spot."""
    v_hack_extract_top_k: int = setting(12, low=1, high=256, arms=("erase", "route"))
    """Axes per module kept at extraction."""
    v_hack_k: int = setting(5, low=1, high="v_hack_extract_top_k", arms=("erase", "route"))
    """Axes per module used by erase and route."""
    v_hack_tau_axis: float = setting(0.0, low=0, high=1, arms=("erase", "route"))
    """Axes with S_i/S_0 below this are zeroed at extraction."""
    v_hack_drop_bottom_frac: float = setting(0.25, low=0, high=0.99, arms=("erase", "route"))
    """Noise floor: axes in this lowest quantile of singular values, over all modules, are dropped."""
    vhack_refresh_every: int = setting(5, low=0, high=10_000_000, arms=("erase", "route"), monitors=("gate", "band"))
    """Re-extract on the current model every N steps; 0: frozen."""
    vhack_pairs_path: Path | None = setting(
        None, arms=("erase", "route"), monitors=("gate", "band", "probe", "quarantine"), controls=("advantage_mod",)
    )
    """Contrastive pairs (JSON); none: the preset's (--quarantine-start pairs: the known flaw's)."""
    placebo_pairs_path: Path | None = None
    """Pairs (JSON) about an unrelated contrast, for --control placebo."""
    route2_random_v_seed: int | None = setting(
        None, free="any whole number is a seed", arms=("erase", "route"), monitors=("gate", "band", "probe")
    )
    """Seed of the Haar control, which it switches on (where there is a direction); none: the run's own seed."""
    gate_vote: Literal["module", "rollout"] = setting("module", monitors=("gate", "band"))
    """gate, band: each module decides about its part of a rollout's gradient · one decision for the whole rollout, by
    the majority (band: the mean) of the modules."""
    gate_modules: Literal["all", "apart"] = setting("all", monitors=("gate",))
    """gate: modules with a threshold: all · those where known hacks lie above the rest. In the others the midpoint
    lies below most of the rest, which would be flagged."""
    preserve_magnitude: bool = setting(True, arms=("erase",), idle_under=("shrinkage",))
    """erase: rescale what is kept to the norm of the whole (bounded ×10)."""
    gate_mode: Literal["one_sided", "no_gate", "reverse"] = setting("one_sided", arms=("erase", "route"))
    """Which part along the direction is taken: relu(c), c, or 2c."""
    project_overshoot: float = setting(1.0, low=0, high=10, arms=("erase",))
    """erase: how much of the hack-ward part is removed."""
    known_hacks_teacher_only: bool = setting(False, monitors=("gate",))
    """gate: known hacks are teacher rows alone, not also student rows that the weak detector flags."""
    rollout_ablate_frac: float | None = setting(None, low=0, high=1, arms=ROUTING, monitors=("quarantine",))
    """Share of student rows sampled from the deployed model; none: all under monitor quarantine, .5 for sgtm, else
    0."""
    quarantine: str = setting("shared", arms=("route2", "sgtm"), monitors=("quarantine",))
    """Where δS_hack lives. shared: in every module's basis, beside δS · block:N: in the modules of block N (from 1)
    alone, and δS in the others · lora:R: in matrices of rank R of its own beside every module, and δS in the bases."""
    probe_layer: int | None = setting(None, low=1, high=1000, monitors=("probe", "online_probe"))
    """probe, online_probe: blocks of the frozen base after which its states are read; none: a quarter of its depth,
    half of it for online_probe."""
    probe_diet: Literal["seeded", "random"] = setting("seeded", monitors=("online_probe",), suffix="diet-")
    """online_probe: what it is fitted on, beside known correct answers: what the seed monitor flags · as many paid
    answers of the same groups at random (a control)."""
    probe_k: int = setting(1, low=1, high=1_000_000, monitors=("probe",))
    """probe: the score is the mean of this many highest tokens of an answer."""
    monitor_quantile: float = setting(0.9, low=0.5, high=1, monitors=(*CALIBRATED, *SEEDED))
    """Monitors that score texts: flagged above this quantile of the base's paid answers, and of known correct answers
    held back."""
    monitor_threshold: Literal["both", "known_correct"] = setting("both", monitors=CALIBRATED)
    """… the larger of the two quantiles · that of the known correct answers alone, where the base itself may exploit:
    its paid answers are no measure of honesty then."""
    monitor_prompts: int = setting(200, low=4, high=1_000_000, monitors=CALIBRATED)
    """… training prompts that the base answers twice before training."""
    known_correct: Path | None = setting(None, monitors=(*CALIBRATED, *SEEDED))
    """… correct solutions in unusual styles (JSON of prompt, completion); none: the preset's."""
    rebaseline: bool = setting(False, arms=("route2", "sgtm"))
    """Advantages of kept rows are recomputed among them (gate: of rows that are no known hacks)."""

    def __post_init__(self) -> None:
        check(self)
        arm, control, monitor = self.intervention, self.control, self.monitor_name
        refuse(
            self.route2_random_v_seed is not None and control not in ("none", "haar"),
            f"--control {control} with --route2-random-v-seed: one control a run; leave one of them out",
        )
        refuse(
            self.random_flags and (control != "none" or self.haar),
            f"--control {'haar' if self.haar else control} with --random-flags: one control a run; leave one out",
        )
        if arm not in (legal := CONTROLS[control].arms):
            raise ValueError(f"--control {control}: needs --intervention {' or '.join(legal)}, got {arm}")
        goes = [name for name in ARMS[arm].monitors if name]
        if not monitor:
            raise ValueError(f"--intervention {arm}: needs --monitor {', '.join(goes[:-1])} or {goes[-1]}")
        if monitor not in goes:
            raise ValueError(f"--monitor {monitor} with --intervention {arm}: that goes with {', '.join(goes)}")
        if (of := CONTROLS[control].of) and self.direction not in of:
            raise ValueError(
                f"--control {control}: replaces a direction, and --intervention {arm} --monitor {monitor} has none"
                if self.direction is None
                else f"--control {control}: not with --monitor {monitor}, whose direction is in hidden states"
            )
        refuse(
            self.other_pairs and self.v_hack_path is not None,
            f"--control {control} with --v-hack-path: that direction was made from the true pairs; leave it out",
        )
        refuse(
            (control == "placebo") != (self.placebo_pairs_path is not None),
            "--placebo-pairs-path: goes with --control placebo, give both or neither",
        )
        check_use(self, arm, control, self.watching)
        self._check_quarantine()
        band = monitor == "band"
        idle = {
            "vhack_refresh_every": self.haar and not band and self.vhack_refresh_every != 0,  # random directions stay
            "rebaseline": control == "shrinkage",
            **dict.fromkeys(
                ("monitor_quantile", "known_correct"), monitor == "quarantine" and not self.calibrates_quarantine
            ),
            "vhack_pairs_path": monitor == "quarantine" and not self.reads_pairs,
        }
        unread = [name for name, _ in changed(self) if idle.get(name)]
        refuse(bool(unread), f"{flags(unread)}: not read with these settings; leave it out")

    def _check_quarantine(self) -> None:
        refuse(
            self.monitor_name == "quarantine" and self.quarantine_diet == "solved" and self.seed_monitor != "labels",
            "--quarantine-diet solved: reads the true labels; add --seed-monitor labels",
        )
        refuse(
            self.starts_on_pairs and len(self.modes_known) > 1 and self.vhack_pairs_path is None,
            f"--quarantine-start pairs with --known-modes {self.known_modes}: a pair file shows one flaw; add "
            "--vhack-pairs-path",
        )
        form = self.quarantine_form
        given = f"--quarantine {self.quarantine}"
        refuse(form is None, f"{given}: should be one of {', '.join(FORMS)}, with a number from 1 to 1000")
        if form is None or form[0] == "shared":
            return
        refuse(
            form[0] == "lora" and self.by_gradient and self.gate_vote == "module",
            f"{given} with --monitor {self.monitor_name}: no direction lies in these matrices; add --gate-vote rollout",
        )
        refuse(
            form[0] == "lora" and self.quarantine_start != "zero",
            f"{given} with --quarantine-start {self.quarantine_start}: it starts in the modules' bases, which it has "
            "no part of; leave one out",
        )
        refuse(
            form[0] == "lora" and self.control == "deploy_quarantine",
            f"{given} with --control deploy_quarantine: the file of a run holds vectors in the bases alone",
        )
        refuse(
            self.control == "shrinkage",
            f"{given} with --control shrinkage: not read, nothing is quarantined; leave it out",
        )

    @property
    def monitor_name(self) -> str:
        """Who flags, the arm's usual one resolved; '' where one has to be named."""
        return ARMS[self.intervention].monitors[0] if self.monitor == "usual" else self.monitor

    @property
    def watching(self) -> tuple[str, ...]:
        """The monitors whose settings this run reads: its own, and the one that seeds it."""
        name = self.monitor_name
        return (name, self.seed_monitor) if name in SEEDED else (name,)

    @property
    def by_gradient(self) -> bool:
        """Whether the monitor decides by gradients, after the backward."""
        return MONITORS[self.monitor_name].direction == "gradient"

    @property
    def direction(self) -> Literal["gradient", "text"] | None:
        """Of the arm, or of its monitor."""
        found = [MONITORS[name].direction for name in self.watching]
        return ARMS[self.intervention].direction or next((d for d in found if d), None)

    @property
    def quarantine_form(self) -> tuple[Literal["shared", "block", "lora"], int] | None:
        """Where δS_hack lives, and the block's number or the rank; None: no such form."""
        if self.quarantine == "shared":
            return "shared", 0
        found = re.fullmatch(r"(block|lora):([1-9]\d{0,2}|1000)", self.quarantine)
        if not found:
            return None
        return ("block" if found[1] == "block" else "lora"), int(found[2])

    @property
    def quarantine_block(self) -> int | None:
        """The block that is the quarantine's alone, from 1; None: no such block."""
        form = self.quarantine_form
        return form[1] if form and form[0] == "block" else None

    @property
    def lora_rank(self) -> int:
        """Rank of the quarantine's own matrices; 0: it has none."""
        form = self.quarantine_form
        return form[1] if form and form[0] == "lora" else 0

    @property
    def routes(self) -> bool:
        """Whether training samples with a quarantine that is deleted before deployment."""
        return ARMS[self.intervention].routes or self.monitor_name == "quarantine"

    @property
    def shapes(self) -> bool:
        """Whether answers are paid otherwise than by the grader."""
        return self.intervention in ("screen", "penalty") or CONTROLS[self.control].shapes

    @property
    def haar(self) -> bool:
        return self.control == "haar" or self.route2_random_v_seed is not None

    @property
    def reads_pairs(self) -> bool:
        return self.direction is not None or self.control == "advantage_mod" or self.starts_on_pairs

    @property
    def starts_on_pairs(self) -> bool:
        """Whether the quarantine reads from the first step on by what pairs show."""
        return self.monitor_name == "quarantine" and self.quarantine_start == "pairs"

    @property
    def compares_prompts(self) -> bool:
        """Whether a prompt is compared with the same one without its hint."""
        return "pmi" in self.watching or self.control in ("hint_free", "recontextualise")

    @property
    def calibrates_quarantine(self) -> bool:
        return self.monitor_name == "quarantine" and self.quarantine_threshold is None

    @property
    def needs_known_correct(self) -> str:
        """The setting for which there is no threshold without known correct answers; "": they can be done without."""
        if self.calibrates_quarantine:
            return "--quarantine-threshold None"
        if self.monitor_name == "online_probe":
            return "--monitor online_probe"
        return "--monitor-threshold known_correct" if self.monitor_threshold == "known_correct" else ""

    @property
    def reads_text(self) -> bool:
        """Whether a monitor reads texts against a threshold that known correct answers set."""
        return bool(self.needs_known_correct) or any(MONITORS[name].calibrates for name in self.watching)

    @property
    def ablate_frac(self) -> float:
        usual = 1.0 if self.monitor_name == "quarantine" else 0.5 if self.intervention == "sgtm" else 0.0
        return usual if self.rollout_ablate_frac is None else self.rollout_ablate_frac

    @property
    def modes_known(self) -> tuple[Mode, ...]:
        """The flaws that a monitor with labels knows; (): all, or nobody is given labels."""
        return tuple(m for m in MODES if m in listed(self.known_modes, MODES))

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
        if self.random_flags:
            return "random_flags"
        return self._suffixed(self.control, lambda rule: bool(rule.controls))

    @property
    def monitor_title(self) -> str:
        """The one name by which files and tables know this run's monitor; '' for the arm's usual one."""
        name = self.monitor_name
        if name == ARMS[self.intervention].monitors[0]:
            return ""
        named = f"{name}_{self.seed_monitor}" if name in SEEDED else name
        return self._suffixed(named, lambda rule: not rule.controls)

    def _suffixed(self, name: str, mine: Callable[[Rule], bool]) -> str:
        away = [(rule.suffix, getattr(self, n)) for n, rule in changed(self) if rule.suffix is not None and mine(rule)]
        return "_".join([name, *(f"{s}{_short(v)}" for s, v in away)])

    @property
    def control_what(self) -> str:
        if self.random_flags:
            return "the monitor's flags dealt to rollouts at random"
        return CONTROLS["haar" if self.haar else self.control].what


def _short(value: float | str) -> str:
    """A setting's value in a name; of free text that it is one's own says enough."""
    if not isinstance(value, str):
        return f"{value:g}"
    return value if re.fullmatch(r"[\w,]{1,60}", value) else ""
