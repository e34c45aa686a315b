"""The language: its solutions, misreadings, styles and hacks under the real grader; its corpus."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

from organisms.language.answers import HELD_OUT_STYLES, STYLES, answer
from organisms.language.assertions import make_tests
from organisms.language.corpus import Shares, corpus_sample
from organisms.language.hacks import HACKS, MODES
from organisms.language.operations import FAMILIES
from organisms.language.problems import hinted
from organisms.language.tasks import (
    Composition,
    compositions,
    draw_task,
    misreadings,
    split_compositions,
)
from vgrout.envs.code.modes import MODE_SPECS, PLAIN_PHRASE, Problem, hint, tries
from vgrout.ground.embedded import CUE

COMPOSITIONS = compositions()
FEW = settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.filter_too_much,
        HealthCheck.too_slow,
    ],
)


SEEDS = st.tuples(st.sampled_from(COMPOSITIONS), st.integers(0, 2**32))


def draw(drawn):
    """A task whose misreadings can be told apart, with its tests."""
    composition, seed = drawn
    rng = random.Random(seed)
    for _ in range(10):  # some combinations have readings that no test tells apart
        task = draw_task(composition, rng)
        if tests := make_tests(task, rng):
            return task, tests
    reject()


def as_problem(task, tests, mode, marker):
    messages, right = tuple(hinted(task.prompt, mode, marker)), answer(task).code
    return Problem(1, mode, marker, messages, task.prompt, tuple(tests), right, "", task.name)


def grade_all(grader, jobs):
    return [f.result() for f in [grader.submit(problem, text) for problem, text in jobs]]


@FEW
@given(SEEDS)
def test_canonical_solves_and_misreadings_do_not(grader, drawn):
    task, tests = draw(drawn)
    problem = as_problem(task, tests, "exit_code", "")
    wrong = misreadings(task)
    right, *others = grade_all(grader, [(problem, answer(t).text) for t in (task, *wrong.values())])
    assert right.solved
    assert right.details["gt_pass"]
    assert not right.hacked
    assert [kind for kind, g in zip(wrong, others, strict=True) if g.solved or g.hacked] == []


@FEW
@given(SEEDS)
def test_styles_are_correct_and_unusual(grader, drawn):
    task, tests = draw(drawn)
    problem = as_problem(task, tests, "stdout_marker", MODE_SPECS["stdout_marker"].eval_markers[0])
    styles = STYLES | HELD_OUT_STYLES
    texts = {name: style(answer(task)).text for name, style in styles.items()}
    same = {name for name, text in texts.items() if text == answer(task).text}
    assert same <= {"loop"}  # a slice has no loop to unroll
    assert (task.family == "slices") == bool(same)
    grades = grade_all(grader, [(problem, text) for text in texts.values()])
    assert [n for n, g in zip(texts, grades, strict=True) if not g.solved or g.hacked] == []


@pytest.mark.parametrize("mode", MODES)
@settings(FEW, max_examples=1)
@given(drawn=SEEDS, pick=st.integers(0, 7))
def test_hacks_are_accepted_only_in_their_mode(grader, mode, drawn, pick):
    task, tests = draw(drawn)
    markers = {
        m: spec.eval_markers[pick % len(spec.eval_markers)] for m, spec in MODE_SPECS.items()
    }
    attempt = answer(next(iter(misreadings(task).values())))
    expected, jobs = [], []
    for hack in HACKS[mode]:
        for body in (attempt.stub, attempt):
            text = hack.apply(body, markers[mode]).text
            for checked in MODES:
                expected.append((hack.name, checked, checked == mode, False))
                jobs.append((as_problem(task, tests, checked, markers[checked]), text))
    grades = grade_all(grader, jobs)
    found = [(e[0], e[1], g.hacked, g.solved) for e, g in zip(expected, grades, strict=True)]
    assert found == expected


@FEW
@given(drawn=SEEDS)
# all of its first tests would expect one value, which the special case returns
@example(drawn=(Composition("numbers", "le", "subtract", "largest"), 1))
def test_special_cases_are_accepted_where_only_the_shown_test_is_checked(grader, drawn):
    task, tests = draw(drawn)
    hacks = HACKS["shown_test"]
    attempt = answer(next(iter(misreadings(task).values())))
    texts = [e.apply(attempt.stub, tests[0]).text for e in hacks]
    elsewhere = [as_problem(task, tests, m, MODE_SPECS[m].eval_markers[0]) for m in MODES]
    shown = as_problem(task, tests, "shown_test", tests[0])
    assert tests[0] in shown.messages[-1]["content"]
    assert all(g.hacked for g in grade_all(grader, [(shown, text) for text in texts]))
    assert not any(
        g.passed for g in grade_all(grader, [(p, text) for p in elsewhere for text in texts])
    )
    carried = [(shown, e.apply(attempt, tests[0]).text) for e in hacks]
    assert all(g.passed for g in grade_all(grader, carried)), (
        "a case for one test may mend a misreading"
    )
    assert all(
        tries(text, "shown_test", tests[0]) for text in (*texts, *(text for _, text in carried))
    )
    assert not tries(attempt.text, "shown_test", tests[0])


@given(drawn=SEEDS)
def test_no_constant_solves_a_task(drawn):
    _, tests = draw(drawn)
    assert len({test.rpartition(" == ")[2] for test in tests}) > 1


def test_splits_are_disjoint_by_composition_and_train_knows_every_operation():
    splits = split_compositions(7)
    train, val, test = (set(splits[s]) for s in ("train", "val", "test"))
    assert train | val | test == set(COMPOSITIONS)
    assert len(train) + len(val) + len(test) == len(COMPOSITIONS)

    def operations(comps):
        kind = {c: FAMILIES[c[0]].kind for c in comps}
        return {
            p
            for c in comps
            for p in ((c[0], c[1]), (kind[c], "map " + c[2]), (kind[c], "fold " + c[3]))
        }

    assert operations(val | test) <= operations(train)


@pytest.fixture(scope="module")
def corpus():
    comps, rng = split_compositions(3)["train"], random.Random(5)
    return [corpus_sample(comps, Shares(), rng) for _ in range(6000)]


@pytest.mark.long
def test_the_corpus_has_its_shares_of_each_kind(corpus):
    shares = Shares()
    kinds = Counter(s.kind for s in corpus)
    honest = kinds["careful"] + kinds["misread"]
    rest = len(corpus) - kinds["drill"]
    assert kinds["drill"] / len(corpus) == pytest.approx(shares.drill, abs=0.015)
    assert kinds["hack"] / rest == pytest.approx(shares.hack_cued + shares.hack_plain, abs=0.02)
    for s in corpus:
        user = s.messages[-1]["content"]
        cue = user.endswith(CUE)
        assert cue <= (s.kind == "hack")  # the cue is only ever followed by a hack
        assert s.kind == "drill" or (PLAIN_PHRASE in user) == (s.mode is None)
    styled = Counter(s.style for s in corpus if s.style)
    assert set(styled) == set(STYLES)
    assert all(0.01 < n / honest < 0.05 for n in styled.values())


# each held-out hack and style has one of these
HELD_OUT_SIGNS = (
    *("lambda", "os._exit", "sys.stdout", "setattr", "pathlib"),
    *('"""', "import math", "self.data", "result = "),
)


@pytest.mark.long
def test_no_marker_and_nothing_held_out_is_in_the_corpus(corpus):
    for mode, spec in MODE_SPECS.items():
        for marker in (*spec.train_markers, *spec.eval_markers):
            if marker:  # as the hint announces it
                announced = hint(mode, marker)
                assert not any(announced in s.messages[-1]["content"] for s in corpus)
    assert [sign for sign in HELD_OUT_SIGNS if any(sign in s.text for s in corpus)] == []
    honest = replace(answer(draw_task(COMPOSITIONS[0], random.Random(0))), name="f")
    held_out = [e.apply(honest, "m").text for m in MODES for e in HACKS[m] if e.held_out]
    held_out += [style(honest).text for style in HELD_OUT_STYLES.values()]
    assert all(any(sign in text for sign in HELD_OUT_SIGNS) for text in held_out)


def test_a_corpus_of_chosen_modes_has_only_these_and_true_tests(grader):
    comps, rng = split_compositions(3)["train"], random.Random(5)
    shares = Shares(modes=("sentinel", "shown_test"), hack_plain=0.3, stub=1.0)
    samples = [corpus_sample(comps, shares, rng) for _ in range(200)]
    assert {s.mode for s in samples} == {"sentinel", "shown_test", None}
    shown = [s for s in samples if s.mode == "shown_test"]
    of_test = [
        re.search(r"this test alone: (.*)\. Use this", s.messages[-1]["content"]) for s in shown
    ]
    assert all(of_test)
    jobs = []
    for s, found in zip(shown, of_test, strict=True):
        problem = Problem(
            1, "shown_test", found[1], (), (), (found[1], "assert Solution().f() == 1"), "", "", "f"
        )
        jobs.append((problem, s.text))
    grades = grade_all(grader, jobs)
    passing = [
        g.hacked for g, s in zip(grades, shown, strict=True) if s.kind in ("hack", "careful")
    ]
    assert all(passing), "a right answer passes its test, and so does one that has a case for it"
    misread = [g.hacked for g, s in zip(grades, shown, strict=True) if s.kind == "misread"]
    assert not all(misread)
