"""The expected seconds of a step: against every step on record, by properties, and as a dry run prints them."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgrout.config.presets import resolve
from vgrout.model.shapes import BF16, FP32, KNOWN, Shapes
from vgrout.model.step_time import (
    BY_CLIENT_NAME,
    COMPARED,
    Card,
    Load,
    StepTime,
    rates_apply,
    sampling_seconds,
    step_time,
    update_seconds,
)
from vgrout.runs.plan import step_lines
from vgrout.train import main

QWEN3_4B = KNOWN["Qwen/Qwen3-4B"]
H200 = BY_CLIENT_NAME["NVIDIA H200"]
NONE = Load(prompts=4, group=8, prompt=700, answer=512, by_rollout=False)
ROUTE2 = replace(NONE, by_rollout=True)
FULL = Load(prompts=43, group=6, prompt=500, answer=1024, by_rollout=True)

# Seconds on H200s, from notes/benchmarks.md: which part, of which load, what was measured. Host B is slower than
# host A, and all but `wide` are with forward passes of 4,096 tokens.
RECORDED = {
    "wide: none, step": ("total", NONE, 6.2),
    "wide: route2, step": ("total", ROUTE2, 7.3),
    "wide: none, update": ("update", NONE, 1.79),
    "wide: route2, update": ("update", ROUTE2, 2.92),
    "wide: sampling": ("sampling", NONE, 4.43),
    "A: none, update": ("update", NONE, 1.70),
    "A: route2, update": ("update", ROUTE2, 2.92),
    "A: sampling": ("sampling", NONE, 3.82),
    "A: fast, route2, step": ("total", ROUTE2, 7.6),
    "B: route2, update": ("update", ROUTE2, 4.10),
    "B: sampling": ("sampling", NONE, 4.07),
    "B: fast, route2, step": ("total", ROUTE2, 9.0),
    "B: full, route2, step": ("total", FULL, 86.0),
    "B: full, route2, sampling": ("sampling", FULL, 34.0),
    "B: full, route2, update": ("update", FULL, 52.0),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_steps_on_record(name: str) -> None:
    part, load, measured = RECORDED[name]
    estimate: StepTime = step_time(H200, QWEN3_4B, load, rows=load.answers)
    ratio = getattr(estimate, part) / measured
    if name.startswith("wide"):  # forward passes as they are now
        assert 0.9 <= ratio <= 1.1
    elif part == "total":
        assert 0.7 <= ratio <= 1.1
    else:
        assert 0.6 <= ratio <= 1.1


shapes = st.builds(
    Shapes,
    layers=st.integers(1, 80),
    hidden=st.integers(64, 8192),
    mlp=st.integers(64, 30_000),
    heads=st.integers(1, 64),
    kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from([64, 128, 256]),
    vocab=st.integers(100, 200_000),
    tied=st.booleans(),
)
loads = st.builds(
    Load,
    prompts=st.integers(1, 64),
    group=st.integers(1, 32),
    prompt=st.integers(1, 4000),
    answer=st.integers(1, 4000),
    by_rollout=st.booleans(),
    updates=st.integers(1, 4),
    reference=st.booleans(),
)
cards = st.builds(
    Card,
    st.just("a card"),
    st.just(80),
    bandwidth=st.floats(1e11, 1e13),
    products=st.floats(1e13, 1e16),
)


@given(cards, shapes, loads, st.integers(1, 2000), st.integers(0, 8), st.data())
def test_more_work_is_never_faster_and_a_faster_card_never_slower(
    card: Card, shapes: Shapes, load: Load, rows: int, workers: int, data: st.DataObject
) -> None:
    def seconds(card: Card, load: Load, rows: int = rows) -> float:
        return step_time(card, shapes, load, rows=rows, workers=workers).total

    took = seconds(card, load)
    assert took > 0
    grown = data.draw(st.sampled_from(["prompts", "group", "prompt", "answer", "updates"]))
    more = replace(load, **{grown: getattr(load, grown) + data.draw(st.integers(1, 100))})
    assert seconds(card, more) >= took
    faster = data.draw(st.sampled_from(["bandwidth", "products"]))
    factor = data.draw(st.floats(1, 10))
    assert seconds(replace(card, **{faster: factor * getattr(card, faster)}), load) <= took
    assert seconds(card, load, rows + data.draw(st.integers(1, 100))) <= took * (1 + 1e-9)
    of_sums, of_rollouts = (replace(load, by_rollout=own) for own in (False, True))
    assert update_seconds(card, shapes, of_rollouts) >= update_seconds(card, shapes, of_sums)
    assert sampling_seconds(card, shapes, of_sums, rows) == sampling_seconds(
        card, shapes, of_rollouts, rows
    )


def test_rates_apply_near_what_was_measured_alone() -> None:
    small = Shapes(30, 576, 1536, 9, 3, 64, 49_152, tied=True)
    large = Shapes(80, 8192, 29_568, 64, 8, 128, 152_064, tied=False)
    few = replace(NONE, prompts=1, group=2, prompt=100, answer=64)
    assert rates_apply(QWEN3_4B, BF16, NONE)
    assert not rates_apply(QWEN3_4B, FP32, NONE)
    assert not rates_apply(QWEN3_4B, BF16, few)
    assert not rates_apply(small, BF16, NONE)
    assert not rates_apply(large, BF16, NONE)


# ── as a dry run prints it


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], None]:
    """Sets the kind of this machine's card, and its free MiB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(name: str, free: object) -> None:
        client = tmp_path / "bin" / "nvidia-smi"
        client.parent.mkdir()
        client.write_text(
            f'#!/bin/sh\ncase "$*" in -L) echo "GPU 0: {name} (UUID: GPU-0a)";; *=name*) echo "{name}";; '
            f'*) echo "{free}";; esac\n'
        )
        client.chmod(0o755)
        monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")

    return put


def table(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """The lines of a dry run about seconds."""
    capsys.readouterr()
    assert main([*argv, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    begins = [i for i, line in enumerate(lines) if line.startswith("seconds ")]
    if not begins:
        return []
    found = [lines[begins[0]]]
    for line in lines[begins[0] + 1 :]:
        if not line.startswith(" "):
            break
        found.append(line)
    return found


def row(lines: list[str], card: str) -> list[str]:
    (found,) = [line for line in lines if line.strip().startswith(card)]
    return found.split()


def test_a_dry_run_says_how_long_a_step_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    route2 = table(capsys, "fast", "--intervention=route2")
    assert max(map(len, route2)) <= 80
    text = " ".join(" ".join(route2).split())
    assert "estimated" in text
    assert "H200" in text
    assert "nothing was measured on other cards" in text
    assert "RTX 4090, 24 GB does not hold the run: 22.4 of 38.7 GiB" in text
    none = table(capsys, "fast", "--intervention=none")
    for card in COMPARED[1:]:
        seconds = [float(row(lines, card.name)[-4]) for lines in (none, route2)]
        assert 1 < seconds[0] < seconds[1] < 60
    assert not table(capsys, "mini", "--intervention=none")


def test_the_card_that_is_here_has_a_row(
    gpu: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu("NVIDIA H200", 140_000)
    lines = table(capsys, "fast", "--intervention=route2")
    sampling, _, update, *_ = row(lines, "H200, here")[2:]
    estimate = step_time(H200, QWEN3_4B, replace(ROUTE2, prompt=500), rows=32)
    assert (sampling, update) == (f"{estimate.sampling:.1f}", f"{estimate.update:.1f}")
    # the other rows do not depend on this process's limit
    bound = table(capsys, "fast", "--intervention=route2", "--memory-gib=40")
    assert row(bound, "L40S") == row(lines, "L40S")
    # shapes for which the rates were not measured
    assert not table(capsys, "mini", "--intervention=none", "--dtype=bf16")
    assert not table(capsys, "fast", "--intervention=none", "--dtype=fp32")
    assert not table(capsys, "fast", "--intervention=none", "--max-new=16")


def test_a_card_that_is_here_and_full_does_not_hold_the_run(
    gpu: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu("NVIDIA A100-SXM4-80GB", 9_000)
    found = " ".join(row(table(capsys, "fast", "--intervention=route2"), "A100 SXM, here"))
    assert "not hold the run: 8.8 of 38.7 GiB" in found


def test_a_step_that_several_processes_share_has_no_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = resolve(["fast", "--intervention=none"])
    grader: Any = SimpleNamespace(stamp={}, workers=1)
    alone = step_lines(cfg, QWEN3_4B, [], grader)
    assert "your reward" in " ".join(alone)
    in_sandbox: Any = SimpleNamespace(stamp={"sandbox": {}}, workers=1)
    assert "your reward" not in " ".join(step_lines(cfg, QWEN3_4B, [], in_sandbox))
    rewarded = replace(cfg, env=replace(cfg.env, reward="mine:f", mix_ratio=0.0))
    assert "your reward" in " ".join(step_lines(rewarded, QWEN3_4B, [], in_sandbox))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert step_lines(cfg, QWEN3_4B, [], grader) == []
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    taught = replace(cfg, loss=replace(cfg.loss, teacher_tau=0.1, teacher_model="organism"))
    assert step_lines(taught, QWEN3_4B, [], grader) == []


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("NVIDIA H200 NVL", 60_000),
        pytest.param("Tesla T4", 60_000, marks=pytest.mark.long),
        pytest.param("", 60_000, marks=pytest.mark.long),
        ("[N/A]", 60_000),
        ("NVIDIA H200", "[Insufficient Permissions]"),  # as of a part of a card
    ],
)
def test_of_a_card_that_is_not_known_nothing_is_said(
    name: str, free: object, gpu: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(name, free)
    lines = table(capsys, "fast", "--intervention=none")
    assert len(lines) == 8
    assert not any("here" in line for line in lines)
