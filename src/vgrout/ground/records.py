"""What a run's folder says of the run: when it began, and what became of it. Standard library only."""

import re
import shlex
from datetime import UTC, datetime
from pathlib import Path

from vgrout.ground.io import Refused, held, read_json


def began(run: Path) -> tuple[datetime, str]:
    """When a run began, by run.json, and the stamp in its folder's name, by which runs of one moment are ordered.

    Older runs have no such entry: the stamp is the local time at which they began. A folder with
    a name of its own is as old as its run.json.
    """
    stamp = run.name.partition("_")[0]
    try:
        at = read_json(run / "run.json").get("began_at")
    except Refused:  # none, or a damaged one
        at = None
    if isinstance(at, str):
        try:
            return datetime.fromisoformat(at).astimezone(UTC), stamp
        except (ValueError, OverflowError):
            pass
    return _began_by_name(run, stamp), stamp


def _began_by_name(run: Path, stamp: str) -> datetime:
    if re.match(r"\d{8}T\d{6}", stamp):
        try:
            return datetime.strptime(stamp[:15], "%Y%m%dT%H%M%S").astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    try:
        return datetime.fromtimestamp((run / "run.json").stat().st_mtime, UTC)
    except OSError:
        return datetime.min.replace(tzinfo=UTC)


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
    stopped = f"stopped at step {status.get('step')}"
    if not _names(str(status.get("next")), run):
        return f"{stopped}; its folder was renamed or copied, so go on with --resume {shlex.quote(str(run))}"
    return f"{stopped}; go on with `{status.get('next')}`"


def _names(command: str, run: Path) -> bool:
    """Whether a command resumes a folder of this run's name."""
    try:
        words = shlex.split(command)
    except ValueError:  # it was edited
        return False
    folders = {word.removeprefix("--resume=") for word in words}
    return run.resolve().name in {Path(folder).name for folder in folders}
