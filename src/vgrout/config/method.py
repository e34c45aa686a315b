"""A method: who is flagged (`MONITORS`), what is done about it (`INTERVENTIONS`), and the controls of both.

These rows are all that flags, help, checks and tables know of a method; its classes are in `vgrout.method`. Which pairs
are legal follows from what the rows say. A run reads the groups of settings (`config/method_settings.py`) that its
monitor, intervention and control name: any other setting away from its default is refused, not ignored.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vgrout.config.checks import changed, check, flag, flags, listed, refuse, summary
from vgrout.config.method_settings import (
    Axes,
    Baseline,
    Calibration,
    Diet,
    Direction,
    Invitation,
    Labels,
    Pairs,
    Penalised,
    Place,
    Placebo,
    Probe,
    Quarantine,
    QuarantineReads,
    Reading,
    References,
    Removal,
    Seed,
    Threshold,
    Vote,
)
from vgrout.modes import MODES, Mode

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Groups = tuple[type["DataclassInstance"], ...]


@dataclass(frozen=True)
class MonitorSpec:
    """What a monitor is."""

    what: str  # one line
    settings: Groups = ()
    needs: Literal["texts", "gradients"] = "texts"  # decides before the backward, or after it
    owns_quarantine: bool = False  # reads with δS_hack, which learns from rows that it names
    learns: bool = False  # to read, from what a seed monitor flags
    compares_prompts: bool = False  # with and without the hint
    signs_random: bool = False  # signs random directions in their favour, anew whenever the pairs are read again
    calibrates: bool = False  # its threshold needs the base's own answers
    sees_labels: bool = False  # a bound, and no method
    compares_answers: bool = False  # with known correct ones, without which it is nothing
    forwards: float = 0.0  # of the model over each answer, which is what it costs


MONITORS: dict[str, MonitorSpec] = {
    "none": MonitorSpec("nothing is flagged"),
    "gate": MonitorSpec(
        "cosine of a rollout's gradient above τ, and known hacks", (Direction, Pairs, Vote, Threshold), "gradients"
    ),
    "band": MonitorSpec(
        "softly, where that cosine lies between the pairs' clean and hack sides",
        (Direction, Pairs, Vote),
        "gradients",
        signs_random=True,
    ),
    "labels": MonitorSpec(
        "true labels, with errors and blind spots: a bound, never a method", (Labels,), sees_labels=True
    ),
    "detector": MonitorSpec("the weak detector alone"),
    "pmi": MonitorSpec(
        "answers that the prompt's hint makes likelier, to the frozen base",
        (Reading, References, Calibration),
        compares_prompts=True,
        calibrates=True,
        forwards=2.0,
    ),
    "nll": MonitorSpec(
        "answers that the frozen base finds unlikely",
        (Reading, References, Calibration),
        calibrates=True,
        forwards=1.0,
    ),
    "length": MonitorSpec("short answers", (Reading, References, Calibration), calibrates=True),
    "twin": MonitorSpec("answers that are rewarded on an impossible twin of the problem too"),
    "quarantine": MonitorSpec(
        "what a seed monitor flags, and rewarded answers that the quarantine makes likelier",
        (Seed, Reading, References, QuarantineReads, Pairs, Quarantine, Place),
        owns_quarantine=True,
        learns=True,
        forwards=2.0,
    ),
    "online_probe": MonitorSpec(
        "what a seed monitor flags, and rewarded answers whose hidden states in the frozen base are more like those "
        "than like known correct ones",
        (Seed, Reading, References, Diet, Probe),
        learns=True,
        compares_answers=True,
        forwards=0.5,
    ),
    "fingerprint": MonitorSpec(
        "the same, by the gradients of their log-probability in the frozen base (gradient fingerprints)",
        (Seed, Reading, References, Diet),
        learns=True,
        compares_answers=True,
        forwards=3.0,
    ),
    "unread_argument": MonitorSpec("rewarded answers of which no method reads an argument"),
    "constant_return": MonitorSpec("rewarded answers whose methods return nothing but literals"),
    "syntax_edge": MonitorSpec(
        "rewarded answers with a parent → child edge of the syntax tree that no known correct answer has",
        (References,),
        compares_answers=True,
    ),
}


@dataclass(frozen=True)
class InterventionSpec:
    """What an intervention is."""

    what: str  # one line
    settings: Groups = ()
    acts_on: Literal["nothing", "rewards", "rows", "gradient"] = "nothing"
    reads_flags: bool = False
    usual: str = "none"  # its monitor where none is named; "": one has to be
    routes: bool = False  # has a quarantine δS_hack, whatever flags
    has_direction: bool = False  # of its own, in gradients
    ablate_frac: float = 0.0  # usual --rollout-ablate-frac


INTERVENTIONS: dict[str, InterventionSpec] = {
    "none": InterventionSpec("plain GRPO"),
    "erase": InterventionSpec(
        "drop the hack-ward part of the gradient", (Direction, Pairs, Axes, Removal), "gradient", has_direction=True
    ),
    "route": InterventionSpec(
        "quarantine that part", (Direction, Pairs, Axes, Quarantine), "gradient", routes=True, has_direction=True
    ),
    "screen": InterventionSpec("leave flagged rollouts out of their group", (), "rewards", reads_flags=True, usual=""),
    "penalty": InterventionSpec("reward flagged rollouts less", (Penalised,), "rewards", reads_flags=True, usual=""),
    "route2": InterventionSpec(
        "quarantine the gradient of flagged rollouts",
        (Quarantine, Place, Baseline),
        "gradient",
        reads_flags=True,
        usual="gate",
        routes=True,
    ),
    "sgtm": InterventionSpec(
        "flagged rollouts train the quarantine, those sampled without it the kept part, the rest both (Selective "
        "Gradient Masking)",
        (Quarantine, Place, Baseline),
        "rows",
        reads_flags=True,
        usual="",
        routes=True,
        ablate_frac=0.5,
    ),
}


@dataclass(frozen=True)
class ControlSpec:
    """What a control does, and what it can be a control of."""

    what: str  # one line, for help, a run's log and run.json
    settings: Groups = ()
    of: Literal["any", "plain GRPO", "a direction", "surgery or routing by a direction", "a quarantine"] = "any"
    direction: Literal["", "random", "shuffled pairs", "placebo pairs"] = ""  # in place of the real one
    prompts: Literal["", "without the hint", "with an invitation"] = ""  # of the training problems
    learns_hinted: bool = False  # … and under which they are learnt all the same
    deploys_quarantine: bool = False
    strict: bool = False  # the reward is the strict oracle's
    shrinks: bool = False  # plain GRPO's update, scaled


CONTROLS: dict[str, ControlSpec] = {
    "none": ControlSpec("the method itself"),
    "haar": ControlSpec("random directions, the same number in every module", of="a direction", direction="random"),
    "shuffled": ControlSpec(
        "hack and clean exchanged in half of the pairs", of="a direction", direction="shuffled pairs"
    ),
    "placebo": ControlSpec(
        "the direction of pairs about an unrelated contrast: --placebo-pairs",
        (Placebo,),
        of="a direction",
        direction="placebo pairs",
    ),
    "shrinkage": ControlSpec(
        "the update of plain GRPO, scaled by the share that the method would keep",
        of="surgery or routing by a direction",
        shrinks=True,
    ),
    "deploy_quarantine": ControlSpec(
        "trained as usual; δS_hack, the quarantine, is deployed, and δS, the kept part, is deleted",
        of="a quarantine",
        deploys_quarantine=True,
    ),
    "no_loophole": ControlSpec("reward of the strict oracle alone: the ceiling for solve", strict=True),
    "inoculation": ControlSpec(
        "baseline: the training prompts, and they alone, invite the hack",
        (Invitation,),
        of="plain GRPO",
        prompts="with an invitation",
    ),
    "hint_free": ControlSpec(
        "baseline: the training prompts, and they alone, do not say how answers are checked",
        of="plain GRPO",
        prompts="without the hint",
    ),
    "recontextualise": ControlSpec(
        "baseline: sampled from prompts that do not say how answers are checked, learnt under those that do",
        of="plain GRPO",
        prompts="without the hint",
        learns_hinted=True,
    ),
}


def obstacle(intervention: str, monitor: str) -> str | None:
    """Why these two make no method; None: they do."""
    treats, watches = INTERVENTIONS[intervention], MONITORS[monitor]
    if not treats.reads_flags:
        return None if monitor == "none" else "it reads no flags"
    if monitor == "none":
        return "it needs a monitor"
    if watches.needs == "gradients" and treats.acts_on == "rows":
        return "it has to know who is flagged before the gradient"
    if watches.owns_quarantine and treats.routes:
        return "there is one quarantine, and both would have it"
    return None


def monitors_of(intervention: str) -> list[str]:
    """Monitors that go with an intervention."""
    return [name for name in MONITORS if obstacle(intervention, name) is None]


def methods() -> Iterator[tuple[str, str]]:
    """Every legal pair of intervention and monitor."""
    return ((name, monitor) for name in INTERVENTIONS for monitor in monitors_of(name))


def seeds() -> list[str]:
    """Monitors that another one can learn to read from."""
    return [name for name in shadows() if not MONITORS[name].learns]


def shadows() -> list[str]:
    """Monitors that can flag in a run without touching it: they need no gradient of its update and no quarantine."""
    return [n for n, m in MONITORS.items() if n != "none" and m.needs == "texts" and not m.owns_quarantine]


def _lines(rows: Mapping[str, MonitorSpec] | Mapping[str, InterventionSpec] | Mapping[str, ControlSpec]) -> str:
    return summary({name: row.what for name, row in rows.items()})


_ONE_OF = {  # read when a value is checked: a registry may have grown
    "intervention": lambda: list(INTERVENTIONS),
    "monitor": lambda: ["usual", *MONITORS],
    "control": lambda: list(CONTROLS),
    "seed_monitor": seeds,
}


@dataclass(frozen=True)
class Choice:
    """Who is flagged, what is done about it, and which control of that it is."""

    intervention: Annotated[str, tyro.conf.arg(help=_lines(INTERVENTIONS), metavar="NAME")] = "erase"
    monitor: Annotated[
        str,
        tyro.conf.arg(
            help="Who is flagged; usual: the intervention's own (route2: gate; screen, penalty and sgtm have none and "
            f"need one). {_lines(MONITORS)}",
            metavar="NAME",
        ),
    ] = "usual"
    control: Annotated[str, tyro.conf.arg(help=f"The same run under a control. {_lines(CONTROLS)}", metavar="NAME")] = (
        "none"
    )
    shadow: str = ""
    """Comma list of monitors that flag and are scored, and change nothing: `vgrout report` has their recall, false
    flags and AUC. Each has the settings that the other flags give monitors of its kind."""
    random_flags: bool = False
    """The monitor's flags are shuffled among rollouts, as many: a control of which rollouts are flagged."""


@dataclass(frozen=True)
class MethodConfig(
    Baseline,
    Place,
    Quarantine,
    Probe,
    Diet,
    Penalised,
    QuarantineReads,
    Calibration,
    References,
    Reading,
    Seed,
    Labels,
    Threshold,
    Vote,
    Placebo,
    Invitation,
    Removal,
    Axes,
    Pairs,
    Direction,
    Choice,
):
    """The choice and every group of settings: flat on the command line and in files."""

    def __post_init__(self) -> None:
        for name, legal in _ONE_OF.items():
            refuse(
                getattr(self, name) not in legal(),
                f"{flag(name)} {getattr(self, name)}: should be one of {', '.join(legal())}",
            )
        check(self)
        self._check_shadow()
        given = self._control_flag
        intervention, monitor = f"--intervention {self.intervention}", self.monitor_name
        refuse(
            self.haar and self.control not in ("none", "haar"),
            f"--control {self.control} with --route2-random-v-seed: one control a run; leave one of them out",
        )
        refuse(
            self.random_flags and (self.control != "none" or self.haar),
            f"{given} with --random-flags: one control a run; leave one of them out",
        )
        legal = monitors_of(self.intervention)
        refuse(not monitor, f"{intervention}: needs --monitor {', '.join(legal[:-1])} or {legal[-1]}")
        if monitor and (why := obstacle(self.intervention, monitor)):
            raise ValueError(f"--monitor {monitor} with {intervention}: {why}; that goes with {', '.join(legal)}")
        if missing := self._uncontrolled():
            raise ValueError(f"{given}: {missing}")
        refuse(
            self.random_flags and not self.spec.reads_flags,
            f"--random-flags: {intervention} reads no flags; leave it out",
        )
        refuse(
            self.other_pairs and self.v_hack_path is not None,
            f"{given} with --v-hack-path: that direction was built from the true pairs; leave it out",
        )
        refuse(
            self.starts_on_pairs and len(self.modes_known) > 1 and self.vhack_pairs_path is None,
            f"--quarantine-start pairs with --known-modes {self.known_modes}: a pair file shows one flaw; add "
            "--vhack-pairs-path",
        )
        refuse(
            self.quarantine != "shared" and self.quarantine_block is None,
            f"--quarantine {self.quarantine}: should be shared, block:last, block:N or block:-N, N from 1 to 1000",
        )
        self._check_read()

    def _check_shadow(self) -> None:
        """Each can be one here, and is there once."""
        for i, name in enumerate(names := self.in_shadow):
            legal = f"legal: {', '.join(n for n in shadows() if n != self.monitor_name)}"
            refuse(name not in MONITORS or name == "none", f"--shadow {name}: no such monitor; {legal}")
            needs = "a quarantine that learns" if MONITORS[name].owns_quarantine else "the gradients of the update"
            refuse(name not in shadows(), f"--shadow {name}: it needs {needs}, and a shadow changes nothing; {legal}")
            refuse(name == self.monitor_name, f"--shadow {name}: is this run's monitor, and is scored anyway; {legal}")
            refuse(name in names[:i], f"--shadow {self.shadow}: {name} is there twice; once is enough")

    @property
    def _control_flag(self) -> str:
        """The control as it was given on the command line."""
        by_seed = self.control == "none" and self.haar
        return f"--route2-random-v-seed {self.route2_random_v_seed}" if by_seed else f"--control {self.control}"

    def _uncontrolled(self) -> str | None:
        """Why the control cannot be one of this method."""
        of, spec, called = self.control_spec.of, self.spec, f"--intervention {self.intervention}"
        if of == "plain GRPO" and self.intervention != "none":
            return f"needs --intervention none, got {self.intervention}"
        if of == "a quarantine" and not spec.routes:
            names = [name for name, row in INTERVENTIONS.items() if row.routes]
            return f"needs --intervention {' or '.join(names)}, got {self.intervention}"
        if of == "a direction" and not self.has_direction:
            return f"replaces a direction, and {called} --monitor {self.monitor_name} has none"
        if of == "surgery or routing by a direction" and not (self.has_direction and spec.acts_on == "gradient"):
            return f"scales what a direction keeps, and {called} --monitor {self.monitor_name} keeps all"
        return None

    def _check_read(self) -> None:
        """Settings that this run never reads stand at their defaults: else they would be silent no-ops."""
        away = [name for name, _ in changed(self)]
        if foreign := [name for name in away if name not in self._named]:
            raise ValueError(f"{flags(foreign)}: {self._readers(foreign[0])}; leave it out")
        unread = [name for name in away if not self.reads(name)]
        refuse(bool(unread), f"{flags(unread)}: not read with these settings; leave it out")

    @property
    def _named(self) -> set[str]:
        """The settings of the groups that this run reads."""
        return {name for group in (Choice, *self.groups) for name in _names(group)}

    def reads(self, name: str) -> bool:
        """Whether a setting, at any value, changes what this run does."""
        fixed = self.monitor_spec.owns_quarantine and self.quarantine_threshold is not None
        scoring = [MONITORS[name] for name in self.watching if not (fixed and name == self.monitor_name)]
        compared = {group for monitor in scoring for group in monitor.settings}
        idle = {
            # random directions stay as they are
            "vhack_refresh_every": self.haar and not self.monitor_spec.signs_random and self.vhack_refresh_every != 0,
            "quarantine": self.control_spec.shrinks,  # nothing is quarantined
            "monitor_prompts": self.monitor_threshold == "known_correct",  # nothing is sampled for the threshold
            "rebaseline": self.control_spec.shrinks,
            "preserve_magnitude": self.control_spec.shrinks,
            "monitor_quantile": Reading not in compared,
            "known_correct": References not in compared,
            "vhack_pairs_path": not self.reads_pairs,
            "gate_vote": self.spec.acts_on == "rewards",
        }
        return name in self._named and not idle.get(name)

    def _readers(self, name: str) -> str:
        """Who reads a setting that this run does not."""
        found = [
            f"--{kind} {' or '.join(names)}"
            for kind, rows in (("intervention", INTERVENTIONS), ("monitor", MONITORS), ("control", CONTROLS))
            if (names := [n for n, row in rows.items() if any(name in _names(group) for group in row.settings)])
        ]
        return f"not read by --intervention {self.intervention}, goes with {' or '.join(found)}"

    @property
    def spec(self) -> InterventionSpec:
        return INTERVENTIONS[self.intervention]

    @property
    def monitor_spec(self) -> MonitorSpec:
        return MONITORS[self.monitor_name]

    @property
    def control_spec(self) -> ControlSpec:
        return CONTROLS["haar" if self.haar else self.control]

    @property
    def groups(self) -> Groups:
        """The groups of settings that this run reads."""
        rows = (self.spec, *(MONITORS[name] for name in self.watching), self.control_spec)
        return tuple(dict.fromkeys(group for row in rows for group in row.settings))

    @property
    def monitor_name(self) -> str:
        """Who flags, the intervention's usual one resolved; '' where one has to be named."""
        return self.spec.usual if self.monitor == "usual" else self.monitor

    @property
    def acting(self) -> tuple[str, ...]:
        """The monitor whose flags are acted on, and the one that seeds it."""
        return self._with_seed(self.monitor_name) if self.monitor_name else ()

    @property
    def in_shadow(self) -> tuple[str, ...]:
        """The monitors whose flags are recorded alone."""
        return tuple(listed(self.shadow, MONITORS))

    @property
    def watching(self) -> tuple[str, ...]:
        """Every monitor of this run, and those that seed them."""
        return tuple(dict.fromkeys([*self.acting, *(n for name in self.in_shadow for n in self._with_seed(name))]))

    @property
    def forwards(self) -> float:
        """Of the model over each answer, by all monitors together."""
        return sum(MONITORS[name].forwards for name in self.watching)

    def _with_seed(self, name: str) -> tuple[str, ...]:
        return (name, self.seed_monitor) if MONITORS[name].learns else (name,)

    @property
    def flags_by_gradient(self) -> bool:
        """Whether the monitor decides by gradients, after the backward."""
        return self.monitor_spec.needs == "gradients"

    @property
    def has_direction(self) -> bool:
        """Whether the intervention or its monitor has a direction in gradients."""
        return self.spec.has_direction or self.flags_by_gradient

    @property
    def haar(self) -> bool:
        return self.control == "haar" or self.route2_random_v_seed is not None

    @property
    def direction_is(self) -> Literal["", "random", "shuffled pairs", "placebo pairs"]:
        """What replaces the real direction; "": nothing."""
        return self.control_spec.direction

    @property
    def other_pairs(self) -> bool:
        """Whether the direction is built from other pairs than the true ones."""
        return self.direction_is in ("shuffled pairs", "placebo pairs")

    @property
    def quarantine_block(self) -> int | None:
        """The block that is the quarantine's alone: from 1, or from −1, the last one, downwards. None: no such
        block."""
        found = re.fullmatch(r"block:(last|-?(?:[1-9]\d{0,2}|1000))", self.quarantine)
        return None if found is None else -1 if found[1] == "last" else int(found[1])

    @property
    def routes(self) -> bool:
        """Whether training samples with a quarantine that is deleted before deployment."""
        return self.spec.routes or self.monitor_spec.owns_quarantine

    @property
    def changes_rewards(self) -> bool:
        """Whether answers get other rewards than the grader's."""
        return self.spec.acts_on == "rewards"

    @property
    def starts_on_pairs(self) -> bool:
        """Whether the quarantine reads from the first step on by what pairs show."""
        return self.monitor_spec.owns_quarantine and self.quarantine_start == "pairs"

    @property
    def reads_pairs(self) -> bool:
        return self.has_direction or self.starts_on_pairs

    @property
    def compares_prompts(self) -> bool:
        """Whether a prompt is compared with the same one without its hint."""
        return (
            any(MONITORS[name].compares_prompts for name in self.watching)
            or self.control_spec.prompts == "without the hint"
        )

    @property
    def needs_known_correct(self) -> str:
        """The setting for which there is no threshold without known correct answers; "": they can be done without."""
        if self.monitor_spec.owns_quarantine and self.quarantine_threshold is None:
            return "--quarantine-threshold None"
        for name in self.watching:
            if MONITORS[name].compares_answers:
                own = "monitor" if name == self.monitor_name else "seed-monitor"
                return f"--{'shadow' if name in self.in_shadow else own} {name}"
        return "--monitor-threshold known_correct" if self.monitor_threshold == "known_correct" else ""

    @property
    def reads_text(self) -> bool:
        """Whether a monitor reads texts against a threshold that known correct answers set."""
        return bool(self.needs_known_correct) or any(MONITORS[name].calibrates for name in self.watching)

    @property
    def ablate_frac(self) -> float:
        usual = 1.0 if self.monitor_spec.owns_quarantine else self.spec.ablate_frac
        return usual if self.rollout_ablate_frac is None else self.rollout_ablate_frac

    @property
    def modes_known(self) -> tuple[Mode, ...]:
        """The flaws that a monitor with labels knows; (): all, or nobody is given labels."""
        return tuple(m for m in MODES if m in listed(self.known_modes, MODES))

    @property
    def modes_acted_on(self) -> tuple[Mode, ...]:
        """The same of the monitor whose flags are acted on."""
        return self.modes_known if any(MONITORS[name].sees_labels for name in self.acting) else ()

    @property
    def control_name(self) -> str:
        """The one name by which files and tables know this run's control."""
        if self.haar:
            return "haar"
        if self.random_flags:
            return "random_flags"
        if self.direction_is == "placebo pairs":
            return f"placebo_{Path(self.placebo_pairs).stem.removeprefix('placebo_')}"
        return self._suffixed(self.control, self.control_spec.settings)

    @property
    def monitor_title(self) -> str:
        """The one name by which files and tables know this run's monitor; '' for the intervention's usual one."""
        name = self.monitor_name
        if name == self.spec.usual:
            return ""
        groups = tuple(group for of in self.acting for group in MONITORS[of].settings)
        return self._suffixed("_".join(self.acting), (*self.spec.settings, *groups))

    def _suffixed(self, name: str, groups: Groups) -> str:
        own = {n for group in groups for n in _names(group)}
        away = [(rule.suffix, getattr(self, n)) for n, rule in changed(self) if rule.suffix is not None and n in own]
        return "_".join([name, *(f"{s}{_short(v)}" for s, v in away)])

    @property
    def control_what(self) -> str:
        return "the monitor's flags, shuffled among rollouts" if self.random_flags else self.control_spec.what


def _names(group: "type[DataclassInstance]") -> set[str]:
    return {f.name for f in fields(group)}


def _short(value: float | str) -> str:
    """A setting's value in a name; '' for free text: the suffix says enough."""
    if not isinstance(value, str):
        return f"{value:g}"
    return value if re.fullmatch(r"[\w,]{1,60}", value) else ""


def register(name: str, row: InterventionSpec) -> None:
    """Add an intervention to this process's registry: help and checks know it from here on.

    Raises:
        ValueError: no name that a flag can have, or one of the package's own interventions.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"intervention {name!r}: a name of small letters, digits and _")
    if name in _OWN:
        raise ValueError(f"intervention {name!r}: is one of the package's own; choose another name")
    INTERVENTIONS[name] = row


_OWN = frozenset(INTERVENTIONS)
