"""A method: the monitor that flags answers, the intervention that acts on its flags, and their controls.

`MONITORS` and `INTERVENTIONS` say where each class is. A class carries all that flags, help, checks and tables know of
it: its line, the settings that it reads, what it needs and sees. A setting of a class that was not chosen is refused.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import tyro

from vgrout.config.checks import (
    changed,
    check,
    flag,
    flags,
    in_usual_order,
    listed,
    require_words,
    summary,
)
from vgrout.config.method_settings import (
    DirectionSettings,
    EraseSettings,
    GateSettings,
    LabelsSettings,
    PenaltySettings,
    PlaceboSettings,
    PlaceSettings,
    QuantileSettings,
    QuarantineSettings,
    ReferencesSettings,
    SeedSettings,
    SurgerySettings,
    VoteSettings,
)
from vgrout.environments import CODE_FLAWS
from vgrout.errors import Refused, refuse

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Groups = tuple[type["DataclassInstance"], ...]


class Declared(Protocol):
    """What every class of a method says of itself."""

    name: ClassVar[str]
    what: ClassVar[str]  # one line, for help
    Settings: ClassVar[Groups]  # the groups of settings that it reads


class MonitorClass(Declared, Protocol):
    """… a monitor."""

    # and so decides before the backward, or after it
    reads: ClassVar[Literal["texts", "gradients"]]
    # of "seed" (another monitor that it learns from), "known correct" (answers)
    needs: ClassVar[tuple[str, ...]]
    sees_labels: ClassVar[bool]  # a bound, and no method
    # signs random directions in their favour, whenever the pairs are read again
    signs_random: ClassVar[bool]


class InterventionClass(Declared, Protocol):
    """… an intervention."""

    acts_on: ClassVar[Literal["nothing", "rewards", "gradient"]]
    reads_flags: ClassVar[bool]
    by_rollout: ClassVar[bool]  # needs each rollout's own gradient, which costs more than sums
    usual_monitor: ClassVar[str]  # where none is named; "": one has to be
    routes: ClassVar[bool]  # has a quarantine δS_hack
    has_direction: ClassVar[bool]  # of its own, in gradients
    # what None means for the settings that depend on the intervention
    usual: ClassVar[Mapping[str, Any]]
    # the same as the method was first described; {}: no other
    documents: ClassVar[Mapping[str, Any]]


# Where each class is, as on the command line for a class of your own; imported when it is chosen.
# Torch-free modules: a wrong flag never waits for torch.
MONITORS: dict[str, str | type[MonitorClass]] = {
    "none": "vgrout.method.base:Monitor",
    "gate": "vgrout.method.gates:Gate",
    "band": "vgrout.method.gates:Band",
    "labels": "vgrout.method.monitors:Labels",
    "source": "vgrout.method.monitors:Source",
    "detector": "vgrout.method.monitors:WeakDetector",
    "online_probe": "vgrout.method.online_probe:OnlineProbe",
    "syntax_edge": "vgrout.envs.code.monitors:SyntaxEdge",
}
INTERVENTIONS: dict[str, str | type[InterventionClass]] = {
    "none": "vgrout.method.base:Intervention",
    "erase": "vgrout.method.interventions:Erase",
    "route": "vgrout.method.interventions:Route",
    "screen": "vgrout.method.interventions:Screen",
    "penalty": "vgrout.method.interventions:Penalty",
    "route2": "vgrout.method.interventions:Route2",
}
_OWN = frozenset({*MONITORS, *INTERVENTIONS})
# Settings that name classes: where one of your own is registered, an attribute that it has, what it
# is.
CLASSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "intervention": (INTERVENTIONS, "acts_on", "Intervention"),
    **dict.fromkeys(("monitor", "seed_monitor", "shadow"), (MONITORS, "reads", "Monitor")),
}


def _named(registry: dict[str, Any], name: str) -> Any:
    """The class of this name."""
    if isinstance(found := registry[name], str):
        module, _, attribute = found.partition(":")
        found = registry[name] = getattr(importlib.import_module(module), attribute)
    return found


def monitor_class(name: str) -> type[MonitorClass]:
    return _named(MONITORS, name)


def intervention_class(name: str) -> type[InterventionClass]:
    return _named(INTERVENTIONS, name)


def register(registry: dict[str, Any], own: Any, name: str = "") -> None:
    """Let flags of this process find a class of your own by its name, or as `name`, module:Class.

    Raises:
        Refused: no name that a flag can have, or one of the package's own.
    """
    name = name or own.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*|[\w.]+:\w+", name) or name in _OWN:
        raise Refused(
            f"{own.__name__}: its name {name!r} should be of small letters, digits and _, and not taken"
        )
    registry[name] = own


class _Unknown:
    """A class of somebody's own in a record of a run: nothing is known of it but its name, and nothing is imported."""

    what = "known to another process"
    reads, needs, sees_labels, signs_random = "texts", (), False, False
    acts_on, by_rollout, usual_monitor, routes, has_direction = (
        "gradient",
        False,
        "none",
        True,
        True,
    )
    usual: ClassVar[Mapping[str, Any]] = {}
    documents: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def make(cls, *_: Any, **__: Any) -> Any:
        raise Refused(
            f"{cls.__name__}: is code, which a file may not have run; name it on the command line as well"
        )


def admit(recorded: Mapping[str, Any]) -> None:
    """Let the settings of a recorded method be read where they name classes that this process has not imported."""
    flagged = recorded.get("monitor") not in ("usual", "none", None)
    for setting, (registry, *_) in CLASSES.items():
        given = recorded.get(setting)
        for name in listed(given) if isinstance(given, str) else ():
            if re.fullmatch(r"[\w.]+:\w+", name) and name not in registry:
                # it may read all
                told = {"name": name, "reads_flags": flagged, "Settings": MethodConfig.__bases__}
                registry[name] = type(name, (_Unknown,), told)


@dataclass(frozen=True)
class Control:
    """What a control does, and what it can be a control of."""

    what: str  # one line, for help, a run's log and run.json
    settings: Groups = ()
    replaces: Literal["", "random", "placebo pairs"] = ""  # the direction, which there has to be
    strict: bool = False  # the reward is the reference tests'


CONTROLS: dict[str, Control] = {
    "none": Control("the method itself"),
    "haar": Control("random directions, the same number in every module", replaces="random"),
    "placebo": Control(
        "the direction of pairs about an unrelated contrast: --placebo-pairs",
        (PlaceboSettings,),
        replaces="placebo pairs",
    ),
    "no_loophole": Control(
        "reward of the reference tests alone: the ceiling for solve", strict=True
    ),
}


def obstacle(intervention: str, monitor: str) -> str | None:
    """Why these two make no method; None: they do."""
    treats = intervention_class(intervention)
    if not treats.reads_flags:
        return None if monitor == "none" else "it uses no monitor"
    if monitor in ("", "none"):
        return "it needs a monitor"
    if monitor_class(monitor).reads == "gradients" and treats.acts_on == "rewards":
        return "rewards change before the gradients that this monitor reads"
    return None


def monitors_of(intervention: str) -> list[str]:
    """Monitors that go with an intervention."""
    return [name for name in MONITORS if obstacle(intervention, name) is None]


def watchers(*, seeds: bool = False) -> list[str]:
    """Monitors that can flag in a run without touching it: they need no gradient. seeds: and learn from no other."""
    read = {name: monitor_class(name) for name in MONITORS if name != "none"}
    return [n for n, m in read.items() if m.reads == "texts" and not (seeds and "seed" in m.needs)]


def described(registry: dict[str, Any]) -> str:
    """Every class with its line, for help."""
    return summary({name: _named(registry, name).what for name in registry})


@dataclass(frozen=True)
class ChoiceSettings:
    """What is flagged, what is done about it, and which control of that it is."""

    intervention: Annotated[str, tyro.conf.arg(metavar="NAME")] = "erase"
    """What is done about flagged answers, or along a direction; module:Class: one of your own."""
    monitor: Annotated[str, tyro.conf.arg(metavar="NAME")] = "usual"
    """What flags them; usual: the intervention's own (route2: gate; screen and penalty have none and need one);
    module:Class: one of your own."""
    control: Annotated[
        str,
        tyro.conf.arg(
            help=f"The same run under a control. {summary({name: row.what for name, row in CONTROLS.items()})}",
            metavar="NAME",
        ),
    ] = "none"
    shadow: str = ""
    """Comma list of monitors that flag and are scored, and change nothing: `vgrout report` has their recall, false
    flags and AUC. Each has the settings that the other flags give monitors of its kind."""
    random_flags: bool = False
    """The monitor's flags are shuffled among rollouts, as many: a control of which rollouts are flagged."""


@dataclass(frozen=True)
class MethodConfig(
    PlaceSettings,
    QuarantineSettings,
    PenaltySettings,
    QuantileSettings,
    ReferencesSettings,
    SeedSettings,
    LabelsSettings,
    GateSettings,
    VoteSettings,
    PlaceboSettings,
    EraseSettings,
    SurgerySettings,
    DirectionSettings,
    ChoiceSettings,
):
    """The choice and every group of settings: flat on the command line and in files."""

    def __post_init__(self) -> None:
        for name, legal in (
            ("intervention", INTERVENTIONS),
            ("monitor", {"usual": "", **MONITORS}),
            ("control", CONTROLS),
        ):
            value = getattr(self, name)
            if value not in legal:
                own = "a file may not have code run; if it is yours, name it on the command line as well"
                own_class = ", or module:Class" * (name != "control")
                names = f"should be one of {', '.join(legal)}{own_class}"
                raise Refused(f"{flag(name)} {value}: {own if ':' in value else names}")
        check(self)
        monitor, with_it = self.monitor_name, f"--intervention {self.intervention}"
        if why := obstacle(self.intervention, monitor):
            legal, readers = (
                monitors_of(self.intervention),
                [n for n in INTERVENTIONS if monitors_of(n) != ["none"]],
            )
            instead = f"say --monitor {' or '.join(legal)}"
            if not self.spec.reads_flags:
                instead = f"leave it out, or say --intervention {' or '.join(readers)}"
            given = f"--monitor {monitor} with {with_it}" if monitor else with_it
            raise Refused(f"{given}: {why}; {instead}")
        require_words("seed_monitor", [self.seed_monitor], watchers(seeds=True), "seed")
        require_words("shadow", self.in_shadow, [w for w in watchers() if w != monitor], "watcher")
        self._check_control()
        self._check_read()

    def _check_control(self) -> None:
        """One control, and one that this method can have."""
        given = [f"--control {self.control}"] * (self.control != "none")
        given += [f"--route2-random-v-seed {self.route2_random_v_seed}"] * (
            self.route2_random_v_seed is not None
        )
        given += ["--random-flags"] * self.random_flags
        what = "direction" if self.direction_is else "flags"
        both = {"--control haar", f"--route2-random-v-seed {self.route2_random_v_seed}"}
        refuse(
            len(given) > 1 and {*given} != both,
            f"{' with '.join(given)}: one control a run; leave one of them out",
        )
        refuse(
            bool(self.direction_is and not self.has_direction)
            or (self.random_flags and not self.spec.reads_flags),
            f"{' '.join(given)}: replaces the {what}, and --intervention {self.intervention} --monitor "
            f"{self.monitor_name} has none",
        )
        refuse(
            self.direction_is == "placebo pairs" and self.v_hack_path is not None,
            "--control placebo with --v-hack-path: that direction was built from the true pairs; leave it out",
        )

    def _check_read(self) -> None:
        """A setting of a class that was not chosen would be a silent no-op, but for one that is what is done anyway."""
        own, usual = _settings((ChoiceSettings, *self.groups)), self.spec.usual
        own |= {"v_hack_path"} if self.intervention == "none" else set()  # said in `ignored`
        away = [
            name
            for name, _ in changed(self)
            if name not in usual or getattr(self, name) != usual[name]
        ]
        if foreign := [name for name in away if name not in own]:
            readers = [
                f"--{kind} {' or '.join(names)}"
                for kind, registry in (("intervention", INTERVENTIONS), ("monitor", MONITORS))
                if (
                    names := [
                        n for n in registry if foreign[0] in _settings(_named(registry, n).Settings)
                    ]
                )
            ]
            readers += ["--control placebo"] * (foreign[0] in _settings((PlaceboSettings,)))
            chosen = f"--intervention {self.intervention} --monitor {self.monitor_name}"
            raise Refused(
                f"{flags(foreign)}: not read by {chosen}, goes with {' or '.join(readers)}; leave it out"
            )

    @property
    def ignored(self) -> list[str]:
        """What is given and changes nothing, in lines for the plan: scripts give it to every run."""
        still = self.haar and not self.monitor_spec.signs_random and bool(self.vhack_refresh_every)
        lines = [
            f"--vhack-refresh-every {self.vhack_refresh_every}: ignored, random directions stay"
        ] * still
        if self.v_hack_path is not None and not self.has_direction:
            lines.append(
                f"--v-hack-path: ignored, --intervention {self.intervention} has no direction"
            )
        return lines

    @cached_property
    def spec(self) -> type[InterventionClass]:
        return intervention_class(self.intervention)

    @cached_property
    def monitor_spec(self) -> type[MonitorClass]:
        return monitor_class(self.monitor_name)

    @property
    def control_spec(self) -> Control:
        return CONTROLS["haar" if self.haar else self.control]

    @property
    def groups(self) -> Groups:
        """The groups of settings that this run reads."""
        watching = [monitor_class(name) for name in self.watching]
        read = (
            *self.spec.Settings,
            *(group for m in watching for group in m.Settings),
            *self.control_spec.settings,
        )
        return tuple(dict.fromkeys(read))

    def resolved(self, name: str) -> Any:
        """A setting as it is meant: None is what the intervention's class says."""
        value = getattr(self, name)
        return self.spec.usual.get(name) if value is None else value

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """Every setting, as it is meant where this run reads it: what a record has."""
        own = _settings(self.groups)
        return {
            f.name: self.resolved(f.name) if f.name in own else getattr(self, f.name)
            for f in fields(self)
        }

    @property
    def refresh_every(self) -> int:
        """Steps from one extraction of the direction to the next; 0: it is frozen."""
        return self.resolved("vhack_refresh_every")

    @property
    def ablate_frac(self) -> float:
        """Share of student rows sampled from the deployed model."""
        return (
            (self.resolved("rollout_ablate_frac") or 0.0)
            if QuarantineSettings in self.groups
            else 0.0
        )

    @property
    def quarantine_block(self) -> int | None:
        """The block that is the quarantine's alone: from 1, or from −1, the last one, downwards. None: no such
        block."""
        place = (
            (self.resolved("quarantine") or "shared") if PlaceSettings in self.groups else "shared"
        )
        block = place.removeprefix("block:")
        return None if block == "shared" else -1 if block == "last" else int(block)

    @property
    def monitor_name(self) -> str:
        """What flags, the intervention's usual monitor resolved; '' where one has to be named."""
        return self.spec.usual_monitor if self.monitor == "usual" else self.monitor

    @property
    def acting(self) -> tuple[str, ...]:
        """The monitor whose flags are acted on, and the one that seeds it."""
        return self._with_seed(self.monitor_name)

    @property
    def in_shadow(self) -> tuple[str, ...]:
        """The monitors whose flags are recorded alone."""
        return tuple(listed(self.shadow, MONITORS))

    @property
    def watching(self) -> tuple[str, ...]:
        """Every monitor of this run, and those that seed them."""
        return tuple(
            dict.fromkeys(
                [*self.acting, *(n for name in self.in_shadow for n in self._with_seed(name))]
            )
        )

    def _with_seed(self, name: str) -> tuple[str, ...]:
        return (name, self.seed_monitor) if "seed" in monitor_class(name).needs else (name,)

    @property
    def flags_by_gradient(self) -> bool:
        """Whether the monitor decides by gradients, after the backward."""
        return self.monitor_spec.reads == "gradients"

    @property
    def has_direction(self) -> bool:
        """Whether the intervention or its monitor has a direction in gradients."""
        return self.spec.has_direction or self.flags_by_gradient

    @property
    def haar(self) -> bool:
        return self.control == "haar" or self.route2_random_v_seed is not None

    @property
    def direction_is(self) -> Literal["", "random", "placebo pairs"]:
        """What replaces the real direction; "": nothing."""
        return self.control_spec.replaces

    @property
    def routes(self) -> bool:
        """Whether training has a quarantine that is deleted before deployment."""
        return self.spec.routes

    @property
    def changes_rewards(self) -> bool:
        """Whether answers get other rewards than the grader's."""
        return self.spec.acts_on == "rewards"

    @property
    def needs_known_correct(self) -> str:
        """The flag of the first monitor that is nothing without known correct answers; "": there is none."""
        for name in self.watching:
            if "known correct" in monitor_class(name).needs:
                own = "monitor" if name == self.monitor_name else "seed-monitor"
                return f"--{'shadow' if name in self.in_shadow else own} {name}"
        return ""

    @property
    def modes_known(self) -> tuple[str, ...]:
        """The flaws that a monitor with labels knows; (): all, or nobody is given labels."""
        return tuple(in_usual_order(listed(self.known_modes, CODE_FLAWS), CODE_FLAWS))

    @property
    def modes_acted_on(self) -> tuple[str, ...]:
        """The same of the monitor whose flags are acted on."""
        return (
            self.modes_known if any(monitor_class(name).sees_labels for name in self.acting) else ()
        )

    @property
    def control_name(self) -> str:
        """The one name by which files and tables know this run's control."""
        if self.haar:
            return "haar"
        if self.random_flags:
            return "random_flags"
        if self.direction_is == "placebo pairs":
            return f"placebo_{Path(self.placebo_pairs).stem.removeprefix('placebo_')}"
        return self.control

    @property
    def control_what(self) -> str:
        return (
            "the monitor's flags, shuffled among rollouts"
            if self.random_flags
            else self.control_spec.what
        )

    @property
    def monitor_title(self) -> str:
        """The one name by which files and tables know this run's monitor; '' for the intervention's usual one."""
        name = self.monitor_name
        if name == self.spec.usual_monitor:
            return ""
        away = [
            (rule.suffix, getattr(self, n)) for n, rule in changed(self) if rule.suffix is not None
        ]
        acting = (of.partition(":")[2] or of for of in self.acting)
        return "_".join([*acting, *(f"{s}{_short(v)}" for s, v in away)])


def _settings(groups: Groups) -> set[str]:
    return {f.name for group in groups for f in fields(group)}


def _short(value: float | str) -> str:
    """A setting's value in a name; '' for free text: the suffix says enough."""
    if not isinstance(value, str):
        return f"{value:g}"
    return value if re.fullmatch(r"[\w,]{1,60}", value) else ""
