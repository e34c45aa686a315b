"""What lies ready: the shipped organism, where it lies and the language that its problems are written in."""
