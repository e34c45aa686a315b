"""The one exception that commands print as a line. Standard library only."""

import difflib
from collections.abc import Iterable


class Refused(ValueError):
    """A mistake of the user's: what was wrong, where, and what to do, in one line.

    Commands print it on stderr and exit with 2. Any other exception is a fault, of this program or of somebody's own
    class, and shows its traceback.
    """


def refuse(condition: bool, message: str) -> None:
    """Raises Refused with this message where the condition holds."""
    if condition:
        raise Refused(message)


def one_line(said: object, longest: int | None = None) -> str:
    """A text, or what an exception says, in one line of at most so many characters; None: however long it is."""
    text = " ".join(str(said).split())
    if longest is None or len(text) <= longest:
        return text
    return f"{text[: longest - 1]}…"


def nearest(given: str, legal: Iterable[str]) -> str:
    """The name that was probably meant by one that is unknown, whatever its case; "": none is like it."""
    names = {name.casefold(): name for name in legal}
    near = difflib.get_close_matches(given.casefold(), names, 1)
    return names[near[0]] if near else ""


def did_you_mean(given: str, legal: Iterable[str]) -> str:
    """The end of a refusal that names it: "; did you mean route2?", or ""."""
    meant = nearest(given, legal)
    return f"; did you mean {meant}?" if meant else ""


def none_fits(source: str, room: int) -> Refused:
    """The refusal of tasks none of whose prompts fits."""
    return Refused(
        f"{source}: none of its prompts fits the {room} tokens that the model's window leaves beside --max-new; "
        "shorten them, lower --max-new, or choose a model with a longer window"
    )


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP: the current step was finished and saved."""


class Halted(Exception):
    """The guard or a detector stopped the run."""


class Diverged(Exception):
    """The update was not finite three steps in a row, or the policy lost tokens that it had."""


class NothingRouted(AssertionError):
    """A method with a quarantine has learnt, and its quarantine has learnt nothing."""


class NothingAligned(Exception):
    """A distillation by ULD had nothing to compare, or nothing at all to learn from. then: what to do."""

    def __init__(self, message: str, then: str) -> None:
        super().__init__(message)
        self.then = then
