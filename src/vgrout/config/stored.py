"""A run's settings as its files have them: read back, compared, and joined with a command line's."""

import hashlib
import json
from collections.abc import Set
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from vgrout.config.checks import flag
from vgrout.config.method import MethodConfig
from vgrout.config.run import GROUPS, Config
from vgrout.config.specs import admit
from vgrout.ground.errors import Refused
from vgrout.ground.files import Json


def from_dict(data: Json, where: str = "run.json") -> Config:
    """The inverse of `Config.as_dict`. where: the file that holds it, for messages. Classes of somebody's own that it
    names are not imported: such a run can be read, and nothing more.

    Raises:
        Refused: groups or settings unknown to this version, named; or values that it refuses.
    """
    usual, unknown = Config(), {"none that a run has"}
    if isinstance(data, dict) and isinstance(data.get("preset"), str):
        groups = {group: data.get(group, {}) for group in GROUPS}
        unknown = data.keys() - {*GROUPS, "preset"} | {
            g for g, of in groups.items() if not isinstance(of, dict)
        }
        for group in groups.keys() - unknown:
            unknown |= groups[group].keys() - {f.name for f in fields(getattr(usual, group))}
    if unknown:
        raise Refused(
            f"{where}: unknown settings {', '.join(sorted(unknown))}; the run was made by another version"
        )
    values: dict[str, Any] = {"preset": data["preset"]}
    admit(groups["method"], tuple(f.name for f in fields(MethodConfig)))
    for group, of in groups.items():
        types = {f.name: f.type for f in fields(getattr(usual, group))}
        given = {name: typed(value, name, types[name], where) for name, value in of.items()}
        values[group] = replace(getattr(usual, group), **given)
    return Config(**values)


def typed(value: object, name: str, annotation: object, where: str) -> object:
    """A stored value as its field has it. Raises Refused, one line, where it is of another type."""
    allowed = _kinds(annotation)
    word = isinstance(value, str) and (
        Path in allowed or any(isinstance(kind, str) for kind in allowed)
    )
    if type(value) is int and int not in allowed and float in allowed and abs(value) < 10**300:
        value = float(value)
    if (not word and type(value) not in allowed) or "\0" in str(value):
        raise Refused(f"{where}: {flag(name)} {str(value)[:60]!r}: not of its type, {annotation}")
    return Path(value) if isinstance(value, str) and Path in allowed else value


def _kinds(annotation: object) -> set[object]:
    """An annotation's parts, itself included."""
    return {annotation} | {kind for part in get_args(annotation) for kind in _kinds(part)}


# How a process runs, not what it computes: these settings may differ between a run and its
# resumption.
_PROCESS = {
    *("dry_run", "threads", "memory_gib", "track", "columns"),
    *("checkpoint_every", "checkpoint_keep", "max_error_retries"),
}
_SERVED = {"llm_judge_url", "llm_judge_timeout"}
# taken from the new command line where given there; else the run's own
FREE = {*_PROCESS, *_SERVED, "guard"}
_REQUESTS = {"resume", "trust_code"}  # no part of the run


def merge_flags(
    given: dict[str, object], stored: dict[str, object], default: dict[str, object], free: Set[str]
) -> tuple[dict[str, object], list[str]]:
    """A run's stored settings with those given now, and the flags among them that are not `free` to differ."""
    merged, differing = dict(stored), []
    for name in stored:
        if name not in _REQUESTS and given[name] not in (default[name], stored[name]):
            merged[name] = given[name]
            if name not in free:
                differing.append(f"{flag(name)} {given[name]} (run: {stored[name]})")
    return merged, differing


def settings_sha256(cfg: Config) -> str:
    """sha256 of all settings that the numbers depend on, the seed included: equal for runs that differ by tag or
    process."""
    data = cfg.as_dict()
    data["run"] = {
        k: v
        for k, v in data["run"].items()
        if k not in {*_PROCESS, *_REQUESTS, "out_tag", "output_dir"}
    }
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
