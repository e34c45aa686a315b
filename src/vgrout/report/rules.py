"""What a study is judged by, as one hash that a run notes down when it starts. Stdlib only."""

import hashlib
from pathlib import Path


def preregistered(studies: Path | None = None) -> str | None:
    """Return the sha256 of what judges a study; None: there is nothing.

    That is every .toml and .py in its folder, and the report's statistics. A new run records it in
    run.json, as evidence that a claim was written before the run.

    studies: the folder; None: `studies` here, or else in this checkout.
    """
    here = Path(__file__).resolve()
    places = [studies] if studies else [Path("studies"), here.parents[3] / "studies"]
    for place in places:
        folder = place.resolve()
        files = sorted([*folder.glob("*.toml"), *folder.glob("*.py")])
        if not files:
            continue
        digest = hashlib.sha256()
        for file in (*files, here.with_name("stats.py")):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()
    return None
