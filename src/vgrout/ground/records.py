"""Runs' folders: where they lie, when each began, and what became of it. Standard library only."""

import shlex
from datetime import UTC, datetime
from pathlib import Path

from vgrout.ground.io import Refused, from_json, held, read_json, read_text


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


def run_dirs(source: Path) -> tuple[list[Path], list[str]]:
    """Find the run directories of a source: a run, a folder of runs, or a sweep with its runs.json.

    Returns:
        The directories, and the missing runs of a sweep with their state.

    Raises:
        Refused: the source is none of these.
    """
    if (source / "run.json").is_file():
        return [source], []
    if (source / "runs.json").is_file():
        return _sweep_dirs(source)
    found = sorted(file.parent for file in source.glob("*/run.json"))
    if not found:
        raise Refused(f"{source}: no run in it; run `vgrout train mini --intervention none` first")
    return found, []


def _sweep_dirs(sweep: Path) -> tuple[list[Path], list[str]]:
    """Find the run directories that a sweep's runs.json names, and the runs that are not there."""
    index = sweep / "runs.json"
    # names of runs are relative to where the sweep was started, a folder above its own
    above = sweep.absolute().parents
    found: list[Path] = []
    absent: list[str] = []
    for entry in from_json(read_text(index), str(index)):
        run = entry["run"]
        there = [root / run for root in above if (root / run).is_dir()] if run else []
        if there:
            found.append(there[0])
        else:
            where = f": {run} is not there" if run else ""
            absent.append(f"{entry['name']} ({entry['state']}{where})")
    return found, absent
