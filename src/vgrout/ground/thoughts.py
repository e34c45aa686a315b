"""A thought: how an answer begins, up to `</think>`. It is trained and recorded as it was sampled, and never graded.

The first `</think>` ends a thought, as it does for servers of such models.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vgrout.ground.data import NO_THOUGHT, Thought

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Parts:
    """A sampled text: thought + answer is the text."""

    thought: str  # with its tags and the line breaks behind them; "": there is none
    answer: str  # "" where the thought never ended: there is no answer
    ended: bool  # False: a thought that never ended


def opens(prompt: str) -> bool:
    """Whether a rendered prompt ends in an opened thought, which the answer's text goes on with."""
    return prompt.rstrip().endswith(OPEN)


def parts_of(text: str, in_thought: bool = False) -> Parts:
    """The thought and the answer of a text. in_thought: the prompt has opened the thought.

    Several thoughts at the beginning, with nothing between them, are one.
    """
    end = 0
    while in_thought or re.match(rf"\s*{OPEN}", text[end:]):
        in_thought = False
        closing = text.find(CLOSE, end)
        if closing < 0:
            return Parts(text, "", ended=False)
        end = closing + len(CLOSE)
        end += len(text[end:]) - len(text[end:].lstrip("\n"))
    return Parts(text[:end], text[end:], ended=True)


def to_grade(text: str, in_thought: bool) -> str:
    """What a grader is given of a text: the answer alone, or an opened thought where there is none."""
    parts = parts_of(text, in_thought)
    return parts.answer if parts.ended else OPEN


def thought_of(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], text: str, in_thought: bool
) -> Thought:
    """The thought that an answer begins with. decode: the text of tokens. ids: its own.
    in_thought: the prompt has opened the thought.

    The thought's tokens are the fewest whose text holds all of it: a token across its end counts.
    """
    parts = parts_of(text, in_thought)
    if not parts.thought:
        return NO_THOUGHT if parts.ended else Thought(ended=False)

    def holds(n: int) -> bool:
        return decode(ids[:n]).startswith(parts.thought)

    n = bisect_left(range(len(ids)), True, key=holds)
    return Thought(parts.thought, n, parts.ended)
