"""Named random streams: a draw depends on (seed, purpose, indices), never on what was drawn before.

So a checkpoint's random state is the step number, and evaluating more often cannot change training.
"""

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def stream_seed(seed: int, purpose: str, *indices: int | str) -> int:
    """A 63-bit seed for one purpose and its indices."""
    text = "/".join((str(seed), purpose, *map(str, indices)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_stream(seed: int, purpose: str, *indices: int | str) -> "torch.Generator":
    """A CPU torch.Generator: the draws are the same on every device."""
    # here, so that what only shuffles (problems, pools, refused command lines) does not wait for it
    import torch

    return torch.Generator().manual_seed(stream_seed(seed, purpose, *indices))


def py_stream(seed: int, purpose: str, *indices: int | str) -> random.Random:
    """A random.Random."""
    return random.Random(stream_seed(seed, purpose, *indices))
