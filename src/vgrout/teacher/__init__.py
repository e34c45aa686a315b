"""Demonstrations: pools of graded rollouts, how they are made, and how they join the groups."""
