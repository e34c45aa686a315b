"""Runs for other programs: a model, a PEFT adapter, an inspect_ai log."""


class Differs(RuntimeError):
    """What was written is not the deployed model. It stands here so that no torch is imported for it."""
