"""GRPO against a flawed grader, with the gradient edited during training."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vgrout.api import Run as Run
    from vgrout.api import RunFailed as RunFailed
    from vgrout.api import load_run as load_run
    from vgrout.api import make_arm as make_arm
    from vgrout.api import register_arm as register_arm
    from vgrout.api import train_run as train_run

# Commands of one file lie in tools/, and keep the names that scripts call: `python -m vgrout.doctor`.
__path__.append(str(Path(__file__).with_name("tools")))

# Variable-length batches fragment CUDA's caching allocator; must be set before torch is imported.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# GNU OpenMP's threads spin while they wait, and hold the core that another process needs: two organism builds beside
# one another on two cores took 5.3 s a step each, with this 1.6, and one alone .7 either way.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = ["Run", "RunFailed", "load_run", "make_arm", "register_arm", "train_run"]


def __getattr__(name: str) -> Any:
    """The names of vgrout.api, imported when they are asked for: `import vgrout` itself takes no time."""
    if name not in __all__:
        if name == "__version__":
            from importlib.metadata import version

            return version("vgrout")
        raise AttributeError(f"module 'vgrout' has no attribute {name!r}")
    from vgrout import api

    return getattr(api, name)
