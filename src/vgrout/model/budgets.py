"""How many tokens, logits and bytes are processed at once. Stdlib only: a run's plan reads these before torch."""

# Tokens (padding included) in one forward with a graph. A 4B model keeps about 5.6 MB of activations a token.
# On a CPU a batch of 1,024 takes no more time a token than one of 16,384 and holds a fraction of its activations.
TOKEN_BUDGET = {"cpu": 1_024, "cuda": 4_096}

# Logit elements held at once. Above it the head runs in chunks that backward computes again: 2^24 fp32 is 64 MiB. On a
# GPU a chunk of 110 positions (2^24 of Qwen3's vocabulary) would read the head's weights more than it would multiply.
HEAD_BUDGET = {"cpu": 2**24, "cuda": 2**26}

# Bytes of keys and values held at once. Qwen3-4B in bf16 has 147 kB a token: about 100 rows of 1,700 tokens fit,
# while `full` wants 258 a step.
KV_BUDGET = {"cuda": 24 * 2**30, "cpu": 4 * 2**30}
