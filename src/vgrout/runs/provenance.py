"""Where a run's numbers come from: command, revision, versions, machine."""

import contextlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vgrout import ranks


def git(here: Path) -> dict[str, object]:
    """Revision of the checkout that this package runs from, and whether its code is edited: a tracked file, or a new
    one below src/. {} without a checkout.

    here: the package's folder.
    """

    def ask(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        top = Path(ask("rev-parse", "--show-toplevel").strip())
        if not (top / "src" / "vgrout" / "train.py").is_file():
            return {}
        edited = ask("status", "--porcelain", "--untracked-files=no")
        new = ask("ls-files", "--others", "--exclude-standard", "--", str(top / "src"))
        return {
            "revision": ask("rev-parse", "HEAD").strip(),
            "dirty": bool(f"{edited}{new}".strip()),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def provenance() -> dict[str, object]:
    """Where the numbers come from: command, revision, versions, machine."""
    versions = {"python": platform.python_version()}
    for package in (
        "vgrout",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "tyro",
    ):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "argv": sys.argv,
        "began_at": datetime.now(UTC).isoformat(),
        **({"torchrun": job} if (job := ranks.torchrun_id()) else {}),
        "git": git(Path(__file__).resolve().parents[1]),
        "versions": versions,
        "hardware": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
        },
    }
