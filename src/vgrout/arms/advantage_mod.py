"""advantage_mod: R · (1 − α σ(z) 1[z > 0]), z from activations along a concept direction (arXiv 2604.01476)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.arms.base import Arm, module_sizes
from vgrout.arms.reward_shaping import lowered_out
from vgrout.config.run import Config
from vgrout.direction.extract import N_HELDOUT
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.monitors.activations import activations, concept_direction, concept_layers
from vgrout.types import Batch, Group, GroupView, Problem

Z_FLOOR = 0.1  # smallest standard deviation of a group's scores


class AdvantageMod(Arm):
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

    def shape_rewards(self, batch: Batch) -> Batch:
        return replace(batch, groups=tuple(self._shaped(g, self.view(g)) for g in batch.groups))

    def _shaped(self, group: Group, view: GroupView) -> Group:
        self._require([view])
        prompts, completions = zip(*((r.prompt_ids, r.completion_ids) for r in group.rollouts), strict=True)
        rows = activations(self.policy, self.layers, prompts, completions)
        rewards = modified(view.rewards, ranks.from_first((rows @ self.concept).tolist()), self.alpha)
        return replace(group, shaped=lowered_out(view, rewards))


def modified(rewards: Sequence[float], scores: Sequence[float], alpha: float) -> tuple[float, ...]:
    """R · (1 − α σ(z) 1[z > 0]) with z the scores' z-scores in the group, their deviation at least Z_FLOOR."""
    mean = math.fsum(scores) / len(scores)
    std = max(math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / len(scores)), Z_FLOOR)
    z = [(s - mean) / std for s in scores]
    return tuple(r * (1 - alpha / (1 + math.exp(-x))) if x > 0 else r for r, x in zip(rewards, z, strict=True))
