"""A two-layer Llama with a byte-level BPE, as a folder and as a GGUF file, for tests only."""

import json

import numpy as np
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from organisms.tokenizer import CHAT_TEMPLATE
from tiny import SHAPE

TEXTS = [
    "def f(x):\n    return x + 1",
    "Use this starter code: class Solution",
    "naïve ∑ 100 %",
    "the numbers in nums",
] * 50
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def bpe():
    """A byte-level BPE, as Llama's later ones and Qwen's are."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    core.train_from_iterator(TEXTS, trainer)
    return core


def llama(vocabulary, seed=0, window=1024):
    torch.manual_seed(seed)
    own = {"vocab_size": vocabulary, "max_position_embeddings": window, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return LlamaForCausalLM(LlamaConfig(**SHAPE | own, rope_parameters=rope)).eval()


def interleaved(weight, heads):
    """Rows of q or k as the format has them: a rotation turns neighbours, not the halves of a head."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


NAMES = {f"self_attn.{of}_proj": f"attn_{of}" for of in "qkv"} | {"self_attn.o_proj": "attn_output"}
NAMES |= {f"mlp.{of}_proj": f"ffn_{of}" for of in ("gate", "up", "down")}
NAMES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_gguf(path, model, core, template=CHAT_TEMPLATE):
    c, vocabulary = model.config, core.get_vocab()
    w = GGUFWriter(path, "llama")
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_rope_freq_base(10_000.0)
    w.add_rope_dimension_count(16)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_vocab_size(len(vocabulary))
    w.add_tokenizer_model("gpt2")
    w.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    w.add_token_types([3 if i < len(SPECIAL) else 1 for i in range(len(vocabulary))])
    merges = json.loads(core.to_str())["model"]["merges"]
    w.add_token_merges([" ".join(pair) for pair in merges])
    w.add_eos_token_id(0)
    w.add_eot_token_id(2)
    w.add_bos_token_id(1)
    w.add_pad_token_id(0)
    if template is not None:
        w.add_chat_template(template)
    for name, p in model.state_dict().items():
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        if parts[0] == "layers":
            heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(
                NAMES[parts[2]]
            )
            named, p = f"blk.{parts[1]}.{NAMES[parts[2]]}", interleaved(p, heads) if heads else p
        elif parts[0] == "lm_head":
            continue  # tied
        else:
            named = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[0]]
        w.add_tensor(f"{named}.weight", p.float().numpy().astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def save_folder(path, model, core):
    """The same as a Hugging Face folder."""
    model.save_pretrained(path)
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    PreTrainedTokenizerFast(
        tokenizer_object=core, **names, chat_template=CHAT_TEMPLATE
    ).save_pretrained(path)
    return path
