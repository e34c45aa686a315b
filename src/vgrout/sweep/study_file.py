"""Study files (TOML): arms × overrides × seeds, explained in docs/studies.md.

Each run's flags are checked by the trainer's own parser.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from vgrout.config.checks import NotRead, flag, rule_of
from vgrout.config.cli import TRAIN, argv_of, same
from vgrout.config.method import MethodConfig
from vgrout.config.presets import flag_names, resolve
from vgrout.config.run import Config, settings_sha256
from vgrout.ground.io import Refused, read_text, refuse, text_sha256

KEYS = ("name", "preset", "seeds", "common", "arms", "overrides")
OWN = ("seed", "resume", "dry-run", "output-dir")  # flags that the sweep sets
FlagTable = dict[str, object]  # flag without leading dashes → value
Settings = tuple[Config, tuple[str, ...]]  # a run's settings, and the flags that give them


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
    except ValueError as e:
        raise Refused(f"{path}: {e}") from None
    try:
        return _study(path, text, data, trusted)
    except Refused as e:
        raise Refused(f"{path}: {e}") from e.__cause__


def _study(path: Path, text: str, data: dict[str, Any], trusted: bool) -> StudyFile:
    if unknown := sorted(data.keys() - {*KEYS}):
        key, value = unknown[0], data[unknown[0]]
        advice = f"known: {', '.join(KEYS)}; flags go into [common] or [[arms]]"
        if flag(key) in flag_names():
            as_flag = f"{key} = {json.dumps(value, default=str)}"
            advice = f"a flag of every run goes into common = {{ {as_flag} }}"
        raise Refused(f"unknown key {key!r}; {advice}")
    study: dict[str, Any] = {"name": path.stem, "seeds": None, "arms": None}
    study |= {"common": {}, "overrides": [{}]} | data
    _require_kinds(study)
    arms, left_out = _arms(study, trusted)
    runs: list[PlannedRun] = []
    for seed in study["seeds"]:
        for label, (cfg, flags) in arms.items():
            runs.append(PlannedRun(label, cfg.seeded(seed), (*flags, f"--seed={seed}")))
    hypotheses = [line[4:].strip() for line in text.splitlines() if line.startswith("# H:")]
    sha256 = text_sha256(text)
    return StudyFile(path, study["name"], sha256, tuple(hypotheses), tuple(runs), tuple(left_out))


def _require_kinds(study: Mapping[str, Any]) -> None:
    name, seeds, common = study["name"], study["seeds"], study["common"]
    named = isinstance(name, str) and re.fullmatch(r"\w[\w.=+-]{0,79}", name, re.ASCII)
    refuse(not named, f"name {name}: should be of letters, digits and _ . = + -, 80 at most")
    whole = isinstance(seeds, list) and all(type(seed) is int for seed in seeds)
    refuse(
        not whole or not 0 < len({*seeds}) == len(seeds),
        f"seeds {seeds}: should be a list of whole numbers, such as [41, 42], none twice",
    )
    refuse(not _is_table(common), f"common {common}: should be a table, such as {{ steps = 8 }}")
    for key in ("arms", "overrides"):
        tables = study[key]
        sound = isinstance(tables, list) and len(tables) > 0 and all(map(_is_table, tables))
        refuse(
            not sound,
            f"{key} {tables}: should be one or more tables [[{key}]], without an empty list",
        )


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and [] not in value.values()


def _arms(study: Mapping[str, Any], trusted: bool) -> tuple[dict[str, Settings], list[str]]:
    """The arms crossed with the overrides, by their labels; and which flags of all are left out of some.

    Raises:
        Refused: one line with the tables, where flags are refused or two arms are the same.
    """
    arms: dict[str, Settings] = {}
    given = Counter[str]()  # flags of every arm, and to how many they were given
    not_read: dict[str, list[str]] = {}  # those that some arms do not read → these arms
    seen: dict[str, str] = {}  # identity or label → the tables that have it
    common = _flags(study["common"], "common")
    for arm in _choices("arms", study["arms"]):
        for override in _choices("overrides", study["overrides"]):
            where = f"{arm.where} × {override.where}" if override.flags else arm.where
            for beside, table in ((arm.where, arm.flags), ("common", common)):
                twice = sorted(table.keys() & override.flags.keys())
                refuse(
                    bool(twice),
                    f"{beside} × {override.where}: {', '.join(twice)} is set by both; "
                    "leave it out in one of them",
                )
            of_all = common.keys() - arm.flags.keys()
            try:
                flags_given = common | arm.flags | override.flags
                preset = str(study.get("preset"))
                cfg, flags, dropped = resolved_flags(preset, flags_given, of_all, trusted)
            except Refused as e:
                raise Refused(f"{where}: {e}") from None
            label = _joined(arm.name or _label(cfg, arm.flags), override.name)
            given.update(of_all)
            for name in dropped:
                not_read.setdefault(name, []).append(label)
            # `--commands` prints it into a shell's comment
            refuse(
                not label.isprintable(), f"runs called {label!r}: should be printable, in one line"
            )
            for known, what in (
                (settings_sha256(cfg), "with these runs"),
                (label, f"called {label!r}"),
            ):
                refuse(
                    known in seen,
                    f"{where}: a second arm {what}, after {seen.get(known)}; "
                    "leave it out, or name it otherwise",
                )
                seen[known] = where
            arms[label] = cfg, flags
    return arms, _left_out(given, not_read)


def _left_out(given: Mapping[str, int], not_read: Mapping[str, list[str]]) -> list[str]:
    """Lines that say which flags are left out where. Raises Refused where no arm reads one."""
    lines: list[str] = []
    for name, arms in not_read.items():
        refuse(len(arms) == given[name], f"{flag(name)}: not read by any arm; leave it out")
        which = ", ".join(dict.fromkeys(arms))
        lines.append(f"{flag(name)}: not read by {which}, and left out there")
    return lines


def resolved_flags(
    preset: str, flags: FlagTable, of_all: Collection[str], trusted: bool
) -> tuple[Config, tuple[str, ...], set[str]]:
    """A run's settings, its flags as the command line has them, and the flags that it does not read.

    of_all: flags that were given to every arm. Those that this one does not read are left out.

    Raises:
        Refused: one line, for a flag that is wrong, or that is not read and not of all.
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
    refuse(
        bool(own),
        f"{', '.join(own)}: the sweep's own; give seeds in 'seeds', and runs are resumed by themselves",
    )
    argv = [preset, *argv_of(flags)]
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
        flags = _flags({k: v for k, v in table.items() if k != "name"}, where)
        lists = {k: v for k, v in flags.items() if isinstance(v, list)}
        for values in product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            if key == "overrides":
                yield Choice(where, flags | chosen, name or _shown(flags | chosen))
            else:
                yield Choice(where, flags | chosen, _joined(name, _shown(chosen)) if name else "")


def _flags(table: FlagTable, where: str) -> FlagTable:
    """The table's flags, each in one spelling. Raises Refused where it gives one twice."""
    flags: FlagTable = {}
    for key, value in table.items():
        name = key.removeprefix("--").replace("_", "-")
        if name.startswith("no-") and isinstance(value, bool):
            name, value = name.removeprefix("no-"), not value
        if same(ours := TRAIN.get(f"--{name}", "")):  # another trainer's name for it
            name = ours.removeprefix("--")
        refuse(name in flags, f"{where}: {name} is set twice; leave it out once")
        flags[name] = value
    return flags


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
