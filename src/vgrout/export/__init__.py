"""Runs for other programs: a model, a PEFT adapter, an inspect_ai log."""
