"""Named random streams of torch; the others, and why they are named, are in rng.py."""

import random

import numpy as np
import torch

from vgrout.ground.rng import stream_seed


def torch_stream(seed: int, purpose: str, *indices: int | str) -> torch.Generator:
    """A torch.Generator for one purpose and its indices.

    It is on the CPU, so the draws are the same on every device.
    """
    return torch.Generator().manual_seed(stream_seed(seed, purpose, *indices))


def seed_global_streams(seed: int, step: int) -> None:
    """Seed the global streams of Python, numpy and torch for a step, alike on every rank. step: −1 before the first.

    Nothing here draws from them. Somebody's own class may, and a resumed run has to draw the same.
    """
    of_step = stream_seed(seed, "global", step)
    random.seed(of_step)
    np.random.seed(of_step % 2**32)
    torch.manual_seed(of_step)
