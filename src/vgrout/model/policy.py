"""A frozen causal language model with its tokenizer and chat template; the policy is one with an adapter. Both are made
in model/load.py."""

import hashlib
import json
import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vgrout.data import Message
from vgrout.errors import Refused
from vgrout.model.attention import kernel_name
from vgrout.model.decoder import Decoder, HfDecoder, LeanDecoder
from vgrout.model.layout import Packed, batches, pack, packed_hidden, padded_batches
from vgrout.model.logprobs import (
    PaddedBatch,
    backbone,
    collate,
    completion_hidden,
    completion_logprobs,
    head_logits,
    in_chunks,
    vocabulary,
)
from vgrout.model.memory import Budget
from vgrout.model.source import tokenizing
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.model.template_probe import SECONDS

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LanguageModel:
    """Causal LM with tokenizer and chat template."""

    model: PreTrainedModel
    tok: PreTrainedTokenizerBase
    eos_ids: frozenset[int]  # any of these ends an answer
    end_id: int  # the one that this chat template ends an answer with
    pad_id: int  # may equal an EOS: masks go by length
    lean: bool  # LeanDecoder was checked against this model and agrees
    # False: the template refuses system messages; they then head the first user message
    system_role: bool
    preserve_thinking: bool  # earlier answers keep their think blocks in the prompt
    packs: bool  # packed rows (`model/layout.py`) were checked against this model and agree
    budget: Budget  # how much is processed at once
    graphs: bool  # the lean decoder's step is made for CUDA graphs

    @property
    def device(self) -> torch.device:
        """Where weights and inputs are."""
        return self.model.device

    @property
    def window(self) -> int:
        """Longest prompt + completion that the model was built for, in tokens."""
        return int(self.model.config.max_position_embeddings)

    def render(
        self, messages: Sequence[Message], sampled: Sequence[tuple[int, ...]] = ()
    ) -> tuple[int, ...]:
        """Token ids of the chat template up to where the answer begins, thinking off.

        With `preserve_thinking` the ids of a conversation begin with those of each of its earlier prompts, followed by
        the answer to it: template and answers are tokenised apart.

        sampled: the tokens of the first answers as they were sampled, without the end token, in place of their text's.

        Raises:
            Refused: the chat template leaves out an earlier answer.
        """
        ids: list[int] = []
        for i, part in enumerate(self._parts(messages, len(sampled))):
            turn, is_answer = divmod(i, 2)
            known = is_answer and turn < len(sampled)
            ids += sampled[turn] if known else self.encode(part)
        return tuple(ids)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The same as text."""
        return "".join(self._parts(messages, 0))

    def _parts(self, messages: Sequence[Message], sampled: int) -> list[str]:
        if not self.system_role:
            messages = without_system(messages)
        if self.preserve_thinking:
            return conversation(self.tok, messages, sampled)
        assert not sampled, "answers as sampled are kept by preserve_thinking alone"
        return [apply_template(self.tok, messages)]

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of rendered text, nothing added. Raises Refused as `tokenizing`."""
        with tokenizing(self.tok.name_or_path):
            return tuple(self.tok(text, add_special_tokens=False)["input_ids"])

    def encode_completion(self, text: str, finished: bool = True) -> tuple[int, ...]:
        """An answer's tokens as the model would have written them, with its EOS if it is `finished`."""
        ids = self.encode(text)
        return (*ids, self.end_id) if finished else ids

    @property
    def tokenizer_sha256(self) -> str:
        """Identity of the tokenizer: ids cached under another one mean nothing here."""
        return tokenizer_sha256(self.tok)

    def decode(self, ids: Sequence[int]) -> str:
        """The answer's text, without special tokens, and with every space: a tokenizer's clean-up is for prose."""
        return str(
            self.tok.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    @property
    def models(self) -> "tuple[LanguageModel, ...]":
        """Those that keep keys and values while this one is sampled from."""
        return (self,)

    def decoder(self) -> Decoder:
        """A fresh decoder on the weights as they are now."""
        return LeanDecoder(self.model, static=self.graphs) if self.lean else HfDecoder(self.model)

    def batches(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[list[int], PaddedBatch | Packed]]:
        """All rows, a forward's at a time, with their indices. What answers to a prompt begin with alike is read once,
        where the model allows it: for what is asked of each token, not of each row's gradient."""
        if self.packs:
            parts = batches([0] * len(prompts), prompts, completions, self.budget.tokens)
        else:
            lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
            parts = padded_batches(lengths, self.budget.tokens)
        for part in parts:
            yield part, self.batch([prompts[i] for i in part], [completions[i] for i in part])

    def batch(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> PaddedBatch | Packed:
        """The same rows in one forward."""
        if self.packs:
            return pack([0] * len(prompts), prompts, completions, self.device, self.model.dtype)
        return collate(prompts, completions, self.device)

    def attention(self) -> dict[str, str]:
        """The kernel of each phase, for run.json. A decoding step has one query a row, which SDPA reads as fast as
        anything."""
        own = str(self.model.config._attn_implementation)
        return {
            "update": kernel_name(self.device, self.model.dtype) if self.packs else own,
            "prefill": own,
            "decode": "sdpa" if self.lean else own,
        }


@dataclass(frozen=True)
class Policy(LanguageModel):
    """Causal LM with an adapter, whose contexts say which weights the model has: as trained, deployed, reference."""

    adapter: SvdAdapter

    def logprobs(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Log-prob of every completion token (full softmax, temperature 1) and the mask; carries a gradient where
        gradients are on. All rows in one forward: cut long lists by tokens before."""
        batch = collate(prompts, completions, self.device)
        return completion_logprobs(self.model, batch).full, batch.mask

    @torch.no_grad()
    def kl_to_base(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Float[Tensor, " n"]:
        """KL(π ‖ base) in nats at every completion token, over the whole vocabulary: π with the weights as they are
        now, base with the adapter at zero, so that an untouched policy has exactly 0. All rows in one forward."""
        batch, at, of = self.batch(prompts, completions), None, None
        if isinstance(batch, Packed):
            at, of = batch.at[batch.wanted].unique(return_inverse=True)

        def hidden() -> Tensor:
            if isinstance(batch, Packed):
                return packed_hidden(self.model, backbone(self.model), batch)[at]
            return completion_hidden(self.model, batch)

        now = hidden()
        with self.adapter.reference():
            base = hidden()

        def head(now: Tensor, base: Tensor) -> tuple[Tensor, ...]:
            log_p, log_q = (head_logits(self.model, h).float().log_softmax(-1) for h in (now, base))
            return ((log_p.exp() * (log_p - log_q)).sum(-1),)

        kl = in_chunks(head, 2 * vocabulary(self.model), now, base)[0]
        return kl if of is None else kl[of]


def conversation(
    tok: PreTrainedTokenizerBase, messages: Sequence[Message], sampled: int = 0
) -> list[str]:
    """Template, answer, template, answer, … template: a conversation whose earlier answers stand as they were given.

    Templates drop or rewrite the think blocks of earlier turns, so they get a placeholder for each answer. What they
    write after the last placeholder, and before the next answer, is what the model saw between the two.

    sampled: so many of the first answers were sampled with thinking off; of the others, one that holds a think block
        was started with thinking on.

    Raises:
        Refused: the chat template leaves out an earlier answer.
    """
    placeholders = {
        i: f"\ue000{i}\ue000" for i, m in enumerate(messages) if m["role"] == "assistant"
    }
    rewritten = [
        {**m, "content": placeholders.get(i, m["content"])} for i, m in enumerate(messages)
    ]
    parts: list[str] = []
    last = ""
    for n, i in enumerate([*placeholders, len(messages)]):
        answer = messages[i]["content"] if i < len(messages) else ""
        text = apply_template(tok, rewritten[:i], thinking=n >= sampled and "</think>" in answer)
        if last not in text:
            raise Refused(
                "--preserve-thinking: the model's chat template leaves out an earlier answer"
            )
        opening = text.rpartition(last)[2] if last else text
        # the template opens the block itself
        if opening.rstrip().endswith("<think>") and answer.startswith("<think>"):
            answer = answer.removeprefix(opening[opening.rindex("<think>") :]).removeprefix(
                "<think>"
            )
        parts += [opening, answer] if i < len(messages) else [opening]
        last = placeholders.get(i, "")
    return parts


def tokenizer_sha256(tok: PreTrainedTokenizerBase) -> str:
    """sha256 over the vocabulary with its ids, and over how one text of letters, digits and symbols is cut."""
    cut = tok(
        "def f(x):\n    return x >= 10  # naïve Ünïcode 文字\t<|im_end|>", add_special_tokens=False
    )["input_ids"]
    return hashlib.sha256(json.dumps([sorted(tok.get_vocab().items()), cut]).encode()).hexdigest()


def apply_template(
    tok: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    thinking: bool = False,
    prompt: bool = True,
) -> str:
    """Raises Refused where the template refuses these messages, fails on them, or does not end."""
    given = [dict(m) for m in messages]  # a template without thinking ignores the flag
    try:
        with _ends():
            return str(
                tok.apply_chat_template(
                    given, tokenize=False, add_generation_prompt=prompt, enable_thinking=thinking
                )
            )
    except (Refused, MemoryError):
        raise
    except Exception as e:  # a template is a program, and may raise anything
        roles, why = ", ".join(m["role"] for m in messages), " ".join(str(e).split())
        if not isinstance(e, TemplateError):
            why = f"{type(e).__name__}: {why}"
        raise Refused(f"the model's chat template refuses messages of {roles}: {why}") from e


@contextmanager
def _ends() -> Generator[None]:
    """Raises Refused where the block takes more than SECONDS of this process's time: a template may loop on one text
    alone. A signal can stop it in the main thread only."""

    def stop(*_: object) -> None:
        raise Refused(f"the model's chat template takes more than {SECONDS} s for a prompt")

    try:
        before = signal.signal(signal.SIGVTALRM, stop)
    except ValueError:  # in another thread
        yield
        return
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def without_system(messages: Sequence[Message]) -> list[Message]:
    """System messages put before the first user message, for templates that refuse the role (Gemma's)."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    if not system or not rest:
        return list(rest)
    return [{**rest[0], "content": "\n\n".join([*system, rest[0]["content"]])}, *rest[1:]]


def modules_of_block(policy: Policy, modules: Iterable[str], n: int) -> list[str]:
    """The modules of the model's block `n`, from 1, or from −1, the last one. Raises Refused where it has none."""
    depth = policy.model.config.num_hidden_layers
    inside = [m for m in modules if f".layers.{n - 1 if n > 0 else depth + n}." in f".{m}"]
    if not inside:
        raise Refused(
            f"--quarantine block:{n}: nothing is adapted there; the model has {depth} blocks"
        )
    return inside
