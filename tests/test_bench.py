"""The benches' arithmetic, and that what they compare does the same work. Their figures are no test's business."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, real, rig, step, trl_peer
from benchmarks.gpu_peer import Contestant
from benchmarks.measure import Figure, Ratio, interleaved, page
from benchmarks.rig import Load
from pretended_gpu import pretended_gpu
from vgrout.ground import embedded
from vgrout.model.sampling import decoder as decoders

SHAPE = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_ratios_are_of_pairs():
    ratio = Ratio.of([2.0, 9.0, 8.0], [1.0, 3.0, 2.0])
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 2.5, 3.5)
    assert ratio.at_least("w", "a", 3).reached
    missed = ratio.at_least("w", "a", 3.1)
    assert not missed.reached
    assert "| missed" in page([missed, Figure("v", "a", "1")], "a note").splitlines()[2]


def test_contestants_take_turns_and_the_first_round_does_not_count():
    calls = []
    seconds = interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, "turns"
    )
    assert calls == ["a", "b"] * 3
    assert [len(seconds[k]) for k in "ab"] == [2, 2]


def test_a_policy_of_random_weights_can_be_sampled():
    load = Load(group=3, prompts=2, prompt=10, answer=6)
    U, S, Vh = gpu.orthogonal(torch.zeros(5, 8))
    assert torch.allclose(U.mT @ U, torch.eye(5), atol=1e-5)
    assert torch.allclose(Vh @ Vh.mT, torch.eye(5), atol=1e-5)
    assert len(S) == 5
    policy = gpu.random_policy(SHAPE, "cpu", torch.float32)
    generate = real.generating(policy, load)
    assert "generate" in real.of_sampling(policy, 1, load).against
    assert generate() is None


def own_process(contestant):
    """The second way of setting TRL, which computes activations again, does not fit."""
    if contestant.checkpointing:
        raise RuntimeError("out of memory")
    return 8.0, 2**31


@pytest.mark.long
def test_trls_step_is_taken_in_a_process_of_its_own(monkeypatch):
    """Of a tiny model here; the seconds are those of its steps, after the first."""
    pytest.importorskip("trl", reason="comes with the extra bench, which tests go without")
    load = Load(group=2, prompts=2, prompt=10, answer=6)
    contestant = Contestant(SHAPE, load, rows=2)
    seconds, _ = gpu.in_own_process(contestant)
    assert 0 < seconds < 60
    broken = replace(contestant, rows=3)  # TRL asks for whole groups
    with pytest.raises(RuntimeError, match="divisible"):
        gpu.in_own_process(broken)


@pytest.mark.slow
def test_the_bench_of_a_gpu_from_end_to_end(monkeypatch, capfd, warnings):
    """On a pretended one; what fails is a line among the others."""
    made, named = rig.random_model, SimpleNamespace(name="pretended", total_memory=0)
    monkeypatch.setattr(rig, "random_model", lambda device, **how: made(**how).to(device))
    monkeypatch.setattr(decoders, "FUSE_BELOW", 0)
    monkeypatch.setattr(gpu, "QWEN3_4B", SHAPE)
    monkeypatch.setattr(gpu, "QUICK", Load(group=3, prompts=2, prompt=10, answer=6))
    monkeypatch.setattr(gpu, "find_spec", lambda library: None if library == "vllm" else library)
    monkeypatch.setattr(gpu, "in_own_process", own_process)
    rows = [{"hack_s": [1, 8], "rew": 0.5, "gn": gn} for gn in (0.5, 0.25, None)]
    monkeypatch.setattr(gpu, "mini", lambda tag, **how: rows[: {"gpu": 3, "cpu": 2}[tag]])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: named)
    with pretended_gpu():
        gpu.run(quick=True)
    of = {
        f["what"] + (", TRL" if f["against"].startswith("TRL") else ""): f
        for f in map(json.loads, re.findall(r"^{.*}$", capfd.readouterr().err, re.MULTILINE))
    }
    assert of["TRL, transformers, 6 rows a forward"]["figure"] == "8.00 s a step, peak 2.0 GiB"
    assert "out of memory" in of["TRL, transformers, 6 rows a forward, checkpointing"]["figure"]
    assert re.fullmatch(r"\d+\.\d\d s: sampling .*, update .*", of["a step, none"]["figure"])
    assert "× (" in of["a step, route2, TRL"]["figure"]
    assert of["mini, fp32, rows"]["figure"] == "2 of 3 steps alike; norms within 0e+00"
    assert re.fullmatch(r"relative difference \de-03", of["logits, CUDA graphs"]["figure"]), (
        "bf16, two ways of one step"
    )
    assert sum("tokens / s" in f["figure"] for f in of.values()) == 4
    assert all(
        of[what]["reached"]
        for what in ("gradients, packed", "SDPA's kernels", "host waits, update")
    )
    assert [what for what, f in of.items() if "failed" in f["figure"]] == [
        "TRL, transformers, 6 rows a forward, checkpointing",
        "mini, killed",
    ]


@pytest.mark.long
def test_a_run_takes_its_steps_when_asked(here):
    """And learns from the problems that the peer gets."""
    argv = rig.command("none", "--threads=1", "--max-new=8")
    run = rig.Turns("none", argv)
    try:
        assert not (run.path / "steps.jsonl").exists() or not (run.path / "steps.jsonl").read_text()
        assert run.take(2) > 0
        assert len((run.path / "steps.jsonl").read_text().splitlines()) == 2
        assert run.peak > 2**27
    finally:
        run.close()
    rollouts = (run.path / "rollouts.jsonl").read_text()
    assert all(f'"problem_id": {p.id},' in rollouts for step in rig.problems(argv, 2) for p in step)
    with pytest.raises(RuntimeError, match="Unrecognized options"):
        rig.Turns("broken", ["mini", "--no-such-flag"])


@pytest.mark.parametrize(
    "bench",
    [lambda: step.run(quick=True), lambda: real.run(embedded.MODEL_DIR, "fp32")],
    ids=["step", "real"],
)
def test_no_run_waits_for_a_peer_that_fell_over(bench, here, monkeypatch):
    closed = []
    own = lambda name, _: SimpleNamespace(take=lambda _: 1.0, close=lambda: closed.append(name))  # noqa: E731
    monkeypatch.setattr(rig, "Turns", own)
    monkeypatch.setattr(trl_peer, "libraries", dict)
    monkeypatch.setattr(trl_peer, "measure", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench()
    assert {*closed} == {"none", "route2"}
