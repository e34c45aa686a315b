"""Classes as somebody might write them: WRONG ones, each with words of its refusal, and RIGHT ones.

`python own_classes.py` tries each as a run does, and prints what became of it: the suite's own process checks the
shapes of what classes return before the package can.
"""

import collections
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vgrout.data import Flags
from vgrout.method.base import GradientFlags, Intervention, Monitor, flags_of, positions, rewarded
from vgrout.method.gates import Gate
from vgrout.method.interventions import Penalty, Route2
from vgrout.tensor_types import Routed

WRONG: dict[str, tuple[type, str, dict[str, Any]]] = {}
RIGHT: dict[str, tuple[type, dict[str, Any]]] = {}


def wrong(says: str, **flags: Any) -> Any:
    """Refused with this text in the line."""

    def add(cls: type) -> type:
        WRONG[cls.__name__] = (cls, says, flags)
        return cls

    return add


def right(**flags: Any) -> Any:
    def add(cls: type) -> type:
        RIGHT[cls.__name__] = (cls, flags)
        return cls

    return add


def nothing(views: Any) -> list[Flags]:
    return flags_of(views, ())


# ── a monitor that is never asked, or cannot be


@wrong("did you mean flag(views, step)?")
class Misspelt(Monitor):
    def flags(self, views, step):
        return nothing(views)


@wrong("did you mean flag(views, step)?")
class Capital(Monitor):
    def Flag(self, views, step):
        return nothing(views)


@wrong("has no flag(views, step) of its own")
class Empty(Monitor):
    pass


@wrong("has no flag(views, step) of its own")
class Other(Monitor):
    def detect(self, views, step):
        return nothing(views)


@wrong("is called as flag(views, step)")
class FewerArguments(Monitor):
    def flag(self, views):
        return nothing(views)


@wrong("is called as flag(views, step)")
class MoreArguments(Monitor):
    def flag(self, views, step, threshold):
        return nothing(views)


@wrong("should not be async")
class Async(Monitor):
    async def flag(self, views, step):
        return nothing(views)


@wrong("should be a method")
class NoMethod(Monitor):
    flag: Any = 3


@wrong("it is made as NeedsArguments()")
class NeedsArguments(Monitor):
    def __init__(self, threshold):
        self.threshold = threshold

    def flag(self, views, step):
        return nothing(views)


@wrong("should be a @classmethod")
class PlainMake(Monitor):
    def make(self, setup):
        return self

    def flag(self, views, step):
        return nothing(views)


@wrong("MakesNothing.make returned None")
class MakesNothing(Monitor):
    @classmethod
    def make(cls, setup):
        cls()

    def flag(self, views, step):
        return nothing(views)


@wrong("MakesAnother.make returned a Monitor")
class MakesAnother(Monitor):
    @classmethod
    def make(cls, setup):
        return Monitor()

    def flag(self, views, step):
        return nothing(views)


@wrong("a comma makes the tuple")
class SettingsText(Monitor):
    settings = "monitor_quantile"

    def flag(self, views, step):
        return nothing(views)


@wrong("names 'quantile', which is no setting")
class SettingsUnknown(Monitor):
    settings = ("quantile",)

    def flag(self, views, step):
        return nothing(views)


@wrong("one of texts, gradients")
class ReadsWhat(Monitor):
    reads = "text"

    def flag(self, views, step):
        return nothing(views)


@wrong("only a GradientMonitor")
class FlagsGradientsByItself(Monitor):
    """It would never be asked."""

    reads = "gradients"

    def flag_gradients(self, step, number):
        raise AssertionError("never called")


@wrong("only a GradientMonitor")
class ReadsGradients(Monitor):
    reads = "gradients"

    def flag(self, views, step):
        return nothing(views)


@wrong("should be True or False")
class SeesWhat(Monitor):
    sees_labels = "yes"

    def flag(self, views, step):
        return nothing(views)


@wrong("one line of text")
class WhatList(Monitor):
    what = ("a", "b")

    def flag(self, views, step):
        return nothing(views)


@wrong("without load_state_dict")
class HalfState(Monitor):
    def flag(self, views, step):
        return nothing(views)

    def state_dict(self):
        return {"n": torch.zeros(1)}


@wrong("without state_dict")
class OtherHalf(Monitor):
    def flag(self, views, step):
        return nothing(views)

    def load_state_dict(self, state):
        pass


@wrong("did you mean state_dict()?")
class StateMisspelt(Monitor):
    def flag(self, views, step):
        return nothing(views)

    def statedict(self):
        return {}


# ── a monitor that answers wrongly


@wrong("returned None")
class ReturnsNone(Monitor):
    def flag(self, views, step):
        nothing(views)


@wrong("returned 0 entries for 2 groups")
class ReturnsNothing(Monitor):
    def flag(self, views, step):
        return []


@wrong("returned a list for group 0")
class Bools(Monitor):
    def flag(self, views, step):
        return [[True] * len(view) for view in views]


@wrong("flagged 3 rollouts of group 0, which has 4")
class Short(Monitor):
    def flag(self, views, step):
        return [Flags((False,) * (len(view) - 1)) for view in views]


@wrong("flagged 8 rollouts of group 0")
class Flat(Monitor):
    def flag(self, views, step):
        return [Flags((False,) * sum(map(len, views))) for _ in views]


@wrong("not bools")
class Indices(Monitor):
    def flag(self, views, step):
        return [Flags((0, 2, 0, 2)) for _ in views]


@wrong("not bools")
class Texts(Monitor):
    def flag(self, views, step):
        return [Flags(("yes",) * len(view)) for view in views]


@wrong("not bools")
class ASet(Monitor):
    def flag(self, views, step):
        return [Flags({1, 2}) for _ in views]


@wrong("given (0, 99) among flagged")
class OutOfGroup(Monitor):
    def flag(self, views, step):
        return flags_of(views, {(0, 99)})


@wrong("given (0, -1) among flagged")
class FromTheEnd(Monitor):
    def flag(self, views, step):
        return flags_of(views, {(0, -1)})


@wrong("a pair (group, rollout)")
class OneIndex(Monitor):
    def flag(self, views, step):
        return flags_of(views, {0, 3})


@wrong("a pair (group, rollout)")
class Lists(Monitor):
    def flag(self, views, step):
        return flags_of(views, [[0, 1]])


@wrong("no finite number or None")
class NanScore(Monitor):
    def flag(self, views, step):
        scores = dict.fromkeys(positions(views), float("nan"))
        return flags_of(views, (), scores)


@wrong("gave 1 scores of group 0")
class FewScores(Monitor):
    def flag(self, views, step):
        return [Flags((False,) * len(view), (0.5,)) for view in views]


@wrong("gave shares")
class Shares(Monitor):
    def flag(self, views, step):
        return [Flags((False,) * len(view), (), (0.5,) * len(view)) for view in views]


@wrong("returned a generator")
class Yields(Monitor):
    def flag(self, views, step):
        yield from nothing(views)


@wrong("returned a dict")
class ByGroup(Monitor):
    def flag(self, views, step):
        return dict(enumerate(nothing(views)))


@wrong("returned 0 entries for 2 groups", monitor="none", intervention="none", shadow="OnlyShadow")
class OnlyShadow(Monitor):
    def flag(self, views, step):
        return []


@wrong("has an int under 'n'")
class StateOfInts(Monitor):
    def flag(self, views, step):
        return nothing(views)

    def state_dict(self):
        return {"n": 3}

    def load_state_dict(self, state):
        pass


@wrong("should return a Refresh")
class RefreshesNothing(Monitor):
    def flag(self, views, step):
        return nothing(views)

    def refresh(self, step):
        self.seen = step


@wrong("measures is a list")
class MeasuresList(Monitor):
    measures: Any = ["gate"]  # noqa: RUF012

    def flag(self, views, step):
        return nothing(views)


@wrong("with share [8,", intervention="route2")
class GateShape(Gate):
    def flag_gradients(self, step, number):
        found = super().flag_gradients(step, number)
        return replace(found, share=found.share.T)


@wrong("outside of [0, 1]", intervention="route2")
class GateOver(Gate):
    def flag_gradients(self, step, number):
        N = len(step.g)
        return GradientFlags(step.g.new_full((N, 1), 1.5), step.g.new_zeros(N))


@wrong("a bool for each", intervention="route2")
class GateKnown(Gate):
    def known_hacks(self, view):
        return [0]


# ── interventions


@wrong("did you mean route(step)?")
class RouteMisspelt(Intervention):
    def routed(self, step):
        return Routed(keep=step.total)


@wrong("has no route(step) or advantages(view, set_apart)")
class DoesNothing(Intervention):
    reads_flags = True


@wrong('is called only with acts_on = "rewards"')
class IdleReward(Intervention):
    acts_on, reads_flags = "gradient", True

    def reward(self, view, flagged):
        return view.rewards

    def route(self, step):
        return Routed(keep=step.total)


@wrong("no reward would change")
class NoReward(Intervention):
    acts_on, reads_flags = "rewards", True

    def route(self, step):
        return Routed(keep=step.total)


@wrong("reads_flags: should be True")
class RewardsBlind(Intervention):
    acts_on = "rewards"

    def reward(self, view, flagged):
        return view.rewards


@wrong("one of nothing, rewards, gradient")
class ActsOn(Intervention):
    acts_on, reads_flags = "reward", True

    def reward(self, view, flagged):
        return view.rewards


@wrong("is called as route(step)")
class RouteArguments(Intervention):
    def route(self, step, flags):
        return Routed(keep=step.total)


@wrong("it is made as InitArguments(spans, cfg, device)")
class InitArguments(Intervention):
    def __init__(self, factor):
        self.factor = factor

    def route(self, step):
        return Routed(keep=step.total)


@wrong('should be "gradient" where route reads flags')
class SumsFlagged(Intervention):
    reads_flags = True

    def route(self, step):
        return Routed(keep=(~step.flagged * step.g).sum(0))


@wrong("returned a float32 tensor [")
class RouteTensor(Intervention):
    def route(self, step):
        return step.total


@wrong("returned keep a float32 tensor [")
class KeepRows(Intervention):
    def route(self, step):
        return Routed(keep=step.g)


@wrong("returned keep a float32 tensor [")
class KeepShort(Intervention):
    def route(self, step):
        return Routed(keep=step.total[1:])


@wrong("returned keep a float64 tensor")
class KeepDouble(Intervention):
    def route(self, step):
        return Routed(keep=step.total.double())


@wrong("returned keep a list")
class KeepList(Intervention):
    def route(self, step):
        return Routed(keep=step.total.tolist())


@wrong("on meta")
class KeepElsewhere(Intervention):
    def route(self, step):
        return Routed(keep=step.total.to("meta"))


@wrong("not finite")
class KeepNan(Intervention):
    def route(self, step):
        return Routed(keep=step.total * float("nan"))


@wrong("not finite", monitor="detector")
class DividesByFlags(Intervention):
    """Finite as long as something is flagged."""

    acts_on, reads_flags = "gradient", True

    def route(self, step):
        return Routed(keep=(step.flagged * step.g).sum(0) / step.flagged.sum())


@wrong("does not say routes = True")
class QuarantineUnsaid(Intervention):
    def route(self, step):
        return Routed(keep=step.total / 2, quar=step.total / 2)


@wrong("returned quar a float32 tensor [")
class QuarantineShape(Intervention):
    routes = True

    def route(self, step):
        return Routed(keep=step.total, quar=step.g)


@wrong("should return 4 rewards")
class FewRewards(Intervention):
    acts_on, reads_flags, usual_monitor = "rewards", True, "detector"

    def reward(self, view, flagged):
        return view.rewards[:1]


@wrong("should return 4 rewards")
class NanRewards(Intervention):
    acts_on, reads_flags, usual_monitor = "rewards", True, "detector"

    def reward(self, view, flagged):
        return [float("nan") if of else r for of, r in zip(flagged, view.rewards, strict=True)]


@wrong("returned -1.0")
class OneReward(Intervention):
    acts_on, reads_flags, usual_monitor = "rewards", True, "detector"

    def reward(self, view, flagged):
        return -1.0


@wrong("should return 4 advantages")
class NoneAdvantages(Intervention):
    acts_on = "gradient"

    def advantages(self, view, set_apart):
        return [None] * len(view)


@wrong("a monitor's name")
class UsualMonitor(Intervention):
    acts_on, reads_flags, usual_monitor = "gradient", True, ("detector",)

    def route(self, step):
        return Routed(keep=step.total)


# ── right ones


@right()
class Plain(Monitor):
    def flag(self, views, step):
        return flags_of(views, {(i, b) for i, b in rewarded(views) if "x" in views[i].texts[b]})


@right()
class WithHelpers(Monitor):
    """Names of helpers that resemble a run's: a class that has flag may have them."""

    def flag(self, views, step):
        return self.flags(views)

    def flags(self, views):
        return nothing(views)


@right()
class OtherHelpers(Monitor):
    """Names of methods that only monitors of gradients have."""

    def known_hacks(self, texts):
        return [text for text in texts if "exit" in text]

    def flag(self, views, step):
        return nothing(views)


@right()
class OfNumpy(Monitor):
    def flag(self, views, step):
        found = []
        for view in views:
            lengths = np.array([len(text) for text in view.texts])
            found.append(Flags(lengths > lengths.mean(), tuple(lengths / lengths.max())))
        return found


@right()
class OfTorch(Monitor):
    def flag(self, views, step):
        rewards = [torch.tensor(view.rewards) for view in views]
        return tuple(Flags(tuple(of > of.mean())) for of in rewards)


@right()
class Counts(Monitor):
    """Remembers in itself, in its class, in its module and in the global random streams."""

    seen: collections.Counter[str] = collections.Counter()  # noqa: RUF012
    calls = 0

    def __init__(self):
        self.steps: list[int] = []

    def flag(self, views, step):
        self.steps.append(step)
        for view in views:
            Counts.seen.update(view.texts)
            LOG.append(len(view))
        Counts.calls += 1
        random.random()
        torch.rand(1)
        np.random.rand()
        return nothing(views)


LOG: list[int] = []


@right()
class Remembers(Monitor):
    def __init__(self):
        self.n = torch.zeros(1)

    def flag(self, views, step):
        self.n += len(views)
        return nothing(views)

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n.copy_(state["n"])


@right()
class Made(Monitor):
    settings = ("monitor_quantile",)

    def __init__(self, quantile):
        self.quantile = quantile

    @classmethod
    def make(cls, setup):
        return cls(setup.cfg.method.monitor_quantile)

    def flag(self, views, step):
        return nothing(views)


@right()
class Optional(Monitor):
    def __init__(self, threshold=0.5):
        self.threshold = threshold

    def flag(self, views, step=0, *more, **others):
        return nothing(views)


@right()
class Labels(Monitor):
    sees_labels = True

    def flag(self, views, step):
        return [Flags(view.hacked) for view in views]


@right()
class Inherited(Plain):
    pass


@right(intervention="route2")
class MyGate(Gate):
    def known_hacks(self, view):
        return [source == "teacher" for source in view.sources]


@right(monitor="detector")
class Halve(Intervention):
    acts_on, reads_flags = "gradient", True

    def route(self, step):
        weights = torch.where(step.flagged, 0.5, 1.0)
        return Routed(keep=(weights * step.g).sum(0))


@right(monitor="gate")
class Both(Intervention):
    reads_flags, routes, acts_on = True, True, "gradient"

    def route(self, step):
        f = step.flags.of_row[:, None]
        return Routed(keep=((1 - f) * step.g).sum(0), quar=(f * step.g).sum(0))


@right(monitor="detector")
class Minus(Intervention):
    acts_on, reads_flags = "rewards", True

    def reward(self, view, flagged):
        return [None if of else np.float32(r) for of, r in zip(flagged, view.rewards, strict=True)]


@right()
class Nothing(Intervention):
    """Learns nothing at all."""

    def route(self, step):
        return Routed()


@right(monitor="detector")
class Doubled(Penalty):
    def flagged_reward(self, reward, least):
        return -reward


@right(monitor="detector")
class Mine(Route2):
    def advantages(self, view, set_apart):
        return view.advantages


@right(monitor="detector")
class Set(Intervention):
    acts_on, reads_flags = "gradient", True

    def advantages(self, view, set_apart):
        return torch.tensor(view.advantages) * 2


def method_of(cls: type, policy: Any, flags: dict[str, Any]) -> Any:
    """The method of a run with this class, as `make_method` builds it. Raises what it raises."""
    from methods import config, problem, setup
    from vgrout.config.env import EnvConfig
    from vgrout.config.groups import ScaleConfig
    from vgrout.config.specs import INTERVENTION, MONITOR, register
    from vgrout.method import make_method

    is_monitor = issubclass(cls, Monitor)
    register(MONITOR if is_monitor else INTERVENTION, cls, f"own:{cls.__name__}")
    given = {"intervention": "penalty", "monitor": f"own:{cls.__name__}"} if is_monitor else {}
    if not is_monitor:
        given = {"intervention": f"own:{cls.__name__}"}
    given |= flags
    if "shadow" in given:
        given["shadow"] = f"own:{cls.__name__}"
    cfg = config(given.pop("intervention"), given.pop("monitor", "usual"), **given)
    cfg = replace(
        cfg,
        scale=ScaleConfig(max_new=64, prompts_per_step=2, group=4),
        env=EnvConfig(teacher_pool_dir="a pool", mix_ratio=0.25),
    )
    made = setup(cfg, policy)
    return make_method(replace(made, problems=[problem(i) for i in range(8)]))


def main() -> None:
    """Print what became of every class, by its name."""
    from unittest.mock import patch

    from tiny import policy as tiny_policy
    from vgrout.config.specs import INTERVENTIONS, MONITORS
    from vgrout.errors import Refused

    policy, became = tiny_policy(), dict[str, str]()
    every = [(cls, flags) for cls, _, flags in WRONG.values()] + [*RIGHT.values()]
    for cls, flags in every:
        before = torch.get_rng_state(), random.getstate()
        with patch.dict(MONITORS), patch.dict(INTERVENTIONS):
            try:
                method = method_of(cls, policy, flags)
                became[cls.__name__] = "fine"
                if cls is Remembers and method.monitor.n.item():
                    became[cls.__name__] = "remembers the trial"
                if cls is Counts:
                    same = torch.equal(before[0], torch.get_rng_state())
                    same = same and before[1] == random.getstate()
                    left = [method.monitor.steps, dict(Counts.seen), Counts.calls, LOG, same]
                    became[cls.__name__] = "fine" if left == [[], {}, 0, [], True] else str(left)
            except Refused as e:
                became[cls.__name__] = f"refused: {e}"
            except Exception as e:
                became[cls.__name__] = f"{type(e).__name__}: {e}"
    print(json.dumps(became))


if __name__ == "__main__":
    main()
