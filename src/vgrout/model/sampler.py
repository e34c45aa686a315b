"""Sampling: prompts → completions, all prompts' rows in one batch, which finished rows leave.

Rows that have the same prompt and the same tokens so far are one slot of the decoder until their draws differ: the
answers of a group are a tree, and every node of it is computed once."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout import ranks
from vgrout.data import Completion
from vgrout.errors import Diverged
from vgrout.model.attention import uploaded
from vgrout.model.decoder import READ, Decoder
from vgrout.model.memory import sampled_row
from vgrout.model.policy import LanguageModel
from vgrout.model.sampling import Sampling, candidates

OnFinish = Callable[[int, int, Completion], None]


def rows_at_once(policy: LanguageModel, prompt: int, max_new: int, per_prompt: int) -> int:
    """Rows whose keys, values and logits fit the budget, `per_prompt` of a prompt: more are sampled in turns.
    A decoder that does not read prompts in parts is given as many as it may read at once."""
    row = 0
    for part in policy.models:
        model, c = part.model, part.model.config
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        token = 2 * c.num_hidden_layers * heads * width * model.dtype.itemsize
        row += sampled_row(token, c.num_hidden_layers, c.vocab_size, prompt, max_new, per_prompt)
    fit = max(1, policy.budget.kv // row)
    in_parts = all(part.lean for part in policy.models)
    return fit if in_parts else min(fit, max(1, READ // max(1, prompt)) * per_prompt)


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
    drop_finished: bool = True,
    share_prefixes: bool = True,
) -> list[list[Completion]]:
    """n completions (or n[i]) of each prompt, at most max_new tokens each: one list a prompt.

    Row noise is drawn beforehand, [rows, max_new] from `generator` (a CPU stream), and tokens by inverse CDF: a row's
    tokens do not depend on which other rows are still there, nor on the rank that samples it. `on_finish(prompt, index,
    completion)` is called as soon as a row ends, on the rank that has sampled it, so that grading runs beside sampling.
    For tests and benchmarks: without drop_finished, finished rows stay in the batch; without share_prefixes, every row
    is computed by itself.

    Raises:
        Diverged: the model's logits are not finite.
    """
    counts = [n] * len(prompts) if isinstance(n, int) else list(n)
    assert len(counts) == len(prompts), (len(counts), len(prompts))
    rows = [(p, i) for p, count in enumerate(counts) for i in range(count)]
    noise = torch.rand(len(rows), max_new, generator=generator)
    fewest = min((count for count in counts if count), default=1)
    width = rows_at_once(policy, max(map(len, prompts), default=0), max_new, fewest)

    def own_answers() -> dict[tuple[int, int], Completion]:
        answers: dict[tuple[int, int], Completion] = {}
        own = ranks.own([1] * len(rows))
        for lo in range(own.start, own.stop, width):
            at = slice(lo, min(lo + width, own.stop))
            part = rows[at]
            used = sorted({p for p, _ in part})
            prompt_of = [used.index(p) for p, _ in part]
            run = _Run(
                policy, [prompts[p] for p in used], prompt_of, sampling, noise[at].to(policy.device)
            )
            for row, answer in run.finish_all(drop_finished, share_prefixes):
                answers[part[row]] = answer
                if on_finish is not None:
                    on_finish(*part[row], answer)
        return answers

    answers = ranks.merged(own_answers)
    return [[answers[p, i] for i in range(count)] for p, count in enumerate(counts)]


class _Run:
    """The state of one batch: each row's tokens so far, and the logits of every slot of the decoder."""

    def __init__(
        self,
        policy: LanguageModel,
        prompts: Sequence[tuple[int, ...]],
        prompt_of: list[int],
        sampling: Sampling,
        noise: Float[Tensor, "rows max_new"],
    ) -> None:
        self.policy, self.sampling, self.prompt_of = policy, sampling, prompt_of
        n, max_new = noise.shape
        self.noise = noise.mT.contiguous()  # [max_new, rows]
        self.decoder: Decoder = policy.decoder()
        self.logits = self.decoder.prefill(prompts, n, max_new)
        # token, log-probs: full, sampled
        self.drawn: list[list[tuple[int, float, float]]] = [[] for _ in range(n)]

    def finish_all(self, drop_finished: bool, share_prefixes: bool):
        """Yields (row, completion) as rows end."""
        n, max_new = len(self.prompt_of), len(self.noise)
        # those that are in the batch, and the slot that each continues
        rows, slots = list(range(n)), self.prompt_of
        at = self._index(rows)
        ended: set[int] = set()
        for t in range(max_new):
            drawn = self._draw(rows, at, self._index(slots), t)
            for row, token in zip(rows, drawn, strict=True):
                if row not in ended and (token in self.policy.eos_ids or t + 1 == max_new):
                    ended.add(row)
                    yield row, self._answer(row, token in self.policy.eos_ids)
            if len(ended) == n:
                return
            stay = [i for i, row in enumerate(rows) if not (drop_finished and row in ended)]
            if len(stay) < len(rows):
                rows, slots, drawn = ([of[i] for i in stay] for of in (rows, slots, drawn))
                at = self._index(rows)
            slots = self._advance(rows, slots, drawn, share_prefixes)

    def _advance(
        self, rows: list[int], slots: list[int], drawn: list[int], share_prefixes: bool
    ) -> list[int]:
        """Append every row's token; rows of one slot that have drawn one token go on as one. Each row's new slot."""
        node: dict[tuple[int, int], int] = {}  # (slot, token), or (slot, row) → child
        keys = [
            (slot, token if share_prefixes else row)
            for row, slot, token in zip(rows, slots, drawn, strict=True)
        ]
        child = [node.setdefault(key, len(node)) for key in keys]
        parents, had = [slot for slot, _ in node], len(self.logits)
        if len(set(parents)) == len(parents) and had - len(parents) <= self.decoder.drop_at * had:
            place = parents  # nothing to copy, little to drop
        else:
            place, had = placed(parents), len(parents)
            sources = [0] * had
            for to, parent in zip(place, parents, strict=True):
                sources[to] = parent
            if sources != list(range(len(self.logits))):
                self.decoder.keep(sources)
        slots = [place[c] for c in child]
        tokens = [0] * had
        for slot, token in zip(slots, drawn, strict=True):
            tokens[slot] = token
        self.logits = self.decoder.step(self._index(tokens))
        return slots

    def _index(self, numbers: list[int]) -> Int[Tensor, " n"]:
        return uploaded(numbers, self.noise.device)

    def _draw(
        self, rows: list[int], at: Int[Tensor, " n"], slots: Int[Tensor, " n"], t: int
    ) -> list[int]:
        """One token per row from its slot's logits; recorded with both log-probs. The one time in a token that the
        host waits for the device."""
        tokens, logp_sampled = draw(self.logits, self.noise[t, at], self.sampling, slots)
        full = self.logits.float().log_softmax(-1)[slots, tokens]
        ids, *logps = torch.stack(
            [tokens.double(), full.double(), logp_sampled.to(full).double()]
        ).tolist()
        drawn = [*map(int, ids)]
        for row, of in zip(rows, zip(drawn, *logps, strict=True), strict=True):
            self.drawn[row].append(of)
        return drawn

    def _answer(self, row: int, finished: bool) -> Completion:
        ids, full, sampled = zip(*self.drawn[row], strict=True)
        if not all(map(math.isfinite, (*full, *sampled))):
            raise Diverged(
                "the policy has collapsed: its logits are not finite, so nothing can be sampled from it "
                "(a learning rate, or a gradient, far too large)"
            )
        return Completion(ids, self.policy.decode(ids), finished, full, sampled)


def placed(parents: Sequence[int]) -> list[int]:
    """A slot for each child, 0 … n − 1, its parent's own where there still is one: [0, 0, 3] → [0, 1, 2]."""
    n = len(parents)
    first = {parent: i for i, parent in reversed(list(enumerate(parents))) if parent < n}
    free = iter([slot for slot in range(n) if slot not in first])
    return [parent if first.get(parent) == i else next(free) for i, parent in enumerate(parents)]


def draw(
    logits: Float[Tensor, "n V"],
    u: Float[Tensor, " m"],
    sampling: Sampling,
    rows: Int[Tensor, " m"] | None = None,
) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"]]:
    """Tokens by inverse CDF from uniform noise u in [0, 1), and their log-probs under the distribution drawn from.
    rows: the row of the logits that each number draws from; None: the row of its own index."""
    values, ids = candidates(logits, sampling)
    logp = values.log_softmax(-1)
    cdf = logp.exp().cumsum(-1)
    if rows is not None:
        cdf, logp, ids = cdf[rows], logp[rows], None if ids is None else ids[rows]
    # below the last entry whatever the rounding: the first entry above it is then always a token of
    # probability > 0
    total = cdf[:, -1:]
    level = torch.minimum(u[:, None] * total, total.nextafter(torch.zeros_like(total)))
    # of a NaN it is one too many
    pick = torch.searchsorted(cdf, level, right=True).clamp(max=cdf.shape[-1] - 1)
    token = pick if ids is None else ids.gather(-1, pick)
    return token.squeeze(-1), logp.gather(-1, pick).squeeze(-1)
