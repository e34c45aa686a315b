"""A run's answers for other programs: the final evaluation as inspect_ai logs."""

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vgrout.config.run import from_dict
from vgrout.ground.io import Refused, cannot_import, json_lines, read_json


def to_inspect(run: Path, folder: Path) -> str:
    """Write one `SIDE.eval` per side of the final evaluation, by inspect_ai.

    It has a sample per answer, scored by whether the reference accepts it (solved) and by whether
    it hacked the flaw. Returns a sentence about what was written.

    Raises:
        Refused: not a run, or one without a sound final evaluation; or inspect_ai is not installed.
    """
    cfg = from_dict(read_json(run / "run.json").get("config"))
    final = run / "final.jsonl"
    sides = _read_answers(final)
    if not sides:
        raise Refused(
            f"{final}: not there or empty; only a run with a final evaluation has answers"
        )
    try:
        from vgrout.export.inspect_log import write_log
    except ImportError as error:
        raise cannot_import("inspect-ai", error, "inspect") from None
    status = run / "status.json"  # written last after the final evaluation
    seconds = read_json(status)["time"] if status.is_file() else final.stat().st_mtime
    created = datetime.fromtimestamp(seconds, UTC)
    for side, answers in sides.items():
        write_log(folder / f"{side}.eval", cfg, created, side, answers)
    return f"{sum(map(len, sides.values()))} answers in {len(sides)} logs"


def _read_answers(final: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the graded answers of final.jsonl by side."""
    sides: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for answer in json_lines(final):
        if answer["reward"] is not None:
            sides[answer["side"]].append(answer)
    return sides
