"""Study files (TOML): methods × overrides × seeds, each run's flags checked by the trainer's parser.

# H: what the study should show or refute
name = "controls"
preset = "mini"
seeds = [41, 42, 43]
common = { final-n-prompts = 96 }    # any flag of `python -m vgrout.train`, for every run

[[arms]]
intervention = "route2"
control = ["none", "haar"]           # a list: one method for each value

[[overrides]]                        # each is combined with every method
lr = 1e-2
"""

import hashlib
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from vgrout.config.checks import refuse_setting, rule_of
from vgrout.config.method import MethodConfig
from vgrout.config.presets import PRESETS, flag_names, resolve
from vgrout.config.run import Config, identity
from vgrout.files import read_text

KEYS = ("name", "preset", "seeds", "common", "arms", "overrides")
OWN = ("seed", "resume", "resume-force", "dry-run")  # flags that the sweep sets
Flags = dict[str, Any]  # flag without leading dashes → value


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    method: str  # the study's name for its settings, the same for every seed
    cfg: Config
    flags: tuple[str, ...]  # after `python -m vgrout.train`

    @property
    def seed(self) -> int:
        return self.cfg.run.seed

    @property
    def name(self) -> str:
        return f"{self.method} seed {self.seed}"

    @property
    def identity(self) -> str:
        return identity(self.cfg)


@dataclass(frozen=True)
class StudyFile:
    """A study: every run, checked, ordered by seed so that the first finished runs can be compared."""

    path: Path
    name: str
    sha256: str
    hypotheses: tuple[str, ...]  # its `# H:` lines
    cells: tuple[Cell, ...]


MOST_RUNS = 2000  # of a study; a few lists multiply to millions


def load_study_file(path: Path, code: Collection[str] = ()) -> StudyFile:
    """Read and check a study file. code: flags of the command line that name functions to import, such as
    `--reward=module:function`; what the file alone names is not imported.

    Raises:
        ValueError: one line with file and table, where a run's flags are refused or two runs are the same.
    """
    try:
        data = tomllib.loads(text := read_text(path))
    except OSError as e:
        raise ValueError(f"{path}: cannot be read ({e}); give a study file (TOML)") from None
    except (ValueError, RecursionError) as e:  # a number of thousands of digits too
        raise ValueError(f"{path}: not TOML: {e}") from None
    try:
        return _study(path, text, data, code)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def _study(path: Path, text: str, data: dict[str, Any], code: Collection[str]) -> StudyFile:
    if unknown := sorted(data.keys() - {*KEYS}):
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
    name, preset, seeds = data.get("name", path.stem), data.get("preset"), data.get("seeds")
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.=+-]{0,79}", name, re.ASCII):
        raise ValueError(f"name {name!r}: letters, digits and _ . = + - only, 80 at most")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"preset {preset!r}: should be one of {', '.join(PRESETS)}")
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int and abs(s) < 2**63 for s in seeds):
        raise ValueError(f"seeds {str(seeds)[:60]}: should be a list of whole numbers, such as [41, 42, 43]")
    if len({*seeds}) < len(seeds):
        raise ValueError(f"seeds {seeds}: one is there twice; leave it out")
    common = _flags("[common]", data.get("common", {}))
    if several := [k for k, v in common.items() if isinstance(v, list)]:
        raise ValueError(f"[common]: {several[0]!r} is a list; give several values in [[overrides]]")
    counts = [_combinations(data.get(key, [{}])) for key in ("arms", "overrides")]
    if (n := math.prod(counts) * len(seeds)) > MOST_RUNS:
        raise ValueError(f"{n:.3g} runs, which is more than {MOST_RUNS}; shorten its lists, or make it several studies")
    methods = [*_choices("arms", data.get("arms"))]
    overrides = [*_choices("overrides", data.get("overrides", [{}]))]
    seen: dict[str, str] = {}
    settings: list[tuple[str, Config, tuple[str, ...]]] = []
    for (where, method, name_given), (where_override, extra, suffix) in product(methods, overrides):
        both = f"{where} × {where_override}" if extra else where
        if twice := sorted(method.keys() & extra.keys()):
            raise ValueError(f"{both}: {twice[0]!r} is set by both; leave one of them out")
        flags = (preset, *_argv(common | method | extra))
        try:
            cfg = resolve([*flags])
        except ValueError as e:
            raise ValueError(f"{both}: {e}") from None
        cfg.refuse_code(code, both)
        if cfg.guard_mode == "halt" and "guard" not in common | method | extra:
            flags = (*flags, "--guard=log")  # runs of a study are compared, so all have the same length
            cfg = resolve([*flags])
        if first := seen.get(identity(cfg)):
            same = f"the same runs as {first}" if first != both else "two values of a list make the same runs"
            raise ValueError(f"{both}: {same}; leave one of them out")
        seen[identity(cfg)] = both
        label = " · ".join(filter(None, (name_given or _label(cfg, method), suffix)))
        if label in (known for known, *_ in settings):
            raise ValueError(f"{both}: a second method called {label!r}; give one of them another name")
        settings.append((label, cfg, flags))
    cells = []
    for seed in seeds:
        for label, cfg, flags in settings:
            cells.append(Cell(label, replace(cfg, run=replace(cfg.run, seed=seed)), (*flags, f"--seed={seed}")))
    claims = tuple(line[4:].strip() for line in text.splitlines() if line.startswith("# H:"))
    return StudyFile(path, name, hashlib.sha256(text.encode()).hexdigest(), claims, tuple(cells))


def _combinations(tables: Any) -> int:
    """How many settings these tables make; of what is no table, any number."""
    lists = [[v for v in t.values() if isinstance(v, list)] if isinstance(t, dict) else [] for t in tables or ()]
    return sum(math.prod(map(len, of_table)) for of_table in lists)


def _choices(key: str, tables: Any) -> Iterator[tuple[str, Flags, str]]:
    """(where, flags, given name) of each table, for every combination of values given as lists."""
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise ValueError(f"{key}: should be one or more tables [[{key}]]")
    for i, table in enumerate(tables, 1):
        where = f"[[{key}]] {i}"
        name = table.get("name", "")
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"{where}: name {name!r}: should be one line of text")
        where += f" ({name})" if name else ""
        flags = _flags(where, {k: v for k, v in table.items() if k != "name"})
        several = {k: v for k, v in flags.items() if isinstance(v, list)}
        if empty := [k for k, v in several.items() if not v]:
            raise ValueError(f"{where}: {empty[0]!r} is an empty list; give it a value, or leave it out")
        for values in product(*several.values()):
            chosen = dict(zip(several, values, strict=True))
            one = flags | chosen
            if key == "overrides":
                yield where, one, name or _shown(one)
            else:
                yield where, one, " · ".join(filter(None, (name, _shown(chosen)))) if name else ""


def _flags(where: str, table: Any) -> Flags:
    if not isinstance(table, dict):
        raise ValueError(f"{where}: should be a table of flags")
    flags = {key.removeprefix("--").replace("_", "-"): value for key, value in table.items()}
    known = {"method", *(name.removeprefix("--") for name in flag_names())}
    for key, value in flags.items():
        if key in OWN:
            raise ValueError(
                f"{where}: {key!r} is the sweep's own; give seeds in 'seeds', and runs are resumed by themselves"
            )
        try:
            refuse_setting(key.replace("-", "_"), value if isinstance(value, list) else [value])
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from None
        if key not in known:
            raise ValueError(f"{where}: unknown flag {key!r}; `python -m vgrout.train mini --help` lists them")
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, str | int | float):
                raise ValueError(
                    f"{where}: {key!r} is a {type(one).__name__}; should be text, a number or true / false"
                )
    if len(flags) < len(table):
        raise ValueError(f"{where}: one flag is there twice, with - and with _; leave one out")
    return flags


def _argv(flags: Mapping[str, Any]) -> Iterator[str]:
    for key, value in flags.items():
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{key}"
        else:
            yield f"--{key}={value}"


def _label(cfg: Config, flags: Flags) -> str:
    """The name of a method that the study does not name: intervention, monitor, control, and its other flags."""
    in_names = (f.name for f in fields(MethodConfig) if rule_of(f).suffix is not None)  # in monitor's or control's name
    named = {"intervention", "monitor", "control", "random-flags", *(name.replace("_", "-") for name in in_names)}
    rest = {k: v for k, v in flags.items() if k not in named}
    monitor = f" ({cfg.method.monitor_title})" if cfg.method.monitor_title else ""
    control = "" if cfg.method.control_name == "none" else cfg.method.control_name
    return " · ".join(filter(None, (cfg.method.intervention + monitor, control, _shown(rest))))


def _shown(flags: Flags) -> str:
    return " · ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in flags.items())
