"""Hands a sweep's runs to a pueue queue."""

import json
import subprocess
from collections.abc import Sequence

from vgrout.errors import Refused


class Pueue:
    """A pueue queue, which outlives the sweep. Each GPU has a group, in which one run goes at a time; without GPUs the
    runs are in the default group. `open` has the label and folder of every task that is not done."""

    def __init__(self, gpus: Sequence[str]) -> None:
        """Raises Refused where the client is missing or no daemon answers."""
        answer = self._ask("status", "--json")
        try:
            status = json.loads(answer)
            # older clients write a status as a word, "Done", newer ones as an object, {"Done": {…}}
            tasks = [task for task in status["tasks"].values() if "Done" not in task["status"]]
            self._groups = {*status["groups"]}
        except (ValueError, KeyError, TypeError):
            raise Refused(
                f"--via pueue: `pueue status --json` printed {answer[:80]!r}; another version?"
            ) from None
        self.open = {(task.get("label"), task.get("path")) for task in tasks}
        self._load = {gpu: sum(task.get("group") == f"gpu-{gpu}" for task in tasks) for gpu in gpus}

    def add(self, argv: Sequence[str], label: str) -> None:
        """Add a command, on the GPU that has the fewest. Raises Refused with the client's message where it
        refuses."""
        where: list[str] = []
        if self._load:
            gpu = min(self._load, key=lambda name: self._load[name])
            self._load[gpu] += 1
            group = f"gpu-{gpu}"
            if group not in self._groups:
                self._ask("group", "add", "--parallel", "1", group)
                self._groups.add(group)
            where, argv = ["--group", group], ["env", f"CUDA_VISIBLE_DEVICES={gpu}", *argv]
        self._ask("add", "--escape", "--label", label, *where, "--", *argv)

    def _ask(self, *words: str) -> str:
        try:
            return subprocess.run(
                ["pueue", *words], capture_output=True, text=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError) as e:
            why = " ".join((getattr(e, "stderr", "") or str(e)).split())
            raise Refused(
                f"--via pueue: `pueue {words[0]}` failed ({why}); is `pueued -d` running?"
            ) from None
