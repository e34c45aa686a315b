"""Resume checkpoints: complete or absent.

A checkpoint is a folder `resume/step_NNNNNN/` with `state.pt` (adapter, optimiser, method, guard) and `manifest.json`
(hashes, and how long the growing files were). It is written under a temporary name and renamed; others are pruned once
the new one is verified. Random streams derive from seed and step, so the step is their state.
"""

import errno
import hashlib
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from vgrout.files import to_json, write_atomic

MARGIN = 64 * 1024  # bytes besides the state: manifest, folders, the file system's own
GROWING = ("steps.jsonl", "rollouts.jsonl")


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    next_step: int
    state: dict[str, Any]
    sizes: dict[str, int]  # bytes of the growing files when it was saved


def save(run: Path, next_step: int, state: dict[str, Any], keep: int) -> Path:
    """Write and verify a checkpoint, then prune to it and the `keep - 1` before it: later or incomplete ones belong to
    steps that a resume has undone. Raises OSError on a full disk, with the previous checkpoint untouched."""
    root = run / "resume"
    root.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    need, free = len(data) + MARGIN, shutil.disk_usage(root).free
    if free < need:
        raise OSError(errno.ENOSPC, f"a checkpoint needs {need // 1024} KiB")
    final = root / f"step_{next_step:06d}"
    temporary = root / f".tmp_{next_step:06d}_{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        write_atomic(temporary / "state.pt", data)
        manifest = {
            "schema": 1,
            "next_step": next_step,
            "files": {"state.pt": _sha256(temporary / "state.pt")},
            "sizes": {name: (run / name).stat().st_size for name in GROWING},
        }
        write_atomic(temporary / "manifest.json", to_json(manifest))
        if final.exists():  # the same step again, after a resume
            shutil.rmtree(final)
        os.replace(temporary, final)
        _sync_folder(root)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    read(final)
    kept = [p for p in complete(run) if _step(p) <= next_step][-keep:]
    for old in {*root.glob("step_*"), *root.glob(".tmp_*")} - {*kept}:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def complete(run: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first."""
    root = run / "resume"
    there = [p for p in root.glob("step_*") if p.name[5:].isdecimal() and (p / "manifest.json").is_file()]
    return sorted(there, key=_step)


def read(path: Path) -> Checkpoint:
    """Verify and load a checkpoint. Raises ValueError in one line if it is truncated, altered or foreign."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files, next_step, sizes = manifest["files"], int(manifest["next_step"]), manifest["sizes"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: manifest cannot be read ({e})") from None
    for name, expected in files.items():
        if not (path / name).is_file():
            raise ValueError(f"{path}: {name} is missing")
        if _sha256(path / name) != expected:
            raise ValueError(f"{path}: {name} does not match its hash; the checkpoint is damaged")
    state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    return Checkpoint(path, next_step, state, {k: int(v) for k, v in sizes.items()})


def latest(run: Path) -> tuple[Checkpoint, list[str]]:
    """The newest good checkpoint, and a line for each newer one that is not. Raises ValueError if none is good."""
    passed_over: list[str] = []
    for path in reversed(complete(run)):
        try:
            return read(path), passed_over
        except ValueError as e:
            passed_over.append(str(e))
    detail = "; ".join(passed_over) or "no resume/step_*/manifest.json in it"
    raise ValueError(f"--resume {run}: no usable checkpoint ({detail})")


def go_back(run: Path) -> tuple[Checkpoint, list[dict[str, Any]]]:
    """Go back to the newest good checkpoint: cut the growing files to their length then. Returns it and its rows."""
    point, passed_over = latest(run)
    for line in passed_over:
        logger.warning(f"{line}; going back one further")
    rewind(run, point)
    with open(run / "steps.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if len(rows) != point.next_step:
        raise ValueError(f"--resume {run}: {len(rows)} rows in steps.jsonl, checkpoint of step {point.next_step}")
    return point, rows


def rewind(run: Path, checkpoint: Checkpoint) -> None:
    """Cut the growing files to their length at the checkpoint; later steps are done again."""
    for name in GROWING:
        path, size = run / name, checkpoint.sizes[name]
        if path.is_symlink():
            raise ValueError(f"--resume {run}: {name} is a link; a run's own files are not")
        if not path.is_file() or path.stat().st_size < size:
            raise ValueError(f"--resume {run}: {name} is shorter than at the checkpoint; rows are missing")
        with open(path, "rb+") as f:
            f.truncate(size)
            f.flush()
            os.fsync(f.fileno())
