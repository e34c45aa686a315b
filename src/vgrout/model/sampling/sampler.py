"""Sampling: prompts → completions, all prompts' rows in one batch, which finished rows leave.

Rows that have the same prompt and the same tokens so far are one slot of the decoder until their
draws differ: the answers of a group are a tree, and every node of it is computed once.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout.config.settings import Sampling
from vgrout.ground import ranks
from vgrout.ground.data import Completion
from vgrout.ground.io import Diverged
from vgrout.ground.tensor_types import at_least_fp32
from vgrout.model.attention import uploaded
from vgrout.model.load.memory import sampled_row
from vgrout.model.logprobs import vocabulary
from vgrout.model.policy import LanguageModel
from vgrout.model.sampling.decoder import PROMPT_TOKENS, Decoder

WIDE = 2**14  # logits of a row from which `largest` looks for blocks first
BLOCK = 64  # logits of such a block

# (prompt, index of the completion among the prompt's, completion)
OnFinish = Callable[[int, int, Completion], None]
# token, its log-prob under the full softmax, its log-prob under what it was sampled from
Drawn = tuple[int, float]


def rows_at_once(policy: LanguageModel, prompt: int, max_new: int, per_prompt: int) -> int:
    """Rows whose keys, values and logits fit the budget; more are sampled in turns.

    A decoder that does not read prompts in parts is given as many as it may read at once.

    Args:
        policy: what is sampled from.
        prompt: tokens of a prompt.
        max_new: the most tokens of a completion.
        per_prompt: rows of a prompt.
    """
    row_bytes = 0
    for part in policy.models:
        row_bytes += sampled_row(
            part.token_bytes,
            part.model.config.num_hidden_layers,
            vocabulary(part.model),
            prompt,
            max_new,
            per_prompt,
        )
    fit = max(1, policy.budget.kv // row_bytes)
    if all(part.lean for part in policy.models):
        return fit
    prompts_at_once = max(1, PROMPT_TOKENS // max(1, prompt))
    return min(fit, prompts_at_once * per_prompt)


@torch.no_grad()
def sample(
    policy: LanguageModel,
    prompts: Sequence[tuple[int, ...]],
    n: int | Sequence[int],
    sampling: Sampling,
    max_new: int,
    generator: torch.Generator,
    on_finish: OnFinish | None = None,
    *,
    whole_prompts: bool = False,
) -> list[list[Completion]]:
    """n completions (or n[i]) of each prompt, at most max_new tokens each: one list a prompt.

    Row noise is drawn beforehand, [rows, max_new] from `generator` (a CPU stream), and tokens by
    inverse CDF: a row's tokens do not depend on which other rows are still there, nor on the rank
    that samples it. `on_finish(prompt, index, completion)` is called as soon as a row ends, on the
    rank that has sampled it (on one of those that hold one model together), so that grading runs
    beside sampling.

    whole_prompts: all completions of a prompt are sampled on one rank.

    Raises:
        Diverged: the model's logits are not finite.
    """
    counts = [n] * len(prompts) if isinstance(n, int) else list(n)
    assert len(counts) == len(prompts), (len(counts), len(prompts))
    # (prompt, index of the completion)
    rows = [(prompt, index) for prompt, count in enumerate(counts) for index in range(count)]
    noise = torch.rand(len(rows), max_new, generator=generator)
    longest = max(map(len, prompts), default=0)
    fewest = min((count for count in counts if count > 0), default=1)
    at_once = rows_at_once(policy, longest, max_new, fewest)

    def own_answers() -> dict[tuple[int, int], Completion]:
        """The answers of this rank's rows."""
        answers: dict[tuple[int, int], Completion] = {}
        if whole_prompts:
            of_prompts = ranks.own(counts)
            own = range(sum(counts[: of_prompts.start]), sum(counts[: of_prompts.stop]))
        else:
            own = ranks.own([1] * len(rows))
        for start in range(own.start, own.stop, at_once):
            turn = slice(start, min(start + at_once, own.stop))
            prompt_of = [prompt for prompt, _ in rows[turn]]
            run = _Run(policy, prompts, prompt_of, sampling, noise[turn].to(policy.device))
            for i, answer in run.finish_all():
                prompt, index = rows[start + i]
                answers[prompt, index] = answer
                if on_finish is not None and i % ranks.shards() == ranks.shard():
                    on_finish(prompt, index, answer)
        return answers

    answers = ranks.merged(own_answers)
    completions: list[list[Completion]] = []
    for prompt, count in enumerate(counts):
        completions.append([answers[prompt, index] for index in range(count)])
    return completions


@torch.no_grad()
def greedy(
    policy: LanguageModel, prompts: Sequence[tuple[int, ...]], max_new: int, seconds: float
) -> list[Completion]:
    """The likeliest token each time: one completion of each prompt, all at once, on this rank.

    They are cut at max_new tokens, and where `seconds` are over.
    """
    noise = torch.zeros(len(prompts), max_new, device=policy.device)
    deadline = time.monotonic() + seconds
    run = _Run(policy, prompts, range(len(prompts)), Sampling(temperature=0), noise, deadline)
    answers = dict(run.finish_all())
    return [answers[row] for row in range(len(prompts))]


@dataclass(frozen=True, slots=True)
class _Draw:
    """One token for each row, on the device."""

    slots: Int[Tensor, " n"]  # that the rows have drawn from
    tokens: Int[Tensor, " n"]
    columns: Callable[[], Tensor]  # waits for tokens and log-probs, and returns them [2, n]


class _Run:
    """The state of one batch: each row's tokens so far, and the logits of the decoder's slots."""

    def __init__(
        self,
        policy: LanguageModel,
        prompts: Sequence[tuple[int, ...]],
        prompt_of: Sequence[int],
        sampling: Sampling,
        noise: Float[Tensor, "rows max_new"],
        deadline: float = math.inf,
    ) -> None:
        """prompt_of: row → its prompt; prompts of no row are not read.

        deadline: of time.monotonic(), at which rows that have not ended are cut.
        """
        self.policy, self.sampling, self.deadline = policy, sampling, deadline
        n, max_new = noise.shape
        self.noise = noise.mT.contiguous()  # [max_new, rows]
        self.decoder: Decoder = policy.decoder()
        used = sorted(set(prompt_of))
        self.logits = self.decoder.prefill([prompts[prompt] for prompt in used], n, max_new)
        slot_of = {prompt: slot for slot, prompt in enumerate(used)}
        self.first_slots = [slot_of[prompt] for prompt in prompt_of]
        self.drawn: list[list[Drawn]] = [[] for _ in range(n)]
        self.overlaps = overlaps(policy.device)

    def finish_all(self) -> Iterator[tuple[int, Completion]]:
        """Yields (row, completion) as rows end."""
        max_new, n = self.noise.shape
        # the rows in the batch, and the slot that each continues
        rows, slots = list(range(n)), self.first_slots
        at = self._index(rows)
        for t in range(max_new):
            is_last = t + 1 == max_new or time.monotonic() > self.deadline
            drawn = self._draw(at, self._index(slots), t)
            # Where no two rows share a slot, each slot goes on with its own row's token, whichever
            # it is: the device is given the next step before the host reads the tokens. It does all
            # in the order in which it is told to, so the draw has read the logits before the step
            # overwrites them. A row that has ended takes one step too many.
            is_ahead = self.overlaps and not is_last and len(set(slots)) == len(rows)
            if is_ahead:
                self._step_ahead(drawn)
            tokens = self._record(rows, drawn)
            stay: list[int] = []
            for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                is_eos = token in self.policy.eos_ids
                if is_eos or is_last:
                    yield row, self._answer(row, finished=is_eos)
                else:
                    stay.append(i)
            if not stay:
                return
            if len(stay) < len(rows):
                rows = [rows[i] for i in stay]
                slots = [slots[i] for i in stay]
                tokens = [tokens[i] for i in stay]
                at = self._index(rows)
            slots = self._drop_unread(slots) if is_ahead else self._advance(rows, slots, tokens)

    def _advance(self, rows: list[int], slots: list[int], tokens: list[int]) -> list[int]:
        """Append every row's token; returns each row's new slot.

        Rows of one slot that have drawn the same token go on as one. Not on a GPU: more slots cost
        it less than waiting does to see which rows have drawn the same token.
        """
        children: dict[tuple[int, int], int] = {}  # (slot, token), or (slot, row) → child
        child_of: list[int] = []
        for slot, branch in zip(slots, rows if self.overlaps else tokens, strict=True):
            child_of.append(children.setdefault((slot, branch), len(children)))
        parents = [slot for slot, _ in children]
        slot_of_child, sources = self._make_room(parents)
        new_slots = [slot_of_child[child] for child in child_of]
        n_slots = len(self.logits) if sources is None else len(sources)
        next_tokens = [0] * n_slots  # 0 for slots that nobody reads any more
        for slot, token in zip(new_slots, tokens, strict=True):
            next_tokens[slot] = token
        self.logits = self.decoder.step(self._index(next_tokens))
        return new_slots

    def _step_ahead(self, drawn: "_Draw") -> None:
        """Append to every slot the token that its row has drawn, which the host has not read."""
        tokens = torch.zeros(len(self.logits), dtype=torch.long, device=self.noise.device)
        tokens.index_copy_(0, drawn.slots, drawn.tokens)
        self.logits = self.decoder.step(tokens)

    def _drop_unread(self, slots: list[int]) -> list[int]:
        """Forget the slots that no row reads any more, and their logits; returns each row's slot."""
        new_slots, sources = self._make_room(slots)
        if sources is not None:
            self.logits = self.logits[self._index(sources)]
        return new_slots

    def _make_room(self, parents: list[int]) -> tuple[list[int], list[int] | None]:
        """Branch the decoder's slots, and drop those without a child.

        Returns each child's slot, and what each slot was before; None where nothing moves.

        parents: the slot that each child continues.
        """
        before = len(self.logits)
        branches = len(set(parents)) < len(parents)
        if not branches and before - len(parents) <= self.decoder.drop_at * before:
            return parents, None  # nothing to copy, little to drop
        slot_of_child = placed(parents)
        sources = [0] * len(parents)
        for slot, parent in zip(slot_of_child, parents, strict=True):
            sources[slot] = parent
        if sources != list(range(before)):
            self.decoder.keep(sources)
        return slot_of_child, sources

    def _index(self, numbers: list[int]) -> Int[Tensor, " n"]:
        return uploaded(numbers, self.noise.device)

    def _draw(self, at: Int[Tensor, " n"], slots: Int[Tensor, " n"], t: int) -> "_Draw":
        """Draw one token per row from its slot's logits. at: the rows."""
        tokens = draw(self.logits, self.noise[t, at], self.sampling, slots)
        logp = self.logits.float().log_softmax(-1)[slots, tokens]
        # in fp64, so that one copy brings ids and log-probs unrounded
        columns = torch.stack([tokens.double(), logp.double()])
        return _Draw(slots, tokens, begin_copy(columns))

    def _record(self, rows: list[int], drawn: "_Draw") -> list[int]:
        """Record each row's token, and return them.

        The one time in a token that the host waits for the device.
        """
        numbers, logps = drawn.columns().tolist()
        ids = list(map(int, numbers))
        for row, of_row in zip(rows, zip(ids, logps, strict=True), strict=True):
            self.drawn[row].append(of_row)
        return ids

    def _answer(self, row: int, finished: bool) -> Completion:
        ids, logps = zip(*self.drawn[row], strict=True)
        if not all(map(math.isfinite, logps)):
            raise Diverged(
                "the policy has collapsed: its logits are not finite, so nothing can be sampled from it"
            )
        return Completion(ids, self.policy.decode(ids), finished, logps)


def overlaps(device: torch.device) -> bool:
    """Whether the host goes on while the device computes."""
    return device.type == "cuda"


def begin_copy(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy x to the host.

    The function returned waits until x is there, and not for what the device was given to do since.
    """
    if x.device.type != "cuda":
        return lambda: x
    copy = x.to("cpu", non_blocking=True)  # into pinned memory
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(x.device))

    def wait() -> Tensor:
        done.synchronize()
        return copy

    return wait


def placed(parents: Sequence[int]) -> list[int]:
    """A slot for each child, 0 … n − 1, its parent's own where it is free: [0, 0, 3] → [0, 1, 2].

    A parent's slot goes to its first child, if it is below n.
    """
    n = len(parents)
    heir: dict[int, int] = {}  # parent → the child that stays in its slot
    for child, parent in enumerate(parents):
        if parent < n and parent not in heir:
            heir[parent] = child
    free = (slot for slot in range(n) if slot not in heir)
    slots: list[int] = []
    for child, parent in enumerate(parents):
        slots.append(parent if heir.get(parent) == child else next(free))
    return slots


def draw(
    logits: Float[Tensor, "n V"],
    u: Float[Tensor, " m"],
    sampling: Sampling,
    rows: Int[Tensor, " m"] | None = None,
) -> Int[Tensor, " m"]:
    """Tokens by inverse CDF.

    u: uniform noise in [0, 1). rows: the row of the logits that each number draws from; None: the
    row of its own index.
    """
    values, ids = candidates(logits, sampling)
    cdf = values.log_softmax(-1).exp().cumsum(-1)
    if rows is not None:
        cdf = cdf[rows]
        ids = None if ids is None else ids[rows]
    # Below the last entry whatever the rounding: the first entry above it is then always a token of
    # probability > 0.
    total = cdf[:, -1:]
    level = torch.minimum(u[:, None] * total, total.nextafter(torch.zeros_like(total)))
    pick = torch.searchsorted(cdf, level, right=True)
    pick = pick.clamp(max=cdf.shape[-1] - 1)  # in a row of NaN it is one too many
    token = pick if ids is None else ids.gather(-1, pick)
    return token.squeeze(-1)


def tempered(logits: Float[Tensor, "*n V"], sampling: Sampling) -> Float[Tensor, "*n V"]:
    """Logits at the sampling temperature, in fp32 at least; greedy (0) keeps them as they are."""
    logits = at_least_fp32(logits)
    if sampling.temperature in (0, 1):
        return logits
    return logits / sampling.temperature


def candidates(
    logits: Float[Tensor, "n V"],
    sampling: Sampling,
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"] | None]:
    """Tempered logits of the tokens that may be sampled, and their ids.

    A logit of −inf: this token is left out after all. Ids of None: 0 … V-1.
    """
    k = 1 if sampling.temperature == 0 else sampling.top_k
    if 0 < k < logits.shape[-1]:
        values, ids = largest(logits, k)  # exactly k, also among equals
        values = tempered(values, sampling)
    elif sampling.top_p < 1:
        values, ids = torch.sort(tempered(logits, sampling), dim=-1, descending=True)
    else:
        values, ids = tempered(logits, sampling), None
    if sampling.top_p < 1:  # descending here: the token that reaches top_p still counts
        p = values.softmax(-1)
        mass_before = p.cumsum(-1) - p
        values = values.masked_fill(mass_before >= sampling.top_p, -math.inf)
    return values, ids


def largest(
    logits: Float[Tensor, "n V"],
    k: int,
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest logits of each row, descending, and where they are.

    On a CPU topk copies a row and sorts it in part, which for a real model's vocabulary takes
    longer than a layer of the model. There it is given the k blocks with the largest maxima, which
    hold the k largest logits.
    """
    _, V = logits.shape
    if logits.device.type != "cpu" or V < WIDE or V % BLOCK:
        return logits.topk(k)
    blocks = logits.unflatten(1, (-1, BLOCK))
    chosen = blocks.amax(-1).topk(min(k, blocks.shape[1])).indices
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK))
    values, at = inside.flatten(1).topk(k)
    return values, chosen.gather(1, at // BLOCK) * BLOCK + at % BLOCK
