"""What builds the embedded organism: corpus, tokenizer, weights, pool and pairs from one seed; and what checks it."""
