"""Packing: rows without padding, one after the other in one sequence; what rows have in common is read once.

Rows of one unit that begin alike, with their prompt and perhaps some tokens of their answers, are a tree of token runs,
in which a token sees what leads to it from the root. Everything in a decoder but attention works token by token. So the
model's own forward runs on one long row of tokens, with our own attention function, through the interface that
transformers has for it. A prompt of several units has a forward of its own, and a backward for each of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from loguru import logger
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vgrout.model.attention import Runs, runs_of, uploaded

ATTENTION = "vgrout_packed"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Attention of a packed sequence: its first n tokens are roots, complete rows that see their own tokens; then come
    branches, whose keys are what leads to them, and their own."""

    n: int
    roots: Runs | None
    branches: Runs | None

    def attend(
        self,
        q: Float[Tensor, "N H D"],
        k: Float[Tensor, "M K D"],
        v: Float[Tensor, "M K D"],
        scale: float | None,
    ) -> Float[Tensor, "N H D"]:
        n, parts = self.n, []
        if self.roots is not None:
            parts.append(self.roots.attend(q[:n], k[:n], v[:n], scale))
        if self.branches is not None:
            parts.append(self.branches.attend(q[n:], k, v, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


# q, k, v, scale, as `_Layout.attend`
Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
Pieces = Sequence[tuple[int, slice]]  # (unit, its tokens)
# Told of a forward's n tokens whose they are, and whether backward goes through it several times;
# returns what is told whose they are each time.
Announce = Callable[[Pieces, int, bool], Callable[[Pieces], None]]


class Prompts:
    """Beginnings that several units go on from, read once: each prompt, where it is worth it with what all its answers
    have in common, so that every row has a token left; n tokens in all. Every unit has a copy of the keys and values of
    its own, m tokens in all, to which its answers' backward adds; `backward` then goes through the forward of the
    beginnings once a unit: turn j is that of the j-th unit of each prompt.

    depth: blocks of the model. Where answers are begun, their log-probs need the last hidden states, and backward goes
    through the last block for the prompts too, which it else has no need of.
    """

    def __init__(
        self,
        units: Sequence[int],
        prompts: Sequence[tuple[int, ...]],
        completions: Sequence[tuple[int, ...]],
        depth: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        of: dict[tuple[int, ...], list[int]] = {}  # prompt → its units
        # prompt → its rows, the last two tokens left out
        rows: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for unit, prompt, completion in zip(units, prompts, completions, strict=True):
            known = of.setdefault(prompt, [])
            if unit not in known:
                known.append(unit)
            rows.setdefault(prompt, []).append((*prompt, *completion)[:-2])
        self.begins = {
            p: min(own)[: common_prefix_len(min(own), max(own))] for p, own in rows.items()
        }
        self.answers = depth * sum(len(b) - len(p) + 1 for p, b in self.begins.items()) > sum(
            map(len, self.begins)
        )
        if not self.answers:
            self.begins = {p: p[:-1] for p in self.begins}
        # those of most units first, so that a turn's are the first tokens of all
        order = sorted(of, key=lambda prompt: -len(of[prompt]))
        self._lengths = [len(self.begins[prompt]) for prompt in order]
        self.ids = [*chain(*(self.begins[prompt] for prompt in order))]
        self.turns: list[Pieces] = []
        self.ends = [0]  # and where each turn's copies end
        # of a unit's prompt, among the m copies
        self.copied: dict[tuple[int, tuple[int, ...]], range] = {}
        for turn in range(len(of[order[0]])):
            pieces: list[tuple[int, slice]] = []
            for prompt, (start, stop) in zip(
                order, pairwise(accumulate(self._lengths, initial=0)), strict=True
            ):
                if turn < len(of[prompt]):
                    pieces.append((of[prompt][turn], slice(start, stop)))
                    self.copied[of[prompt][turn], prompt] = range(
                        self.ends[-1] + start, self.ends[-1] + stop
                    )
            self.turns.append(pieces)
            self.ends.append(self.ends[-1] + pieces[-1][1].stop)
        self._device, self._dtype = device, dtype
        self._turn: Callable[[Pieces], None] | None = None
        self._read: list[Tensor] = []  # keys and values, layer by layer, and last hidden states
        self.copies: list[Tensor] = []

    def read(
        self, model: PreTrainedModel, core: torch.nn.Module, announce: Announce | None = None
    ) -> None:
        """Run the prompts' forward. core: the model without its head."""
        self._turn = announce(self.turns[0], len(self.ids), True) if announce else None
        lengths = [n for n in self._lengths if n]
        layout = _Layout(len(self.ids), runs_of(lengths, None, self._device, self._dtype), None)

        def keeping(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
            self._read += k, v
            return layout.attend(q, k, v, scale)

        positions = [*chain(*(range(n) for n in lengths))]
        ids, places = uploaded([self.ids], self._device), uploaded([positions], self._device)
        hidden = _forward(model, core, ids, places, keeping)[0]
        self._read += [hidden] if self.answers else []
        at = uploaded(
            [*chain(*(range(end - start) for start, end in pairwise(self.ends)))], self._device
        )
        self.copies = [
            x.detach().index_select(0, at).requires_grad_(x.requires_grad) for x in self._read
        ]

    def backward(self) -> None:
        """From the copies through the prompts' forward."""
        # not all depend on δS: a first layer whose Linears are not adapted
        learnt = [
            (x, c.grad) for x, c in zip(self._read, self.copies, strict=True) if c.grad is not None
        ]
        for pieces, (start, end) in zip(self.turns, pairwise(self.ends), strict=True):
            if self._turn is not None:
                self._turn(pieces)
            rest = len(self.ids) - (end - start)  # tokens of prompts with fewer units
            grads = [pad(dx[start:end], (0, 0) * (dx.ndim - 1) + (0, rest)) for _, dx in learnt]
            torch.autograd.backward([x for x, _ in learnt], grads, retain_graph=end < self.ends[-1])
        self._read, self.copies = [], []


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
    wanted: tuple[Int[Tensor, " n"], Int[Tensor, " n"]]  # where the mask is set, row by row
    layout: _Layout
    pieces: Pieces  # runs of one unit, all tokens once
    dtype: torch.dtype
    # where they begin answers, `at` and `edges` count their m copies first
    prompts: Prompts | None = None

    @property
    def tokens(self) -> int:
        """In the forward."""
        return self.ids.numel()

    def attend(self) -> Attend:
        """Of one forward, whose calls come layer by layer."""
        if self.prompts is None:
            return self.layout.attend
        copies = iter(self.prompts.copies)

        def going_on(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
            return self.layout.attend(
                q, torch.cat([next(copies), k]), torch.cat([next(copies), v]), scale
            )

        return going_on


def pack(
    units: Sequence[int],
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    read: Prompts | None = None,
) -> Packed:
    """One sequence of all rows; those of equal unit and equal prompt share that prompt and what their answers have in
    common at the start.

    The gradient at a shared token is the sum over its rows: give rows one unit only where the sum is all you need.
    dtype: the model's. read: has what rows of several units begin with.
    """
    assert len(units) == len(prompts) == len(completions) > 0, (
        len(units),
        len(prompts),
        len(completions),
    )
    assert all(prompts), "an empty prompt: nothing predicts the first token"
    assert all(completions), "an empty completion: nothing to predict"
    rows = [p + c[:-1] for p, c in zip(prompts, completions, strict=True)]
    # Sorted, a row has most in common with the one before it.
    families = [sorted(members, key=rows.__getitem__) for members in family(units, prompts)]
    before = {row: last for members in families for last, row in pairwise(members)}
    roots = [members[0] for members in families]
    # row → its keys. Those of what was read come before all others.
    paths = (
        {row: [*read.copied[units[row], prompts[row]]] for row in roots} if read is not None else {}
    )
    m = 0 if read is None else read.ends[-1]
    unseen = 0 if read is not None and read.answers else m  # copies without a hidden state
    ids: list[int] = []
    positions: list[int] = []
    # row → those of its tokens that neither a row before nor its prompt's copy has
    new: dict[int, range] = {}
    for row in [*roots, *before]:
        last = before.get(row)
        known = (
            paths.get(row, [])
            if last is None
            else paths[last][: common_prefix_len(rows[last], rows[row])]
        )
        new[row] = range(len(ids), len(ids) + len(rows[row]) - len(known))
        paths[row] = [*known, *(m + i for i in new[row])]
        ids += rows[row][len(known) :]
        positions += range(len(known), len(rows[row]))
    T = max(map(len, completions))
    at, edge, edges = [], [], dict[tuple[int, int], int]()
    for row, completion in enumerate(completions):
        tokens = [key - unseen for key in paths[row][len(prompts[row]) - 1 :]]
        padding = [0] * (T - len(completion))
        at.append(tokens + padding)
        edge.append(
            [edges.setdefault(pair, len(edges)) for pair in zip(tokens, completion, strict=True)]
            + padding
        )
    whole = roots if read is None else []
    branches = [row for row in new if new[row] and row not in {*whole}]
    return Packed(
        ids=uploaded([ids], device),
        positions=uploaded([positions], device),
        target=uploaded([[*c, *[0] * (T - len(c))] for c in completions], device),
        at=uploaded(at, device),
        mask=torch.arange(T, device=device)
        < uploaded([len(c) for c in completions], device)[:, None],
        edges=uploaded(list(edges), device).mT,
        edge=uploaded(edge, device),
        wanted=places(completions, device),
        layout=_Layout(
            sum(len(new[row]) for row in whole),
            runs_of([len(new[row]) for row in whole], None, device, dtype) if whole else None,
            runs_of(
                [len(new[row]) for row in branches], [paths[row] for row in branches], device, dtype
            )
            if branches
            else None,
        ),
        pieces=_pieces((units[row], new[row]) for row in [*whole, *branches]),
        dtype=dtype,
        prompts=read,
    )


def places(
    completions: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Row and place of every token."""
    at = [(row, t) for row, completion in enumerate(completions) for t in range(len(completion))]
    row, t = uploaded(at, device).unbind(1)
    return row, t


def _pieces(runs: Iterable[tuple[int, range]]) -> tuple[tuple[int, slice], ...]:
    """The longest stretches of one unit."""
    out: list[tuple[int, slice]] = []
    for unit, tokens in runs:
        start = tokens.start
        if out and out[-1][0] == unit:
            start = out.pop()[1].start
        out.append((unit, slice(start, tokens.stop)))
    return tuple(out)


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two have in common at the start."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def family(units: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Indices of rows, grouped by shared prompt."""
    families: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, key in enumerate(zip(units, prompts, strict=True)):
        families.setdefault(key, []).append(row)
    return list(families.values())


def batches(
    units: Sequence[int],
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    budget: int,
    read: Prompts | None = None,
) -> list[list[int]]:
    """Indices for `pack`: rows that share a prompt together, long ones first. A batch has at most `budget` tokens,
    shared ones counted once, or is one row. read: has been, what rows of several units begin with.

    Keys are not shared: in attention each branch has a copy of what leads to it, padded to the longest. A batch ends
    where those copies exceed 16 · budget tokens, or their pairs with the queries, which are padded too, 4 · budget².
    """
    tokens = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    out: list[list[int]] = []
    left = 0  # of the open batch's budget
    branches = queries = keys = 0  # of the open batch: how many, and the longest
    for members in sorted(family(units, prompts), key=lambda of: -max(tokens[i] for i in of)):
        # the row before in the open batch, with which the next one shares most
        last = first = read.begins[prompts[members[0]]] if read is not None else None
        for i in sorted(members, key=lambda i: completions[i]):
            row = prompts[i] + completions[i][:-1]
            cost = len(row) - (0 if last is None else common_prefix_len(last, row))
            if last is not None and cost:
                branches, queries, keys = branches + 1, max(queries, cost), max(keys, len(row))
            crowded = branches * keys * max(queries, budget // 4) > 4 * budget**2
            if not out or cost > left or crowded:
                out.append([])
                left, cost = budget, len(row) - (0 if first is None else len(first))
                branches = queries = keys = 0
            out[-1].append(i)
            left, last = left - cost, row
    return out


def padded_batches(
    lengths: Sequence[int], budget: int, *, longest_first: bool = True
) -> list[list[int]]:
    """Indices of rows, batched by similar length: at most `budget` tokens with padding, or one row."""
    out: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=longest_first):
        if out and max(lengths[out[-1][0]], lengths[i]) * (len(out[-1]) + 1) <= budget:
            out[-1].append(i)
        else:
            out.append([i])
    return out


def _attention(
    _module: torch.nn.Module,
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 K N D"],
    value: Float[Tensor, "1 K N D"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_attend: Attend | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 N H D"], None]:
    assert packed_attend is not None, (
        "the model does not hand its keyword arguments on to attention"
    )
    assert attention_mask is None, "a packed sequence has no attention mask"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attend(q, k, v, scaling)[None], None


AttentionInterface.register(ATTENTION, _attention)


def packed_hidden(
    model: PreTrainedModel, core: torch.nn.Module, batch: Packed
) -> Float[Tensor, "N D"]:
    """The backbone's output at every token of `batch`, after that at the beginnings of answers. core: the model without
    its head."""
    hidden = _forward(model, core, batch.ids, batch.positions, batch.attend())[0]
    begun = batch.prompts is not None and batch.prompts.answers
    return torch.cat([batch.prompts.copies[-1], hidden]) if begun else hidden


def _forward(
    model: PreTrainedModel, core: torch.nn.Module, ids: Tensor, positions: Tensor, attend: Attend
) -> Tensor:
    """The backbone's output [1, N, D] with this attention."""
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        return core(
            input_ids=ids, position_ids=positions, use_cache=False, packed_attend=attend
        ).last_hidden_state
    finally:
        config._attn_implementation = before


def trial_tokens(model: PreTrainedModel) -> list[int]:
    """For each trial of a way to compute this model, the first of its eight tokens. The way is right if one trial fits:
    on some tokens, special ones among them, a model amplifies the rounding of bf16 tenfold."""
    embeddings: Any = model.get_input_embeddings()
    return [len(embeddings.weight) * sixths // 6 for sixths in (3, 2, 4)]


def packs(model: PreTrainedModel, core: torch.nn.Module) -> bool:
    """Whether this model computes the same on packed rows as on separate ones: by its kind, then by a trial."""
    config = model.config
    if getattr(config, "attn_logit_softcapping", None) or not getattr(
        model, "_supports_attention_backend", False
    ):
        return False
    # a sliding window
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
        return False
    slower = f"{type(model).__name__}: rows of an update are padded, and their prompts not shared"
    try:
        if any(_packs(model, core, first) for first in trial_tokens(model)):
            return True
    except torch.OutOfMemoryError:
        raise
    # the last of a kernel that this card has not
    except (AssertionError, TypeError, RuntimeError) as error:
        logger.warning(f"{slower}: {str(error).partition(chr(10))[0]}")
        return False
    logger.warning(f"{slower}: on packed rows it computes something else")
    return False


@torch.no_grad()
def _packs(model: PreTrainedModel, core: torch.nn.Module, first: int) -> bool:
    """The trial with the tokens from `first`."""
    a, b, c, d = range(first, first + 4)
    prompts, completions = [(a, b, c), (a, b, c), (d, c)], [(d, a, b, c), (c, a), (b, b, b)]
    batch = pack([0, 0, 0], prompts, completions, model.device, model.dtype)
    read = Prompts([0, 1, 2], prompts, completions, 1, model.device, model.dtype)
    apart = pack([0, 1, 2], prompts, completions, model.device, model.dtype, read=read)
    read.read(model, core)
    hidden = [(of, packed_hidden(model, core, of)) for of in (batch, apart)]
    for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([[*p, *c[:-1]]], device=model.device)
        want = core(input_ids=ids, use_cache=False).last_hidden_state[0, len(p) - 1 :]
        off = max(float((got[of.at[row, : len(c)]] - want).abs().max()) for of, got in hidden)
        # In fp32 both agree to about 1e-6 of the largest entry, in bf16 to about 1e-2.
        if not off <= (1e-4 if model.dtype.itemsize >= 4 else 5e-2) * float(want.abs().max()):
            return False
    return True
