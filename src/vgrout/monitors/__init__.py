"""Who is flagged: one class a monitor, found by its row in `vgrout.config.arm.MONITORS`."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from vgrout.config.arm import MONITORS
from vgrout.config.run import Config
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.monitors.base import Monitor, RandomFlags
from vgrout.monitors.online_probe import OnlineProbe
from vgrout.monitors.quarantine import Quarantine
from vgrout.types import Problem


def monitor_class(name: str) -> Any:
    """The class behind `--monitor`. Raises ValueError for one that is not registered."""
    if name not in MONITORS:
        raise ValueError(f"--monitor {name}: no such monitor in config/arm.py; there are {', '.join(MONITORS)}")
    file, _, of = (MONITORS[name].at or "base:Monitor").partition(":")
    return getattr(import_module(f"vgrout.monitors.{file}"), of)


def make_monitor(cfg: Config, policy: Policy, inputs: Inputs, grader: Grader, problems: Sequence[Problem]) -> Monitor:
    """The monitor that `cfg` asks for, of those that decide before the gradient.

    Raises:
        ValueError: files that do not fit this model, or a base that is paid for nothing; one line.
    """

    def named(name: str) -> Monitor:
        return monitor_class(name).make(cfg, policy, inputs, grader, problems)

    name = cfg.arm.monitor_name
    if name == Quarantine.name:
        return Quarantine.make(cfg, policy, inputs, grader, problems, seed_of=named)
    if name == OnlineProbe.name:
        monitor: Monitor = OnlineProbe.make(cfg, policy, inputs, grader, problems, seed_of=named)
    else:
        monitor = named(name)
    return RandomFlags(monitor, cfg.env.pass_reward, cfg.run.seed) if cfg.arm.random_flags else monitor
