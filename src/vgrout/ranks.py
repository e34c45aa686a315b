"""One run on several processes, its ranks, which torchrun starts: how work is shared out and results exchanged.

Every rank runs the same loop with the same values. Work on rows is shared out: sampling, grading, forward and backward,
evaluation, extraction. Answers and grades are gathered and gradients summed, so that every rank takes the same
decisions by itself; rank 0 writes. Without torchrun there is one rank, and all of this is the identity.

Which rank does which row changes no random draw (noise belongs to a row), and sums are taken in rank order in fp64: the
rows of 2 ranks are those of 1 up to the rounding of matrix products in other batches, about 1e-6.

gloo carries what is on a CPU, NCCL what is on a GPU. No torch is imported before the group is joined.
"""

import contextlib
import os
import pickle
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from loguru import logger

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
K = TypeVar("K")

PATIENCE = timedelta(minutes=30)  # for one exchange: one rank may sample far longer than another


_sent = 0  # bytes of sums


class RankLost(Exception):
    """Another rank has ended, or has not answered for so long; one line."""


def size() -> int:
    """How many ranks torchrun has started; 1: it has not."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    return int(os.environ["RANK"]) if size() > 1 else 0


def here() -> int:
    """Ranks on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if size() > 1 else 1


def torchrun_id() -> str | None:
    """Names this torchrun job, the same after its restarts: the job's id and its agent, our parent process."""
    return (
        f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.getppid()}@{socket.gethostname()}"
        if size() > 1
        else None
    )


def first() -> bool:
    """Whether this is the rank that writes."""
    return rank() == 0


def summary(steps: int) -> str:
    """How much a step's sums cost, for the end of the log."""
    return (
        ""
        if size() == 1
        else f"; {size()} ranks, each sent {_sent / 1024 / max(1, steps):.0f} KiB of sums a step"
    )


@contextlib.contextmanager
def joined() -> Generator[None]:
    """Within the block the ranks exchange results. It begins when all are there, within PATIENCE."""
    if size() == 1:
        yield
        return
    import torch
    from torch import distributed

    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store, _, _ = next(distributed.rendezvous("env://", timeout=PATIENCE))
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        # a store of torchrun's own still has the addresses of the ranks before a restart
        store=distributed.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store),
        rank=rank(),
        world_size=size(),
        timeout=PATIENCE,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def _talking() -> Generator[None]:
    try:
        yield
    except RuntimeError as e:
        logger.debug(str(e))
        minutes = PATIENCE.total_seconds() / 60
        raise RankLost(
            f"another rank has ended, or has not answered for {minutes:.0f} minutes"
        ) from None


# ── who does what


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
    owner = [
        min(size - 1, int(size * (end - cost / 2) / total_cost))
        for cost, end in zip(costs, ends, strict=True)
    ]
    return (
        range(owner.index(rank), len(owner) - owner[::-1].index(rank))
        if rank in owner
        else range(0)
    )


# ── exchange


def gather(make: Callable[[], T]) -> list[T]:
    """The value that each rank makes, in rank order. If one raises, all raise the same exception; on the other ranks it
    names the one that failed."""
    if size() == 1:
        return [make()]
    from torch import distributed

    value, error = None, None
    try:
        value = make()
    except Exception as e:
        error = e
    results: list[Any] = [None] * size()
    with _talking():
        distributed.all_gather_object(results, (value, error and _for_others(error)))
    results[rank()] = value, error
    for _, failed in results:
        if failed is not None:
            raise failed
    return [value for value, _ in results]


def _for_others(error: Exception) -> Exception:
    """The same exception naming this rank, for the other ranks to raise; a RuntimeError where it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(type(error)(f"rank {rank()}: {error}")))
    except Exception:
        return RuntimeError(f"rank {rank()}: {type(error).__name__}: {error}")


def merged(make: Callable[[], Mapping[K, T]]) -> dict[K, T]:
    """The ranks' mappings joined into one."""
    return {key: value for part in gather(make) for key, value in part.items()}


def from_first(value: T) -> T:
    """Rank 0's value, on every rank."""
    if size() == 1:
        return value
    from torch import distributed

    values = [value]
    with _talking():
        distributed.broadcast_object_list(values, src=0)
    return values[0]


def everywhere(fine: bool) -> list[int]:
    """The ranks that are not fine."""
    return [r for r, ok in enumerate(gather(lambda: fine)) if not ok]


def total(x: "Tensor") -> "Tensor":
    """Σ of x [N, …] over the ranks, added in rank order in fp64: the same on each to the last bit. A rank sends the
    rows in which it has something, of its share of the work."""
    if size() == 1:
        return x
    import torch
    from torch import distributed

    global _sent
    own = x.reshape(len(x), -1).any(1).nonzero().flatten()
    rows = gather(own.tolist)
    sent = x.new_zeros(max(1, *map(len, rows)), *x.shape[1:])
    sent[: len(own)] = x[own]
    _sent += sent.nbytes * (size() - 1)
    parts = [torch.empty_like(sent) for _ in rows]
    with _talking():
        distributed.all_gather(parts, sent)
    summed = torch.zeros_like(x, dtype=torch.float64)
    for at, part in zip(rows, parts, strict=True):
        summed[at] += part[: len(at)].double()
    return summed.to(x.dtype)
