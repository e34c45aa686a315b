"""What watches a run: the kill switch on held-out evaluations, and reward-hacking detectors."""
