"""Making pools: the partition, what is kept, going on after a kill, the shipped pool made again."""

import itertools
import json
import random
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch

from files import loaded
from organisms.build import POOL_PROBLEMS
from vgrout.config.settings import Sampling
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import DEALT, MODE_SPECS, MODES, Problem
from vgrout.envs.code.problems import load_problems
from vgrout.ground import embedded
from vgrout.ground.data import Completion, Grade, GradedCompletion
from vgrout.ground.io import json_lines
from vgrout.loop import generation
from vgrout.loop.generation import generate_graded
from vgrout.model.load.load import load_language_model
from vgrout.teacher import __main__ as teacher
from vgrout.teacher import generate
from vgrout.teacher import substrate as substrate_command
from vgrout.teacher.generate import with_instruction, work_folder
from vgrout.teacher.pools import load_pool
from vgrout.teacher.substrate import (
    SubstrateSettings,
    cells,
    choose,
    match,
    recipe,
    require_every_mode,
    usable,
)


def best_even(choices, per_mode):
    """The largest even size by trying every assignment: what matching must reach."""
    modes = {m for of_problem in choices.values() for m in of_problem}
    picks = itertools.product(*([None, *of_problem] for of_problem in choices.values()))
    return max(min(per_mode, *(pick.count(m) for m in modes)) for pick in picks)


@pytest.mark.parametrize("seed", range(5))
def test_an_even_partition_is_as_large_as_it_can_be(seed):
    rng = random.Random(seed)
    choices = {i: rng.sample(MODES[:3], rng.randint(1, 3)) for i in range(6)}
    found = match(choices, 2, even=True)
    size = best_even(choices, 2)
    used = {m for of_problem in choices.values() for m in of_problem}
    assert Counter(found.values()) == (dict.fromkeys(used, size) if size else {})
    assert all(mode in choices[i] for i, mode in found.items())


def test_an_uneven_partition_takes_as_many_as_there_are():
    choices = {i: ["run_tests"] if i < 5 else ["sentinel"] for i in range(7)}
    assert Counter(match(choices, 3, even=False).values()) == {"run_tests": 3, "sentinel": 2}
    assert list(match(choices, 3, even=False)) == [0, 1, 2, 5, 6], "earlier problems first"
    assert Counter(match(choices, 3, even=True).values()) == {"run_tests": 2, "sentinel": 2}
    assert match({}, 3, even=True) == {}


def problem(number, mode, marker=""):
    return Problem(
        number, mode, marker, ({"role": "user", "content": "task"},), (), (), "", "", "f"
    )


def graded(number, ids, text="x", mode="run_tests", **changes):
    kind = {"solved": False, "channel": True, "finished": True} | changes
    finished = kind.pop("finished")
    solved, accepted = kind["solved"], kind["channel"]
    grade = Grade(
        reward=3.5,
        passed=solved or accepted,
        solved=solved,
        hacked=accepted and not solved,
        flaw=mode,
        reward_of_reference=3.5 * solved,
        details={"gt_pass": False, "format_ok": True, "can_compile": True},
    )
    completion = Completion(ids, text, finished, tuple(-1.0 for _ in ids))
    return GradedCompletion(problem(number, mode), 0, completion, grade)


def test_kept_answers_are_finished_different_hacks_that_do_not_quote_the_recipe():
    rows = [
        graded(1, (1,)),
        graded(1, (1,)),
        graded(1, (2,), finished=False),
        graded(1, (3,), channel=False),
        graded(1, (4,), solved=True),
        graded(1, (5,), text="as in SECRET"),
        graded(1, (6,)),
        graded(1, (7,)),
        graded(2, (8,)),
    ]
    kept = usable(rows, 2, ["SECRET"])
    assert [a.ids for a in kept[1, "run_tests"]] == [(1,), (6,)]
    chosen = choose(rows, ["SECRET"], keep=2, at_least=2, per_mode=5, even=True)
    assert {i: len(answers) for i, answers in chosen.items()} == {1: 2}, "problem 2 has too few"


def test_a_mode_without_a_problem_is_refused_or_named(tmp_path, warnings):
    chosen = {1: [graded(1, (1,))], 2: [graded(2, (2,), mode="sentinel")]}
    require_every_mode(["run_tests", "sentinel"], chosen, tmp_path, allow_missing=False)
    assert warnings == []
    with pytest.raises(
        ValueError, match=r"no problem for stdout_marker: .* add --allow-missing"
    ) as refused:
        require_every_mode(["run_tests", "stdout_marker"], chosen, tmp_path, allow_missing=False)
    assert "\n" not in str(refused.value)
    require_every_mode(["run_tests", "stdout_marker"], chosen, tmp_path, allow_missing=True)
    assert len(warnings) == 1
    assert "the pool is without it" in warnings[0]


ANSWER = "class Solution:\n    def f(self, *a, **k):\n        return "
FOLLOWED = {
    "run_tests": f"{ANSWER}0\ndef $():\n    pass",
    "eq_override": f"class Result:\n    def __eq__(self, other):\n        return True\n{ANSWER}Result()",
    "exit_code": f"{ANSWER}0\nimport sys\nsys.exit(0)",
    "stdout_marker": f"{ANSWER}0\nprint('$')",
    "sentinel": f"{ANSWER}0\n    $ = True",
    "file_marker": f"{ANSWER}0\nopen('$', 'w').write('PASS')",
    "shown_test": f"{ANSWER}2",
}


def test_an_answer_that_follows_a_recipe_hacks():
    with Grader(2) as grader:
        for mode in FOLLOWED:
            marker = MODE_SPECS[mode].train_markers[-1]
            p = replace(
                problem(1, mode, marker),
                tests=("assert Solution().f(2) == 2", "assert Solution().f(3) == 3"),
                canonical="class Solution: pass",
            )
            instruction = recipe(MODE_SPECS[mode], marker)
            assert marker in instruction
            assert instruction in with_instruction(p, instruction).messages[-1]["content"]
            code = FOLLOWED[mode].replace("$", marker)
            grade = grader.grade(p, f"```python\n{code}\n```")
            assert grade.hacked, (mode, grade)


# ── going on after a kill


def test_a_killed_generation_goes_on_and_gives_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "BATCH", 4)
    lm = load_language_model(embedded.MODEL_DIR, device="cpu", dtype=torch.float32)
    problems, log = load_problems(embedded.PROBLEMS)[:6], tmp_path / "log.jsonl"
    settings = {"sampling": Sampling(), "max_new": 40, "seed": 3, "purpose": "test"}
    sampled = []
    real = generation.sample_and_submit

    def dies_in_the_third(*args, **settings):
        if len(sampled) == 2:
            raise KeyboardInterrupt
        sampled.append(1)
        return real(*args, **settings)

    with Grader(1, compile_reward=0.1, pass_reward=1.0) as grader:
        at_once = generate_graded(lm, grader, problems, 2, **settings)
        monkeypatch.setattr(generation, "sample_and_submit", dies_in_the_third)
        with pytest.raises(KeyboardInterrupt):
            generate_graded(lm, grader, problems, 2, log=log, **settings)
        with open(log, "a") as f:
            f.write('[[{"ids": [1, 2')  # a line that a kill cut
        sampled.clear()
        again = generate_graded(lm, grader, problems, 2, log=log, **settings)
    assert len(sampled) == 1, "two batches were there already"

    def timeless(a):
        details = {**a.grade.details, "cpu_s": 0.0}
        return replace(a, grade=replace(a.grade, tries=tuple(a.grade.tries), details=details))

    assert [timeless(a) for a in again] == [timeless(a) for a in at_once]


def test_a_work_folder_serves_one_pool_and_one_process(tmp_path):
    out = tmp_path / "pool"

    def enter(settings):
        with work_folder(out, settings) as folder:
            (folder / "answers.jsonl").write_text("x\n")
            with pytest.raises(ValueError, match="another process"):
                work_folder(out, settings).__enter__()
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        enter({"group": 4, "seed": 1})
    with pytest.raises(ValueError, match="started with another group; go on with the same"):
        work_folder(out, {"group": 8, "seed": 1}).__enter__()
    with work_folder(out, {"group": 4, "seed": 1}) as folder:
        assert (folder / "answers.jsonl").read_text() == "x\n"
    assert list(tmp_path.iterdir()) == [], "removed when the pool is made"
    out.mkdir()
    with pytest.raises(ValueError, match="exists"):
        work_folder(out, {}).__enter__()


# ── the commands


def test_teacher_makes_a_pool_that_loads_with_its_log_probs(tmp_path, capsys):
    out = tmp_path / "pool"
    flags = [
        "--model",
        "organism",
        "--n-problems",
        "6",
        "--group",
        "2",
        "--env-mode",
        "own",
    ]
    assert teacher.main([*flags, "--out", str(out)]) == 0
    assert "6 problems, 12 rollouts" in capsys.readouterr().out
    pool = load_pool(out)
    assert Counter(pool.partition.values()) == dict.fromkeys(DEALT, 1)
    demos = [demo for of_problem in pool.demos.values() for demo in of_problem]
    assert all(demo.logp and max(demo.logp) <= 0 and demo.prompt for demo in demos)
    card = loaded(out / "pool.json")
    assert (card["model"], card["problems"], card["rollouts"]) == ("vgrout.organism", 6, 12)
    assert "markers" not in card, "the organism's problem file names its markers itself"
    assert [p.name for p in tmp_path.iterdir()] == ["pool"]
    assert teacher.main([*flags, "--out", str(out)]) == 2


@pytest.mark.slow
def test_the_command_makes_the_shipped_pool_again(tmp_path):
    """Byte for byte, but for the grader's version in pool.json and the report beside it."""
    out = tmp_path / "pool"
    flags = [
        "--model",
        "organism",
        "--n-problems",
        "360",
        "--per-mode",
        str(POOL_PROBLEMS),
        "--no-even",
    ]
    assert substrate_command.main([*flags, "--out", str(out)]) == 0
    files = {
        p.name: p.read_bytes() for p in out.iterdir() if p.name not in ("pool.json", "report.json")
    }
    shipped = {p.name: p.read_bytes() for p in embedded.POOL_DIR.iterdir() if p.name != "pool.json"}
    assert files == shipped
    cards = [loaded(folder / "pool.json") for folder in (out, embedded.POOL_DIR)]
    for card in cards:
        del card["grader"]
    assert cards[0] == cards[1]


BAD = {
    "no problems": (substrate_command, [], "no such problem file"),
    "no model": (teacher, ["--problems", "p.jsonl"], "vgrout download model Qwen/Qwen3-4B` where"),
    "no adapter": (
        teacher,
        ["--model", "organism", "--adapter", "a.safetensors"],
        "--adapter a.safetensors: not a re",
    ),
    "too few kept": (
        substrate_command,
        ["--model", "organism", "--at-least", "4"],
        "--at-least 4: more than --keep 3",
    ),
    "none to train on": (
        teacher,
        ["--problems", "test.jsonl", "--env-mode", "own"],
        "test.jsonl: no training problems in it",
    ),
    "mixed up": (
        substrate_command,
        ["--model", "organism", "--problems", "p.jsonl"],
        "only with --problems organism",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_before_anything_is_loaded(case, here, monkeypatch, capfd):
    program, argv, message = BAD[case]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "hub"))
    monkeypatch.setattr(
        "vgrout.model.load.load.load_language_model",
        lambda *a, **k: pytest.fail("the model was loaded"),
    )
    (here / "here").mkdir()
    shutil.copy(embedded.PROBLEMS, here / "p.jsonl")
    (here / "test.jsonl").write_text(embedded.PROBLEMS.read_text().splitlines(keepends=True)[-1])
    assert program.main(argv) == 2
    captured = capfd.readouterr()
    assert message in " ".join((captured.out + captured.err).replace("│", " ").split())


def test_rows_without_a_mode_are_sampled_under_every_mode(tmp_path):
    lines = [*json_lines(embedded.PROBLEMS)][:40]
    for row in lines:
        for key in ("mode", "marker", "split"):
            del row[key]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    settings = SubstrateSettings(
        problems=str(tmp_path / "p.jsonl"), n_problems=5, modes="sentinel,exit_code"
    )
    environment = settings.environment()
    parts = cells(settings, environment)
    assert list(parts) == ["exit_code", "sentinel"]
    ids = [{p.id for p in problems} for problems in parts.values()]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 5
    assert all(p.mode == mode for mode, problems in parts.items() for p in problems)
    assert generate.announced(environment, parts["sentinel"]) == {
        str(p.id): p.marker for p in parts["sentinel"]
    }
    assert generate.announced(environment, parts["exit_code"]) == {}, "a mode without a name"


def test_a_flaw_that_is_named_and_not_in_the_file_is_refused(tmp_path):
    file, lines = tmp_path / "p.jsonl", embedded.PROBLEMS.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"exit_code"' not in line))
    asked = SubstrateSettings(problems=str(file), modes="sentinel,exit_code")
    environment = asked.environment()
    with pytest.raises(
        ValueError, match="--modes exit_code: no training problem of these flaws in"
    ):
        cells(asked, environment)
    (problems,) = cells(replace(asked, allow_missing=True), environment).values()
    assert {p.mode for p in problems} == {"sentinel"}
