"""A frozen causal language model with tokenizer and chat template; a policy is one with an adapter.

Both are made in model/load/load.py.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vgrout.ground.data import Message
from vgrout.ground.io import Refused, one_line, text_sha256
from vgrout.ground.thoughts import THINK, Marks, opens
from vgrout.model.attention import kernel_name
from vgrout.model.layout import Packed, batches, pack, padded_batches
from vgrout.model.load.memory import Budget
from vgrout.model.load.source import window_of
from vgrout.model.logprobs import (
    PaddedBatch,
    collate,
    completion_hidden,
    completion_logprobs,
    head_logits,
    in_chunks,
    vocabulary,
)
from vgrout.model.prefixes import SharedPrefixes
from vgrout.model.sampling.decoder import Decoder, HfDecoder, LeanDecoder
from vgrout.model.svd_adapter import SvdAdapter

TokenIds = tuple[int, ...]

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LanguageModel:
    """Causal LM with tokenizer and chat template."""

    model: PreTrainedModel
    tok: PreTrainedTokenizerBase
    eos_ids: frozenset[int]  # each of these ends an answer
    end_id: int  # the one of them with which this chat template ends an answer
    pad_id: int  # may equal an EOS: masks go by length
    lean: bool  # LeanDecoder was checked against this model and agrees
    system_role: bool  # False: the template refuses system messages, see `without_system`
    preserve_thinking: bool  # earlier answers keep their think blocks in the prompt
    thinking: bool  # the template is told that answers begin with a thought
    marks: Marks  # of its thoughts
    packs: bool  # packed rows (`model/layout.py`) were checked against this model and agree
    budget: Budget  # how much is processed at once
    token_bytes: int  # of the keys and values of one token
    graphs: bool  # the lean decoder's step is made for CUDA graphs

    @property
    def device(self) -> torch.device:
        """The device of weights and inputs."""
        return self.model.device

    @property
    def window(self) -> int:
        """Longest prompt + completion in tokens, as `window_of`."""
        window = window_of(self.model.config.to_dict())
        assert window is not None, "`as_language_model` has refused a model without"
        return window

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Token ids of the chat template up to where the answer begins.

        With `preserve_thinking` template and earlier answers are tokenised apart.

        Raises:
            Refused: the chat template leaves out an earlier answer.
        """
        ids: list[int] = []
        for part in self._parts(messages):
            ids += self.encode(part)
        return tuple(ids)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The rendered text up to where the answer begins."""
        return "".join(self._parts(messages))

    def opens_thought(self, messages: Sequence[Message]) -> bool:
        """Whether the rendered prompt ends in an opened thought that the answer goes on with."""
        return opens(self.prompt_text(messages), self.marks)

    def _parts(self, messages: Sequence[Message]) -> list[str]:
        """Template, answer, template, …, template, as `conversation` returns them.

        Without `preserve_thinking` it is one part: the template renders earlier answers itself.
        """
        if not self.system_role:
            messages = without_system(messages)
        if self.preserve_thinking:
            return conversation(self.tok, messages, self.thinking, self.marks)
        return [apply_template(self.tok, messages, thinking=self.thinking)]

    def encode(self, text: str) -> TokenIds:
        """Tokens of rendered text, with no special token added.

        Raises:
            Refused: a token has no row in the embedding.
        """
        ids = tuple(self.tok(text, add_special_tokens=False)["input_ids"])
        rows = len(cast(Tensor, self.model.get_input_embeddings().weight))
        last = max(ids, default=0)
        if last >= rows:
            token = str(self.tok.convert_ids_to_tokens(last))
            raise Refused(
                f"{text[:40]!r}: has the token {token!r} ({last}), and the model's embedding has "
                f"{rows} rows; take it out of the text, or give a model that was trained with it"
            )
        return ids

    def encode_completion(self, text: str, finished: bool = True) -> TokenIds:
        """An answer's tokens as the model would have written them; if `finished`, with its EOS."""
        ids = self.encode(text)
        if finished:
            ids = (*ids, self.end_id)
        return ids

    @property
    def tokenizer_sha256(self) -> str:
        """sha256 over the vocabulary with its ids, and over the tokens of one text.

        It identifies the tokenizer: ids cached under another one mean nothing here.
        """
        text = "def f(x):\n    return x >= 10  # naïve Ünïcode 文字\t<|im_end|>"
        ids = self.tok(text, add_special_tokens=False)["input_ids"]
        vocab = sorted(self.tok.get_vocab().items())
        return text_sha256(json.dumps([vocab, ids]))

    def decode(self, ids: Sequence[int]) -> str:
        """The answer's text, without the tokens that end it or pad it.

        Other special tokens stay: a model may write its thoughts between two of them, and whether
        a thought was finished shows by them. Every space is kept: a tokenizer's clean-up is for
        prose.
        """
        shown = [i for i in ids if i not in self.eos_ids and i != self.pad_id]
        text = self.tok.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    @property
    def models(self) -> "tuple[LanguageModel, ...]":
        """The models that keep keys and values while this one is sampled from."""
        return (self,)

    def decoder(self) -> Decoder:
        """A fresh decoder on the weights as they are now."""
        if self.lean:
            return LeanDecoder(self.model, static=self.graphs)
        return HfDecoder(self.model)

    def batches(
        self,
        prompts: Sequence[TokenIds],
        completions: Sequence[TokenIds],
        rows_of_g: Sequence[int] | None = None,
        tokens: int = 0,
    ) -> Iterator[tuple[list[int], PaddedBatch | Packed]]:
        """Cut all rows into batches for one forward each; yields their indices and the batch.

        Where the model packs, the beginning that answers to one prompt share is computed once,
        unless their gradients add to different rows of g.

        rows_of_g: for each row, the row of g that its gradient is added to. None: only numbers of
            each token are wanted.
        tokens: the most of a batch; 0: the usual budget.
        """
        rows_of_g = rows_of_g or [0] * len(prompts)
        for part in self.parts(prompts, completions, rows_of_g, tokens or self.budget.tokens):
            own_prompts = [prompts[i] for i in part]
            own_completions = [completions[i] for i in part]
            yield part, self.batch(own_prompts, own_completions, [rows_of_g[i] for i in part])

    def parts(
        self,
        prompts: Sequence[TokenIds],
        completions: Sequence[TokenIds],
        rows_of_g: Sequence[int],
        tokens: int,
        prefixes: SharedPrefixes | None = None,
    ) -> list[list[int]]:
        """The indices of rows that are one batch, long ones first.

        Packed, rows that share a prompt are together; padded, rows of similar length. tokens: the most of a batch that
        is not a single row. prefixes: as for `pack`.
        """
        if self.packs:
            return batches(rows_of_g, prompts, completions, tokens, prefixes)
        lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
        return padded_batches(lengths, tokens)

    def batch(
        self,
        prompts: Sequence[TokenIds],
        completions: Sequence[TokenIds],
        rows_of_g: Sequence[int] | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> PaddedBatch | Packed:
        """All rows as one batch, as `batches` makes them. prefixes: as for `pack`."""
        if not self.packs:
            return collate(prompts, completions, self.device)
        rows_of_g = rows_of_g or [0] * len(prompts)
        return pack(rows_of_g, prompts, completions, self.device, self.model.dtype, prefixes)

    def attention(self) -> dict[str, str]:
        """The kernel of each phase, for run.json.

        A decoding step has one query a row, which SDPA computes as fast as anything.
        """
        own = str(self.model.config._attn_implementation)
        update = kernel_name(self.device, self.model.dtype) if self.packs else own
        decode = "sdpa" if self.lean else own
        return {"update": update, "prefill": own, "decode": decode}


@dataclass(frozen=True)
class Policy(LanguageModel):
    """Causal LM with an adapter.

    The adapter's contexts say which weights the model has: as trained, deployed, reference.
    """

    adapter: SvdAdapter

    def logprobs(
        self, prompts: Sequence[TokenIds], completions: Sequence[TokenIds]
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Log-prob of every completion token (full softmax, temperature 1), and the mask.

        It carries a gradient where gradients are on. All rows are in one forward: the caller cuts
        long lists before.
        """
        batch = collate(prompts, completions, self.device)
        return completion_logprobs(self.model, batch), batch.mask

    @torch.no_grad()
    def kl_to_base(
        self, prompts: Sequence[TokenIds], completions: Sequence[TokenIds]
    ) -> Float[Tensor, " n"]:
        """KL(π ‖ base) in nats at every completion token, over the whole vocabulary.

        π has the weights as they are now, and base has the adapter at zero, so that an untouched
        policy has exactly 0. All rows are in one forward.
        """
        batch = self.batch(prompts, completions)
        now = completion_hidden(self.model, batch)
        with self.adapter.reference():
            base = completion_hidden(self.model, batch)

        def kl_of(now: Tensor, base: Tensor) -> tuple[Tensor, ...]:
            log_p = head_logits(self.model, now).float().log_softmax(-1)
            log_q = head_logits(self.model, base).float().log_softmax(-1)
            return ((log_p.exp() * (log_p - log_q)).sum(-1),)

        (kl,) = in_chunks(kl_of, 2 * vocabulary(self.model), now, base)
        return kl


def conversation(
    tok: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    thinking: bool = False,
    marks: Marks = THINK,
) -> list[str]:
    """Template, answer, …, template: a conversation whose earlier answers stand as they were given.

    Templates drop or rewrite the think blocks of earlier turns, so they get a placeholder for each
    answer. What they write between two placeholders is what the model saw between the two answers.
    An answer that holds a think block was started with thinking on.

    Raises:
        Refused: the chat template leaves out an earlier answer.
    """
    replaced, placeholders = _with_placeholders(messages)
    parts: list[str] = []
    last = ""  # the placeholder of the answer before
    for i, placeholder in placeholders.items():
        answer = messages[i]["content"]
        thought = marks.close in answer
        opening = _after(last, apply_template(tok, replaced[:i], thinking=thought))
        parts += [opening, _without_opened_think(answer, opening, marks)]
        last = placeholder
    parts.append(_after(last, apply_template(tok, replaced, thinking=thinking)))
    return parts


def _with_placeholders(messages: Sequence[Message]) -> tuple[list[Message], dict[int, str]]:
    """The messages with a placeholder in every answer; and index → placeholder."""
    replaced: list[Message] = []
    placeholders: dict[int, str] = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            placeholders[i] = f"\ue000{i}\ue000"
            message = {**message, "content": placeholders[i]}
        replaced.append(message)
    return replaced, placeholders


def _after(placeholder: str, text: str) -> str:
    """What a template wrote after the last placeholder; all of it where there is none yet.

    Raises:
        Refused: the placeholder is not in it.
    """
    if not placeholder:
        return text
    if placeholder not in text:
        raise Refused("--preserve-thinking: the model's chat template leaves out an earlier answer")
    return text.rpartition(placeholder)[2]


def _without_opened_think(answer: str, opening: str, marks: Marks) -> str:
    """The answer without its opening mark, where the template has opened the thought itself."""
    if not (opens(opening, marks) and answer.startswith(marks.open)):
        return answer
    with_spaces = opening[opening.rindex(marks.open) :]
    return answer.removeprefix(with_spaces).removeprefix(marks.open)


def apply_template(
    tok: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    thinking: bool = False,
    prompt: bool = True,
) -> str:
    """Render messages by the chat template.

    thinking: asked of the template; one without thinking ignores it.
    prompt: with what opens an answer at the end.

    Raises:
        Refused: the template raises, which is how it refuses messages.
    """
    given = [dict(m) for m in messages]
    try:
        text = tok.apply_chat_template(
            given, tokenize=False, add_generation_prompt=prompt, enable_thinking=thinking
        )
    except MemoryError:
        raise
    except Exception as e:  # a template is a program, and may raise anything
        roles, why = ", ".join(m["role"] for m in messages), one_line(e)
        if not isinstance(e, TemplateError):
            why = f"{type(e).__name__}: {why}"
        raise Refused(f"the model's chat template refuses messages of {roles}: {why}") from e
    return str(text)


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Move system messages into the first message, for templates that refuse the role (Gemma's)."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    if not system or not rest:
        return rest
    content = "\n\n".join([*system, rest[0]["content"]])
    return [{**rest[0], "content": content}, *rest[1:]]


def modules_of_block(policy: Policy, modules: Iterable[str], n: int) -> list[str]:
    """The modules of the model's block `n`, counted from 1, or from the last one, −1.

    Raises:
        Refused: no module is in that block.
    """
    depth = policy.model.config.num_hidden_layers
    index = n - 1 if n > 0 else depth + n
    inside = [m for m in modules if f".layers.{index}." in f".{m}"]
    if not inside:
        raise Refused(
            f"--quarantine block:{n}: nothing is adapted there; the model has {depth} blocks"
        )
    return inside
