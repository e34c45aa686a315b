"""Studies of many runs from one TOML file: planned, resumable, in processes or in a queue. No torch."""
