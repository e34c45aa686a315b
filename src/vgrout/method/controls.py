"""The control `--random-flags`: as many flags, moved at random to other rollouts.

The controls of the direction are in method/live_direction.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.ground.data import Flags


def permuted(
    share: Float[Tensor, "M N"],
    movable: Bool[Tensor, " N"],
    generator: torch.Generator,
) -> Float[Tensor, "M N"]:
    """Move the shares among the movable rollouts at random, by one permutation for all M modules."""
    rollouts = movable.nonzero().flatten()
    permutation = torch.randperm(len(rollouts), generator=generator)
    taken_from = rollouts[permutation.to(rollouts.device)]
    moved = share.clone()
    moved[:, rollouts] = share[:, taken_from]
    return moved


def shuffled(
    flags: Sequence[Flags],
    movable: Sequence[Sequence[bool]],
    generator: torch.Generator,
) -> list[Flags]:
    """Move a step's flags at random among its rollouts that are movable or were flagged. flags, movable: by group."""
    flagged: list[bool] = []
    could_move: list[bool] = []
    sizes: list[int] = []
    for of_group, movable_of_group in zip(flags, movable, strict=True):
        flagged += of_group.flagged
        could_move += movable_of_group
        sizes.append(len(of_group.flagged))
    mask = torch.tensor(flagged)
    takes_part = torch.tensor(could_move) | mask
    share = mask.float()[None]  # [1, N]: one module
    moved = permuted(share, takes_part, generator)[0] > 0
    shuffled_flags: list[Flags] = []
    for of_group, part in zip(flags, moved.split(sizes), strict=True):
        new = tuple(part.tolist())
        shuffled_flags.append(replace(of_group, flagged=new))
    return shuffled_flags
