"""Hands a sweep's runs to a pueue queue."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


class Pueue:
    """A pueue queue, which outlives the sweep. `open` has the label and folder of every task that is not done."""

    def __init__(self) -> None:
        """Raises ValueError where the client is missing or no daemon answers."""
        if shutil.which("pueue") is None:
            raise ValueError("--via pueue: no `pueue` on PATH; install it, or leave --via out")
        self.open = {
            (task.get("label"), task.get("path")) for task in self._tasks().values() if _stage(task["status"]) != "Done"
        }

    def add(self, argv: Sequence[str], label: str) -> None:
        """Add a command. Raises ValueError with the client's message where it refuses."""
        self._ask("add", "--escape", "--label", label, "--", *argv)

    def _tasks(self) -> Mapping[str, Any]:
        answer = self._ask("status", "--json")
        try:
            return json.loads(answer)["tasks"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--via pueue: `pueue status --json` printed {answer[:80]!r}; another version?") from None

    def _ask(self, *words: str) -> str:
        done = subprocess.run(["pueue", *words], capture_output=True, text=True)
        if done.returncode:
            why = " ".join((done.stderr or done.stdout).split())
            raise ValueError(f"--via pueue: `pueue {words[0]}` failed ({why}); is its daemon running (pueued -d)?")
        return done.stdout


def _stage(status: Any) -> str:
    """A task's stage: older clients write "Queued", newer ones {"Queued": {…}}."""
    return status if isinstance(status, str) else next(iter(status))
