"""What a monitor is: it says who is flagged. One kind decides before any gradient, by `flags`; the other, in gate.py,
by the cosines of the gradients.

What a monitor may see of a group is its view's type (`sees`). Only one that says so is given true labels.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from vgrout.config.run import Config
from vgrout.direction.controls import Provenance
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.rng import torch_stream
from vgrout.types import GroupFlags, GroupView, Problem

At = tuple[int, int]  # group, rollout


class Monitor:
    """none: flags nobody, and the base of all that decide before the gradient."""

    name = "none"
    sees: type[GroupView] = GroupView
    provenance: Provenance | None = None  # of its direction; None: it has none
    learns = False  # whether it reads with the quarantine, which then learns from rows that the monitor names

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader, problems: Sequence[Problem]
    ) -> "Monitor":
        """The monitor that `cfg` asks for. grader, problems: training problems, for one that has the base model answer
        some of them first. Raises ValueError, one line, for files that do not fit this model."""
        return cls()

    def flags(self, views: Sequence[GroupView], step: int) -> list[GroupFlags]:
        """One a group, in the views' order. Every random draw is a function of the run's seed and `step`."""
        return [unscored((False,) * len(view)) for view in views]

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a resume, between steps; empty for a monitor without memory."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` is of another monitor."""
        if state:
            raise ValueError(f"checkpoint has monitor state {sorted(state)[0]!r}, --monitor {self.name} has none")


class RandomFlags(Monitor):
    """The random_flags control: the same number of flags, dealt in each step among the rollouts that are paid or were
    flagged."""

    def __init__(self, inner: Monitor, paid: float, seed: int) -> None:
        self.inner, self.paid, self.seed = inner, paid, seed
        self.name, self.sees, self.provenance, self.learns = inner.name, inner.sees, inner.provenance, inner.learns

    def flags(self, views: Sequence[GroupView], step: int) -> list[GroupFlags]:
        given = self.inner.flags(views, step)
        could = [at for at in positions(views) if views[at[0]].rewards[at[1]] >= self.paid or _flagged(given, at)]
        order = torch.randperm(len(could), generator=torch_stream(self.seed, "mass-matched", step)).tolist()
        dealt = {could[j] for j, source in enumerate(order) if _flagged(given, could[source])}
        return [
            GroupFlags(of_group.scores, tuple((i, b) in dealt for b in range(len(view))), of_group.teaches)
            for i, (view, of_group) in enumerate(zip(views, given, strict=True))
        ]

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.inner.load_state_dict(state)


def unscored(flagged: Sequence[bool]) -> GroupFlags:
    """Flags of a monitor that has no scores."""
    return GroupFlags((None,) * len(flagged), tuple(flagged))


def positions(views: Sequence[GroupView]) -> list[At]:
    """Every rollout of the step."""
    return [(i, b) for i, view in enumerate(views) for b in range(len(view))]


def paid_positions(views: Sequence[GroupView], paid: float) -> list[At]:
    """Those that are paid: reward is visible, and only they can be exploits that are learnt."""
    return [(i, b) for i, b in positions(views) if views[i].rewards[b] >= paid]


def at_random(paid: Sequence[At], like: Collection[At], generator: torch.Generator) -> set[At]:
    """Of each group as many paid rollouts, drawn at random, as `like` has in it, or all of them."""
    chosen: set[At] = set()
    for group in dict.fromkeys(i for i, _ in paid):
        of_group = [at for at in paid if at[0] == group]
        n = min(sum(i == group for i, _ in like), len(of_group))
        chosen |= {of_group[j] for j in torch.randperm(len(of_group), generator=generator).tolist()[:n]}
    return chosen


def _flagged(flags: Sequence[GroupFlags], at: At) -> bool:
    return flags[at[0]].flagged[at[1]]
