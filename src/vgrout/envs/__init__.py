"""Environments: prompts, what grades the answers to them, and which flaws the grading has."""
