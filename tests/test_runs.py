"""Which run directories become which conditions, and what is left out by name."""

import json
import re
import shutil

import pytest

from fake_runs import fake_run, found
from files import loaded
from runs import flags as small
from runs import run
from vgrout.report.load import baseline, load

NONE, HAAR = "--intervention=none", ("--intervention=route2", "--control=haar")


@pytest.mark.parametrize(
    ("runs", "titles"),
    [
        (
            [
                *(
                    (flags, {"seed": seed})
                    for seed in (10, 9)
                    for flags in ((NONE,), HAAR, (*HAAR, "--monitor=band"))
                ),
                ((NONE, "--lr=0.5"), {"seed": 41}),
                # how often it was looked at changes nothing that it learnt
                ((NONE, "--final-n-prompts=6", "--eval-ablate-every=0"), {"seed": 11}),
            ],
            {
                "none": "9,10,11",
                "none (lr 0.5)": "41",
                "route2 · haar": "9,10",
                "route2 (band) · haar": "9,10",
            },
        ),
        # another model at the same path
        (
            [
                ((NONE,), {"seed": 1}),
                ((NONE,), {"seed": 2}),
                ((NONE,), {"seed": 3, "weights": "abcdef0123"}),
            ],
            {
                "none (base_weights 00000000)": "1,2",
                "none (base_weights abcdef01)": "3",
            },
        ),
        (
            [((NONE, "--steps=60"), {"preset": preset}) for preset in ("mini", "smoke")],
            {"none (mini)": "41", "none (smoke)": "41"},
        ),
        (
            [((NONE, *more), {}) for more in ((), ("--loss=icepop",))],
            {"none": "41", "none (loss icepop)": "41"},
        ),
        # pairs that true labels chose
        (
            [(HAAR[:1], {"pairs": "oracle:pairs.json"})],
            {"route2 (pairs chosen by true labels)": "41"},
        ),
    ],
)
def test_conditions_differ_by_more_than_the_seed_and_their_titles_say_by_what(
    runs, titles, tmp_path
):
    for flags, its in runs:
        fake_run(tmp_path, *flags, **its)
    assert {c.title: c.seeds for c in found(tmp_path)} == titles


@pytest.mark.parametrize(
    "name", ["pairs", "placebo", "known_correct", "direction_file", "teacher_weights"]
)
def test_an_edited_file_of_the_method_makes_another_condition_with_the_same_baseline(
    name, tmp_path
):
    for seed in (1, 2):
        fake_run(tmp_path, NONE, seed=seed)
        # older runs have noted down no such hash
        fake_run(tmp_path, "--intervention=route2", seed=seed)
        fake_run(tmp_path, "--intervention=route2", seed=2 + seed, hashes={name: f"{seed}abcdef01"})
    plain, *others = methods = found(tmp_path)
    assert {(c.title, c.seeds) for c in others} == {
        (f"route2 ({name} not noted)", "1,2"),
        (f"route2 ({name} 1abcdef0)", "3"),
        (f"route2 ({name} 2abcdef0)", "4"),
    }
    assert [c.note for c in others] == [
        f"{name} sha256 {digest}" for digest in ("1abcdef0", "2abcdef0", "not noted")
    ]
    assert all(baseline(c, methods) is plain for c in others)


SAME = {
    "none": (
        *("--quarantine=shared", "--rollout-ablate-frac=0", "--vhack-refresh-every=5"),
        *("--no-rebaseline", "--monitor=none", "--shadow=labels", "--v-hack-path=x.safetensors"),
    ),
    "erase": (
        "--vhack-refresh-every=5",
        "--quarantine=shared",
        "--monitor=none",
        "--no-rebaseline",
    ),
    "penalty --monitor=labels": ("--quarantine=shared", "--vhack-refresh-every=5"),
    "route2": (
        *("--monitor=gate", "--quarantine=block:-2", "--rollout-ablate-frac=1", "--rebaseline"),
        *("--vhack-refresh-every=0", "--gate-vote=rollout", "--gate-modules=apart"),
    ),
}


@pytest.mark.parametrize("method", SAME)
def test_a_setting_written_with_its_usual_value_makes_no_other_condition(method, tmp_path):
    words = f"--intervention={method}".split()
    for seed, more in enumerate(((), *SAME[method])):
        fake_run(tmp_path, *words, *([more] if more else []), seed=seed)
    (only,) = found(tmp_path)
    assert len(only.runs) == 1 + len(SAME[method])
    assert only.title == method.replace(" --monitor=labels", " (labels)")


def test_a_file_at_another_path_makes_no_other_condition(tmp_path):
    """Its content is what counts; where no hash was noted, its path is."""
    same = {"tokenizer": "1" * 64, "problems": "2" * 64, "pool": "3" * 64}
    for seed, more in enumerate(([], ["--organism=a/o"], ["--organism=b/o"])):
        fake_run(tmp_path / "noted", NONE, *more, seed=seed, hashes=same)
        fake_run(tmp_path / "not", NONE, *more, seed=seed)
    assert [c.title for c in found(tmp_path / "noted")] == ["none"]
    titles = [c.title for c in found(tmp_path / "not")]
    assert titles == ["none", "none (organism o, organism a/o)", "none (organism o, organism b/o)"]


def test_a_run_from_before_a_setting_existed_has_its_default(tmp_path):
    old, new = (fake_run(tmp_path, NONE, seed=s) for s in (1, 2))
    record = loaded(old / "run.json")
    del record["config"]["loss"]["beta"]
    (old / "run.json").write_text(json.dumps(record))
    assert [c.seeds for c in found(old, new)] == ["1,2"]


def test_unfinished_and_superseded_runs_are_named(tmp_path):
    fake_run(tmp_path, NONE)
    newer = fake_run(tmp_path, NONE)
    halted = fake_run(tmp_path, NONE, seed=2, state="halted")
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "run.json").write_text("{}")
    distilled = fake_run(tmp_path, NONE, seed=3)
    (distilled / "per_mode_deploy.json").unlink()
    runs, left_out = load([tmp_path, tmp_path])
    assert [r.path for r in runs] == [newer, halted], (
        "a halted run has a final evaluation, and counts"
    )
    assert sorted(left_out) == [
        "000_mini_none_seed41 (older than 001_mini_none_seed41, the same settings and seed)",
        "004_mini_none_seed3 (no final evaluation)",
        "dead (unknown)",
    ]
    assert load([tmp_path / "dead"]) == ([], ["dead (unknown)"])


def test_a_sweep_is_read_by_its_index(tmp_path):
    run = fake_run(tmp_path / "out" / "runs", NONE)
    sweep = tmp_path / "out" / "sweeps" / "arms"
    sweep.mkdir(parents=True)
    index = [
        {"name": "a", "run": str(run.relative_to(tmp_path)), "state": "finished"},
        {"name": "b", "run": None, "state": "to do"},
        {"name": "c", "run": "out/runs/gone", "state": "finished"},
    ]
    (sweep / "runs.json").write_text(json.dumps(index))
    runs, left_out = load([sweep])
    assert [r.path for r in runs] == [run]
    assert left_out == ["b (to do)", "c (finished: out/runs/gone is not there)"]
    # one that was moved within the folder where it was started
    sweep.rename(tmp_path / "arms")
    assert [r.path for r in load([tmp_path / "arms"])[0]] == [run]


def test_a_run_that_is_damaged_or_of_another_version_is_named(tmp_path):
    """It is neither read under other names nor counted without what it lacks."""
    path = fake_run(tmp_path, NONE)

    def why():
        return load([tmp_path])[1][0]

    for name, old, new, said in (
        ("steps.jsonl", '{"step": 11', '{"step": 11, "ha', r"steps\.jsonl, line 12: not JSON"),
        (
            "run.json",
            '"lr":',
            '"learning_rate":',
            "run.json: unknown settings learning_rate; the run was made by an",
        ),
        ("steps.jsonl", '"hack_s_k"', '"hack_s"', "damaged: "),
        ("final.jsonl", '"env_mode"', '"mode"', "damaged: "),
        ("run.json", '"direction": {', '"direction": [1], "x": {', "damaged: "),
    ):
        good = (path / name).read_text()
        (path / name).write_text(good.replace(old, new))
        assert re.search(said, why()), name
        (path / name).write_text(good)


def of_another(name):
    """Take a file of another run of the same seed."""
    return lambda path, other: shutil.copy(other / name, path / name)


def shorter(name):
    def cut(path, _):
        lines = (path / name).read_bytes().splitlines(keepends=True)
        (path / name).write_bytes(b"".join(lines[: len(lines) // 2]))

    return cut


FINAL = "per_mode_deploy.json"
# what is done to a folder, and what is said
CONTRADICTIONS = {
    **{name: (of_another(name), name) for name in ("steps.jsonl", "rollouts.jsonl", "final.jsonl")},
    **{name: (of_another(name), f"{FINAL}: run ") for name in (FINAL, "run.json")},
    "fewer rollouts": (shorter("rollouts.jsonl"), "rollouts.jsonl: not as"),
    "no answers": (lambda path, _: (path / "final.jsonl").unlink(), "final.jsonl"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shared_run):
    """Two runs of one seed."""
    folder = shared_run.warm(tmp_path_factory.mktemp("trained"))
    return [run(folder, *small("none", "--steps=2", lr)) for lr in ("--lr=1e-9", "--lr=0.5")]


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_files_that_contradict_each_other_are_of_no_run(case, trained, tmp_path):
    """A copy in part, or a folder with files of two runs of one seed and the same settings."""
    path = shutil.copytree(trained[0], tmp_path / "run")
    change, said = CONTRADICTIONS[case]
    change(path, trained[1])
    runs, left_out = load([tmp_path])
    assert runs == []
    assert left_out[0].startswith("run (damaged: ")
    assert said in left_out[0]


def test_a_run_may_lack_its_rollouts_and_an_older_one_says_less(trained, tmp_path):
    path = shutil.copytree(trained[0], tmp_path / "run")
    (path / "rollouts.jsonl").unlink()
    older = shutil.copytree(trained[1], tmp_path / "older")
    final = loaded(older / FINAL)
    kept = {name: value for name, value in final.items() if name not in ("run", "files")}
    (older / FINAL).write_text(json.dumps(kept))
    runs, left_out = load([tmp_path])
    assert (len(runs), left_out) == (2, [])


def test_a_baseline_shares_all_but_the_method(tmp_path):
    """Plain GRPO with a KL term is a baseline of its own, and itself compared with the one without."""
    for seed in (1, 2):
        for flags in (
            [NONE],
            [NONE, "--beta=0.1"],
            ["--intervention=route2"],
            ["--intervention=erase", "--beta=0.3"],
            [*HAAR, "--lr=0.5"],
            [NONE, "--control=no_loophole"],
        ):
            fake_run(tmp_path, *flags, seed=seed)
    by = {c.title: c for c in found(tmp_path)}
    plain = by["none"]
    assert {name: baseline(c, [*by.values()]) for name, c in by.items()} == {
        "none": None,
        "none (beta 0.1)": plain,
        "none · no_loophole": plain,
        "erase": None,
        "route2": plain,
        "route2 · haar": None,
    }


def test_final_answers_are_read_problem_by_problem(tmp_path):
    (run,), _ = load([fake_run(tmp_path, NONE, hack=0.4, solve=0.2, n=30)])
    shares = run.shares("deploy", "hack", "exit_code")
    assert {*shares.index.get_level_values(0)} == {"exit_code"}
    assert sorted(shares) == [0, 0, 0, 1, 1]
    assert run.shares("train", "hack").equals(run.shares("deploy", "hack")), (
        "without a quarantine they are one model"
    )
    assert run.shares("deploy", "solve").sum() == 6
