"""The one exception that commands print as a line. Standard library only."""


class Refused(ValueError):
    """A mistake of the user's: what was wrong, where, and what to do, in one line.

    Commands print it on stderr and exit with 2. Any other exception is a fault, of this program or of somebody's own
    class, and shows its traceback.
    """


def refuse(condition: bool, message: str) -> None:
    """Raises Refused with this message where the condition holds."""
    if condition:
        raise Refused(message)


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP: the current step was finished and saved."""


class Halted(Exception):
    """The guard or a detector stopped the run."""


class Diverged(Exception):
    """The update was not finite three steps in a row, or the policy lost tokens that it had."""


class NothingRouted(AssertionError):
    """A method with a quarantine has learnt, and its quarantine has learnt nothing."""


class NothingAligned(Exception):
    """A distillation by ULD has compared no token but the first of answers: it was cross-entropy almost alone."""
