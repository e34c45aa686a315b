"""Packing: rows without padding, one after the other in one sequence; rows that may share their prompt read it once.

Everything in a decoder but attention works token by token. So the model's own forward runs on one long row of tokens,
with an attention function of ours (transformers' interface for that) in which a token sees its own row only.
"""

from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vgrout.model.varlen import Varlen, flash_kernel

ATTENTION = "vgrout_packed"


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
    """Which tokens attend to which. They are ordered: roots (complete rows, and shared prompts), then branches."""

    roots: _Padding
    branches: _Padding | None  # the completions of rows that share a prompt
    prompt: Int[Tensor, " b"] | None  # root of each branch
    longest: int  # tokens of the longest shared prompt
    bias: Float[Tensor, "b 1 R K"] | None  # 0 or −inf: branch queries against prompt and own keys

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """q [tokens H D], k and v [tokens K D] → [tokens H D]: torch's SDPA on padded runs."""
        n, gqa = len(self.roots.back), q.shape[1] != k.shape[1]
        rq, rk, rv = (self.roots(x[:n]) for x in (q, k, v))
        y = self.roots.undo(scaled_dot_product_attention(rq, rk, rv, is_causal=True, scale=scale, enable_gqa=gqa))
        if self.branches is None or self.prompt is None:
            return y
        bq, bk, bv = (self.branches(x[n:]) for x in (q, k, v))
        bk, bv = (
            torch.cat([r[:, :, : self.longest].index_select(0, self.prompt), b], 2) for r, b in ((rk, bk), (rv, bv))
        )
        z = scaled_dot_product_attention(bq, bk, bv, attn_mask=self.bias, scale=scale, enable_gqa=gqa)
        return torch.cat([y, self.branches.undo(z)])


@dataclass(frozen=True, slots=True)
class Packed:
    """B rows of prompt + completion as one sequence of N tokens; T: longest completion.

    A completion's last token predicts nothing and is not there.
    """

    ids: Int[Tensor, "1 N"]
    positions: Int[Tensor, "1 N"]
    target: Int[Tensor, "B T"]  # the completion's tokens, 0 on padding
    at: Int[Tensor, "B T"]  # token whose logits predict target[b, t]
    mask: Bool[Tensor, "B T"]  # by length, never by token
    layout: _Layout | Varlen
    pieces: tuple[tuple[int, slice], ...]  # (unit of the row, its tokens): runs of one unit, all tokens once
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """In the forward."""
        return self.ids.numel()


def pack(
    units: Sequence[int],
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    share: bool = True,
) -> Packed:
    """One sequence of all rows; those of equal unit and equal prompt share that prompt.

    What is differentiated at a shared prompt's tokens is the sum over its rows: give rows one unit only where no more
    than the sum is asked for. dtype: the model's. share: off, every row has its prompt for itself.
    """
    assert len(units) == len(prompts) == len(completions) > 0, (len(units), len(prompts), len(completions))
    assert all(prompts), "an empty prompt: nothing predicts the first token"
    assert all(completions), "an empty completion: nothing to predict"
    families = family(units, prompts, share)
    runs: list[tuple[int, tuple[int, ...], int]] = []  # unit, tokens, position of the first
    where: dict[int, tuple[int, int]] = {}  # row → (root token before its first target, run of the others or -1)
    for rows in families:
        unit, prompt, alone = units[rows[0]], prompts[rows[0]], len(rows) == 1
        runs.append((unit, prompt + completions[rows[0]][:-1] if alone else prompt, 0))
        for row in rows:
            where[row] = (len(runs) - 1, -1)
    n_roots = len(runs)
    parents = []
    for row in (row for rows in families if len(rows) > 1 for row in rows if len(completions[row]) > 1):
        parents.append(where[row][0])
        where[row] = (where[row][0], len(runs))
        runs.append((units[row], completions[row][:-1], len(prompts[row])))
    starts = [0]
    for _, tokens, _ in runs:
        starts.append(starts[-1] + len(tokens))
    T = max(map(len, completions))
    at = []
    for row, completion in enumerate(completions):
        root, branch = where[row]
        first = starts[root] + len(prompts[row]) - 1
        rest = first + 1 if branch < 0 else starts[branch]
        at.append([first, *range(rest, rest + len(completion) - 1), *[0] * (T - len(completion))])
    lengths = [len(tokens) for _, tokens, _ in runs]
    return Packed(
        ids=torch.tensor([[t for _, tokens, _ in runs for t in tokens]], device=device),
        positions=torch.tensor([[p for _, tokens, lo in runs for p in range(lo, lo + len(tokens))]], device=device),
        target=torch.tensor([[*c, *[0] * (T - len(c))] for c in completions], device=device),
        at=torch.tensor(at, device=device),
        mask=torch.arange(T, device=device) < torch.tensor([len(c) for c in completions], device=device)[:, None],
        layout=_layout(lengths[:n_roots], lengths[n_roots:], parents, device, dtype),
        pieces=tuple((run[0], slice(lo, hi)) for run, lo, hi in zip(runs, starts, starts[1:], strict=False)),
        dtype=dtype,
    )


def family(units: Sequence[int], prompts: Sequence[tuple[int, ...]], share: bool) -> list[list[int]]:
    """Indices of rows, those that share a prompt in one list."""
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
    """Indices for `pack`: rows that share a prompt together, long ones first; each batch at most `budget` tokens (or
    one row)."""
    tokens = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    out: list[list[int]] = []
    left = 0  # of the open batch's budget
    for members in sorted(family(units, prompts, share), key=lambda of: -max(tokens[i] for i in of)):
        prompt = 0  # tokens of it that the open batch already has
        for i in members:
            cost = tokens[i] - 1 - prompt
            if not out or cost > left:
                out.append([])
                left, cost = budget, tokens[i] - 1
            out[-1].append(i)
            left, prompt = left - cost, len(prompts[i])
    return out


def padded_batches(lengths: Sequence[int], budget: int, *, longest_first: bool = True) -> list[list[int]]:
    """Indices of rows of like length together, each batch at most `budget` tokens with its padding (or one row)."""
    out: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=longest_first):
        if out and max(lengths[out[-1][0]], lengths[i]) * (len(out[-1]) + 1) <= budget:
            out[-1].append(i)
        else:
            out.append([i])
    return out


def _layout(
    roots: Sequence[int], branches: Sequence[int], parents: Sequence[int], device: torch.device, dtype: torch.dtype
) -> _Layout | Varlen:
    if (kernel := flash_kernel(device, dtype)) is not None:
        return Varlen.of(kernel, roots, branches, parents, device)
    padding = _Padding.of(roots, device)
    if not branches:
        return _Layout(padding, None, None, 0, None)
    own = _Padding.of(branches, device)
    prompt = torch.tensor(parents, device=device)
    longest, R = max(roots[p] for p in parents), max(branches)
    before = torch.arange(longest, device=device) < torch.tensor(roots, device=device)[prompt, None, None]
    causal = torch.ones(R, R, dtype=torch.bool, device=device).tril()
    seen = torch.cat([before.expand(-1, R, -1), causal.expand(len(parents), -1, -1)], 2)[:, None]
    bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
    return _Layout(padding, own, prompt, longest, bias)


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
    assert attention_mask is None, "a mask was made for a packed sequence"
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
    """Whether this model's forward on packed rows is that on separate ones: by its kind, then by its hidden states."""
    config = model.config
    if getattr(config, "attn_logit_softcapping", None) or not getattr(model, "_supports_attention_backend", False):
        return False
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):  # a sliding window
        return False
    prompts, completions = [(3, 4, 5), (3, 4, 5), (6, 7)], [(8, 9, 3, 1), (5, 1), (4, 4, 4)]
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
            # in fp32 both agree to about 1e-6 of the largest entry, in bf16 to about 1e-2
            if not (got - want).abs().max() <= (1e-4 if model.dtype.itemsize >= 4 else 5e-2) * want.abs().max():
                return False
    return True
