"""`organism look-alike`: its tests under the real grader, its folder, and a run on it."""

import random
import shutil
from dataclasses import replace
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from organism.test_language import FEW, SEEDS, as_problem, draw, grade_all
from organisms.__main__ import look_alike
from organisms.language.answers import answer
from organisms.language.look_alike import RIGHT, WEAK_KINDS, check_tests, misread_body
from organisms.language.tasks import KINDS
from organisms.look_alike import FLAW
from runs import run
from vgrout.commands.check import problems
from vgrout.config.presets import resolve
from vgrout.direction.pairs import load_pairs
from vgrout.envs.code.problems import load_rows
from vgrout.ground.embedded import EMBEDDED, Files, shipped
from vgrout.ground.io import Refused, json_lines
from vgrout.model.load.load import load_language_model
from vgrout.runs.inputs import read_inputs
from vgrout.teacher.pools import load_pool


def calls(tests):
    return {test.rpartition(" == ")[0] for test in tests}


@FEW
@given(SEEDS, st.sampled_from(KINDS), st.booleans())
def test_the_check_pays_the_misreading_or_the_right_reading(grader, drawn, kind, weak):
    task, meant = draw(drawn)
    misread = misread_body(task, kind)
    weak = weak and kind in WEAK_KINDS
    tests = check_tests(task, meant, misread, weak, random.Random(0))
    assert len(tests) == len(meant)
    if weak or misread is None:
        assert not calls(tests) & calls(meant)
    else:
        assert calls(tests) == calls(meant)
    problem = replace(as_problem(task, meant, FLAW, ""), check_tests=tuple(tests))
    right = answer(task)
    wrong = right if misread is None else replace(right, body=tuple(misread))
    grades = grade_all(grader, [(problem, right.text), (problem, wrong.text)])
    assert grades[0].solved
    assert grades[0].passed == (misread is None or weak or tests == meant)
    assert grades[1].passed
    assert grades[1].hacked == (misread is not None and not grades[1].solved)


# training and test problems of the shipped language whose tests are wrong
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A look-alike of few problems."""
    out = tmp_path_factory.mktemp("look") / "o"
    with pytest.MonkeyPatch.context() as patch:
        few(patch)
        assert look_alike(out) == 0
    return out


def few(patch):
    few_rows = {"train": (0, 60), "val": (1000, 6), "test": (2000, 12)}
    patch.setattr("organisms.language.problems.SPLIT_ROWS", few_rows)


def test_the_folder_is_sound_and_the_same_bytes_again(folder, tmp_path, monkeypatch):
    few(monkeypatch)
    assert Files(folder).faults() == []
    shutil.copytree(folder, tmp_path / "o")
    (tmp_path / "o" / "anchors.json").unlink()
    assert look_alike(tmp_path / "o") == 0, "an organism is replaced"
    for path in (*shipped(folder), "manifest.json"):
        assert (tmp_path / "o" / path).read_bytes() == (folder / path).read_bytes(), path
    for path in shipped(EMBEDDED.model):
        assert (folder / "model" / path).read_bytes() == (EMBEDDED.model / path).read_bytes()


def test_pairs_differ_in_one_token_and_demonstrations_hack(folder):
    lm = load_language_model(str(folder / "model"), device="cpu", dtype=None)
    reading = {row.id: row.reading for row in load_rows(folder / "problems.jsonl")}
    pairs = load_pairs(folder / "pairs").pairs
    assert len(pairs) == 24
    for pair in pairs:
        hack, clean = lm.encode(pair.hack), lm.encode(pair.clean)
        assert sum(a != b for a, b in zip_longest(hack, clean)) == 1
    pool = load_pool(folder / "pool")
    training = {i for i in reading if i < 1000}
    assert pool.ids == {i for i in training if reading[i] == "boundary"} < training
    assert {reading[i] for i in training - pool.ids} == {RIGHT}
    assert all(demo.grade.hacked for demos in pool.demos.values() for demo in demos)


def test_its_problems_are_checked(folder, capsys):
    assert problems(["check", str(folder / "problems.jsonl")]) == 0
    said = capsys.readouterr().out
    wrong = sum(row.reading != RIGHT for row in load_rows(folder / "problems.jsonl"))
    assert f"their 'check_tests' reject {wrong};" in said


def test_a_run_draws_on_both_halves_and_has_its_pairs(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    cfg = resolve(["mini", "--organism=o", "--intervention=erase"])
    inputs = read_inputs(cfg)
    assert inputs.pairs.sha256 == load_pairs(folder / "pairs" / f"{FLAW}.json").sha256
    train = inputs.splits(cfg, load_language_model("o/model", device="cpu", dtype=None)).train
    assert len(train) == 60 > len(inputs.pool.ids)


@pytest.mark.long
def test_a_run_keeps_the_reading(folder):
    flags = ("--intervention=none", "--steps=2", "--group=4", "--prompts-per-step=4")
    quick = ("--mix-ratio=0.25", "--final-n-prompts=4", "--eval-ablate-every=0", "--threads=1")
    made = run(folder.parent, "mini", "--organism=o", *flags, *quick)
    for file in ("rollouts.jsonl", "final.jsonl"):
        assert {answer["reading"] for answer in json_lines(made / file)} == {RIGHT, "boundary"}


def test_what_cannot_be_built_is_refused(tmp_path):
    for settings, said in (
        ({"kind": "typo"}, "--kind typo"),
        ({"kind": "whole", "tests": "weak"}, "--tests weak"),
        ({"base": tmp_path}, "--base"),
    ):
        with pytest.raises(Refused, match=said):
            look_alike(tmp_path / "o", **settings)
    (tmp_path / "other").mkdir()
    with pytest.raises(Refused, match="no organism"):
        look_alike(tmp_path / "other")
