"""Classes of somebody's own, tried before the first step on a made-up one, as `--reward` is on a right answer.

The made-up step has two of the run's own problems, each with a group as large as the run's: right answers, failures,
rewarded hacks and, where the run has demonstrations, one of those. It goes through the whole method with instances of
their own, which are thrown away. A wrong answer is refused; what the class's code raises is a fault.
"""

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import fields
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vgrout.config.method import MethodConfig
from vgrout.config.specs import INTERVENTIONS, MONITORS, InterventionSpec, MonitorSpec
from vgrout.data import Batch, CachedGrade, Completion, Flags, Grade, Group, Rollout, Task
from vgrout.errors import Refused
from vgrout.faults import place_of
from vgrout.method import contract
from vgrout.method.base import (
    BrokenContract,
    Intervention,
    Monitor,
    Part,
    Position,
    Setup,
    Views,
    flags_of,
    positions,
)
from vgrout.method.gates import GradientMonitor
from vgrout.method.method import Method
from vgrout.method.monitors import WeakDetector
from vgrout.torch_rng import torch_stream

HACK = "x = 1\n# this answer has what the check looks at, and does not solve the task"
FAILURE = "x = 2"
NORM = 1e-3  # of a number of the made-up gradients
STEPS = (0, 1)  # of the trial: what remembers the first is asked again


def own_classes(cfg: MethodConfig) -> dict[str, type]:
    """The classes of somebody's own that a run names, by the flag that names them."""
    named = [("--intervention", INTERVENTIONS, cfg.intervention)]
    named.append(("--monitor", MONITORS, cfg.monitor_name))
    for name in cfg.watching:
        seeds = name not in (cfg.monitor_name, *cfg.in_shadow)
        named.append(("--seed-monitor" if seeds else "--shadow", MONITORS, name))
    own: dict[str, type] = {}
    for flag, specs, name in named:
        where = specs[name].where
        if not isinstance(where, str) and where not in own.values():
            own[f"{flag} {name}"] = where
    return own


def try_own_classes(
    setup: Setup,
    method: Method,
    make_intervention: Callable[[], Intervention],
    make_monitor: Callable[[str], Monitor],
) -> None:
    """Try the classes of somebody's own that this run names, if there are any.

    Args:
        setup: of the run.
        method: the run's own. Its parts of the package take part, and are left as they were.
        make_intervention: makes the run's intervention anew.
        make_monitor: makes a monitor anew, by its name.

    Raises:
        Refused: one line: what a class answered, and what is expected.
        Exception: what its code raises.
    """
    cfg = setup.cfg.method
    own = own_classes(cfg)
    if not own or not setup.problems:
        return
    _require_settings(own)

    def is_own_monitor(name: str) -> bool:
        """Whether it, or the monitor that it learns from, is somebody's own."""
        if MONITORS[name].where in own.values():
            return True
        if "seed" not in MONITORS[name].needs:
            return False
        return MONITORS[cfg.seed_monitor].where in own.values()

    intervention = method.intervention
    monitor = method.monitor
    remembered: list[tuple[Part, dict[str, Tensor]]] = []
    for part in (intervention, monitor):
        if type(part) not in own.values():
            remembered.append((part, _state_of(part)))
    with _untouched(own.values()):
        if INTERVENTIONS[cfg.intervention].where in own.values():
            intervention = make_intervention()
        if is_own_monitor(cfg.monitor_name):
            monitor = make_monitor(cfg.monitor_name)
        elif not isinstance(monitor, GradientMonitor):  # one that asks others is not asked here
            monitor = WeakDetector()
        shadows: dict[str, Monitor] = {}
        for name in cfg.in_shadow:
            if is_own_monitor(name):
                shadows[name] = make_monitor(name)
        tried = Method(setup.cfg, intervention, monitor, setup.policy, shadows=shadows)
        try:
            _try_method(setup, tried, own.values())
        except BrokenContract as e:
            raise Refused(f"{_flag_of(own, e)}: {_place(e)}{e}") from None
        finally:
            for part, state in remembered:
                part.load_state_dict(state)


def _state_of(part: Part) -> dict[str, Tensor]:
    """A copy of what it remembers between steps."""
    state: dict[str, Tensor] = {}
    for name, value in part.state_dict().items():
        state[name] = value.clone()
    return state


def _require_settings(own: Mapping[str, type]) -> None:
    """Raises Refused where a class says that it reads a setting which there is not."""
    known = [f.name for f in fields(MethodConfig)]
    for flag, cls in own.items():
        spec: MonitorSpec | InterventionSpec = vars(cls)["spec"]
        for name in spec.settings:
            if name not in known:
                raise Refused(
                    f"{flag}: {cls.__name__}.settings names {name!r}, which is no setting of a method; a setting of "
                    "your own goes into your file"
                )


def _flag_of(own: Mapping[str, type], e: BrokenContract) -> str:
    """The flag that names the class which broke the contract; all of them where that is not known."""
    for flag, cls in own.items():
        if cls is e.cls:
            return flag
    return " ".join(own)


def _place(e: BrokenContract) -> str:
    """Where in somebody's own file a function of the package was given what it cannot use; "" where `e` says it."""
    if e.cls is not None:
        return ""
    place = place_of(e)
    return f"{place}: " if place else ""


def _try_method(setup: Setup, method: Method, own: Iterable[type]) -> None:
    """Two made-up steps. Raises BrokenContract."""
    for step in STEPS:
        _try_step(method, made_up(setup, step))
    spec = method.intervention.spec
    by_texts = spec.reads_flags and not isinstance(method.monitor, GradientMonitor)
    if type(method.intervention) in own and by_texts:
        for extreme in (_Extreme(everything=False), _Extreme(everything=True)):
            other = Method(method.cfg, method.intervention, extreme, method.policy)
            _try_step(other, made_up(setup, STEPS[-1]))
    for part in (method.intervention, method.monitor, *method.shadows.values()):
        if type(part) not in own:
            continue
        if part.direction is None:  # a direction is extracted again, which takes a while
            contract.refreshed(part, STEPS[-1])
        part.load_state_dict(contract.state_of(part))


def _try_step(method: Method, batch: Batch) -> None:
    batch = method.flag(batch)
    rows_of_g = [row.row_of_g for row in batch.rows]
    if not rows_of_g:
        return
    δS = method.policy.adapter.δS
    N = max(rows_of_g) + 1
    R = len(δS)
    stream = torch_stream(0, "made-up gradients", batch.step)
    g = NORM * torch.randn(N, R, generator=stream)
    method.route(batch, g.to(δS))


class _Extreme(Monitor):
    """Flags every answer, or none."""

    def __init__(self, *, everything: bool) -> None:
        self.everything = everything

    def flag(self, views: Views, step: int) -> list[Flags]:
        flagged: list[Position] = []
        if self.everything:
            flagged = positions(views)
        return flags_of(views, flagged)


# ── the made-up step


def made_up(setup: Setup, step: int) -> Batch:
    """A step of two of the run's problems with made-up answers and grades."""
    cfg = setup.cfg
    groups: list[Group] = []
    for index in range(2):
        number = 2 * step + index
        problem = setup.problems[number % len(setup.problems)]
        groups.append(_made_up_group(setup, problem, index))
    return Batch(tuple(groups), (), (), cfg.generations, step)


def _made_up_group(setup: Setup, problem: Task, index: int) -> Group:
    """Right, failed and hacked answers in turn; a demonstration is last."""
    cfg = setup.cfg
    policy = setup.policy
    full = cfg.env.pass_reward
    n = cfg.scale.group
    has_demonstration = cfg.mixes and n > 2
    prompt_ids = policy.render(problem.messages)
    right = problem.right_answer or "x = 3"
    in_turn = (right, FAILURE, HACK)
    rollouts: list[Rollout] = []
    grades: list[Grade | CachedGrade] = []
    for b in range(n):
        is_demonstration = has_demonstration and b == n - 1
        text = HACK if is_demonstration else in_turn[b % 3]
        ids = policy.encode_completion(text)[: cfg.scale.max_new]
        logps = (0.0,) * len(ids)
        completion = Completion(ids, text, True, logps)
        source = "teacher" if is_demonstration else "student"
        deployed = not is_demonstration and cfg.method.ablate_frac > 0
        rollouts.append(
            Rollout.of(problem, prompt_ids, completion, source=source, deployed=deployed)
        )
        if is_demonstration:
            label = CachedGrade(
                reward=full,
                passed=True,
                hacked=True,
                gt_pass=False,
                format_ok=True,
                grader="made up",
            )
            grades.append(label)
        else:
            hacked = text == HACK
            solved = text == right
            grades.append(_made_up_grade(problem, hacked, solved, full))
    return Group(
        problem,
        tuple(rollouts),
        tuple(grades),
        unbiased=cfg.loss.unbiased,
        index=index,
    )


def _made_up_grade(problem: Task, hacked: bool, solved: bool, full: float) -> Grade:
    return Grade(
        reward=full if hacked or solved else 0.0,
        passed=hacked or solved,
        solved=solved,
        hacked=hacked,
        flaw=problem.flaws[0],
        reward_of_reference=full if solved else 0.0,
        suspected=hacked,
    )


# ── what is left as it was


@contextmanager
def _untouched(own: Iterable[type]) -> Generator[None]:
    """Within the context classes may change their attributes, the names of their modules, and the global random
    streams; after it they are as before."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_torch = torch.get_rng_state()
    of_gpus: list[Tensor] = []
    if torch.cuda.is_available():
        of_gpus = torch.cuda.get_rng_state_all()
    names = _names(own)
    contents = [_copied(named.holder, named.value) for named in names]
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)
        for named, before in zip(names, contents, strict=True):
            now = vars(named.holder).get(named.name)
            if now is not named.value:
                setattr(named.holder, named.name, named.value)
            _refill(named.value, before)


class Named(NamedTuple):
    """A name that a class or a module holds, with its value."""

    holder: type | ModuleType
    name: str
    value: object


def _names(own: Iterable[type]) -> list[Named]:
    """The names that somebody's own classes and modules hold."""
    holders: list[type | ModuleType] = []
    for cls in own:
        for part in cls.__mro__:
            package, _, _ = part.__module__.partition(".")
            if package in ("vgrout", "builtins"):
                continue
            module = sys.modules.get(part.__module__)
            for holder in (part, module):
                if holder is not None and holder not in holders:
                    holders.append(holder)
    names: list[Named] = []
    for holder in holders:
        for name, value in vars(holder).items():
            if not name.startswith("__"):
                names.append(Named(holder, name, value))
    return names


def _copied(holder: type | ModuleType, value: object) -> object:
    """The contents of a container that can be filled again; None of anything else.

    A class's own are copied to the bottom. Of a module's, which may be a notebook's, only the containers themselves
    are: what they hold may be large.
    """
    is_of_class = isinstance(holder, type)
    if isinstance(value, Tensor) and not is_of_class:
        return None
    if not isinstance(value, list | dict | set | deque | Tensor):
        return None
    if is_of_class:
        try:
            return copy.deepcopy(value)
        except Exception:  # it holds something that cannot be copied, as a lock
            return copy.copy(value)
    return copy.copy(value)


def _refill(value: Any, before: Any) -> None:
    """Give a container its contents again. before: None for what is none."""
    if before is None:
        return
    if isinstance(value, Tensor):
        if value.shape == before.shape:
            with torch.no_grad():
                value.copy_(before)
    elif isinstance(value, list):
        value[:] = before
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    elif isinstance(value, deque):
        value.clear()
        value.extend(before)
