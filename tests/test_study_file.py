"""Study files: what they expand to, and one line for everything that is wrong with them."""

from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from vgrout.config.method import CONTROLS, MethodConfig
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


def write(folder: Path, text: str) -> Path:
    path = folder / "study.toml"
    path.write_text(text)
    return path


@pytest.mark.long
def test_methods_times_overrides_times_seeds(tmp_path: Path) -> None:
    study = load_study_file(write(tmp_path, GOOD))
    assert (study.name, study.hypotheses) == ("study", ("a claim",))
    arms = ("none", "route2", "own · control=none", "own · control=haar")
    names = [f"{arm} · {how}" for arm in arms for how in ("lr=0.01", "lr=0.02", "biased")]
    assert [c.method for c in study.cells] == names * 2
    assert [c.seed for c in study.cells] == [1] * 12 + [2] * 12
    last = study.cells[-1]
    assert last.name == "own · control=haar · biased seed 2"
    assert last.flags == (
        *("smoke", "--steps=9", "--intervention=erase", "--control=haar", "--no-preserve-magnitude"),
        *("--no-unbiased", "--seed=2"),
    )
    assert all(resolve([*c.flags]) == c.cfg for c in study.cells)  # what was checked is what will run
    assert len({c.identity for c in study.cells}) == 24


def test_a_method_stands_for_its_flags(tmp_path: Path) -> None:
    text = HEAD + '[[arms]]\nintervention = "route2"\nrollout-ablate-frac = [0.5, 1.0]\n'
    cells = load_study_file(write(tmp_path, text)).cells
    assert [c.cfg.method.rollout_ablate_frac for c in cells] == [0.5, 1.0]
    assert {(c.cfg.method.intervention, c.cfg.method.quarantine) for c in cells} == {("route2", "block:-2")}
    assert all(resolve([*c.flags]) == c.cfg for c in cells)


HEAD = 'preset = "smoke"\nseeds = [1]\n'
NONE = '[[arms]]\nintervention = "none"\n'
BAD = [
    ("preset = ", "not TOML"),
    ('presets = "smoke"\n' + HEAD + NONE, "unknown key 'presets'"),
    ('preset = "maxi"\nseeds = [1]\n' + NONE, "preset 'maxi'"),
    ('preset = ["mini"]\nseeds = [1]\n' + NONE, "preset ['mini']"),
    ('preset = "smoke"\n' + NONE, "seeds None"),
    ('preset = "smoke"\nseeds = [1, 1]\n' + NONE, "one is there twice"),
    ('preset = "smoke"\nseeds = [true]\n' + NONE, "seeds [True]"),
    ('preset = "smoke"\nseeds = [-1]\n' + NONE, "--seed -1"),
    ('preset = "smoke"\nseeds = [1' + 400 * "0" + "]\n" + NONE, "seeds [1000"),
    ('preset = "smoke"\nseeds = [1' + 5000 * "0" + "]\n" + NONE, "not TOML: Exceeds"),
    ('name = "a/b"\n' + HEAD + NONE, "name 'a/b'"),
    (HEAD, "arms: should be one or more tables"),
    (HEAD + "arms = []", "arms: should be one or more tables"),
    (HEAD + "common = 3\n" + NONE, "[common]: should be a table"),
    (HEAD + "common = { lr = [1, 2] }\n" + NONE, "[common]: 'lr' is a list"),
    (HEAD + NONE + "learning-rate = 1\n", "[[arms]] 1: unknown flag 'learning-rate'"),
    (HEAD + NONE + "seed = 3\n", "[[arms]] 1: 'seed' is the sweep's own"),
    (HEAD + NONE + 'resume = "latest"\n', "'resume' is the sweep's own"),
    (HEAD + NONE + "lr = -1\n", "[[arms]] 1: --lr -1"),
    (HEAD + NONE + "lr = []\n", "'lr' is an empty list"),
    (HEAD + NONE + "lr = [[1]]\n", "'lr' is a list"),
    (HEAD + NONE + "max_new = 4\nmax-new = 5\n", "one flag is there twice"),
    (HEAD + NONE + 'control = "haar"\n', "[[arms]] 1: --control haar: replaces a direction"),
    (HEAD + NONE + NONE, "[[arms]] 2: the same runs as [[arms]] 1"),
    (HEAD + NONE + "threads = [1, 2]\n", "[[arms]] 1: two values of a list make the same runs"),
    (HEAD + NONE + "[[overrides]]\nlr = [1, 1.0]\n", "[[arms]] 1 × [[overrides]] 1: two values of a list"),
    (HEAD + NONE + 'name = "x"\n' + NONE + 'name = "x"\nlr = 1\n', "[[arms]] 2 (x): a second method called 'x'"),
    (HEAD + NONE + "lr = 1\n[[overrides]]\nlr = 2\n", "[[arms]] 1 × [[overrides]] 1: 'lr' is set by both"),
    (HEAD + NONE + "[[overrides]]\nv-hack-k = 2\n", "[[arms]] 1 × [[overrides]] 1: --v-hack-k: not read"),
    (HEAD + NONE + "out-tag = 1979-05-27\n", "'out-tag' is a date"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message for _, message in BAD])
@pytest.mark.long
def test_bad_study_files(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match="study") as refused:
        load_study_file(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_study_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_study_file(tmp_path / "no.toml")


shipped = cache(load_study_file)


SHIPPED = sorted(p.stem for p in STUDIES.glob("*.toml"))
SLOW = (
    "checks",
    "containment",
    "containment-rivals",
    "containment-routing",
    "containment-seeded",
    "containment-start",
    "controls",
    "sizes",
    "unannounced",
)  # eighty commands and more


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SHIPPED],
)
@pytest.mark.long
def test_shipped_studies(name: str) -> None:
    path = STUDIES / f"{name}.toml"
    study = shipped(path)
    assert study.hypotheses
    assert study.name == path.stem


@pytest.mark.slow
def test_three_studies_cover_every_control() -> None:
    cells = [c for name in ("arms", "controls", "checks") for c in shipped(STUDIES / f"{name}.toml").cells]
    arms = {"none", "erase", "route", "route2"}
    there = {(c.cfg.method.control, c.cfg.method.intervention) for c in cells if c.cfg.method.intervention in arms}
    wanted = set()
    for control, arm in product((c for c, row in CONTROLS.items() if row.of != "plain GRPO"), arms):
        with suppress(ValueError):
            MethodConfig(intervention=arm, control=control)
            wanted.add((control, arm))
    assert there == wanted
    assert {c.seed for c in cells} == {41, 42, 43, 44, 45}
    assert len({c.identity for c in cells}) == len(cells)


def test_a_study_never_halts_its_runs() -> None:
    """Runs that are compared are of one length: the presets' own default would halt those that hack."""
    study = load_study_file(STUDIES / "full.toml")
    assert {c.cfg.method.intervention for c in study.cells} == {"none", "erase", "route", "route2", "screen"}
    assert all(c.cfg.guard_mode == "log" for c in study.cells)
    assert all(("--guard=log" in c.flags) == (c.cfg.method.intervention != "none") for c in study.cells)
    assert resolve(["full"]).guard_mode == "halt"
