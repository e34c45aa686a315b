"""matplotlib without the backend that a notebook has named.

A notebook hands MPLBACKEND on to the programs that it starts. Where these do not have that backend,
`import matplotlib` raises, and leaves halves of itself in `sys.modules`. Figures written to files
need no backend. So whatever draws imports this module before matplotlib.
"""

import contextlib
import os
import sys


def import_matplotlib() -> None:
    """Import matplotlib as if MPLBACKEND were not set, and then set it where it can be had."""
    if "matplotlib" in sys.modules:  # the program around this one has chosen already
        return
    named = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named
    if named:
        # pyplot in the same notebook still finds it; ValueError: it is not installed
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = named


import_matplotlib()
