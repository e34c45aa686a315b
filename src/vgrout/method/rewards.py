"""Interventions that change the rewards from which a group's advantages are computed.

    screen     flagged rollouts are left out of their group
    penalty    R − penalty, or at most the compile reward, for flagged rollouts

A demonstration whose reward would be lowered is left out. The gradient is plain GRPO's.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch

from vgrout.config.run import Config
from vgrout.method.base import Intervention, Rewards
from vgrout.types import GroupFlags, GroupView


class Treatment(Intervention):
    """Base of both. Every group counts: where all answers earn the same, a flag may give a signal."""

    def reward(self, view: GroupView, flags: GroupFlags) -> Rewards:
        rewards = tuple(self._flagged(r) if f else r for r, f in zip(view.rewards, flags.flagged, strict=True))
        return lowered_out(view, rewards)

    @abstractmethod
    def _flagged(self, reward: float) -> float | None:
        """The reward of a flagged rollout in place of `reward`; None: it is left out."""


class Screen(Treatment):
    """Flagged rollouts are excluded from their group."""

    name = "screen"

    def _flagged(self, reward: float) -> float | None:
        return None


class Penalty(Treatment):
    """Flagged rollouts are rewarded less: by --penalty, or down to the reward of code that only compiles."""

    name = "penalty"

    def __init__(self, sizes: Mapping[str, int], cfg: Config, device: torch.device | str = "cpu") -> None:
        super().__init__(sizes, cfg, device)
        self.by, self.floor = cfg.method.penalty, cfg.env.compile_reward

    def _flagged(self, reward: float) -> float | None:
        return min(reward, self.floor) if self.by is None else reward - self.by


def lowered_out(view: GroupView, rewards: Rewards) -> Rewards:
    """`rewards`, with None for demonstrations that they reward less than the grader did: those are not the policy's own
    answers, and a negative advantage would push their log-prob down without bound."""
    lowered = (
        source == "teacher" and new is not None and new < own
        for source, new, own in zip(view.sources, rewards, view.rewards, strict=True)
    )
    return tuple(None if low else r for low, r in zip(lowered, rewards, strict=True))
