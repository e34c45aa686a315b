"""Rounds of sample, score, pair, train (DPO) against a flawed or a strict scorer."""
