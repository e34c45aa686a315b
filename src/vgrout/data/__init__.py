"""The shipped organism: where its files are, and the language of its problems."""
