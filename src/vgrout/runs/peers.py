"""The ranks beside rank 0: how they are started, and the run as they see it.

Rank 0 is the process that the user started. It forks the others after everything heavy is imported and before there is
a second thread, so that they share the imports; with a GPU, whose driver does not survive a fork, they are spawned.
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
from vgrout.config.run import Config
from vgrout.files import read_json
from vgrout.grading.grade import Grader, cores
from vgrout.model.source import is_small
from vgrout.ranks import Place, RankLost
from vgrout.runs.preflight import gpu_here
from vgrout.runs.run_context import FINISHED, RunContext, stop_on_signals
from vgrout.runs.run_dir import RUNS

SAMPLED = 0.2  # seconds over which idle cores are counted
AFTERWARDS = 10.0  # seconds that the other ranks may take to end after rank 0 is done


def ranks_to_start(cfg: Config) -> int:
    """How many ranks this process should start, itself included.

    Raises:
        ValueError: more ranks than a step has rollouts, or another number than torchrun's.
    """
    requested, place = cfg.run.ranks, ranks.under_torchrun()
    if place is not None:
        if requested not in (1, place.size):
            raise ValueError(f"--ranks {requested}: torchrun has started {place.size}; leave it out")
        return 1
    if requested != "auto":
        if requested > cfg.generations:
            raise ValueError(f"--ranks {requested}: a step has {cfg.generations} rollouts; give at most as many")
        return int(requested)
    if gpu_here() or not is_small(cfg.model_path):
        return 1  # a GPU is one rank's; a larger model on a CPU has every core by threads
    return max(1, min(idle_cores(), cfg.generations))


def resumed_by_torchrun(requested: Config) -> Config:
    """The requested configuration; after a restart by torchrun, set to resume the run that this command started."""
    place = ranks.under_torchrun()
    if place is None or place.attempt == "0" or requested.run.resume:
        return requested
    for path in sorted(RUNS.glob("*_*"), reverse=True):
        if read_json(path / "run.json").get("torchrun") == ranks.torchrun_id():
            if any(path.glob("resume/step_*/manifest.json")):
                return replace(requested, run=replace(requested.run, resume=str(path)))
            break  # it had no checkpoint yet: start again
    return requested


def idle_cores() -> int:
    """Cores that this process may use and nobody uses now; 1 where that cannot be read."""
    if cores() == 1:
        return 1
    try:
        usable = os.sched_getaffinity(0)
        before = _idle_seconds()
        time.sleep(SAMPLED)
        after = _idle_seconds()
    except (OSError, ValueError, AttributeError):
        return 1
    return max(1, sum(after.get(core, 0) - before.get(core, 0) > SAMPLED / 2 for core in usable))


def _idle_seconds() -> dict[int, float]:
    """Seconds that each core has been idle."""
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
    def joined(self, payload: object) -> Generator[None]:
        """Rank 0 in its group. payload: sent to the other ranks, says what to run."""
        with ranks.joined(self.place, self.failed_peer):
            ranks.from_first(payload)
            yield

    def failed_peer(self) -> str | None:
        """Which of the processes started here has failed, and how."""
        for i, process in enumerate(self.peers.processes if self.peers else ()):
            if code := process.exitcode:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"rank {i + 1} (process {process.pid}) {how}"
        return None


@contextlib.contextmanager
def started(n: int, follow: Callable[[Place, Path], object], log: Path) -> Generator[Ranks]:
    """`n` ranks on this machine; 1: this process alone, or torchrun's rank 0. They end with the block.

    follow: what the others run. log: stem of the files that hold their output.
    """
    if n == 1:
        yield Ranks(ranks.under_torchrun())
        return
    from torch import multiprocessing

    from vgrout import loading  # noqa: F401 imported once, before the fork

    listener = socket.create_server(("127.0.0.1", 0))
    place = Place(0, n, "127.0.0.1", listener.getsockname()[1])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine may have no network
    sys.stdout.flush()
    sys.stderr.flush()
    peers = multiprocessing.start_processes(
        _peer, (follow, place, log), n - 1, join=False, start_method="spawn" if gpu_here() else "fork"
    )
    try:
        yield Ranks(replace(place, listening=listener.detach()), peers)
    finally:
        _end(peers)


def _peer(i: int, follow: Callable[[Place, Path], object], place: Place, log: Path) -> None:
    """Entry point of a process that `started` made."""
    place = replace(place, rank=i + 1)
    os.environ["LOCAL_RANK"] = str(place.rank)
    path = log.with_name(f"{log.name}_{os.getppid()}_rank{place.rank}.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as output:  # for whoever looks into a rank's failure
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    logger.remove()  # rank 0 logs
    code = follow(place, log)
    if code == FINISHED and not path.stat().st_size:
        path.unlink()
    os._exit(int(bool(code)))  # no clean-up: open files and handlers were copied from rank 0


def _end(peers: Any) -> None:
    """Wait for the other ranks to end, then kill them; at once where one is lost."""
    until = time.monotonic() + (0 if ranks.abandoned() else AFTERWARDS)
    for process in peers.processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


class Peer(RunContext):
    """A run as seen by a rank beside rank 0: the same loop, nothing written."""

    def __init__(self, path: Path, grader: Grader, resumes: bool) -> None:
        self._on_every_rank(grader, resumes)
        self._path = path

    @property
    def path(self) -> Path:
        """Rank 0's folder, which need not exist on another machine."""
        return self._path

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
            case RankLost():  # rank 0 reports it too, unless rank 0 is the lost one
                print(f"E {e}", file=sys.stderr)
            case _:
                traceback.print_exception(e)
        return True
