"""How a run begins and ends, whatever it trains: signals, `status.json`, the exit code. No torch."""

import contextlib
import errno
import math
import os
import platform
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType, TracebackType

from loguru import logger
from tqdm import tqdm

from vgrout.envs.base import Grader
from vgrout.ground import console, ranks
from vgrout.ground.console import Clock
from vgrout.ground.io import (
    Diverged,
    Halted,
    Interrupted,
    Json,
    NothingAligned,
    NothingRouted,
    Refused,
    command,
    out_of_memory,
    raised_by_own,
    show_fault,
    show_refusal,
)
from vgrout.ground.metrics import Rate
from vgrout.ground.ranks import RankLost
from vgrout.runs.checkpoint import complete
from vgrout.runs.run_dir import RUNS, RunDir, has_checkpoint, steps_on_disk, where_from
from vgrout.runs.tracking import Trackers

FULL = (errno.ENOSPC, errno.EDQUOT)
STORAGE = (*FULL, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM)
NOTHING_STARTED = "interrupted; nothing was started"
NONE_YET = "there is no checkpoint yet"
ONE_REQUEST_S = 2.0  # SIGTERMs within this time ask for one and the same end

# exit codes
FINISHED, FAILED, REFUSED, HALTED, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
# what ends a run in order, the state that it is then in, and its exit code
ENDINGS: dict[type[BaseException], tuple[str, int]] = {
    Interrupted: ("interrupted", INTERRUPTED),
    KeyboardInterrupt: ("interrupted", INTERRUPTED),
    Halted: ("halted", HALTED),
    Diverged: ("diverged", DIVERGED),
    NothingRouted: ("unrouted", FAILED),
    NothingAligned: ("failed", FAILED),
}


def state_and_code(e: BaseException | None) -> tuple[str, int]:
    """State and exit code of a run that this has ended; None: nothing did. Not of a refusal before the first step."""
    return ("finished", FINISHED) if e is None else ENDINGS.get(type(e), ("failed", FAILED))


@dataclass
class Stop:
    """Set by the signal handler, read once per step."""

    requested: bool = False


@contextmanager
def stop_on_signals(at_once: Callable[[], bool] = lambda: False) -> Generator[Stop]:
    """Within the context the first signal asks for an end, the second raises KeyboardInterrupt, the third ends the
    process. A SIGTERM right after another one is the same request: the kernel sends one for every thread of a sweep
    that was killed.

    at_once: whether nothing can be lost yet. Then the first one raises already."""
    stop = Stop()
    raised, terminated = False, -math.inf

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal raised, terminated
        if number == signal.SIGTERM:
            now = time.monotonic()
            if now - terminated < ONE_REQUEST_S:
                return
            terminated = now
        if raised:  # it is cleaning up, and somebody has no time
            os._exit(INTERRUPTED)
        stops_now = stop.requested or at_once()
        stop.requested = True
        if stops_now:
            raised = True
            raise KeyboardInterrupt
        # not through the logger, whose lock may be held
        said = f"\nW {signal.Signals(number).name}: finishing this step, then saving; once more to stop at once\n"
        os.write(2, said.encode())

    # a hangup is no reason to stop where it is ignored (nohup)
    asked = [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (
        signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    )
    before = {s: signal.signal(s, handler) for s in asked}
    try:
        yield stop
    finally:
        for s, old in before.items():
            signal.signal(s, old)


class RunContext:
    """A run under way: its folder, its grader, stop signals, and the clock of its phases.

    `with RunContext(…) as run:` holds the folder's lock. However the block ends, `status.json`
    records it (state, steps done, reason, what to run next), `run.code` is the exit code, and
    nothing is raised. Until `started` a Refused is the user's mistake (exit 2, one line on stderr):
    a new run's folder and log are removed, a resumed run is left as it was. Any other exception
    that is not one of the ways in which a run may end is a fault (exit 1): its traceback is on
    stderr and in the log, and both folder and log are kept. `run.error` is what ended the block; None
    where nothing was raised.
    """

    def __init__(
        self,
        folder: RunDir,
        grader: Grader,
        *,
        resume_command: str,
        record: Mapping[str, object],
        log: Path,
        trackers: Trackers,
        logged: bool = True,
    ) -> None:
        """resume_command: continues this run. record: entries of run.json (config, hashes of the input files) besides
        those on the machine. logged: whether the log was there before."""
        self._on_every_rank(grader, has_checkpoint(folder.path))
        self.dir, self.resume_command = folder, resume_command
        self.record: dict[str, Json] = {
            **provenance(),
            # by which trackers know it; a folder's name may be that of another run's
            "tracker_id": secrets.token_hex(4),
            "hashes": {},
            **record,
        }
        self.log, self.logged = log, logged
        self.trackers, self._loading = trackers, True

    @classmethod
    def begin(
        cls,
        program: str,
        path: Path | None,
        run_id: str,
        grader: Grader,
        *,
        root: Path = RUNS,
        given: Path | None = None,
        record: Mapping[str, object],
        trackers: Trackers,
    ) -> "RunContext":
        """A run in a new folder, `given` or below `root`, or in `path`, that of the run to resume; its log lies below
        logs/. A run to resume that has no checkpoint begins again at step 0.

        program: the command without `--resume`. record, trackers: as for `RunContext`.
        """
        folder = RunDir.reopen(path) if path else RunDir.create(run_id, root, given)
        log = Path("logs") / f"{folder.path.name}.log"
        with ExitStack() as undo:
            undo.callback(folder.discard)
            undo.callback(folder.close)
            logged = log.exists()
            console.setup(log)
            undo.pop_all()  # the log is there, and the folder stays
        return cls(
            folder,
            grader,
            resume_command=f"{command(program)} --resume {shlex.quote(str(folder.path))}",
            record=record,
            log=log,
            trackers=trackers,
            logged=logged,
        )

    def _on_every_rank(self, grader: Grader, resumes: bool) -> None:
        self.grader, self.resumes, self.code = grader, resumes, FAILED
        self.error: BaseException | None = None
        self.stop, self.clock, self._open = Stop(), Clock(), ExitStack()
        # of bars that a notebook shows in place of the console's rows; `vgrout.train_run` sets it
        self.bars: type[tqdm] | None = None
        self._bar: tqdm | None = None  # from the first step on
        # set by vote_stop() alone: what is saved and where the loop ends is one decision
        self.stops = False

    @property
    def path(self) -> Path:
        return self.dir.path

    @property
    def stamp(self) -> dict[str, object]:
        """What every file of numbers records about how answers were graded."""
        return dict(self.grader.stamp)

    def announce(self, *what: str) -> None:
        """Say what runs and where, and write run.json of a new run, before anything is loaded: a sweep started
        meanwhile sees that it is running."""
        is_new = not (self.path / "run.json").exists()
        on = "" if is_new else f", {where_from(self.path)}"
        for line in (*what, f"run: {self.path} (log: {self.log.parent}/){on}"):
            logger.info(line)
        if is_new:
            self.dir.write_json("run.json", self.record)

    def started(self) -> None:
        """Called when everything is loaded, before the first step."""
        if self.stop.requested:  # by a signal that a library swallowed while it was imported
            raise KeyboardInterrupt
        self._loading = False
        self.running(steps_on_disk(self.path))

    def running(self, steps: int) -> None:
        """Write status.json of a run under way. steps: how many are done."""
        self.dir.status("running", steps, "", self.resume_command)

    def vote_stop(self) -> bool:
        """Whether to stop: a signal to one rank stops all, after the same step.

        A signal that comes while this step is being written waits for the next call, when its state will be saved.
        """
        if any(ranks.gather(lambda: self.stop.requested)):
            self.stops = self.stop.requested = True
        return self.stops

    def raise_if_stopped(self, what: str) -> None:
        """Raises Interrupted after a signal. what: the reason in status.json."""
        if self.stop.requested:
            raise Interrupted(what)

    def steps(self, steps: range) -> Iterable[int]:
        """The steps, with a progress bar on a terminal or in a notebook. Raises Interrupted after the step in which a
        stop was voted."""
        with console.step_bar(self.bars, steps, hidden=not ranks.first()) as self._bar:
            for step in steps:
                yield step
                self._bar.update()
                if self.stops:
                    raise Interrupted(f"interrupted after step {step}")

    def show_step(self, hack: Rate, solve: Rate) -> None:
        """Write beside a notebook's bar how many of this step's answers hacked and solved."""
        if self._bar is not None:
            said = f"hack {hack.percent} %, solve {solve.percent} %"
            self._bar.set_postfix_str(said, refresh=False)

    def __enter__(self) -> "RunContext":
        self._open.enter_context(self.dir)
        self.stop = self._open.enter_context(stop_on_signals(lambda: self._loading))
        self._open.enter_context(self.clock)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> bool:
        if self._loading and self.stop.requested:
            # what a library makes of an interrupt while it is imported is no fault
            e = KeyboardInterrupt()
        try:
            self._end(e)
        except BaseException as unexpected:
            self._end(unexpected)
        self.trackers.close(self.code)
        self._open.close()
        return True

    def _end(self, e: BaseException | None) -> None:
        """Record how the run ended, and say so."""
        state, self.code = state_and_code(e)
        self.error = e
        if isinstance(e, Refused) and self._loading:
            self.code = REFUSED
            self._refused_before(e)
            return
        reason, then, said = self._account(e)
        try:
            self.dir.status(state, steps_on_disk(self.path), reason, then)
        except OSError as error:
            if state != "failed":
                self._end(error)
                return
            logger.error(f"{self.path}/status.json cannot be written ({error.strerror})")
        if e is None:
            return
        if isinstance(e, Refused):
            logger.opt(exception=e).debug("refused in a run under way")
            show_refusal(e)
        elif said:
            if out_of_memory(e) and raised_by_own(e):
                show_fault(e)
            logger.log("WARNING" if isinstance(e, Interrupted) else "ERROR", said)
        else:  # a fault, ours or of somebody's own code
            # the console's lines have no traceback, the log's have
            logger.opt(exception=e).error(f"{reason}; {self.path} and {self.log} are kept")
            show_fault(e)

    def _account(self, e: BaseException | None) -> tuple[str, str, str]:
        """The reason and what to do next, for status.json; and the console's line, "" for a fault."""
        again = self.resume_command
        # whatever somebody's own code raises is their fault to see, and not the disk's
        own = raised_by_own(e)
        if not own and not self.path.is_dir():
            gone = f"{self.path} is gone: deleted or renamed while the run wrote to it"
            return gone, "", gone
        match e:
            case None:
                return "", f"read {self.path / 'summary.md'}", ""
            case Interrupted():
                return str(e), again, f"{e}; {self._go_on(saved='saved')}"
            case KeyboardInterrupt() if self._loading:
                when = "before the first step"
                return when, again, f"stopped {when}; {self._go_on()}"
            case KeyboardInterrupt():
                said = f"stopped at once; {self._go_on()}"
                return "second interrupt: stopped at once", again, said
            case Halted():
                on = f"go on all the same: {again} --guard log"
                return str(e), f"read the last answers; to {on}", f"halted: {e}. To {on}"
            case Diverged():
                return str(e), "lower --lr or --grad-clip and start again", str(e)
            case NothingRouted():
                steps = self.path / "steps.jsonl"
                return str(e), f"see why nothing was flagged: {steps}", str(e)
            case NothingAligned():
                return str(e), e.then, f"{e}; {e.then}"
            case Refused():
                return str(e), again, str(e)
            case RankLost():
                return str(e), again, f"{e}; {self._go_on()}"
            case OSError() if not own and e.errno in STORAGE:
                return self._of_storage(e)
        if memory := out_of_memory(e):
            less = "with more memory, or start again with a lower --max-new"
            if "vgrout train " in again:
                less = "with a lower --memory-gib"
            return memory, f"{less}: {again}", f"{memory}; {self._go_on(less)}"
        return f"{type(e).__name__}: {e}", again, ""

    def _refused_before(self, e: Refused) -> None:
        """Say a user's mistake that showed while the run was loaded, of which nothing is left."""
        if self.logged:
            logger.debug(f"refused: {e}")
        else:
            logger.remove()  # closes the log
            self.log.unlink(missing_ok=True)
        self.dir.discard()
        show_refusal(e)

    def _of_storage(self, error: OSError) -> tuple[str, str, str]:
        """`_account` of a full or broken disk. Room for status.json was reserved."""
        saved = complete(self.path)
        last = f"the last good checkpoint is {saved[-1].name}" if saved else NONE_YET
        if error.errno in FULL:
            reason, when = f"disk full ({error.strerror})", "free some space, then"
        else:
            reason, when = f"files of the run cannot be written ({error})", "once they can"
        then = f"{when}: {self.resume_command}"
        return f"{reason}; {last}", then, f"{reason}; {last}. {then[0].upper()}{then[1:]}"

    def _go_on(self, how: str = "with", saved: str = "the last checkpoint stands") -> str:
        """What is left of a run that ended early, and the command that goes on with it.

        how: it should go on, before the command. saved: what is said where there is a checkpoint.
        """
        left, then = (saved, "Go on") if complete(self.path) else (NONE_YET, "Begin again")
        return f"{left}. {then} {how}: {self.resume_command}"


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
    for package in [
        "vgrout",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "tyro",
    ]:
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
