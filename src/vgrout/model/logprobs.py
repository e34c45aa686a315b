"""Log-probs of completions: rows of prompt + completion → the log-probs of their tokens.

The lm_head is computed at completion tokens alone, a few at a time.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from vgrout.ground.io import Refused, one_line, out_of_memory
from vgrout.ground.tensor_types import at_least_fp32
from vgrout.model.attention import uploaded
from vgrout.model.layout import Packed, check_rows, packed_hidden, padded, places
from vgrout.model.load.memory import HEAD_BUDGET
from vgrout.model.prefixes import Pieces

# The logit of an id without a token. Its probability is 0, and differences of such logits are still
# numbers, as those of −inf are not.
NEVER = -1e30


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Right-padded rows of prompt + completion.

    Causal attention never looks at padding on the right, so there is no attention mask, and
    positions are 0 … L-1.
    """

    ids: Int[Tensor, "B L"]
    target: Int[Tensor, "B T"]  # the completion's tokens, 0 on padding
    at: Int[Tensor, "B T"]  # position whose logits predict target[b, t]
    mask: Bool[Tensor, "B T"]  # by length, never by token: EOS is trained where pad == eos
    wanted: tuple[Int[Tensor, " n"], Int[Tensor, " n"]]  # where it is set, row by row

    @property
    def tokens(self) -> int:
        """Tokens in the forward, padding included."""
        return self.ids.numel()


def collate(
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    device: torch.device,
) -> PaddedBatch:
    """A right-padded batch of tokens exactly as given.

    An empty prompt or completion is an error.
    """
    check_rows(prompts, completions)
    L = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    T = max(map(len, completions))
    padded_rows: list[list[int]] = []
    padded_targets: list[list[int]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        padded_rows.append(padded(prompt + completion, L))
        padded_targets.append(padded(completion, T))
    start = torch.tensor(list(map(len, prompts)))[:, None]
    length = torch.tensor(list(map(len, completions)))[:, None]
    steps = torch.arange(T)[None]
    mask = steps < length
    return PaddedBatch(
        ids=torch.tensor(padded_rows).to(device),
        target=torch.tensor(padded_targets).to(device),
        at=torch.where(mask, start - 1 + steps, 0).to(device),
        mask=mask.to(device),
        wanted=places(completions, device),
    )


def pieces_of(batch: PaddedBatch | Packed, rows_of_g: Sequence[int]) -> Pieces:
    """Stretches of a batch's tokens, and the row of g that each adds to. rows_of_g: of the rows."""
    if isinstance(batch, Packed):
        return batch.pieces
    L = batch.ids.shape[1]
    return [(row_of_g, slice(b * L, b * L + L)) for b, row_of_g in enumerate(rows_of_g)]


def padded_logprobs(
    of_rows: Sequence[Sequence[float] | None],
    T: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B T"]:
    """Recorded log-probs of the rows' tokens, 0 on padding and in a row that has none."""
    padded_rows: list[list[float]] = []
    for of_row in of_rows:
        known = list(of_row or ())
        padded_rows.append([*known, *[0.0] * (T - len(known))])
    return uploaded(padded_rows, device, dtype)


def completion_logprobs(
    model: PreTrainedModel,
    batch: PaddedBatch | Packed,
) -> Float[Tensor, "B T"]:
    """log π(target) at every completion position: nats of the full softmax at temperature 1, 0 on padding."""
    wanted = batch.wanted
    edge = None  # of rows that share a token and go on alike: which log-prob is theirs
    if isinstance(batch, Packed):
        at, target = batch.edges
        edge = batch.edge[wanted]
        hidden = packed_hidden(model, backbone(model), batch)[at]
    else:
        target = batch.target[wanted]
        hidden = completion_hidden(model, batch)

    logp = head_logprobs(model, hidden, target)
    if edge is not None:
        logp = logp[edge]
    return logp.new_zeros(batch.mask.shape).index_put(wanted, logp)


def head_logprobs(
    model: PreTrainedModel,
    hidden: Float[Tensor, "n D"],
    target: Int[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """Log-probs of the targets, from the backbone's output: nats of the full softmax."""
    size = rows_at_once(vocabulary(model), hidden.device)
    in_parts = len(hidden) > size and hidden.requires_grad
    if in_parts and _is_frozen_product(model):
        W = model.get_output_embeddings().weight
        return _FrozenHead.apply(hidden, W, foreign(model), target, size)

    def head(hidden: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = at_least_fp32(head_logits(model, hidden))
        return (log_softmax_at(logits, target),)

    (logp,) = in_chunks(head, vocabulary(model), hidden, target)
    return logp


def completion_hidden(
    model: PreTrainedModel,
    batch: PaddedBatch | Packed,
    layer: int | None = None,
) -> Float[Tensor, "n D"]:
    """The backbone's output wherever it predicts a token of a completion.

    n of them, row by row, padding left out. layer: instead the output of the block with this number
    (from 1); the blocks above it are not run.
    """
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
    """Ends a forward at the block whose output is wanted."""


@contextmanager
def _stopped(core: torch.nn.Module, layer: int | None) -> Generator[list[Tensor]]:
    """A forward within the context ends after this block, whose output is put into the list.

    layer: the block's number, from 1. None: the forward does not end early.
    """
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
    head: Callable[..., tuple[Tensor, ...]],
    logits: int,
    *rows: Shaped[Tensor, "n ..."],
) -> list[Tensor]:
    """`head` on a few of the n rows at a time, so that at most HEAD_BUDGET logits are held.

    Backward computes the logits again.

    Args:
        head: chunks of `rows` → tensors with a result for each row of the chunk.
        logits: how many of them a row has.
        rows: tensors of n rows each, which are cut alike.
    """
    size = rows_at_once(logits, rows[0].device)
    if len(rows[0]) <= size:
        return list(head(*rows))
    chunks = zip(*(x.split(size) for x in rows), strict=True)
    parts = [checkpoint(head, *chunk, use_reentrant=False) for chunk in chunks]
    return [torch.cat(results) for results in zip(*parts, strict=True)]


def rows_at_once(logits: int, device: torch.device) -> int:
    """How many rows of so many logits are held at once."""
    return max(1, HEAD_BUDGET[device.type] // logits)


class _FrozenHead(torch.autograd.Function):
    """log softmax(h Wᵀ)[target] of rows h, a few at a time.

    What backward needs of a row is one vector, its ∂/∂h. Kept in place of the row's logits, it
    takes two products with W, where logits that are computed again take three.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "n D"],
        W: Float[Tensor, "V D"],
        foreign: Bool[Tensor, " V"] | None,
        target: Int[Tensor, " n"],
        size: int,
    ) -> Float[Tensor, " n"]:
        """foreign: logits that are masked. size: rows at a time."""
        wide = torch.promote_types(W.dtype, torch.float32)
        slopes = torch.empty_like(hidden)
        logps: list[Tensor] = []
        parts = zip(
            hidden.split(size), target[:, None].split(size), slopes.split(size), strict=True
        )
        for h, t, slope in parts:
            logits = h @ W.mT
            if foreign is not None:
                logits.masked_fill_(foreign, NEVER)
            logp = torch.log_softmax(logits, -1, dtype=wide)
            logps.append(logp.gather(-1, t))
            # ∂/∂logits = (1 at the target) − p, in the memory of logp
            p = logp.exp_()
            dlogits = p.scatter_add_(-1, t, p.new_full(t.shape, -1.0)).neg_()
            torch.mm(dlogits.to(W.dtype), W, out=slope)
        ctx.save_for_backward(slopes)
        return torch.cat(logps).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (dys[0][:, None] * slopes).to(slopes.dtype), None, None, None, None


def vocabulary(model: PreTrainedModel) -> int:
    """V, the number of logits of a position.

    It is larger than the tokenizer's vocabulary where the head is padded.
    """
    return int(model.get_output_embeddings().weight.shape[0])


def mark_foreign(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Mask the logits of ids that the tokenizer lacks, in sampling and in log-probs.

    ids: the tokenizer's. Nothing is marked where all V are among them.
    """
    V = vocabulary(model)
    known = [i for i in set(ids) if i < V]
    is_own = torch.zeros(V, dtype=torch.bool)
    is_own[known] = True
    if not is_own.all():
        is_foreign = (~is_own).to(model.device)
        model.get_output_embeddings().register_buffer("foreign", is_foreign, persistent=False)


def foreign(model: PreTrainedModel) -> Bool[Tensor, " V"] | None:
    """Which logits are of ids that the tokenizer lacks; None: of none."""
    return getattr(model.get_output_embeddings(), "foreign", None)


def tokens(model: PreTrainedModel) -> int:
    """How many ids have a token and a logit."""
    is_foreign = foreign(model)
    if is_foreign is None:
        return vocabulary(model)
    return vocabulary(model) - int(is_foreign.sum())


def masked(model: PreTrainedModel, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
    """The logits with those of ids that the tokenizer lacks masked, in place."""
    is_foreign = foreign(model)
    if is_foreign is None:
        return logits
    return logits.masked_fill_(is_foreign, NEVER)


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its head."""
    return getattr(model, model.base_model_prefix)


def head_logits(model: PreTrainedModel, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
    """The head on the backbone's output, with foreign ids `masked`.

    Multiplied by the factor of `check_head` (Cohere, Granite), and soft-capped where the
    architecture says so (Gemma 2).
    """
    head = model.get_output_embeddings()
    logits = head(hidden)
    if _factor(head) != 1:
        logits = logits * _factor(head)
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return masked(model, logits)


def _is_frozen_product(model: PreTrainedModel) -> bool:
    """Whether the head is h Wᵀ and no more, and is not trained."""
    head = model.get_output_embeddings()
    capped = getattr(model.config, "final_logit_softcapping", None) is not None
    is_product = head.bias is None and _factor(head) == 1 and not capped
    return is_product and not head.weight.requires_grad


def _factor(head: torch.nn.Module) -> float:
    """By what the model multiplies the head's product."""
    return getattr(head, "factor", 1.0)


def log_softmax_at(logits: Float[Tensor, "n V"], target: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """log softmax(logits)[target] without a second [n, V] tensor."""
    return logits.gather(-1, target[:, None]).squeeze(-1) - logits.logsumexp(-1)


def check_head(model: PreTrainedModel) -> None:
    """Check at load that backbone and head together give the model's logits, but for a factor.

    The factor is kept with the head.

    Raises:
        Refused: they do not, the logits are not finite, or the model's own code fails.
    """
    kind = type(model).__name__
    try:
        ids = torch.arange(1, 9, device=model.device)[None] % vocabulary(model)
        with torch.no_grad():
            want = model(input_ids=ids, use_cache=False).logits.float()
            hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
            got = head_logits(model, hidden).float()
    except Exception as error:  # whatever a model's own code raises
        if out_of_memory(error):
            raise
        raise Refused(f"{kind}: {type(error).__name__}: {one_line(error, 100)}") from error
    if not want.isfinite().all():
        raise Refused(f"{kind}: its logits are not finite")
    factor = float((want * got).sum() / got.square().sum())
    if abs(factor - 1) > 1e-2:
        model.get_output_embeddings().factor = factor
        got = got * factor
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max())):
        raise Refused(f"{kind}: its head does more than a matrix product; not supported")
