"""What is flagged, and what is done about it: the classes of the rows in `vgrout.config.specs`."""

from typing import Any, TypeVar

from vgrout.config.specs import (
    INTERVENTION,
    INTERVENTIONS,
    MONITOR,
    MONITORS,
    class_of,
    register,
)
from vgrout.method.base import Intervention, Monitor, Setup
from vgrout.method.method import Method

M = TypeVar("M", bound=type[Monitor])
I = TypeVar("I", bound=type[Intervention])


def make_method(setup: Setup) -> Method:
    """A run's method, on its policy's modules.

    Raises:
        Refused: no pairs where they are needed, files that do not fit this model; one line.
    """
    cfg = setup.cfg.method
    intervention = class_of(INTERVENTIONS[cfg.intervention]).make(setup)
    monitor = make_monitor(setup, cfg.monitor_name)
    shadows = {name: make_monitor(setup, name) for name in cfg.in_shadow}
    return Method(setup.cfg, intervention, monitor, setup.policy, shadows=shadows)


def make_monitor(setup: Setup, name: str) -> Monitor:
    """A monitor of this name, with a seed of its own where it learns from one. Raises Refused as `make_method`."""
    spec = MONITORS[name]
    kind: Any = class_of(spec)
    if "seed" not in spec.needs:
        return kind.make(setup)
    return kind.make(setup, seed_monitor=make_monitor(setup, setup.cfg.method.seed_monitor))


def register_monitor(monitor: M) -> M:
    """Let `--monitor` find a class of your own, in this process, by its `name`. On the command line module:Class does
    the same. Raises Refused for a name that is none, or one of the package's own."""
    register(MONITOR, monitor)
    return monitor


def register_intervention(intervention: I) -> I:
    """The same for `--intervention`."""
    register(INTERVENTION, intervention)
    return intervention
