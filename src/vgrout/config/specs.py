"""What there is to choose from: monitors, interventions and controls, one row each.

A row says all that flags, help, checks and tables know of a class, and where the class is: `module:Class`, imported
when it is chosen. So a wrong flag is refused before torch is loaded.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vgrout.config.checks import listed
from vgrout.ground.io import Refused, refuse

# Settings of `MethodConfig`, by what reads them.
DIRECTION = ("v_hack_path", "vhack_refresh_every", "route2_random_v_seed", "vhack_pairs_path")
SURGERY = (
    "v_hack_extract_top_k",
    "v_hack_k",
    "v_hack_tau_axis",
    "v_hack_drop_bottom_frac",
    "gate_mode",
)
QUARANTINE = ("rollout_ablate_frac",)
JUDGE = (
    "llm_judge_model",
    "llm_judge_url",
    "llm_judge_prompt",
    "llm_judge_thoughts",
    "llm_judge_max_new",
    "llm_judge_timeout",
)


@dataclass(frozen=True, kw_only=True)
class MonitorSpec:
    """One monitor. A class of your own says these as class attributes: `name` and `what`, the others where they are
    not as here."""

    name: str
    what: str  # one line, for help
    where: str | type = ""  # "module:Class", or the class itself
    settings: tuple[str, ...] = ()  # names of the settings that it reads
    # texts: it flags before the backward · gradients: after it
    reads: Literal["texts", "gradients"] = "texts"
    # of "seed" (another monitor that it learns from), "known correct" (answers), "detector" (the environment's own
    # weak one) and "demonstrations" (without which, and without that detector, it flags nothing)
    needs: tuple[str, ...] = ()
    of: str = ""  # the environment whose answers it reads; "": any
    sees_labels: bool = False  # it is given true labels: a bound, and no method
    # random directions are signed in their favour, again whenever the pairs are read
    signs_random: bool = False


# What None means for the settings whose best value depends on the intervention.
USUAL: Mapping[str, object] = {
    "quarantine": "shared",
    "rollout_ablate_frac": 0.0,
    "rebaseline": False,
    "vhack_refresh_every": 5,
    "gate_vote": "rollout",
    "gate_modules": "apart",
}


@dataclass(frozen=True, kw_only=True)
class InterventionSpec:
    """One intervention. A class of your own says these as class attributes: `name` and `what`, the others where they
    are not as here."""

    name: str
    what: str  # one line, for help
    where: str | type = ""  # "module:Class", or the class itself
    settings: tuple[str, ...] = ()  # names of the settings that it reads
    acts_on: Literal["nothing", "rewards", "gradient"] = "nothing"
    reads_flags: bool = False
    by_rollout: bool = False  # it needs each rollout's own gradient, which costs more than sums
    usual_monitor: str = "none"  # where none is named; "": one has to be
    routes: bool = False  # it has a quarantine δS_hack
    has_direction: bool = False  # of its own, in gradients
    usual: Mapping[str, object] = field(default_factory=lambda: USUAL)


MONITORS: dict[str, MonitorSpec] = {}
INTERVENTIONS: dict[str, InterventionSpec] = {}

for _monitor in (
    MonitorSpec(
        name="none",
        what="nothing is flagged",
        where="vgrout.method.base:Monitor",
    ),
    MonitorSpec(
        name="gate",
        what="cosine of a rollout's gradient above τ, and known hacks (of thoughts too)",
        where="vgrout.method.gates:Gate",
        settings=(*DIRECTION, "gate_vote", "gate_modules", "known_hacks_teacher_only"),
        reads="gradients",
        needs=("demonstrations",),
    ),
    MonitorSpec(
        name="band",
        what="softly, where that cosine lies between the pairs' clean and hack sides (of thoughts too)",
        where="vgrout.method.gates:Band",
        settings=(*DIRECTION, "gate_vote"),
        reads="gradients",
        signs_random=True,
    ),
    MonitorSpec(
        name="labels",
        what="true labels, with blind spots and a set error rate: a bound, never a method",
        where="vgrout.method.monitors:Labels",
        settings=("known_modes", "label_false_flags"),
        sees_labels=True,
    ),
    MonitorSpec(
        name="source",
        what="demonstrations alone: a control, never a method",
        where="vgrout.method.monitors:Source",
        needs=("demonstrations",),
    ),
    MonitorSpec(
        name="detector",
        what="the weak detector alone",
        where="vgrout.method.monitors:WeakDetector",
        needs=("detector",),
    ),
    # A new monitor goes here: its row, and its class in a file of its own.
    MonitorSpec(
        name="online_probe",
        what="what a seed monitor flags, and rewarded answers whose hidden states in the frozen base are more like "
        "those than like known correct ones",
        where="vgrout.method.online_probe:OnlineProbe",
        settings=("seed_monitor", "known_correct", "monitor_quantile"),
        needs=("seed", "known correct"),
    ),
    MonitorSpec(
        name="syntax_edge",
        what="rewarded answers with a parent → child edge of the syntax tree that no known correct answer has",
        where="vgrout.envs.code.monitors:SyntaxEdge",
        settings=("known_correct",),
        needs=("known correct",),
        of="code",
    ),
    MonitorSpec(
        name="llm_judge",
        what="rewarded answers of which a language model says that they game the check",
        where="vgrout.method.llm_judge:LLMJudge",
        settings=JUDGE,
    ),
):
    MONITORS[_monitor.name] = _monitor

for _intervention in (
    InterventionSpec(
        name="none",
        what="plain GRPO",
        where="vgrout.method.base:Intervention",
    ),
    # A new intervention goes here: its row, and its class in a file of its own.
    InterventionSpec(
        name="erase",
        what="drop the hack-ward part of the gradient",
        where="vgrout.method.interventions:Erase",
        settings=(*DIRECTION, *SURGERY, "preserve_magnitude", "project_overshoot"),
        acts_on="gradient",
        has_direction=True,
    ),
    InterventionSpec(
        name="route",
        what="quarantine that part",
        where="vgrout.method.interventions:Route",
        settings=(*DIRECTION, *SURGERY, *QUARANTINE),
        acts_on="gradient",
        has_direction=True,
        routes=True,
    ),
    InterventionSpec(
        name="screen",
        what="leave flagged rollouts out of their group",
        where="vgrout.method.interventions:Screen",
        acts_on="rewards",
        reads_flags=True,
        usual_monitor="",
    ),
    InterventionSpec(
        name="penalty",
        what="reward flagged rollouts less",
        where="vgrout.method.interventions:Penalty",
        settings=("penalty",),
        acts_on="rewards",
        reads_flags=True,
        usual_monitor="",
    ),
    InterventionSpec(
        name="route2",
        what="quarantine flagged gradients",
        where="vgrout.method.interventions:Route2",
        settings=(*QUARANTINE, "quarantine", "rebaseline"),
        acts_on="gradient",
        reads_flags=True,
        usual_monitor="gate",
        routes=True,
        usual={
            **USUAL,
            "quarantine": "block:-2",
            "rollout_ablate_frac": 1.0,
            "rebaseline": True,
            "vhack_refresh_every": 0,
        },
    ),
):
    INTERVENTIONS[_intervention.name] = _intervention


@dataclass(frozen=True)
class Control:
    """What a control does, and what it can be a control of."""

    what: str  # one line, for help, a run's log and run.json
    settings: tuple[str, ...] = ()
    replaces: Literal["", "random", "placebo pairs"] = ""  # the direction, which there has to be
    strict: bool = False  # the reward is the reference's


CONTROLS: dict[str, Control] = {
    "none": Control("the method itself"),
    "haar": Control("random directions, the same number in every module", replaces="random"),
    "placebo": Control(
        "the direction of pairs about an unrelated contrast: --placebo-pairs",
        ("placebo_pairs",),
        replaces="placebo pairs",
    ),
    "no_loophole": Control(
        "reward of the reference tests alone: the ceiling for solve", strict=True
    ),
}

# ── classes of a user's own

_OURS = frozenset({*MONITORS, *INTERVENTIONS})


@dataclass(frozen=True)
class Kind:
    """What a setting that names classes may name."""

    title: str  # of the base class
    specs: dict[str, Any]
    spec: Any  # the type of the rows
    decides: tuple[str, ...]  # the methods of which a class has at least one of its own


INTERVENTION = Kind(
    "Intervention",
    INTERVENTIONS,
    InterventionSpec,
    decides=("route", "advantages", "reward", "prompt"),
)
MONITOR = Kind("Monitor", MONITORS, MonitorSpec, decides=("flag", "flag_gradients"))
# Settings that name classes.
CLASSES: dict[str, Kind] = {
    "intervention": INTERVENTION,
    "monitor": MONITOR,
    "seed_monitor": MONITOR,
    "shadow": MONITOR,
}


def class_of(spec: MonitorSpec | InterventionSpec) -> Any:
    """The class of a row, imported now."""
    if not isinstance(spec.where, str):
        return spec.where
    module, _, name = spec.where.partition(":")
    return getattr(importlib.import_module(module), name)


def register(kind: Kind, own: Any, name: str = "", flag: str = "") -> None:
    """Let flags of this process find a class of your own by its name, or as `name`, module:Class. flag: that named it,
    for messages.

    Raises:
        Refused: it is no such class, has no name that a flag can have, or one of the package's own, or changes
            nothing.
    """
    base = None
    for part in getattr(own, "__mro__", ()):
        if (part.__module__, part.__name__) == ("vgrout.method.base", kind.title):
            base = part
    if base is None:
        raise Refused(f"{flag} {name or own}: is no {kind.title} of vgrout.method.base".strip())
    facts: dict[str, object] = {}
    for f in fields(kind.spec):
        # what the class says itself, else what its base class is registered with
        said = getattr(own, f.name, None)
        is_said = said is not None and not isinstance(said, property)
        facts[f.name] = said if is_said else getattr(own.spec, f.name)
    name = name or getattr(own, "name", "")
    if not re.fullmatch(r"[a-z][a-z0-9_]*|[\w.]+:\w+", name) or name in _OURS:
        raise Refused(
            f"{own.__name__}: its name {name!r} should be of small letters, digits and _, and not taken"
        )
    decides: list[str] = []
    for method in kind.decides:
        if getattr(own, method, None) is not getattr(base, method, None):
            decides.append(method)
    refuse(not decides, f"{own.__name__}: has no {' or '.join(kind.decides)} of its own")
    if kind is INTERVENTION and facts["acts_on"] == "nothing":
        facts["acts_on"] = "rewards" if {*decides} - {"prompt"} == {"reward"} else "gradient"
    refuse(
        "reward" in decides and facts["acts_on"] != "rewards",
        f'{own.__name__}.reward: is called only with acts_on = "rewards"',
    )
    own.spec = kind.specs[name] = kind.spec(**facts | {"name": name, "where": own})


def admit(recorded: Mapping[str, object], settings: tuple[str, ...]) -> None:
    """Let the settings of a recorded method be read where they name classes that this process has not imported.

    settings: all that there are, any of which such a class may read.
    """
    flagged = recorded.get("monitor") not in ("usual", "none", None)
    for setting, kind in CLASSES.items():
        given = recorded.get(setting)
        for name in listed(given) if isinstance(given, str) else ():
            if not re.fullmatch(r"[\w.]+:\w+", name) or name in kind.specs:
                continue
            told: dict[str, object] = {"name": name, "what": "known to another process"}
            if kind is INTERVENTION:
                told |= {"acts_on": "gradient", "routes": True, "has_direction": True}
                told |= {"reads_flags": flagged, "usual": {}}
            kind.specs[name] = kind.spec(**told, settings=settings)


# ── which go together


def obstacle(intervention: str, monitor: str) -> str | None:
    """Why these two make no method; None: they do."""
    treats = INTERVENTIONS[intervention]
    if not treats.reads_flags:
        return None if monitor == "none" else "it uses no monitor"
    if monitor in ("", "none"):
        return "it needs a monitor"
    if MONITORS[monitor].reads == "gradients" and treats.acts_on == "rewards":
        return "rewards change before the gradients that this monitor reads"
    return None


def monitors_of(intervention: str) -> list[str]:
    """Monitors that go with an intervention."""
    return [name for name in MONITORS if obstacle(intervention, name) is None]


def watchers(*, seeds: bool = False) -> list[str]:
    """Monitors that can flag in a run without touching it: they need no gradient. seeds: and learn from no other."""
    names: list[str] = []
    for name, spec in MONITORS.items():
        if name != "none" and spec.reads == "texts" and not (seeds and "seed" in spec.needs):
            names.append(name)
    return names
