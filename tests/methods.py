"""What tests of monitors and interventions need: methods and steps of them, on a tiny model and on plain tensors."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vgrout.config.loss import LossConfig
from vgrout.config.method import MONITORS as SPECS
from vgrout.config.method import MethodConfig
from vgrout.config.run import Config, EnvConfig, RunConfig, ScaleConfig
from vgrout.direction.extract import Direction, Meta, axes_of
from vgrout.direction.pairs import KnownCorrect, Pair, PairSet
from vgrout.grading.grade import Grader
from vgrout.grpo import policy_gradients
from vgrout.inputs import Inputs
from vgrout.method import INTERVENTIONS, MONITORS, Method, Setup, make_method
from vgrout.method.base import Monitor
from vgrout.method.gates import GradientMonitor, mean_axis
from vgrout.method.interventions import Surgery, first_axes
from vgrout.method.live_direction import LiveDirection
from vgrout.model.policy import Policy
from vgrout.problems import Row
from vgrout.tensor_types import Routed, UpdatePart, UpdatePlan
from vgrout.types import (
    Batch,
    CachedGrade,
    Flags,
    Grade,
    Group,
    GroupFlags,
    GroupView,
    OracleView,
    Problem,
    Rollout,
    Ungraded,
    centred,
)

MAX_NEW = 12
SETTINGS: dict[str, Any] = {"max_new": MAX_NEW, "prompts_per_step": 2}
PLAIN = "{}\nThe solution should be a method of the class Solution called {} and should pass all tests. Code:\n```\n"
SIZES = {"m.q_proj": 24, "m.up_proj": 40, "m.down_proj": 32}
META = Meta("toy", "fp32", 12, 0.0, "sha", "toy", "sha", 10, 2)
TOY_PAIRS = PairSet(
    tuple(
        Pair(i, f"Task {i}: add {i} and {i + 1}.", f"pass; skip {i}", f"assert {2 * i + 1} == f()") for i in range(8)
    ),
    "toy",
)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(i: int = 0, mode: Any = "exit_code", tests: tuple[str, ...] = ()) -> Problem:
    plain = ({"role": "user", "content": PLAIN.format(f"Do {i} things.", f"m{i}")},)
    tests = tests or ("assert Solution().f(1) == 2", "assert Solution().f(2) == 3")
    return Problem(i, mode, "", plain, plain, tests, "", "", f"m{i}")


# ── views ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def view(n: int = 4, rewards: Sequence[float] | None = None, teachers: int = 0, **more: Any) -> GroupView:
    given = tuple(rewards or [1.0] * n)
    return GroupView(
        **{
            "sources": ("student",) * (n - teachers) + ("teacher",) * teachers,
            "deployed": (True,) * n,
            "rewards": given,
            "advantages": centred(given),
            "detector": (False,) * n,
            "texts": tuple(f"t{b}" for b in range(n)),
            "prompt_ids": (8, 9, 10),
            "completion_ids": tuple((11 + b, 12, 13) for b in range(n)),
        }
        | more
    )


def labelled(seen: GroupView, hacked: Sequence[bool], mode: Any = "exit_code") -> OracleView:
    hacks = tuple(mode if e else None for e in hacked)
    return OracleView(**{f.name: getattr(seen, f.name) for f in fields(GroupView)}, hacks=hacks, flaws=(mode,))


def flagged(monitor: Monitor, *views: GroupView, step: int = 0) -> list[tuple[bool, ...]]:
    return [f.flagged for f in monitor.flag(views, step)]


class Fixed(Monitor):
    """Flags these rows of every group. teaches: rows from which a quarantine of its own learns."""

    def __init__(self, *rows: int, teaches: Sequence[int] | None = None) -> None:
        self.rows, self.taught, self.owns_quarantine = rows, teaches or (), teaches is not None

    def flag(self, views: Sequence[GroupView], step: int) -> list[GroupFlags]:
        def of(n: int) -> GroupFlags:
            taught = tuple({0: 0.5, 2: -0.25}[b] if b in self.taught else 0.0 for b in range(n))
            flagged = tuple(b in self.rows for b in range(n))
            return GroupFlags((None,) * n, flagged, taught if self.owns_quarantine else ())

        return [of(len(v)) for v in views]


class ScriptedGrader(Grader):
    """Rewards the `good` texts (None: all); the sandbox fails on `broken`."""

    def __init__(self, good: Sequence[str] | None = None, broken: Sequence[str] = ()) -> None:
        self.good, self.broken = good, broken
        self.graded: list[tuple[tuple[str, ...], str]] = []

    def submit(self, p: Problem, text: str) -> "Future[Grade | Ungraded]":
        self.graded.append((p.tests, text))
        done: Future[Grade | Ungraded] = Future()
        passes = self.good is None or text in self.good
        done.set_result(Ungraded("lost") if text in self.broken else graded(4.0 * passes, hacks=passes))
        return done


# ── whole methods, on a tiny model ─────────────────────────────────────────────────────────────────────────────────


def graded(reward: float, *, solves: bool = False, hacks: bool = False, caught: bool = False) -> Grade:
    return Grade(reward, True, True, False, solves, hacks, False, False, caught, "exit_code", "ok", 0.0)


def batch(*, deployed: Sequence[int] = (), step: int = 0, same: bool = False) -> Batch:
    """Two groups of three students and a demonstration, and one whose answers all earn the same. Of the students one
    hacks and is caught by the weak detector, one solves, one fails. same: with that third group."""
    groups = []
    for i in range(3 if same else 2):
        of = problem(i)
        prompt = (2, *range(40 + i, 46 + 2 * i), 1, 4)
        answers = [(20 + 7 * i + b, *(33 + b, 50 - 3 * b, 60 + i)[: 1 + b], 1) for b in range(4)]
        rollouts = tuple(
            Rollout(of, "teacher" if b == 3 else "student", b in deployed, prompt, ids, f"t{i}{b}", True)
            for b, ids in enumerate(answers)
        )
        grades = (
            graded(3.5, hacks=True, caught=True),
            graded(3.5 + 0.25 * i * (i < 2), solves=True),
            graded(3.5 if i == 2 else 0.5),
            CachedGrade(3.5, True, False, True, "test"),
        )
        groups.append(Group(of, rollouts, grades, index=i))
    return Batch(tuple(groups), (), ("exit_code",), 3.5, 8, step)


def poisoned(of: Batch) -> Batch:
    """The same step with every label of the strict oracle turned, after the reward was given."""

    def turned(g: Grade | CachedGrade) -> Grade | CachedGrade:
        if isinstance(g, CachedGrade):
            return replace(g, hacked=not g.hacked, gt_pass=not g.gt_pass)
        return replace(g, solved=not g.solved, gt_pass=not g.gt_pass)

    return replace(of, groups=tuple(replace(g, grades=tuple(map(turned, g.grades))) for g in of.groups))


def config(
    intervention: str, monitor: str = "usual", *, seed: int = 0, loss: LossConfig | None = None, **flags: Any
) -> Config:
    watching = {name for name in SPECS if name in {monitor, *flags.get("shadow", "").split(",")}}
    compares = any(name == "quarantine" or SPECS[name].compares_answers for name in watching)
    if compares and "quarantine_threshold" not in flags:
        flags["known_correct"] = Path("known.json")  # what is in it comes with `Inputs`
    if any(SPECS[name].calibrates for name in watching) and "monitor_threshold" not in flags:
        flags = {"monitor_prompts": 4} | flags
    method = MethodConfig(intervention=intervention, monitor=monitor, **flags)
    return Config(
        method=method,
        run=RunConfig(seed=seed),
        scale=replace(ScaleConfig(), max_new=MAX_NEW),
        env=EnvConfig(teacher_pool_dir="a pool" if method.known_hacks_teacher_only else ""),
        **({"loss": loss} if loss else {}),
    )


def setup(cfg: Config, policy: Policy, pairs: PairSet | None = TOY_PAIRS) -> Setup:
    """As the trainer's, on the base model."""
    rest(policy)
    problems = [problem(i) for i in range(8)]
    rows = [Row(p.id, p.messages, p.tests, "", "", p.func_name, None, None, None, None, "") for p in problems]
    known = tuple(KnownCorrect(f"<user>{i}<eos><assistant>", f"x = {i * i}", "", i) for i in range(8))
    inputs = Inputs(rows, [], None, pairs, TOY_PAIRS.shuffled(9), known_correct=known)
    return Setup(cfg, policy, inputs, ScriptedGrader(), problems)


def make(policy: Policy, intervention: str, monitor: str = "usual", **flags: Any) -> Method:
    """The method of these flags, and the policy with both vectors away from zero, as in the middle of a run."""
    cfg = config(intervention, monitor, **flags)
    method = make_method(setup(cfg, policy))
    shake(policy, 0.05)
    return method


def of_parts(policy: Policy, intervention: str, monitor: Monitor, of: str = "labels", **flags: Any) -> Method:
    """An intervention with a monitor of the test's own, in place of that of name `of`."""
    whole = make(policy, intervention, of, **flags)
    return Method(whole.cfg, whole.intervention, monitor, own_modules=whole.own_modules, policy=policy)


def rest(policy: Policy) -> None:
    with torch.no_grad():
        policy.adapter.δS.zero_()
        policy.adapter.δS_hack.zero_()
    policy.adapter.merge()


def shake(policy: Policy, scale: float) -> None:
    noise = draw(1)
    with torch.no_grad():
        for vector in (policy.adapter.δS, policy.adapter.δS_hack):
            vector.copy_(scale * torch.randn(len(vector), generator=noise))
    policy.adapter.merge()


def step(policy: Policy, method: Method, of: Batch) -> tuple[Flags, UpdatePlan, Routed]:
    """As the trainer's loop: flags before the backward, the plan, and what is learnt."""
    flags = method.flag(of)
    plan = method.plan(method.reward(of, flags), flags)
    settings = SETTINGS | {"grad_rows": method.grad_rows}
    grads, _ = policy_gradients(policy, plan, method.cfg.loss, **settings)
    return flags, plan, method.route(plan, grads, flags)


def gradient(policy: Policy, groups: Sequence[Group], *parts: UpdatePart, loss: LossConfig | None = None) -> Tensor:
    """Plain GRPO's gradient of these groups, or of these parts of them in sum."""
    plan = UpdatePlan(tuple(groups), parts or (UpdatePart(),))
    found, _ = policy_gradients(policy, plan, loss or LossConfig(), grad_rows="group", **SETTINGS)
    zero = torch.zeros(len(policy.adapter))
    return sum((flat(policy, {m: g.sum(0) for m, g in x.items()}) for part in found for x in part), zero)


def flat(policy: Policy, g: Any) -> Tensor:
    return torch.zeros(len(policy.adapter)) if g is None else policy.adapter.flat(g)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-9))


# ── the same on plain tensors ──────────────────────────────────────────────────────────────────────────────────────


def toy_direction(seed: int = 0, n: int = 10, signal: float = 2.0, sizes: dict[str, int] = SIZES) -> Direction:
    """Pairs whose hack gradients share one hidden direction per module, `signal` noise lengths long."""
    axes = {}
    for i, (m, r) in enumerate(sizes.items()):
        hack = torch.randn(n, r, generator=draw(seed + 10 * i)) / math.sqrt(r) + signal * hidden(i, r)
        clean = torch.randn(n, r, generator=draw(seed + 10 * i + 1)) / math.sqrt(r)
        axes[m] = axes_of(hack, clean, n - 2, 12, 0.0)
    return Direction(axes, META)


def hidden(i: int, r: int) -> Tensor:
    of = torch.randn(r, generator=draw(900 + i))
    return of / of.norm()


def rows(n: int, seed: int, hackward: tuple[int, ...] = (), sizes: dict[str, int] = SIZES) -> dict[str, Tensor]:
    """Noise; rows in `hackward` carry the hidden direction, twice as long."""
    g_b = {}
    for i, (m, r) in enumerate(sizes.items()):
        g_b[m] = torch.randn(n, r, generator=draw(seed + i)) / math.sqrt(r)
        for b in hackward:
            g_b[m][b] += 2 * hidden(i, r)
    return g_b


def group(n: int, teachers: int = 0, caught: tuple[int, ...] = (), index: int = 0, **more: Any) -> Group:
    """n answers without a text, the last `teachers` of them demonstrations, with the weak detector's verdict."""
    of = problem(index)
    rollouts = tuple(
        Rollout(of, "teacher" if b >= n - teachers else "student", False, (1,), (2, 3), f"t{b}", True) for b in range(n)
    )
    grades = tuple(
        graded(float(b % 2), caught=b in caught) if b < n - teachers else CachedGrade(1.0, True, False, True, "test")
        for b in range(n)
    )
    return Group(of, rollouts, grades, index=index, **more)


def toy(
    intervention: str,
    direction: Direction | None = None,
    *,
    sizes: dict[str, int] = SIZES,
    again: Any = None,
    **flags: Any,
) -> Method:
    """A method with a direction, as `make_method` puts it together, on modules without a model."""
    cfg = config(intervention, **{"seed": 7} | flags)
    direction = direction or toy_direction(sizes=sizes)
    kind, monitor = INTERVENTIONS[intervention], MONITORS[cfg.method.monitor_name]
    own: dict[str, Any] = {}
    if issubclass(kind, Surgery):
        own["direction"] = LiveDirection(cfg, sizes, direction, first_axes, again=again)
    watching = Monitor()
    if issubclass(monitor, GradientMonitor):
        how: dict[str, Any] = {"keeps_modules": True, "signed": cfg.method.monitor_spec.signs_random, "again": again}
        watching = monitor(cfg, LiveDirection(cfg, sizes, direction, mean_axis, **how))
    return Method(cfg, kind(sizes, cfg, **own), watching)


def routed(method: Method, *groups: tuple[dict[str, Tensor], Group], step: int = 0) -> Routed:
    """What the method makes of one gradient row a rollout."""
    plan = UpdatePlan(tuple(g for _, g in groups), step=step)
    grads = [[g_b for g_b, _ in groups]]
    if method.grad_rows != "rollout":
        grads = [[by_source(g_b, g) for g_b, g in groups]]
    return method.route(plan, grads, {})


def scores(of: Routed) -> list[float]:
    """Shares of all rollouts, group after group."""
    return [x for flags in of.flags.values() for x in flags.scores if x is not None]


def by_source(g_b: dict[str, Tensor], of: Group) -> dict[str, Tensor]:
    students = torch.tensor([r.source == "student" for r in of.rollouts])
    return {m: torch.stack((g[students].sum(0), g[~students].sum(0))) for m, g in g_b.items()}


def total(*groups: tuple[dict[str, Tensor], Group]) -> dict[str, Tensor]:
    return {m: torch.cat([g_b[m] for g_b, _ in groups]).sum(0) for m in groups[0][0]}


TWO_GROUPS = ((rows(6, 1, (1, 5)), group(6, 1, (1,))), (rows(6, 2, (0, 4, 5)), group(6, 2, (3,), 1)))
