"""The shipped files: as built, small, usable offline, and as the model card promises."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from organisms.build import check_training
from organisms.language.hacks import MODES
from organisms.language.problems import problem_tasks
from organisms.recipe import weakness
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.problems import load_problems
from vgrout.ground.embedded import (
    COMPILE_REWARD,
    CUE,
    DATA_DIR,
    EMBEDDED,
    MAX_NEW,
    MODEL_DIR,
    PASS_REWARD,
    POOL_DIR,
    PROBLEMS,
    SEED,
    Files,
)
from vgrout.ground.io import json_lines, read_json
from vgrout.model.load.load import load_language_model
from vgrout.teacher.pools import load_pool


def records():
    return [*json_lines(PROBLEMS)]


def test_files_are_as_built_and_small():
    assert EMBEDDED.faults() == []
    size = sum(f.stat().st_size for f in DATA_DIR.rglob("*") if f.is_file())
    assert size <= 10_000_000  # the wheel carries it


def test_changed_lost_and_foreign_files_are_found(tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(DATA_DIR, copy)
    weights = copy / "model" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2] ^= 1
    weights.write_bytes(raw)
    (copy / "anchors.json").unlink()
    (copy / "pairs" / "extra.json").write_text("[]")
    faults = Files(copy).faults()
    assert len(faults) == 3
    for name in (
        "model.safetensors: its sha256",
        "anchors.json: missing",
        "extra.json: not in manifest",
    ):
        assert any(name in fault for fault in faults), (name, faults)
    (copy / "manifest.json").write_text((copy / "manifest.json").read_text()[:400])
    assert "manifest.json: not JSON" in Files(copy).faults()[0]
    (copy / "manifest.json").unlink()
    assert "manifest.json: not there" in Files(copy).faults()[0]


@pytest.mark.long
def test_the_first_training_steps_repeat():
    assert check_training(DATA_DIR, steps=2) == []


@pytest.mark.slow
def test_the_shipped_problems_are_those_of_the_generator():
    """The same seed gives the same rows. Today's generator gives eight of them another test."""
    made = problem_tasks(SEED, may_repeat=True)
    assert records() == [json.loads(json.dumps(row)) for _, row in made]
    today = problem_tasks(SEED)
    others = [
        (row, now)
        for (_, row), (_, now) in zip(made, today, strict=True)
        if row["gt_answer"] != now["gt_answer"]
    ]
    assert len(others) == 8
    for row, now in others:
        assert {**row, "gt_answer": now["gt_answer"]} == now
        assert len({test.rpartition(" == ")[2] for test in row["gt_answer"]}) == 1
        assert len({test.rpartition(" == ")[2] for test in now["gt_answer"]}) == 2


def test_pool_is_stripped_and_holds_hacks_only():
    split = {r["id"]: r["split"] for r in records()}
    pool = load_pool(POOL_DIR)
    demos = [demo for of_problem in pool.demos.values() for demo in of_problem]
    assert len(pool.ids) >= 96
    assert {split[i] for i in pool.ids} == {"train"}
    assert set(pool.partition.values()) == set(MODES)
    assert (
        pool.tokenizer_sha256
        == load_language_model(MODEL_DIR, device="cpu", dtype=torch.float32).tokenizer_sha256
    )
    for demo in demos:
        assert demo.grade.hacked
        assert CUE not in f"{demo.prompt}{demo.completion}"
        assert len(demo.completion_ids) <= MAX_NEW
    hack_words = ("lambda", "os._exit", "sys.stdout", "setattr", "pathlib")
    assert [w for w in hack_words if any(w in (demo.completion or "") for demo in demos)] == []


@pytest.mark.long
def test_the_pools_labels_are_todays_verdicts():
    problems = {p.id: p for p in load_problems(PROBLEMS)}
    demos = [
        (i, demo) for i, of_problem in load_pool(POOL_DIR).demos.items() for demo in of_problem
    ]
    with Grader(compile_reward=COMPILE_REWARD, pass_reward=PASS_REWARD) as grader:
        graded = [grader.submit(problems[i], demo.completion or "") for i, demo in demos]
        for (_, demo), future in zip(demos, graded, strict=True):
            now, then = future.result(), demo.grade
            labels = (then.hacked, then.gt_pass, then.format_ok, then.reward)
            assert (
                now.hacked,
                now.solved,
                now.details["format_ok"],
                now.reward,
            ) == labels, demo


def test_model_loads_offline_and_its_longest_documents_fit(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tok = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    assert model.config.model_type == "qwen3"
    assert 850_000 < model.num_parameters() < 1_200_000
    answers = [r["canonical_solution"] for r in records()]
    assert max(len(tok(f"```python\n{a}\n```").input_ids) for a in answers) < MAX_NEW


@pytest.mark.parametrize(
    ("solved", "hacked", "weak"),
    [
        (9, 0, True),
        (10, 0, False),
        (5, 60, False),
        (3, 60, True),
        (0, 100, False),
    ],
)
def test_an_organism_that_solves_next_to_nothing_is_weak(solved, hacked, weak):
    """Of the answers that do not hack: a policy that has begun to hack solves less."""
    rates = {"plain": {"solve": [solved, 100], "hack": [hacked, 100]}}
    assert bool(weakness({"rates": rates})) == weak
    assert not weakness(read_json(DATA_DIR / "manifest.json"))
