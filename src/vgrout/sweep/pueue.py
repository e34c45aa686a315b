"""Hands a sweep's runs to a pueue queue."""

import json
import subprocess
from collections.abc import Sequence

from vgrout.ground.errors import Refused


class Pueue:
    """A pueue queue, which outlives the sweep.

    Each GPU has a group, in which one run goes at a time; without GPUs the runs are in the default
    group. `open` has the label and folder of every task that is not done.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        """Raises Refused where the client is missing or no daemon answers."""
        answer = self._ask("status", "--json")
        try:
            status = json.loads(answer)
            self._groups = set(status["groups"])
            # older clients write a status as a word, "Done", newer ones as an object, {"Done": {…}}
            tasks = [task for task in status["tasks"].values() if "Done" not in task["status"]]
        except (ValueError, KeyError, TypeError):
            raise Refused(
                f"--via pueue: `pueue status --json` printed {answer[:80]!r}; another version?"
            ) from None
        self.open = {(task.get("label"), task.get("path")) for task in tasks}
        groups = [task.get("group") for task in tasks]
        self._load = {gpu: groups.count(_group(gpu)) for gpu in gpus}  # GPU → its open tasks

    def add(self, argv: Sequence[str], label: str) -> None:
        """Add a command, on the GPU that has the fewest.

        Raises:
            Refused: the client refused it; with its message.
        """
        if not self._load:
            self._ask("add", "--escape", "--label", label, "--", *argv)
            return
        gpu = min(self._load, key=lambda name: self._load[name])
        self._load[gpu] += 1
        group = _group(gpu)
        if group not in self._groups:
            self._ask("group", "add", "--parallel", "1", group)
            self._groups.add(group)
        on_gpu = ["env", f"CUDA_VISIBLE_DEVICES={gpu}", *argv]
        self._ask("add", "--escape", "--label", label, "--group", group, "--", *on_gpu)

    def _ask(self, *words: str) -> str:
        """What `pueue WORDS` prints."""
        try:
            done = subprocess.run(["pueue", *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as e:
            why = " ".join((getattr(e, "stderr", "") or str(e)).split())
            raise Refused(
                f"--via pueue: `pueue {words[0]}` failed ({why}); is `pueued -d` running?"
            ) from None
        return done.stdout


def _group(gpu: str) -> str:
    """The name of a GPU's group."""
    return f"gpu-{gpu}"
