"""How a run begins and ends, whatever it trains: exit codes, refusals, and `status.json` with the last word. No torch.

Exit codes: 0 finished · 2 bad arguments or configuration, nothing started · 3 halted by the guard or a detector ·
4 diverged · 130 interrupted, state saved · 1 anything else.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from loguru import logger

from vgrout.console import Clock
from vgrout.files import read_json
from vgrout.runs.run_dir import RunDir
from vgrout.runs.signals import Stop, stop_on_signals

FINISHED, FAILED, BAD, HALTED, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
FULL = (errno.ENOSPC, errno.EDQUOT)
STORAGE = (*FULL, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM)
NOTHING = "interrupted; nothing was started"

T = TypeVar("T")


class Interrupted(Exception):
    """SIGINT or SIGTERM: the current step was finished and saved."""


class Halted(Exception):
    """The guard or a detector stopped the run."""


class Diverged(Exception):
    """Not finite three steps in a row, or the policy lost tokens that it had."""


def run_with_status(
    run: RunDir,
    again: str,
    resumes: bool,
    load: Callable[[Stop, Clock], T],
    go: Callable[[T], int],
    done: Callable[[], int] | None = None,
) -> int:
    """Load, go; whatever happens, `status.json` has the last word. Every exit leaves it with state, steps done, reason
    and what to run next.

    again: the command that goes on. load: raises ValueError, one line, where files do not fit the model; a refused
        resume leaves the run as it was. go: see `concluded`. done: steps (or rounds) that are on disk.
    """
    done = done or run.steps_on_disk
    try:
        with run, stop_on_signals() as stop, Clock() as clock:
            try:
                with clock("loading"):
                    loaded = load(stop, clock)
            except ValueError as e:
                if not resumes:
                    last_word(run, "failed", 0, str(e), "correct the flag and start again")
                logger.error(str(e))
                return BAD
            return go(loaded)
    except KeyboardInterrupt:
        last_word(run, "interrupted", done(), "second interrupt: stopped at once", again)
        logger.error(f"stopped at once; the last checkpoint stands. Go on with: {again}")
        return INTERRUPTED
    except BaseException as e:
        if isinstance(e, OSError) and (e.errno in STORAGE or not run.path.is_dir()):
            return storage_failed(run, e, again, done())
        last_word(run, "failed", done(), f"{type(e).__name__}: {e}", again)
        logger.opt(exception=True).error(f"{type(e).__name__}: {e}")
        return FAILED


def finish(run: RunDir, again: str, done: Callable[[], int], body: Callable[[], None]) -> int | None:
    """Run `body`; write down how it was stopped, and return that exit code. None: it came to its end.

    done: steps (or rounds) done so far.
    """
    try:
        body()
    except Interrupted as e:
        run.status("interrupted", done(), str(e), again)
        logger.warning(f"{e}; saved. Go on with: {again}")
        return INTERRUPTED
    except Halted as e:
        on = f"{again} --guard log"
        run.status("halted", done(), str(e), f"read the last answers; to go on all the same: {on}")
        logger.error(f"halted: {e}. To go on all the same: {on}")
        return HALTED
    except Diverged as e:
        run.status("diverged", done(), str(e), "lower --lr or --grad-clip and start again")
        logger.error(str(e))
        return DIVERGED
    return None


def last_word(run: RunDir, state: str, step: int, reason: str, then: str) -> None:
    """A run's status where even that may fail."""
    try:
        run.status(state, step, reason, then)
    except OSError as e:
        logger.error(f"{run.path}/status.json cannot be written ({e.strerror})")


def storage_failed(run: RunDir, error: OSError, again: str, done: int) -> int:
    """The last good checkpoint stands; say so in a file that has room kept for it, and in one line."""
    points = sorted(run.path.glob("resume/step_*/manifest.json"), key=lambda p: (len(p.parent.name), p.parent.name))
    last = f"the last good checkpoint is {points[-1].parent.name}" if points else "there is no checkpoint"
    if error.errno in FULL:
        free = shutil.disk_usage(run.path).free // 1024
        reason, then = f"disk full ({error.strerror}; {free} KiB free below {run.path})", "free some space, then: "
    else:
        reason, then = f"files of the run cannot be written ({error})", "once they can: "
    last_word(run, "failed", done, f"{reason}; {last}", then + again)
    logger.error(f"{reason}; {last}. {then[0].upper()}{then[1:]}{again}")
    return FAILED


def require_same(run: Path, now: Mapping[str, object], force: bool) -> None:
    """Raises ValueError naming the inputs whose bytes are no longer those that the run started from."""
    then = read_json(run / "run.json")["hashes"]
    changed = ", ".join(name for name in now if name in then and then[name] != now[name])
    if changed and not force:
        raise ValueError(f"--resume {run}: changed since: {changed}; put them back, or add --resume-force")
