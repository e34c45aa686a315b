"""The builder of the embedded organism, which makes all its files from one seed, and its checks."""
