"""What is flagged, and what is done about it: the classes of the rows in `vgrout.config.specs`."""

from typing import TypeVar

from vgrout.config.specs import INTERVENTION, MONITOR, register
from vgrout.method.base import Intervention, Monitor

M = TypeVar("M", bound=type[Monitor])
I = TypeVar("I", bound=type[Intervention])


def register_monitor(monitor: M) -> M:
    """Let `--monitor` find a class of your own, in this process, by its `name`. On the command line module:Class does
    the same. Raises Refused for a name that is none, or one of the package's own."""
    register(MONITOR, monitor)
    return monitor


def register_intervention(intervention: I) -> I:
    """The same for `--intervention`."""
    register(INTERVENTION, intervention)
    return intervention
