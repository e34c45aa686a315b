"""A thought: how an answer begins, up to the model's closing mark. It is trained and recorded as it was sampled, and
never graded.

The first closing mark ends a thought, as it does for servers of such models.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from vgrout.ground.data import NO_THOUGHT, Thought


@dataclass(frozen=True, slots=True)
class Marks:
    """Between which texts a model thinks."""

    open: str
    close: str


THINK = Marks("<think>", "</think>")
# Between which published models think.
KNOWN = (
    Marks("<|channel>", "<channel|>"),  # Gemma 4
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Marks("<seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Marks("◁think▷", "◁/think▷"),  # Kimi
    Marks("<thought>", "</thought>"),  # EXAONE Deep
    Marks("<mm:think>", "</mm:think>"),  # MiniMax
    THINK,  # the last: templates name it for other models' answers, too
)


def marks_of(template: str, tokens: Container[str]) -> Marks | None:
    """Between which marks a model thinks, as its chat template has them, or else its tokens.

    None: it has none that are known.
    """
    for marks in KNOWN:
        if marks.open in template or marks.close in template:
            return marks
    for marks in KNOWN:
        if marks.open in tokens and marks.close in tokens:
            return marks
    return None


@dataclass(frozen=True, slots=True)
class Parts:
    """A sampled text: thought + answer is the text."""

    thought: str  # with its marks and the line breaks behind them; "": there is none
    answer: str  # "" where the thought never ended: there is no answer
    ended: bool  # False: a thought that never ended


def opens(prompt: str, marks: Marks) -> bool:
    """Whether a rendered prompt ends in an opened thought, which the answer's text goes on with."""
    return prompt.rstrip().endswith(marks.open)


def parts_of(text: str, in_thought: bool = False, marks: Marks = THINK) -> Parts:
    """The thought and the answer of a text. in_thought: the prompt has opened the thought.

    Several thoughts at the beginning, with nothing between them, are one.
    """
    end = 0
    while in_thought or re.match(rf"\s*{re.escape(marks.open)}", text[end:]):
        in_thought = False
        closing = text.find(marks.close, end)
        if closing < 0:
            return Parts(text, "", ended=False)
        end = closing + len(marks.close)
        end += len(text[end:]) - len(text[end:].lstrip("\n"))
    return Parts(text[:end], text[end:], ended=True)


def to_grade(text: str, in_thought: bool, marks: Marks) -> str:
    """What a grader is given of a text: the answer alone, or `<think>` where there is none."""
    parts = parts_of(text, in_thought, marks)
    return parts.answer if parts.ended else THINK.open


def thought_of(
    decode: Callable[[Sequence[int]], str],
    ids: Sequence[int],
    text: str,
    in_thought: bool,
    marks: Marks = THINK,
) -> Thought:
    """The thought that an answer begins with. decode: the text of tokens. ids: its own.
    in_thought: the prompt has opened the thought.

    The thought's tokens are the fewest whose text holds all of it: a token across its end counts.
    """
    parts = parts_of(text, in_thought, marks)
    if not parts.thought:
        return NO_THOUGHT if parts.ended else Thought(ended=False)

    def holds(n: int) -> bool:
        return decode(ids[:n]).startswith(parts.thought)

    n = bisect_left(range(len(ids)), True, key=holds)
    return Thought(parts.thought, n, parts.ended)
