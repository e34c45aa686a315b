"""Speed and memory as ratios, each against a peer, in one run on one machine."""
