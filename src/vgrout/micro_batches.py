"""Which rows go through the model together: one forward and backward a micro-batch."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from vgrout.data import UpdateRow
from vgrout.model.layout import Packed, batches, pack, padded_batches
from vgrout.model.logprobs import PaddedBatch, collate
from vgrout.model.policy import LanguageModel
from vgrout.model.prefixes import Prompts

TokenIds = tuple[int, ...]


def merge_twins(rows: Sequence[UpdateRow]) -> tuple[list[UpdateRow], dict[int, list[int]]]:
    """Students of a group that are equal in text, advantage and sampler have one gradient: where each has a row of g
    of its own, they all add to that of the first.

    Returns the rows so changed, and that row of g → the others whose gradient is the same.
    """
    on_row = Counter(row.at for row in rows)
    merged: list[UpdateRow] = []
    first_of: dict[Hashable, int] = {}
    twins: dict[int, list[int]] = {}
    for row in rows:
        rollout = row.rollout
        if rollout.source == "student" and on_row[row.at] == 1:
            key = (
                row.group,
                rollout.prompt_ids,
                rollout.completion_ids,
                rollout.deployed,
                rollout.logp_full is None,
                row.advantage,
            )
            first = first_of.setdefault(key, row.at)
            if first != row.at:
                twins.setdefault(first, []).append(row.at)
                row = replace(row, at=first)
        merged.append(row)
    return merged, twins


def prompts_apart(
    policy: LanguageModel, rows: Sequence[UpdateRow]
) -> list[tuple[Sequence[UpdateRow], Prompts | None]]:
    """Rows in parts, each with its prompts, which are read before the answers.

    The prompts of a part have at most half of the token budget, or are one prompt. None in place of the prompts: no
    prompt has two rows of g, so each is read with its answers.
    """
    by_prompt: dict[TokenIds, list[UpdateRow]] = {}
    for row in rows:
        by_prompt.setdefault(row.rollout.prompt_ids, []).append(row)

    def rows_of_g(prompt: TokenIds) -> int:
        return len({row.at for row in by_prompt[prompt]})

    most_rows_first = sorted(by_prompt, key=lambda prompt: -rows_of_g(prompt))
    if max(map(rows_of_g, by_prompt), default=0) < 2:
        return [(rows, None)]
    depth = policy.model.config.num_hidden_layers
    with_prompts: list[tuple[Sequence[UpdateRow], Prompts | None]] = []
    for part in _in_parts(most_rows_first, policy.budget.tokens // 2):
        of_part: list[UpdateRow] = []
        for prompt in part:
            of_part += by_prompt[prompt]
        units = [row.at for row in of_part]
        prompts = Prompts(units, *_tokens(of_part), depth, policy.device, policy.model.dtype)
        with_prompts.append((of_part, prompts if prompts.ids else None))
    return with_prompts


def _in_parts(prompts: Sequence[TokenIds], tokens: int) -> list[list[TokenIds]]:
    """The prompts in order, in parts of at most so many tokens, or of one prompt."""
    parts: list[list[TokenIds]] = []
    left = 0
    for prompt in prompts:
        if not parts or len(prompt) > left:
            parts.append([])
            left = tokens
        parts[-1].append(prompt)
        left -= len(prompt)
    return parts


def micro_batches(
    rows: Sequence[UpdateRow], budget: int, packs: bool, read: Prompts | None = None
) -> list[list[UpdateRow]]:
    """Rows for one forward each: with packing, those that share a prompt together, long ones first; with padding, rows
    of similar length.

    A micro-batch has at most `budget` tokens, those of the prompts that are read included, or is one row.
    """
    if packs:
        left = budget if read is None else max(1, budget - len(read.ids))
        parts = batches([row.at for row in rows], *_tokens(rows), left, read)
    else:
        parts = padded_batches([row.tokens for row in rows], budget)
    return [[rows[i] for i in part] for part in parts]


def as_batch(
    policy: LanguageModel, rows: Sequence[UpdateRow], packs: bool, read: Prompts | None = None
) -> PaddedBatch | Packed:
    """The rows' tokens as the model reads them: packed, or padded."""
    if packs:
        units = [row.at for row in rows]
        return pack(units, *_tokens(rows), policy.device, policy.model.dtype, read)
    return collate(*_tokens(rows), policy.device)


def _tokens(rows: Sequence[UpdateRow]) -> tuple[list[TokenIds], list[TokenIds]]:
    """Prompts and completions."""
    prompts = [row.rollout.prompt_ids for row in rows]
    completions = [row.rollout.completion_ids for row in rows]
    return prompts, completions
