"""Studies of many runs from one TOML file: planned, resumable, by processes or ray; never loads torch."""
