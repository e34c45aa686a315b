"""The hack direction: contrastive pairs, extraction (V, v_grad), files, and control directions."""
