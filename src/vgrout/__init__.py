"""GRPO against a flawed grader, with the gradient edited during training."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vgrout.api import Run as Run
    from vgrout.api import RunFailed as RunFailed
    from vgrout.api import load_run as load_run
    from vgrout.api import train_run as train_run
    from vgrout.method import register_intervention as register_intervention
    from vgrout.method import register_monitor as register_monitor
    from vgrout.method.live_direction import Setup as Setup
    from vgrout.method.method import make_method as make_method

# Variable-length batches fragment CUDA's caching allocator; must be set before torch is imported.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# GNU OpenMP's threads spin while they wait, and hold the core that another process needs: two
# organism builds beside one another on two cores took 5.3 s per step each, with this 1.6, and one
# alone 0.7 either way.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# commands that are no module of their own
_COMMANDS = ("evaluate", "sample", "grade", "problems", "doctor", "download", "distill")
_COMMANDS += ("iterative_dpo", "substrate", "organism")
for _name in _COMMANDS if sys.argv[:1] == ["-m"] else ():  # python -m …
    if f"vgrout.{_name}" in sys.orig_argv:
        print(f"E python -m vgrout.{_name}: is now `vgrout {_name}`", file=sys.stderr)
        sys.exit(2)

_METHOD = {  # the others are of vgrout.api
    "Setup": "vgrout.method.live_direction",
    "make_method": "vgrout.method.method",
    "register_intervention": "vgrout.method",
    "register_monitor": "vgrout.method",
}
__all__ = ["Run", "RunFailed", "Setup", "load_run", "make_method", "train_run"]
__all__ += ["register_intervention", "register_monitor"]


def __getattr__(name: str) -> object:
    """The names of vgrout.api and vgrout.method, imported when they are needed: `import vgrout` takes no time."""
    if name not in __all__:
        if name == "__version__":
            from importlib.metadata import version

            return version("vgrout")
        raise AttributeError(f"module 'vgrout' has no attribute {name!r}")
    return getattr(import_module(_METHOD.get(name, "vgrout.api")), name)
