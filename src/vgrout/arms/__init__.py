"""What is done about what is flagged: one class an arm, found by its row in `vgrout.config.arm.ARMS`."""

from collections.abc import Sequence
from importlib import import_module

from vgrout.arms.base import Arm, module_sizes
from vgrout.arms.direction_arm import DirectionArm, ShrinkageControl
from vgrout.config.arm import ARMS, CONTROLS, ArmConfig, ArmSpec, register
from vgrout.config.run import Config
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy, modules_of_block
from vgrout.types import Problem

_REGISTERED: dict[str, type[Arm]] = {}  # arms of one's own, by their names


def register_arm(arm: type[Arm], what: str, *, routes: bool = False) -> type[Arm]:
    """Let `--intervention` find an arm of one's own, in this process: by its `name`, with `what` as its line of help.

    routes: whether it hands anything to the quarantine δS_hack.

    Raises:
        ValueError: its name is none, or is one of the package's own arms.
    """
    register(arm.name, ArmSpec(what, routes=routes))
    _REGISTERED[arm.name] = arm
    return arm


def arm_class(cfg: ArmConfig) -> type[Arm]:
    """The class behind `--intervention`, for its monitor and control. Raises ValueError for an unknown one."""
    if cfg.intervention in _REGISTERED:
        return _REGISTERED[cfg.intervention]
    if cfg.intervention not in ARMS:
        raise ValueError(
            f"--intervention {cfg.intervention}: no such arm in config/arm.py; there are {', '.join(ARMS)}"
        )
    spec, control = ARMS[cfg.intervention], CONTROLS[cfg.control]
    return _at(control.at or (spec.at if cfg.by_gradient or not spec.by_flags else spec.by_flags))


def _at(place: str) -> type[Arm]:
    """The class at "file:Class" in this folder."""
    file, _, name = place.partition(":")
    return getattr(import_module(f"vgrout.arms.{file}"), name)


def make_arm(cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]) -> Arm:
    """The arm that `cfg` asks for, on `policy`'s modules.

    Raises:
        ValueError: no pairs where they are needed, or a direction of other pairs or another model; one line.
    """
    arm = arm_class(cfg.arm).make(cfg, policy, inputs, grader, problems)
    if cfg.arm.quarantine_block is not None:
        arm.own_modules = frozenset(modules_of_block(policy, module_sizes(policy), cfg.arm.quarantine_block))
    if cfg.arm.control == "shrinkage":
        assert isinstance(arm, DirectionArm), cfg.arm.intervention
        return ShrinkageControl(arm)
    return arm
