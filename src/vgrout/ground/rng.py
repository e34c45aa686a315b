"""Named random streams: a draw depends on (seed, purpose, indices), never on what was drawn before.

So a checkpoint's random state is the step number, and evaluating more often cannot change training.
Torch is imported where it draws: problems and pools only shuffle, and do not wait for it.
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


def py_stream(seed: int, purpose: str, *indices: int | str) -> random.Random:
    """A random.Random for one purpose and its indices."""
    return random.Random(stream_seed(seed, purpose, *indices))


def torch_stream(seed: int, purpose: str, *indices: int | str) -> "torch.Generator":
    """A torch.Generator for one purpose and its indices.

    It is on the CPU, so the draws are the same on every device.
    """
    import torch

    return torch.Generator().manual_seed(stream_seed(seed, purpose, *indices))


def seed_global_streams(seed: int, step: int) -> None:
    """Seed the global streams of Python, numpy and torch for a step, alike on every rank. step: −1 before the first.

    Nothing here draws from them. Somebody's own class may, and a resumed run has to draw the same.
    """
    import numpy as np
    import torch

    of_step = stream_seed(seed, "global", step)
    random.seed(of_step)
    np.random.seed(of_step % 2**32)
    torch.manual_seed(of_step)
