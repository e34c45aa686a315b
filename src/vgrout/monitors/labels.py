"""A monitor that knows the true labels, and errs: for bounds and baselines, never a method."""

from collections.abc import Sequence

from vgrout.rng import py_stream


def noisy_labels(labels: Sequence[bool], accuracy: float, seed: int, step: int, group: int) -> tuple[bool, ...]:
    """The labels of a group, each one turned with probability 1 − accuracy: a function of (seed, step, group,
    rollout)."""
    rng = py_stream(seed, "monitor", step, group)
    return tuple(label != (rng.random() >= accuracy) for label in labels)
