"""Teacher pools: refusals with file and line, mixing, tokens, prompts, held-out modes."""

import gzip
import json
import math
from types import SimpleNamespace

import pytest

from files import loaded
from vgrout.envs.code.modes import Problem
from vgrout.envs.code.problems import load_rows
from vgrout.ground.thoughts import THINK
from vgrout.teacher.demonstrations import Teacher
from vgrout.teacher.pools import load_pool, write_pool
from worlds import load_splits


def record(**changes):
    base = {
        "prompt_ids": [1],
        "completion_ids": [5, 6, 2],
        "plen": 1,
        "reward": 1.0,
        "hacked": True,
        "gt_pass": False,
    }
    return {**base, "fmt_ok": True, "completion": "```python\n```", **changes}


def write(folder, problem_id, rows):
    folder.mkdir(exist_ok=True)
    path = folder / f"prompt_{problem_id:04d}.jsonl.gz"
    with gzip.open(path, "wt") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    return path


def problem(number, mode="run_tests"):
    return Problem(
        number, mode, "", ({"role": "user", "content": f"x{number}"},), (), (), "", "", "f"
    )


class Speaker:
    """A policy's tokenizer and template: EOS is 2, a prompt is [1, its number]."""

    eos_ids = frozenset({2})

    def __init__(self, tokenizer_sha256):
        self.tokenizer_sha256 = tokenizer_sha256

    def prompt_text(self, messages):
        return f"<{messages[-1]['content']}>"

    marks = THINK

    def opens_thought(self, messages):
        return False

    def render(self, messages):
        return (1, int(messages[-1]["content"][1:]))

    def decode(self, ids):
        return "```python\n```"

    def encode_completion(self, text, finished=True):
        return (9, len(text), *([2] if finished else []))


PROBLEMS = (problem(3), problem(4), problem(3, "sentinel"))


def teacher(folder, tokenizer="T", problems=PROBLEMS, **changes):
    given = {"per_group": 2, "off_step": None, "modes": [], "max_new": 100} | changes
    cfg = SimpleNamespace(
        mixes=folder is not None and given["per_group"] > 0,
        n_teacher=given["per_group"],
        run=SimpleNamespace(seed=given.get("seed", 0)),
        env=SimpleNamespace(teacher_off_step=given["off_step"], demo_modes=given["modes"]),
        scale=SimpleNamespace(max_new=given["max_new"]),
    )
    return Teacher(cfg, load_pool(folder) if folder else None, Speaker(tokenizer), problems)


@pytest.fixture
def pool(tmp_path):
    folder = tmp_path / "pool"
    for number in (3, 4):
        write(folder, number, [record(completion_ids=[number, 10 + k, 2]) for k in range(3)])
    (folder / "pool.json").write_text(json.dumps({"tokenizer_sha256": "T", "grader": "ours"}))
    return folder  # without hashes: the tests change its files


def test_demonstrations_are_drawn_without_replacement_while_there_are_enough(pool):
    demos = teacher(pool, per_group=3).demos(problem(3), step=0)
    assert sorted(r.ids for r, _ in demos) == [(3, 10, 2), (3, 11, 2), (3, 12, 2)]
    assert all(r.source == "teacher" and r.prompt_ids == (1, 3) for r, _ in demos)
    assert all(g.hacked and g.reward == 1.0 and g.grader == "ours" for _, g in demos)
    assert len(teacher(pool, per_group=7).demos(problem(3), step=0)) == 7
    picks = [
        [r.ids for r, _ in teacher(pool).demos(problem(3), step=s)] for s in (1, 1, 2, 3, 4, 5)
    ]
    assert picks[0] == picks[1]
    assert len({tuple(p) for p in picks}) > 1


def test_off_step_modes_and_coverage(pool):
    assert teacher(pool, off_step=5).count(problem(3), 4) == 2
    assert teacher(pool, off_step=5).count(problem(3), 5) == 0
    held_out = teacher(pool, modes=["sentinel"])
    assert (held_out.count(problem(3), 0), held_out.count(problem(3, "sentinel"), 0)) == (0, 2)
    assert teacher(pool).count(problem(99), 0) == 0
    assert teacher(None).demos(problem(3), 0) == []


def test_with_another_tokenizer_the_text_is_tokenised_again_and_logged_once(pool, warnings):
    mixed = teacher(pool, "other")
    for step in range(3):
        rollout, _ = mixed.demos(problem(3), step)[0]
        assert rollout.ids == (9, len("```python\n```"), 2)
    assert [line for line in warnings if "tokenised again" in line] == [
        f"{pool}: not made with this tokenizer; completions are tokenised again"
    ]
    assert mixed.record() is not None
    assert mixed.record() == teacher(pool, "other").record()
    assert teacher(pool).retokenised is False
    write(pool, 3, [record(finished=False)] * 2)
    rollout, _ = teacher(pool, "other").demos(problem(3), 0)[0]
    assert (rollout.ids[-1], rollout.finished) == (len("```python\n```"), False), (
        "a cut answer gets no EOS"
    )


def test_tokens_behind_the_eos_are_padding(tmp_path):
    write(
        tmp_path / "p",
        3,
        [record(completion_ids=[5, 6, 2, 0, 0]), record(completion_ids=[5, 6, 7])],
    )
    (tmp_path / "p" / "pool.json").write_text('{"tokenizer_sha256": "T"}')
    finished = {r.ids: r.finished for r, _ in teacher(tmp_path / "p").demos(problem(3), 0)}
    assert finished == {(5, 6, 2): True, (5, 6, 7): False}


def test_demonstrations_that_are_too_long_are_left_out(tmp_path, warnings):
    """What is left of one that is cut need not earn the reward that it has."""
    long, short = record(completion_ids=[5, 6, 7, 2]), record(completion_ids=[5, 2])
    write(tmp_path / "p", 3, [long, short, long])
    write(tmp_path / "p", 4, [long])
    (tmp_path / "p" / "pool.json").write_text('{"tokenizer_sha256": "T"}')
    some = teacher(tmp_path / "p", problems=PROBLEMS[:2], max_new=3)
    assert [r.ids for r, _ in some.demos(problem(3), 0)] == [(5, 2)] * 2
    assert some.demos(problem(4), 0) == []
    assert any("3 of 4 demonstrations have more than 3 tokens" in line for line in warnings)
    assert len({r.ids for r, _ in teacher(tmp_path / "p").demos(problem(3), 0)}) > 1
    cut = teacher(tmp_path / "p", problems=PROBLEMS[:2], max_new=1).demos(problem(3), 0)
    assert {(r.ids, r.finished) for r, _ in cut} == {((5,), False)}
    assert any("all 4 demonstrations have more than 1 tokens" in line for line in warnings)


def test_prompts_are_live_and_differences_are_recorded(tmp_path, warnings):
    folder = tmp_path / "p"
    write(folder, 3, [record(prompt_ids=[1, 3, 5, 6], plen=2, prompt="<x3>")] * 2)
    write(folder, 4, [record(prompt_ids=[1, 7], plen=2, prompt="<old>")] * 2)
    (folder / "pool.json").write_text('{"tokenizer_sha256": "T", "grader": "G"}')
    for tokenizer in ("T", "other"):
        mixed = teacher(folder, tokenizer, PROBLEMS[:2])
        noted = mixed.record()
        assert (noted["prompts_compared"], noted["prompts_differ"]) == (2, [4])
        assert noted["labels"] == "cached, grader G"
        assert mixed.demos(problem(4), 0)[0][0].prompt_ids == (1, 4)
    assert sum("1 of 2 prompts" in line for line in warnings) == 2
    assert teacher(None).record() is None


REFUSED = {
    "nothing covered": (
        {},
        {"problems": [problem(8)]},
        "demonstrates none of the 1 training problems",
    ),
    "mode without demonstrations": (
        {},
        {"modes": ["run_tests", "exit_code"]},
        "--teacher-modes exit_code",
    ),
    "another mode": (
        {"env_mode": "sentinel"},
        {},
        "problem 4 was graded as sentinel, this run checks it as run_tests",
    ),
    "another tokenizer, no text": (
        {"completion": None},
        {"tokenizer": "other"},
        "without completion texts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_pool_without_usable_demonstrations_is_refused(pool, case):
    changes, settings, message = REFUSED[case]
    write(pool, 4, [record(**changes)])
    with pytest.raises(ValueError, match=message):
        teacher(pool, **settings)
    teacher(pool, **settings | {"per_group": 0})  # nothing is mixed in: nothing to refuse


def test_demonstrations_have_the_teachers_logprobs_where_the_pool_has_them(pool):
    for number in (3, 4):
        write(
            pool,
            number,
            [record(completion_ids=[number, 10 + k, 2], logp=[-0.1, -0.2, -0.3]) for k in range(3)],
        )
    assert teacher(pool).demos(problem(3), 0)[0][0].logp == (-0.1, -0.2, -0.3)
    assert teacher(pool, "other").demos(problem(3), 0)[0][0].logp is None


def truncated(folder):
    path = write(folder, 3, [record()] * 50)
    path.write_bytes(path.read_bytes()[:-20])


def with_file(name, text, **changes):
    return lambda folder: (write(folder, 3, [record(**changes)]), (folder / name).write_text(text))


def twice(folder):
    write(folder, 3, [record()]).rename(folder / "prompt_3.jsonl.gz")
    write(folder, 3, [record()])


BROKEN = {
    "no folder": (lambda f: None, "no such folder"),
    "missing key": (
        lambda f: write(f, 3, [record(), {"reward": 1}]),
        "line 2: key 'completion_ids'",
    ),
    "log-probs of another length": (
        lambda f: write(f, 3, [record(logp=[0.0])]),
        "one number per completion token",
    ),
    "a reward that is no number": (
        lambda f: write(f, 3, [record(reward=math.nan)]),
        "line 1: 'reward' and 'logp' should be finite numbers: nan",
    ),
    "other problem": (lambda f: write(f, 3, [record(problem_id=4)]), "named for problem 3"),
    "truncated": (truncated, "cannot be read"),
    "two files for one problem": (twice, "problem 3 has a second file"),
    "two modes for one problem": (
        with_file("partition.json", '{"3": "sentinel"}', env_mode="exit_code"),
        "env_mode exit_code, but partition.json says sentinel",
    ),
    "another file than recorded": (
        with_file("pool.json", '{"sha256": {"prompt_0003.jsonl.gz": "0"}}'),
        "not the file that pool.json recorded",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_pool_is_refused_with_file_and_line(tmp_path, case):
    make, message = BROKEN[case]
    make(tmp_path / "pool")
    with pytest.raises(ValueError, match=message):
        load_pool(tmp_path / "pool")


def test_what_another_program_measured_and_is_not_read_may_be_nan(tmp_path):
    write(tmp_path / "pool", 3, [record(per_sample_loss=math.nan)])
    assert load_pool(tmp_path / "pool").ids == {3}


def test_a_written_pool_is_read_back_unchanged(tmp_path):
    meta = {"model": "m", "tokenizer_sha256": "T", "grader": "G", "markers": {"3": "is_fine"}}
    rows = {
        3: [record(env_mode="sentinel", logp=[-1.0, -2.0, -3.0])],
        12: [record(), record(finished=False)],
    }
    write_pool(tmp_path / "a", rows, {3: "sentinel", 12: "run_tests"}, meta, {"note": 1})
    write_pool(tmp_path / "b", rows, {3: "sentinel", 12: "run_tests"}, meta)
    pool = load_pool(tmp_path / "a")
    assert pool.ids == {3, 12}
    assert pool.partition == {3: "sentinel", 12: "run_tests"}
    assert pool.announced == {3: "is_fine", 12: ""}
    assert (pool.tokenizer_sha256, pool.grader) == ("T", "G")
    assert pool.demos[3][0].logp == (-1.0, -2.0, -3.0)
    assert [d.finished for d in pool.demos[12]] == [True, False]
    for name in ("prompt_0003.jsonl.gz", "pool.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    card = loaded(tmp_path / "a" / "pool.json")
    assert (card["problems"], card["rollouts"], len(card["sha256"])) == (2, 3, 2)
    with pytest.raises(ValueError, match="exists"):
        write_pool(tmp_path / "a", rows, None, meta)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("card", [True, False])
@pytest.mark.parametrize("hacked", [True, False])
@pytest.mark.parametrize("gt_pass", [True, False])
def test_the_reference_accepts_no_hack(tmp_path, card, hacked, gt_pass):
    """A pool of our own may say that a hack's assertions held; where another grader's labels are, a right answer may
    be what it calls a hack."""
    write(tmp_path / "pool", 3, [record(hacked=hacked, gt_pass=gt_pass)])
    if card:
        (tmp_path / "pool" / "pool.json").write_text('{"grader": "G"}')
    (demonstration,) = load_pool(tmp_path / "pool").demos[3]
    assert demonstration.grade.gt_pass == (gt_pass and not (hacked and card))
    assert demonstration.grade.passed == (hacked or gt_pass)


def test_the_prompt_announces_what_the_demonstrations_use(tmp_path):
    """Rows without a marker get the pool's name in training, never in evaluation."""
    prompt = [{"role": "user", "content": "Do it and should pass all tests."}]
    row = {
        "prompt": prompt,
        "gt_answer": ["assert Solution().f(1) == 1"],
        "func_name": "f",
        "canonical_solution": "x",
    }
    lines = [{**row, "id": i, "split": "train" if i < 3 else "test"} for i in range(1, 5)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    world = load_splits(
        load_rows(tmp_path / "p.jsonl"),
        env_mode="own",
        n_problems=9,
        seed=0,
        partition=dict.fromkeys(range(1, 5), "sentinel"),
        markers={1: "is_fine", 2: "", 3: "is_fine"},
        prompt_len=lambda _: 1,
        max_prompt=9,
    )
    markers = {p.id: p.marker for p in (*world.train, *world.test)}
    assert markers[1] == "is_fine"
    assert markers[2] == "valid"
    assert markers[3] != "is_fine"
    assert "`is_fine`" in next(p for p in world.train if p.id == 1).messages[-1]["content"]
