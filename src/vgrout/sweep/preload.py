"""Imports what a run needs. Imported only by the process from which a sweep's runs are forked.

If an import starts a second thread or initialises CUDA, forking would not be safe: the process ends here, and the
sweep's runs are started as separate processes.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys

from vgrout.sweep.warm import GROUPS, die_with

MODULES = (  # those that `train.train` and the model's class import late
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "matplotlib.backends.backend_agg",
    "PIL.PngImagePlugin",
    "vgrout.loading",
    "vgrout.runs.results",
)
SERVER = os.getpid()


def fit_to_fork() -> bool:
    """Whether this process has one thread and no GPU."""
    torch = sys.modules.get("torch")
    return len(os.listdir("/proc/self/task")) == 1 and not (torch and torch.cuda.is_initialized())


signal.pthread_sigmask(signal.SIG_BLOCK, GROUPS)
die_with(os.getppid(), signal.SIGKILL)
for name in MODULES:
    with contextlib.suppress(ImportError):  # the run itself reports what is missing
        importlib.import_module(name)
if not fit_to_fork():
    raise SystemExit("E not fit to be forked: a thread or a GPU context was started by an import")
gc.collect()
gc.freeze()  # else every fork's first collection would copy the pages of all imported modules
