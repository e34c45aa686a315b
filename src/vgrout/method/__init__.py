"""What is flagged, and what is done about it: the classes that the registries of `vgrout.config.method` name."""

from typing import TYPE_CHECKING, Any, TypeVar

from vgrout.config.method import (
    INTERVENTIONS,
    MONITORS,
    intervention_class,
    monitor_class,
    register,
)
from vgrout.method.base import Intervention, Monitor, Setup

if TYPE_CHECKING:
    from vgrout.method.method import Method

M = TypeVar("M", bound=type[Monitor])
I = TypeVar("I", bound=type[Intervention])


def make_method(setup: Setup) -> "Method":
    """A run's method, on its policy's modules.

    Raises:
        Refused: no pairs where they are needed, files that do not fit this model; one line.
    """
    from vgrout.method.method import Method

    cfg = setup.cfg.method
    intervention: Any = intervention_class(cfg.intervention)
    return Method(
        setup.cfg,
        intervention.make(setup),
        make_monitor(setup, cfg.monitor_name),
        setup.policy,
        shadows={name: make_monitor(setup, name) for name in cfg.in_shadow},
    )


def make_monitor(setup: Setup, name: str) -> Monitor:
    """A monitor of this name, with a seed of its own where it learns from one. Raises Refused as `make_method`."""
    monitor: Any = monitor_class(name)
    seeded = (
        {"seed_monitor": make_monitor(setup, setup.cfg.method.seed_monitor)}
        if "seed" in monitor.needs
        else {}
    )
    return monitor.make(setup, **seeded)


def register_monitor(monitor: M) -> M:
    """Let `--monitor` find a class of your own, in this process, by its `name`. On the command line module:Class does
    the same. Raises Refused for a name that is none, or one of the package's own."""
    register(MONITORS, monitor)
    return monitor


def register_intervention(intervention: I) -> I:
    """The same for `--intervention`."""
    register(INTERVENTIONS, intervention)
    return intervention
