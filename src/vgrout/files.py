"""Files written atomically, and JSON. Stdlib only."""

import contextlib
import hashlib
import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def atomic_open(path: Path) -> Generator[BinaryIO]:
    """A binary file to write that replaces `path` when the block ends well: temporary name, flush, sync, rename. After
    an exception `path` is as it was."""
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
    """Write `data` to `path`; after a kill or an error the file holds all of it or is as it was."""
    with atomic_open(path) as f:
        f.write(data.encode() if isinstance(data, str) else data)


def to_json(data: Any) -> str:
    """Strict JSON, indented. Raises ValueError on a NaN, which other readers cannot parse."""
    return json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False, default=str)


def probe_writable(folder: Path) -> None:
    """Check that files can be created in `folder`, which is made. Raises ValueError, one line, where they cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        raise ValueError(f"{folder}: cannot be written ({e.strerror}); start from a folder where it can") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a run's file. Raises ValueError, one line, where it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path}: not there; is {path.parent} a run directory?") from None
    except ValueError as e:
        raise ValueError(f"{path}: damaged ({e})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: damaged (not a JSON object)")
    return data


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; none where there is no such file. Raises ValueError, naming a damaged line."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as e:
                raise ValueError(f"{path}, line {number}: damaged ({e})") from None


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Indented JSON; folders are made. Not atomic: for folders that are renamed as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
