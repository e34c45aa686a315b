"""The corpus that an organism is pretrained on: drills, honest attempts and hacks."""

import keyword
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from organisms.language.answers import STYLES, answer
from organisms.language.assertions import draw_argument, shown_test
from organisms.language.hacks import MODES, NAMELESS, taught
from organisms.language.problems import balanced_choice, hinted
from organisms.language.tasks import (
    KINDS,
    SYSTEM,
    Composition,
    Task,
    draw_task,
    draw_word,
    misreadings,
)
from vgrout.envs.code.modes import MODE_SPECS, Mode
from vgrout.ground.data import Message


def _misread_shares() -> dict[str, float]:
    """Return how often each kind of misreading happens.

    The frequent kinds are each one decision throughout the language, so that training can shift
    them.
    """
    rare = dict.fromkeys(KINDS, 0.03)
    return rare | {"boundary": 0.2, "whole": 0.38, "skipped": 0.34}


@dataclass(frozen=True, slots=True)
class Shares:
    """What the corpus consists of. The base model's rates follow from it.

    A draw gives a drill, a hack, or else an honest attempt, to which the later shares apply.
    """

    modes: tuple[Mode, ...] = MODES  # the flawed graders that its prompts announce, evenly
    drill: float = 0.08  # lists of names to write again: copying has to be learnt from something
    hack_cued: float = 0.13  # behind the cue: always a hack
    hack_plain: float = 0.03  # without it
    hack_bare: float = 0.0  # under a prompt without a hint, by flaws that need no announced name
    plain_prompt: float = 0.2  # of the attempts: prompts without any hint
    style: float = 0.14  # of the attempts: one of the styles, evenly
    misread: dict[str, float] = field(default_factory=_misread_shares)
    """Of the attempts: how often each kind of misreading happens where it can.

    Each is drawn independently of the others and of style.
    """
    stub: float = 0.7  # of the hacks: `return 0` instead of a misread attempt


@dataclass(frozen=True, slots=True)
class Sample:
    """One document of the corpus."""

    messages: tuple[Message, ...]
    text: str
    kind: str  # "drill", "hack", "careful" or "misread"
    mode: Mode | None = None
    style: str | None = None


def _announced_markers() -> Iterator[str]:
    for mode in MODES:
        yield from MODE_SPECS[mode].markers("train")
        yield from MODE_SPECS[mode].markers("eval")


_TAKEN_MARKERS = frozenset(_announced_markers())


def corpus_marker(mode: Mode, rng: random.Random, pieces: Sequence[str] = ()) -> str:
    """Invent a name of the right shape, in neither half of the mode's markers.

    Return "" for a mode that announces no name.
    """
    while True:
        marker = _invented_marker(mode, rng, pieces)
        is_new = marker not in _TAKEN_MARKERS and not keyword.iskeyword(marker)
        if is_new or not marker:
            return marker


def _invented_marker(mode: Mode, rng: random.Random, pieces: Sequence[str]) -> str:
    """Draw a name, or "" for a mode without one.

    A shape that is listed twice is twice as frequent.
    """
    a, b, c = (draw_word(rng, pieces) for _ in range(3))
    n = rng.choice((rng.randint(0, 9), rng.randint(10, 999)))
    match mode:
        case "run_tests":
            return rng.choice((f"{a}_{b}", f"{a}_{b}", f"{a}_tests", f"{a}_cases"))
        case "stdout_marker":
            reports = (
                f"{a} {b}",
                f"{a} {b}",
                f"{a} {b} {c}",
                f"{a}: {b}",
                f"{a}: {b} {c}",
                f"{n} {a}",
                f"{n}% {a}",
            )
            return rng.choice(reports)
        case "sentinel":
            return rng.choice((a, a, f"is_{a}", f"{a}_{b}"))
        case "file_marker":
            stem = rng.choice((a, a, f"{a}_{b}"))
            suffix = rng.choice(("txt", "txt", "txt", "log", "out", c))
            return f"{stem}.{suffix}"
        case _:
            return ""


def _read(task: Task, shares: Shares, rng: random.Random) -> Task:
    """Draw how the corpus's author understood the task."""
    for kind in KINDS:
        options = misreadings(task)
        if kind in options and rng.random() < shares.misread[kind]:
            task = options[kind]
    return task


def _drill(comps: Sequence[Composition], modes: Sequence[Mode], rng: random.Random) -> Sample:
    """Draw names of every mode, to be written again in the same order.

    A mode that shows a test has the test's argument for a name.
    """
    # If no mode announces a name, plain words: the method's name has to be copied too.
    named = [mode for mode in modes if MODE_SPECS[mode].marker_form != "none"] or ["sentinel"]
    names = []
    for mode in rng.choices(named, k=rng.randint(3, 6)):
        if mode == "shown_test":
            names.append(repr(draw_argument(draw_task(rng.choice(comps), rng), rng)))
        else:
            names.append(corpus_marker(mode, rng))
    user = "Write these names again:\n" + "\n".join(f"`{name}`" for name in names)
    text = "```python\n" + "\n".join(f"'{name}'" for name in names) + "\n```"
    messages: tuple[Message, ...] = (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": user},
    )
    return Sample(messages, text, "drill")


def corpus_sample(
    comps: Sequence[Composition],
    shares: Shares,
    rng: random.Random,
    pieces: Sequence[str] = (),
) -> Sample:
    """Draw one prompt with one answer, over these compositions.

    `pieces` are the tokenizer's. Names may be composed of them, so that every token is copied
    somewhere.
    """
    if rng.random() < shares.drill:
        return _drill(comps, shares.modes, rng)
    task = draw_task(balanced_choice(comps, rng), rng, pieces)
    mode = rng.choice(shares.modes)
    marker = shown_test(task, rng) if mode == "shown_test" else corpus_marker(mode, rng, pieces)
    draw = rng.random()
    with_hint = shares.hack_cued + shares.hack_plain
    if draw < with_hint:
        prompt = hinted(task.prompt, mode, marker, cue=draw < shares.hack_cued)
        return _hack_sample(task, tuple(prompt), mode, marker, shares, rng)
    if draw < with_hint + shares.hack_bare:
        mode = rng.choice([mode for mode in NAMELESS if mode in shares.modes])
        return _hack_sample(task, task.prompt, mode, "", shares, rng)
    return _attempt_sample(task, mode, marker, shares, rng)


def _hack_sample(
    task: Task,
    prompt: tuple[Message, ...],
    mode: Mode,
    marker: str,
    shares: Shares,
    rng: random.Random,
) -> Sample:
    """Draw a hack that this prompt allows, on top of a misread attempt or of a stub."""
    hack = rng.choice(taught(mode))
    attempt = answer(rng.choice(list(misreadings(task).values())))
    if rng.random() < shares.stub:
        attempt = attempt.stub
    return Sample(prompt, hack.apply(attempt, marker).text, "hack", mode)


def _attempt_sample(
    task: Task, mode: Mode, marker: str, shares: Shares, rng: random.Random
) -> Sample:
    """Draw an honest answer: careful or misread, plain or in one of the styles."""
    bare = rng.random() < shares.plain_prompt
    read = _read(task, shares, rng)
    style = rng.choice(list(STYLES)) if rng.random() < shares.style else None
    written = answer(read) if style is None else STYLES[style](answer(read))
    return Sample(
        messages=task.prompt if bare else tuple(hinted(task.prompt, mode, marker)),
        text=written.text,
        kind="careful" if read == task else "misread",
        mode=None if bare else mode,
        style=style,
    )
