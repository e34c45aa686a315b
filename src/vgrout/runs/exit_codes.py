"""The exit codes of a run.

0 finished · 2 bad arguments or configuration, nothing started · 3 halted by the guard or a detector ·
4 diverged · 130 interrupted, state saved · 1 anything else.
"""

from vgrout.errors import Diverged, Halted, Interrupted, Refused

FINISHED, FAILED, REFUSED, HALTED, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130


def exit_code(e: BaseException | None) -> int:
    """Of a run that this has ended; None: nothing did."""
    match e:
        case None:
            return FINISHED
        case Interrupted() | KeyboardInterrupt():
            return INTERRUPTED
        case Halted():
            return HALTED
        case Diverged():
            return DIVERGED
        case Refused():
            return REFUSED
        case _:
            return FAILED
