"""Finished runs as a report: tables with intervals, figures, verdicts on hypotheses, a rollout reader; no torch."""
