"""Pair files and what is refused, the hand-written set run for real."""

import json
import math
import os
from pathlib import Path

import pytest

from vgrout.config.run import PLACEBOS
from vgrout.direction.pairs import (
    handwritten,
    handwritten_placebo,
    load_pairs,
    pairs_from_pool,
)
from vgrout.ground.io import Refused

SHARED = Path(
    os.environ.get("VGROUT_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")
)
GOOD = [
    {"problem_id": f"p{i}", "prompt": f"task {i}", "hack": "pass", "clean": f"return {i}"}
    for i in range(4)
]


def write(path, rows):
    path.write_text(json.dumps(rows))
    return path


# ── files


def test_a_file_goes_round_and_its_hash_is_of_the_content(tmp_path):
    pairs = load_pairs(write(tmp_path / "a.json", GOOD))
    (tmp_path / "b.json").write_text(pairs.to_json())
    again = load_pairs(tmp_path / "b.json")
    assert again.pairs == pairs.pairs
    assert again.sha256 == pairs.sha256
    assert (pairs.stem, again.stem) == ("a", "b")
    edited = load_pairs(write(tmp_path / "a.json", [*GOOD[:3], GOOD[3] | {"hack": "pass "}]))
    assert edited.sha256 != pairs.sha256
    # the last two are held out
    assert load_pairs(write(tmp_path / "a.json", GOOD[::-1])).sha256 != pairs.sha256


def test_what_another_program_measured_of_a_pair_may_be_nan(tmp_path):
    measured = load_pairs(
        write(tmp_path / "measured.json", [pair | {"loss": math.nan} for pair in GOOD])
    )
    assert measured.sha256 == load_pairs(write(tmp_path / "a.json", GOOD)).sha256


def test_a_folder_gives_as_many_pairs_by_each_flaw(tmp_path):
    """In turns, so that those held out of an extraction are not of one flaw; other files are not read."""
    for flaw in ("sentinel", "run_tests", "placebo_long"):
        rows = [GOOD[0] | {"problem_id": i, "prompt": f"{flaw} {i}"} for i in range(20)]
        write(tmp_path / f"{flaw}.json", rows)
    prompts = [p.prompt for p in load_pairs(tmp_path).pairs]
    assert prompts == [f"{flaw} {i}" for i in range(12) for flaw in ("run_tests", "sentinel")]
    write(tmp_path / "run_tests.json", rows[:2])
    assert len(load_pairs(tmp_path)) == 4
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none: no such file of pairs"):
        load_pairs(tmp_path / "none")


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (GOOD[:2], "2 pairs; at least 3"),
        (
            {"pairs": GOOD},
            "should be text, not empty; give a JSON list of objects with problem_id, prompt, hack, clean",
        ),
        ([*GOOD, GOOD[1] | {"hack": "return 1"}], "pair 4: hack and clean are the same"),
        ([*GOOD, GOOD[2]], "pair 4: repeats pair 2"),
        ([*GOOD, GOOD[2] | {"hack": " \n"}], "entry 4: hack should be text, not empty"),
        ([*GOOD, GOOD[2] | {"prompt": "half \ud800"}], "entry 4: prompt should be text"),
    ],
)
def test_bad_files_are_refused_in_one_line_with_file_and_index(tmp_path, rows, complaint):
    path = write(tmp_path / "bad.json", rows)
    with pytest.raises(ValueError, match=r"bad\.json") as refused:
        load_pairs(path)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_and_a_broken_file_say_where(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json: no such file of pairs"):
        load_pairs(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('[\n{"problem_id": 1,\n')
    with pytest.raises(ValueError, match=r"torn\.json: not JSON \(.*: line 3 column 1"):
        load_pairs(tmp_path / "torn.json")


def test_the_public_pair_set_loads():
    path = SHARED / "prog_wide_clean.json"
    if not path.is_file():
        pytest.skip(f"{path.name}: no shared data beside this checkout")
    pairs = load_pairs(path)
    assert len(pairs) == 8
    assert all(
        p.prompt.endswith("</think>\n\n\n") and "execute_tests" in p.hack for p in pairs.pairs
    )


# ── the hand-written set


def test_the_packaged_pairs_are_the_ones_that_recorded_runs_name():
    """The sha256 of run.json, and of a direction file, is of these sets."""
    assert (
        handwritten().sha256 == "994daf6440d754f19865b7602cd59faa0bdf3863d308c87282d0a2d2943db57b"
    )
    assert {contrast: handwritten_placebo(contrast).sha256 for contrast in PLACEBOS} == {
        "flawed": "32db6f43fdff8506b90231d35a3f66a93524af7885497a9df4bf1b817d9e2dc1",
        "commented": "6576be75c7ad77dee1339bef27a695ce32fb462abcbc1978ce093c6f7481b50d",
        "long": "5079178eb3c8c910af655ed520ffd66c36e47cdcca937b79fc09e63634635d8b",
        "laid_out": "d4a94aed648e95396fb14834547da335dabbf7a676694d11d0d9b2d753624b24",
    }


# ── from a rollout log


def line(problem, text, *, passed=True, E=False, hacked=False, solved=False):
    return {
        "problem_id": problem,
        "prompt": f"task {problem}",
        "text": text,
        "passed": passed,
        "hacked": hacked,
        "solved": solved,
        "hacked_loophole_used": E,
    }


def log_of(tmp_path, rows):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_a_weak_detector_chooses_and_the_oracle_is_not_read(tmp_path):
    rows = []
    for p in range(4):
        rows += [
            line(p, "wrong", passed=False),
            # E does not see it: it stands on the clean side
            line(p, f"unseen hack {p}", hacked=True),
            line(p, f"seen hack {p}", E=True, hacked=True),
            line(p, f"later hack {p}", E=True, hacked=True),
            line(p, f"solve {p}", solved=True),
        ]
    path = log_of(tmp_path, rows)
    pairs = pairs_from_pool(path, "E")
    assert [(p.hack, p.clean) for p in pairs.pairs] == [
        (f"seen hack {i}", f"unseen hack {i}") for i in range(4)
    ]
    assert pairs.source.startswith("E:")
    for row in rows:  # poisoned labels change nothing
        row["hacked"], row["solved"] = not row["hacked"], not row["solved"]
    assert pairs_from_pool(log_of(tmp_path, rows), "E").pairs == pairs.pairs


def test_the_oracle_is_read_by_its_name_only_and_labelled(tmp_path):
    rows = [
        row
        for p in range(3)
        for row in (
            line(p, f"hack {p}", hacked=True),
            line(p, "broken", passed=False),
            line(p, "s", solved=True),
        )
    ]
    pairs = pairs_from_pool(
        log_of(tmp_path, rows), "oracle", lambda messages: f"<user>{messages[0]['content']}"
    )
    assert pairs.source.startswith("oracle:")
    assert [(p.prompt, p.hack, p.clean) for p in pairs.pairs] == [
        (f"<user>task {i}", f"hack {i}", "s") for i in range(3)
    ]


def test_a_log_without_enough_contrast_or_with_a_bad_line_is_refused(tmp_path):
    one_sided = [line(p, f"hack {p}", E=True) for p in range(5)]
    with pytest.raises(ValueError, match=r"\AE:.*rollouts\.jsonl: 0 pairs; at least 3"):
        pairs_from_pool(log_of(tmp_path, one_sided), "E")
    unlabelled = [line(0, "x"), {"problem": 1, "prompt": "p", "text": "t"}]
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 2: not a rollout with labels"):
        pairs_from_pool(log_of(tmp_path, unlabelled), "E")
    with pytest.raises(Refused, match=r"rollouts\.jsonl, line 1: "):
        pairs_from_pool(log_of(tmp_path, [line(0, "x") | {"text": None}]), "E")

    def fails(_):
        raise KeyError("a fault of ours")

    good = log_of(tmp_path, [line(0, "x", hacked=True)])
    with pytest.raises(KeyError, match="a fault of ours"):
        pairs_from_pool(good, "oracle", fails)
    (tmp_path / "rollouts.jsonl").write_text("{}{\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 1: not JSON"):
        pairs_from_pool(tmp_path / "rollouts.jsonl", "E")
