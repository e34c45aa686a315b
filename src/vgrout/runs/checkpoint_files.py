"""The files of checkpoints, as far as they are read without torch: a resume that cannot be is refused before it loads.

checkpoint.py says what a checkpoint is.
"""

import io
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from vgrout.errors import Refused, one_line
from vgrout.files import file_sha256, from_json, read_text, regular

# files of a run that every step appends to
GROWING = ("steps.jsonl", "rollouts.jsonl")


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def complete(run: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first."""
    root = run / "resume"
    there = [
        p
        for p in root.glob("step_*")
        if re.fullmatch(r"\d{1,18}", p.name[5:]) and (p / "manifest.json").is_file()
    ]
    return sorted(there, key=step_of)


def verified(path: Path) -> tuple[int, dict[str, int]]:
    """A checkpoint's step and the sizes of the growing files then, from its manifest. Raises Refused in one line if
    it is truncated or altered."""
    try:
        manifest = json.loads(read_text(path / "manifest.json"))
        step, sizes = (
            int(manifest["next_step"]),
            {name: int(manifest["sizes"][name]) for name in GROWING},
        )
        whole = (
            manifest["files"]["state.pt"] == file_sha256(path / "state.pt")
            and min(step, *sizes.values()) >= 0
        )
        why = "state.pt does not match its hash"
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as e:
        whole, why = False, f"it cannot be read ({type(e).__name__}: {e})"
    if not whole:
        raise Refused(f"{path}: {why}; the checkpoint is damaged")
    return step, sizes


def none_left(run: Path, passed_over: Sequence[str]) -> Refused:
    detail = "; ".join(passed_over) or "no resume/step_*/manifest.json in it"
    return Refused(
        f"--resume {run}: no usable checkpoint ({detail}); move the folder away to begin anew"
    )


def require_one(run: Path, read_row: Callable[[dict[str, object]], object]) -> None:
    """Raises Refused, one line, where no checkpoint has its manifest, its hash and its rows; torch is not loaded for
    that."""
    passed_over: list[str] = []
    for path in reversed(complete(run)):
        try:
            for row in rows_before(run, *verified(path)):
                read_row(row)
            return
        except (ValueError, TypeError, AttributeError) as e:
            passed_over.append(one_line(e, 300))
    raise none_left(run, passed_over)


def rows_before(run: Path, step: int, sizes: dict[str, int]) -> list[dict[str, object]]:
    """The rows of steps.jsonl up to a checkpoint's step. Raises Refused, one line, where some are missing."""
    with open(run / "steps.jsonl", "rb", opener=regular) as f:
        then = f.read(min(sizes["steps.jsonl"], os.fstat(f.fileno()).st_size))
    lines = enumerate(io.BytesIO(then), 1)
    rows = [from_json(line, f"{run / 'steps.jsonl'}, line {n}") for n, line in lines]
    if len(rows) != step:
        raise Refused(f"{run}: {len(rows)} rows in steps.jsonl, checkpoint of step {step}")
    return rows
