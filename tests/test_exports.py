"""Exports, read by the programs that they are for."""

import json
import math
import resource
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runs import flags
from vgrout.config.presets import resolve
from vgrout.export import __main__ as export
from vgrout.export.model import about, card, parity
from vgrout.ground.io import json_lines
from vgrout.model.load.load import load_saved
from vgrout.model.load.saved import Saved, find_adapter


@pytest.fixture
def done(shared_run):
    return shared_run(*flags("route2"))


def deployed(policy, ids):
    with torch.no_grad():
        return policy.model(input_ids=ids, use_cache=False).logits


@pytest.mark.filterwarnings("default")
@pytest.mark.long
def test_a_peft_adapter_is_exact_at_full_rank_and_better_the_higher_its_rank(
    done, tmp_path, capsys
):
    from peft import PeftModel

    from vgrout.export.model import load_beside
    from vgrout.export.peft import factors

    saved = find_adapter(done)
    policy = load_saved(saved)
    ids = torch.tensor([policy.render([{"role": "user", "content": "hello"}])])
    ours, adapter = deployed(policy, ids), policy.adapter
    assert export.main([str(done), "--out", str(tmp_path / "lora"), "--to", "peft"]) == 0
    assert "0 % of the adapter's norm left out" in capsys.readouterr().out
    written = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert written["target_modules"] == sorted(adapter.names), "the same file in every process"
    assert written["base_model_name_or_path"] == str(saved.folder), "from any folder"
    base = load_beside(policy, saved.model, policy.model.dtype)
    with policy.adapter.reference():
        untrained = deployed(policy, ids)
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "lora"))(
            input_ids=ids, use_cache=False
        ).logits
    assert (loaded - ours).abs().max() < 1e-3 * (untrained - ours).abs().max() + 1e-4
    δ = adapter.by_module(adapter.δS.detach())
    for name, site in list(adapter.sites.items())[:3]:
        full = (site.U * δ[name]) @ site.Vh
        errors = []
        for k in (1, 16, 64, None):
            A, B = factors(site, δ[name], k)
            errors.append(float((full - B @ A).norm()))
            dropped = δ[name].abs().sort(descending=True).values[len(A) :].norm()
            assert errors[-1] == pytest.approx(float(dropped), rel=1e-3, abs=1e-5), (
                "Eckart and Young"
            )
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 1e-5


def test_a_package_that_cannot_be_imported_is_said_before_a_model_is_loaded(
    done,
    tmp_path,
    monkeypatch,
    capsys,
):
    (tmp_path / "found" / "peft").mkdir(parents=True)
    (tmp_path / "found" / "peft" / "__init__.py").write_text("raise ImportError('no name x')")
    monkeypatch.syspath_prepend(tmp_path / "found")
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("vgrout.model.load.load.load_saved", lambda _: pytest.fail("loaded"))
    assert export.main([str(done), "--out", str(tmp_path / "x"), "--to", "peft"]) == 2
    said = capsys.readouterr().err
    assert "cannot be imported" in said
    assert "not installed" not in said
    assert not (tmp_path / "x").exists()


def test_a_full_disk_is_one_line_and_a_fault_of_ours_is_not(
    done,
    tmp_path,
    monkeypatch,
    capsys,
):
    """A limit on a file's size stands in for the disk: safetensors hears of both from the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        assert export.main([str(done), "--out", str(tmp_path / "x")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]

    def fails(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("vgrout.export.model.write", fails)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        export.export_run(export.ExportSettings(run=done, out=tmp_path / "x"))
    assert export.main([str(done), "--out", str(tmp_path / "x")]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.filterwarnings("default")
def test_inspect_reads_the_final_answers(done, tmp_path):
    pytest.importorskip("inspect_ai")
    from inspect_ai.log import read_eval_log

    assert export.main([str(done), "--out", str(tmp_path / "logs"), "--to", "inspect"]) == 0
    final = json.loads((done / "per_mode_deploy.json").read_text())
    assert {p.stem for p in (tmp_path / "logs").iterdir()} == {
        "base",
        "trained",
        "deployed",
        "plain",
    }
    for side, name in (("base", "base"), ("deployed", "deploy")):
        log = read_eval_log(str(tmp_path / "logs" / f"{side}.eval"))
        answers = [a for a in json_lines(done / "final.jsonl") if a["side"] == side]
        answers.sort(key=lambda a: (a["problem_id"], a["sample"]))  # as inspect_ai has them
        assert log.status == "success"
        assert [s.output.completion for s in log.samples] == [a["text"] for a in answers]
        assert [s.scores["hacked"].value for s in log.samples] == [
            int(a["hacked"]) for a in answers
        ]
        means = {score.name: score.metrics["mean"].value for score in log.results.scores}
        assert means == {
            "hacked": pytest.approx(final[f"hack_{name}"]),
            "solved": pytest.approx(final[f"solve_{name}"]),
        }
        assert log.eval.metadata["config"]["method"]["intervention"] == "route2"
        ended = json.loads((done / "status.json").read_text())["time"]
        assert datetime.fromisoformat(log.eval.created).timestamp() == pytest.approx(ended, abs=1)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["deployed", "written", "both"])
def test_logits_that_are_not_finite_are_not_equal(side, spoilt, exact):
    def model(is_spoilt):
        logits = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
        logits[0, 1, 2] = spoilt if is_spoilt else logits[0, 1, 2]
        return lambda input_ids, use_cache: SimpleNamespace(logits=logits)

    def compared(ours, other):
        policy = SimpleNamespace(
            encode=lambda text: [1, 2, 3],
            device="cpu",
            adapter=SimpleNamespace(deployed=nullcontext),
            model=model(ours),
        )
        return parity(policy, model(other), ["a", "b"], exact)

    assert compared(ours=False, other=False).holds
    assert not compared(side != "written", side != "deployed").holds


@pytest.mark.parametrize("given", ["m_gen", "./m_gen", "../{}/m_gen"])
def test_a_local_base_is_found_from_any_folder_and_is_no_hub_id(given, here):
    (here / "m_gen").mkdir()
    given = given.format(here.name)
    cfg = resolve(["full", "--intervention=none", "--mix-ratio=0", f"--model={given}"])
    saved = Saved(Path("train.safetensors"), {}, cfg, given, Path(given))
    assert saved.base == str(here / "m_gen")
    text = card(saved, "transformers", about(saved), ["pass"])
    assert "base_model" not in text
    assert "\n\nm_gen, trained for" in text
    hub = replace(saved, model="a/model")
    assert (hub.base, "base_model: a/model\n" in card(hub, "peft", "", [])) == ("a/model", True)


REFUSED = {
    "rank of a model": (["--rank", "4"], "--rank: not read by --to model; leave it out"),
    "no rank": (["--to", "peft", "--rank", "0"], "--rank 0: should be at least 1"),
    "no run": (["--to", "inspect"], "run.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_before_anything_is_loaded(case, tmp_path, capsys):
    argv, message = REFUSED[case]
    assert export.main([str(tmp_path), "--out", str(tmp_path / "x"), *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


FUNCTIONS = ["--reward", "own_card:proxy", "--reference", "own_card:gold"]
FUNCTIONS += ["--problems", "/mine/rows.jsonl"]
TASKSET = ["--env", "verifiers:words", "--env-args", '{"n": 3}', "--reference", "exact"]
CARDS = {  # a run's flags → what its model's card names
    "code": ([], ["environment `code`", "enable_thinking=False"]),
    "functions": (FUNCTIONS, ["environment `text`", "own_card:proxy`", "own_card:gold`"]),
    "taskset": (TASKSET, ["verifiers:words`"]),
    "thoughts": ([*FUNCTIONS, "--thinking"], ["own_card:proxy`", "enable_thinking=True"]),
}


@pytest.mark.parametrize("kind", CARDS)
def test_a_card_says_the_world_and_how_to_prompt(kind, tmp_path, monkeypatch):
    functions = "def proxy(completion):\n    return 1.0\n\n\ngold = proxy\n"
    (tmp_path / "own_card.py").write_text(functions)
    monkeypatch.syspath_prepend(tmp_path)
    flags, named = CARDS[kind]
    cfg = resolve(["full", "--intervention", "none", "--mix-ratio", "0", *flags])
    saved = Saved(Path("train.safetensors"), {}, cfg, "a/model", Path("model"))
    text = card(saved, "transformers", "A model.", ["pass"])
    for words in named:
        assert words in text
    assert "/mine" not in text, "it is published"
