"""GGUF files: converted once into a folder that is the same model, checked before that."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from llama import TEXTS, bpe, llama, write_gguf
from vgrout.config.presets import resolve
from vgrout.inputs import file_hashes, read_inputs
from vgrout.model.gguf import gguf_sha256, unpacked
from vgrout.model.saved import find_adapter
from vgrout.model.source import find_source, model_folder, require_model


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
    save_file({"x": torch.zeros(1)}, "a.safetensors", {"cfg": json.dumps(cfg.as_dict())})
    assert find_adapter(Path("a.safetensors")).model == unpacked(file), "what other programs can load"


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
