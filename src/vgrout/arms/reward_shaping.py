"""Baselines on plain GRPO: from what a group's advantages are made, in place of its rewards.

    gt_penalty      R − penalty, or at most the compile reward, where the monitor sees an exploit
    gt_screening    left out of the group where it does
    advantage_mod   R · (1 − α σ(z) 1[z > 0]), z from activations along a concept direction (arXiv 2604.01476)

A demonstration that would be paid less is left out. inoculation changes prompts, not rewards, and a KL term alone
(--beta) changes neither.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.arms.base import Arm, Rewards, module_sizes
from vgrout.config.run import Config
from vgrout.direction.extract import N_HELDOUT
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.monitors.activations import activations, concept_direction, concept_layers
from vgrout.monitors.labels import noisy_labels
from vgrout.types import Batch, Group, GroupView, OracleView, Problem

Z_FLOOR = 0.1  # smallest standard deviation of a group's scores


class ShapedRewards(Arm, ABC):
    """Base: what is paid is changed before advantages are made of it; the gradient is plain GRPO's."""

    @abstractmethod
    def _changed(self, group: Group, view: GroupView, step: int) -> Rewards:
        """The rewards of one group, in the view's order."""

    def shape_rewards(self, batch: Batch) -> Batch:
        groups = tuple(replace(g, shaped=self._shaped(g, self.view(g), batch.step)) for g in batch.groups)
        return replace(batch, groups=groups)

    def _shaped(self, group: Group, view: GroupView, step: int) -> Rewards:
        self._require([view])
        rewards = self._changed(group, view, step)
        # Not the policy's own answers: a negative advantage pushes their log-prob down without bound.
        lowered = (
            source == "teacher" and new is not None and new < paid
            for source, new, paid in zip(view.sources, rewards, view.rewards, strict=True)
        )
        return tuple(None if low else r for low, r in zip(lowered, rewards, strict=True))


class LabelBaseline(ShapedRewards):
    """Base of those that are given the true labels, with errors; of demonstrations the cached ones."""

    sees = OracleView

    def __init__(
        self, *args, seed: int, accuracy: float, penalty: float | None = None, floor: float = 0.0, **kwargs
    ) -> None:
        """penalty: what is taken off; None: all above `floor`, the reward of code that only compiles."""
        super().__init__(*args, **kwargs)
        self.seed, self.accuracy, self.penalty, self.floor = seed, accuracy, penalty, floor

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]
    ) -> "LabelBaseline":
        return cls(
            module_sizes(policy),
            policy.adapter.δS.device,
            cfg.arm.control_name,
            seed=cfg.run.seed,
            accuracy=cfg.arm.label_accuracy,
            penalty=cfg.arm.label_penalty,
            floor=cfg.env.compile_reward,
        )

    def flags(self, group: Group, view: GroupView, step: int) -> tuple[bool, ...]:
        assert isinstance(view, OracleView)
        return noisy_labels(view.exploited, self.accuracy, self.seed, step, group.index)


class Penalty(LabelBaseline):
    """Flagged rollouts are paid less."""

    def _changed(self, group: Group, view: GroupView, step: int) -> Rewards:
        flags = self.flags(group, view, step)
        return tuple(self._lowered(r) if flag else r for r, flag in zip(view.rewards, flags, strict=True))

    def _lowered(self, reward: float) -> float:
        return min(reward, self.floor) if self.penalty is None else reward - self.penalty


class Screening(LabelBaseline):
    """Flagged rollouts are excluded from their group."""

    def _changed(self, group: Group, view: GroupView, step: int) -> Rewards:
        flags = self.flags(group, view, step)
        return tuple(None if flag else r for r, flag in zip(view.rewards, flags, strict=True))


class AdvantageMod(ShapedRewards):
    """Multiplicative advantage modification. The source reads the policy's activations in a way that our notes do not
    settle: here the direction is the base model's and stays, the activations are the present policy's."""

    def __init__(
        self, *args, policy: Policy, concept: Float[Tensor, " D"], layers: Sequence[int], alpha: float, **kwargs
    ) -> None:
        super().__init__(*args, **kwargs)
        self.policy, self.concept, self.layers, self.alpha = policy, concept, layers, alpha

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]
    ) -> "AdvantageMod":
        pairs = inputs.pairs
        assert pairs is not None
        n = int(policy.model.config.num_hidden_layers)
        concept, along = concept_direction(policy, pairs, layers := concept_layers(n))
        held_out = along[-N_HELDOUT:]
        logger.info(
            f"concept direction of {pairs.source} at layers {layers} of {n}: hack above clean in "
            f"{sum(d > 0 for d in held_out)} of {len(held_out)} held-out pairs. SHOULD: all; ELSE it reads no hack"
        )
        return cls(
            module_sizes(policy),
            policy.adapter.δS.device,
            cfg.arm.control_name,
            policy=policy,
            concept=concept,
            layers=layers,
            alpha=cfg.arm.concept_alpha,
        )

    def _changed(self, group: Group, view: GroupView, step: int) -> Rewards:
        prompts, completions = zip(*((r.prompt_ids, r.completion_ids) for r in group.rollouts), strict=True)
        rows = activations(self.policy, self.layers, prompts, completions)
        return modified(view.rewards, ranks.from_first((rows @ self.concept).tolist()), self.alpha)


def modified(rewards: Sequence[float], scores: Sequence[float], alpha: float) -> tuple[float, ...]:
    """R · (1 − α σ(z) 1[z > 0]) with z the scores' z-scores in the group, their deviation at least Z_FLOOR."""
    mean = math.fsum(scores) / len(scores)
    std = max(math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / len(scores)), Z_FLOOR)
    z = [(s - mean) / std for s in scores]
    return tuple(r * (1 - alpha / (1 + math.exp(-x))) if x > 0 else r for r, x in zip(rewards, z, strict=True))
