"""Finished runs as a report, without torch.

It has tables with intervals, figures, verdicts on hypotheses, and a reader of rollouts.
"""
