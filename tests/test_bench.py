"""The benches' arithmetic, and that what they compare does the same work. Their figures are no test's business."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny
from benchmarks import cost, gpu, rig, trl_peer
from benchmarks.__main__ import PAGE, main
from benchmarks.flops import Shape, contraction_flops, decode_bytes, forward_flops, head_flops, kv_bytes, update_flops
from benchmarks.growth import figure
from benchmarks.levers import _dead, low_rank
from benchmarks.report import Ratio, Times, at_least, at_most, interleaved, peak_memory, slope
from benchmarks.rows import Report, Row
from benchmarks.update import full_logits, gradients, plain

SHAPE = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16}


def test_flops_are_torchs_own_count() -> None:
    """torch counts every product of a forward (no sharing, one row, last token not read) with plain attention."""
    model = tiny.tiny("qwen3")
    shape = Shape.of(model)
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_dim, shape.itemsize) == (2, 64, 2, 16, 4)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(3, 23)[None], use_cache=False)
    total = counter.get_total_flops()
    n, head = 20, 2 * 64 * 97 * 20
    square = 4 * 2 * 4 * 16 * n * n  # eager attention computes the upper triangle too
    counted = forward_flops(shape, [(8, [13])], share=True)
    assert counted - shape.attention(20, 0) == total - head - square
    assert shape.attention(20, 0) == 4 * 2 * 4 * 16 * 20 * 21 // 2
    assert shape.attention(12, 8) + shape.attention(8, 0) == shape.attention(20, 0)


@pytest.mark.parametrize("tokens", [24, 600])
def test_a_contraction_costs_what_torch_counts(tokens: int) -> None:
    """In the order that the adapter takes: token by token for few, by way of each row's sum for many."""
    adapter = tiny.policy().adapter
    site, half = next(iter(adapter.sites.values())), tokens // 2
    with adapter.per_rollout_grads(2) as collected, FlopCounterMode(display=False) as counter:
        collected.tokens([(0, slice(0, half)), (1, slice(half, tokens))])
        d_out, d_in = site.W.shape
        collected.adder(site)(torch.randn(1, tokens, d_in), torch.randn(1, tokens, d_out))
    r = len(site.Vh)
    adding_up = 0 if tokens > 2 * max(site.W.shape) else 2 * 2 * tokens * r
    assert contraction_flops(d_out, d_in, r, tokens, 2) == counter.get_total_flops() - adding_up


def test_sharing_saves_the_copies_of_the_prompt_and_nothing_else() -> None:
    shape = Shape(layers=2, hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, vocabulary=97, itemsize=4)
    groups = [(30, [5, 9, 12])]
    saved = forward_flops(shape, groups, share=False) - forward_flops(shape, groups, share=True)
    assert saved == 2 * (2 * shape.linears * 30 + shape.attention(30, 0))
    assert head_flops(shape, groups) == 2 * 64 * 97 * 26
    assert update_flops(shape, groups, share=True) > 3 * forward_flops(shape, groups, share=True)
    assert kv_bytes(shape) == 2 * 2 * 2 * 16 * 4
    assert decode_bytes(shape, 3, 10) == (shape.linears + 64 * 97) * 4 + 30 * kv_bytes(shape)


def test_ratios_are_of_pairs() -> None:
    ratio = Ratio.of([2.0, 9.0, 8.0], [1.0, 3.0, 2.0])
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 2.5, 3.5)
    assert at_least("b", "w", "a", ratio, 3).reached
    assert not at_least("b", "w", "a", ratio, 3.1).reached
    assert at_most("b", "w", "a", ratio, 3).verdict == "reached"
    assert at_most("b", "w", "a", ratio, 2.9).verdict == "missed"
    assert Row("b", "w", "a", "1").verdict == ""
    assert "| missed" in Report([at_most("b", "w", "a", ratio, 2.9)]).markdown()


def test_contestants_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    times = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, "turns")
    assert calls == ["a", "b"] * 3
    assert [len(times[k].wall) for k in "ab"] == [2, 2]
    assert Times([1.0, 3.0, 2.0], []).median == 2.0


def test_peak_memory_sees_what_was_freed_again() -> None:
    def run() -> None:
        x = torch.ones(2**24)  # 64 MiB
        x.add_(1)

    peak = peak_memory(run)
    assert peak is None or 60 * 2**20 < peak < 90 * 2**20


def test_slope_of_a_square() -> None:
    assert slope([1, 2, 4, 8, 16], [5 + x * x * 100 for x in (1, 2, 4, 8, 16)]) == pytest.approx(2, abs=0.01)


def test_the_peers_do_the_same_work() -> None:
    """Full logits give the loss's gradient of ours; the plain model is left frozen, without gradients."""
    policy = rig.random_policy(**SHAPE)
    groups = rig.noise_groups(97, 4, 2, 12, 6)
    rollouts = [r for g in groups for r in g.rollouts]
    plain(policy, rollouts)
    full_logits(policy, rollouts)
    assert not any(p.requires_grad or p.grad is not None for p in policy.model.parameters())
    with torch.no_grad():
        policy.adapter.δS.normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    policy.adapter.merge()
    merged = torch.cat([g.flatten() for of in gradients(policy, groups, "group", "padded", 6) for g in of.values()])
    with low_rank(policy):
        apart = torch.cat([g.flatten() for of in gradients(policy, groups, "group", "padded", 6) for g in of.values()])
    assert (merged - apart).norm() <= 1e-4 * merged.norm()


def test_the_gpus_bookkeeping_on_a_tiny_shape() -> None:
    load = gpu.Load(group=3, prompts=2, prompt=10, answer=6)
    assert load.lengths == [(10, [6, 6, 6])] * 2
    report = gpu.measure(SHAPE, load, "cpu", torch.float32, 1)
    assert [r.what for r in report.rows] == ["update, none, sdpa", "update, route2, sdpa", "sampling, sdpa"]
    assert all("%" in r.figure and r.verdict in ("reached", "missed", "") for r in report.rows)
    U, S, Vh = gpu.orthogonal(torch.zeros(5, 8))
    assert torch.allclose(U.mT @ U, torch.eye(5), atol=1e-5)
    assert torch.allclose(Vh @ Vh.mT, torch.eye(5), atol=1e-5)
    assert len(S) == 5


def test_without_a_gpu_its_bench_is_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["gpu"]) == 2
    assert capfd.readouterr().err.splitlines() == [
        "E gpu: this machine has no CUDA device that torch can use; run this bench on one with 40 GB"
    ]


@pytest.mark.parametrize("argv", [["--problems", "nowhere.jsonl"], ["grading", "--problems", "nowhere.jsonl"]])
def test_a_missing_file_is_refused_before_anything_runs(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capfd.readouterr().err == "E --problems nowhere.jsonl: no such file\n"


def test_the_real_bench_wants_a_model_that_is_there(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["real", "--model", str(tmp_path)]) == 2
    assert "without config.json" in capfd.readouterr().err


def test_any_models_answers_differ_in_reward() -> None:
    assert {rig.differing(f"answer {i}") for i in range(30)} == {0.0, 0.5, 1.0}


def test_a_page_without_a_folder_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "no" / "page.md")]) == 2
    assert "no folder no/ here" in capfd.readouterr().err


def test_trl_is_left_out_in_one_line_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(trl_peer.Missing, match="rows are left out: trl is not installed; `uv run"):
        trl_peer.libraries()


def test_the_peers_reward_parses_the_answer() -> None:
    good, bad = "x\n```python\ndef f():\n    return 1\n```", "```python\ndef f(:\n```"
    assert trl_peer.parses([[{"content": t}] for t in (good, bad, "no code")]) == [1.0, 0.0, 0.0]


def test_figures_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "f" / "g.png"
    figure(path, "G", {"a": [(4, 0.1, 2**20), (8, 0.2, 2**21)], "b": [(4, 0.1, None), (8, 0.2, None)]})
    assert path.stat().st_size > 1000


def test_every_bench_of_the_page_has_a_quick_form() -> None:
    assert {"step", "update", "sampling", "grading", "memory", "sharing", "levers", "growth"} <= PAGE.keys()
    assert all("quick" in (bench.__doc__ or "") for bench in PAGE.values())


def test_dead_groups_are_dead() -> None:
    (group,) = rig.noise_groups(97, 4, 1, 5, 3)
    assert group.has_signal
    assert not _dead(replace(group)).has_signal


def test_the_cost_page_is_what_the_program_says() -> None:
    """And the program's sums are those of a calculation by hand, to what it leaves out."""
    page = Path(__file__).resolve().parents[1] / "notes" / "cost.md"
    assert cost.filled(page.read_text()) == page.read_text(), "run `python -m benchmarks cost --write`"
    h100, use = cost.DEVICES[0], cost.Assumed()
    none, route2 = (cost.step_seconds("fast", arm, h100, use) for arm in ("none", "route2"))
    # 512 decoding steps, each reading 8.04 GB of weights and 28 rows of 628 tokens at 147 kB
    read = 2 * 4.02e9 + 28 * 628 * 147_456
    assert none["sampling: decoding"] == pytest.approx(512 * read / (0.6 * 3.35e12), rel=0.01)
    # forward and backward of 2 of 4 groups, 6 operations a weight and token; attention is what is left out, the head's
    # 0.39e9 weights see answers alone
    tokens = 2 * (500 + 8 * 256)
    by_hand = 6 * 3.63e9 * tokens + 4 * 0.39e9 * 2 * 8 * 256
    assert none["update"] == pytest.approx(by_hand / (0.4 * 989e12), rel=0.06)
    assert route2["update"] > 1.4 * none["update"]  # a copy of the prompt for every rollout
    assert cost.run_hours("fast", "none", h100, use) * 3600 > 100 * sum(none.values())


def test_every_lever_on_paper_saves_something() -> None:
    h100 = cost.DEVICES[0]
    for preset in ("fast", "full"):
        whole = cost.study_hours(preset, h100, cost.Assumed())
        for name, fields in cost.LEVERS.items():
            assert cost.study_hours(preset, h100, replace(cost.Assumed(), **fields)) > whole, name  # ty: ignore
        for name, fields in cost.TO_COME.items():
            assert cost.study_hours(preset, h100, replace(cost.Assumed(), **fields)) < whole, name  # ty: ignore
        ranks = [sum(cost.step_seconds(preset, "route2", h100, cost.Assumed(), n).values()) for n in (1, 2, 4, 8)]
        assert ranks == sorted(ranks, reverse=True)
