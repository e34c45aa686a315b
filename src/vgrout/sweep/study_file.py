"""Study files (TOML): arms × overrides × seeds, explained in docs/studies.md.

Each run's flags are checked by the trainer's own parser.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from vgrout.config.checks import NotRead, flag, rule_of
from vgrout.config.method import MethodConfig
from vgrout.config.presets import flag_names, resolve
from vgrout.config.run import Config
from vgrout.config.stored import settings_sha256
from vgrout.ground.errors import Refused
from vgrout.ground.files import read_text

KEYS = ("name", "preset", "seeds", "common", "arms", "overrides")
OWN = ("seed", "resume", "dry-run", "output-dir")  # flags that the sweep sets
MOST_RUNS = 2000  # of a study; a few lists multiply to millions
FlagTable = dict[str, object]  # flag without leading dashes → value
Settings = tuple[Config, tuple[str, ...]]  # a run's settings, and the flags that give them


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"\w[\w.=+-]{0,79}", value, re.ASCII))


def _are_seeds(value: object) -> bool:
    if not isinstance(value, list) or not all(type(seed) is int for seed in value):
        return False
    return 0 < len({*value}) == len(value)


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and [] not in value.values()


def _are_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))


# key → its check, and what it should be
KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (_is_name, "of letters, digits and _ . = + -, 80 at most"),
    "seeds": (_are_seeds, "a list of whole numbers, such as [41, 42], none twice"),
    "common": (_is_table, "a table, such as { steps = 8 }"),
    "arms": (_are_tables, "one or more tables [[arms]], without an empty list"),
    "overrides": (_are_tables, "one or more tables [[overrides]], without an empty list"),
}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    arm: str  # the study's name for its settings, the same for every seed
    cfg: Config
    flags: tuple[str, ...]  # after `vgrout train`

    @property
    def seed(self) -> int:
        return self.cfg.run.seed

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"

    @cached_property
    def identity(self) -> str:
        return settings_sha256(self.cfg)

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "arm": self.arm, "seed": self.seed, "flags": [*self.flags]}


@dataclass(frozen=True)
class StudyFile:
    """A study with every run, checked.

    Runs are ordered by seed, so that the first to finish can be compared.
    """

    path: Path
    name: str
    sha256: str
    hypotheses: tuple[str, ...]  # its `# H:` lines
    runs: tuple[PlannedRun, ...]
    left_out: tuple[str, ...] = ()  # flags that some arms do not read, a line each


@dataclass(frozen=True)
class Choice:
    """A table of the study file with one value for each of its lists."""

    where: str  # the table, for messages
    flags: FlagTable
    name: str  # "": the study gives none

    def without(self, dropped: Collection[str]) -> str:
        """The name, of an arm that does not read these of its flags."""
        kept = {key: value for key, value in self.flags.items() if key not in dropped}
        if not kept or self.name != _shown(self.flags):
            return self.name if kept else ""
        return _shown(kept)


@dataclass
class Unread:
    """Flags that the study gives to every arm, and that some of them do not read."""

    given: dict[str, int]  # flag → in how many arms it could be read
    arms: dict[str, list[str]]  # flag → the arms that do not read it

    def count(self, flags: Collection[str]) -> None:
        """Another arm is given these flags."""
        for name in flags:
            self.given[name] = self.given.get(name, 0) + 1

    def lines(self) -> list[str]:
        """What is left out where.

        Raises:
            Refused: a flag that no arm reads.
        """
        lines: list[str] = []
        for name, arms in self.arms.items():
            if len(arms) == self.given[name]:
                raise Refused(f"{flag(name)}: not read by any arm; leave it out")
            which = ", ".join(dict.fromkeys(arms))
            lines.append(f"{flag(name)}: not read by {which}, and left out there")
        return lines


def load_study_file(path: Path, trusted: bool = False) -> StudyFile:
    """Read and check a study file.

    trusted: whether functions and classes that it names are imported.

    Raises:
        Refused: one line with file and table, where a run's flags are refused or two runs are the
            same.
    """
    text = read_text(path)
    try:
        data = tomllib.loads(text)
        str(data)  # a hexadecimal number of thousands of digits can be read, and not be written
    except (ValueError, RecursionError) as e:
        raise Refused(f"{path}: {e}") from None
    try:
        return _study(path, text, data, trusted)
    except Refused as e:
        raise Refused(f"{path}: {e}") from e.__cause__


def _study(path: Path, text: str, data: dict[str, Any], trusted: bool) -> StudyFile:
    _require_known_keys(data)
    defaults = {"name": path.stem, "seeds": None, "common": {}, "arms": None, "overrides": [{}]}
    study = dict(data)
    for key, default in defaults.items():
        study.setdefault(key, default)
    for key, (is_sound, should) in KINDS.items():
        if not is_sound(study[key]):
            raise Refused(f"{key} {str(study[key])[:60]}: should be {should}")
    _require_few_runs(study)
    arms, left_out = _arms(study, trusted)
    runs: list[PlannedRun] = []
    for seed in study["seeds"]:
        for label, (cfg, flags) in arms.items():
            seeded = replace(cfg, run=replace(cfg.run, seed=seed))
            runs.append(PlannedRun(label, seeded, (*flags, f"--seed={seed}")))
    hypotheses = [line[4:].strip() for line in text.splitlines() if line.startswith("# H:")]
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return StudyFile(path, study["name"], sha256, tuple(hypotheses), tuple(runs), tuple(left_out))


def _require_known_keys(data: Mapping[str, object]) -> None:
    unknown = sorted(data.keys() - {*KEYS})
    if not unknown:
        return
    key, value = unknown[0], data[unknown[0]]
    advice = f"known: {', '.join(KEYS)}; flags go into [common] or [[arms]]"
    if flag(key) in flag_names():
        as_flag = f"{key} = {json.dumps(value, default=str)}"
        advice = f"a flag of every run goes into common = {{ {as_flag} }}"
    raise Refused(f"unknown key {key!r}; {advice}")


def _require_few_runs(study: Mapping[str, Any]) -> None:
    n_arms = sum(map(_combinations, study["arms"]))
    n_overrides = sum(map(_combinations, study["overrides"]))
    n = n_arms * n_overrides * len(study["seeds"])
    if n > MOST_RUNS:
        raise Refused(
            f"{n:.3g} runs, which is more than {MOST_RUNS}; shorten its lists, "
            "or make it several studies"
        )


def _combinations(table: FlagTable) -> float:
    """How many settings a table makes; beyond all counting, infinitely many."""
    n = 1.0
    for value in table.values():
        if isinstance(value, list):
            n *= len(value)
    return n


def _arms(study: Mapping[str, Any], trusted: bool) -> tuple[dict[str, Settings], list[str]]:
    """The arms crossed with the overrides, by their labels; and which flags of all are left out of some.

    Raises:
        Refused: one line with the tables, where flags are refused or two arms are the same.
    """
    arms: dict[str, Settings] = {}
    unread = Unread({}, {})
    seen: dict[str, str] = {}  # identity or label → the tables that have it
    common = _flags(study["common"])
    choices = product(_choices("arms", study["arms"]), _choices("overrides", study["overrides"]))
    for arm, override in choices:
        where = f"{arm.where} × {override.where}" if override.flags else arm.where
        twice = sorted(arm.flags.keys() & override.flags.keys())
        if twice:
            raise Refused(f"{where}: {twice[0]!r} is set by both; leave one of them out")
        of_all = (common.keys() | override.flags.keys()) - arm.flags.keys()
        try:
            given = common | arm.flags | override.flags
            cfg, flags, dropped = _resolved(str(study.get("preset")), given, of_all, trusted)
        except Refused as e:
            raise Refused(f"{where}: {e}") from None
        of_override = override.without(dropped)
        label = _joined(arm.name or _label(cfg, arm.flags), of_override)
        unread.count(of_all)
        for name in dropped:
            unread.arms.setdefault(name, []).append(label)
        if dropped & override.flags.keys() and arms.get(label, (None, ()))[1] == flags:
            continue  # the same arm under another value of what it does not read
        if not label.isprintable():  # `--commands` prints it into a shell's comment
            raise Refused(f"runs called {label!r}: should be printable, in one line")
        for known, what in (
            (settings_sha256(cfg), "with these runs"),
            (label, f"called {label!r}"),
        ):
            if known in seen:
                raise Refused(
                    f"{where}: a second arm {what}, after {seen[known]}; "
                    "leave it out, or name it otherwise"
                )
            seen[known] = where
        arms[label] = cfg, flags
    return arms, unread.lines()


def _resolved(
    preset: str, flags: FlagTable, of_all: Collection[str], trusted: bool
) -> tuple[Config, tuple[str, ...], set[str]]:
    """A run's settings, its flags as the command line has them, and the flags that it does not read.

    of_all: flags that were given to every arm. Those that this one does not read are left out.
    """
    dropped: set[str] = set()
    while True:
        kept = {name: value for name, value in flags.items() if name not in dropped}
        try:
            return *_settings(preset, kept, trusted), dropped
        except NotRead as e:
            unread = {name.replace("_", "-") for name in e.names}
            if not unread <= {*of_all} - dropped:
                raise
            dropped |= unread


def _settings(preset: str, flags: FlagTable, trusted: bool) -> Settings:
    """A run's settings, and its flags as the command line has them."""
    own = [key for key in flags if key in OWN]
    if own:
        raise Refused(
            f"{own[0]!r} is the sweep's own; give seeds in 'seeds', "
            "and runs are resumed by themselves"
        )
    argv = [preset, *_argv(flags)]
    cfg = resolve(argv, trusted=trusted)
    if cfg.guard_mode == "halt" and "guard" not in flags:
        argv.append("--guard=log")  # runs of a study are compared, so all have the same length
        cfg = resolve(argv, trusted=trusted)
    return cfg, tuple(argv)


def _choices(key: str, tables: list[dict[str, object]]) -> Iterator[Choice]:
    """Every combination of the values that are given as lists, table by table."""
    for i, table in enumerate(tables, 1):
        name = str(table.get("name", ""))
        where = f"[[{key}]] {i}" + (f" ({name})" if name else "")
        flags = _flags({k: v for k, v in table.items() if k != "name"})
        lists = {k: v for k, v in flags.items() if isinstance(v, list)}
        for values in product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            if key == "overrides":
                yield Choice(where, flags | chosen, name or _shown(flags | chosen))
            else:
                yield Choice(where, flags | chosen, _joined(name, _shown(chosen)) if name else "")


def _flags(table: dict[str, object]) -> FlagTable:
    return {key.removeprefix("--").replace("_", "-"): value for key, value in table.items()}


def _argv(flags: Mapping[str, object]) -> Iterator[str]:
    for key, value in flags.items():
        if isinstance(value, bool):
            yield f"--{key}" if value else f"--no-{key}"
        else:
            yield f"--{key}={value}"


def _label(cfg: Config, flags: FlagTable) -> str:
    """The name of an arm without one: intervention, monitor, control, and its other flags."""
    method = cfg.method
    monitor = f" ({method.monitor_title})" if method.monitor_title else ""
    control = "" if method.control_name == "none" else method.control_name
    named = {"intervention", "monitor", "control", "random-flags"}
    for setting in fields(MethodConfig):
        if rule_of(setting).suffix is not None:  # in the monitor's or the control's name
            named.add(setting.name.replace("_", "-"))
    rest = {key: value for key, value in flags.items() if key not in named}
    return _joined(method.intervention + monitor, control, _shown(rest))


def _shown(flags: FlagTable) -> str:
    shown: list[str] = []
    for key, value in flags.items():
        text = str(value).lower() if isinstance(value, bool) else value
        shown.append(f"{key}={text}")
    return " · ".join(shown)


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
