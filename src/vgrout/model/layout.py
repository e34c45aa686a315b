"""Layout of packed rows: which rows share a forward, and where their tokens lie in it.

A row is one prompt with one answer, as tokens. Its gradient is added to one row of g [N, R], the
gradients (`UpdateRow.row_of_g`), which several rows may share.

A packed sequence holds rows one after the other without padding, and what rows have in common is
computed once. Rows that add to the same row of g and begin alike, with their prompt and perhaps
some tokens of their answers, form a tree of token runs, in which a token attends to what leads to
it from the root.
Everything in a decoder but attention works token by token, so the model's own forward runs on one
long row of tokens with our own attention function.

The gradient at a shared token is the sum over the rows that share it, so only rows that add to the
same row of g share tokens. What others have in common is read by `model/prefixes.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from vgrout.model.attention import Attend, PackedAttention, packed_forward, runs_of, uploaded
from vgrout.model.prefixes import Ids, Pieces, SharedPrefixes, common_prefix_len


@dataclass(frozen=True, slots=True)
class Packed:
    """B rows of prompt + completion as one sequence of N tokens.

    T is the longest completion. E counts pairs of a token and the next one, each pair once: rows
    that share a token and go on alike share its log-prob. A completion's last token predicts
    nothing and is not in the sequence. Where prefixes reach into the answers, `at` and `edges`
    count the prefixes' copies before the sequence's own tokens.
    """

    ids: Int[Tensor, "1 N"]
    positions: Int[Tensor, "1 N"]
    target: Int[Tensor, "B T"]  # the completion's tokens, 0 on padding
    at: Int[Tensor, "B T"]  # token whose logits predict target[b, t]
    mask: Bool[Tensor, "B T"]  # by length, never by token
    edges: Int[Tensor, "2 E"]  # the pairs: token as in `at`, and target
    edge: Int[Tensor, "B T"]  # index of each target's pair
    wanted: tuple[Int[Tensor, " n"], Int[Tensor, " n"]]  # where the mask is set, row by row
    attention: PackedAttention
    pieces: Pieces  # stretches that add to one row of g; together they are all tokens, each once
    prefixes: SharedPrefixes | None = None  # what the rows go on from

    @property
    def tokens(self) -> int:
        """Tokens in the forward."""
        return self.ids.numel()

    def attend(self) -> Attend:
        """Attention for one forward, to be called once for each layer, in their order."""
        if self.prefixes is None:
            return self.attention.attend
        copies = iter(self.prefixes.copies)

        def after_prefixes(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
            keys = torch.cat([next(copies), k])
            values = torch.cat([next(copies), v])
            return self.attention.attend(q, keys, values, scale)

        return after_prefixes


def packed_hidden(
    model: PreTrainedModel,
    core: torch.nn.Module,
    batch: Packed,
) -> Float[Tensor, "N D"]:
    """The backbone's output at every token of `batch`.

    Where prefixes reach into the answers, their copies' output comes first. core: the model without
    its head.
    """
    hidden = packed_forward(model, core, batch.ids, batch.positions, batch.attend()).squeeze(0)
    if batch.prefixes is not None and batch.prefixes.reach_answers:
        return torch.cat([batch.prefixes.copies[-1], hidden])
    return hidden


# ── rows → one packed sequence


@dataclass(slots=True)
class _TokenTree:
    """The tokens of a packed sequence, and where each row finds its own.

    Keys are numbered as attention sees them: first the prefixes' copies, then the sequence's
    tokens.
    """

    first_key: int  # of the sequence's own tokens: how many copies come before
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    # row → those of its tokens that neither an earlier row nor its prefix's copy has
    new: dict[int, range] = field(default_factory=dict)
    # row → the keys of all its tokens
    paths: dict[int, list[int]] = field(default_factory=dict)

    def add(self, row: int, tokens: Sequence[int], known: Sequence[int]) -> None:
        """Append a row whose first tokens have the keys `known`."""
        start = len(self.ids)
        self.ids += tokens[len(known) :]
        self.positions += range(len(known), len(tokens))
        new = range(start, len(self.ids))
        self.new[row] = new
        self.paths[row] = [*known, *(self.first_key + i for i in new)]


def pack(
    rows_of_g: Sequence[int],
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    device: torch.device,
    dtype: torch.dtype,
    prefixes: SharedPrefixes | None = None,
) -> Packed:
    """Lay out all rows as one sequence.

    Rows with the same row of g and the same prompt share that prompt, and what their answers have
    in common at the start. So give rows one row of g only where you need no more than the sum of
    their gradients.

    Args:
        rows_of_g: for each row, the row of g that its gradient is added to.
        prompts: each row's prompt, not empty.
        completions: each row's completion, not empty.
        device: where the tensors go.
        dtype: the model's.
        prefixes: what rows with different rows of g begin with; every row's prompt is among them.
    """
    check_rows(prompts, completions)
    rows = [p + c[:-1] for p, c in zip(prompts, completions, strict=True)]
    families = family(rows_of_g, prompts)
    for members in families:
        # Sorted, a row has most in common with the one before it.
        members.sort(key=rows.__getitem__)
    tree = _token_tree(rows_of_g, prompts, rows, families, prefixes)
    at, edges, edge = _predictions(tree, prompts, completions, prefixes)

    # Without prefixes the first row of a family is there as a whole; all others are branches.
    roots = [members[0] for members in families] if prefixes is None else []
    is_root = set(roots)
    branches = [row for row, new in tree.new.items() if len(new) > 0 and row not in is_root]
    lengths = list(map(len, completions))
    longest = max(lengths)
    return Packed(
        ids=uploaded([tree.ids], device),
        positions=uploaded([tree.positions], device),
        target=uploaded([padded(completion, longest) for completion in completions], device),
        at=uploaded(at, device),
        mask=torch.arange(longest, device=device) < uploaded(lengths, device)[:, None],
        edges=uploaded(edges, device).mT,
        edge=uploaded(edge, device),
        wanted=places(completions, device),
        attention=_attention(tree, roots, branches, device, dtype),
        pieces=_pieces(rows_of_g, tree, [*roots, *branches]),
        prefixes=prefixes,
    )


def check_rows(prompts: Sequence[Ids], completions: Sequence[Ids]) -> None:
    """Assert that there are rows, and that each has a prompt and a completion."""
    assert len(prompts) == len(completions) > 0, (len(prompts), len(completions))
    assert all(prompts), "an empty prompt: nothing predicts the first token"
    assert all(completions), "an empty completion: nothing to predict"


def _token_tree(
    rows_of_g: Sequence[int],
    prompts: Sequence[Ids],
    rows: Sequence[Ids],
    families: Sequence[Sequence[int]],
    prefixes: SharedPrefixes | None,
) -> _TokenTree:
    """All families' first rows, then what their other rows do not share with the row before.

    rows: each row's tokens in the forward. families: rows that share a prompt, sorted by tokens.
    """
    tree = _TokenTree(first_key=0 if prefixes is None else prefixes.turn_ends[-1])
    for members in families:
        first = members[0]
        copies: Sequence[int] = ()
        if prefixes is not None:
            copies = prefixes.copied[rows_of_g[first], prompts[first]]
        tree.add(first, rows[first], copies)
    for members in families:
        for before, row in pairwise(members):
            shared = common_prefix_len(rows[before], rows[row])
            tree.add(row, rows[row], tree.paths[before][:shared])
    return tree


def _predictions(
    tree: _TokenTree,
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    prefixes: SharedPrefixes | None,
) -> tuple[list[list[int]], list[tuple[int, int]], list[list[int]]]:
    """Which token predicts which: `at`, `edges` and `edge` of `Packed`, as lists."""
    copies_without_hidden = 0  # keys that no token of the backbone's output belongs to
    if prefixes is not None and not prefixes.reach_answers:
        copies_without_hidden = tree.first_key
    longest = max(map(len, completions))
    at: list[list[int]] = []
    edge: list[list[int]] = []
    index_of: dict[tuple[int, int], int] = {}  # (token, next token) → index of the pair
    for row, completion in enumerate(completions):
        # the prompt's last token predicts the completion's first one
        path = tree.paths[row][len(prompts[row]) - 1 :]
        predicting = [key - copies_without_hidden for key in path]
        of_row: list[int] = []
        for pair in zip(predicting, completion, strict=True):
            of_row.append(index_of.setdefault(pair, len(index_of)))
        at.append(padded(predicting, longest))
        edge.append(padded(of_row, longest))
    return at, list(index_of), edge


def padded(numbers: Sequence[int], length: int) -> list[int]:
    """The numbers, then zeros up to this length."""
    return [*numbers, *[0] * (length - len(numbers))]


def _attention(
    tree: _TokenTree,
    roots: Sequence[int],
    branches: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> PackedAttention:
    root_lengths = [len(tree.new[row]) for row in roots]
    branch_lengths = [len(tree.new[row]) for row in branches]
    branch_paths = [tree.paths[row] for row in branches]
    return PackedAttention(
        root_tokens=sum(root_lengths),
        roots=runs_of(root_lengths, None, device, dtype) if roots else None,
        branches=runs_of(branch_lengths, branch_paths, device, dtype) if branches else None,
    )


def places(
    completions: Sequence[Ids],
    device: torch.device,
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Row and position of every completion token, row by row."""
    at: list[tuple[int, int]] = []
    for row, completion in enumerate(completions):
        at += [(row, t) for t in range(len(completion))]
    row, t = uploaded(at, device).unbind(1)
    return row, t


def _pieces(rows_of_g: Sequence[int], tree: _TokenTree, rows: Sequence[int]) -> Pieces:
    """The longest stretches that add to one row of g. rows: in the order of the sequence."""
    pieces: list[tuple[int, slice]] = []
    for row in rows:
        row_of_g, new = rows_of_g[row], tree.new[row]
        start = new.start
        if pieces and pieces[-1][0] == row_of_g:
            _, before = pieces.pop()
            start = before.start
        pieces.append((row_of_g, slice(start, new.stop)))
    return tuple(pieces)


def family(rows_of_g: Sequence[int], prompts: Sequence[Ids]) -> list[list[int]]:
    """Indices of rows, grouped by row of g and prompt."""
    families: dict[tuple[int, Ids], list[int]] = {}
    for row, key in enumerate(zip(rows_of_g, prompts, strict=True)):
        families.setdefault(key, []).append(row)
    return list(families.values())


# ── rows → batches, a forward each


def batches(
    rows_of_g: Sequence[int],
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    budget: int,
    prefixes: SharedPrefixes | None = None,
) -> list[list[int]]:
    """Indices of rows for `pack`: those that share a prompt together, long ones first.

    A batch has at most `budget` tokens, shared ones counted once, or is a single row. A batch also
    ends where its branches would need too much memory in attention. prefixes: as for `pack`; their
    tokens are not counted.
    """
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    families = family(rows_of_g, prompts)
    families.sort(key=lambda members: max(lengths[i] for i in members), reverse=True)
    out: list[list[int]] = []
    left = 0  # of the open batch's budget
    # Branches of the open batch. Keys are not shared in attention: each branch has a copy of what
    # leads to it, and both are padded to the longest.
    branches = longest_query = longest_key = 0
    for members in families:
        prefix = None if prefixes is None else prefixes.prefixes[prompts[members[0]]]
        # What the next row shares most with. Sorted, that is the row before it in the open batch.
        before = prefix
        for i in sorted(members, key=completions.__getitem__):
            row = prompts[i] + completions[i][:-1]
            new = len(row)
            if before is not None:
                new -= common_prefix_len(before, row)
                if new > 0:
                    branches += 1
                    longest_query, longest_key = max(longest_query, new), max(longest_key, len(row))
            # the copies may be 16 · budget tokens, their pairs with the padded queries 4 · budget²
            pairs = branches * longest_key * max(longest_query, budget // 4)
            if not out or new > left or pairs > 4 * budget**2:
                out.append([])
                left = budget
                branches = longest_query = longest_key = 0
                new = len(row) if prefix is None else len(row) - len(prefix)
            out[-1].append(i)
            left -= new
            before = row
    return out


def padded_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of rows, batched by similar length, long ones first.

    A batch has at most `budget` tokens with padding, or is a single row.
    """
    out: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if out and lengths[out[-1][0]] * (len(out[-1]) + 1) <= budget:
            out[-1].append(i)
        else:
            out.append([i])
    return out
