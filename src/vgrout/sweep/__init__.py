"""Studies of many runs from one TOML file: planned, resumable, in processes or on Ray. No torch."""
