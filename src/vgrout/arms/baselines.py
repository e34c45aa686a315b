"""Baselines in the same loop as the arms: from what a group's advantages are made, in place of its rewards.

    gt_penalty      R - penalty, or at most the compile reward, where the monitor sees an exploit
    gt_screening    left out of the group where it does
    advantage_mod   R · (1 - α σ(z) 1[z > 0]), z from activations along a concept direction (arXiv 2604.01476)

The monitor knows the true labels and errs in a share of the answers. A demonstration that would be paid less is left
out. inoculation changes prompts, not credit, and a KL term alone (--beta) changes neither.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from loguru import logger
from torch import Tensor

from vgrout.config.run import Config
from vgrout.direction.extract import N_HELDOUT, tokens_of
from vgrout.direction.pairs import PairSet
from vgrout.model.hidden_states import pooled
from vgrout.model.logprobs import backbone
from vgrout.model.policy import Policy
from vgrout.rng import py_stream
from vgrout.types import GroupView, OracleView, Rollout

DEPTH = (0.60, 0.75)  # share of the layers between which the concept is read
Z_FLOOR = 0.1  # smallest standard deviation of a group's scores
TOKEN_BUDGET = 4096  # of one forward that keeps every layer's output: 0.8 GB in bf16 at Qwen3-4B's shape
Credit = tuple[float | None, ...]  # None: this rollout is left out


class Baseline:
    """None of them."""

    sees: type[GroupView] = GroupView  # exactly this type: no label comes in on a subclass

    def shape(self, rollouts: Sequence[Rollout], view: GroupView, step: int, index: int) -> Credit | None:
        """Of one group, the `index`-th of its step, in the view's order. None: the rewards as they are."""
        assert type(view) is self.sees, f"{type(self).__name__} sees a {self.sees.__name__}, got {type(view).__name__}"
        shaped = self._of(rollouts, view, step, index)
        if shaped is None:
            return None
        # Not the policy's own answers: a negative advantage pushes their log-prob down without bound.
        lowered = (
            source == "teacher" and c is not None and c < r
            for source, c, r in zip(view.sources, shaped, view.rewards, strict=True)
        )
        return tuple(None if low else c for low, c in zip(lowered, shaped, strict=True))

    def _of(self, rollouts: Sequence[Rollout], view: GroupView, step: int, index: int) -> Credit | None:
        return None


class Monitor(Baseline):
    """Base of those that are given the true labels; of demonstrations the cached ones."""

    sees = OracleView

    def __init__(self, seed: int, accuracy: float) -> None:
        self.seed, self.accuracy = seed, accuracy

    def flags(self, view: GroupView, step: int, index: int) -> tuple[bool, ...]:
        """The labels, each one turned with probability 1 - accuracy: a function of (seed, step, group, rollout)."""
        assert isinstance(view, OracleView)
        rng = py_stream(self.seed, "monitor", step, index)
        return tuple(label != (rng.random() >= self.accuracy) for label in view.exploited)


class Penalty(Monitor):
    """Whatever is flagged is paid less."""

    def __init__(self, seed: int, accuracy: float, penalty: float | None, floor: float) -> None:
        """penalty: what is taken off; None: all above `floor`, the reward of code that only compiles."""
        super().__init__(seed, accuracy)
        self.penalty, self.floor = penalty, floor

    def _of(self, rollouts: Sequence[Rollout], view: GroupView, step: int, index: int) -> Credit:
        return tuple(
            self._lowered(r) if flag else r for r, flag in zip(view.rewards, self.flags(view, step, index), strict=True)
        )

    def _lowered(self, reward: float) -> float:
        return min(reward, self.floor) if self.penalty is None else reward - self.penalty


class Screening(Monitor):
    """Whatever is flagged is not there."""

    def _of(self, rollouts: Sequence[Rollout], view: GroupView, step: int, index: int) -> Credit:
        return tuple(None if flag else r for r, flag in zip(view.rewards, self.flags(view, step, index), strict=True))


class AdvantageMod(Baseline):
    """Multiplicative advantage modification. ◆ The source reads the policy's activations in a way that our notes do not
    settle: here the direction is the base model's and stays, the activations are the present policy's."""

    def __init__(self, policy: Policy, concept: Float[Tensor, " D"], layers: Sequence[int], alpha: float) -> None:
        self.policy, self.concept, self.layers, self.alpha = policy, concept, layers, alpha

    def _of(self, rollouts: Sequence[Rollout], view: GroupView, step: int, index: int) -> Credit:
        rows = activations(
            self.policy, self.layers, [r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts]
        )
        return modified(view.rewards, (rows @ self.concept).tolist(), self.alpha)


def modified(rewards: Sequence[float], scores: Sequence[float], alpha: float) -> tuple[float, ...]:
    """R · (1 - α σ(z) 1[z > 0]) with z the scores' z-scores in the group, their deviation at least Z_FLOOR."""
    mean = math.fsum(scores) / len(scores)
    std = max(math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / len(scores)), Z_FLOOR)
    z = [(s - mean) / std for s in scores]
    return tuple(r * (1 - alpha / (1 + math.exp(-x))) if x > 0 else r for r, x in zip(rewards, z, strict=True))


def concept_layers(n: int) -> list[int]:
    """Of a model with n layers: those from 60 to 75 % of its depth, at least one; 1 is the first layer's output."""
    low, high = (max(1, math.floor(share * n)) for share in DEPTH)
    return [*range(min(low + 1, high), high + 1)]


def activations(
    policy: Policy, layers: Sequence[int], prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
) -> Float[Tensor, "n D"]:
    """Each answer's mean activation under the present weights, the layers one after the other."""

    def chosen(ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        states = backbone(policy.model)(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] for layer in layers], -1)

    return pooled(chosen, prompts, completions, policy.device, TOKEN_BUDGET)


def concept_direction(policy: Policy, pairs: PairSet, layers: Sequence[int]) -> tuple[Float[Tensor, " D"], list[float]]:
    """A direction for `activations`, and the pairs' differences along it, the held-out ones last.

    Per layer the unit mean of hack - clean under the base model, over all pairs but the last two; a score is the mean
    over layers.

    Raises:
        ValueError: a pair longer than the model's window, or pairs that differ by nothing here.
    """
    sides = []
    with policy.adapter.reference():
        for side in ("hack", "clean"):
            rows = [
                tokens_of(policy, pair, getattr(pair, side), f"{pairs.source}: pair {i}")
                for i, pair in enumerate(pairs.pairs)
            ]
            sides.append(activations(policy, layers, [p for p, _ in rows], [c for _, c in rows]))
    difference = sides[0] - sides[1]
    mean = difference[: len(pairs) - N_HELDOUT].mean(0).view(len(layers), -1)
    norms = mean.norm(dim=1, keepdim=True)
    if not (norms > 0).all():
        raise ValueError(f"{pairs.source}: hack and clean have the same activations; advantage_mod needs other pairs")
    concept = (mean / norms / len(layers)).flatten()
    return concept, (difference @ concept).tolist()


def make_baseline(cfg: Config, policy: Policy, pairs: PairSet | None) -> Baseline:
    """What `--control` asks for. Raises ValueError where the pairs do not fit the model."""
    arm, seed = cfg.arm, cfg.run.seed
    match arm.control:
        case "gt_penalty":
            return Penalty(seed, arm.label_accuracy, arm.label_penalty, cfg.env.compile_reward)
        case "gt_screening":
            return Screening(seed, arm.label_accuracy)
        case "advantage_mod":
            assert pairs is not None
            n = int(policy.model.config.num_hidden_layers)
            concept, along = concept_direction(policy, pairs, layers := concept_layers(n))
            held_out = along[-N_HELDOUT:]
            logger.info(
                f"concept direction of {pairs.source} at layers {layers} of {n}: hack above clean in "
                f"{sum(d > 0 for d in held_out)} of {len(held_out)} held-out pairs. SHOULD: all; ELSE it reads no hack"
            )
            return AdvantageMod(policy, concept, layers, arm.concept_alpha)
    return Baseline()
