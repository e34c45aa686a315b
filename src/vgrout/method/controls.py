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
    flagged = torch.tensor([f for of in flags for f in of.flagged])
    could = torch.tensor([m for of in movable for m in of]) | flagged
    moved = permuted(flagged.float()[None], could, generator)[0] > 0
    sizes = [len(of.flagged) for of in flags]
    return [
        replace(of, flagged=tuple(part.tolist()))
        for of, part in zip(flags, moved.split(sizes), strict=True)
    ]
