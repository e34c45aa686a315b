"""Demonstrations: pools of graded rollouts on disk, how they are generated, and how they are mixed into groups."""
