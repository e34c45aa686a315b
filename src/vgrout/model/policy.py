"""A frozen causal language model with its tokenizer and chat template; the policy is one with an adapter."""

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from jinja2 import TemplateError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from vgrout.config.checks import Dtype
from vgrout.model import template_probe
from vgrout.model.decoder import Decoder, HfDecoder, LeanDecoder, lean_fits
from vgrout.model.logprobs import (
    Batch,
    backbone,
    check_head,
    collate,
    completion_hidden,
    completion_logprobs,
    head_logits,
    in_chunks,
    vocabulary,
)
from vgrout.model.memory import TOKEN_BUDGET
from vgrout.model.packing import Packed, batches, flash_is_here, pack, packed_hidden, packs, padded_batches
from vgrout.model.source import advice, require_model, resolved_dtype
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.model.template_probe import BYTES, SECONDS
from vgrout.types import Message

SVD_CACHE = Path("out/svd_cache")
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
    system_role: bool  # False: the template refuses system messages; they then head the first user message
    preserve_thinking: bool  # earlier answers keep their think blocks in the prompt
    packs: bool  # packed rows (`model/packing.py`) were checked against this model and agree

    @property
    def device(self) -> torch.device:
        """Where weights and inputs are."""
        return self.model.device

    @property
    def window(self) -> int:
        """Longest prompt + completion that the model was built for, in tokens."""
        return int(self.model.config.max_position_embeddings)

    def render(self, messages: Sequence[Message], sampled: Sequence[tuple[int, ...]] = ()) -> tuple[int, ...]:
        """Token ids of the chat template up to where the answer begins, thinking off.

        With `preserve_thinking` the ids of a conversation begin with those of each of its earlier prompts, followed by
        the answer to it: template and answers are tokenised apart.

        sampled: the tokens of the first answers as they were sampled, without the end token, in place of their text's.

        Raises:
            ValueError: the chat template leaves out an earlier answer.
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
        return [_template(self.tok, messages)]

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of rendered text, nothing added."""
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
        """The answer's text, without special tokens."""
        return str(self.tok.decode(list(ids), skip_special_tokens=True))

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """Those that keep keys and values while this one is sampled from."""
        return (self.model,)

    def decoder(self) -> Decoder:
        """A fresh decoder on the weights as they are now."""
        return LeanDecoder(self.model) if self.lean else HfDecoder(self.model)

    def batches(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[list[int], Batch | Packed]]:
        """All rows, a forward's at a time, with their indices. What answers to a prompt begin with alike is read once,
        where the model allows it: for what is asked of each token, not of each row's gradient."""
        budget = TOKEN_BUDGET.get(self.device.type, TOKEN_BUDGET["cuda"])
        if self.packs:
            parts = batches([0] * len(prompts), prompts, completions, budget)
        else:
            parts = padded_batches([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)], budget)
        for part in parts:
            yield part, self.batch([prompts[i] for i in part], [completions[i] for i in part])

    def batch(self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]) -> Batch | Packed:
        """The same rows in one forward."""
        if self.packs:
            return pack([0] * len(prompts), prompts, completions, self.device, self.model.dtype)
        return collate(prompts, completions, self.device)

    def attention(self, *, packed: bool = True) -> dict[str, str]:
        """The kernel of each phase, for run.json. packed: whether the update packs its rows where the model allows it.
        A decoding step has one query a row, which SDPA reads as fast as anything."""
        own = str(self.model.config._attn_implementation)
        flash = flash_is_here(self.device, self.model.dtype)
        return {
            "update": own if not (packed and self.packs) else "flash_attention_2 varlen" if flash else "sdpa",
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
            at, of = batch.at[batch.mask].unique(return_inverse=True)

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


def conversation(tok: PreTrainedTokenizerBase, messages: Sequence[Message], sampled: int = 0) -> list[str]:
    """Template, answer, template, answer, … template: a conversation whose earlier answers stand as they were given.

    Templates drop or rewrite the think blocks of earlier turns, so they get a placeholder for each answer. What they
    write after the last placeholder, and before the next answer, is what the model saw between the two.

    sampled: so many of the first answers were sampled with thinking off; of the others, one that holds a think block
        was started with thinking on.

    Raises:
        ValueError: the chat template leaves out an earlier answer.
    """
    placeholders = {i: f"\ue000{i}\ue000" for i, m in enumerate(messages) if m["role"] == "assistant"}
    rewritten = [{**m, "content": placeholders.get(i, m["content"])} for i, m in enumerate(messages)]
    parts: list[str] = []
    last = ""
    for n, i in enumerate([*placeholders, len(messages)]):
        answer = messages[i]["content"] if i < len(messages) else ""
        text = _template(tok, rewritten[:i], thinking=n >= sampled and "</think>" in answer)
        if last not in text:
            raise ValueError("--preserve-thinking: the model's chat template leaves out an earlier answer")
        opening = text.rpartition(last)[2] if last else text
        if opening.rstrip().endswith("<think>") and answer.startswith("<think>"):  # the template opens the block itself
            answer = answer.removeprefix(opening[opening.rindex("<think>") :]).removeprefix("<think>")
        parts += [opening, answer] if i < len(messages) else [opening]
        last = placeholders.get(i, "")
    return parts


def tokenizer_sha256(tok: PreTrainedTokenizerBase) -> str:
    """sha256 over the vocabulary with its ids, and over how one text of letters, digits and symbols is cut."""
    cut = tok("def f(x):\n    return x >= 10  # naïve Ünïcode 文字\t<|im_end|>", add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([sorted(tok.get_vocab().items()), cut]).encode()).hexdigest()


def _template(
    tok: PreTrainedTokenizerBase, messages: Sequence[Message], thinking: bool = False, prompt: bool = True
) -> str:
    given = [dict(m) for m in messages]  # a template without thinking ignores the flag
    return str(tok.apply_chat_template(given, tokenize=False, add_generation_prompt=prompt, enable_thinking=thinking))


def without_system(messages: Sequence[Message]) -> list[Message]:
    """System messages put before the first user message, for templates that refuse the role (Gemma's)."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    if not system or not rest:
        return list(rest)
    return [{**rest[0], "content": "\n\n".join([*system, rest[0]["content"]])}, *rest[1:]]


def takes_system(tok: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template accepts a system message and keeps its text."""
    try:
        return "(sys)" in _template(
            tok, [{"role": "system", "content": "(sys)"}, {"role": "user", "content": "(user)"}]
        )
    except TemplateError:
        return False


def ending(tok: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> int:
    """The EOS that the template writes after an answer, which need not be the tokenizer's (Gemma: <end_of_turn>)."""
    turns = [{"role": "user", "content": "(user)"}, {"role": "assistant", "content": "(answer)"}]
    with contextlib.suppress(TemplateError):
        _, _, after = _template(tok, turns, prompt=False).rpartition("(answer)")
        ids = tok(after.lstrip(), add_special_tokens=False)["input_ids"]
        if ids and ids[0] in eos_ids:
            return int(ids[0])
    return int(tok.eos_token_id) if tok.eos_token_id is not None else min(eos_ids)


def pick_device(model: str | Path, dtype: Dtype, threads: int = 0) -> tuple[torch.device, torch.dtype]:
    """The GPU if there is one, else the CPU with so many threads (0: as they are); `dtype` as it is meant there."""
    gpu = torch.cuda.is_available()
    if threads and not gpu:
        torch.set_num_threads(threads)
    # cuDNN plans anew for every new length, a token of decoding included, and its backward under a mask can give NaN
    # (pytorch #196678); torch puts it first on sm_90
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda" if gpu else "cpu"), DTYPES[resolved_dtype(dtype, model, gpu=gpu)]


def attention(device: torch.device, dtype: torch.dtype, architecture: type[PreTrainedModel]) -> str:
    """flash-attention 2 on CUDA in half precision, where it is installed (extra `gpu`), else sdpa wherever the
    architecture has it (Gemma 2 has not). Never what config.json asks for: it may name a kernel on a hub."""
    if flash_is_here(device, dtype):
        return "flash_attention_2"
    return "sdpa" if architecture._supports_sdpa else "eager"


def load_language_model(
    model: str | Path, *, device: str | torch.device, dtype: torch.dtype, flag: str = "--model"
) -> LanguageModel:
    """Load a local folder or a downloaded hub id, frozen. Nothing is fetched.

    Raises:
        ValueError: no such model here, or one this trainer cannot use; one line that says what to do.
    """
    folder, device = require_model(model, flag), torch.device(device)
    set_verbosity_error()  # what is wrong with a model is said in one line
    if not sys.stderr.isatty():
        disable_progress_bar()
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tok = AutoTokenizer.from_pretrained(folder, **here)
        if tok is None or tok.chat_template is None:
            raise ValueError("its tokenizer has no chat template; choose an instruct model")
        try_template(tok)
        config = AutoConfig.from_pretrained(folder, **here)
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if architecture is None:
            raise ValueError(f"{config.model_type} is no causal language model")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention(device, dtype, architecture),
            use_safetensors=True,
            output_loading_info=True,
            **here,
        )
        net, info = loaded
        if missing := sorted(info["missing_keys"]):  # transformers would go on with random numbers in their place
            raise ValueError(f"{len(missing)} weights are missing, first {missing[0]}")
        net = net.to(device).eval()
        if broken := [name for name, p in net.named_parameters() if not p.isfinite().all()]:
            raise ValueError(f"{broken[0]} holds a NaN or an infinity")
        return as_language_model(net, tok)
    except Exception as error:  # whatever the libraries raise on damaged files
        why = " ".join(str(error).split())[:160] or type(error).__name__
        if "trust_remote_code" in why or "custom code" in why:
            why = "it needs code of its own, which is never run"
        raise ValueError(f"{flag} {model}: no usable model in {folder} ({why}); {advice(model)}") from error


def try_template(tok: PreTrainedTokenizerBase) -> None:
    """Raises ValueError, one line, for a chat template that does not end, or fails on a user's message."""
    text = tok.chat_template if isinstance(tok.chat_template, str) else json.dumps(tok.chat_template)
    if not _ends(text):
        raise ValueError(f"its chat template takes more than {SECONDS} s or {BYTES >> 30} GiB")
    try:
        shown = "(user)" in _template(tok, [{"role": "user", "content": "(user)"}])
    except Exception as e:  # a template is a program
        raise ValueError(f"its chat template fails: {type(e).__name__}: {e}") from None
    if not shown:
        raise ValueError("its chat template leaves out the user's message")


@cache
def _ends(template: str) -> bool:
    """Whether a template comes to its end, tried in a process of its own."""
    command = [sys.executable, "-I", template_probe.__file__]
    try:
        return subprocess.run(command, input=template.encode(), timeout=10 * SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def as_language_model(model: PreTrainedModel, tok: PreTrainedTokenizerBase) -> LanguageModel:
    """A model that is already in memory, frozen and checked.

    Raises:
        ValueError: its head is more than a matrix product, or no end-of-text token is named anywhere.
    """
    check_head(model)
    eos: set[int] = set()
    for source in (tok.eos_token_id, model.config.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        eos |= set(source) if isinstance(source, list | tuple) else {source} if source is not None else set()
    if not eos:
        raise ValueError(f"{type(model).__name__}: neither tokenizer nor configuration names an end-of-text token")
    rows = int(cast(Tensor, model.get_input_embeddings().weight).shape[0])
    if not all(type(i) is int and 0 <= i < rows for i in eos):
        raise ValueError(f"{type(model).__name__}: an end-of-text token is none of its {rows} tokens")
    if not isinstance(getattr(model.config, "max_position_embeddings", None), int):
        raise ValueError(f"{type(model).__name__}: its configuration has no max_position_embeddings")
    eos_ids = frozenset(eos)
    model.requires_grad_(False)
    return LanguageModel(
        model=model,
        tok=tok,
        eos_ids=eos_ids,
        end_id=ending(tok, eos_ids),
        pad_id=tok.pad_token_id if tok.pad_token_id is not None else min(eos),
        lean=lean_fits(model),
        system_role=takes_system(tok),
        preserve_thinking=False,
        packs=packs(model, backbone(model)),
    )


def load_policy(model: str | Path, *, device: str | torch.device, dtype: torch.dtype, cache_dir: Path | None) -> Policy:
    """As `load_language_model`, under an adapter of zeros. cache_dir: of decomposed weights (minutes at 4B); None: no
    cache."""
    return adapted(load_language_model(model, device=device, dtype=dtype), cache_dir)


def as_policy(model: PreTrainedModel, tok: PreTrainedTokenizerBase, cache_dir: Path | None) -> Policy:
    """As `as_language_model`, under an adapter of zeros."""
    return adapted(as_language_model(model, tok), cache_dir)


def adapted(lm: LanguageModel, cache_dir: Path | None) -> Policy:
    """The same model under an adapter of zeros. Raises ValueError as `SvdAdapter`."""
    return Policy(**vars(lm), adapter=SvdAdapter(lm.model, cache_dir))


def modules_of_block(policy: Policy, modules: Iterable[str], n: int) -> list[str]:
    """The modules of the model's block `n`, from 1, or from −1, the last one. Raises ValueError where it has none."""
    depth = policy.model.config.num_hidden_layers
    inside = [m for m in modules if f".layers.{n - 1 if n > 0 else depth + n}." in f".{m}"]
    if not inside:
        raise ValueError(f"--quarantine block:{n}: the model has {depth} blocks")
    return inside
