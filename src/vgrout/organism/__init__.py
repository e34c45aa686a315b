"""The builder of the embedded organism: corpus, tokenizer, weights, pool and pairs from one seed; and its checks."""
