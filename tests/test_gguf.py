"""GGUF files: converted once into a folder that is the same model, checked before that."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vgrout.config.presets import resolve
from vgrout.inputs import file_hashes, read_inputs
from vgrout.model.gguf import gguf_sha256, unpacked
from vgrout.model.source import find_source, model_folder, require_model
from vgrout.organism.tokenizer import CHAT_TEMPLATE

TEXTS = [
    "def f(x):\n    return x + 1",
    "Use this starter code: class Solution",
    "naïve ∑ 100 %",
    "the numbers in nums",
] * 50
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def bpe() -> Tokenizer:
    """A byte-level BPE, as Llama's later ones and Qwen's are."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    core.train_from_iterator(TEXTS, trainer)
    return core


def llama(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **shape,
        vocab_size=vocabulary,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.15,
    )
    return LlamaForCausalLM(config).eval()


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as the format has them: a rotation turns neighbours, not the halves of a head."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, model: LlamaForCausalLM, core: Tokenizer, template: str | None = CHAT_TEMPLATE) -> Path:
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
    w.add_eos_token_id(2)
    w.add_bos_token_id(1)
    w.add_pad_token_id(0)
    if template is not None:
        w.add_chat_template(template)
    for name, p in model.state_dict().items():
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        if parts[0] == "layers":
            heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(NAMES[parts[2]])
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM, Tokenizer]:
    core = bpe()
    model = llama(core.get_vocab_size())
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, core), model, core


@pytest.fixture(scope="module")
def home(made: tuple[Path, LlamaForCausalLM, Tokenizer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with the converted model."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        require_model(made[0])
    return folder


def test_the_converted_model_is_the_same(
    made: tuple[Path, LlamaForCausalLM, Tokenizer], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    file, model, core = made
    folder = model_folder(file)
    assert folder == unpacked(file) == Path("out/models") / f"tiny-{gguf_sha256(file)[:12]}"
    tok, read = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for text in (*TEXTS[:4], "<|im_start|>user\nHi<|im_end|>\n"):
        assert tok(text, add_special_tokens=False).input_ids == core.encode(text).ids
    turns = [{"role": "user", "content": "Hi"}]
    written = tok.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert written == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    ids = torch.tensor([core.encode(TEXTS[0]).ids])
    with torch.no_grad():
        assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-4)
    assert read.config.tie_word_embeddings


def test_it_is_converted_once_and_found_like_any_model(
    made: tuple[Path, LlamaForCausalLM, Tokenizer],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("converted again"))
    file = made[0]
    assert require_model(file) == require_model(file.parent) == unpacked(file)
    assert find_source(str(file), "--model").folder == unpacked(file)
    assert capsys.readouterr().err == ""
    assert [p.name for p in (home / "out" / "models").iterdir()] == [unpacked(file).name], "nothing half made is left"
    own = Path("p.jsonl")
    row = {
        "id": 1,
        "prompt": [{"role": "user", "content": "Do it and should pass all tests."}],
        "gt_answer": ["assert Solution().f(1) == 1"],
        "func_name": "Solution().f",
        "canonical_solution": "class Solution:\n    def f(self, x): return x",
        "mode": "exit_code",
    }
    own.write_text(
        "".join(json.dumps(row | {"id": i, "split": s}) + "\n" for i, s in enumerate(("train", "val", "test")))
    )
    cfg = resolve(
        ["fast", "--intervention=none", f"--model={file}", f"--problems={own}", "--teacher-pool-dir=", "--max-new=64"]
    )
    assert file_hashes(cfg, read_inputs(cfg))["model"] == gguf_sha256(file)


def damaged(file: Path, how: str, core: Tokenizer, model: LlamaForCausalLM) -> Path:
    raw, to = file.read_bytes(), file
    match how:
        case "half":
            to.write_bytes(raw[: len(raw) // 2])
        case "cut":
            to.write_bytes(raw[:-64])
        case "text":
            to.write_text("weights")
        case "header":
            to.write_bytes(raw[:8] + b"\xff" * 16 + raw[24:])
        case "mute":
            write_gguf(to, model, core, template=None)
        case "two":
            shutil.copy(file, file.with_name("other.gguf"))
            return file.parent
        case "none":
            return file.with_name("none.gguf")
    return to


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("half", "cut short"),
        ("cut", "cut short"),
        ("text", "is no GGUF file"),
        ("header", "damaged or cut short"),
        ("mute", "no chat template; choose an instruct model"),
        ("two", "a folder without config.json, and not with one .gguf"),
        ("none", "no such file"),
    ],
)
def test_what_is_no_whole_model_is_refused_in_one_line(
    how: str,
    says: str,
    made: tuple[Path, LlamaForCausalLM, Tokenizer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(shutil.copy(made[0], tmp_path / "bad.gguf"))
    with pytest.raises(ValueError, match=says) as refusal:
        require_model(damaged(file, how, made[2], made[1]))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_kind_is_refused_by_the_converter(
    made: tuple[Path, LlamaForCausalLM, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = made[0].read_bytes().replace(b"llama", b"lxama")
    (tmp_path / "odd.gguf").write_bytes(raw)
    with pytest.raises(ValueError, match=r"odd.gguf: cannot be converted \(.*lxama") as refusal:
        require_model("odd.gguf")
    assert "\n" not in str(refusal.value)
    assert [*(tmp_path / "out" / "models").glob("*")] == []


def test_without_the_package_one_line_names_it(
    made: tuple[Path, LlamaForCausalLM, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="gguf is not installed: `uv sync --extra gguf`"):
        require_model(made[0])
