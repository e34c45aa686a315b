"""Sampling: prompts → completions, all prompts' rows in one batch, which finished rows leave."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vgrout import ranks
from vgrout.model.budgets import KV_BUDGET
from vgrout.model.decoder import Decoder
from vgrout.model.policy import LanguageModel
from vgrout.model.sampling import Sampling, candidates, penalised, tempered
from vgrout.types import Completion, Diverged

OnFinish = Callable[[int, int, Completion], None]


def rows_at_once(policy: LanguageModel, tokens: int) -> int:
    """Rows whose keys and values, at `tokens` tokens each, fit the budget: more are sampled in turns."""
    row = 0
    for model in policy.models:
        c = model.config
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        row += 2 * c.num_hidden_layers * heads * width * model.dtype.itemsize * max(1, tokens)
    return max(1, KV_BUDGET.get(policy.device.type, KV_BUDGET["cpu"]) // row)


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
) -> list[list[Completion]]:
    """n completions (or n[i]) of each prompt, at most max_new tokens each: one list a prompt.

    Row noise is drawn beforehand, [rows, max_new] from `generator` (a CPU stream), and tokens by inverse CDF: a row's
    tokens do not depend on which other rows are still there, nor on the rank that samples it. `on_finish(prompt, index,
    completion)` is called as soon as a row ends, on the rank that has sampled it, so that grading runs beside sampling.
    drop_finished: off, finished rows stay in the batch (for tests and benchmarks).

    Raises:
        Diverged: the model's logits are not finite.
    """
    counts = [n] * len(prompts) if isinstance(n, int) else list(n)
    assert len(counts) == len(prompts), (len(counts), len(prompts))
    rows = [(p, i) for p, count in enumerate(counts) for i in range(count)]
    noise = torch.rand(len(rows), max_new, generator=generator)
    width = rows_at_once(policy, max(map(len, prompts), default=0) + max_new)

    def own_answers() -> dict[tuple[int, int], Completion]:
        answers: dict[tuple[int, int], Completion] = {}
        mine = ranks.own([1] * len(rows))
        for lo in range(mine.start, mine.stop, width):
            at = slice(lo, min(lo + width, mine.stop))
            part = rows[at]
            used = sorted({p for p, _ in part})
            place = {p: i for i, p in enumerate(used)}
            heads, prompt_of = [prompts[p] for p in used], [place[p] for p, _ in part]
            run = _Run(policy, heads, prompt_of, sampling, noise[at].to(policy.device))
            for row, answer in run.finish_all(drop_finished):
                answers[part[row]] = answer
                if on_finish is not None:
                    on_finish(*part[row], answer)
        return answers

    answers = ranks.merged(own_answers)
    return [[answers[p, i] for i in range(count)] for p, count in enumerate(counts)]


class _Run:
    """The state of one batch: which row sits in which slot of the decoder, and each row's tokens so far."""

    def __init__(
        self,
        policy: LanguageModel,
        prompts: Sequence[tuple[int, ...]],
        prompt_of: list[int],
        sampling: Sampling,
        noise: Float[Tensor, "rows max_new"],
    ) -> None:
        self.policy, self.sampling, self.noise = policy, sampling, noise
        self.decoder: Decoder = policy.decoder()
        self.logits = self.decoder.prefill(prompts, prompt_of, noise.shape[1])
        n, max_new = noise.shape
        self.tokens = torch.zeros(n, max_new, dtype=torch.long, device=noise.device)
        self.logps = torch.zeros(2, n, max_new, device=noise.device)  # full, sampled
        self.seen = self._prompt_tokens(prompts, prompt_of) if sampling.repetition_penalty != 1 else None

    def _prompt_tokens(self, prompts: Sequence[tuple[int, ...]], prompt_of: list[int]) -> Tensor:
        seen = torch.zeros(len(prompts), self.logits.shape[-1], dtype=torch.bool, device=self.logits.device)
        for row, prompt in zip(seen, prompts, strict=True):
            row[list(prompt)] = True
        return seen[prompt_of]

    def finish_all(self, drop_finished: bool):
        """Yields (row, completion) as rows end."""
        n, max_new = self.noise.shape
        slots = list(range(n))  # slot → row
        ended: set[int] = set()
        at = torch.arange(n, device=self.noise.device)  # the same as a tensor
        for t in range(max_new):
            tokens = self._draw(at, t)
            for row, token in zip(slots, tokens.tolist(), strict=True):
                if row not in ended and (token in self.policy.eos_ids or t + 1 == max_new):
                    ended.add(row)
                    yield row, self._answer(row, t + 1, token in self.policy.eos_ids)
            if len(ended) == n:
                return
            alive = n - len(ended)
            if drop_finished and len(slots) - alive > self.decoder.drop_at * len(slots):
                stay = compacted([row in ended for row in slots])
                slots = [slots[slot] for slot in stay]
                self.decoder.keep(stay)
                at, tokens = torch.tensor(slots, device=at.device), tokens[stay]
            self.logits = self.decoder.step(tokens)

    def _draw(self, at: Int[Tensor, " n"], t: int) -> Int[Tensor, " n"]:
        """One token per slot from the logits; recorded with both log-probs."""
        logits = self.logits.float()
        tokens, logp_sampled = draw(
            logits if self.seen is None else penalised(logits, self.seen[at], self.sampling),
            self.noise[at, t],
            self.sampling,
        )
        full = logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)
        self.tokens[at, t] = tokens
        self.logps[0, at, t] = full
        self.logps[1, at, t] = logp_sampled
        if self.seen is not None:
            self.seen[at, tokens] = True
        return tokens

    def _answer(self, row: int, length: int, finished: bool) -> Completion:
        ids = tuple(self.tokens[row, :length].tolist())
        full, sampled = self.logps[:, row, :length].tolist()
        if not all(map(math.isfinite, (*full, *sampled))):
            raise Diverged(
                "the policy has collapsed: its logits are not finite, so nothing can be sampled from it "
                "(a learning rate, or a gradient, far too large)"
            )
        return Completion(ids, self.policy.decode(ids), finished, tuple(full), tuple(sampled))


def compacted(ended: Sequence[bool]) -> list[int]:
    """Slots to keep, holes filled from the tail: [0, 1, 2, 3] with 1 ended → [0, 3, 2]."""
    n = len(ended) - sum(ended)
    tail = [slot for slot in range(n, len(ended)) if not ended[slot]]
    return [tail.pop() if ended[slot] else slot for slot in range(n)]


def draw(
    logits: Float[Tensor, "n V"], u: Float[Tensor, " n"], sampling: Sampling
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Tokens by inverse CDF from uniform noise u in [0, 1), and their log-probs under the distribution drawn from."""
    values, ids = candidates(tempered(logits, sampling), sampling)
    logp = values.log_softmax(-1)
    cdf = logp.exp().cumsum(-1)
    # below the last entry whatever the rounding: the first entry above it is then always a token of probability > 0
    total = cdf[:, -1:]
    level = torch.minimum(u[:, None] * total, total.nextafter(torch.zeros_like(total)))
    pick = torch.searchsorted(cdf, level, right=True).clamp(max=cdf.shape[-1] - 1)  # of a NaN it is one too many
    token = pick if ids is None else ids.gather(-1, pick)
    return token.squeeze(-1), logp.gather(-1, pick).squeeze(-1)
