"""A run's answers for other programs: the final evaluation as inspect_ai logs."""

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vgrout.config.run import from_dict
from vgrout.ground.io import Refused, cannot_import, json_lines, not_installed, read_json

# What is read of a line of final.jsonl.
READ = (
    "hacked",
    "solved",
    "reward",
    "side",
    "problem_id",
    "sample",
    "messages",
    "text",
    "finished",
    "env_mode",
)


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
        if isinstance(error, ModuleNotFoundError) and error.name == "inspect_ai":
            raise not_installed("inspect-ai", "inspect") from None
        raise cannot_import("inspect-ai", error) from None
    status = run / "status.json"  # written last after the final evaluation
    seconds = read_json(status)["time"] if status.is_file() else final.stat().st_mtime
    created = datetime.fromtimestamp(seconds, UTC)
    for side, answers in sides.items():
        write_log(folder / f"{side}.eval", cfg, created, side, answers)
    return f"{sum(map(len, sides.values()))} answers in {len(sides)} logs"


def _read_answers(final: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the graded answers of final.jsonl by side."""
    sides: dict[str, list[dict[str, Any]]] = defaultdict(list)
    try:
        for line in json_lines(final):
            answer = {name: line[name] for name in READ}
            answer["marker"] = line.get("marker")  # of the code world
            answer["thought"] = line.get("thought", "")
            if answer["reward"] is not None:
                sides[answer["side"]].append(answer)
    except (KeyError, TypeError) as e:
        raise Refused(f"{final}: damaged, or of another version ({e!r})") from None
    return sides
