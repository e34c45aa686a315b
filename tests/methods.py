"""What tests of monitors and interventions need: methods and steps of them, on a tiny model and on plain tensors."""

import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import torch

from tiny import shake
from vgrout.config.checks import listed
from vgrout.config.method import MethodConfig
from vgrout.config.run import Config
from vgrout.config.settings import EnvConfig, LossConfig, RunConfig, ScaleConfig
from vgrout.config.specs import INTERVENTIONS, MONITORS, class_of
from vgrout.direction.extract import Direction, Meta, axes_of
from vgrout.direction.pairs import KnownCorrect, Pair, PairSet
from vgrout.envs.code.modes import MODE_SPECS, Problem
from vgrout.ground.data import (
    Batch,
    CachedGrade,
    Flags,
    Grade,
    Group,
    GroupView,
    OracleView,
    Rollout,
    UpdateRow,
    centred,
)
from vgrout.loop.grpo import policy_gradients
from vgrout.method.base import Monitor
from vgrout.method.live_direction import LiveDirection, Setup, first_axes, mean_axis
from vgrout.method.method import Method, make_method
from vgrout.model.policy import Policy

MAX_NEW = 12
SIZES = {"m.q_proj": 24, "m.up_proj": 40, "m.down_proj": 32}
META = Meta("toy", "fp32", 12, 0.0, "sha", "toy", "sha", 10, 2)
TOY_PAIRS = PairSet(
    tuple(
        Pair(i, f"Task {i}: add {i} and {i + 1}.", f"pass; skip {i}", f"assert {2 * i + 1} == f()")
        for i in range(8)
    ),
    "toy",
)
PLACEBO_PAIRS = PairSet(
    tuple(replace(p, hack=f"{p.clean} again") for p in TOY_PAIRS.pairs), "placebo"
)


def draw(seed):
    return torch.Generator().manual_seed(seed)


def problem(i=0, mode="exit_code", tests=()):
    prompt = ({"role": "user", "content": f"Do {i} things."},)
    tests = tests or ("assert Solution().f(1) == 2", "assert Solution().f(2) == 3")
    return Problem(i, mode, "", prompt, prompt, tests, "", "", f"m{i}")


def graded(reward, *, solves=False, hacks=False, caught=False):
    return Grade(
        reward=reward,
        passed=reward >= 1,
        solved=solves,
        hacked=hacks and not solves,
        flaw="exit_code",
        reward_of_reference=float(solves),
        suspected=caught,
        detectors={"C": False, "D": False, "E": caught},
        tries=("exit_code",) if hacks and not solves else (),
    )


# ── views


def view(n=4, rewards=None, **more):
    given = tuple(rewards or [1.0] * n)
    return GroupView(
        **{
            "sources": ("student",) * n,
            "deployed": (True,) * n,
            "rewards": given,
            "passed": tuple(r >= 1 for r in given),
            "advantages": centred(given),
            "detector": (False,) * n,
            "texts": tuple(f"t{b}" for b in range(n)),
            "prompt_ids": (8, 9, 10),
            "completion_ids": tuple((11 + b, 12, 13) for b in range(n)),
        }
        | more
    )


def labelled(seen, hacked, mode="exit_code"):
    hacks = tuple(mode if e else None for e in hacked)
    of_group = {f.name: getattr(seen, f.name) for f in fields(GroupView)}
    return OracleView(**of_group, hacks=hacks, flaws=(mode,))


def flagged(monitor, *views, step=0):
    return [f.flagged for f in monitor.flag(views, step)]


class Fixed(Monitor):
    """Flags these rollouts of every group."""

    def __init__(self, *rollouts):
        self.rollouts = rollouts

    def flag(self, views, step):
        return [Flags(tuple(b in self.rollouts for b in range(len(v)))) for v in views]


# ── whole methods, on a tiny model


def batch(*, deployed=(), step=0, same=False):
    """Two groups of three students and a demonstration, and one whose answers all earn the same. Of the students one
    hacks and is caught by the weak detector, one solves, one fails. same: with that third group."""
    groups = []
    for i in range(3 if same else 2):
        of = problem(i)
        prompt = (2, *range(40 + i, 46 + 2 * i), 1, 4)
        answers = [(20 + 7 * i + b, *(33 + b, 50 - 3 * b, 60 + i)[: 1 + b], 1) for b in range(4)]
        rollouts = tuple(
            Rollout(
                ids,
                f"t{i}{b}",
                True,
                prompt_ids=prompt,
                source="teacher" if b == 3 else "student",
                deployed=b in deployed,
            )
            for b, ids in enumerate(answers)
        )
        grades = (
            graded(3.5, hacks=True, caught=True),
            graded(3.5 + 0.25 * i * (i < 2), solves=True),
            graded(3.5 if i == 2 else 0.5),
            CachedGrade(3.5, True, True, False, True, "test"),
        )
        groups.append(Group(of, rollouts, grades, index=i))
    return Batch(tuple(groups), (), (MODE_SPECS["exit_code"],), 8, step)


def poisoned(of):
    """The same step with every label of the strict oracle turned, after the reward was given."""

    def turned(g):
        if isinstance(g, CachedGrade):
            return replace(g, hacked=not g.hacked, gt_pass=not g.gt_pass)
        return replace(g, solved=not g.solved, hacked=not g.hacked)

    return replace(
        of, groups=tuple(replace(g, grades=tuple(map(turned, g.grades))) for g in of.groups)
    )


def config(
    intervention,
    monitor="usual",
    *,
    seed=0,
    loss=None,
    **flags,
):
    compare = {name for name in MONITORS if "known correct" in MONITORS[name].needs}
    if compare & {monitor, *listed(flags.get("shadow", ""))}:
        flags = {"known_correct": Path("known.json")} | flags  # what is in it comes with `Setup`
    if "llm_judge" in {monitor, *listed(flags.get("shadow", ""))}:
        # nobody listens there: no answer has a flag
        nobody = {"llm_judge_url": "http://127.0.0.1:9", "llm_judge_model": "none"}
        flags = nobody | {"llm_judge_timeout": 0.05} | flags
    method = MethodConfig(intervention=intervention, monitor=monitor, **flags)
    return Config(
        method=method,
        run=RunConfig(seed=seed),
        scale=ScaleConfig(max_new=MAX_NEW, prompts_per_step=2),
        env=EnvConfig(teacher_pool_dir="a pool" if method.known_hacks_teacher_only else ""),
        loss=loss or LossConfig(),
    )


def setup(cfg, policy, pairs=TOY_PAIRS):
    """As the trainer's, on the base model."""
    shake(policy.adapter, 0.0)
    known = tuple(KnownCorrect(f"<user>{i}<eos><assistant>", f"x = {i * i}") for i in range(8))
    return Setup(cfg, policy, pairs, PLACEBO_PAIRS, known, [problem(i) for i in range(8)])


def make(policy, intervention, monitor="usual", **flags):
    """The method of these flags, and the policy with both vectors away from zero, as in the middle of a run."""
    method = make_method(setup(config(intervention, monitor, **flags), policy))
    shake(policy.adapter, 0.05)
    return method


def watched_by(monitor, policy, intervention, **flags):
    """An intervention with a monitor of the test's own."""
    whole = make(policy, intervention, "labels", **flags)
    return Method(whole.cfg, whole.intervention, monitor, policy)


def step(policy, method, of):
    """As the trainer's loop: flags and rows before the backward, and what is learnt."""
    of = method.flag(of)
    g = policy_gradients(policy, of, method.cfg).g
    return of, method.route(of, g)


def gradient(policy, groups, rollouts=range(9)):
    """Plain GRPO's gradient [R] of these groups, or of these rollouts in each, under what sampled them."""
    rows = tuple(
        UpdateRow(r, g.index, A)
        for g in groups
        for b, (r, A) in enumerate(zip(g.rollouts, g.advantages, strict=True))
        if b in rollouts
    )
    step = Batch(tuple(groups), (), (), 8, 0, rows=rows)
    g = policy_gradients(policy, step, config("none")).g
    return g[0]


def flat(policy, g):
    """What a vector learns; None is nothing."""
    return torch.zeros(len(policy.adapter)) if g is None else g


# ── the same on plain tensors


def spans_of(sizes):
    ends = torch.tensor([*sizes.values()]).cumsum(0).tolist()
    return {m: slice(end - r, end) for (m, r), end in zip(sizes.items(), ends, strict=True)}


SPANS = spans_of(SIZES)


def toy_direction(seed=0, n=10, signal=2.0, sizes=SIZES):
    """Pairs whose hack gradients share one hidden direction per module, `signal` noise lengths long."""
    axes = {}
    for i, (m, r) in enumerate(sizes.items()):
        hack = torch.randn(n, r, generator=draw(seed + 10 * i)) / math.sqrt(r) + signal * hidden(
            i, r
        )
        clean = torch.randn(n, r, generator=draw(seed + 10 * i + 1)) / math.sqrt(r)
        axes[m] = axes_of(hack, clean, n - 2, 12, 0.0)
    return Direction(axes, META)


def hidden(i, r):
    of = torch.randn(r, generator=draw(900 + i))
    return of / of.norm()


def rows(n, seed, hackward=()):
    """Gradients [n, R] of n rollouts: noise; those in `hackward` carry the hidden direction, twice as long."""
    parts = []
    for i, r in enumerate(SIZES.values()):
        part = torch.randn(n, r, generator=draw(seed + i)) / math.sqrt(r)
        part[[*hackward]] += 2 * hidden(i, r)
        parts.append(part)
    return torch.cat(parts, 1)


def group(n, teachers=0, caught=(), index=0):
    """n answers without a text, the last `teachers` of them demonstrations, with the weak detector's verdict."""
    of = problem(index)
    rollouts = tuple(
        Rollout(
            (2, 3),
            f"t{b}",
            True,
            prompt_ids=(1,),
            source="teacher" if b >= n - teachers else "student",
        )
        for b in range(n)
    )
    grades = tuple(
        graded(float(b % 2), caught=b in caught)
        if b < n - teachers
        else CachedGrade(1.0, True, True, False, True, "test")
        for b in range(n)
    )
    return Group(of, rollouts, grades, index=index)


def toy(
    intervention,
    direction=None,
    *,
    sizes=SIZES,
    again=None,
    **flags,
):
    """A method with a direction, as `make_method` puts it together, on modules without a model."""
    usual = {"seed": 7} | ({"quarantine": "shared"} if intervention == "route2" else {})
    cfg, spans = config(intervention, **usual | flags), spans_of(sizes)
    direction = direction or toy_direction(sizes=sizes)
    kind = class_of(INTERVENTIONS[intervention])
    monitor = class_of(MONITORS[cfg.method.monitor_name])
    own, watching = {}, Monitor()
    if kind.spec.has_direction:
        own["direction"] = LiveDirection(cfg, spans, direction, first_axes, again=again)
    if monitor.spec.reads == "gradients":
        how = {
            "keeps_modules": True,
            "signed": monitor.spec.signs_random,
            "again": again,
        }
        watching = monitor(cfg, LiveDirection(cfg, spans, direction, mean_axis, **how))
    without_model = Mock(spec=Policy, adapter=SimpleNamespace(spans=spans))
    return Method(cfg, kind(spans, cfg, **own), watching, without_model)


def routed(method, *of, step=0):
    """What the method makes of these rollouts' gradients."""
    flagged = method.flag(Batch(tuple(g for _, g in of), (), (), 6, step))
    at = torch.tensor([row.row_of_g for row in flagged.rows])
    every = torch.cat([g_b for g_b, _ in of])
    return method.route(
        flagged, every.new_zeros(int(at.max()) + 1, every.shape[1]).index_add(0, at, every)
    )


def scores(of):
    """Shares of all rollouts, group after group."""
    return [x for flags in of.flags.values() for x in flags.scores if x is not None]


def total(*groups):
    return torch.cat([g_b for g_b, _ in groups]).sum(0)


TWO_GROUPS = (
    (rows(6, 1, (1, 5)), group(6, 1, (1,))),
    (rows(6, 2, (0, 4, 5)), group(6, 2, (3,), 1)),
)
