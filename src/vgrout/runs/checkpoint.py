"""Resume checkpoints: complete or absent. torch is imported where a state is written or read.

A checkpoint is a folder `resume/step_NNNNNN/` with `state.pt` (adapter, optimiser, method, guard) and `manifest.json`
(hashes, and how long the growing files were). It is written under a temporary name and renamed; others are pruned once
the new one is verified. Random streams derive from seed and step, so the step is their state.
"""

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vgrout.ground.io import (
    Refused,
    file_sha256,
    from_json,
    one_line,
    out_of_memory,
    read_text,
    regular,
    to_json,
    write_atomic,
)

R = TypeVar("R")

# files of a run that every step appends to
GROWING = ("steps.jsonl", "rollouts.jsonl")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    next_step: int
    state: dict[str, Any]
    sizes: dict[str, int]  # bytes of the growing files when it was saved


def save(run: Path, next_step: int, state: dict[str, object], keep: int) -> None:
    """Write and verify a checkpoint, then prune to it and the `keep - 1` before it: later or incomplete ones belong to
    steps that a resume has undone. Raises OSError on a full disk, with the previous checkpoint untouched."""
    import torch

    root = run / "resume"
    root.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    final = root / f"step_{next_step:06d}"
    temporary = root / f".tmp_{next_step:06d}_{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        # The manifest has their sizes: after a power cut the files must not be shorter than that.
        for name in GROWING:
            with open(run / name, "rb") as growing:
                os.fsync(growing.fileno())
        temporary.mkdir()
        write_atomic(temporary / "state.pt", buffer.getvalue())
        manifest = {
            "schema": 1,
            "next_step": next_step,
            "files": {"state.pt": file_sha256(temporary / "state.pt")},
            "sizes": {name: (run / name).stat().st_size for name in GROWING},
        }
        write_atomic(temporary / "manifest.json", to_json(manifest))
        if final.exists():  # the same step again, after a resume
            shutil.rmtree(final)
        os.replace(temporary, final)
        fd = os.open(root, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    read(final)
    kept = [p for p in complete(run) if step_of(p) <= next_step][-keep:]
    for old in {*root.glob("step_*"), *root.glob(".tmp_*")} - {*kept}:
        shutil.rmtree(old, ignore_errors=True)


def read(path: Path) -> Checkpoint:
    """Verify and load a checkpoint. Raises Refused in one line if it is truncated, altered or foreign."""
    import torch

    try:
        manifest = json.loads(read_text(path / "manifest.json"))
        step = int(manifest["next_step"])
        sizes = {name: int(manifest["sizes"][name]) for name in GROWING}
        is_whole = manifest["files"]["state.pt"] == file_sha256(path / "state.pt")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as e:
        why = f"it cannot be read ({type(e).__name__}: {e})"
        raise Refused(f"{path}: {why}; the checkpoint is damaged") from None
    if not is_whole or min(step, *sizes.values()) < 0:
        raise Refused(f"{path}: state.pt does not match its hash; the checkpoint is damaged")
    try:
        state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    except Exception as e:  # pickle's, zip's and torch's, which has many lines
        if out_of_memory(e):
            raise
        raise Refused(f"{path}: state.pt cannot be read ({type(e).__name__})") from None
    return Checkpoint(path, step, state, sizes)


def newest_first(run: Path, passed_over: list[str]) -> Iterator[Checkpoint]:
    """The good checkpoints; a line for each other one is added to `passed_over`."""
    for path in reversed(complete(run)):
        try:
            point = read(path)
        except Refused as e:
            passed_over.append(str(e))
        else:
            yield point


def rewind(run: Path, checkpoint: Checkpoint) -> None:
    """Cut the growing files to their length at the checkpoint; later steps are done again."""
    for name in GROWING:
        with open(run / name, "rb+") as f:
            f.truncate(checkpoint.sizes[name])
            f.flush()
            os.fsync(f.fileno())


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def complete(run: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first."""
    root = run / "resume"
    there: list[Path] = []
    for path in root.glob("step_*"):
        if re.fullmatch(r"step_\d{1,18}", path.name) and (path / "manifest.json").is_file():
            there.append(path)
    return sorted(there, key=step_of)


def none_left(run: Path, passed_over: Sequence[str]) -> Refused:
    detail = "; ".join(passed_over) or "no resume/step_*/manifest.json in it"
    return Refused(
        f"--resume {run}: no usable checkpoint ({detail}); move the folder away to begin anew"
    )


def rows_before(
    run: Path, step: int, sizes: dict[str, int], read_row: Callable[[dict[str, object]], R]
) -> list[R]:
    """The rows of steps.jsonl up to a checkpoint's step, each as `read_row` has it.

    Raises:
        Refused: one line: some are missing, or are none; or a growing file is not what it was.
    """
    for name in GROWING:
        path = run / name
        if path.is_symlink() or not path.is_file() or path.stat().st_size < sizes[name]:
            raise Refused(
                f"--resume {run}: {name} is a link, or shorter than at the checkpoint: rows are missing"
            )
    file = run / "steps.jsonl"
    with open(file, "rb", opener=regular) as f:
        then = f.read(sizes["steps.jsonl"])
    rows: list[R] = []
    for n, line in enumerate(io.BytesIO(then), 1):
        try:
            rows.append(read_row(from_json(line, f"{file}, line {n}")))
        except (LookupError, TypeError, AttributeError) as e:
            raise Refused(f"{file}, line {n}: no row of this run ({one_line(e)})") from None
    if len(rows) != step:
        raise Refused(f"{run}: {len(rows)} rows in steps.jsonl, checkpoint of step {step}")
    return rows
