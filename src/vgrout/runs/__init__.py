"""A run on disk and its process: directory, checkpoints, resume, checks before the start, signals, results."""
