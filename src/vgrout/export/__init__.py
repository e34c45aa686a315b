"""Runs for other programs: a model, a PEFT adapter, an inspect_ai log, a data set; on disk or on the hub."""
