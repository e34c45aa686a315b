"""Advantage modification (Wu & Tang 2026, arXiv 2604.01476): answers that look like a hack inside the model earn less.

    R'_b = R_b (1 − α σ(z_b) 1[z_b > 0]),  A' = the group's advantages by R'

z_b is the z-score, within its group, of the answer's mean hidden state along a concept direction, the unit mean of
hack − right answer over contrastive pairs. The formula is the paper's multiplicative form as the project's notes have
it. ◆ What they leave open: the state is one block's, of the present policy; the direction stays as it was before the
first step; a group's deviation counts as at least 0.1; a demonstration that would earn less is left out.

    uv run vgrout train mini --intervention examples.rivals.advantage_modification:AdvantageModification
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.run import Config
from vgrout.direction.pairs import PairSet
from vgrout.ground import ranks
from vgrout.ground.data import GroupView
from vgrout.ground.tensor_types import Spans
from vgrout.method.base import Intervention, Rewards
from vgrout.method.live_direction import Setup
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy

ALPHA = 2.0
LEAST_DEVIATION = 0.1
DEPTH = 0.75  # of the blocks


class AdvantageModification(Intervention):
    name = "advantage_modification"
    what = "answers whose hidden states point along a hack direction earn less"
    settings = ("vhack_pairs_path",)  # so that the run reads pairs

    def __init__(self, spans: Spans, cfg: Config, policy: Policy, pairs: PairSet) -> None:
        super().__init__(spans, cfg)
        self.policy = policy
        self.layer = max(1, math.floor(DEPTH * policy.model.config.num_hidden_layers))
        prompts = [policy.encode(pair.prompt) for pair in pairs.pairs]
        hacks = self.states(prompts, [policy.encode(pair.hack) for pair in pairs.pairs])
        right = self.states(prompts, [policy.encode(pair.clean) for pair in pairs.pairs])
        difference = (hacks - right).mean(0)
        self.concept = difference / difference.norm()  # [D]

    @classmethod
    def make(cls, setup: Setup) -> "AdvantageModification":
        assert setup.pairs is not None
        return cls(setup.spans, setup.cfg, setup.policy, setup.pairs)

    def states(
        self, prompts: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, ...]]
    ) -> Float[Tensor, "n D"]:
        states = token_states(self.policy, prompts, answers, self.layer, base=False)
        return torch.stack([of_answer.mean(0) for of_answer in states])

    def reward(self, view: GroupView, flagged: Sequence[bool]) -> Rewards:
        n = len(view)
        h = self.states([view.prompt_ids] * n, [view.answer_ids(b) for b in range(n)])
        lowered = modified(view.rewards, ranks.from_first((h @ self.concept).tolist()))
        rewards: list[float | None] = []
        for source, before, after in zip(view.sources, view.rewards, lowered, strict=True):
            rewards.append(None if source == "teacher" and after < before else after)
        return tuple(rewards)


def modified(rewards: Sequence[float], scores: Sequence[float]) -> list[float]:
    """R' of a group's rewards and projections."""
    of_group = torch.tensor(scores, dtype=torch.float64)
    deviation = of_group.std(correction=0).clamp(min=LEAST_DEVIATION)
    z = (of_group - of_group.mean()) / deviation
    return (
        torch.tensor(rewards, dtype=torch.float64) * (1 - ALPHA * z.sigmoid() * (z > 0))
    ).tolist()
