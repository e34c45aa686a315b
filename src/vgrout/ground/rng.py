"""Named random streams: a draw depends on (seed, purpose, indices), never on what was drawn before.

So a checkpoint's random state is the step number, and evaluating more often cannot change training.
Those of torch are in torch_rng.py: problems and pools only shuffle, and do not wait for torch.
"""

import hashlib
import random


def stream_seed(seed: int, purpose: str, *indices: int | str) -> int:
    """A 63-bit seed for one purpose and its indices."""
    parts = [str(seed), purpose, *map(str, indices)]
    text = "/".join(parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def py_stream(seed: int, purpose: str, *indices: int | str) -> random.Random:
    """A random.Random for one purpose and its indices."""
    return random.Random(stream_seed(seed, purpose, *indices))
