"""Other names of settings and values, and what to say instead: refused in one line on the command line and in study
files. Files of another version are never translated: whatever reads them refuses them."""

from collections.abc import Iterable
from typing import Any

from vgrout.config.checks import flag, listed, refuse

# A setting, or a setting and a word of its value → what to say instead, or why there is no such thing.
NOT_HERE: dict[str, str] = {
    "half_a": "say --report-detectors",
    "gate_anchor_teacher_only": "say --known-hacks-teacher-only",
    "route2_gate": "say --monitor gate or --monitor band",
    "route2_quar_lr_scale": "both vectors learn at --lr; leave it out",
    "second_moment": "each of the two vectors has its own; leave it out",
    "clip": "not read with one update a batch, where the ratio is 1; leave it out",
    "gspo_low": "not read with one update a batch, where the ratio is 1; leave it out",
    "gspo_high": "not read with one update a batch, where the ratio is 1; leave it out",
    "cispo_high": "not read with one update a batch, where the ratio is 1; leave it out",
    "icepop_low": "say --loss icepop --clip-low 0.2",
    "icepop_high": "say --loss icepop --clip-high 5",
    "placebo_pairs_path": "say --control placebo --placebo-pairs FILE",
    "saturated_groups": "every group is looked at; leave it out",
    "quarantine_share": "it is 0.1; leave it out",
    "cos_pre_split_every": "cos_pre_s and cos_pre_t are measured in every step; leave it out",
    "max_error_reschedule_attempts": "say --max-error-retries",
    "intervention vanilla": "say --intervention none",
    "intervention projected": "say --intervention erase",
    "intervention routing": "say --intervention route",
    "intervention routing2": "say --intervention route2",
    "intervention pmi": "say --intervention screen --monitor pmi",
    "intervention surprise": "say --intervention screen --monitor nll",
    "intervention reader": "say --intervention penalty --monitor online_probe",
    "monitor probe": "say --monitor online_probe",
    "monitor relevance": "say --monitor pmi or --monitor online_probe",
    "control oracle": "say --monitor labels",
    "control mass_matched": "say --random-flags",
    "control placebo_flawed": "say --control placebo",
    "control placebo_commented": "say --control placebo --placebo-pairs commented",
    "control placebo_long": "say --control placebo --placebo-pairs long",
    "control placebo_laid_out": "say --control placebo --placebo-pairs laid_out",
    "control no_gate": "say --intervention none",
    "reward_hack_detector separation": "not defined on at most three different rewards, it needs four; leave it out",
    "reward_hack_detector mop": "it missed 5 of 5 hacking runs; leave it out",
    "reward_hack_detector ragen": "it missed 5 of 5 hacking runs; leave it out",
}


def refuse_setting(name: str, values: Iterable[Any] = ()) -> None:
    """Raises ValueError, one line, if the table has this setting or one of its values."""
    refuse(name in NOT_HERE, f"{flag(name)}: not here; {NOT_HERE.get(name)}")
    for word in (word for value in values if isinstance(value, str) for word in listed(value)):
        instead = NOT_HERE.get(f"{name} {word}")
        refuse(instead is not None, f"{flag(name)} {word}: not here; {instead}")


def refuse_flags(argv: Iterable[str]) -> None:
    """`refuse_setting` for every flag of a command line."""
    name = ""
    for word in argv:
        value = word
        if word.startswith("--"):
            head, _, value = word.removeprefix("--").partition("=")
            name = head.replace("-", "_")
            refuse_setting(name.removeprefix("no_"))
        refuse_setting(name, [value])
