"""Tiny random models of several families, for tests only."""

from dataclasses import replace

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vgrout.ground.data import Batch, UpdateRow
from vgrout.model.load.load import adapted, as_language_model

# for matrices this small a second thread only costs, most of all on a shared machine
torch.set_num_threads(1)

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # so that a random model's tokens depend on its context
}

FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2-bias": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"})
    ),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SHAPE)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=8)),
    # heads with 31 rows more than the tokenizer has tokens
    "qwen3-padded": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE | {"vocab_size": 128}, tie_word_embeddings=False)
    ),
    "gemma2-padded": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE | {"vocab_size": 128}, sliding_window=8)
    ),
}


def tiny(family="qwen3", seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = FAMILIES[family]().to(dtype).eval()
    # biases and norms start at 0 and 1: give them values that a mistake would show
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
            assert p.isfinite().all(), name
    return model


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def tokenizer(pad="<pad>", thought=("<think>", "</think>")):
    """97 tokens: four specials, marks of a thought, one token a character for the rest. pad None: pad == eos."""
    special = ["<pad>", "<eos>", "<user>", "<system>", "<assistant>", *thought]
    vocab = {token: i for i, token in enumerate(special)}
    vocab |= {chr(c): len(vocab) + i for i, c in enumerate(range(32, 32 + 97 - len(special)))}
    core = Tokenizer(models.BPE(vocab, [], unk_token="<pad>", fuse_unk=False))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token=pad or "<eos>", chat_template=TEMPLATE
    )


def as_policy(model, tok=None):
    """A model in memory under an adapter of zeros."""
    return adapted(as_language_model(model, tok or tokenizer()), None)


def policy(
    family="qwen3",
    seed=0,
    dtype=torch.float32,
    pad="<pad>",
):
    model = tiny(family, seed, dtype)
    model.config.eos_token_id = 1
    model.generation_config.eos_token_id = 1
    return as_policy(model, tokenizer(pad))


def shake(adapter, scale, seed=1):
    """Both vectors away from zero, as in the middle of a run."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for vector in (adapter.δS, adapter.δS_hack):
            vector.copy_(scale * torch.randn(len(adapter), generator=noise))
    adapter.merge()


def relative(got, want):
    return float((got - want).norm() / want.norm().clamp(min=1e-9))


def step_of(groups, row="rollout"):
    """The step of these groups as plain GRPO learns it. row: what a row of g is."""
    rows = []
    at = {}
    groups = [replace(group, index=i) for i, group in enumerate(groups)]
    for i, group in enumerate(groups):
        for b, (r, A) in enumerate(zip(group.rollouts, group.advantages, strict=True)):
            if group.has_signal:
                n = at.setdefault((i, b if row == "rollout" else r.source), len(at))
                rows.append(UpdateRow(r, i, A, row_of_g=n))
    return Batch(tuple(groups), (), (), sum(map(len, groups)), 0, rows=tuple(rows))
