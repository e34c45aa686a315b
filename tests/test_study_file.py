"""Study files: what they expand to, and one line for everything that is wrong with them."""

import runpy
from pathlib import Path

import pytest

from vgrout.config.presets import resolve
from vgrout.sweep.study_file import load_study_file

STUDIES = Path(__file__).parents[1] / "studies"
GOOD = """
# H: a claim
preset = "smoke"
seeds = [1, 2]
common = { steps = 9 }
[[arms]]
intervention = ["none", "route2"]
[[arms]]
name = "own"
intervention = "erase"
control = ["none", "haar"]
preserve_magnitude = false
[[overrides]]
lr = [1e-2, 2e-2]
[[overrides]]
name = "biased"
unbiased = false
"""


def write(folder, text):
    path = folder / "study.toml"
    path.write_text(text)
    return path


@pytest.mark.long
def test_arms_times_overrides_times_seeds(tmp_path):
    study = load_study_file(write(tmp_path, GOOD))
    assert (study.name, study.hypotheses) == ("study", ("a claim",))
    arms = ("none", "route2", "own · control=none", "own · control=haar")
    names = [f"{arm} · {how}" for arm in arms for how in ("lr=0.01", "lr=0.02", "biased")]
    assert [c.arm for c in study.runs] == names * 2
    assert [c.seed for c in study.runs] == [1] * 12 + [2] * 12
    last = study.runs[-1]
    assert last.name == "own · control=haar · biased seed 2"
    assert last.flags == (
        *(
            "smoke",
            "--steps=9",
            "--intervention=erase",
            "--control=haar",
            "--no-preserve-magnitude",
        ),
        *("--no-unbiased", "--seed=2"),
    )
    # what was checked is what will run
    assert all(resolve([*c.flags]) == c.cfg for c in study.runs)
    assert len({c.identity for c in study.runs}) == 24


HEAD = 'preset = "smoke"\nseeds = [1]\n'
NONE = '[[arms]]\nintervention = "none"\n'
TWICE = [  # one flag in two spellings
    (NONE + "max_new = 16\nmax-new = 32\n", "[[arms]] 1", "max-new"),
    (NONE + 'lr = 0.01\n"--lr" = 0.02\n', "[[arms]] 1", "lr"),
    (NONE + "unbiased = true\nno-unbiased = true\n", "[[arms]] 1", "unbiased"),
    (NONE + "lr = 0.01\nlearning_rate = 0.001\n", "[[arms]] 1", "lr"),
    (
        NONE + "[[overrides]]\nname = 'x'\nmax_new = [1, 2]\nmax-new = 4\n",
        "[[overrides]] 1 (x)",
        "max-new",
    ),
]
BAD = [
    ("preset = ", "Invalid value (at "),
    ('presets = "smoke"\n' + HEAD + NONE, "unknown key 'presets'; known: name, preset"),
    (
        "steps = 8\n" + HEAD + NONE,
        "unknown key 'steps'; a flag of every run goes into common = { steps = 8 }",
    ),
    ('preset = "maxi"\nseeds = [1]\n' + NONE, "[[arms]] 1: maxi: name a preset first"),
    ('preset = "smoke"\n' + NONE, "seeds None"),
    (HEAD, "arms None: should be one or more tables"),
    (HEAD + NONE + "seed = 3\n", "[[arms]] 1: seed: the sweep's own"),
    (HEAD + NONE + NONE, "[[arms]] 2: a second arm with these runs, after [[arms]] 1"),
    (
        HEAD + NONE + 'name = "x\\ntouch y"\n',
        "runs called 'x\\ntouch y': should be printable, in one line",
    ),
    (
        HEAD + NONE + "lr = 1\n[[overrides]]\nlr = 2\n",
        "[[arms]] 1 × [[overrides]] 1: lr is set by both",
    ),
    *(
        (HEAD + table, f"{where}: {name} is set twice; leave it out once")
        for table, where, name in TWICE
    ),
    (
        HEAD + NONE + "[[overrides]]\nv-hack-k = 2\n",
        "[[arms]] 1 × [[overrides]] 1: --v-hack-k: not read by --intervention none",
    ),
    (HEAD + "common = { penalty = 2 }\n" + NONE, "--penalty: not read by any arm"),
    (HEAD + NONE + "v-hack-k = 2\n", "[[arms]] 1: --v-hack-k: not read by --intervention none"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message for _, message in BAD])
@pytest.mark.long
def test_bad_study_files(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match="study") as refused:
        load_study_file(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


# flags of every run → those that arm 1, `none`, and arm 2, `route2`, read
SHARED = [
    ("vhack-refresh-every = 2", set(), {"--vhack-refresh-every=2"}),
    (
        "rollout-ablate-frac = 0.5, lr = 1e-2",
        {"--lr=0.01"},
        {"--rollout-ablate-frac=0.5", "--lr=0.01"},
    ),
    (
        "gate-vote = 'module', unbiased = false",
        {"--no-unbiased"},
        {"--gate-vote=module", "--no-unbiased"},
    ),
    ("rebaseline = true", set(), {"--rebaseline"}),
]


@pytest.mark.parametrize(("common", "first", "second"), SHARED)
def test_a_flag_of_every_run_is_left_out_where_it_is_not_read(tmp_path, common, first, second):
    arms = '[[arms]]\nintervention = ["none", "route2"]\n'
    study = load_study_file(write(tmp_path, f"{HEAD}common = {{ {common} }}\n{arms}"))
    given = [{*run.flags[1:]} - {"--seed=1"} for run in study.runs]
    assert [{f for f in flags if "--intervention" not in f} for flags in given] == [first, second]
    assert len(study.left_out) == len(second) - len(first)
    assert all(line.endswith(": not read by none, and left out there") for line in study.left_out)


def test_the_queue_of_h1_has_as_many_seeds_as_its_judge_asks_for():
    judge = runpy.run_path(str(STUDIES / "judge.py"))
    seeds = {run.seed for run in load_study_file(STUDIES / "full.toml").runs}
    assert len(seeds) >= judge["SEEDS"]


SHIPPED = sorted(p.stem for p in STUDIES.glob("*.toml"))
MANY = ("arms", "containment", "unannounced")  # seventy command lines and more


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in MANY else n for n in SHIPPED]
)
@pytest.mark.long
def test_shipped_studies(name):
    study = load_study_file(STUDIES / f"{name}.toml", trusted=True)
    assert study.hypotheses
    assert study.name == name


def test_a_study_never_halts_its_runs(tmp_path):
    """Runs that are compared are of one length: the presets' own default would halt those that hack."""
    text = 'preset = "full"\nseeds = [1]\n[[arms]]\nintervention = ["none", "erase"]\n'
    runs = load_study_file(write(tmp_path, text)).runs
    assert [r.cfg.guard_mode for r in runs] == ["log", "log"]
    # none's own default is log
    assert [r.flags[-2] for r in runs] == ["--intervention=none", "--guard=log"]
    assert resolve(["full"]).guard_mode == "halt"
