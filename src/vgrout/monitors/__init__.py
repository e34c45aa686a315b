"""Monitors say which rollouts are flagged: by gradient (route2's gate), by labels, by text scores, by activations."""
