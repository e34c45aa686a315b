"""The checker of settings. A field's metadata says what it may be and who reads it. Standard library only."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a setting may be, and which runs read it."""

    low: float | int | None = None  # smallest legal value
    above: float | int | None = None  # all legal values are larger
    high: float | int | str | None = None  # largest legal value, or the field that holds it
    below: float | int | None = None  # all legal values are smaller
    should: str = ""  # the error message's words in place of the interval
    free: str = ""  # why a number has no bounds
    words: tuple[str, ...] = ()  # legal words of a comma list …
    word: str = ""  # … and the noun for one of them
    form: str = ""  # regular expression of all of a text; `should` says it in words
    needs: str = ""  # field without which this one is not read
    suffix: str | None = None  # in a control's name, where the setting is not at its default

    @property
    def bounded(self) -> bool:
        return any(end is not None for end in (self.low, self.above, self.high, self.below))


def setting(default: Any, **rule: Any) -> Any:
    """A field of a settings class with its `Rule`."""
    return field(default=default, metadata={"rule": Rule(**rule)})


def rule_of(setting: Field[Any]) -> Rule:
    return setting.metadata.get("rule", Rule())


Dtype = Literal["auto", "fp32", "bf16"]  # of a model's weights; auto: by the machine and the model


def refuse(condition: bool, message: str) -> None:
    """Raises ValueError with this one line."""
    if condition:
        raise ValueError(message)


def flag(name: str) -> str:
    """A field's name on the command line."""
    return f"--{name.replace('_', '-')}"


def listed(text: str, words: Iterable[str] = ()) -> list[str]:
    """The words of a list, separated by commas or blanks; those of `words` as they are spelled there."""
    spelled = {word.casefold(): word for word in words}
    return [spelled.get(word.casefold(), word) for word in text.replace(",", " ").split()]


def legal_values(annotation: Any) -> tuple[Any, ...]:
    """What a Literal allows, also inside `| None` and Annotated; () for other types, numbers beside words included."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if int in get_args(annotation):
        return ()
    return tuple(value for part in get_args(annotation) for value in legal_values(part))


def changed(group: Any) -> list[tuple[str, Rule]]:
    """The fields of a group that are not at their defaults."""
    return [(f.name, rule_of(f)) for f in fields(group) if getattr(group, f.name) != f.default]


def check(group: Any) -> None:
    """Check every setting of a group by itself, then those that another one switches on.

    Raises:
        ValueError: one line with the flag and its legal values.
    """
    for f in fields(group):
        value, rule = getattr(group, f.name), rule_of(f)
        if value is None:
            continue
        if should := _should(group, f, value, rule):
            raise ValueError(f"{flag(f.name)} {value}: should {should}")
        if rule.words:
            require_words(f.name, listed(value, rule.words), rule.words, rule.word)
    for name, rule in changed(group):
        if rule.needs and not getattr(group, rule.needs):
            raise ValueError(f"{flag(name)}: not read without {flag(rule.needs)}; leave it out")


def require_words(name: str, words: Sequence[str], legal: Iterable[str], word: str) -> None:
    """Raises ValueError, one line, where one of a setting's words is unknown or there twice. word: the noun for one."""
    for i, given in enumerate(words):
        if given not in legal or given in words[:i]:
            what = f"{given} is there twice" if given in legal else f"unknown {word} {given!r}"
            raise ValueError(f"{flag(name)}: {what}; legal: {', '.join(legal)}")


def _should(group: Any, f: Field[Any], value: Any, rule: Rule) -> str:
    """What a setting should be or lie in; "" where it does."""
    if (legal := legal_values(f.type)) and value not in legal:
        return f"be one of {', '.join(map(str, legal))}"
    if rule.form and not re.fullmatch(rule.form, value):
        return rule.should
    if not rule.bounded or isinstance(value, str):  # a word in a number's place
        return ""
    high, note = rule.high, ""
    if isinstance(high, str):
        high, note = getattr(group, high), f" (at most {flag(high)})"
    low = next((end for end in (rule.low, rule.above) if end is not None), -math.inf)
    top = next((end for end in (high, rule.below) if end is not None), math.inf)
    over = value > low if rule.above is not None else value >= low
    under = value < top if rule.below is not None else value <= top
    if over and under:  # no NaN does
        return ""
    left, right = "(" if rule.above is not None else "[", ")" if rule.below is not None else "]"
    interval = f"lie in {left}{low:g}, {top:g}{right}{note}"
    return rule.should or (f"be at least {low:g}" if top == math.inf and rule.low is not None else interval)


def flags(names: Iterable[str]) -> str:
    return ", ".join(map(flag, names))


def summary(what: Mapping[str, str]) -> str:
    """A registry's names, each with its line, as a flag's help."""
    return " · ".join(f"{name}: {line}" for name, line in what.items()) + "."


# A setting, or a setting and a word of its value → what to say instead, or why there is no such thing.
NOT_HERE: dict[str, str] = {
    "half_a": "say --report-detectors",
    "gate_anchor_teacher_only": "say --known-hacks-teacher-only",
    "route2_gate": "say --monitor gate or --monitor band",
    "route2_quar_lr_scale": "both vectors learn at --lr; leave it out",
    "second_moment": "each of the two vectors has its own; leave it out",
    "clip": "say --updates-per-batch 2 --clip-low 0.2 --clip-high 0.2",
    "icepop_low": "say --loss icepop --clip-low 0.2",
    "icepop_high": "say --loss icepop --clip-high 5",
    "method": "an intervention's recommended settings are its defaults; leave it out",
    "kl": "the estimator is K3; leave it out",
    "tis_cap": "demonstrations have ratio 1; leave it out",
    "luffy_gamma": "demonstrations have ratio 1; leave it out",
    "teacher_correction": "demonstrations have ratio 1; leave it out",
    "packing": "rollouts are packed where the model allows it; leave it out",
    "resume_force": "a run goes on with its own settings; start another one",
    "regrade_pool": "make the pool again with `vgrout teacher`, or say --mix-ratio 0",
    "loss dr_grpo": "--loss grpo with --unbiased, its default, is Dr. GRPO",
    "intervention sgtm": "say --intervention route2 --monitor detector",
    "placebo_pairs_path": "say --control placebo --placebo-pairs FILE",
    "saturated_groups": "every group is looked at; leave it out",
    "cos_pre_split_every": "cos_pre_s and cos_pre_t are measured in every step; leave it out",
    "max_error_reschedule_attempts": "say --max-error-retries",
    "preserve_all_thinking": "say --preserve-thinking",
    "preserve_thinking_between_tool_calls": "no problem here has tool calls; leave it out",
    "checkpoint_include_optimizer": "every checkpoint has it, or a resumed run would be another; leave it out",
    "checkpoint_include_ref_model": "the reference is the adapter at zero, and needs no file; leave it out",
    "checkpoint_include_rollout_buffer": "a step learns from its own rollouts, kept in rollouts.jsonl; leave it out",
    "intervention vanilla": "say --intervention none",
    "intervention projected": "say --intervention erase",
    "intervention routing": "say --intervention route",
    "intervention routing2": "say --intervention route2",
    "monitor probe": "say --monitor online_probe",
    "control oracle": "say --monitor labels",
    "control mass_matched": "say --random-flags",
    "control placebo_flawed": "say --control placebo",
    "control placebo_commented": "say --control placebo --placebo-pairs commented",
    "control placebo_long": "say --control placebo --placebo-pairs long",
    "control placebo_laid_out": "say --control placebo --placebo-pairs laid_out",
    "reward_hack_detector separation": "not defined on at most three different rewards, it needs four; leave it out",
    "reward_hack_detector mop": "it missed 5 of 5 hacking runs; leave it out",
    "reward_hack_detector ragen": "it missed 5 of 5 hacking runs; leave it out",
}


def refuse_flags(argv: Iterable[str]) -> None:
    """Raises ValueError, one line, at the first flag, or value of one, that `NOT_HERE` has."""
    name = ""
    for word in argv:
        value = word
        if word.startswith("--"):
            head, _, value = word.partition("=")
            name = re.sub("^(no_)?", "", head[2:].replace("-", "_"))
        for there in (name, *(f"{name} {given}" for given in listed(value))):
            if there in NOT_HERE:
                raise ValueError(f"{flag(name)}{there.removeprefix(name)}: not here; {NOT_HERE[there]}")
