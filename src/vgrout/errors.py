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
