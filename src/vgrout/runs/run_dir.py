"""A run's directory and how its files are written, whatever they hold.

Every file is written under a temporary name, flushed, and renamed, except the two growing ones (`steps.jsonl`,
`rollouts.jsonl`), to which a complete step at a time is appended and flushed.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from vgrout import ranks
from vgrout.files import read_json, to_json, write_atomic

RUNS = Path("out/runs")
RESERVE = 64 * 1024  # bytes reserved in a run's folder, so that a full disk still has room for status.json
STATES = ("running", "finished", "halted", "diverged", "unrouted", "interrupted", "failed")
ENDED = {"finished": "this run is finished", "unrouted": "this run is evaluated; it routed nothing"}  # for good


def _git() -> dict[str, Any]:
    """Revision of the checkout that this package runs from; {} without one."""
    here = Path(__file__).resolve().parents[1]

    def ask(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        top = Path(ask("rev-parse", "--show-toplevel").strip())
        if not (top / "src" / "vgrout" / "train.py").is_file():
            return {}
        return {"revision": ask("rev-parse", "HEAD").strip(), "dirty": bool(ask("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return {}


def environment() -> dict[str, Any]:
    """Where the numbers come from: command, revision, versions, machine."""
    versions = {"python": platform.python_version()}
    for package in ("vgrout", "torch", "transformers", "tokenizers", "safetensors", "numpy", "tyro"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "argv": sys.argv,
        **({"torchrun": job} if (job := ranks.torchrun_id()) else {}),
        "git": _git(),
        "versions": versions,
        "hardware": {"machine": platform.machine(), "system": platform.platform(), "cores": os.cpu_count()},
    }


class RunDir:
    """`out/runs/<timestamp>_<run_id>/`."""

    def __init__(self, path: Path, run_id: str):
        self.path, self.run_id = path, run_id
        self._files: dict[str, TextIO] = {}
        self._lock = hold(path)  # for as long as this process lives: two writers would break the run

    @classmethod
    def create(cls, run_id: str, root: Path = RUNS) -> "RunDir":
        """A new run directory. Raises ValueError in one line where it cannot be written."""
        stamp = datetime.now().strftime("%Y%m%dT%H%M%S")
        for k in range(1000):
            path = root / (f"{stamp}_{run_id}" if k == 0 else f"{stamp}.{k}_{run_id}")
            try:
                path.mkdir(parents=True)
                return cls(path, run_id)
            except FileExistsError:
                if path.is_dir():
                    continue
                raise ValueError(f"{root}: is not a folder; runs are written below it, so move it away") from None
            except OSError as e:
                raise ValueError(
                    f"{root}: cannot be written ({e.strerror}); start from a folder where out/ can be written"
                ) from None
        raise ValueError(f"{root}: a thousand runs named {run_id} in one second")

    @classmethod
    def reopen(cls, path: Path) -> "RunDir":
        """An existing run directory, to resume. Raises ValueError in one line while another process is writing it."""
        run = cls(path, path.name.split("_", 1)[-1])
        for torn in (*path.glob(".*.tmp"), *path.glob("resume/.tmp_*")):  # left by a killed process
            shutil.rmtree(torn) if torn.is_dir() else torn.unlink(missing_ok=True)
        return run

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # `append` has flushed, or has raised already
                file.close()
        self._files.clear()
        self._lock.close()

    def steps_on_disk(self) -> int:
        try:
            with open(self.path / "steps.jsonl", "rb") as lines:
                return sum(1 for _ in lines)
        except FileNotFoundError:
            return 0

    def write_json(self, name: str, data: Any) -> None:
        write_atomic(self.path / name, to_json(data))

    def status(self, state: str, step: int, reason: str, then: str) -> None:
        """Write status.json, which every exit leaves: state, steps done, the reason, and what to run next."""
        assert state in STATES, state
        data = {"state": state, "step": step, "reason": reason, "next": then, "time": time.time(), "pid": os.getpid()}
        reserve = self.path / ".reserve"
        if state == "running":
            if not reserve.exists():
                write_atomic(reserve, b"\0" * RESERVE)
        else:  # the run ends: the reserve is needed now, or no longer
            reserve.unlink(missing_ok=True)
        self.write_json("status.json", data)

    def append(self, row: dict[str, Any], rollouts: Iterable[dict[str, Any]] | None) -> None:
        """Append a step: rollouts first, so that a row on disk always has its rollouts. None: they are elsewhere."""
        if rollouts is not None:
            self._append("rollouts.jsonl", rollouts)
        self._append("steps.jsonl", [row])

    def _append(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        if name not in self._files:  # opened at the first write: a resume cuts the files back before that
            self._files[name] = open(  # noqa: SIM115
                self.path / name, "a", encoding="utf-8", errors="backslashreplace"
            )
        self._files[name].write("".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records))
        self._files[name].flush()


def hold(run: Path, what: str = "run") -> BinaryIO:
    """Lock the folder; the kernel unlocks it when the process ends, however it ends. Raises ValueError, one line, while
    another process holds the lock."""
    lock = open(run / ".lock", "ab")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"{run}: another process is writing this {what}; wait for it, or stop it first") from None
    except OSError:
        pass  # a file system without locks
    return lock


def held(run: Path) -> bool:
    """Whether some process is writing this run."""
    try:
        hold(run).close()
    except ValueError:
        return True
    except OSError:  # an unwritable folder is refused elsewhere, by name
        return False
    return False


def last_resumable(root: Path) -> Path:
    """The newest run that is not finished, has a checkpoint, and is not being written by a living process."""
    for path in sorted(root.glob("*_*"), reverse=True):
        if (
            any(path.glob("resume/step_*/manifest.json"))
            and read_json(path / "status.json").get("state") not in ENDED
            and not held(path)
        ):
            return path
    raise ValueError(f"--resume latest: no unfinished run with a checkpoint below {root} (running ones left out)")
