"""What is flagged, and what is done about it: the classes of the rows in `vgrout.config.specs`."""

from functools import partial
from typing import Any, TypeVar

from vgrout.config.specs import (
    INTERVENTION,
    INTERVENTIONS,
    MONITOR,
    MONITORS,
    class_of,
    register,
)
from vgrout.errors import Refused
from vgrout.method import contract
from vgrout.method.base import BrokenContract, Intervention, Monitor, Setup
from vgrout.method.method import Method
from vgrout.method.trial import try_own_classes

M = TypeVar("M", bound=type[Monitor])
I = TypeVar("I", bound=type[Intervention])


def make_method(setup: Setup) -> Method:
    """A run's method, on its policy's modules.

    Raises:
        Refused: no pairs where they are needed, files that do not fit this model, a class of somebody's own that
            answers a made-up step wrongly; one line.
    """
    cfg = setup.cfg.method

    def make_intervention() -> Intervention:
        kind: type[Intervention] = class_of(INTERVENTIONS[cfg.intervention])
        return contract.made(kind.make(setup), kind)

    monitor_of = partial(make_monitor, setup)
    shadows: dict[str, Monitor] = {}
    try:
        intervention = make_intervention()
        monitor = monitor_of(cfg.monitor_name)
        for name in cfg.in_shadow:
            shadows[name] = monitor_of(name)
    except BrokenContract as e:
        raise Refused(str(e)) from None
    method = Method(setup.cfg, intervention, monitor, setup.policy, shadows=shadows)
    try_own_classes(setup, method, make_intervention, monitor_of)
    return method


def make_monitor(setup: Setup, name: str) -> Monitor:
    """A monitor of this name, with a seed of its own where it learns from one. Raises Refused as `make_method`."""
    spec = MONITORS[name]
    kind: Any = class_of(spec)
    if "seed" not in spec.needs:
        return contract.made(kind.make(setup), kind)
    seed_monitor = make_monitor(setup, setup.cfg.method.seed_monitor)
    return contract.made(kind.make(setup, seed_monitor=seed_monitor), kind)


def register_monitor(monitor: M) -> M:
    """Let `--monitor` find a class of your own, in this process, by its `name`. On the command line module:Class does
    the same. Raises Refused for a name that is none, or one of the package's own."""
    register(MONITOR, monitor)
    return monitor


def register_intervention(intervention: I) -> I:
    """The same for `--intervention`."""
    register(INTERVENTION, intervention)
    return intervention
