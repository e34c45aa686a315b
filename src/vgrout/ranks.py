"""One run on several processes, its ranks: how work is shared out and results exchanged, over torch.distributed.

Every rank runs the same loop with the same values. Work on rows is shared out: sampling, grading, forward and backward,
evaluation, extraction. Answers and grades are gathered and gradients summed, so that every rank takes the same
decisions by itself; rank 0 writes. Without a group there is one rank, and all of this is the identity.

Which rank does which row changes no random draw (noise belongs to a row), and sums are taken in rank order in fp64: the
rows of 2 ranks are those of 1 up to the rounding of matrix products in other batches, about 1e-6.

gloo carries what is on a CPU, NCCL what is on a GPU. No torch is imported before a group is joined.
"""

import contextlib
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store, Work

T = TypeVar("T")
K = TypeVar("K")

BEAT = 1.0  # seconds between two signs of life
ANSWER = 8.0  # seconds that the group's store, which belongs to rank 0 or torchrun, may take to answer
SILENT = 15.0  # seconds without a sign of life after which a rank is given up: stopped, swapped out, on a dead node
ASSEMBLY = 300.0  # seconds that ranks may take to start, imports from a cold disk included
PATIENCE = timedelta(minutes=30)  # for one collective while all ranks live: one may sample far longer than another


class RankLost(Exception):
    """Another rank has ended or does not answer; the message names it in one line."""


@dataclass(frozen=True)
class Place:
    """Where a process stands in its group."""

    rank: int
    size: int
    host: str = "127.0.0.1"
    port: int = 0
    listening: int | None = None  # rank 0 of local ranks: the open socket of the store, bound before anything started
    attempt: str = "0"  # torchrun's restarts


_group: "_Group | None" = None
_abandoned = False


def rank() -> int:
    return _group.place.rank if _group else 0


def size() -> int:
    return _group.place.size if _group else 1


def here(started: int = 1) -> int:
    """Ranks on this machine. started: how many this process has started or is about to."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", max(size(), started)))


def first() -> bool:
    """Whether this is the rank that writes."""
    return rank() == 0


def abandoned() -> bool:
    """Whether a group was left with a message under way to a lost rank. gloo would wait for that rank even as this
    process exits, so it must exit at once, without clean-up."""
    return _abandoned


def summary(steps: int) -> str:
    """How much the ranks exchanged, for the end of the log."""
    if _group is None:
        return ""
    return f"; {size()} ranks, each sent {_group.sent / 1024 / max(1, steps):.0f} KiB a step"


def under_torchrun() -> Place | None:
    """This process's place, where torchrun has started it."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" not in env or int(env.get("WORLD_SIZE", "1")) < 2:
        return None
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), env["MASTER_ADDR"], int(env["MASTER_PORT"]), attempt=attempt)


def torchrun_id() -> str | None:
    """Names this torchrun job, the same after its restarts: the job's id and its agent, our parent process."""
    if under_torchrun() is None:
        return None
    return f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.getppid()}@{socket.gethostname()}"


# ── who does what ──────────────────────────────────────────────────────────────────────────────────────────────────


def own(costs: Sequence[int]) -> range:
    """This rank's part of len(costs) items: a consecutive range, so that rows of one prompt stay together, of about the
    same cost on every rank."""
    return _part(costs, rank(), size())


def _part(costs: Sequence[int], rank: int, size: int) -> range:
    if size == 1:
        return range(len(costs))
    ends = list(accumulate(costs))
    total_cost = ends[-1] if ends else 0
    if not total_cost:
        return range(len(costs)) if rank == 0 else range(0)
    # an item goes to the rank in whose share its middle lies
    owner = [min(size - 1, int(size * (end - cost / 2) / total_cost)) for cost, end in zip(costs, ends, strict=True)]
    return range(owner.index(rank), len(owner) - owner[::-1].index(rank)) if rank in owner else range(0)


# ── collectives ──────────────────────────────────────────────────────────────────────────────────────


def gather(make: Callable[[], T]) -> list[T]:
    """The value that each rank makes, in rank order. If one raises, all raise the same exception; on the other ranks it
    names the one that failed."""
    if _group is None:
        return [make()]
    value, error = None, None
    try:
        value = make()
    except Exception as e:
        error = e
    messages = _exchange(_dumps((value, error and _for_others(error))))
    results: list[Any] = [(value, error) if r == rank() else pickle.loads(data) for r, data in enumerate(messages)]
    for _, error in results:
        if error is not None:
            raise error
    return [value for value, _ in results]


def _for_others(error: Exception) -> Exception:
    """The same exception naming this rank, for the other ranks to raise; a RuntimeError where it cannot be pickled."""
    try:
        return pickle.loads(_dumps(type(error)(f"rank {rank()}: {error}")))
    except Exception:
        return RuntimeError(f"rank {rank()}: {type(error).__name__}: {error}")


def merged(make: Callable[[], Mapping[K, T]]) -> dict[K, T]:
    """The ranks' mappings joined into one."""
    out: dict[K, T] = {}
    for part in gather(make):
        out |= part
    return out


def from_first(value: T) -> T:
    """Rank 0's value, on every rank."""
    if _group is None:
        return value
    return pickle.loads(_exchange(_dumps(value) if first() else b"")[0])


def everywhere(fine: bool) -> list[int]:
    """The ranks that are not fine."""
    return [r for r, ok in enumerate(gather(lambda: fine)) if not ok]


def total(x: "Tensor") -> "Tensor":
    """Σ of x over the ranks, added in rank order in fp64: the same on each to the last bit."""
    if _group is None:
        return x
    import torch

    return torch.stack(_gathered(x)).double().sum(0).to(x.dtype)


def total_by_module(parts: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """`total` of every module's tensor [*, r], in one message."""
    if _group is None or not parts:
        return dict(parts)
    import torch

    flat = total(torch.cat([x.reshape(-1) for x in parts.values()]))
    pieces = flat.split([x.numel() for x in parts.values()])
    return {m: piece.view(x.shape) for (m, x), piece in zip(parts.items(), pieces, strict=True)}


def _exchange(data: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order."""
    import torch

    lengths = [int(n) for n in _gathered(torch.tensor([len(data)]))]
    padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    return [part[:n].numpy().tobytes() for part, n in zip(_gathered(padded), lengths, strict=True)]


def _gathered(x: "Tensor") -> "list[Tensor]":
    """Every rank's tensor of this shape, in rank order."""
    import torch
    from torch import distributed

    assert _group is not None
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size())]
    _group.sent += x.nbytes * (size() - 1)
    _wait(_group, distributed.all_gather(parts, x.contiguous(), async_op=True))
    return parts


def _dumps(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _wait(group: "_Group", work: "Work | None") -> None:
    """Wait until the collective is done, or a rank is lost. Polled: a blocked process would notice neither a signal nor
    that a rank has been given up."""
    assert work is not None
    pause = 2e-5
    while not work.is_completed():
        if lost := group.lost():
            raise _give_up(lost)
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    try:
        work.wait()
    except RuntimeError as e:  # gloo: a connection was closed; it does not say whose
        raise _give_up(group.who() or f"a rank has ended ({str(e).splitlines()[0]})") from None


def _give_up(why: str) -> RankLost:
    """The exception to raise. The loss is noted here, in case the exception is caught inside the group's block."""
    global _abandoned
    _abandoned = True
    return RankLost(why)


# ── life and death ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Group:
    """This rank's group. A thread with its own connection writes and reads every rank's signs of life in the store."""

    place: Place
    failed_peer: Callable[[], str | None]  # which of the ranks that this process started has failed, and how
    sent: int = 0  # bytes that this rank has sent to others
    _lost: str | None = None
    _reason: str = ""  # why this rank failed
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _round: float = 0.0  # when this rank last heard from the store; 0: not yet

    def assemble(self, store: "Store") -> None:
        """Wait for every rank's first sign of life, then start watching. Raises RankLost where one ends before that, or
        does not come."""
        store.set(str(self.place.rank), self._sign(0))
        until = time.monotonic() + ASSEMBLY
        while missing := [r for r in range(self.place.size) if not store.check([str(r)])]:
            if failed := self.failed_peer():
                raise RankLost(failed)
            if time.monotonic() > until:
                raise RankLost(f"rank {missing[0]} did not come within {ASSEMBLY:.0f} s")
            time.sleep(0.02)
        self._thread = threading.Thread(target=self._beat, name="ranks", daemon=True)
        self._thread.start()

    def _sign(self, beat: int | str) -> str:
        return f"{beat}|{os.getpid()} on {socket.gethostname()}|{self._reason}"

    def stop(self, reason: str) -> None:
        """reason: why this rank failed; '': it is done."""
        self._reason = reason
        self._end.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT)

    def lost(self) -> str | None:
        """Which rank is lost. A stopped process's store never answers, so the thread's last round counts."""
        if self._lost is None and self._round and time.monotonic() - self._round > SILENT:
            self._lost = self.failed_peer() or f"rank 0 has not answered for {SILENT:.0f} s"
        return self._lost

    def who(self) -> str | None:
        """Which rank closed its connection, as soon as that can be known."""
        until = time.monotonic() + SILENT + 2 * BEAT
        while self.lost() is None and time.monotonic() < until:
            if failed := self.failed_peer():
                return failed
            time.sleep(0.05)
        return self._lost

    def _beat(self) -> None:
        from torch.distributed import PrefixStore, TCPStore

        place = self.place
        seen: dict[int, tuple[bytes, float]] = {}  # the last sign of each, and since when it is the last
        try:
            plain = TCPStore(place.host, place.port, None, False, timedelta(seconds=ANSWER), wait_for_workers=False)
            store = PrefixStore(f"life/{place.attempt}", plain)
            for beat in count(1):
                ending = self._end.wait(BEAT)
                store.set(str(place.rank), self._sign("end" if ending else beat))
                if ending:
                    return
                for r, sign in enumerate(store.multi_get([str(r) for r in range(place.size)])):
                    self._look(r, sign, seen)
                self._round = time.monotonic()
        except Exception:  # the store belongs to rank 0 or torchrun
            if not self._end.is_set():
                self._lost = self._lost or self.failed_peer() or "rank 0 does not answer"

    def _look(self, r: int, sign: bytes, seen: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        if r not in seen or sign != seen[r][0]:
            seen[r] = sign, now
        beat, who, reason = bytes(sign).decode(errors="replace").split("|", 2)
        if beat == "end" and reason:
            self._lost = self._lost or f"rank {r} (process {who}) ended: {reason}"
        elif beat != "end" and now - seen[r][1] > SILENT:
            self._lost = self._lost or f"rank {r} (process {who}) has not answered for {SILENT:.0f} s"


@contextlib.contextmanager
def joined(place: Place | None, failed_peer: Callable[[], str | None] = lambda: None) -> Generator[None]:
    """Within the block this process is a rank of the group; place None: there is no group, and nothing changes.

    failed_peer: says which of the ranks that this process started has failed, and how.

    Raises:
        RankLost: not every rank comes.
    """
    global _group, _abandoned
    if place is None:
        yield
        return
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", place.rank)) % torch.cuda.device_count())
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not agent
    store = distributed.TCPStore(
        *(place.host, place.port, None, serves, timedelta(minutes=2), False), master_listen_fd=place.listening
    )
    _group = group = _Group(place, failed_peer)
    _abandoned, reason = False, "it failed"
    try:
        group.assemble(distributed.PrefixStore(f"life/{place.attempt}", store))
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=distributed.PrefixStore(f"group/{place.attempt}", store),
            rank=place.rank,
            world_size=place.size,
            timeout=PATIENCE,
        )
        yield
        reason = ""
    except BaseException as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0][:300]
        _abandoned = _abandoned or isinstance(e, RankLost)
        raise
    finally:
        _group = None
        group.stop(reason)
        if distributed.is_initialized() and not _abandoned:
            with contextlib.suppress(RuntimeError):
                distributed.destroy_process_group()
