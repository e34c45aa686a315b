"""The hack direction: contrastive pairs, extraction (V and v_grad), its files, and random and placebo controls."""
