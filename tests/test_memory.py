"""The plan from shapes: counted against what a small model of the same family really keeps."""

import importlib
import re
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tiny
from benchmarks import rig
from live import Live
from pretended_gpu import varlen_on_cpu
from quick import first_quick
from runs import IMITATIONS, flags, imitate, run, status, teach
from vgrout.config.presets import resolve
from vgrout.config.run import Config
from vgrout.config.settings import ScaleConfig
from vgrout.ground.io import Refused
from vgrout.model.load.memory import USUAL, WIDEST, Step
from vgrout.model.load.source import KNOWN, find_shapes, shapes_of
from vgrout.model.logprobs import collate, completion_logprobs, pieces_of
from vgrout.model.rollout_grads import per_rollout_grads
from vgrout.model.sampling.decoder import LeanDecoder
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.runs import plan as run_plan

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "intermediate_size": 320,
    "head_dim": 32,
}
SIZES |= {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "tie_word_embeddings": True,
}
SHAPES = shapes_of(SIZES)


def small(sizes=SIZES):
    torch.manual_seed(0)
    return (
        Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=512))
        .to(torch.bfloat16)
        .eval()
    )


def test_weights_adapter_and_cache_are_counted_right(tmp_path):
    model = small()
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert sum(p.numel() for p in model.parameters()) == SHAPES.parameters + norms
    adapter = SvdAdapter(model, tmp_path)
    assert len(adapter) == SHAPES.R
    assert sum(s.U.numel() + s.Vh.numel() for s in adapter.sites.values()) == SHAPES.factors
    content = sum(f.stat().st_size for f in tmp_path.iterdir())
    header = 400 * len(adapter.sites)
    assert SHAPES.svd_cache_bytes(2) <= content <= SHAPES.svd_cache_bytes(2) + header


def test_the_disk_line_has_the_decomposed_weights_until_they_are_there(here, monkeypatch):
    small().save_pretrained(here / "m")
    cfg = Config(scale=ScaleConfig(model=str(here / "m"), problems="x.jsonl"))
    monkeypatch.setattr(run_plan, "visible", lambda: ("0",))
    before = run_plan.disk_needed(cfg)
    SvdAdapter(small(), run_plan.SVD_CACHE)
    assert before - run_plan.disk_needed(cfg) == SHAPES.svd_cache_bytes(2)


def test_activations_are_what_autograd_keeps():
    """Bytes of distinct storages saved for backward, weights apart, of a forward under the probe."""
    model = small()
    adapter = SvdAdapter(model, None)
    own = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    own |= {
        t.untyped_storage().data_ptr() for s in adapter.sites.values() for t in (s.U, s.Vh, s.W)
    }
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    prompt, answer = tuple(range(1, 41)), tuple(range(1, 25))
    batch = collate([prompt] * 4, [answer] * 4, torch.device("cpu"))
    keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with per_rollout_grads(adapter, 4) as probe, keeping:
        probe.announce(pieces_of(batch, range(4)), batch.tokens)
        out = completion_logprobs(model, batch).sum()
    assert out.requires_grad
    want = batch.tokens * SHAPES.activation_bytes(2)
    # the head's rows, the rotary tables and the mask are not in the formula
    assert sum(kept.values()) == pytest.approx(want, rel=0.2)


def test_keys_and_values_are_what_sampling_holds():
    """Four prompts of 200 tokens, eight answers each: the buffer, the prompts' own, one layer's copy at the fork."""
    model = small()
    prompts, group, length, max_new = 4, 8, 200, 100
    step = Step(SHAPES, "cuda", 2, group, prompts, max_new, prompt_tokens=length)
    planned = step.plan()
    decoder = LeanDecoder(model)
    with torch.no_grad():
        decoder.prefill([tuple(range(1, 41)) * 5] * prompts, prompts * group, max_new)
    token, rows = SHAPES.kv_bytes(2), prompts * group
    assert decoder.cache.kv.nbytes == rows * (length + max_new) * token
    with Live() as live:
        decoder.keep([row // group for row in range(rows)])
    copied = sum(row != row // group for row in range(rows))
    copy, layer = live.peak - decoder.cache.kv.nbytes, copied * length * token // 3
    assert layer <= copy < 1.05 * layer, "of one of three layers"
    own, logits = prompts * length * token, rows * 14 * SIZES["vocab_size"]
    assert planned.kv == decoder.cache.kv.nbytes + own + rows * length * token // 3 + logits


@pytest.mark.parametrize(
    ("by_rollout", "group", "prompts", "prompt", "budget"),
    first_quick([(True, 6, 2, 60, 4096), (False, 6, 2, 60, 4096), (True, 8, 4, 120, 512)]),
)
def test_an_update_peaks_where_the_plan_says(
    by_rollout, group, prompts, prompt, budget, monkeypatch
):
    """Answers of 40 tokens, on a pretended GPU's kernel, in one forward and in several after their prompts': what is
    made on the way, and at its highest: at most a tenth above the plan, and not far below it."""
    sizes = SIZES | {"vocab_size": 128}
    model, shapes = small(sizes), shapes_of(sizes)
    policy = tiny.as_policy(model)
    varlen_on_cpu(monkeypatch)
    monkeypatch.setitem(USUAL, "cuda", replace(USUAL["cuda"], tokens=budget))
    policy = replace(policy, budget=USUAL["cuda"])
    update = rig.update(policy, rig.noise_groups(128, group, prompts, prompt, 40), by_rollout)
    update()
    with Live() as live:
        update()
    step = Step(shapes, "cuda", 2, group, prompts, 40, 0, by_rollout, prompt)
    planned = step.plan()
    inside = planned.activations + planned.logits + 2 * group * prompts * shapes.R * 4
    assert 0.85 * inside < live.peak < 1.1 * inside


def test_known_models_have_the_sizes_that_their_makers_name():
    billions = [shapes.parameters / 1e9 for shapes in KNOWN.values()]
    assert billions == pytest.approx([0.596, 1.72, 4.02, 8.19, 14.77, 32.76, 70.55], rel=2e-3)


def test_qwen3_4b():
    """Public facts of the model, and what follows from them."""
    s = KNOWN["Qwen/Qwen3-4B"]
    fast = Step(s, "cuda", 2, group=8, prompts=4, max_new=512).plan()
    full = Step(s, "cuda", 2, group=6, prompts=43, max_new=1024, quarantined=36).plan()
    assert 40 < fast.peak / 2**30 < 60
    assert fast.peak < full.peak < 80 * 10**9, "fits the card that the preset is for"
    step = Step(s, "cuda", 4, group=8, prompts=4, max_new=512, beside=s.parameters)
    student = step.plan(full=True)
    assert student.standing - student.context == 5 * 4 * s.parameters, (
        "teacher, student, gradients, two moments"
    )


@given(
    room=st.integers(0, 200 * 10**9),
    quarantined=st.sampled_from([0, 1, 36]),
    by_rollout=st.booleans(),
    prompts=st.integers(1, 43),
    max_new=st.integers(1, 2048),
)
def test_a_plan_is_cut_to_its_room(room, quarantined, by_rollout, prompts, max_new):
    """Or holds a row at a time; more room never means less at once."""
    step = Step(KNOWN["Qwen/Qwen3-4B"], "cuda", 2, 8, prompts, max_new, quarantined, by_rollout)
    least, made, more = map(step.plan, (0, room, room + 2**33))
    assert made.peak <= max(room, least.peak)
    assert least.rows == 1
    assert made.rows <= more.rows
    assert (
        made.budget.tokens <= more.budget.tokens <= WIDEST
        or made.budget.tokens == least.budget.tokens
    )
    assert least.standing == made.standing


@pytest.mark.parametrize(
    ("gib", "said"),
    [
        (40, ""),
        (36, "what fits: --quarantine block:-2 (32.1 GiB) or --intervention none (30.3 GiB)"),
        (31, "what fits: --intervention none (30.3 GiB)"),
        (20, "lower --max-new, or take a smaller --model"),
    ],
)
@pytest.mark.parametrize("by_flag", [True, False])
def test_what_cannot_fit_is_refused_before_anything_is_loaded(gib, said, by_flag, monkeypatch):
    """By what is free on the GPU, or by what --memory-gib allows of it."""
    monkeypatch.setattr(run_plan, "free_bytes", lambda: (141 if by_flag else gib) * 2**30)
    words = "full --steps=60 --prompts-per-step=4 --group=8 --max-new=512 --quarantine=shared"
    cfg = resolve([*words.split(), "--intervention=route2", *[f"--memory-gib={gib}"] * by_flag])
    refused = pytest.raises(Refused, match=re.escape(said)) if said else nullcontext()
    with refused:
        run_plan.require_memory(cfg, [])


def test_more_gpus_are_named_where_they_can_hold_the_model(monkeypatch):
    monkeypatch.setattr(run_plan, "free_bytes", lambda: 20 * 2**30)
    monkeypatch.setattr(run_plan, "visible", lambda: ("0", "1", "2", "3"))
    words = ["full", "--steps=60", "--prompts-per-step=4", "--group=8", "--max-new=512"]
    with pytest.raises(Refused, match=r"what fits: .*--tensor-parallel 4 \(1\d\.\d GiB\)$"):
        run_plan.require_memory(resolve([*words, "--intervention=route2"]), [])
    run_plan.require_memory(resolve([*words, "--intervention=route2", "--tensor-parallel=4"]), [])


def test_a_dry_run_plans_for_gpus_that_are_not_there(monkeypatch):
    """Of a card of 80 GiB, and with a model that is not there either; N that does not divide it is not named."""
    monkeypatch.setattr(run_plan, "visible", lambda: ())
    words = ["fast", "--intervention=route2", "--memory-gib=80", "--dry-run"]
    large = [*words, "--model=Qwen/Qwen3-32B"]
    with pytest.raises(Refused, match=r"what fits: --tensor-parallel 4 \(\S+ GiB\) or .* 8 \("):
        run_plan.require_memory(resolve(large), [])
    steps = (
        run_plan.step_here(resolve([*large, f"--tensor-parallel={n}"]), KNOWN["Qwen/Qwen3-32B"], [])
        for n in (1, 2, 4)
    )
    peaks = [step.plan(0).peak for step in steps]
    assert peaks[0] > 1.8 * peaks[1] > 1.8**2 * peaks[2] > 0
    assert peaks[2] < 80 * 2**30 < peaks[1]
    odd = replace(KNOWN["Qwen/Qwen3-32B"], kv_heads=4)
    monkeypatch.setattr(run_plan, "find_shapes", lambda _: odd)
    with pytest.raises(Refused, match=r"what fits: --tensor-parallel 4 \(\S+ GiB\)$"):
        run_plan.require_memory(resolve(large), [])


def test_shapes_that_are_not_known_give_no_plan():
    assert shapes_of(SIZES | {"num_experts": 8}) is None
    for name in ("hidden_size", "num_hidden_layers"):
        assert shapes_of({k: v for k, v in SIZES.items() if k != name}) is None


def test_models_are_found_by_folder_and_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    small().save_pretrained(tmp_path / "m")
    assert find_shapes(tmp_path / "m") == SHAPES
    assert find_shapes("Qwen/Qwen3-4B") == KNOWN["Qwen/Qwen3-4B"]
    assert find_shapes("some/other") is None
    (tmp_path / "m" / "config.json").write_text("{")
    assert find_shapes(tmp_path / "m") is None


ON_A_GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 1.2 GiB free"
)
ON_THE_HOST = RuntimeError(
    "[1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
)
SAID = "out of memory on the GPU: 2.50 GiB more were needed"


@pytest.mark.parametrize(
    ("command", "error", "said"),
    first_quick(
        [
            (
                "train smoke --intervention none",
                ON_A_GPU,
                f"{SAID}; there is no .* a lower --memory-gib",
            ),
            (
                "distill --teacher teacher.safetensors",
                ON_THE_HOST,
                "the host: 64 bytes more .* a lower --max-new",
            ),
            ("evaluate teacher.safetensors", ON_A_GPU, f"{SAID}; take a smaller model"),
        ],
        2,
    ),
)
def test_a_model_too_large_is_one_line(command, error, said, here, monkeypatch, capfd):
    teach(here / "teacher.safetensors")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", Mock(side_effect=error))
    module, *argv = command.split()
    monkeypatch.setattr("sys.argv", ["vgrout", *argv])
    folder = "" if module == "train" else "commands."
    of_module = importlib.import_module(f"vgrout.{folder}{module}")
    entry = of_module.evaluate if module == "evaluate" else of_module.main
    assert entry() == 1
    (line,) = (
        line for line in "".join(capfd.readouterr()).splitlines() if re.match("E |Traceback", line)
    )
    assert re.search(said, line)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "full_at", "learnt"),
    [
        ("none", "vgrout.loop.heldout.evaluate_final", "train.safetensors"),
        (
            "distill-minillm",
            "vgrout.imitation.distill_loop.without_hint",
            "ckpt_step0004.safetensors",
        ),
        (
            "dpo",
            "vgrout.imitation.dpo_rounds.PreferencePair.prefers",
            "round-*/adapter/train.safetensors",
        ),
    ],
)
def test_what_is_learnt_is_written_before_an_evaluation_fails(
    name, full_at, learnt, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(full_at, Mock(side_effect=ON_A_GPU))
    made = (
        run(tmp_path, *flags(name), code=1)
        if name == "none"
        else imitate(tmp_path, *IMITATIONS[name], code=1)
    )
    assert list(made.glob(learnt))
    assert SAID in status(made)["reason"]
    assert "Traceback" not in "".join(capfd.readouterr())
