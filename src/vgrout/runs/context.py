"""A run's folder, and how a run begins and ends, whatever it trains: files, exit codes, `status.json`. No torch.

Exit codes: 0 finished · 2 bad arguments or configuration, nothing started · 3 halted by the guard or a detector ·
4 diverged · 130 interrupted, state saved · 1 anything else.

Every file is written under a temporary name, flushed, and renamed, except the two growing ones (`steps.jsonl`,
`rollouts.jsonl`), to which a complete step at a time is appended and flushed.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import platform
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import NoReturn, TextIO

from loguru import logger
from tqdm import tqdm

from vgrout import console, faults, ranks
from vgrout.cli import command, out_of_memory, show_refusal
from vgrout.console import Clock
from vgrout.envs.base import Grader
from vgrout.errors import (
    Diverged,
    Halted,
    Interrupted,
    NothingAligned,
    NothingRouted,
    Refused,
)
from vgrout.files import (
    LEFT,
    Json,
    held,
    hold,
    probe_writable,
    read_json,
    regular,
    require_new,
    to_json,
    write_atomic,
)
from vgrout.interrupts import Interrupts
from vgrout.metrics import Rate
from vgrout.ranks import RankLost
from vgrout.records import began
from vgrout.runs.checkpoint_files import GROWING, complete, step_of
from vgrout.tracking import Trackers

RUNS = Path("out/runs")
# bytes reserved in a run's folder, so that a full disk still has room for status.json
RESERVE = 64 * 1024
STATES = ("running", "finished", "halted", "diverged", "unrouted", "interrupted", "failed")
# for good
ENDED = {"finished": "this run is finished", "unrouted": "this run is evaluated; it routed nothing"}
FINISHED, FAILED, REFUSED, HALTED, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
ONE_REQUEST_S = 2.0  # SIGTERMs within this time ask for one and the same end
FULL = (errno.ENOSPC, errno.EDQUOT)
STORAGE = (*FULL, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM)
NOTHING = "interrupted; nothing was started"
NONE_YET = "there is no checkpoint yet"


def exit_code(e: BaseException | None) -> int:
    """Of a run that this has ended; None: nothing did."""
    match e:
        case None:
            return FINISHED
        case Interrupted() | KeyboardInterrupt():
            return INTERRUPTED
        case Halted():
            return HALTED
        case Diverged():
            return DIVERGED
        case Refused():
            return REFUSED
        case _:
            return FAILED


# ── the folder


@dataclass(frozen=True, slots=True)
class Counted:
    """How many rows of steps.jsonl were counted, and how many bytes they take."""

    rows: int
    size: int


NOTHING_COUNTED = Counted(0, 0)


class RunDir:
    """`out/runs/<timestamp>_<run_id>/`."""

    def __init__(self, path: Path, made: Sequence[Path] = ()):
        """made: the folders above that were made for it, from below."""
        self.path, self.made = path, made
        self._files: dict[str, TextIO] = {}
        self._counted = NOTHING_COUNTED
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
            made = tuple(folder for folder in path.parents if not folder.exists())
            try:
                path.mkdir(parents=True)
            except FileExistsError:  # another process has just made it
                require_new(given, "--output-dir")
            else:
                return cls(path, made)

    def discard(self) -> None:
        """Remove it, and the folders above that were made for it."""
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in self.made:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

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

    def steps_on_disk(self) -> int:
        """How many rows are in steps.jsonl. What was counted before is not read again."""
        self._counted = counted(self.path, self._counted)
        return self._counted.rows

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

    def append(self, row: dict[str, object], rollouts: Iterable[dict[str, object]] | None) -> None:
        """Append a step: rollouts first, so that a row on disk always has its rollouts. None: they are elsewhere."""
        if rollouts is not None:
            self._append("rollouts.jsonl", rollouts)
        self._append("steps.jsonl", [row])

    def begin_again(self) -> None:
        """Empty the growing files, of a run that has no checkpoint: its steps are done again from the first."""
        for name in GROWING:
            if (self.path / name).exists():
                os.truncate(self.path / name, 0)

    def _append(self, name: str, records: Iterable[dict[str, object]]) -> None:
        # opened at the first write: a resume cuts the files back before that
        if name not in self._files:
            self._files[name] = open(  # noqa: SIM115
                self.path / name, "a", encoding="utf-8", errors="backslashreplace"
            )
        self._files[name].write(
            "".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records)
        )
        self._files[name].flush()


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


def counted(run: Path, before: Counted = NOTHING_COUNTED) -> Counted:
    """How many rows are in a run's steps.jsonl. What was counted before is not read again."""
    try:
        with open(run / "steps.jsonl", "rb", opener=regular) as lines:
            if os.fstat(lines.fileno()).st_size < before.size:  # it was cut back
                before = NOTHING_COUNTED
            lines.seek(before.size)
            rows, size = before.rows, before.size
            for line in lines:
                if line.endswith(b"\n"):  # the last one may be torn
                    rows += 1
                    size += len(line)
    except FileNotFoundError:
        return NOTHING_COUNTED
    return Counted(rows, size)


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


# ── the run


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
        resumes: bool,
        record: Mapping[str, object],
        log: Path,
        trackers: Trackers,
        steps_done: Callable[[], int] | None = None,
        owns_folder: bool = True,
    ) -> None:
        """resume_command: continues this run. record: entries of run.json (config, hashes of the input files) besides
        those on the machine. steps_done: steps (or rounds) that are on disk. owns_folder: whether the folder was made
        for this run, and is removed if the run is refused."""
        self._on_every_rank(grader, resumes)
        self.dir, self.resume_command = folder, resume_command
        self.record: dict[str, Json] = {
            **provenance(),
            # by which trackers know it; a folder's name may be that of another run's
            "tracker_id": secrets.token_hex(4),
            "hashes": {},
            **record,
        }
        self.log, self.logged = log, True  # whether the log was there before
        self.steps_done, self.owns_folder = steps_done or folder.steps_on_disk, owns_folder
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
        resumes = path is not None and has_checkpoint(path)
        log = Path("logs") / f"{folder.path.name}.log"
        with ExitStack() as undo:
            if path is None:
                undo.callback(folder.discard)
            undo.callback(folder.close)
            logged = log.exists()
            console.setup(log)
            undo.pop_all()  # the log is there, and the folder stays
        resume = f"{command(program)} --resume {shlex.quote(str(folder.path))}"
        run = cls(
            folder,
            grader,
            resume_command=resume,
            resumes=resumes,
            log=log,
            record=record,
            trackers=trackers,
            owns_folder=path is None,
        )
        run.logged = logged
        return run

    def _on_every_rank(self, grader: Grader, resumes: bool) -> None:
        self.grader, self.resumes, self.code = grader, resumes, FAILED
        self.error: BaseException | None = None
        self.stop, self.clock, self._open = Stop(), Clock(), ExitStack()
        # of bars that a notebook shows in place of the console's rows; `vgrout.train_run` sets it
        self.bars: type[tqdm] | None = None
        self._bar: tqdm | None = None  # while there are steps to do
        # set by vote_stop() alone: what is saved and where the loop ends is one decision
        self.stops = False

    @property
    def path(self) -> Path:
        return self.dir.path

    @property
    def hashes(self) -> dict[str, str | None]:
        """sha256 of the input files."""
        return self.record["hashes"]

    @property
    def stamp(self) -> dict[str, object]:
        """What every file of numbers records about how answers were graded."""
        return dict(self.grader.stamp)

    def announce(self, *what: str) -> None:
        """Say what runs and where, and write run.json of a new run, before anything is loaded: a sweep started
        meanwhile sees that it is running."""
        for line in (*what, f"run: {self.path} (log: {self.log.parent}/){self._where_from()}"):
            logger.info(line)
        if not (self.path / "run.json").exists():
            self.dir.write_json("run.json", self.record)

    def _where_from(self) -> str:
        """Where a run that was begun before goes on."""
        if self.owns_folder or not (self.path / "run.json").exists():
            return ""
        return f", {where_from(self.path)}"

    def started(self) -> None:
        """Called when everything is loaded, before the first step."""
        self._loading = False
        self.status("running", "")

    def status(self, state: str, reason: str, then: str = "") -> None:
        """Write status.json. Raises OSError where it cannot be written."""
        self.dir.status(state, self.steps_done(), reason, then or self.resume_command)

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
        with self._bar_of(steps) as shown:
            for step in shown:
                yield step
                if self.stops:
                    raise Interrupted(f"interrupted after step {step}")

    @contextmanager
    def _bar_of(self, steps: range) -> Generator[Iterable[int]]:
        """What is looped over: the steps themselves where `show_step` moves the bar."""
        if self.bars is not None:
            with console.notebook_bar(self.bars, steps) as self._bar:
                try:
                    yield steps
                finally:
                    self._bar = None
        else:
            at = {"initial": steps.start, "total": steps.stop}
            hidden = None if ranks.first() else True
            layout = (
                "{n_fmt} of {total_fmt} steps |{bar:24}| {elapsed} gone, about {remaining} left"
            )
            yield tqdm(steps, **at, bar_format=layout, leave=False, disable=hidden)

    def show_step(self, hack: Rate, solve: Rate) -> None:
        """Move a notebook's bar on by a step, of whose answers these shares hacked and solved."""
        if self._bar is not None:
            said = f"hack {hack.percent} %, solve {solve.percent} %"
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.update()

    def __enter__(self) -> "RunContext":
        self._open.enter_context(self.dir)
        self.stop = self._open.enter_context(stop_on_signals(lambda: self._loading))
        self._open.enter_context(self.clock)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> bool:
        self.error = e
        try:
            if not self._finish(e):
                assert e is not None
                self._fail(e)
        except BaseException as unexpected:
            self._fail(unexpected)
        self.trackers.close(self.code)
        self._open.close()
        return True

    def _finish(self, e: BaseException | None) -> bool:
        """Record how the run ended; returns whether that was one of the expected ways."""
        self.code = exit_code(e)
        match e:
            case None:
                self.status("finished", "", f"read {self.path / 'summary.md'}")
            case Refused() if self._loading:
                if self.owns_folder and not self.resumes:
                    self._discard()
                elif not self.logged:
                    self._remove_log()
                else:
                    logger.debug(f"refused: {e}")
                show_refusal(e)
            case Interrupted():
                self.status("interrupted", str(e))
                logger.warning(f"{e}; {self._go_on(saved='saved')}")
            case Halted():
                on = f"{self.resume_command} --guard log"
                self.status("halted", str(e), f"read the last answers; to go on all the same: {on}")
                logger.error(f"halted: {e}. To go on all the same: {on}")
            case Diverged():
                self.status("diverged", str(e), "lower --lr or --grad-clip and start again")
                logger.error(str(e))
            case NothingRouted():
                self.status(
                    "unrouted", str(e), f"see why nothing was flagged: {self.path / 'steps.jsonl'}"
                )
                logger.error(str(e))
            case NothingAligned() as e:
                self.status("failed", str(e), e.then)
                logger.error(f"{e}; {e.then}")
            case RankLost():
                self.status("failed", str(e))
                logger.error(f"{e}; {self._go_on()}")
            case _:
                return False
        return True

    def _discard(self) -> None:
        """Remove the folder of a run that never started, and its log, unless that is another run's as well."""
        if not self.logged:
            self._remove_log()
        self.dir.discard()

    def _remove_log(self) -> None:
        logger.remove()  # closes the log
        self.log.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            self.log.parent.rmdir()

    def _fail(self, e: BaseException) -> None:
        """Record an unexpected ending: a second interrupt, a full disk, a fault."""
        if isinstance(e, KeyboardInterrupt):
            self.code = INTERRUPTED
            why = "before the first step" if self._loading else "second interrupt: stopped at once"
            self._try_status("interrupted", why, self.resume_command)
            logger.error(
                f"stopped {'before the first step' if self._loading else 'at once'}; {self._go_on()}"
            )
            return
        self.code, self.error = FAILED, e
        if isinstance(e, Refused):
            self._refused_later(e)
            return
        # whatever somebody's own code raises is their fault to see, and not the disk's or the
        # memory's
        own = faults.raised_by_own(e)
        if not own and isinstance(e, OSError) and (e.errno in STORAGE or not self.path.is_dir()):
            self._storage_failed(e)
        elif said := out_of_memory(e):
            if own:
                faults.show(e)
            self._memory_failed(said)
        else:
            self._fault(e)

    def _refused_later(self, e: Refused) -> None:
        """Report a mistake that showed after the first step: a line, and its traceback in the log."""
        self._try_status("failed", str(e), self.resume_command)
        logger.opt(exception=e).debug("refused in a run under way")
        show_refusal(e)

    def _memory_failed(self, said: str) -> None:
        """Report that the memory was not enough, in one line."""
        train = "vgrout train " in self.resume_command
        less = (
            "with a lower --memory-gib"
            if train
            else "with more memory, or start again with a lower --max-new"
        )
        self._try_status("failed", said, f"{less}: {self.resume_command}")
        logger.error(f"{said}; {self._go_on(less)}")

    def _fault(self, e: BaseException) -> None:
        """Report a fault, ours or of somebody's own code: traceback on stderr and in the log."""
        said = f"{type(e).__name__}: {e}"
        self._try_status("failed", said, self.resume_command)
        # the console's lines have no traceback, the log's have
        logger.opt(exception=e).error(f"{said}; {self.path} and {self.log} are kept")
        faults.show(e)

    def _storage_failed(self, error: OSError) -> None:
        """Report a full or broken disk in one line and in status.json, for which room was reserved."""
        saved = self._saved()
        last = f"the last good checkpoint is {saved}" if saved else NONE_YET
        if error.errno in FULL:
            free = shutil.disk_usage(self.path).free // 1024
            reason = f"disk full ({error.strerror}; {free} KiB free below {self.path})"
            then = "free some space, then: "
        else:
            reason, then = f"files of the run cannot be written ({error})", "once they can: "
        then += self.resume_command
        self._try_status("failed", f"{reason}; {last}", then)
        logger.error(f"{reason}; {last}. {then[0].upper()}{then[1:]}")

    def _saved(self) -> str:
        """The folder's name of the last checkpoint, of a run or of rounds; "": there is none."""
        folders = [*self.path.glob("resume/step_*"), *self.path.glob("round-*")]
        names = [folder.name for folder in folders if (folder / "manifest.json").is_file()]
        return max(names, key=lambda name: (len(name), name), default="")

    def _go_on(self, how: str = "with", saved: str = "the last checkpoint stands") -> str:
        """What is left of a run that ended early, and the command that goes on with it.

        how: it should go on, before the command. saved: what is said where there is a checkpoint.
        """
        left, then = (saved, "Go on") if self._saved() else (NONE_YET, "Begin again")
        return f"{left}. {then} {how}: {self.resume_command}"

    def _try_status(self, state: str, reason: str, then: str) -> None:
        """Write status.json where even that may fail."""
        try:
            self.status(state, reason, then)
        except OSError as e:
            logger.error(f"{self.path}/status.json cannot be written ({e.strerror})")


def require_same(run: Path, now: Mapping[str, object]) -> None:
    """Raises Refused naming the input files that have changed since the run started."""
    before = read_json(run / "run.json")["hashes"]
    changed = ", ".join(name for name in now if name in before and before[name] != now[name])
    if changed:
        raise Refused(f"--resume {run}: changed since: {changed}; put them back")


def leave(code: int) -> NoReturn:
    """End the process with this exit code, and without a traceback where somebody interrupts that too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


@dataclass
class Stop:
    """Set by the signal handler, read once per step."""

    requested: bool = False


def _not_yet() -> bool:
    return False


@contextmanager
def stop_on_signals(at_once: Callable[[], bool] = _not_yet) -> Generator[Stop]:
    """Within the context the first signal asks for an end, the second raises KeyboardInterrupt, the third ends the
    process. A SIGTERM right after another one is the same request: the kernel sends one for every thread of a sweep
    that was killed.

    at_once: whether nothing can be lost yet. Then the first one raises already, once libraries that are being imported
    are there."""
    stop, said = Stop(), SimpleQueue[str]()

    # a thread of its own: a signal may come while a line is logged, and the logger's lock is held
    def say() -> None:
        while line := said.get():
            logger.warning(line)

    raised, interrupts, terminated = False, Interrupts(), -math.inf

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
            raised = not interrupts.wait(number, frame)
            if raised:
                raise KeyboardInterrupt
            return
        said.put(
            f"{signal.Signals(number).name}: finishing this step, then saving; once more to stop at once"
        )

    # a hangup is no reason to stop where it is ignored (nohup)
    asked = [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (
        signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    )
    thread = threading.Thread(target=say, daemon=True, name="signals")
    thread.start()
    before = {s: signal.signal(s, handler) for s in asked}
    try:
        yield stop
    finally:
        for s, old in before.items():
            signal.signal(s, old)
        said.put("")
        thread.join()
