"""What is run for the scorecard: rows × settings × seeds, as battery.toml has them, and a row of somebody's own."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vgrout.config.method import MethodConfig
from vgrout.config.run import Config
from vgrout.config.specs import MONITORS
from vgrout.ground.io import Refused, did_you_mean, refuse
from vgrout.sweep.study_file import FlagTable, PlannedRun, resolved_flags

FILE = Path(__file__).with_name("battery.toml")
CEILING, IDLE = "ceiling", "nothing"  # a row, and the setting in which nothing can be hacked
# rows of ours that are run again beside yours, with the first seed: does this machine make the recorded numbers?
PROOF, PROOF_SETTING = ("none", "route2"), "shown"
Key = tuple[str, str, int]  # row, setting, seed


@dataclass(frozen=True)
class Battery:
    """The rows and the settings, each with its flags."""

    preset: str
    seeds: Sequence[int]
    common: FlagTable
    rows: Mapping[str, FlagTable]
    settings: Mapping[str, FlagTable]
    needs: Mapping[str, str]  # what each row has to be given beside a grader

    @classmethod
    def load(cls) -> "Battery":
        data: dict[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))
        return cls(**data)

    def start(self, setting: str, seed: int) -> Path | None:
        """The organism that a setting's runs start from; None: the shipped one."""
        organism = self.settings[setting].get("organism")
        if organism is None:
            return None
        return Path(str(organism).format(seed=seed))


@dataclass
class Plan:
    """The runs of chosen rows, settings and seeds. A run of several cells is there once for each."""

    runs: dict[Key, PlannedRun] = field(default_factory=dict)
    cannot: dict[tuple[str, str], str] = field(default_factory=dict)  # row, setting → why not

    @property
    def once(self) -> tuple[PlannedRun, ...]:
        first: dict[str, PlannedRun] = {}
        for run in self.runs.values():
            first.setdefault(run.identity, run)
        return tuple(first.values())


def plan(battery: Battery, rows: Mapping[str, FlagTable], cells: Iterable[Key]) -> Plan:
    """Plan these cells. rows: the flags of each row, the battery's or one's own.

    Raises:
        Refused: one line: a row is wrong in every setting.
    """
    planned = Plan()
    for row, setting, seed in cells:
        try:
            run = _run(battery, row, rows[row], setting, seed)
        except Refused as e:
            planned.cannot[row, setting] = str(e)
        else:
            planned.runs[row, setting, seed] = run
    can_be_run = {row for row, _, _ in planned.runs}
    for (row, _), why in planned.cannot.items():
        refuse(row not in can_be_run, why)
    return planned


def _run(battery: Battery, row: str, of_row: FlagTable, setting: str, seed: int) -> PlannedRun:
    """A cell's run. What a setting or all runs are given and this row does not read is left out."""
    of_all = battery.common | battery.settings[setting]
    flags = {"intervention": "none"} | of_row | of_all
    start = battery.start(setting, seed)
    if start is not None:
        flags["organism"] = str(start)
    cfg, argv = _resolved(battery.preset, tuple(flags.items()), frozenset(of_all))
    return PlannedRun(f"{row} · {setting}", cfg.seeded(seed), (*argv, f"--seed={seed}"))


@cache  # seeds have most settings in common, and a command line takes a tenth of a second
def _resolved(
    preset: str, flags: tuple[tuple[str, object], ...], of_all: frozenset[str]
) -> tuple[Config, tuple[str, ...]]:
    cfg, argv, _ = resolved_flags(preset, dict(flags), of_all, trusted=True)
    return cfg, argv


def chosen(given: str, legal: Iterable[str], word: str) -> list[str]:
    """The names of a comma list, all where it is empty. Raises Refused, one line, for an unknown one."""
    legal = [*legal]
    names: list[str] = []
    for part in given.split(","):
        name = part.strip()
        if not name or name in names:
            continue
        should = f"should be of {', '.join(legal)}{did_you_mean(name, legal)}"
        refuse(name not in legal, f"--{word}s {name}: no such {word}; {should}")
        names.append(name)
    refuse(bool(given) and not names, f"--{word}s {given!r}: names none")
    return names or legal


def needs(method: MethodConfig) -> str:
    """What a method has to be given beside a grader."""
    acting = [MONITORS[name] for name in method.acting]
    found: list[str] = []
    if any(monitor.sees_labels for monitor in acting):
        found.append("labels")
    if method.reads_pairs:
        found.append("pairs")
    if "demonstrations" in method.monitor_spec.needs:
        found.append("known hacks")
    if any("known correct" in monitor.needs for monitor in acting):
        found.append("right answers")
    if method.control_spec.strict:
        found.append("a grader without a flaw")
    return ", ".join(found) or "nothing"
