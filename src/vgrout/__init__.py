"""GRPO against a flawed grader, with the gradient edited during training."""

import os

# Variable-length batches fragment CUDA's caching allocator; must be set before torch is imported.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
