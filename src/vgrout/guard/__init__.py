"""What watches a run: the kill switch on held-out evaluations, reward-hacking detectors, and their scorecard."""
