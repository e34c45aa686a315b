"""One run on several processes, the ranks that torchrun starts: how they share work and results.

Every rank runs the same loop with the same values. Work on rows is shared out: sampling, grading,
forward and backward, evaluation, extraction. Answers and grades are gathered and gradients summed,
so that every rank takes the same decisions by itself; rank 0 writes. Without torchrun there is one
rank, and all of this is the identity.

Which rank does which row changes no random draw, since noise belongs to a row, and sums are taken
in rank order in fp64. So the rows of 2 ranks are those of 1, up to the rounding of matrix products
in other batches, about 1e-6.

After `share_model(n)` each n consecutive ranks hold one model together (tensor parallelism): they
compute the same rows, each its part of every matrix.

gloo carries what is on a CPU, NCCL what is on a GPU. torch is imported when the group is
joined, not before.
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
    from torch.distributed import ProcessGroup

T = TypeVar("T")
K = TypeVar("K")

# Longest wait for one exchange: one rank may sample far longer than another.
PATIENCE = timedelta(minutes=30)


# The ranks that hold one model together with this one. None: it has a whole model.
_sharers: "ProcessGroup | None" = None
# Those that hold the same part of their own. None: all ranks do.
_peers: "ProcessGroup | None" = None


class RankLost(Exception):
    """Another rank has ended, or has not answered within PATIENCE; one line."""


def size() -> int:
    """How many ranks torchrun has started; 1 without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's rank, from 0."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def here() -> int:
    """How many ranks run on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if size() > 1 else 1


def torchrun_id() -> str | None:
    """Identifies this torchrun job, also after its restarts. None: there is no torchrun.

    It is made of the job's id, and of its agent, which is our parent process.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None:
        return None
    return f"{job}/{os.getppid()}@{socket.gethostname()}"


def first() -> bool:
    """Whether this is the rank that writes."""
    return rank() == 0


@contextlib.contextmanager
def joined() -> Generator[None]:
    """Within the context the ranks exchange results. It begins when all are there."""
    if size() == 1:
        yield
        return
    import torch.distributed

    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store, _, _ = next(torch.distributed.rendezvous("env://", timeout=PATIENCE))
    # torchrun's own store still has the addresses of the ranks before a restart
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore(restart, store),
        rank=rank(),
        world_size=size(),
        timeout=PATIENCE,
    )
    global _sharers, _peers
    try:
        yield
    finally:
        _sharers = _peers = None
        torch.distributed.destroy_process_group()


def share_model(n: int) -> None:
    """From now on each n consecutive ranks hold one model together."""
    global _sharers, _peers
    if n > 1:
        from torch import distributed

        _sharers, _ = distributed.new_subgroups(n, timeout=PATIENCE)
        same = [[*range(i, size(), n)] for i in range(n)]
        _peers, _ = distributed.new_subgroups_by_enumeration(same, timeout=PATIENCE)


def shards() -> int:
    """How many ranks hold one model together."""
    return 1 if _sharers is None else _sharers.size()


def shard() -> int:
    """Which of them this rank is, from 0."""
    return rank() % shards()


def sum_shards(x: "Tensor") -> "Tensor":
    """Σ of x over the ranks that hold one model together, in place; equal on them to the last bit."""
    from torch import distributed

    assert _sharers is not None
    with _exchanging():
        distributed.all_reduce(x, group=_sharers)
    return x


def join_shards(x: "Tensor") -> "Tensor":
    """The x [n, …] of the ranks that hold one model together, one below the other."""
    from torch import distributed

    joined = x.new_empty(shards() * len(x), *x.shape[1:])
    with _exchanging():
        distributed.all_gather([*joined.chunk(shards())], x.contiguous(), group=_sharers)
    return joined


@contextlib.contextmanager
def _exchanging() -> Generator[None]:
    """Raises RankLost if the exchange within the context fails."""
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
    """This rank's part of len(costs) items: a range, of about the same cost on every rank.

    The items are consecutive, so that rows of one prompt stay together. Ranks that hold one model
    together have the same part.
    """
    return _part(costs, rank() // shards(), size() // shards())


def own_here(costs: Sequence[int]) -> range:
    """As `own`, of work that each machine does once for itself."""
    return _part(costs, rank() % here(), here())


def _part(costs: Sequence[int], rank: int, size: int) -> range:
    everything, nothing = range(len(costs)), range(0)
    if size == 1:
        return everything
    total_cost = sum(costs)
    if not total_cost:
        return everything if rank == 0 else nothing
    own: list[int] = []
    for i, (cost, end) in enumerate(zip(costs, accumulate(costs), strict=True)):
        # an item goes to the rank in whose share its middle lies
        middle = end - cost / 2
        owner = min(size - 1, int(size * middle / total_cost))
        if owner == rank:
            own.append(i)
    return range(own[0], own[-1] + 1) if own else nothing


# ── exchange


def gather(make: Callable[[], T]) -> list[T]:
    """The value that each rank makes, in rank order.

    If one rank raises, all raise the same exception; on the others it names the rank that failed.
    """
    if size() == 1:
        return [make()]
    from torch import distributed

    value: T | None = None
    error: Exception | None = None
    named: Exception | None = None
    try:
        value = make()
    except Exception as e:
        error = e
        named = _for_others(e)
    results: list[Any] = [None] * size()
    with _exchanging():
        distributed.all_gather_object(results, (value, named))
    results[rank()] = value, error
    for _, failed in results:
        if failed is not None:
            raise failed
    return [value for value, _ in results]


def _for_others(error: Exception) -> Exception:
    """The same exception naming this rank, for the other ranks to raise.

    It is a RuntimeError where the exception cannot be pickled.
    """
    try:
        return pickle.loads(pickle.dumps(type(error)(f"rank {rank()}: {error}")))
    except Exception:
        return RuntimeError(f"rank {rank()}: {type(error).__name__}: {error}")


def merged(make: Callable[[], Mapping[K, T]]) -> dict[K, T]:
    """The ranks' mappings joined into one."""
    joined: dict[K, T] = {}
    for part in gather(make):
        joined.update(part)
    return joined


def from_first(value: T) -> T:
    """Rank 0's value, on every rank."""
    if size() == 1:
        return value
    from torch import distributed

    values = [value]
    with _exchanging():
        distributed.broadcast_object_list(values, src=0)
    return values[0]


def everywhere(fine: bool) -> list[int]:
    """The ranks that are not fine."""
    return [r for r, ok in enumerate(gather(lambda: fine)) if not ok]


def total(x: "Tensor") -> "Tensor":
    """Σ of x [N, …] over the ranks, the same on each to the last bit.

    It is added in rank order in fp64. A rank sends only the rows that are not zero. N, or any other
    length, may be 0: in a step without signal there is no row. Of ranks that hold one model
    together x is first summed in place.
    """
    if shards() > 1:
        sum_shards(x)
    if shards() == size():
        return x
    import torch.distributed

    # flatten, not reshape to −1: that is ambiguous where a length is 0
    has_value = x if x.ndim == 1 else x.flatten(1).any(1)
    own = has_value.nonzero().flatten()
    rows = gather(own.tolist)[shard() :: shards()]
    most = max(len(of_rank) for of_rank in rows)
    # all ranks send tensors of one shape
    sent = x.new_zeros(max(1, most), *x.shape[1:])
    sent[: len(own)] = x[own]
    parts = [torch.empty_like(sent) for _ in rows]
    with _exchanging():
        torch.distributed.all_gather(parts, sent, group=_peers)
    summed = torch.zeros_like(x, dtype=torch.float64)
    for of_rank, part in zip(rows, parts, strict=True):
        summed[of_rank] += part[: len(of_rank)].double()
    return summed.to(x.dtype)
