"""GGUF files: `vgrout download gguf` makes a folder that is the same model, and refuses what is no whole model."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from files import loaded
from llama import TEXTS, bpe, llama, write_gguf
from quick import first_quick
from vgrout.commands.download import main as download
from vgrout.ground.io import Refused
from vgrout.model.load.source import require_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    core = bpe()
    model = llama(core.get_vocab_size())
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, core), model, core


def test_the_converted_model_is_the_same(made, here, capsys):
    file, model, core = made
    with pytest.raises(Refused, match=r"`vgrout download gguf .*tiny\.gguf` makes one of it"):
        require_model(file)
    assert download(["gguf", str(file)]) == 0
    folder = Path("out/models/tiny")
    assert require_model(folder) == folder
    assert [*folder.parent.iterdir()] == [folder], "nothing half made is left"
    tok, read = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for text in (*TEXTS[:4], "<|im_start|>user\nHi<|im_end|>\n"):
        assert tok(text, add_special_tokens=False).input_ids == core.encode(text).ids
    turns = [{"role": "user", "content": "Hi"}]
    written = tok.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert written == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "quantization_config" not in loaded(folder / "config.json")
    ids = torch.tensor([core.encode(TEXTS[0]).ids])
    with torch.no_grad():
        assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-4)
    assert read.config.tie_word_embeddings
    assert read.generation_config.eos_token_id == [0, 2], "the end of a text, and that of a turn"
    capsys.readouterr()
    assert download(["gguf", str(file)]) == 2
    assert capsys.readouterr().err.startswith("E --out out/models/tiny: exists")


DAMAGED = {
    "text": (lambda _: b"weights", "ValueError: GGUF magic invalid"),
    "cut": (lambda raw: raw[:-64], "ValueError"),
    "another kind": (lambda raw: raw.replace(b"llama", b"lxama"), "lxama"),
    "mute": (None, "no chat template; choose an instruct model"),
}


@pytest.mark.parametrize("damage", first_quick(DAMAGED))
def test_what_is_no_whole_model_is_refused_in_one_line(damage, made, tmp_path, capsys):
    file = Path(shutil.copy(made[0], tmp_path / "bad.gguf"))
    change, says = DAMAGED[damage]
    if change is None:
        write_gguf(file, *made[1:], template=None)
    else:
        file.write_bytes(change(file.read_bytes()))
    assert download(["gguf", str(file), "--out", str(tmp_path / "models" / "m")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"E {file}: ")
    assert says in line
    assert not [*(tmp_path / "models").iterdir()], "nothing half made is left"


def test_without_the_package_one_line_names_it(made, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert download(["gguf", str(made[0])]) == 2
    assert "gguf is not installed: `uv sync --inexact --extra gguf`" in capsys.readouterr().err
