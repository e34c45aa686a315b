"""Teacher pools: schema with file and line, mixing, tokens, held-out modes."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vgrout.nouns import Problem
from vgrout.teacher import Teacher, load_pool


def record(**changes: Any) -> dict[str, Any]:
    base = {"prompt_ids": [1], "completion_ids": [5, 6, 2], "plen": 1, "reward": 1.0, "hacked": True, "gt_pass": False}
    return {**base, "fmt_ok": True, "completion": "```python\n```", **changes}


def write(folder: Path, problem_id: int, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"prompt_{problem_id:04d}.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    return path


def problem(number: int, mode: str = "run_tests") -> Problem:
    return Problem(number, mode, "", ({"role": "user", "content": "x"},), (), (), "", "", "f")  # ty: ignore[invalid-argument-type]


def teacher(folder: Path | None, **changes: Any) -> Teacher:
    settings: dict[str, Any] = {"per_group": 2, "seed": 0, "off_step": None, "modes": [], "tokenizer_sha256": "T"}
    settings |= {"encode": lambda text: (9, len(text)), "render": lambda p: (1, p.id), "max_new": 100}
    return Teacher(load_pool(folder) if folder else None, **(settings | changes))


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    folder = tmp_path / "pool"
    for number in (3, 4):
        write(folder, number, [record(completion_ids=[number, k, 2]) for k in range(3)])
    (folder / "pool.json").write_text(json.dumps({"tokenizer_sha256": "T", "grader": "ours"}))
    return folder


def test_rows_without_replacement_and_as_cached(pool: Path) -> None:
    demos = teacher(pool, per_group=3).demos(problem(3), step=0)
    assert sorted(r.completion_ids for r, _ in demos) == [(3, 0, 2), (3, 1, 2), (3, 2, 2)]
    assert all(r.source == "teacher" and r.prompt_ids == (1, 3) for r, _ in demos)
    assert all(g.hacked and g.reward == 1.0 and g.grader == "ours" for _, g in demos)


def test_more_rows_than_there_are(pool: Path) -> None:
    assert len(teacher(pool, per_group=7).demos(problem(3), step=0)) == 7


def test_draws_are_a_function_of_seed_and_step(pool: Path) -> None:
    picks = [[r.completion_ids for r, _ in teacher(pool).demos(problem(3), step=s)] for s in (1, 1, 2, 3, 4, 5)]
    assert picks[0] == picks[1]
    assert len({tuple(p) for p in picks}) > 1


def test_off_step_modes_and_coverage(pool: Path) -> None:
    assert teacher(pool, off_step=5).count(problem(3), 4) == 2
    assert teacher(pool, off_step=5).count(problem(3), 5) == 0
    held_out = teacher(pool, modes=["sentinel"])
    assert (held_out.count(problem(3), 0), held_out.count(problem(3, "sentinel"), 0)) == (0, 2)
    assert teacher(pool).count(problem(99), 0) == 0
    assert teacher(None).demos(problem(3), 0) == []


def test_another_tokenizer_means_retokenised_text(pool: Path) -> None:
    rollout, _ = teacher(pool, tokenizer_sha256="other").demos(problem(3), 0)[0]
    assert rollout.completion_ids == (9, len("```python\n```"))


def test_the_teachers_own_logprobs_come_along_where_the_pool_has_them(pool: Path) -> None:
    assert not load_pool(pool).has_logp
    for number in (3, 4):
        write(pool, number, [record(completion_ids=[number, k, 2], logp=[-0.1, -0.2, -0.3]) for k in range(3)])
    assert load_pool(pool).has_logp
    assert teacher(pool).demos(problem(3), 0)[0][0].logp_full == (-0.1, -0.2, -0.3)
    assert teacher(pool, tokenizer_sha256="other").demos(problem(3), 0)[0][0].logp_full is None


def test_another_tokenizer_without_text_is_refused(pool: Path) -> None:
    write(pool, 4, [record(completion=None)])
    with pytest.raises(ValueError, match="without completion texts"):
        teacher(pool, tokenizer_sha256="other")


def truncated(folder: Path) -> None:
    path = write(folder, 3, [record()] * 50)
    path.write_bytes(path.read_bytes()[:-20])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda f: f.mkdir(), "no prompt_NNNN"),
    "bad json": (lambda f: write(f, 3, []).write_bytes(gzip.compress(b"{\n")), "line 1: not JSON"),
    "missing key": (lambda f: write(f, 3, [record(), {"reward": 1}]), "line 2: key 'completion_ids'"),
    "bad type": (lambda f: write(f, 3, [record(hacked="yes")]), "line 1: key 'hacked'"),
    "log-probs of another length": (lambda f: write(f, 3, [record(logp=[0.0])]), "one number per completion token"),
    "no tokens": (lambda f: write(f, 3, [record(completion_ids=[])]), "line 1: 'completion_ids'"),
    "other problem": (lambda f: write(f, 3, [record(problem_id=4)]), "named for problem 3"),
    "truncated": (truncated, "cannot be read"),
    "unknown mode": (lambda f: (write(f, 3, [record()]), (f / "partition.json").write_text('{"3": "x"}')), "mode 'x'"),
    "outside the partition": (
        lambda f: (write(f, 3, [record()]), (f / "partition.json").write_text('{"4": "sentinel"}')),
        "not in partition.json",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_pool_is_refused_with_its_place(tmp_path: Path, case: str) -> None:
    make, message = BROKEN[case]
    make(tmp_path / "pool")
    with pytest.raises(ValueError, match=message):
        load_pool(tmp_path / "pool")


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        load_pool(tmp_path / "nowhere")


def test_the_real_pools_load(shared_data: Path) -> None:
    substrate = load_pool(shared_data / "pools" / "substrate")
    assert len(substrate.demos) == 24
    assert sum(map(len, substrate.demos.values())) == 74
    assert {substrate.partition[i] for i in substrate.ids} == {"run_tests", "stdout_marker", "sentinel", "file_marker"}
    teacher_pool = load_pool(shared_data / "pools" / "teacher_pool")
    assert len(teacher_pool.demos) == 60
    assert all(len(rows) == 8 for rows in teacher_pool.demos.values())
