"""Study files (TOML): arms × overrides × seeds, each run's flags checked by the trainer's parser (docs/studies.md)."""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from vgrout.config.checks import flag, rule_of
from vgrout.config.method import MethodConfig
from vgrout.config.presets import flag_names, resolve
from vgrout.config.run import Config, identity
from vgrout.errors import Refused
from vgrout.files import read_text

KEYS = ("name", "preset", "seeds", "common", "arms", "overrides")
OWN = ("seed", "resume", "dry-run", "output-dir")  # flags that the sweep sets
MOST_RUNS = 2000  # of a study; a few lists multiply to millions
FlagTable = dict[str, Any]  # flag without leading dashes → value


def _tables(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(t, dict) and [] not in t.values() for t in value)
    )


# key → what is sound, and what it should be
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        lambda v: isinstance(v, str) and re.fullmatch(r"\w[\w.=+-]{0,79}", v, re.ASCII) is not None,
        "of letters, digits and _ . = + -, 80 at most",
    ),
    "seeds": (
        lambda v: (
            isinstance(v, list) and all(type(s) is int for s in v) and 0 < len({*v}) == len(v)
        ),
        "a list of whole numbers, such as [41, 42], none twice",
    ),
    "common": (lambda v: _tables([v]), "a table, such as { steps = 8 }"),
    "arms": (_tables, "one or more tables [[arms]], without an empty list"),
    "overrides": (_tables, "one or more tables [[overrides]], without an empty list"),
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

    @property
    def identity(self) -> str:
        return identity(self.cfg)

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "arm": self.arm, "seed": self.seed, "flags": [*self.flags]}


@dataclass(frozen=True)
class StudyFile:
    """A study: every run, checked, ordered by seed so that the first finished runs can be compared."""

    path: Path
    name: str
    sha256: str
    hypotheses: tuple[str, ...]  # its `# H:` lines
    runs: tuple[PlannedRun, ...]


def load_study_file(path: Path, code: Collection[str] = ()) -> StudyFile:
    """Read and check a study file. code: flags of the command line that name functions to import, such as
    `--reward=module:function`; what the file alone names is not imported.

    Raises:
        Refused: one line with file and table, where a run's flags are refused or two runs are the same.
    """
    text = read_text(path)
    try:
        data = tomllib.loads(text)
        str(data)  # a hexadecimal number of thousands of digits can be read, and not be written
    except (ValueError, RecursionError) as e:
        raise Refused(f"{path}: {e}") from None
    try:
        return _study(path, text, data, code)
    except Refused as e:
        raise Refused(f"{path}: {e}") from e.__cause__


def _study(path: Path, text: str, data: dict[str, Any], code: Collection[str]) -> StudyFile:
    if unknown := sorted(data.keys() - {*KEYS}):
        key, value = unknown[0], data[unknown[0]]
        instead = f"known: {', '.join(KEYS)}; flags go into [common] or [[arms]]"
        if flag(key) in flag_names():
            instead = f"a flag of every run goes into common = {{ {key} = {json.dumps(value, default=str)} }}"
        raise Refused(f"unknown key {key!r}; {instead}")
    data = {"name": path.stem, "seeds": None, "common": {}, "arms": None, "overrides": [{}]} | data
    for key, (sound, should) in KINDS.items():
        if not sound(data[key]):
            raise Refused(f"{key} {str(data[key])[:60]}: should be {should}")
    name, seeds, common, arms, overrides = (data[key] for key in KINDS)
    n = sum(map(_combinations, arms)) * sum(map(_combinations, overrides)) * len(seeds)
    if n > MOST_RUNS:
        raise Refused(
            f"{n:.3g} runs, which is more than {MOST_RUNS}; shorten its lists, or make it several studies"
        )
    seen: dict[str, str] = {}
    settings: dict[str, tuple[Config, tuple[str, ...]]] = {}  # by the arm's name
    for (where, arm, given), (where_override, extra, suffix) in product(
        _choices("arms", arms), [*_choices("overrides", overrides)]
    ):
        both = f"{where} × {where_override}" if extra else where
        if twice := sorted(arm.keys() & extra.keys()):
            raise Refused(f"{both}: {twice[0]!r} is set by both; leave one of them out")
        try:
            cfg, flags = _resolved(str(data.get("preset")), _flags(common) | arm | extra)
        except Refused as e:
            raise Refused(f"{both}: {e}") from e.__cause__
        cfg.refuse_code(code, both)
        label = " · ".join(filter(None, (given or _label(cfg, arm), suffix)))
        if not label.isprintable():  # `--commands` prints it into a shell's comment
            raise Refused(f"runs called {label!r}: should be printable, in one line")
        for known in (identity(cfg), label):
            if first := seen.get(known):
                what = f"called {label!r}" if known == label else "with these runs"
                raise Refused(
                    f"{both}: a second arm {what}, after {first}; leave it out, or name it otherwise"
                )
            seen[known] = both
        settings[label] = cfg, flags
    runs = tuple(
        PlannedRun(label, replace(cfg, run=replace(cfg.run, seed=seed)), (*flags, f"--seed={seed}"))
        for seed in seeds
        for label, (cfg, flags) in settings.items()
    )
    claims = tuple(line[4:].strip() for line in text.splitlines() if line.startswith("# H:"))
    return StudyFile(path, name, hashlib.sha256(text.encode()).hexdigest(), claims, runs)


def _resolved(preset: str, flags: FlagTable) -> tuple[Config, tuple[str, ...]]:
    """A run's settings, and its flags as the command line has them."""
    if own := [key for key in flags if key in OWN]:
        raise Refused(
            f"{own[0]!r} is the sweep's own; give seeds in 'seeds', and runs are resumed by themselves"
        )
    argv = [preset, *_argv(flags)]
    cfg = resolve(argv, own_code=False)
    if cfg.guard_mode == "halt" and "guard" not in flags:
        argv.append("--guard=log")  # runs of a study are compared, so all have the same length
        cfg = resolve(argv, own_code=False)
    return cfg, tuple(argv)


def _combinations(table: FlagTable) -> float:
    """How many settings a table makes; beyond all counting, infinitely many."""
    return math.prod((len(value) for value in table.values() if isinstance(value, list)), start=1.0)


def _choices(key: str, tables: list[dict[str, Any]]) -> Iterator[tuple[str, FlagTable, str]]:
    """(where, flags, given name) of each table, for every combination of values given as lists."""
    for i, table in enumerate(tables, 1):
        name = str(table.get("name", ""))
        where = f"[[{key}]] {i}" + (f" ({name})" if name else "")
        flags = _flags({k: v for k, v in table.items() if k != "name"})
        several = {k: v for k, v in flags.items() if isinstance(v, list)}
        for values in product(*several.values()):
            chosen = dict(zip(several, values, strict=True))
            one = flags | chosen
            if key == "overrides":
                yield where, one, name or _shown(one)
            else:
                yield where, one, " · ".join(filter(None, (name, _shown(chosen)))) if name else ""


def _flags(table: dict[str, Any]) -> FlagTable:
    return {key.removeprefix("--").replace("_", "-"): value for key, value in table.items()}


def _argv(flags: Mapping[str, Any]) -> Iterator[str]:
    for key, value in flags.items():
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{key}"
        else:
            yield f"--{key}={value}"


def _label(cfg: Config, flags: FlagTable) -> str:
    """The name of an arm that the study does not name: intervention, monitor, control, and its other flags."""
    # in monitor's or control's name
    in_names = (f.name for f in fields(MethodConfig) if rule_of(f).suffix is not None)
    named = {
        "intervention",
        "monitor",
        "control",
        "random-flags",
        *(name.replace("_", "-") for name in in_names),
    }
    rest = {k: v for k, v in flags.items() if k not in named}
    monitor = f" ({cfg.method.monitor_title})" if cfg.method.monitor_title else ""
    control = "" if cfg.method.control_name == "none" else cfg.method.control_name
    return " · ".join(filter(None, (cfg.method.intervention + monitor, control, _shown(rest))))


def _shown(flags: FlagTable) -> str:
    return " · ".join(
        f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in flags.items()
    )
