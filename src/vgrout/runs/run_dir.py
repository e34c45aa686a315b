"""A run's folder: what is written to it, what is there already, and whether somebody is writing it. No torch.

Every file is written under a temporary name, flushed, and renamed, except the two growing ones (`steps.jsonl`,
`rollouts.jsonl`), to which a complete step at a time is appended and flushed.
"""

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TextIO

from loguru import logger

from vgrout.ground import ranks
from vgrout.ground.io import (
    LEFT,
    Json,
    Refused,
    held,
    hold,
    make_folder,
    probe_writable,
    read_json,
    regular,
    require_new,
    to_json,
    write_atomic,
)
from vgrout.ground.records import began
from vgrout.runs.checkpoint import GROWING, complete, none_left, step_of

RUNS = Path("out/runs")
# bytes reserved in a run's folder, so that a full disk still has room for status.json
RESERVE = 64 * 1024
STATES = ("running", "finished", "halted", "diverged", "unrouted", "interrupted", "failed")
# for good
ENDED = {"finished": "this run is finished", "unrouted": "this run is evaluated; it routed nothing"}


class RunDir:
    """`out/runs/<timestamp>_<run_id>/`."""

    def __init__(self, path: Path, new: bool = False):
        """new: it was made for this run."""
        self.path, self.new = path, new
        self._files: dict[str, TextIO] = {}
        # for as long as this process lives: two writers would break the run
        self._lock = hold(path)

    @classmethod
    def create(cls, run_id: str, root: Path = RUNS, given: Path | None = None) -> "RunDir":
        """A new run directory, `given` or named below `root`. Raises Refused in one line where it cannot be
        written."""
        require_new(given, "--output-dir")
        probe_writable(root if given is None else given.parent)
        names = _names(run_id)
        while True:
            path = given or root / next(names)
            try:
                make_folder(path.parent)
                path.mkdir()
            except FileExistsError:  # another process has just made it
                require_new(given, "--output-dir")
            else:
                return cls(path, new=True)

    def discard(self) -> None:
        """Remove it, where it was made for this run."""
        if self.new:
            shutil.rmtree(self.path, ignore_errors=True)

    @classmethod
    def reopen(cls, path: Path) -> "RunDir":
        """An existing run directory, to resume. Raises Refused in one line while another process is writing it."""
        run = cls(path)
        left = [
            file for file in path.iterdir() if file.name != ".lock" and LEFT.fullmatch(file.name)
        ]
        for torn in (*left, *path.glob("resume/.tmp_*")):  # by a killed process
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

    def write_json(self, name: str, data: object) -> None:
        write_atomic(self.path / name, to_json(data))

    def status(self, state: str, step: int, reason: str, then: str) -> None:
        """Write status.json, which every exit leaves: state, steps done, the reason, and what to run next."""
        assert state in STATES, state
        data = {
            "state": state,
            "step": step,
            "reason": reason,
            "next": then,
            "time": time.time(),
            "pid": os.getpid(),
            **({"torchrun": job} if (job := ranks.torchrun_id()) else {}),
        }
        reserve = self.path / ".reserve"
        if state == "running":
            if not reserve.exists():
                write_atomic(reserve, b"\0" * RESERVE)
        else:  # the run ends: the reserve is needed now, or no longer
            reserve.unlink(missing_ok=True)
        self.write_json("status.json", data)

    def append(self, row: dict[str, object], rollouts: Iterable[dict[str, object]]) -> None:
        """Append a step: rollouts first, so that a row on disk always has its rollouts."""
        for name, records in (("rollouts.jsonl", rollouts), ("steps.jsonl", [row])):
            # opened at the first write: a resume cuts the files back before that
            if name not in self._files:
                self._files[name] = open(  # noqa: SIM115
                    self.path / name, "a", encoding="utf-8", errors="backslashreplace"
                )
            lines = [json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records]
            self._files[name].write("".join(lines))
            self._files[name].flush()

    def begin_again(self) -> None:
        """Empty the growing files, of a run that has no checkpoint: its steps are done again from the first."""
        for name in GROWING:
            if (self.path / name).exists():
                os.truncate(self.path / name, 0)


def last_resumable(root: Path) -> Path:
    """The newest run that is not finished, has a checkpoint, and is not being written by a living process."""
    for path in sorted(root.glob("*_*"), key=began, reverse=True):
        if not complete(path):
            continue
        try:
            read_json(path / "run.json")
            state = read_json(path / "status.json").get("state")
        except Refused as e:  # copied in part, or damaged
            logger.warning(f"--resume latest: {e}; passed over")
            continue
        if state not in ENDED and not held(path):
            return path
    raise Refused(
        f"--resume latest: no unfinished run with a checkpoint below {root} (running ones left out)"
    )


def steps_on_disk(run: Path) -> int:
    """How many rows are in a run's steps.jsonl."""
    try:
        with open(run / "steps.jsonl", "rb", opener=regular) as lines:
            return sum(line.endswith(b"\n") for line in lines)  # the last one may be torn
    except FileNotFoundError:
        return 0


def _names(run_id: str) -> Iterator[str]:
    """Names for a run's folder: by the second in which it begins, numbered where that is taken."""
    stamp = datetime.now().strftime("%Y%m%dT%H%M%S")
    yield f"{stamp}_{run_id}"
    for k in itertools.count(1):
        yield f"{stamp}.{k}_{run_id}"


def has_checkpoint(run: Path) -> bool:
    """Whether something of a checkpoint is there, damaged or not."""
    return any(run.glob("resume/step_*"))


def where_from(run: Path) -> str:
    """Where a run that is resumed goes on, in words."""
    checkpoints = complete(run)
    if checkpoints:
        return f"which goes on after step {step_of(checkpoints[-1]) - 1}"
    return "which has no checkpoint and begins again"


def require_same(run: Path, now: Mapping[str, object]) -> None:
    """Raises Refused naming the input files that have changed since the run started."""
    before = read_json(run / "run.json")["hashes"]
    changed = ", ".join(name for name in now if name in before and before[name] != now[name])
    if changed:
        raise Refused(f"--resume {run}: changed since: {changed}; put them back")


def run_to_resume(
    name: str, program: str, setting: str, root: Path
) -> tuple[Path, dict[str, Json], dict[str, Json]]:
    """The folder that --resume names, with its run's configuration and status. setting: one that only this program's
    runs have.

    Raises:
        Refused: no such run, another program's, a finished one, or one that has lost its checkpoints; one line.
    """
    path = last_resumable(root) if name == "latest" else Path(name)
    record = read_json(path / "run.json")
    try:
        done = steps_on_disk(path)
    except OSError as e:
        raise Refused(f"{path / 'steps.jsonl'}: cannot be read ({e.strerror})") from None
    if (path / "status.json").exists() or has_checkpoint(path) or done:
        status = read_json(path / "status.json")
    else:  # killed while it loaded
        status = {"state": "running"}
    config = record.get("config")
    of_program = (
        isinstance(config, dict) and setting in config and isinstance(record.get("hashes"), dict)
    )
    if not of_program or status.get("state") not in STATES:
        raise Refused(
            f"--resume {path}: not a run of vgrout.{program}; give one of those below {root}"
        )
    if status["state"] in ENDED:
        raise Refused(f"--resume {path}: {ENDED[status['state']]}; nothing is left to do")
    every = config.get("run", config).get("checkpoint_every", 0)
    # begun again, it would lose steps that a checkpoint had
    if not has_checkpoint(path) and done > every:
        raise none_left(path, [f"resume/ is empty after {done} steps; put it back"])
    return path, config, status
