"""The ranks beside rank 0: started on this machine, or by torchrun, and the run as it looks from there.

Rank 0 is the process that the user has started. It forks the others once everything heavy is imported and before there
is a thread, so that they have torch for nothing; with a GPU, whose driver does not survive a fork, they are spawned.
"""

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from loguru import logger

from vgrout import ranks
from vgrout.config.run import ORGANISM, Config
from vgrout.files import read_json
from vgrout.grading.grade import Grader, cores
from vgrout.ranks import Place, RankLost
from vgrout.runs.preflight import gpu_here
from vgrout.runs.run_context import FINISHED, RunContext
from vgrout.runs.run_dir import RUNS
from vgrout.runs.signals import stop_on_signals

SAMPLED = 0.2  # seconds in which the idle cores are counted
AFTERWARDS = 10.0  # seconds that a rank may take to end after rank 0 has


def ranks_of(cfg: Config) -> int:
    """How many this process is to start, itself included.

    Raises:
        ValueError: more than a step has rows, or another number than torchrun's.
    """
    asked, place = cfg.run.ranks, ranks.under_torchrun()
    if place is not None:
        if asked not in (1, place.size):
            raise ValueError(f"--ranks {asked}: torchrun has started {place.size}; leave it out")
        return 1
    if asked != "auto":
        if asked > cfg.generations:
            raise ValueError(f"--ranks {asked}: a step has {cfg.generations} rollouts; give at most as many")
        return int(asked)
    if gpu_here() or cfg.scale.model != ORGANISM:
        return 1  # a GPU is one rank's; a larger model on a CPU has every core by threads
    return max(1, min(idle_cores(), cfg.generations))


def begun_by_torchrun(asked: Config) -> Config:
    """After torchrun's restart the run that this command began, from its last checkpoint; else what was asked."""
    place = ranks.under_torchrun()
    if place is None or place.attempt == "0" or asked.run.resume:
        return asked
    for path in sorted(RUNS.glob("*_*"), reverse=True):
        if read_json(path / "run.json").get("torchrun") == ranks.torchrun_id():
            if any(path.glob("resume/step_*/manifest.json")):
                return replace(asked, run=replace(asked.run, resume=str(path)))
            break  # it had not come to a checkpoint: begin again
    return asked


def idle_cores() -> int:
    """Cores that this process may use and that nobody uses just now; 1 where that cannot be read."""
    if cores() == 1:
        return 1
    try:
        mine = os.sched_getaffinity(0)
        before = _idle_seconds()
        time.sleep(SAMPLED)
        after = _idle_seconds()
    except (OSError, ValueError, AttributeError):
        return 1
    return max(1, sum(after.get(core, 0) - before.get(core, 0) > SAMPLED / 2 for core in mine))


def _idle_seconds() -> dict[int, float]:
    """Core → seconds in which it had nothing to do."""
    tick, out = os.sysconf("SC_CLK_TCK"), {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *times = line.split()
        if name.startswith("cpu") and name != "cpu":
            out[int(name[3:])] = (int(times[3]) + int(times[4])) / tick
    return out


@dataclass
class Ranks:
    """A run's process group before it is joined."""

    place: Place | None = None
    peers: Any = None  # torch's context of the processes that were started here

    @contextlib.contextmanager
    def joined(self, told: object) -> Generator[None]:
        """Rank 0 in its group, the others told what to run."""
        with ranks.joined(self.place, self.gone):
            ranks.from_first(told)
            yield

    def gone(self) -> str | None:
        """Which of the processes that were started here has ended badly, and how."""
        for i, process in enumerate(self.peers.processes if self.peers else ()):
            if code := process.exitcode:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"rank {i + 1} (process {process.pid}) {how}"
        return None


@contextlib.contextmanager
def started(n: int, follow: Callable[[Place, Path], object], log: Path) -> Generator[Ranks]:
    """`n` ranks on this machine; 1: this process alone, or torchrun's rank 0. They end with the block.

    follow: what the others do. log: stem of the files that have what they say.
    """
    if n == 1:
        yield Ranks(ranks.under_torchrun())
        return
    from torch import multiprocessing

    from vgrout import loading  # noqa: F401 what takes seconds to import is there before the fork

    listener = socket.create_server(("127.0.0.1", 0))
    place = Place(0, n, "127.0.0.1", listener.getsockname()[1])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else a machine without a network has no group
    sys.stdout.flush()
    sys.stderr.flush()
    peers = multiprocessing.start_processes(
        _peer, (follow, place, log), n - 1, join=False, start_method="spawn" if gpu_here() else "fork"
    )
    try:
        yield Ranks(replace(place, listening=listener.detach()), peers)
    finally:
        _ended(peers)


def _peer(i: int, follow: Callable[[Place, Path], object], place: Place, log: Path) -> None:
    """Entry of a process that `started` made."""
    place = replace(place, rank=i + 1)
    os.environ["LOCAL_RANK"] = str(place.rank)
    path = log.with_name(f"{log.name}_{os.getppid()}_rank{place.rank}.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as said:  # what a rank has to say is for whoever looks into its failure
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    logger.remove()  # rank 0 says what there is to say
    code = follow(place, log)
    if code == FINISHED and not path.stat().st_size:
        path.unlink()
    os._exit(int(bool(code)))  # nothing that was copied from rank 0 is closed a second time


def _ended(peers: Any) -> None:
    """Wait for them, then end them; at once, where one is lost."""
    until = time.monotonic() + (0 if ranks.abandoned() else AFTERWARDS)
    for process in peers.processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


class Peer(RunContext):
    """A run as a rank beside rank 0 sees it: the same loop, and nothing is written."""

    def __init__(self, path: Path, grader: Grader, resumes: bool) -> None:
        self._on_every_rank(grader, resumes)
        self.path_of_first = path

    @property
    def path(self) -> Path:
        """Rank 0's; on another machine it need not be there."""
        return self.path_of_first

    def started(self) -> None:
        pass

    def status(self, state: str, reason: str, then: str = "") -> None:
        pass

    def __enter__(self) -> "Peer":
        self.stop = self._open.enter_context(stop_on_signals())
        self._open.enter_context(self.clock)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> bool:
        self._open.close()
        match e:
            case None:
                self.code = FINISHED
            case RankLost():  # rank 0 says it, unless it is rank 0 that is gone
                print(f"E {e}", file=sys.stderr)
            case _:
                traceback.print_exception(e)
        return True
