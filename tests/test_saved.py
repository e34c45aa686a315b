"""A saved adapter: scored again, exported, or refused in one line."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from runs import flags, once
from tiny import shake
from vgrout.commands import evaluate
from vgrout.export import __main__ as export
from vgrout.export import model
from vgrout.ground import embedded
from vgrout.model.load.load import load_saved
from vgrout.model.load.saved import find_adapter

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def done(tmp_path_factory, shared_run):
    """A short routed run with two evaluations on the way."""
    more = [
        "--steps",
        "2",
        "--eval-ablate-every",
        "1",
        "--eval-n-prompts",
        "2",
        "--vhack-refresh-every",
        "0",
    ]
    return shared_run.copy(shared_run(*flags("route"), *more), tmp_path_factory.mktemp("saved"))


@pytest.fixture(autouse=True)
def here(done, monkeypatch):
    monkeypatch.chdir(done.parents[2])


def test_evaluate_repeats_the_numbers_of_the_run(done, capsys):
    assert evaluate.evaluate([str(done)]) == 0
    final = json.loads((done / "per_mode_deploy.json").read_text())
    (out,) = (done / "evaluations").iterdir()
    again = json.loads(out.read_text())
    for name, side in (("base", "base"), ("deploy", "deployed"), ("plain", "plain")):
        for what in ("hack", "solve"):
            k, n = again["sides"][side][what]
            assert n == final["eval_n"]
            assert k / n == final[f"{what}_{name}"], (name, what)
    for mode, numbers in final["by_mode"].items():
        k, n = again["sides"]["deployed"]["by_mode"][mode]["solve"]
        assert (k / n, n) == (numbers["deploy_solve"], numbers["n"])
    output = capsys.readouterr().out
    assert "| all" in output
    assert str(out) in output
    assert again["step"] == 2


def test_evaluate_takes_any_adapter_and_any_file(done, tmp_path, capsys, monkeypatch):
    lines = embedded.PROBLEMS.read_text().splitlines()[:8]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "numbers" / "of_two.json"
    more = [
        "--problems",
        str(tmp_path / "p.jsonl"),
        "--split",
        "all",
        "--samples",
        "1",
        "--n-prompts",
        "8",
    ]
    more += ["--out", str(out)]
    assert evaluate.evaluate([str(done), "--step", "1", *more]) == 0
    numbers = json.loads(out.read_text())
    assert numbers["sides"]["deployed"]["hack"][1] == 8
    assert numbers["step"] == 1
    assert numbers["adapter"].endswith("ckpt_step0001.safetensors")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate, "write_atomic", full)
    capsys.readouterr()
    other = out.with_name("other.json")
    assert (
        evaluate.evaluate(
            once([str(done), "--step", "1", *more, "--n-prompts", "1", "--out", str(other)])
        )
        == 2
    )
    output = capsys.readouterr()
    assert "| all" in output.out, "the numbers are not lost with the file"
    assert (
        output.err
        == f"E --out {other}: cannot be written (No space left on device); name another file with --out\n"
    )


def test_exported_folder(done, tmp_path, capsys):
    assert export.main([str(done), "--out", str(tmp_path / "model")]) == 0
    assert "largest |Δ logit| 0 (tolerance 0)" in capsys.readouterr().out
    policy = load_saved(saved := find_adapter(done))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    ids = torch.tensor([policy.render([{"role": "user", "content": "hello"}])])
    with torch.no_grad():
        got = loaded(input_ids=ids, use_cache=False).logits
        assert torch.equal(got, policy.model(input_ids=ids, use_cache=False).logits)
        with policy.adapter.reference():
            assert not torch.equal(got, policy.model(input_ids=ids, use_cache=False).logits)
    for kept in (False, True):
        cfg = replace(saved.cfg, env=replace(saved.cfg.env, preserve_thinking=kept))
        assert load_saved(replace(saved, cfg=cfg)).preserve_thinking is kept
    card = (tmp_path / "model" / "README.md").read_text()
    assert "smoke_route_seed41" in card
    assert "held-out problems and names in hints" in card
    assert export.main([str(done), "--out", str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype
        == torch.bfloat16
    )
    assert export.main([str(done), "--out", str(tmp_path / "half")]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half", "model"]


def test_a_wrong_export_is_not_left_behind(done, tmp_path, monkeypatch, capsys):
    real = model.write

    def wrong(policy, folder, dtype):
        shake(policy.adapter, 0.5)
        real(policy, folder / "nested", dtype)
        policy.model.save_pretrained(folder)  # as trained
        shutil.rmtree(folder / "nested")

    monkeypatch.setattr(model, "write", wrong)
    assert export.main([str(done), "--out", str(tmp_path / "model")]) == 1
    assert "not the deployed one" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


REFUSED = {
    "no run": (lambda run: ["nowhere"], "nowhere: no such run"),
    "no such step": (
        lambda run: [str(run), "--step", "3"],
        r"--step 3: .* has ckpt_step0001.*, ckpt_step0002",
    ),
    "step of a file": (
        lambda run: [str(run / "train.safetensors"), "--step", "2"],
        "has no evaluation checkpoint",
    ),
    "another file": (
        lambda run: [str(embedded.MODEL_DIR / "model.safetensors")],
        "not an adapter saved by a run",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case, done, tmp_path, capsys):
    argv, message = REFUSED[case]
    assert export.main([*argv(done), "--out", str(tmp_path / "m")]) == 2
    assert evaluate.evaluate(argv(done)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("E ") and re.search(message, line) for line in lines), lines
    assert not os.listdir(tmp_path)
