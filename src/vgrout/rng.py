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
    parts = [str(seed), purpose, *map(str, indices)]
    text = "/".join(parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_stream(seed: int, purpose: str, *indices: int | str) -> "torch.Generator":
    """A torch.Generator for one purpose and its indices.

    It is on the CPU, so the draws are the same on every device.
    """
    # Problems and pools only shuffle, and a refused command line does not even that: they do not
    # wait for torch.
    import torch

    return torch.Generator().manual_seed(stream_seed(seed, purpose, *indices))


def py_stream(seed: int, purpose: str, *indices: int | str) -> random.Random:
    """A random.Random for one purpose and its indices."""
    return random.Random(stream_seed(seed, purpose, *indices))
