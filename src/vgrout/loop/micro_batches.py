"""Which rows go through the model together: one forward and backward a micro-batch."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vgrout.ground.data import UpdateRow
from vgrout.model.layout import Packed
from vgrout.model.logprobs import PaddedBatch
from vgrout.model.policy import LanguageModel
from vgrout.model.prefixes import SharedPrefixes

TokenIds = tuple[int, ...]


class Portion(NamedTuple):
    """Some of an update's rows, and the prompts that are run forward once before their answers."""

    rows: Sequence[UpdateRow]
    prefixes: SharedPrefixes | None  # None: each prompt is read together with its answers


class Tokens(NamedTuple):
    """One prompt and one completion for each row."""

    prompts: list[TokenIds]
    completions: list[TokenIds]


@dataclass(frozen=True)
class Merged:
    """Rows in which equal students share a row of g.

    twins: the row of g that several students share → the other students' own rows of g, which stay empty for now.
    """

    rows: list[UpdateRow]
    twins: dict[int, list[int]]


def merge_twins(rows: Sequence[UpdateRow]) -> Merged:
    """Let all students of a group that are equal in text, advantage and sampler add to the first one's row of g.

    Their gradients are equal, so one forward and backward is enough. Students that share a row of g are left alone:
    packing computes what they have in common once anyway. So are demonstrations, which a pool has once each.
    """
    on_row = Counter(row.row_of_g for row in rows)
    merged: list[UpdateRow] = []
    first_of: dict[Hashable, int] = {}
    twins: dict[int, list[int]] = {}
    for row in rows:
        has_own_row = on_row[row.row_of_g] == 1
        if row.rollout.source == "student" and has_own_row:
            first = first_of.setdefault(_learnt_from(row), row.row_of_g)
            if first != row.row_of_g:
                others = twins.setdefault(first, [])
                others.append(row.row_of_g)
                row = replace(row, row_of_g=first)
        merged.append(row)
    return Merged(merged, twins)


def _learnt_from(row: UpdateRow) -> Hashable:
    """All that a student's gradient depends on."""
    rollout = row.rollout
    return (
        row.group,
        rollout.prompt_ids,
        rollout.ids,
        rollout.deployed,
        rollout.logp
        is None,  # known or not; where known, those of equal tokens differ by rounding alone
        row.advantage,
    )


def prompts_apart(policy: LanguageModel, rows: Sequence[UpdateRow]) -> list[Portion]:
    """Divide rows into parts whose prompts are run forward once, before the answers.

    The prompts of a portion have at most half of the token budget, which leaves half for answers, or are one prompt.
    Where no prompt has two rows of g, that saves nothing: all rows are one portion, and each prompt is read with its
    answers.
    """
    by_prompt: dict[TokenIds, list[UpdateRow]] = {}
    for row in rows:
        of_prompt = by_prompt.setdefault(row.rollout.prompt_ids, [])
        of_prompt.append(row)
    n_rows_of_g: dict[TokenIds, int] = {}  # how many rows of g a prompt has
    for prompt, of_prompt in by_prompt.items():
        rows_of_g = {row.row_of_g for row in of_prompt}
        n_rows_of_g[prompt] = len(rows_of_g)
    if max(n_rows_of_g.values(), default=0) < 2:
        return [Portion(rows, None)]

    most_rows_first = sorted(by_prompt, key=n_rows_of_g.__getitem__, reverse=True)
    depth = policy.model.config.num_hidden_layers
    dtype = policy.model.dtype
    portions: list[Portion] = []
    for prompts_of_part in _in_parts(most_rows_first, policy.budget.tokens // 2):
        of_part: list[UpdateRow] = []
        for prompt in prompts_of_part:
            of_part += by_prompt[prompt]
        prefixes = SharedPrefixes(
            [row.row_of_g for row in of_part],
            *_tokens(of_part),
            depth,
            policy.device,
            dtype,
        )
        if prefixes.ids:  # none where every prompt is one token
            portions.append(Portion(of_part, prefixes))
        else:
            portions.append(Portion(of_part, None))
    return portions


def _in_parts(prompts: Sequence[TokenIds], most_tokens: int) -> list[list[TokenIds]]:
    """Divide the prompts, in order, into parts of at most so many tokens, or of one prompt."""
    parts: list[list[TokenIds]] = []
    left = 0  # of the last part's tokens
    for prompt in prompts:
        if not parts or len(prompt) > left:
            parts.append([])
            left = most_tokens
        parts[-1].append(prompt)
        left -= len(prompt)
    return parts


def micro_batches(
    policy: LanguageModel,
    rows: Sequence[UpdateRow],
    prefixes: SharedPrefixes | None = None,
) -> list[list[UpdateRow]]:
    """Divide rows into micro-batches, one forward each, of the budget's tokens. prefixes: those that were run forward
    before; their tokens count, too."""
    left = policy.budget.tokens
    if prefixes is not None:
        left = max(1, left - len(prefixes.ids))
    rows_of_g = [row.row_of_g for row in rows]
    parts = policy.parts(*_tokens(rows), rows_of_g, left, prefixes)
    return [[rows[i] for i in part] for part in parts]


def as_batch(
    policy: LanguageModel,
    rows: Sequence[UpdateRow],
    prefixes: SharedPrefixes | None = None,
) -> PaddedBatch | Packed:
    """Lay out the rows' tokens as the model reads them: packed, or padded."""
    return policy.batch(*_tokens(rows), [row.row_of_g for row in rows], prefixes)


def _tokens(rows: Sequence[UpdateRow]) -> Tokens:
    tokens = Tokens([], [])
    for row in rows:
        tokens.prompts.append(row.rollout.prompt_ids)
        tokens.completions.append(row.rollout.ids)
    return tokens
