"""GRPO against a flawed grader, with the gradient edited during training."""

import os
from pathlib import Path

# Commands of one file lie in tools/, and keep the names that scripts call: `python -m vgrout.doctor`.
__path__.append(str(Path(__file__).with_name("tools")))

# Variable-length batches fragment CUDA's caching allocator; must be set before torch is imported.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
