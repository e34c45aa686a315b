"""Prefixes that several rows of g share: one forward for all of them, one backward for each.

Where the answers to a prompt add to different rows of the gradient, their tokens cannot simply be
shared: the gradient at a shared token would be the sum over these rows. So the prefixes are run
forward by themselves, every row of g gets its own copy of their keys and values, and the
backward pass goes from the copies through that one forward once for each row of g.
"""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from vgrout.model.attention import PackedAttention, packed_forward, runs_of, uploaded

Ids = tuple[int, ...]  # tokens of a prompt, a completion or a row
# Stretches of a packed sequence: (row of g that the tokens' gradient is added to, tokens).
Pieces = Sequence[tuple[int, slice]]
# Told before a forward of n tokens which pieces they are, and whether backward will go through that
# forward several times. Returns a callback: call it with the pieces before each of these times.
Announce = Callable[[Pieces, int, bool], Callable[[Pieces], None]]


class SharedPrefixes:
    """Prefixes shared by several rows of g, run forward once.

    A prefix is a prompt, and where that saves work also the tokens with which all answers to it
    begin; every answer keeps at least one token for itself. Each row of g has its own copy of the
    keys and values of its prefixes, to which the backward pass of its answers adds. `backward` then
    goes through the forward in turns: turn j is that of the j-th row of g of each prompt.

    Use: `read`, then forward and backward of the answers packed with these prefixes, then
    `backward`.

    Attributes:
        prefixes: prompt → the prefix read for it.
        reach_answers: the prefixes may go on into the answers.
        ids: tokens of all prefixes, one after the other, those of most rows of g first.
        turns: the pieces of each turn, which are the first tokens of `ids`.
        turn_ends: 0, and where the copies of each turn end; the last one is the number of copies.
        copied: (row of g, prompt) → the copies of its prefix.
        copies: keys and values layer by layer, [copies, K, D], then, where the prefixes reach into
            the answers, the last hidden states. Filled by `read`.
    """

    def __init__(
        self,
        rows_of_g: Sequence[int],
        prompts: Sequence[Ids],
        completions: Sequence[Ids],
        depth: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """One entry of the three sequences for each answer. depth: blocks of the model."""
        rows_of_g_of: dict[Ids, list[int]] = {}
        rows_of: dict[Ids, list[Ids]] = {}
        for row_of_g, prompt, completion in zip(rows_of_g, prompts, completions, strict=True):
            known = rows_of_g_of.setdefault(prompt, [])
            if row_of_g not in known:
                known.append(row_of_g)
            # The last token predicts nothing, and the one before is the row's own.
            row = (*prompt, *completion)[:-2]
            rows_of.setdefault(prompt, []).append(row)
        self._choose_prefixes(rows_of, depth)

        # A turn's tokens are then the first ones of all.
        most_rows_first = sorted(rows_of_g_of, key=lambda prompt: -len(rows_of_g_of[prompt]))
        prefixes = [self.prefixes[prompt] for prompt in most_rows_first]
        self._lengths = list(map(len, prefixes))
        self.ids = list(chain(*prefixes))

        self.turns: list[Pieces] = []
        self.turn_ends = [0]
        self.copied: dict[tuple[int, Ids], range] = {}
        most_rows_of_g = len(rows_of_g_of[most_rows_first[0]])
        for turn in range(most_rows_of_g):
            of_turn: dict[Ids, int] = {}
            for prompt in most_rows_first:
                if turn < len(rows_of_g_of[prompt]):
                    of_turn[prompt] = rows_of_g_of[prompt][turn]
            self._add_turn(of_turn)

        self._device, self._dtype = device, dtype
        self._before_turn: Callable[[Pieces], None] | None = None
        self._read: list[Tensor] = []  # what `copies` are copies of, with the forward's graph
        self.copies: list[Tensor] = []

    def _choose_prefixes(self, rows_of: dict[Ids, list[Ids]], depth: int) -> None:
        """Choose between prompts with and without the tokens that all their answers share.

        Log-probs of shared answer tokens need the last hidden states, so the backward pass goes
        through the last block for the prompts too. For prompts alone it has no need of that block.
        """
        longest = {prompt: _common_prefix(rows) for prompt, rows in rows_of.items()}
        saved, added = 0, 0  # tokens, each counted once for every block that it goes through
        for prompt, prefix in longest.items():
            saved += depth * (len(prefix) - len(prompt) + 1)
            added += len(prompt)
        self.reach_answers = saved > added
        if self.reach_answers:
            self.prefixes = longest
        else:
            self.prefixes = {prompt: prompt[:-1] for prompt in rows_of}

    def _add_turn(self, of_turn: dict[Ids, int]) -> None:
        """Lay out the copies of one row of g of each of these prompts, in the order of `ids`."""
        pieces: list[tuple[int, slice]] = []
        first_copy = self.turn_ends[-1]
        start = 0
        for prompt, row_of_g in of_turn.items():
            stop = start + len(self.prefixes[prompt])
            pieces.append((row_of_g, slice(start, stop)))
            self.copied[row_of_g, prompt] = range(first_copy + start, first_copy + stop)
            start = stop
        self.turns.append(pieces)
        self.turn_ends.append(first_copy + start)

    def read(
        self,
        model: PreTrainedModel,
        core: torch.nn.Module,
        announce: Announce | None = None,
    ) -> None:
        """Run the prefixes' forward, and copy its keys and values for each row of g.

        core: the model without its head. announce: told of this forward, and, in `backward`, of
        each turn.
        """
        if announce is not None:
            self._before_turn = announce(self.turns[0], len(self.ids), True)
        lengths = [n for n in self._lengths if n > 0]
        attention = PackedAttention(
            root_tokens=len(self.ids),
            roots=runs_of(lengths, None, self._device, self._dtype),
            branches=None,
        )

        def keeping(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
            self._read += [k, v]
            return attention.attend(q, k, v, scale)

        positions: list[int] = []
        for n in lengths:
            positions += range(n)
        copied_tokens: list[int] = []
        for start, end in pairwise(self.turn_ends):
            copied_tokens += range(end - start)

        hidden = packed_forward(
            model,
            core,
            uploaded([self.ids], self._device),
            uploaded([positions], self._device),
            keeping,
        )
        if self.reach_answers:
            self._read.append(hidden.squeeze(0))
        at = uploaded(copied_tokens, self._device)
        for x in self._read:
            copy = x.detach().index_select(0, at)
            self.copies.append(copy.requires_grad_(x.requires_grad))

    def backward(self) -> None:
        """Go from the gradients of the copies through the prefixes' forward, turn by turn."""
        outputs: list[Tensor] = []
        copy_grads: list[Tensor] = []
        for x, copy in zip(self._read, self.copies, strict=True):
            # Not all have a gradient: a first layer whose Linears are not adapted does not depend
            # on δS.
            if copy.grad is not None:
                outputs.append(x)
                copy_grads.append(copy.grad)
        last = len(self.turns) - 1
        for turn, (start, end) in enumerate(pairwise(self.turn_ends)):
            if self._before_turn is not None:
                self._before_turn(self.turns[turn])
            rest = len(self.ids) - (end - start)  # tokens of prompts with fewer rows of g
            grads = [_with_zeros(grad[start:end], rest) for grad in copy_grads]
            torch.autograd.backward(outputs, grads, retain_graph=turn < last)
        self._read, self.copies = [], []


def _with_zeros(x: Tensor, n: int) -> Tensor:
    """x with n more rows of zeros."""
    other_dimensions = (0, 0) * (x.ndim - 1)
    return pad(x, (*other_dimensions, 0, n))


def _common_prefix(rows: Sequence[Ids]) -> Ids:
    """The tokens that all rows begin with."""
    first, last = min(rows), max(rows)  # in sorted order these two differ the earliest
    return first[: common_prefix_len(first, last)]


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two have in common at the start."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
