"""One run on several processes, its ranks: who does what, and what they tell each other, over torch.distributed.

Every rank goes through the same loop with the same values. Dealt out is work on rows: sampling, grading, forward and
backward, evaluation, extraction. Answers and grades are gathered, gradients summed, so that each rank takes every
decision by itself and alike; rank 0 writes. Without a group there is one rank, and all of this is the identity.

Which rank does which row changes no draw (noise is a row's own) and sums are added in the ranks' order in fp64: rows on
2 ranks are those on 1 but for the rounding of other batches' matrix products, about 1e-6.

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
ANSWER = 8.0  # seconds that the group's store, which is rank 0's or torchrun's, may take to answer
SILENT = 15.0  # seconds without one after which a rank is given up: a stopped or swapped-out process, a dead node
ASSEMBLY = 300.0  # seconds that ranks may take to start, imports on a cold disk included
PATIENCE = timedelta(minutes=30)  # of one collective, where all ranks live: one may sample far longer than another


class RankLost(Exception):
    """Another rank has ended or does not answer. One line that names it."""


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
    """Ranks on this machine. started: those that this process has started, or is about to."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", max(size(), started)))


def first() -> bool:
    """Whether this is the rank that writes."""
    return rank() == 0


def abandoned() -> bool:
    """Whether a group was left with a message under way to a rank that does not take it. gloo waits for that one for as
    long as this process tidies up, even at its exit: it is to end at once."""
    return _abandoned


def summary(steps: int) -> str:
    """For the end of the log: what crossed between ranks."""
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
    """Names what torchrun has started, the same over its restarts: the job, and the agent that is our parent."""
    if under_torchrun() is None:
        return None
    return f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.getppid()}@{socket.gethostname()}"


# ── who does what ──────────────────────────────────────────────────────────────────────────────────────────────────


def own(costs: Sequence[int]) -> range:
    """This rank's part of len(costs) items in their order: neighbours stay together (rows that share a prompt do), and
    every rank's part costs about the same."""
    return _part(costs, rank(), size())


def _part(costs: Sequence[int], rank: int, size: int) -> range:
    if size == 1:
        return range(len(costs))
    ends = list(accumulate(costs))
    whole = ends[-1] if ends else 0
    if not whole:
        return range(len(costs)) if rank == 0 else range(0)
    # an item is its middle's rank's
    owner = [min(size - 1, int(size * (end - cost / 2) / whole)) for cost, end in zip(costs, ends, strict=True)]
    return range(owner.index(rank), len(owner) - owner[::-1].index(rank)) if rank in owner else range(0)


# ── what they tell each other ──────────────────────────────────────────────────────────────────────────────────────


def gather(make: Callable[[], T]) -> list[T]:
    """What every rank makes, in their order. What one of them raises, all raise: the same exception, naming the rank
    where it is not the only one."""
    if _group is None:
        return [make()]
    made, wrong = None, None
    try:
        made = make()
    except Exception as e:
        wrong = e
    of_all = _exchange(_dumps((made, wrong and _for_others(wrong))))
    parts: list[Any] = [(made, wrong) if of == rank() else pickle.loads(data) for of, data in enumerate(of_all)]
    for _, wrong in parts:
        if wrong is not None:
            raise wrong
    return [made for made, _ in parts]


def _for_others(wrong: Exception) -> Exception:
    """What the other ranks raise: the same exception, naming this rank; where that cannot travel, what it says."""
    try:
        return pickle.loads(_dumps(type(wrong)(f"rank {rank()}: {wrong}")))
    except Exception:
        return RuntimeError(f"rank {rank()}: {type(wrong).__name__}: {wrong}")


def merged(make: Callable[[], Mapping[K, T]]) -> dict[K, T]:
    """The ranks' mappings as one."""
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
    return [of for of, yes in enumerate(gather(lambda: fine)) if not yes]


def total(x: "Tensor") -> "Tensor":
    """Σ over the ranks of x, the same on each to the last bit: added in their order, in fp64."""
    if _group is None:
        return x
    import torch

    return torch.stack(_gathered(x)).double().sum(0).to(x.dtype)


def total_by_module(parts: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """`total` of every module's tensor [*, r], in one message."""
    if _group is None or not parts:
        return dict(parts)
    import torch

    whole = total(torch.cat([x.reshape(-1) for x in parts.values()]))
    pieces = whole.split([x.numel() for x in parts.values()])
    return {m: piece.view(x.shape) for (m, x), piece in zip(parts.items(), pieces, strict=True)}


def _exchange(data: bytes) -> list[bytes]:
    """Every rank's bytes, in their order."""
    import torch

    lengths = [int(n) for n in _gathered(torch.tensor([len(data)]))]
    padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    return [part[:n].numpy().tobytes() for part, n in zip(_gathered(padded), lengths, strict=True)]


def _gathered(x: "Tensor") -> "list[Tensor]":
    """Every rank's tensor of this shape, in their order."""
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
    """Until the collective is done, with an eye on whether the others live. Polled: a blocked process would hear
    neither a signal nor that a rank has been given up."""
    assert work is not None
    pause = 2e-5
    while not work.is_completed():
        if lost := group.lost():
            raise _given_up(lost)
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    try:
        work.wait()
    except RuntimeError as e:  # gloo: a connection was closed, whose it does not say
        raise _given_up(group.who() or f"a rank has ended ({str(e).splitlines()[0]})") from None


def _given_up(why: str) -> RankLost:
    """Remembered here, since whoever is told may not let the exception out of the group's block."""
    global _abandoned
    _abandoned = True
    return RankLost(why)


# ── life and death ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Group:
    """This rank's group, and signs of life of every rank in its store, by a thread with a connection of its own."""

    place: Place
    gone: Callable[[], str | None]  # of ranks that this process started: which of them has ended, and how
    sent: int = 0  # bytes that this rank has sent to others
    _lost: str | None = None
    _word: str = ""  # the last of this rank, if it ends badly
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _round: float = 0.0  # when this rank last heard from the store; 0: not yet

    def assemble(self, store: "Store") -> None:
        """Wait for every rank's first sign, then watch over them. Raises RankLost where one ends before it is here, or
        does not come."""
        store.set(str(self.place.rank), self._sign(0))
        until = time.monotonic() + ASSEMBLY
        while missing := [r for r in range(self.place.size) if not store.check([str(r)])]:
            if gone := self.gone():
                raise RankLost(gone)
            if time.monotonic() > until:
                raise RankLost(f"rank {missing[0]} did not come within {ASSEMBLY:.0f} s")
            time.sleep(0.02)
        self._thread = threading.Thread(target=self._beat, name="ranks", daemon=True)
        self._thread.start()

    def _sign(self, beat: int | str) -> str:
        return f"{beat}|{os.getpid()} on {socket.gethostname()}|{self._word}"

    def stop(self, word: str) -> None:
        """word: why this rank ends; '': it is done."""
        self._word = word
        self._end.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT)

    def lost(self) -> str | None:
        """A store whose process is stopped never answers, and its client waits: the thread's last round tells."""
        if self._lost is None and self._round and time.monotonic() - self._round > SILENT:
            self._lost = self.gone() or f"rank 0 has not answered for {SILENT:.0f} s"
        return self._lost

    def who(self) -> str | None:
        """After a connection was closed: which rank it was, as soon as that can be known."""
        until = time.monotonic() + SILENT + 2 * BEAT
        while self.lost() is None and time.monotonic() < until:
            if (ended := self.gone()) is not None:
                return ended
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
        except Exception:  # the store is rank 0's, or torchrun's
            if not self._end.is_set():
                self._lost = self._lost or self.gone() or "rank 0 does not answer"

    def _look(self, r: int, sign: bytes, seen: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        if r not in seen or sign != seen[r][0]:
            seen[r] = sign, now
        beat, who, word = bytes(sign).decode(errors="replace").split("|", 2)
        if beat == "end" and word:
            self._lost = self._lost or f"rank {r} (process {who}) ended: {word}"
        elif beat != "end" and now - seen[r][1] > SILENT:
            self._lost = self._lost or f"rank {r} (process {who}) has not answered for {SILENT:.0f} s"


@contextlib.contextmanager
def joined(place: Place | None, gone: Callable[[], str | None] = lambda: None) -> Generator[None]:
    """The block's process is a rank of the group; None: of none, and nothing changes.

    gone: of ranks that this process has started: says which has ended, and how.

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
    _group = group = _Group(place, gone)
    _abandoned, word = False, "it failed"
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
        word = ""
    except BaseException as e:
        word = f"{type(e).__name__}: {e}".splitlines()[0][:300]
        _abandoned = _abandoned or isinstance(e, RankLost)
        raise
    finally:
        _group = None
        group.stop(word)
        if distributed.is_initialized() and not _abandoned:
            with contextlib.suppress(RuntimeError):
                distributed.destroy_process_group()
