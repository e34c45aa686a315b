"""Packing: rows without padding, one after the other in one sequence; what rows have in common is read once.

Rows that may share (`units`) and begin alike, with their prompt and perhaps some tokens of their answers, are a tree of
token runs, in which a token sees what leads to it from the root. Everything in a decoder but attention works token by
token. So the model's own forward runs on one long row of tokens, with our own attention function, through the
interface that transformers has for it.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

ATTENTION = "vgrout_packed"

# ── flash-attention 2's varlen kernel; without it runs are padded for torch's SDPA, the same function ─────────────────

# (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=, causal=) → like q
Kernel = Callable[..., Tensor]


def flash_is_here(device: torch.device, dtype: torch.dtype) -> bool:
    """flash-attention 2 is for CUDA in half precision, where it is installed (extra `gpu`)."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and importlib.util.find_spec("flash_attn") is not None


def how_to_install_flash() -> str:
    """One line, which says so where the compiler is missing: without it the install ends in another's traceback."""
    how = "`uv sync --extra gpu`"
    if shutil.which("nvcc") or (Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc").is_file():
        return f"{how} compiles it, an hour or more (MAX_JOBS: how many files at a time, 9 GB of memory each)"
    return f"{how} compiles it with nvcc, which is not here: install CUDA's toolkit first, or give it a built wheel"


def flash_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Its varlen function; None where it is not."""
    if not flash_is_here(device, dtype):
        return None
    return cast("Kernel", importlib.import_module("flash_attn").flash_attn_varlen_func)


@dataclass(frozen=True, slots=True)
class Runs:
    """n runs of queries, each against a run of keys that ends where it ends (causal, aligned at the end)."""

    queries: Int[Tensor, " ends"]  # int32: 0, then the cumulated lengths of the n runs
    keys: Int[Tensor, " ends"]
    n: int  # queries in all; not read off the device in every layer
    longest_query: int
    longest_key: int
    take: Int[Tensor, " k"] | None  # the keys' tokens in the packed sequence; None: the queries' own

    @staticmethod
    def of(queries: Sequence[int], keys: Sequence[int], take: Tensor | None, device: torch.device) -> "Runs":
        def cumulated(lengths: Sequence[int]) -> Tensor:
            return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)

        return Runs(cumulated(queries), cumulated(keys), sum(queries), max(queries), max(keys), take)

    def attend(
        self,
        kernel: Kernel,
        q: Float[Tensor, "t H D"],
        k: Float[Tensor, "N K D"],
        v: Float[Tensor, "N K D"],
        scale: float | None,
    ) -> Float[Tensor, "t H D"]:
        """q: the runs' queries; k, v: of the whole packed sequence if `take` says which of them, else the runs' own."""
        if self.take is not None:
            k, v = k.index_select(0, self.take), v.index_select(0, self.take)
        longest = self.longest_query, self.longest_key
        return kernel(q, k, v, self.queries, self.keys, *longest, softmax_scale=scale, causal=True)


@dataclass(frozen=True, slots=True)
class Varlen:
    """A packed sequence's attention: roots (complete rows, and shared prompts), then branches, whose keys are those of
    their root and their own."""

    kernel: Kernel
    roots: Runs
    branches: Runs | None

    @staticmethod
    def of(
        kernel: Kernel, roots: Sequence[int], branches: Sequence[int], parents: Sequence[int], device: torch.device
    ) -> "Varlen":
        """Lengths of roots and branches, and the root of each branch."""
        own = Runs.of(roots, roots, None, device)
        if not branches:
            return Varlen(kernel, own, None)
        lengths = [*roots, *branches]
        starts = list(accumulate(lengths, initial=0))
        take = [
            torch.arange(starts[run], starts[run] + lengths[run], device=device)
            for b, root in enumerate(parents)
            for run in (root, len(roots) + b)
        ]
        keys = [roots[root] + branch for root, branch in zip(parents, branches, strict=True)]
        return Varlen(kernel, own, Runs.of(branches, keys, torch.cat(take), device))

    def attend(
        self,
        q: Float[Tensor, "N H D"],
        k: Float[Tensor, "N K D"],
        v: Float[Tensor, "N K D"],
        scale: float | None,
    ) -> Float[Tensor, "N H D"]:
        """Every token against what it may see of its own row."""
        n = self.roots.n
        y = self.roots.attend(self.kernel, q[:n], k[:n], v[:n], scale)
        if self.branches is None:
            return y
        return torch.cat([y, self.branches.attend(self.kernel, q[n:], k, v, scale)])


# ── padded runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Padding:
    """n token runs, padded on the right: [n, longest] indices of tokens, and each token's place in that."""

    take: Int[Tensor, "n longest"]  # 0 where there is no token
    back: Int[Tensor, " tokens"]

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> "_Padding":
        size = torch.tensor(lengths, device=device)[:, None]
        steps = torch.arange(max(lengths), device=device)
        here = steps < size
        return _Padding(torch.where(here, steps + size.cumsum(0) - size, 0), here.flatten().nonzero().squeeze(1))

    def __call__(self, x: Float[Tensor, "tokens h D"]) -> Float[Tensor, "n h longest D"]:
        return _Pad.apply(x, self.take, self.back)

    def undo(self, y: Float[Tensor, "n h longest D"]) -> Float[Tensor, "tokens h D"]:
        return _Unpad.apply(y, self.back)


class _Pad(torch.autograd.Function):
    """A gather whose backward is a gather too: every token has one place, and padding's gradient is dropped.
    (Autograd's own would add up token by token.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, take.flatten()).unflatten(0, take.shape).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return dys[0].transpose(1, 2).flatten(0, 1).index_select(0, back), None, None


class _Unpad(torch.autograd.Function):
    """The inverse gather; padding gets a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.padded = y.transpose(1, 2).shape
        return y.transpose(1, 2).flatten(0, 1).index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *dxs: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        n, longest, *rest = ctx.padded
        dy = dxs[0].new_zeros(n * longest, *rest)
        dy[back] = dxs[0]
        return dy.unflatten(0, (n, longest)).transpose(1, 2), None


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which tokens attend to which: those of one tree to one another, tree after tree."""

    trees: _Padding
    bias: Float[Tensor, "trees 1 N N"] | None  # 0 or −inf; None: no tree has branches, causal

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """q [tokens H D], k and v [tokens K D] → [tokens H D]: torch's SDPA on padded trees."""
        gqa = q.shape[1] != k.shape[1]
        q, k, v = (self.trees(x) for x in (q, k, v))
        causal = self.bias is None
        y = scaled_dot_product_attention(q, k, v, attn_mask=self.bias, is_causal=causal, scale=scale, enable_gqa=gqa)
        return self.trees.undo(y)


@dataclass(frozen=True, slots=True)
class Packed:
    """B rows of prompt + completion as one sequence of N tokens; T: longest completion; E: pairs of a token and the
    next one, each once.

    A completion's last token predicts nothing and is not there.
    """

    ids: Int[Tensor, "1 N"]
    positions: Int[Tensor, "1 N"]
    target: Int[Tensor, "B T"]  # the completion's tokens, 0 on padding
    at: Int[Tensor, "B T"]  # token whose logits predict target[b, t]
    mask: Bool[Tensor, "B T"]  # by length, never by token
    edges: Int[Tensor, "2 E"]  # at and target
    edge: Int[Tensor, "B T"]  # which of them
    layout: _Layout | Varlen
    pieces: tuple[tuple[int, slice], ...]  # (unit of the row, its tokens): runs of one unit, all tokens once
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """In the forward."""
        return self.ids.numel()


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens that a row of the tree has all of, or none."""

    unit: int
    tree: int
    tokens: tuple[int, ...]
    first: int  # position of the first of them in a row
    parent: int  # the run that it goes on from; −1: none


def pack(
    units: Sequence[int],
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    share: bool = True,
) -> Packed:
    """One sequence of all rows; those of equal unit and equal prompt share that prompt and what their answers have in
    common at the start.

    The gradient at a shared token is the sum over its rows: give rows one unit only where the sum is all you need.
    dtype: the model's. share: if off, no row shares a token.
    """
    assert len(units) == len(prompts) == len(completions) > 0, (len(units), len(prompts), len(completions))
    assert all(prompts), "an empty prompt: nothing predicts the first token"
    assert all(completions), "an empty completion: nothing to predict"
    kernel = flash_kernel(device, dtype)  # knows roots and branches, no deeper trees
    runs: list[_Run] = []
    paths: dict[int, list[int]] = {}  # row → runs from the root
    for tree, rows in enumerate(family(units, prompts, share)):
        rest = {row: completions[row][:-1] for row in rows}
        _grow(runs, paths, units[rows[0]], tree, prompts[rows[0]], rest, deep=kernel is None)
    if kernel is not None:
        order = sorted(range(len(runs)), key=lambda i: runs[i].parent >= 0)
        place = {run: i for i, run in enumerate(order)}
        runs = [replace(runs[i], parent=place.get(runs[i].parent, -1)) for i in order]
        paths = {row: [place[run] for run in path] for row, path in paths.items()}
    starts = list(accumulate((len(run.tokens) for run in runs), initial=0))
    T = max(map(len, completions))
    at, edge, edges = [], [], dict[tuple[int, int], int]()
    for row, completion in enumerate(completions):
        tokens = [i for run in paths[row] for i in range(starts[run], starts[run + 1])][len(prompts[row]) - 1 :]
        padding = [0] * (T - len(completion))
        at.append(tokens + padding)
        edge.append([edges.setdefault(pair, len(edges)) for pair in zip(tokens, completion, strict=True)] + padding)
    lengths = [len(run.tokens) for run in runs]
    roots = sum(run.parent < 0 for run in runs)
    parents = [run.parent for run in runs]
    return Packed(
        ids=torch.tensor([[t for run in runs for t in run.tokens]], device=device),
        positions=torch.tensor([[run.first + i for run in runs for i in range(len(run.tokens))]], device=device),
        target=torch.tensor([[*c, *[0] * (T - len(c))] for c in completions], device=device),
        at=torch.tensor(at, device=device),
        mask=torch.arange(T, device=device) < torch.tensor([len(c) for c in completions], device=device)[:, None],
        edges=torch.tensor(list(edges), device=device).mT,
        edge=torch.tensor(edge, device=device),
        layout=Varlen.of(kernel, lengths[:roots], lengths[roots:], parents[roots:], device)
        if kernel is not None
        else _layout(runs, device, dtype),
        pieces=_pieces(runs, starts),
        dtype=dtype,
    )


def _grow(
    runs: list[_Run],
    paths: dict[int, list[int]],
    unit: int,
    tree: int,
    prompt: tuple[int, ...],
    rest: Mapping[int, tuple[int, ...]],
    deep: bool,
) -> None:
    """Add the runs of one tree, parents first, and the path of each of its rows. rest: row → what follows the prompt.
    deep: answers share their beginnings; else only their prompt."""

    def grow(rows: list[int], done: int, parent: int) -> None:
        """rows: with the same first `done` tokens, sorted by their tokens."""
        prompt_alone = not deep and parent < 0 and len(rows) > 1
        stop = done if prompt_alone else common_prefix_len(rest[rows[0]], rest[rows[-1]])
        before = prompt if parent < 0 else ()
        own, first = len(runs), 0 if parent < 0 else len(prompt) + done
        runs.append(_Run(unit, tree, before + rest[rows[0]][done:stop], first, parent))
        further: dict[Hashable, list[int]] = {}
        for row in rows:
            paths.setdefault(row, []).append(own)
            if len(rest[row]) > stop:
                further.setdefault(rest[row][stop] if deep else row, []).append(row)
        for branch in further.values():
            grow(branch, stop, own)

    grow(sorted(rest, key=rest.__getitem__), 0, -1)


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two have in common at the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _pieces(runs: Sequence[_Run], starts: Sequence[int]) -> tuple[tuple[int, slice], ...]:
    """The longest stretches of one unit."""
    out: list[tuple[int, slice]] = []
    for run, lo, hi in zip(runs, starts, starts[1:], strict=False):
        if out and out[-1][0] == run.unit:
            out[-1] = (run.unit, slice(out[-1][1].start, hi))
        else:
            out.append((run.unit, slice(lo, hi)))
    return tuple(out)


def family(units: Sequence[int], prompts: Sequence[tuple[int, ...]], share: bool) -> list[list[int]]:
    """Indices of rows, grouped by shared prompt."""
    families: dict[Hashable, list[int]] = {}
    for row, key in enumerate(zip(units, prompts, strict=True)):
        families.setdefault(key if share else row, []).append(row)
    return list(families.values())


def batches(
    units: Sequence[int],
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    budget: int,
    share: bool = True,
) -> list[list[int]]:
    """Indices for `pack`: rows that share a prompt together, long ones first. A batch has at most `budget` tokens,
    shared ones counted once, or is one row."""
    tokens = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    out: list[list[int]] = []
    left = 0  # of the open batch's budget
    for members in sorted(family(units, prompts, share), key=lambda of: -max(tokens[i] for i in of)):
        last: tuple[int, ...] | None = None  # the row before in the open batch, with which the next one shares most
        for i in sorted(members, key=lambda i: completions[i]):
            row = prompts[i] + completions[i][:-1]
            cost = len(row) - (0 if last is None else common_prefix_len(last, row))
            if not out or cost > left:
                out.append([])
                left, cost = budget, len(row)
            out[-1].append(i)
            left, last = left - cost, row
    return out


def padded_batches(lengths: Sequence[int], budget: int, *, longest_first: bool = True) -> list[list[int]]:
    """Indices of rows, batched by similar length: at most `budget` tokens with padding, or one row."""
    out: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=longest_first):
        if out and max(lengths[out[-1][0]], lengths[i]) * (len(out[-1]) + 1) <= budget:
            out[-1].append(i)
        else:
            out.append([i])
    return out


def _layout(runs: Sequence[_Run], device: torch.device, dtype: torch.dtype) -> _Layout:
    """Of runs tree by tree."""
    sizes = [0] * (runs[-1].tree + 1)
    for run in runs:
        sizes[run.tree] += len(run.tokens)
    padding, N = _Padding.of(sizes, device), max(sizes)
    if all(run.parent < 0 for run in runs):
        return _Layout(padding, None)
    seen = torch.zeros(len(sizes), N, N, dtype=torch.bool)
    seen[:, :, 0] = True  # padding too: without any key its softmax would be NaN
    ends: list[int] = []  # of each run, in its tree
    tree, lo = -1, 0
    for run in runs:
        tree, lo = run.tree, lo if run.tree == tree else 0
        hi = lo + len(run.tokens)
        if run.parent >= 0:
            seen[tree, lo:hi] |= seen[tree, ends[run.parent] - 1]
        seen[tree, lo:hi, lo:hi] |= torch.ones(hi - lo, hi - lo, dtype=torch.bool).tril()
        ends.append(hi)
        lo = hi
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
    return _Layout(padding, bias[:, None].to(device))


def _attention(
    _module: torch.nn.Module,
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 K N D"],
    value: Float[Tensor, "1 K N D"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_layout: _Layout | Varlen | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 N H D"], None]:
    assert packed_layout is not None, "the model does not hand its keyword arguments on to attention"
    assert attention_mask is None, "a packed sequence has no attention mask"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_layout.attend(q, k, v, scaling)[None], None


AttentionInterface.register(ATTENTION, _attention)


def packed_hidden(model: PreTrainedModel, core: torch.nn.Module, batch: Packed) -> Float[Tensor, "N D"]:
    """The backbone's output at every token of `batch`. core: the model without its head."""
    with _attends(model):
        out = core(input_ids=batch.ids, position_ids=batch.positions, use_cache=False, packed_layout=batch.layout)
    return out.last_hidden_state[0]


@contextmanager
def _attends(model: PreTrainedModel) -> Generator[None]:
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def packs(model: PreTrainedModel, core: torch.nn.Module) -> bool:
    """Whether this model computes the same on packed rows as on separate ones: by its kind, then by a trial."""
    config = model.config
    if getattr(config, "attn_logit_softcapping", None) or not getattr(model, "_supports_attention_backend", False):
        return False
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):  # a sliding window
        return False
    # Out of the vocabulary's middle: it begins with special tokens, on which a model may amplify any rounding.
    embeddings: Any = model.get_input_embeddings()
    first = len(embeddings.weight) // 2
    a, b, c, d = range(first, first + 4)
    prompts, completions = [(a, b, c), (a, b, c), (d, c)], [(d, a, b, c), (c, a), (b, b, b)]
    batch = pack([0, 0, 0], prompts, completions, model.device, model.dtype)
    with torch.no_grad():
        try:
            hidden = packed_hidden(model, core, batch)
        except (AssertionError, TypeError):
            return False
        for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
            ids = torch.tensor([[*p, *c[:-1]]], device=model.device)
            want = core(input_ids=ids, use_cache=False).last_hidden_state[0, len(p) - 1 :]
            got = hidden[batch.at[row, : len(c)]]
            # In fp32 both agree to about 1e-6 of the largest entry, in bf16 to about 1e-2.
            if not (got - want).abs().max() <= (1e-4 if model.dtype.itemsize >= 4 else 5e-2) * want.abs().max():
                return False
    return True
