"""A file that others read is there as a whole, or as it was before. Stdlib only."""

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def whole(path: Path) -> Generator[BinaryIO]:
    """A binary file under a temporary name beside `path`; flushed, synced and renamed when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def write_atomic(path: Path, data: str | bytes) -> None:
    """All of `data`, or the file as it was."""
    with whole(path) as f:
        f.write(data.encode() if isinstance(data, str) else data)


def to_json(data: Any) -> str:
    """Strict JSON: a NaN is a fault here, not a token that other readers choke on."""
    return json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False, default=str)


def probe_writable(folder: Path) -> None:
    """Create the folder and a file in it, now rather than after an hour. Raises ValueError in one line."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        raise ValueError(f"{folder}: cannot be written ({e.strerror}); start from a folder where it can") from None


def read_json(path: Path) -> dict[str, Any]:
    """One of a run's JSON files. Raises ValueError, one line, where it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path}: not there; is {path.parent} a run directory?") from None
    except ValueError as e:
        raise ValueError(f"{path}: damaged ({e})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: damaged (not a JSON object)")
    return data
