"""A file that others read is there as a whole, or as it was before. Stdlib only."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO


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
