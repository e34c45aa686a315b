"""The control of which rollouts are flagged: as many flags, moved at random. That of the direction is in
method/live_direction.py."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout.data import Flags


def permuted(
    share: Float[Tensor, "M N"], movable: Bool[Tensor, " N"], generator: torch.Generator
) -> Float[Tensor, "M N"]:
    """The shares moved among the movable rollouts at random, by one permutation for all M modules."""
    rows = movable.nonzero().flatten()
    order = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
    moved = share.clone()
    moved[:, rows] = share[:, order]
    return moved


def shuffled(
    flags: Sequence[Flags], movable: Sequence[Sequence[bool]], generator: torch.Generator
) -> list[Flags]:
    """As many flags, moved at random among the step's rollouts that are movable or were flagged."""
    flagged: list[bool] = []
    could_move: list[bool] = []
    sizes: list[int] = []
    for of_group, movable_of_group in zip(flags, movable, strict=True):
        flagged += of_group.flagged
        could_move += movable_of_group
        sizes.append(len(of_group.flagged))
    mask = torch.tensor(flagged)
    moved = permuted(mask.float()[None], torch.tensor(could_move) | mask, generator)[0] > 0
    shuffled_flags: list[Flags] = []
    for of_group, part in zip(flags, moved.split(sizes), strict=True):
        shuffled_flags.append(replace(of_group, flagged=tuple(part.tolist())))
    return shuffled_flags
