"""What a study is judged by, as one hash that a run notes down when it starts. Stdlib only."""

import hashlib
from pathlib import Path


def preregistered(studies: Path | None = None) -> str | None:
    """sha256 of what judges a study: every .toml and .py in its folder, and the report's statistics. A new run records
    it in run.json, as evidence that a claim was written before the run.

    studies: the folder; None: `studies` here, or else in this checkout. Returns None where it has no such file.
    """
    here = Path(__file__).resolve()
    for place in (studies,) if studies else (Path("studies"), here.parents[3] / "studies"):
        if files := sorted(
            file for end in ("*.toml", "*.py") for file in place.resolve().glob(end)
        ):
            digest = hashlib.sha256()
            for file in (*files, here.with_name("stats.py")):
                content = file.read_bytes()
                digest.update(f"{file.name} {len(content)}\n".encode() + content)
            return digest.hexdigest()
    return None
