"""Controls as transforms of a method, each written once: flags shuffled, an update shrunk, a prompt exchanged.

The fourth, another direction, is in method/live_direction.py; those of training prompts alone in loading.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.model.policy import Policy
from vgrout.modes import PLAIN_PHRASE, hint
from vgrout.tensor_types import ModuleGrads, Routed
from vgrout.types import Batch, Group, GroupFlags


def permuted(
    share: Float[Tensor, "M N"], movable: Bool[Tensor, " N"], generator: torch.Generator
) -> Float[Tensor, "M N"]:
    """The shares moved among the movable rollouts at random, by one permutation for all M modules."""
    rows = movable.nonzero().flatten()
    order = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
    moved = share.clone()
    moved[:, rows] = share[:, order]
    return moved


def shuffled(flags: Sequence[GroupFlags], movable: Sequence[Sequence[bool]], generator: torch.Generator):
    """As many flags, moved at random among the step's rollouts that are movable or were flagged."""
    flagged = torch.tensor([f for of in flags for f in of.flagged])
    could = torch.tensor([m for of in movable for m in of]) | flagged
    moved = permuted(flagged.float()[None], could, generator)[0] > 0
    sizes = [len(of.flagged) for of in flags]
    return [replace(of, flagged=tuple(part.tolist())) for of, part in zip(flags, moved.split(sizes), strict=True)]


def shrunk(would: Routed, g: ModuleGrads) -> Routed:
    """Plain GRPO's gradient g, its *update* scaled by the share that `would` keeps.

    The gradient is not scaled, since AdamW would undo that: the optimiser multiplies δS's change by `Routed.scale`.
    Kept share: 1 - routed share where rollouts are routed, else ‖keep‖ / ‖g‖ over all modules, before any rescaling.
    """
    assert would.keep is not None
    if would.diag.routed is not None:
        kept = 1 - would.diag.routed
    else:
        norm = _joint_norm(g)
        kept = min(_joint_norm(would.keep) / norm, 1.0) if norm else 1.0
    diag = replace(would.diag, cos_post=would.diag.cos_pre, resid=None)
    return Routed(g, None, diag, would.flags, would.directions, scale=kept)


def hinted(batch: Batch, policy: Policy) -> Batch:
    """recontextualise (arXiv 2512.19027): rollouts sampled without the hint, put under the prompts that have it.

    A policy that does not know how it is checked has no reason to hack; the prompt with the hint then learns what it
    wrote without. The sampler's log-probs are dropped with the old prompt, so every ratio is 1: the exchange is meant.
    """

    def of(group: Group) -> Group:
        problem, last = group.problem, group.problem.messages[-1]
        content = last["content"].replace(PLAIN_PHRASE, hint(problem.mode, problem.marker))
        ids = policy.render((*problem.messages[:-1], {**last, "content": content}))
        rollouts = tuple(replace(r, prompt_ids=ids, logp_full=None, logp_sampled=None) for r in group.rollouts)
        return replace(group, rollouts=rollouts)

    return replace(batch, groups=tuple(map(of, batch.groups)))


def _joint_norm(grads: ModuleGrads) -> float:
    return torch.cat(list(grads.values())).norm().item()
