"""Named random streams of torch; the others, and why they are named, are in rng.py."""

import torch

from vgrout.rng import stream_seed


def torch_stream(seed: int, purpose: str, *indices: int | str) -> torch.Generator:
    """A torch.Generator for one purpose and its indices.

    It is on the CPU, so the draws are the same on every device.
    """
    return torch.Generator().manual_seed(stream_seed(seed, purpose, *indices))
