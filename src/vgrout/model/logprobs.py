"""Log-probs of completions: rows of prompt + completion → their tokens' log-probs, the lm_head on those alone."""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from vgrout.errors import Refused
from vgrout.model.layout import Packed, packed_hidden, places
from vgrout.model.memory import HEAD_BUDGET
from vgrout.model.sampling import Sampling, support, tempered

# the logit of an id without a token: its probability is 0, and differences of such are still
# numbers
NEVER = -1e30


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Right-padded rows of prompt + completion. Causal attention never looks at padding on the right: no attention
    mask, positions 0 … L-1."""

    ids: Int[Tensor, "B L"]
    target: Int[Tensor, "B T"]  # the completion's tokens, 0 on padding
    at: Int[Tensor, "B T"]  # position whose logits predict target[b, t]
    mask: Bool[Tensor, "B T"]  # by length, never by token: EOS is trained where pad == eos
    wanted: tuple[Int[Tensor, " n"], Int[Tensor, " n"]]  # where it is set, row by row

    @property
    def tokens(self) -> int:
        """In the forward, padding included."""
        return self.ids.numel()


def collate(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]], device: torch.device
) -> PaddedBatch:
    """A right-padded batch of tokens exactly as given. A row with an empty prompt or completion is an error."""
    assert len(prompts) == len(completions) > 0, (len(prompts), len(completions))
    assert all(prompts), "an empty prompt: nothing predicts the first token"
    assert all(completions), "an empty completion: nothing to predict"
    L = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    T = max(map(len, completions))
    ids = torch.tensor(
        [[*p, *c, *[0] * (L - len(p) - len(c))] for p, c in zip(prompts, completions, strict=True)]
    )
    target = torch.tensor([[*c, *[0] * (T - len(c))] for c in completions])
    start = torch.tensor([len(p) for p in prompts])[:, None]
    steps = torch.arange(T)[None]
    mask = steps < torch.tensor([len(c) for c in completions])[:, None]
    at = torch.where(mask, start - 1 + steps, 0)
    return PaddedBatch(
        *(t.to(device) for t in (ids, target, at, mask)), places(completions, device)
    )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs of completion tokens: nats, 0 on padding."""

    full: Float[Tensor, "B T"]  # full softmax at temperature 1
    # of the truncated distribution; the token itself always counts as in it
    sampled: Float[Tensor, "B T"] | None

    def of(self, ratio_support: str) -> Float[Tensor, "B T"]:
        """The log-probs in importance ratios: "full" or "sampled"."""
        chosen = self.full if ratio_support == "full" else self.sampled
        assert chosen is not None, ratio_support
        return chosen


def completion_logprobs(
    model: PreTrainedModel, batch: PaddedBatch | Packed, sampling: Sampling | None = None
) -> TokenLogprobs:
    """log π(target) at every completion position, [B, T]; with `sampling`, also of the distribution sampled from."""
    wanted, of = batch.wanted, None
    if isinstance(batch, Packed):  # rows that share a token and go on alike share its log-prob
        (at, target), of = batch.edges, batch.edge[wanted]
        rows = packed_hidden(model, backbone(model), batch)[at]
    else:
        rows, target = completion_hidden(model, batch), batch.target[wanted]

    def head(hidden: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return _head(model, hidden, target, sampling)

    size = rows_at_once(vocabulary(model), rows.device)
    if len(rows) > size and rows.requires_grad and sampling is None and _is_frozen_product(model):
        logp: Tensor = _FrozenHead.apply(
            rows, model.get_output_embeddings().weight, foreign(model), target, size
        )
        full = sampled = logp if of is None else logp[of]
    else:
        full, sampled = (
            x if of is None else x[of] for x in in_chunks(head, vocabulary(model), rows, target)
        )
    empty = full.new_zeros(batch.mask.shape)
    return TokenLogprobs(
        full=empty.index_put(wanted, full),
        sampled=empty.index_put(wanted, sampled) if sampling is not None else None,
    )


def completion_hidden(
    model: PreTrainedModel, batch: PaddedBatch | Packed, layer: int | None = None
) -> Float[Tensor, "n D"]:
    """The backbone's output wherever it predicts a token of a completion: n of them, row by row, padding left out.
    layer: what the block with this number (from 1) puts out, instead; those above are not run."""
    core, wanted = backbone(model), batch.wanted
    with _stopped(core, layer) as reached:
        if isinstance(batch, Packed):
            reached.append(packed_hidden(model, core, batch))
        else:
            reached.append(core(input_ids=batch.ids, use_cache=False).last_hidden_state)
    hidden = reached[0]
    if isinstance(batch, Packed):
        return hidden.flatten(0, -2)[batch.at[wanted]]
    return hidden[wanted[0], batch.at[wanted]]


class _BlockReached(Exception):
    """Ends a forward."""


@contextmanager
def _stopped(core: torch.nn.Module, layer: int | None) -> Generator[list[Tensor]]:
    """A forward in here ends after this block, whose output is put into the list; None: it does not end."""
    reached: list[Tensor] = []
    if layer is None:
        yield reached
        return
    blocks = core.layers
    assert isinstance(blocks, torch.nn.ModuleList), type(blocks)
    assert 1 <= layer <= len(blocks), (layer, len(blocks))

    def stop(_module: torch.nn.Module, _args: object, output: object) -> None:
        reached.append(output[0] if isinstance(output, tuple) else cast("Tensor", output))
        raise _BlockReached

    handle = blocks[layer - 1].register_forward_hook(stop)
    try:
        with suppress(_BlockReached):
            yield reached
    finally:
        handle.remove()


def in_chunks(
    head: Callable[..., tuple[Tensor, ...]], logits: int, *rows: Shaped[Tensor, "n ..."]
) -> list[Tensor]:
    """`head` on a few of the n rows at a time, so that at most HEAD_BUDGET logits are held; backward computes them
    again. head: rows of the same n → tensors of n results each. logits: how many of them a row has."""
    size = rows_at_once(logits, rows[0].device)
    if len(rows[0]) <= size:
        return list(head(*rows))
    cut = zip(*(r.split(size) for r in rows), strict=True)
    parts = [checkpoint(head, *chunk, use_reentrant=False) for chunk in cut]
    return [torch.cat(p) for p in zip(*parts, strict=True)]


def rows_at_once(logits: int, device: torch.device) -> int:
    """Rows of so many logits that are held at once."""
    return max(1, HEAD_BUDGET[device.type] // logits)


class _FrozenHead(torch.autograd.Function):
    """log softmax(h Wᵀ)[target] of rows h, a few at a time. What backward needs of a row is one vector, its ∂/∂h: kept
    in place of its logits, it takes two products with W, where logits that are computed again take three."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "n D"],
        W: Float[Tensor, "V D"],
        foreign: Bool[Tensor, " V"] | None,
        target: Int[Tensor, " n"],
        size: int,
    ) -> Float[Tensor, " n"]:
        slopes, out = torch.empty_like(hidden), []
        for h, t, slope in zip(
            hidden.split(size), target[:, None].split(size), slopes.split(size), strict=True
        ):
            logits = h @ W.mT if foreign is None else (h @ W.mT).masked_fill_(foreign, NEVER)
            logp = torch.log_softmax(logits, -1, dtype=torch.promote_types(W.dtype, torch.float32))
            out.append(logp.gather(-1, t))
            p = logp.exp_()
            torch.mm(
                p.scatter_add_(-1, t, p.new_full(t.shape, -1.0)).neg_().to(W.dtype), W, out=slope
            )
        ctx.save_for_backward(slopes)
        return torch.cat(out).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (dys[0][:, None] * slopes).to(slopes.dtype), None, None, None, None


def vocabulary(model: PreTrainedModel) -> int:
    """V, the logits of a position; more than the tokenizer has tokens where the head is padded."""
    return int(model.get_output_embeddings().weight.shape[0])


def mark_foreign(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """From now on no id but these, the tokenizer's, has a probability: what the sampler draws from, and what log-probs
    are of. Nothing is marked where all V are among them."""
    V = vocabulary(model)
    own = torch.zeros(V, dtype=torch.bool)
    own[[i for i in {*ids} if i < V]] = True
    if not own.all():
        model.get_output_embeddings().register_buffer(
            "foreign", (~own).to(model.device), persistent=False
        )


def foreign(model: PreTrainedModel) -> Bool[Tensor, " V"] | None:
    """Which logits are of ids that the tokenizer has not; None: of none."""
    return getattr(model.get_output_embeddings(), "foreign", None)


def tokens(model: PreTrainedModel) -> int:
    """How many ids have a token and a logit."""
    return vocabulary(model) - (0 if (none := foreign(model)) is None else int(none.sum()))


def masked(model: PreTrainedModel, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
    """The same logits, in place, where ids without a token have none to speak of."""
    return logits if (none := foreign(model)) is None else logits.masked_fill_(none, NEVER)


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its head."""
    return getattr(model, model.base_model_prefix)


def head_logits(model: PreTrainedModel, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
    """The head on the backbone's output, soft-capped where the architecture says so (Gemma 2); `masked`."""
    logits = model.get_output_embeddings()(hidden)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return masked(model, logits if cap is None else torch.tanh(logits / cap) * cap)


def _is_frozen_product(model: PreTrainedModel) -> bool:
    """Whether the head is h Wᵀ and no more, and is not trained."""
    head: Any = model.get_output_embeddings()
    capped = getattr(model.config, "final_logit_softcapping", None) is not None
    return not (capped or head.weight.requires_grad or head.bias is not None)


def _head(
    model: PreTrainedModel,
    hidden: Float[Tensor, "n D"],
    target: Int[Tensor, " n"],
    sampling: Sampling | None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    logits = head_logits(model, hidden)
    logits = logits.float() if logits.dtype != torch.float64 else logits
    full = log_softmax_at(logits, target)
    if sampling is None:
        return full, full
    keep = support(logits.detach(), sampling).scatter(-1, target[:, None], True)
    return full, log_softmax_at(tempered(logits, sampling).masked_fill(~keep, -math.inf), target)


def log_softmax_at(logits: Float[Tensor, "n V"], target: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """log softmax(logits)[target] without a second [n, V] tensor."""
    return logits.gather(-1, target[:, None]).squeeze(-1) - logits.logsumexp(-1)


def check_head(model: PreTrainedModel) -> None:
    """Raises Refused at load if backbone + head ≠ the model's logits, or these are not finite."""
    ids = torch.arange(1, 9, device=model.device)[None] % vocabulary(model)
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits.float()
        got = head_logits(
            model, backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        ).float()
    if not want.isfinite().all():
        raise Refused(f"{type(model).__name__}: its logits are not finite")
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max())):
        raise Refused(
            f"{type(model).__name__}: its head does more than a matrix product; not supported"
        )
