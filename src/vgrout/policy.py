"""The policy: a frozen causal language model, its tokenizer and the adapter."""

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from vgrout.decoder import Decoder, HfDecoder, LeanDecoder, lean_fits
from vgrout.logprobs import backbone, check_head, collate, completion_logprobs
from vgrout.nouns import Message
from vgrout.packing import packs
from vgrout.svd_adapter import SvdAdapter


@dataclass(frozen=True)
class Policy:
    """Which weights the model has (both knobs, deployed, reference) is the adapter's to say."""

    model: PreTrainedModel
    tok: PreTrainedTokenizerBase
    adapter: SvdAdapter
    eos_ids: frozenset[int]  # any of these ends an answer
    pad_id: int  # may equal an EOS: masks go by length
    preserve_thinking: bool = False  # earlier answers are rendered whole, think blocks and all
    lean: bool = False  # the lean decoder was checked against this model and agrees
    packs: bool = False  # … and so were packed rows

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def window(self) -> int:
        """Longest prompt + completion the model was built for, in tokens."""
        return int(self.model.config.max_position_embeddings)

    def render(self, messages: Sequence[Message], said: Sequence[tuple[int, ...]] = ()) -> tuple[int, ...]:
        """Token ids of the chat template up to where the answer begins, thinking off.

        With `preserve_thinking` the ids of a conversation begin with those of each of its earlier prompts, followed by
        the answer to it: template and answers are tokenised apart.

        said: the tokens of the first answers as they were sampled, without the end token, in place of their text's.

        Raises:
            ValueError: the chat template leaves out an earlier answer.
        """
        ids: list[int] = []
        for i, part in enumerate(self._parts(messages, len(said))):
            turn, is_answer = divmod(i, 2)
            known = is_answer and turn < len(said)
            ids += said[turn] if known else self.tok(part, add_special_tokens=False)["input_ids"]
        return tuple(ids)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The text of `render`."""
        return "".join(self._parts(messages, 0))

    def _parts(self, messages: Sequence[Message], sampled: int) -> list[str]:
        if self.preserve_thinking:
            return conversation(self.tok, messages, sampled)
        assert not sampled, "answers as sampled are kept by preserve_thinking alone"
        return [_template(self.tok, messages, thinking=False)]

    def encode_completion(self, text: str) -> tuple[int, ...]:
        """An answer's tokens as the model would have written them, EOS included."""
        eos = self.tok.eos_token_id if self.tok.eos_token_id is not None else min(self.eos_ids)
        return (*self.tok(text, add_special_tokens=False)["input_ids"], eos)

    @property
    def tokenizer_sha256(self) -> str:
        """Identity of the tokenizer: ids cached under another one mean nothing here."""
        return tokenizer_sha256(self.tok)

    def decode(self, ids: Sequence[int]) -> str:
        """The answer's text, without special tokens."""
        return str(self.tok.decode(list(ids), skip_special_tokens=True))

    def decoder(self) -> Decoder:
        """A fresh decoder on the weights as they are now."""
        return LeanDecoder(self.model) if self.lean else HfDecoder(self.model)

    def logprobs(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Log-prob of every completion token (full softmax, temperature 1) and the mask; carries a gradient where
        gradients are on. All rows in one forward: cut long lists by tokens before."""
        batch = collate(prompts, completions, self.device)
        return completion_logprobs(self.model, batch).full, batch.mask


def conversation(tok: PreTrainedTokenizerBase, messages: Sequence[Message], sampled: int = 0) -> list[str]:
    """Template, answer, template, answer, … template: a conversation whose earlier answers stand as they were given.

    Templates drop or rewrite the think blocks of earlier turns, so they are shown a mark in place of each answer. What
    they write after the last mark, and before the next answer, is what the model saw between the two.

    sampled: so many of the first answers were sampled with thinking off; of the others, one that holds a think block
        was begun with thinking on.
    """
    marks = {i: f"\ue000{i}\ue000" for i, m in enumerate(messages) if m["role"] == "assistant"}
    shown = [{**m, "content": marks.get(i, m["content"])} for i, m in enumerate(messages)]
    parts: list[str] = []
    last = ""
    for n, i in enumerate([*marks, len(messages)]):
        answer = messages[i]["content"] if i < len(messages) else ""
        text = _template(tok, shown[:i], thinking=n >= sampled and "</think>" in answer)
        if last not in text:
            raise ValueError("--preserve-thinking: the model's chat template leaves out an earlier answer")
        opening = text.rpartition(last)[2] if last else text
        if opening.rstrip().endswith("<think>") and answer.startswith("<think>"):  # the template opens the block itself
            answer = answer.removeprefix(opening[opening.rindex("<think>") :]).removeprefix("<think>")
        parts += [opening, answer] if i < len(messages) else [opening]
        last = marks.get(i, "")
    return parts


def _template(tok: PreTrainedTokenizerBase, messages: Sequence[Message], thinking: bool) -> str:
    given = [dict(m) for m in messages]
    return str(tok.apply_chat_template(given, tokenize=False, add_generation_prompt=True, enable_thinking=thinking))


def tokenizer_sha256(tok: PreTrainedTokenizerBase) -> str:
    """sha256 over the vocabulary with its ids, and over how one text of letters, digits and symbols is cut."""
    cut = tok("def f(x):\n    return x >= 10  # naïve Ünïcode 文字\t<|im_end|>", add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([sorted(tok.get_vocab().items()), cut]).encode()).hexdigest()


def load_policy(model: str | Path, *, device: str | torch.device, dtype: torch.dtype, cache_dir: Path | None) -> Policy:
    """Load a local folder or a hub id; decompose its weights (from `cache_dir` where they are known).

    Attention is sdpa, on CUDA flash-attention 2 where it is installed and the dtype is half.

    Raises:
        ValueError: no such model, or one this trainer cannot adapt; one line that says what to do.
    """
    device = torch.device(device)
    flash = device.type == "cuda" and dtype.itemsize == 2 and importlib.util.find_spec("flash_attn") is not None
    try:
        tok = AutoTokenizer.from_pretrained(model)
        net = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="flash_attention_2" if flash else "sdpa"
        )
    except (OSError, ValueError) as error:
        where = "no usable model in this folder" if Path(model).is_dir() else "not on this machine and not on the hub"
        raise ValueError(f"--model {model}: {where}; run `just download-model` or give a local folder") from error
    if tok is None or tok.chat_template is None:
        raise ValueError(f"--model {model}: its tokenizer has no chat template; choose an instruct model")
    net = net.to(device).eval()
    return as_policy(net, tok, cache_dir)


def as_policy(model: PreTrainedModel, tok: PreTrainedTokenizerBase, cache_dir: Path | None) -> Policy:
    """Policy of a model that is already in memory; freezes it."""
    check_head(model)
    eos: set[int] = set()
    for source in (tok.eos_token_id, model.config.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        eos |= set(source) if isinstance(source, list | tuple) else {source} if source is not None else set()
    if not eos:
        raise ValueError(f"{type(model).__name__}: neither tokenizer nor configuration names an end-of-text token")
    pad = tok.pad_token_id if tok.pad_token_id is not None else min(eos)
    lean, packed = lean_fits(model), packs(model, backbone(model))
    return Policy(model, tok, SvdAdapter(model, cache_dir), frozenset(eos), pad, lean=lean, packs=packed)
