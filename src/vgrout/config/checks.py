"""The checker of settings. A field's metadata says what it may be and who reads it. Standard library only."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_origin

from vgrout.ground.io import Refused, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a setting may be, and which runs read it."""

    low: float | int | None = None  # smallest legal value
    above: float | int | None = None  # all legal values are larger
    high: float | int | str | None = None  # largest legal value, or the field that holds it
    below: float | int | None = None  # all legal values are smaller
    least: float | None = None  # smallest legal value beside 0; None: SMALLEST
    should: str = ""  # the error message's words in place of the interval
    words: tuple[str, ...] = ()  # legal words of a comma list …
    word: str = ""  # … and the noun for one of them
    # the words are checked where the environment is known, and may be other ones there
    later: bool = False
    many: bool = False  # a list, though of no known words
    form: str = ""  # regular expression of all of a text; `should` says it in words
    needs: str = ""  # field without which this one is not read
    suffix: str | None = None  # in a control's name, where the setting is not at its default


class Group(Protocol):
    """A group of settings: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def setting(default: T, **rule: Any) -> T:
    """A field of a settings class with its `Rule`."""
    return field(default=default, metadata={"rule": Rule(**rule)})


def rule_of(setting: Field[object]) -> Rule:
    return setting.metadata.get("rule", Rule())


# of a number that a step computes with, in fp32: products with smaller ones vanish, with larger ones overflow
SMALLEST, LARGEST = 1e-12, 1e12

Dtype = Literal["auto", "fp32", "bf16"]  # of a model's weights; auto: by the machine and the model


def flag(name: str) -> str:
    """A field's name on the command line."""
    return f"--{name.replace('_', '-')}"


def listed(text: str, words: Iterable[str] = ()) -> list[str]:
    """The words of a list, separated by commas or blanks; those of `words` as they are spelled there."""
    spelled = {word.casefold(): word for word in words}
    found: list[str] = []
    for given in text.replace(",", " ").split():
        found.append(spelled.get(given.casefold(), given))
    return found


def in_usual_order(words: Sequence[str], usual: Sequence[str]) -> list[str]:
    """The words in the order of `usual`, those that are not in it last."""
    known = [word for word in usual if word in words]
    others = [word for word in words if word not in usual]
    return known + others


def legal_values(annotation: object) -> tuple[object, ...]:
    """What a Literal allows, also inside `| None` and Annotated; () for other types, numbers beside words included."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if int in get_args(annotation):
        return ()
    found: list[object] = []
    for part in get_args(annotation):
        found += legal_values(part)
    return tuple(found)


def changed(group: Group) -> list[tuple[str, Rule]]:
    """The fields of a group that are not at their defaults."""
    found: list[tuple[str, Rule]] = []
    for f in fields(group):
        if getattr(group, f.name) != f.default:
            found.append((f.name, rule_of(f)))
    return found


def check(group: Group) -> None:
    """Check every setting of a group by itself, then those that another one switches on.

    Raises:
        Refused: one line with the flag and its legal values.
    """
    for f in fields(group):
        value = getattr(group, f.name)
        rule = rule_of(f)
        if value is None:
            continue
        should = _should(group, f, value, rule)
        if should:
            raise Refused(f"{flag(f.name)} {value}: should {should}")
        if isinstance(value, float) and not math.isfinite(value):  # which no JSON can say
            raise Refused(f"{flag(f.name)} {value}: should be finite")
        if rule.words and not rule.later:
            require_words(f.name, listed(value, rule.words), rule.words, rule.word)
    for name, rule in changed(group):
        if rule.needs and not getattr(group, rule.needs):
            refuse_unread([name], f"without {flag(rule.needs)}; leave it out")


def require_words(name: str, words: Sequence[str], legal: Iterable[str], word: str) -> None:
    """Raises Refused, one line, where one of a setting's words is unknown or there twice. word: the noun for one."""
    for i, given in enumerate(words):
        legal_words = ", ".join(legal)
        if given not in legal:
            meant = did_you_mean(given, legal)
            raise Refused(f"{flag(name)}: unknown {word} {given!r}; legal: {legal_words}{meant}")
        if given in words[:i]:
            raise Refused(f"{flag(name)}: {given} is there twice; legal: {legal_words}")


def _should(group: Group, f: Field[object], value: Any, rule: Rule) -> str:
    """What a setting should be or lie in; "" where it does."""
    legal = legal_values(f.type)
    if legal and value not in legal:
        names = [str(name) for name in legal]
        return f"be one of {', '.join(names)}{did_you_mean(str(value), names)}"
    if rule.form and not re.fullmatch(rule.form, value):
        return rule.should
    if isinstance(value, str):  # a word, in a number's place too
        return ""
    if isinstance(value, float) and 0 < abs(value) < (rule.least or SMALLEST):
        return f"be {'' if rule.above == 0 else '0, or '}at least {rule.least or SMALLEST:g}"
    high = getattr(group, rule.high) if isinstance(rule.high, str) else rule.high
    if (
        (rule.low is None or value >= rule.low)
        and (rule.above is None or value > rule.above)
        and (high is None or value <= high)
        and (rule.below is None or value < rule.below)
    ):  # no NaN does, where there is a bound
        return ""
    if rule.should:
        return rule.should
    left, low = ("[", rule.low) if rule.above is None else ("(", rule.above)
    right, top = ("]", high) if rule.below is None else (")", rule.below)
    if top is None:
        return f"be at least {low:g}"
    note = f" (at most {flag(rule.high)})" if isinstance(rule.high, str) else ""
    return f"lie in {left}{low:g}, {top:g}{right}{note}"


def flags(names: Iterable[str]) -> str:
    return ", ".join(map(flag, names))


class NotRead(Refused):
    """Settings were given that nothing in this configuration reads."""

    names: tuple[str, ...] = ()  # of their fields


def refuse_unread(names: Sequence[str], why: str) -> None:
    """Raises NotRead, one line, if there are any of these settings. why: goes on behind "not read"."""
    if names:
        refusal = NotRead(f"{flags(names)}: not read {why}")
        refusal.names = tuple(names)
        raise refusal


def summary(rows: Mapping[str, Any]) -> str:
    """A registry's names, each with its line, as a flag's help."""
    return " · ".join(f"{name}: {row.what}" for name, row in rows.items()) + "."
