"""What a run's folder says of the run: when it began, and what became of it. Standard library only."""

import shlex
from datetime import UTC, datetime
from pathlib import Path

from vgrout.ground.io import held, read_json


def began(run: Path) -> tuple[datetime, str]:
    """When a run began, by run.json, and the stamp in its folder's name, by which runs of one moment are ordered.

    Older runs, which have no such entry, come first, in the order of their stamps.
    """
    stamp = run.name.partition("_")[0]
    try:
        at = datetime.fromisoformat(read_json(run / "run.json")["began_at"]).astimezone(UTC)
    except (LookupError, TypeError, ValueError, OverflowError):  # Refused is one
        at = datetime.min.replace(tzinfo=UTC)
    return at, stamp


def unfinished(run: Path) -> str:
    """Why a run has not ended well, and how to go on with it; "": it is finished or halted.

    A run that says that it is running, and whose folder no process holds, was killed.

    Raises:
        Refused: status.json is damaged.
    """
    file = run / "status.json"
    status = read_json(file) if file.exists() else {}
    state = str(status.get("state", "unknown"))
    if state in ("finished", "halted"):
        return ""
    if state != "running" or ((run / ".lock").exists() and held(run)):
        return f"{state:.40}"
    return f"stopped at step {status.get('step')}; go on with --resume {shlex.quote(str(run))}"
