"""Trials: whether a fast way to compute a model gives what the model itself gives.

Packed rows, the lean decoder, and sampling with a cache that branches are each tried on a few
tokens before they are used.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from loguru import logger
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vgrout.ground.io import Refused, out_of_memory
from vgrout.model.layout import pack, packed_hidden
from vgrout.model.load.source import LLAMAS
from vgrout.model.logprobs import foreign
from vgrout.model.prefixes import Ids, SharedPrefixes
from vgrout.model.sampling.decoder import Decoder, HfDecoder, LeanDecoder, past_of

# (prompts, tokens of two further steps) → logits of a trial
Trial = Callable[[Sequence[Ids], Tensor], Float[Tensor, "8 V"]]


def trial_tokens(model: PreTrainedModel) -> list[int]:
    """For each of three trials, the first of its eight consecutive tokens.

    A fast way is right if one of the trials fits: on some tokens, special ones among them, a model
    amplifies the rounding of bf16 tenfold.
    """
    embeddings: Any = model.get_input_embeddings()
    size = len(embeddings.weight)
    return [size * sixths // 6 for sixths in (3, 2, 4)]


def _has_plain_cache(model: PreTrainedModel) -> bool:
    """Whether every layer sees all tokens before: no sliding window, and no recurrence."""
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers)


# ── packed rows


def packs(model: PreTrainedModel, core: torch.nn.Module) -> bool:
    """Whether this model computes the same on packed rows as on separate ones.

    Decided by the model's kind, then by a trial. core: the model without its head.
    """
    if getattr(model.config, "attn_logit_softcapping", None):
        return False
    if not getattr(model, "_supports_attention_backend", False):
        return False
    if not _has_plain_cache(model):
        return False
    slower = f"{type(model).__name__}: rows of an update are padded, and their prompts not shared"
    try:
        for first in trial_tokens(model):
            if _packs(model, core, first):
                return True
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, TypeError, RuntimeError) as error:  # RuntimeError: no such kernel here
        first_line = str(error).partition("\n")[0]
        logger.warning(f"{slower}: {first_line}")
        return False
    logger.warning(f"{slower}: on packed rows it computes something else")
    return False


@torch.no_grad()
def _packs(model: PreTrainedModel, core: torch.nn.Module, first: int) -> bool:
    """The trial of packed rows with four tokens from `first`, with and without shared prefixes."""
    a, b, c, d = range(first, first + 4)
    prompts = [(a, b, c), (a, b, c), (d, c)]
    completions = [(d, a, b, c), (c, a), (b, b, b)]
    one_row_of_g, three_rows_of_g = [0, 0, 0], [0, 1, 2]
    device, dtype = model.device, model.dtype

    together = pack(one_row_of_g, prompts, completions, device, dtype)
    prefixes = SharedPrefixes(three_rows_of_g, prompts, completions, 1, device, dtype)
    apart = pack(three_rows_of_g, prompts, completions, device, dtype, prefixes)
    prefixes.read(model, core)
    hidden_together = packed_hidden(model, core, together)
    hidden_apart = packed_hidden(model, core, apart)

    # In fp32 both agree to about 1e-6 of the largest entry, in bf16 to about 1e-2.
    tolerance = 1e-4 if dtype.itemsize >= 4 else 5e-2
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([[*prompt, *completion[:-1]]], device=device)
        alone = core(input_ids=ids, use_cache=False).last_hidden_state[0]
        want = alone[len(prompt) - 1 :]
        bound = tolerance * float(want.abs().max())
        for hidden, batch in ((hidden_together, together), (hidden_apart, apart)):
            got = hidden[batch.at[row, : len(completion)]]
            fits = float((got - want).abs().max()) <= bound  # of a NaN it is False
            if not fits:
                return False
    return True


# ── gradients


@torch.no_grad()
def require_rows(model: PreTrainedModel, linears: Mapping[str, torch.nn.Linear]) -> None:
    """Check that each of these Linears is given every token of a forward, row by row.

    Raises:
        Refused: it is not, as an expert that sees some tokens alone: a row's own gradient could not
            be told from another's.
    """
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str, _module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.setdefault(name, []).append(args[0].flatten(0, -2))

    first, *_ = trial_tokens(model)
    rows = torch.arange(first, first + 16, device=model.device).view(2, 8)
    handles = []
    for name, linear in linears.items():
        handles.append(linear.register_forward_pre_hook(partial(keep, name)))
    for ids in (rows, rows[:1], rows[1:]):
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    for name, inputs in seen.items():
        n = len(inputs) // 3  # how often a forward runs it
        for together, *alone in zip(inputs[:n], inputs[n : 2 * n], inputs[2 * n :], strict=False):
            apart = torch.cat(alone)
            same = together.shape == apart.shape
            if not same or not (together - apart).norm() <= 0.1 * apart.norm():
                raise Refused(
                    f"{type(model).__name__}: {name} is not given all tokens, row by row; "
                    "its gradient by rollouts is not supported"
                )


# ── decoders


def lean_fits(model: PreTrainedModel) -> bool:
    """Whether LeanDecoder computes this model.

    Decided by its class and configuration, then by a trial.
    """
    config = model.config
    if type(model).__name__ not in LLAMAS or config.hidden_act != "silu":
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    # the other kinds change with the sequence's length
    if rope.get("rope_type") not in ("default", "linear", "llama3", "yarn"):
        return False
    if not _has_plain_cache(model):
        return False
    # With the cache that sampling will use; that graphs replay what they captured is not tried. In
    # fp32 both orders of summation agree to about 1e-6; in bf16, over 30 layers, to about 4e-2.
    lean = partial(_three_steps, LeanDecoder(model, static=model.device.type == "cuda"))
    if _agree(model, lean, partial(_three_steps, HfDecoder(model)), fp32=1e-4):
        return True
    logger.warning(
        f"{type(model).__name__}: the lean decoder disagrees with transformers: sampling without it"
    )
    return False


def require_branching(model: PreTrainedModel) -> None:
    """Check that HfDecoder gives, through the model's cache, what the model says of each row alone.

    Raises:
        Refused: the cache cannot be branched, or the model does not read it.
    """
    why = ""
    try:
        # recurrences add up in another order: 1e-3 of Nemotron-H
        fits = _agree(
            model,
            partial(_three_steps, HfDecoder(model)),
            partial(_rows_alone, model),
            fp32=1e-2,
        )
    except Exception as error:  # whatever a model's own code raises
        if out_of_memory(error):
            raise
        fits = False
        why = f" ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    if not fits:
        raise Refused(
            f"{type(model).__name__}: keeps a state that sampling cannot branch; not supported{why}"
        )


@torch.no_grad()
def token_bytes(model: PreTrainedModel) -> int:
    """Bytes that the model's cache holds of the keys and values of one token."""
    first, *_ = trial_tokens(model)
    decoder = HfDecoder(model)
    decoder.read([tuple(range(first, first + 8))])
    held = sum(keys.nbytes + values.nbytes for keys, values in past_of(decoder.cache))
    return held // 8


def _agree(model: PreTrainedModel, got: Trial, want: Trial, fp32: float) -> bool:
    """Whether in one of the trials each row of logits is right within a share of its norm.

    fp32: that share in fp32; in half precision it is 0.1.
    """
    bound = fp32 if model.dtype.itemsize >= 4 else 0.1
    of_others = foreign(model)  # so low that every norm would be infinite, and every share 0
    own = slice(None) if of_others is None else ~of_others
    for first in trial_tokens(model):
        # Two prompts, of which the second is shorter, so that padding and positions count; and the
        # tokens that three slots go on with.
        prompts = [tuple(range(first, first + 8)), tuple(range(first + 2, first + 5))]
        tokens = torch.arange(first + 4, first + 7, device=model.device)
        right = want(prompts, tokens)[:, own].float()
        error = (got(prompts, tokens)[:, own].float() - right).norm(dim=-1)
        if bool((error / right.norm(dim=-1) <= bound).all()):
            return True
    return False


@torch.no_grad()
def _three_steps(
    decoder: Decoder,
    prompts: Sequence[Ids],
    tokens: Int[Tensor, " 3"],
) -> Float[Tensor, "8 V"]:
    """Logits of two prompts, and of two steps after them in which the second prompt branches."""
    of_prompts = decoder.prefill(prompts, 3, 2)
    decoder.keep([0, 1, 1])
    return torch.cat([of_prompts, decoder.step(tokens), decoder.step(tokens)])


@torch.no_grad()
def _rows_alone(
    model: PreTrainedModel,
    prompts: Sequence[Ids],
    tokens: Int[Tensor, " 3"],
) -> Float[Tensor, "8 V"]:
    """The same logits from a forward for each row, without a cache."""
    last_logits: list[Tensor] = []
    for prompt, token in zip((0, 1, 1), tokens.tolist(), strict=True):
        ids = torch.tensor([[*prompts[prompt], token, token]], device=model.device)
        last_logits.append(model(input_ids=ids, use_cache=False).logits[0, -3:])
    of_prompts, first_step, second_step = torch.stack(last_logits, 1)
    # before the first step the two branches are one row
    return torch.cat([of_prompts[:2], first_step, second_step])
