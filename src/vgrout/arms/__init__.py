"""What is done with the gradient: one class an arm, and the registry by which `--intervention` finds it."""

from collections.abc import Mapping, Sequence

from vgrout.arms.base import Arm
from vgrout.arms.direction_arm import DirectionArm, ShrinkageControl
from vgrout.arms.erase import Erase
from vgrout.arms.reward_shaping import AdvantageMod, Penalty, Screening
from vgrout.arms.route import Route
from vgrout.arms.route2 import OracleRoute2, Route2
from vgrout.arms.text_routing import OracleTextRouting, TextRouting
from vgrout.config.arm import ArmConfig, ArmSpec, register
from vgrout.config.run import Config
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.types import Problem

# --intervention → its class. A new arm is a class and its line here; its name, help and flags are in config/arm.py.
ARMS: dict[str, type[Arm]] = {
    "none": Arm,
    "erase": Erase,
    "route": Route,
    "route2": Route2,
    "reader": TextRouting,
    "surprise": TextRouting,
    "pmi": TextRouting,
}
# … under a control that needs a class of its own
CONTROLS: Mapping[tuple[str, str], type[Arm]] = {
    ("none", "gt_penalty"): Penalty,
    ("none", "gt_screening"): Screening,
    ("none", "advantage_mod"): AdvantageMod,
    ("route2", "oracle"): OracleRoute2,
    ("reader", "oracle"): OracleTextRouting,
}


def register_arm(arm: type[Arm], what: str, *, routes: bool = False) -> type[Arm]:
    """Let `--intervention` find an arm of one's own, in this process: by its `name`, with `what` as its line of help.

    routes: whether it hands anything to the quarantine δS_hack.

    Raises:
        ValueError: its name is none, or is one of the package's own arms.
    """
    register(arm.name, ArmSpec(what, routes=routes))
    ARMS[arm.name] = arm
    return arm


def arm_class(cfg: ArmConfig) -> type[Arm]:
    """The class behind `--intervention` and `--control`. Raises ValueError for an arm that is not registered."""
    if (kind := CONTROLS.get((cfg.intervention, cfg.control))) is not None:
        return kind
    if cfg.intervention not in ARMS:
        raise ValueError(
            f"--intervention {cfg.intervention}: no such arm in arms/__init__.py; there are {', '.join(ARMS)}"
        )
    return ARMS[cfg.intervention]


def make_arm(cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]) -> Arm:
    """The arm that `cfg` asks for, on `policy`'s modules.

    Raises:
        ValueError: no pairs where they are needed, or a direction of other pairs or another model; one line.
    """
    arm = arm_class(cfg.arm).make(cfg, policy, inputs, grader, problems)
    if cfg.arm.control == "shrinkage":
        assert isinstance(arm, DirectionArm), cfg.arm.intervention
        return ShrinkageControl(arm)
    return arm
