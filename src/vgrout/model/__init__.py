"""The language model: policy, SVD adapter, decoding and sampling, log-probs, hidden states, loading and saving."""
