"""Names that settings had in earlier versions: refused where a person gives them, translated where a file has them.

Refused on the command line and in study files, in one line with today's name. Translated in run.json, in the metadata
of a saved adapter, and in the files of finished runs that a report reads.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vgrout.config.checks import flag, listed
from vgrout.types import DETECTOR_FIELDS


class Renamed(NamedTuple):
    """One name. `of`: "setting" for a field and its flag, "hash" for a key of run.json's hashes, else the setting whose
    value it is. `said`: what a value has become, where that is not a value of the same setting; then `new` is what
    files and tables call it."""

    of: str
    old: str
    new: str
    said: str = ""

    def line(self) -> str:
        """The refusal."""
        old, new = (flag(n) if self.of == "setting" else f"{flag(self.of)} {n}" for n in (self.old, self.new))
        return f"{old}: renamed; say {self.said or new}"


RENAMED: tuple[Renamed, ...] = (
    Renamed("setting", "half_a", "report_detectors"),
    Renamed("setting", "update_layout", "packing"),
    Renamed("setting", "gate_anchor_teacher_only", "known_hacks_teacher_only"),
    Renamed("setting", "reader_anchors", "known_correct"),
    Renamed("setting", "reader_layer", "probe_layer"),
    Renamed("setting", "reader_k", "probe_k"),
    Renamed("setting", "reader_quantile", "monitor_quantile"),
    Renamed("setting", "reader_threshold", "monitor_threshold"),
    Renamed("setting", "reader_prompts", "monitor_prompts"),
    Renamed("setting", "label_penalty", "penalty"),
    Renamed("setting", "route2_gate", "monitor", "--monitor gate or --monitor band"),
    Renamed("setting", "quarantine_block", "quarantine", "--quarantine block:N"),
    Renamed("monitor_threshold", "anchors", "known_correct"),
    Renamed("control", "ablate_kept", "deploy_quarantine"),
    Renamed("control", "mass_matched", "random_flags", "--random-flags"),
    Renamed("control", "random_flags", "random_flags", "--random-flags"),
    Renamed("control", "oracle", "none", "--monitor labels"),
    Renamed("control", "gt_penalty", "none", "--intervention penalty --monitor labels"),
    Renamed("control", "gt_screening", "none", "--intervention screen --monitor labels"),
    Renamed("intervention", "vanilla", "none"),
    Renamed("intervention", "projected", "erase"),
    Renamed("intervention", "routing", "route"),
    Renamed("intervention", "routing2", "route2"),
    Renamed("hash", "anchors", "known_correct"),
)
# Detectors that the project's own scorecard found not to work on the rewards of a flawed grader, with why
# (docs/results-further.md). rm_ensemble stays for members of one's own.
RETIRED: dict[str, str] = {
    "separation": "not defined: a flawed grader pays at most three different amounts, and it needs four",
    "mop": "missed 5 of 5 hacking runs",
    "ragen": "missed 5 of 5 hacking runs",
}
# Settings of the earlier implementation that nothing here needs, with why.
NEEDLESS: dict[str, str] = {
    "cos_pre_split_every": "cos_pre_s and cos_pre_t are measured in every step",
    "route2_quar_lr_scale": "both vectors learn at --lr",
    "own_streams": "what the quarantine samples teaches δS nothing in --intervention sgtm either",
    "flagged_penalty": "--intervention penalty makes a flagged answer pay",
}
# Values of a setting that are gone, with what to say instead. Arms that read a text had a quarantine that δS learnt
# nothing from: what they did to the deployed model was screening, at half of its batch (docs/results.md).
GONE: dict[tuple[str, str], str] = {
    ("intervention", "pmi"): "--intervention screen --monitor pmi",
    ("intervention", "surprise"): "--intervention screen --monitor nll",
    ("intervention", "reader"): "--intervention screen --monitor probe",
    ("control", "no_gate"): "--intervention none",
}
_NEW = {(r.of, r.old): r.new for r in RENAMED}


# What the settings of an arm were under controls that are settings of their own today.
_CONTROLS: dict[str, dict[str, Any]] = {
    "mass_matched": {"random_flags": True},
    "random_flags": {"random_flags": True},
    "oracle": {"monitor": "labels"},
    "gt_penalty": {"intervention": "penalty", "monitor": "labels"},
    "gt_screening": {"intervention": "screen", "monitor": "labels"},
}
_GATES = {"tau": "usual", "pairs": "band"}


def refuse_setting(name: str, values: Iterable[Any] = ()) -> None:
    """Raises ValueError, one line with today's name, where a setting or one of the values given to it was renamed, or
    where it is not needed any more."""
    if name in NEEDLESS:
        raise ValueError(f"{flag(name)}: not needed, {NEEDLESS[name]}; leave it out")
    if gone := [value for value in values if isinstance(value, str) and (name, value) in GONE]:
        raise ValueError(f"{flag(name)} {gone[0]}: is gone; say {GONE[name, gone[0]]}")
    for r in RENAMED:
        if (r.of == "setting" and r.old == name) or (r.of == name and r.old in values):
            raise ValueError(r.line())


def refuse_flags(argv: Iterable[str]) -> None:
    """`refuse_setting` for every flag of a command line."""
    name = ""
    for word in argv:
        if word.startswith("--"):
            head, _, value = word.removeprefix("--").partition("=")
            name = head.replace("-", "_")
            refuse_setting(name.removeprefix("no_"))
        else:
            value = word
        refuse_setting(name, [value])


def current_value(name: str, value: Any) -> Any:
    """A stored setting's value by today's name."""
    return _NEW.get((name, value), value) if isinstance(value, str) else value


def current_arm(arm: str, control: str) -> tuple[str, str]:
    """Arm and control of a finished run as its files name them, by today's names: a control that has become an arm or
    a monitor is none any more."""
    base = next((old for old in _CONTROLS if control == old or control.startswith(f"{old}_")), "")
    return _CONTROLS.get(base, {}).get("intervention", arm), current_value("control", base or control)


def _of_controls(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A group of settings in which what was a control, a gate or a block is what it is today."""
    out = dict(stored)
    if (control := out.get("control")) in _CONTROLS:
        out |= {"control": "none", **_CONTROLS[control]}
        if out.get("intervention") == "route2":  # true labels took no notice of the gate
            out.pop("route2_gate", None)
    if (gate := out.pop("route2_gate", None)) is not None and out.get("intervention", "route2") == "route2":
        out.setdefault("monitor", _GATES.get(gate, gate))
    kept = ("off",) if ("intervention", out.get("intervention")) in GONE else ()  # usual was on: off is another cell
    for name in ("own_streams", "flagged_penalty"):
        if out.get(name) in ("usual", "off", 0.0) and out[name] not in kept:  # else none that this version can make
            del out[name]
    if (was := out.get("rebaseline")) in ("usual", "on", "off") and was not in kept:
        out["rebaseline"] = was == "on"
    if "quarantine_block" in out:
        block = out.pop("quarantine_block")
        out["quarantine"] = f"block:{block}" if block is not None else "shared"
    return out


def current_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """One group of a stored configuration by today's names, without the detectors that are retired."""
    stored = _of_controls(stored)
    names = {old: _NEW.get(("setting", old), old) for old in stored}
    settings = {names[old]: current_value(names[old], value) for old, value in stored.items()}
    if "reward_hack_detector" in settings:
        gone = {*RETIRED, *([] if settings.get("rm_ensemble_members") else ["rm_ensemble"])}
        chosen = [name for name in listed(settings["reward_hack_detector"]) if name not in gone]
        settings["reward_hack_detector"] = ",".join(chosen)
        settings["reward_hack_halt"] = bool(chosen and settings.get("reward_hack_halt"))
    return settings


def current_hashes(stored: Mapping[str, Any]) -> dict[str, Any]:
    """run.json's hashes of input files by today's names."""
    return {_NEW.get(("hash", name), name): sha256 for name, sha256 in stored.items()}


def current_answer(record: Any) -> Any:
    """One line of rollouts.jsonl or final.jsonl by today's names; what is none is handed on."""
    if not isinstance(record, dict) or "problem" not in record:
        return record
    renamed = {"problem": "problem_id", "mode": "env_mode"}
    out = {renamed.get(name, name): value for name, value in record.items() if name != "detectors"}
    return out | {DETECTOR_FIELDS[code]: flagged for code, flagged in (record.get("detectors") or {}).items()}
