"""What a monitor and an intervention must answer, held against every answer in every step.

A class of somebody's own is held to it before the first step as well, on a made-up step (`vgrout.method.trial`): there
a wrong answer is the user's mistake, and later a fault.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from vgrout.data import Flags, GroupView
from vgrout.method.base import (
    BrokenContract,
    GradientFlags,
    Intervention,
    Monitor,
    Part,
    Refresh,
    StepGradient,
    Views,
)
from vgrout.method.gates import GradientMonitor
from vgrout.method.live_direction import LiveDirection
from vgrout.tensor_types import Diagnostics, Routed


def _wrong(part: Part, method: str, did: str, should: str) -> BrokenContract:
    """The error that says where a class answered wrongly, what it did, and what it should do."""
    where = f"{type(part).__name__}.{method}{_place(part, method)}"
    return BrokenContract(f"{where} {did}; {should}", type(part))


def _place(part: Part, method: str) -> str:
    """Where a method is written, as " (file.py:12)"; "" where Python does not know."""
    try:
        function = getattr(type(part), method)
        file = Path(inspect.getsourcefile(function) or "").name
        return f" ({file}:{inspect.getsourcelines(function)[1]})"
    except (OSError, TypeError, AttributeError):
        return ""


P = TypeVar("P", bound=Part)


def made(part: object, cls: type[P]) -> P:
    """What a class's `make` returned, which has to be an instance of the class. Raises BrokenContract."""
    if not isinstance(part, cls):
        where = f"{cls.__name__}.make"
        should = f"it should return a {cls.__name__}"
        raise BrokenContract(f"{where} returned {_kind(part)}; {should}", cls)
    if not isinstance(part.measures, Set):
        should = "it should be a frozenset of words, as frozenset()"
        raise _wrong(part, "measures", f"is {_kind(part.measures)}", should)
    direction: object = part.direction
    if direction is not None and not isinstance(direction, LiveDirection):
        should = "it should be a LiveDirection, or None"
        raise _wrong(part, "direction", f"is {_kind(direction)}", should)
    return part


def flags_of_monitor(monitor: Monitor, views: Views, step: int) -> list[Flags]:
    """What a text monitor flags: one `Flags` a view. Raises BrokenContract."""
    if not views:  # a step in which every group was lost, or has no signal
        return []
    found = monitor.flag(views, step)
    should = "it should return a list of Flags, one a group, as flags_of(views, {(group, rollout), …}) makes it"

    def wrong(did: str) -> BrokenContract:
        return _wrong(monitor, "flag", did, should)

    if not isinstance(found, list | tuple):
        raise wrong(f"returned {_kind(found)}")
    if len(found) != len(views):
        raise wrong(f"returned {len(found)} entries for {len(views)} groups")
    flags: list[Flags] = []
    for i, (of_group, view) in enumerate(zip(found, views, strict=True)):
        if not isinstance(of_group, Flags):
            raise wrong(f"returned {_kind(of_group)} for group {i}")
        flags.append(_checked_flags(of_group, view, i, wrong))
    return flags


def _checked_flags(
    found: Flags, view: GroupView, i: int, wrong: Callable[[str], BrokenContract]
) -> Flags:
    """The flags of a group as Python's own bools and floats."""
    n = len(view)
    flagged = _bools(found.flagged)
    if flagged is None:
        raise wrong(f"flagged {_shown(found.flagged)} of group {i}, not bools")
    if len(flagged) != n:
        raise wrong(f"flagged {len(flagged)} rollouts of group {i}, which has {n}")
    scores: list[float | None] = []
    if not isinstance(found.scores, Sequence):
        raise wrong(f"gave {_kind(found.scores)} as the scores of group {i}")
    for score in found.scores:
        number = None if score is None else _number(score)
        if number is None and score is not None:
            raise wrong(f"gave the score {_shown(score)} in group {i}, no finite number or None")
        scores.append(number)
    if scores and len(scores) != n:
        raise wrong(f"gave {len(scores)} scores of group {i}, which has {n} rollouts")
    if found.shares:
        raise wrong(f"gave shares of group {i}, which the intervention decides")
    return Flags(flagged, tuple(scores))


def known_hacks(monitor: GradientMonitor, view: GroupView) -> tuple[bool, ...]:
    """What a gradient monitor knows before any gradient. Raises BrokenContract."""
    found = monitor.known_hacks(view)
    known = _bools(found)
    if known is None or len(known) != len(view):
        should = f"it should return a bool for each of the group's {len(view)} rollouts"
        raise _wrong(monitor, "known_hacks", f"returned {_shown(found)}", should)
    return known


def _is_own(part: Monitor | Intervention) -> bool:
    """Whether it is somebody's own class. The values in tensors are looked at only then: that waits for the GPU."""
    return not isinstance(part.spec.where, str)


def gradient_flags(
    monitor: GradientMonitor,
    step: StepGradient,
    number: int,
) -> GradientFlags:
    """What a gradient monitor flags. Raises BrokenContract."""
    found = monitor.flag_gradients(step, number)
    N = len(step.g)
    M = len(monitor.direction.V)
    should = f"it should return GradientFlags with share [{N}, {M}] or [{N}, 1] and of_row [{N}], in [0, 1]"

    def wrong(did: str) -> BrokenContract:
        return _wrong(monitor, "flag_gradients", did, should)

    if not isinstance(found, GradientFlags):
        raise wrong(f"returned {_kind(found)}")
    allowed_shapes: dict[str, list[tuple[int, ...]]] = {
        "share": [(N, M), (N, 1)],
        "of_row": [(N,)],
    }
    for name, shapes in allowed_shapes.items():
        value = getattr(found, name)
        if not isinstance(value, Tensor) or tuple(value.shape) not in shapes:
            raise wrong(f"gave {name} {_kind(value)}")
        if value.device != step.g.device or not value.is_floating_point():
            raise wrong(f"gave {name} {_kind(value)} on {value.device}")
        if _is_own(monitor):
            within = (value >= 0) & (value <= 1)  # False for NaN
            if not bool(within.all()):
                raise wrong(f"gave a {name} outside of [0, 1], or NaN")
    return found


def new_rewards(
    intervention: Intervention, view: GroupView, flagged: Sequence[bool]
) -> tuple[float | None, ...]:
    """The rewards that a group's advantages are computed from. Raises BrokenContract."""
    found = intervention.reward(view, flagged)
    rewards = _numbers(found, or_none=True)
    if rewards is None or len(rewards) != len(view):
        should = f"it should return {len(view)} rewards, one a rollout: finite numbers, or None to leave it out"
        raise _wrong(intervention, "reward", f"returned {_shown(found)}", should)
    return rewards


def advantages(
    intervention: Intervention, view: GroupView, set_apart: Sequence[bool]
) -> tuple[float, ...]:
    """The advantages that a group is trained with. Raises BrokenContract."""
    found = intervention.advantages(view, set_apart)
    given = _numbers(found, or_none=False)
    if given is None or len(given) != len(view):
        should = f"it should return {len(view)} advantages, one a rollout: finite numbers"
        raise _wrong(intervention, "advantages", f"returned {_shown(found)}", should)
    return tuple(A for A in given if A is not None)


def routed(intervention: Intervention, step: StepGradient) -> Routed:
    """What the adapter's two vectors learn. Raises BrokenContract."""
    found = intervention.route(step)
    R = step.g.shape[1]
    device = step.g.device
    dtype = str(step.g.dtype).removeprefix("torch.")
    vector = f"a {dtype} tensor [{R}] on {device}"
    should = f"it should return Routed(keep={vector}, quar=such a one where routes = True)"

    def wrong(did: str) -> BrokenContract:
        return _wrong(intervention, "route", did, should)

    if not isinstance(found, Routed):
        raise wrong(f"returned {_kind(found)}")
    for name in ("keep", "quar"):
        value = getattr(found, name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise wrong(f"returned {name} {_kind(value)}")
        strided = value.layout == torch.strided
        if value.shape != (R,) or value.dtype != step.g.dtype or not strided:
            raise wrong(f"returned {name} {_kind(value)}")
        if value.device != device:
            raise wrong(f"returned {name} on {value.device}")
        if _is_own(intervention) and not bool(value.isfinite().all()):
            raise wrong(f"returned a {name} that is not finite, from gradients that are")
    if found.quar is not None and not intervention.spec.routes:
        raise wrong("returned quar, and its class does not say routes = True")
    if not isinstance(found.diag, Diagnostics):
        raise wrong(f"returned diag {_kind(found.diag)}, no Diagnostics")
    return found


def refreshed(part: Part, step: int) -> Refresh:
    """The state of a direction after a step. Raises BrokenContract."""
    found = part.refresh(step)
    if not isinstance(found, Refresh):
        should = "it should return a Refresh of vgrout.method.base"
        raise _wrong(part, "refresh", f"returned {_kind(found)}", should)
    return found


def state_of(part: Part) -> Mapping[str, Tensor]:
    """What a checkpoint keeps of a part. Raises BrokenContract."""
    found = part.state_dict()
    should = "it should return a dict of tensors by name, which load_state_dict reads back"
    if not isinstance(found, Mapping):
        raise _wrong(part, "state_dict", f"returned {_kind(found)}", should)
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            did = f"has {_kind(value)} under {name!r}"
            raise _wrong(part, "state_dict", did, should)
    return found


# ── what a value is


def _kind(value: object) -> str:
    """A value's type, with the shape and the numbers' type of a tensor."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a {dtype} tensor {list(value.shape)}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _shown(value: object) -> str:
    """A short value, or what it is."""
    if isinstance(value, Tensor):
        return _kind(value)
    try:
        text = " ".join(repr(value).split())
    except Exception:  # somebody's own __repr__ may do anything
        return _kind(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _listed(values: object) -> list[object] | None:
    """A sequence's items; those of an array or a tensor as Python's own values. None: it is no sequence."""
    if isinstance(values, str | bytes | Mapping | set | frozenset):
        return None
    if isinstance(values, Sequence):
        return list(values)
    plain = getattr(values, "tolist", None)
    found = plain() if callable(plain) else None
    return found if isinstance(found, list) else None


def _plain(value: object) -> object:
    """A number of numpy's, or a tensor that holds a single number, as Python's own number."""
    item = getattr(value, "item", None)
    is_scalar = getattr(value, "shape", None) == ()
    if not callable(item) or not is_scalar:
        return value
    return item()


def _bools(values: object) -> tuple[bool, ...] | None:
    """Python's own bools; None: it is no sequence of bools."""
    items = _listed(values)
    if items is None:
        return None
    found: list[bool] = []
    for item in items:
        value = _plain(item)
        if not isinstance(value, bool):
            return None
        found.append(value)
    return tuple(found)


def _number(value: object) -> float | None:
    """A finite number as Python's own float; None: it is none."""
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        return None
    try:
        number = float(plain)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _numbers(values: object, *, or_none: bool) -> tuple[float | None, ...] | None:
    """Finite numbers, and None where that is allowed; None: it is no sequence of such."""
    items = _listed(values)
    if items is None:
        return None
    found: list[float | None] = []
    for value in items:
        number = None if value is None else _number(value)
        if number is None and not (or_none and value is None):
            return None
        found.append(number)
    return tuple(found)
