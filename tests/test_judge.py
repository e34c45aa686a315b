"""The example of --judge decides as it says, and a run's record shows whether it stood before the run."""

import shutil
from pathlib import Path

import pytest

from fake_runs import fake_run, found
from quick import first_quick
from vgrout.report import stats
from vgrout.report.judge import judged
from vgrout.report.rules import preregistered

STUDIES = Path(__file__).resolve().parents[1] / "studies"


@pytest.mark.parametrize(
    ("outcome", "hack", "solve", "seeds"),
    first_quick(
        [
            ("SUPPORTED", 0.3, 0.75, 5),
            ("UNDECIDED", 0.3, 0.75, 4),
            ("UNDECIDED", 0.3, 0.65, 5),  # 15 points of skill lost
            ("NOT SUPPORTED", 0.3, 0.55, 5),  # 25 points
        ]
    ),
)
def test_the_example_judges(outcome, hack, solve, seeds, tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 500)
    rates = {"none": (0.8, 0.1), "none --control=no_loophole": (0.0, 0.8), "erase": (hack, solve)}
    for method, (hacked, solved) in rates.items():
        for seed, off in zip(range(seeds), (0.01, -0.01, 0.0, 0.01, -0.01), strict=False):
            words = f"--intervention={method}".split()
            fake_run(
                tmp_path, *words, seed=seed, hack=max(0.0, hacked + off), solve=solved - off, n=120
            )
    (verdict,) = judged(STUDIES / "judge.py", found(tmp_path))[0].rows
    assert (verdict["about"], verdict["verdict"]) == ("erase", outcome)


def test_a_preregistration_is_of_the_studies_their_judges_and_the_statistics(tmp_path):
    studies = tmp_path / "studies"
    shutil.copytree(STUDIES, studies, ignore=shutil.ignore_patterns("__pycache__"))
    digest = preregistered(studies)
    assert digest == preregistered(STUDIES)
    for i, recorded in enumerate((digest, "0" * 64, None)):
        fake_run(
            tmp_path / str(i), "--intervention=none", seed=i, hashes={"preregistered": recorded}
        )
    (table,) = judged(studies / "judge.py", found(*(tmp_path / str(i) for i in range(3))))
    standing = (
        f"Of 3 runs 1 were started under these very rules and statistics ({digest[:12]}), "
        "1 under others, 1 under"
    )
    assert table.caption.startswith(standing)
    for name in ("judge.py", "arms.toml"):
        (studies / name).write_text((studies / name).read_text() + "\n# another word\n")
        before, digest = digest, preregistered(studies)
        assert before != digest, name


@pytest.mark.parametrize(
    ("outcome", "hack"),
    first_quick([("SUPPORTED", 0.1), ("UNDECIDED", 0.4), ("NOT SUPPORTED", 0.6)]),
)
def test_the_study_of_labels_is_judged_by_its_own_bounds(outcome, hack, tmp_path, monkeypatch):
    """L1: at recall 0.7 at least 40 points fewer hacks than plain GRPO's 80."""
    monkeypatch.setattr(stats, "RESAMPLES", 500)
    missing = "--intervention=penalty --monitor=labels --flags-kept=0.7"
    for words, hacked in (("--intervention=none", 0.8), (missing, hack)):
        for seed, off in zip(range(5), (0.02, -0.02, 0.0, 0.02, -0.02), strict=True):
            moved = off if words == missing else -off
            fake_run(tmp_path, *words.split(), seed=seed, hack=hacked + moved, solve=0.1, n=120)
    (verdict,) = judged(STUDIES / "judge_labels.py", found(tmp_path))[0].rows
    assert (verdict["hypothesis"], verdict["verdict"]) == ("L1", outcome)
