"""GGUF files: converted once into a folder that is the same model, checked before that."""

import json
import os
import shutil
import struct
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from llama import TEXTS, bpe, llama, write_gguf
from quick import first_quick
from vgrout import embedded
from vgrout.config.presets import resolve
from vgrout.distill import main as distill
from vgrout.errors import Refused
from vgrout.inputs import file_hashes, read_inputs
from vgrout.iterative_dpo import main as iterative_dpo
from vgrout.model import gguf
from vgrout.model.gguf import gguf_sha256, unpacked
from vgrout.model.saved import find_adapter, find_source
from vgrout.model.shapes import find_shapes, shapes_of
from vgrout.model.source import model_folder, require_model
from vgrout.organism.__main__ import main as organism_command
from vgrout.runs.plan import adapter_lines


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM, Tokenizer]:
    core = bpe()
    model = llama(core.get_vocab_size())
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, core), model, core


@pytest.fixture(scope="module")
def home(
    made: tuple[Path, LlamaForCausalLM, Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder to work in, with the converted model."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        require_model(made[0])
    return folder


@pytest.mark.long
def test_the_converted_model_is_the_same(made, home, monkeypatch):
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
    assert read.generation_config.eos_token_id == [0, 2], "the end of a text, and that of a turn"


@pytest.mark.long
def test_it_is_converted_once_and_found_like_any_model(made, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("converted again"))
    file = made[0]
    assert require_model(file) == require_model(file.parent) == unpacked(file)
    assert find_source(str(file), "--model").folder == unpacked(file)
    assert capsys.readouterr().err == ""
    assert [p.name for p in (home / "out" / "models").iterdir()] == [unpacked(file).name], (
        "nothing half made is left"
    )
    argv = ["fast", "--intervention=none", f"--model={file}", "--teacher-pool-dir=", "--max-new=64"]
    cfg = resolve([*argv, f"--problems={embedded.PROBLEMS}"])
    assert file_hashes(cfg, read_inputs(cfg))["model"] == gguf_sha256(file)
    save_file({"x": torch.zeros(1)}, "a.safetensors", {"cfg": json.dumps(cfg.as_dict())})
    assert find_adapter(Path("a.safetensors")).model == unpacked(file), (
        "what other programs can load"
    )


# one entry of the head: an array of 2^40 bytes
ENDLESS = struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 0, 2**40) + b"\0" * 64


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: raw[: len(raw) // 2], r"bad.gguf: cannot be converted \("),
        (lambda raw: raw[:-64], r"bad.gguf: cannot be converted \(ValueError"),
        (lambda _: b"weights", r"bad.gguf: cannot be converted \(ValueError: GGUF magic invalid"),
        pytest.param(lambda _: ENDLESS, "bad.gguf: cannot be converted", marks=pytest.mark.long),
        pytest.param(
            lambda raw: raw.replace(b"llama", b"lxama"),
            r"be converted \(.*lxama",
            marks=pytest.mark.long,
        ),
        ("mute", "no chat template; choose an instruct model"),
        ("two", "a folder without config.json, and not with one .gguf"),
        ("none.gguf", "no such model"),
    ],
    ids=["half", "cut", "text", "endless", "another kind", "mute", "two", "none"],
)
def test_what_is_no_whole_model_is_refused_in_one_line(damage, says, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path(shutil.copy(made[0], tmp_path / "bad.gguf"))
    if callable(damage):
        file.write_bytes(damage(file.read_bytes()))
    elif damage == "mute":
        write_gguf(file, *made[1:], template=None)
    else:
        file = (
            file.with_name(damage)
            if damage != "two"
            else Path(shutil.copy(file, tmp_path / "other.gguf")).parent
        )
    with pytest.raises(ValueError, match=says) as refusal:
        require_model(file)
    assert "\n" not in str(refusal.value)
    assert not [*tmp_path.glob("out/models/*")], "nothing half made is left"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """The inputs and the lines of a plan, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def of(file, *more):
        argv = ["fast", "--intervention=none", f"--model={file}", "--teacher-pool-dir=none"]
        cfg = resolve([*argv, f"--problems={embedded.PROBLEMS}", *more, "--dry-run"])
        absent = read_inputs(cfg).absent
        return absent, "\n".join(adapter_lines(cfg)), find_shapes(file)

    return of


def test_a_plan_reads_the_head_and_writes_nothing(made, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "unpack", lambda *_: pytest.fail("converted"))
    file, model, _ = made
    absent, adapter, shapes = plan(file, "--max-new=64")
    assert not absent
    assert shapes == shapes_of(model.config.to_dict())
    assert f"{shapes.R} singular values" in adapter
    assert require_model(file, convert=False) == unpacked(file)
    with pytest.raises(Refused, match="window holds 1024 tokens"):
        plan(file, "--max-new=1024")
    assert not [*tmp_path.rglob("*.safetensors")]
    assert not (tmp_path / "out" / "models").exists()


PLANS = {
    "distill": "distill --method uld --steps 2 --student {file} --teacher organism",
    "a teacher": "distill --method uld --steps 2 --student organism --teacher {file}",
    "iterative_dpo": "iterative_dpo --base-model {file} --output-dir rounds",
}


@pytest.mark.parametrize("command", first_quick(PLANS))
def test_a_plan_of_an_imitation_converts_nothing(command, made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf, "unpack", lambda *_: pytest.fail("converted"))
    program, *words = PLANS[command].split()
    argv = [word.format(file=made[0]) for word in words]
    more = [f"--{'prompts' if program == 'iterative_dpo' else 'problems'}={embedded.PROBLEMS}"]
    main = {"distill": distill, "iterative_dpo": iterative_dpo}[program]
    assert main([*argv, *more, "--max-new=64", "--plan-only"]) == 0
    assert str(made[0]) in capsys.readouterr().out
    assert not (tmp_path / "out" / "models").exists()


def test_a_plan_of_tuning_converts_nothing(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf, "unpack", lambda *_: pytest.fail("converted"))
    for kind in ("tune", "sums"):
        words = [kind, "--model", str(made[0]), "--out=new", "--dry-run"]
        monkeypatch.setattr("sys.argv", ["vgrout organism", *words])
        assert organism_command() == 0
    assert not (tmp_path / "out" / "models").exists()


@pytest.mark.parametrize("damage", first_quick(["half a head", "mute", "text"]))
def test_a_plan_refuses_what_the_head_shows(damage, made, plan, tmp_path):
    file = Path(shutil.copy(made[0], tmp_path / "bad.gguf"))
    if damage == "mute":
        write_gguf(file, *made[1:], template=None)
    elif damage == "text":
        file.write_bytes(b"weights")
    else:
        file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(Refused, match=r"--model .*bad\.gguf: cannot be converted"):
        plan(file, "--max-new=64")
    assert find_shapes(file) is None


BROKEN = {
    "ImportError": "raise ImportError('numpy is too old')",
    "OSError": "raise OSError('libggml.so: no such file')",
    "ModuleNotFoundError": "import no_such_module_of_gguf",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_package_that_cannot_be_imported_is_not_the_files_fault(
    kind, made, tmp_path, monkeypatch
):
    (tmp_path / "gguf.py").write_text(BROKEN[kind])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.chdir(tmp_path)
    for read in (partial(require_model, made[0]), partial(require_model, made[0], convert=False)):
        gguf._head.cache_clear()
        with pytest.raises(Refused, match=f"installed and cannot be imported .{kind}") as refusal:
            read()
        assert "give a whole GGUF file" not in str(refusal.value)


@pytest.mark.long
def test_what_is_not_the_files_fault_is_no_refusal(made, tmp_path, monkeypatch):
    """The conversion ends by an error of its own: here its folder cannot be made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(RuntimeError, match="conversion ended with 1") as fault:
        gguf._run_apart(made[0], "--model", "folder/within")
    assert not isinstance(fault.value, Refused)


def test_without_the_package_one_line_names_it(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="gguf is not installed: `uv sync --extra gguf`"):
        require_model(made[0])
