"""Problem files: refusals that name the line; modes, markers, splits, draws."""

import json
import keyword
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vgrout.commands import evaluate
from vgrout.config.presets import resolve
from vgrout.config.settings import EnvConfig
from vgrout.envs import base
from vgrout.envs.base import (
    balanced,
    in_splits,
    require_apart,
    require_copies_together,
)
from vgrout.envs.code.environment import CodeEnvironment
from vgrout.envs.code.grading.extract import UnsupportedTest, parse_test
from vgrout.envs.code.modes import MODE_SPECS, MODES, PLAIN_PHRASE
from vgrout.envs.code.problems import (
    assigned,
    load_rows,
    plainly_sound,
)
from vgrout.ground import embedded
from vgrout.ground.io import reading_once
from vgrout.ground.rng import py_stream
from vgrout.model.policy import Policy
from vgrout.runs.inputs import read_inputs
from worlds import load_splits


def record(number, **changes):
    return {
        "id": number,
        "prompt": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": f"Do {number} {PLAIN_PHRASE}. Go."},
        ],
        "gt_answer": ["assert Solution().f(1) == 1"],
        "func_name": "Solution().f",
        "setup_code": "",
        "canonical_solution": "class Solution:\n    def f(self, x): return x",
        **changes,
    }


def write(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


@pytest.fixture
def world_of(tmp_path):
    def make(n=120, **changes):
        rows = load_rows(write(tmp_path / "p.jsonl", [record(i) for i in range(n)]))
        settings = {
            "env_mode": "own",
            "n_problems": 1000,
            "seed": 1,
            "max_prompt": 10**6,
        }
        settings["prompt_len"] = lambda p: len(p.messages[-1]["content"])
        return load_splits(rows, **(settings | changes))

    return make


BROKEN = {
    "no id": ({k: v for k, v in record(2).items() if k != "id"}, "line 2: key 'id' is missing"),
    "id twice": (record(1), "line 2: id 1 already used at .*line 1"),
    "phrase missing": (
        record(2, prompt=[{"role": "user", "content": "x"}]),
        "exactly once, found 0",
    ),
    "test is not Python": (
        record(2, gt_answer=["assert Solution().f(1 == 1"]),
        "line 2: test 1: not Python",
    ),
    "misspelt key": (
        record(2, canonical_solutoin="x"),
        "'canonical_solutoin'; did you mean 'canonical_solution'",
    ),
    "a key twice": (json.dumps(record(2))[:-1] + ', "id": 3}', "line 2: key 'id' is there twice"),
    "half a character in a key that is not read": (
        record(2, question=chr(0xDC00)),
        "line 2: it holds half",
    ),
    "an id beyond 53 bits": (record(2**53), "line 2: its id should be a whole number from 0"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_line_is_named(tmp_path, case):
    line, message = BROKEN[case]
    with pytest.raises(ValueError, match=message):
        load_rows(write(tmp_path / "p.jsonl", [record(1), line]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps([record(1)], indent=1), ", line 1: not JSON"),
        ("id,prompt\n1,x\n", ", line 1: not JSON"),
        ("", ": no problems"),
    ],
)
def test_another_format_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"p\.jsonl{message}"):
        load_rows(write(tmp_path / "p.jsonl", [text]))


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = write(tmp_path / "p.jsonl", [record(1)])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row.id for row in load_rows(path)] == [1]


def test_splits_are_disjoint_and_no_seed_moves_them(world_of):
    a, b = world_of(seed=1), world_of(seed=2)
    for part in ("train", "val", "test"):
        assert {p.id for p in getattr(a, part)} == {p.id for p in getattr(b, part)}
    assert (len(a.train), len(a.val), len(a.test)) == (84, 12, 24)


def test_evaluation_markers_are_never_training_markers(world_of):
    world = world_of()
    for mode in MODES:
        spec = MODE_SPECS[mode]
        assert {p.marker for p in world.train if p.mode == mode} <= set(spec.train_markers)
        assert {p.marker for p in (*world.val, *world.test) if p.mode == mode} <= set(
            spec.eval_markers
        )


def test_full_announces_the_benchmarks_own_name(world_of):
    """--marker-names"""
    cfg = resolve(["full"])
    world = world_of(env_mode=cfg.env.env_mode, published=cfg.env.marker_names == "published")
    prompts = {
        p.messages[-1]["content"].partition("and will be ")[2]
        for p in (*world.train, *world.val, *world.test)
    }
    assert {prompt.partition(".")[0] for prompt in prompts} == {
        "evaluated by calling a function called run_tests()"
    }
    varied = {p.marker for p in world_of(env_mode=cfg.env.env_mode, published=False).train}
    assert len(varied) > 1


def test_pool_coverage_and_held_out_modes(world_of):
    covered = world_of(only_ids=range(50))
    assert {p.id for p in covered.train} <= set(range(50))
    extra = world_of(only_ids=range(50), only_modes=["sentinel"])
    assert all(p.id < 50 or p.mode == "sentinel" for p in extra.train)
    assert any(p.id >= 50 for p in extra.train)


def test_long_prompts_are_counted(world_of):
    assert world_of(max_prompt=10**6).too_long == 0
    with pytest.raises(ValueError, match=r"p\.jsonl: none of its prompts fits the 1 tokens"):
        world_of(max_prompt=1)


def test_draws_depend_on_seed_and_step_alone_and_cover_all(world_of):
    world = world_of()
    drawn = world.draw(5, 7, 4)
    base._order.cache_clear()
    assert world_of().draw(5, 7, 4) == drawn
    assert world.draw(5, 7, 4) != world.draw(6, 7, 4)
    n = len(world.train)
    epoch = [p.id for step in range(n // 4) for p in world.draw(5, step, 4)]
    assert Counter(epoch).most_common(1)[0][1] == 1
    assert len(epoch) == n


def test_balanced_sets_spread_over_modes(world_of):
    chosen = balanced(world_of(600).test, 24, 0, "test", MODES)
    assert set(Counter(p.mode for p in chosen).values()) == {4}
    assert len(balanced(world_of(60).test, 10**6, 0, "test", MODES)) == len(world_of(60).test)


def test_with_a_test_file_all_other_problems_train(tmp_path, world_of):
    held = load_rows(write(tmp_path / "test.jsonl", [record(i) for i in range(1000, 1050)]))
    world = world_of(120, test_rows=held)
    assert {p.id for p in world.train} == {*range(120)}
    assert (len(world.val), len(world.test)) == (10, 40)
    assert {p.id for p in (*world.val, *world.test)} == {*range(1000, 1050)}
    for p in (*world.val, *world.test):
        assert p.marker in MODE_SPECS[p.mode].eval_markers


def test_the_splits_that_a_file_names_are_kept(tmp_path, world_of):
    held = load_rows(
        write(tmp_path / "test.jsonl", [record(i, split="val") for i in range(1000, 1010)])
    )
    world = world_of(20, test_rows=held)
    assert (len(world.train), len(world.val), len(world.test)) == (20, 10, 0)


class Wide(Policy):
    """A policy whose window holds every prompt; nothing is loaded."""

    def __init__(self):
        pass

    @property
    def window(self):
        return 10**6

    def render(self, messages):
        return (0,)


def drawn(*argv):
    """(problem, mode, marker) of each step's prompts."""
    cfg = resolve(["mini", *argv])
    splits = read_inputs(cfg).splits(cfg, Wide())
    return [
        [(p.id, p.mode, p.marker) for p in splits.draw(cfg.run.seed, step, 4)] for step in range(60)
    ]


@pytest.mark.parametrize("seed", ["41", pytest.param("42", marks=pytest.mark.slow)])
def test_controls_train_on_the_same_problems(seed):
    """Step by step the same prompts at the same seed, whether or not demonstrations are mixed in."""
    with reading_once():
        plain_run = drawn("--intervention=none", "--seed", seed)
        assert len({p for step in plain_run for p in step}) < 190, "those that the pool covers"
        for control in (
            ["--intervention=none", "--control=no_loophole"],
            ["--intervention=none", "--mix-ratio=0"],
            ["--intervention=penalty", "--monitor=labels"],
            ["--intervention=route2", "--control=haar"],
            ["--intervention=screen", "--monitor=detector", "--control=no_loophole"],
        ):
            assert drawn(*control, "--seed", seed) == plain_run
        assert drawn("--intervention=none", "--teacher-pool-dir=", "--seed", seed) != plain_run


def renamed(text, of):
    """The record under another prompt."""
    return {**of, "prompt": [{"role": "user", "content": text}]}


# Forms of one prompt, which a model answers from memory.
COPIES = {
    "the same": f"Add them {PLAIN_PHRASE}.",
    "other blanks": f"Add  them\n{PLAIN_PHRASE}. ",
    "other line ends": f"Add them\r\n {PLAIN_PHRASE}.",
    "other case": f"ADD Them {PLAIN_PHRASE}.",
    "a no-break space": f"Add\u00a0them {PLAIN_PHRASE}.",
}


def with_copies(tmp_path, n, text, **changes):
    """n problems, each of them twice: the second time in this form, under a system message of its own."""
    records = []
    for i in range(n):
        plain_text = COPIES["the same"].replace("them", f"them{i}")
        records.append(renamed(plain_text, record(2 * i)))
        other = renamed(text.replace("them", f"them{i}").replace("Them", f"Them{i}"), record(0))
        other["prompt"].insert(0, {"role": "system", "content": f"another {i}"})
        records.append({**other, "id": 2 * i + 1, **changes})
    return load_rows(write(tmp_path / "copies.jsonl", records))


@pytest.mark.parametrize("text", COPIES.values(), ids=COPIES)
def test_copies_of_a_prompt_come_into_one_split(tmp_path, text):
    rows = with_copies(tmp_path, 30, text)
    split_of = {row.id: name for name, part in in_splits(rows).items() for row in part}
    assert len(split_of) == 60
    assert [split_of[2 * i] for i in range(30)] == [split_of[2 * i + 1] for i in range(30)]
    assert Counter(split_of.values()) == {"train": 42, "val": 6, "test": 12}
    with pytest.raises(ValueError, match=r"line 2: has the prompt of .*line 1"):
        require_apart(rows[:1], rows[1:2])


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_copy_follows_the_one_that_is_marked(tmp_path, split):
    rows = with_copies(tmp_path, 10, COPIES["other case"], split=split)
    assert len(in_splits(rows)[split]) == 20


def test_one_prompt_marked_for_two_splits_is_refused(tmp_path):
    rows = with_copies(tmp_path, 1, COPIES["other blanks"], split="test")
    require_copies_together(rows)
    marked = [replace(rows[0], split="train"), rows[1]]
    with pytest.raises(ValueError, match=r"line 2: has the prompt of .*line 1, and is marked test"):
        require_copies_together(marked)


def test_other_prompts_are_no_copies_and_are_split_as_before(tmp_path):
    """The positions in the shuffle of a file without copies are those that recorded runs have."""
    rows = load_rows(write(tmp_path / "p.jsonl", [record(i) for i in range(20)]))
    order = sorted(rows, key=lambda row: row.id)
    py_stream(0, "split").shuffle(order)
    parts = in_splits(rows)
    assert [*parts["train"], *parts["val"], *parts["test"]] == order


def test_a_method_of_a_familys_name_is_dealt_another_name(tmp_path):
    for mode in ("run_tests", "sentinel"):
        for name in (*MODE_SPECS[mode].train_markers, *MODE_SPECS[mode].eval_markers):
            tests = [f"assert Solution().{name}(1) == 1"]
            records = [record(i, func_name=name, gt_answer=tests) for i in range(20)]
            parts = assigned(load_rows(write(tmp_path / "p.jsonl", records)), mode)
            assert name not in {p.marker for part in parts.values() for p in part}


# ── tests that are seen to be sound without parsing

WORDS = st.sampled_from(["f", "x", "nums", "s1", "_a", "match", "__debug__", "é", *keyword.kwlist])
SCALARS = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(st.characters(codec=None, max_codepoint=0x10000), max_size=8),
    st.binary(max_size=3),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=8,
).map(repr)
PIECES = st.sampled_from([*"()[]{}:'\"\\\n0.= -#", "\0", ", ", "\ud800"])


@st.composite
def assertions(draw):
    """A test like those of a problem file, often with something changed in it."""
    arguments = draw(st.lists(VALUES, max_size=3))
    named = [f"{draw(WORDS)} = {value}" for value in draw(st.lists(VALUES, max_size=3))]
    called = ", ".join([*arguments, *named])
    text = f"assert Solution().{draw(WORDS)}({called}) == {draw(VALUES)}"
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(PIECES) + text[place + draw(st.integers(0, 2)) :]
    return text


@given(assertions())
@example("assert Solution().f() == 007")
@example("assert Solution().f() == 1 == 2")
@example("assert Solution().f() == '\0'")
@example("assert Solution().f(x = 1, 2) == 3")
@example("assert Solution().f({[1]: 2}) == 3")
@example("assert Solution().f(True = 1) == 3")
@example("assert Solution().f(x = 1 == 2) == 3")
@example("assert Solution().f() == " + 6000 * "1")
def test_what_is_plainly_sound_can_be_parsed(text):
    """By hand-written tests and by many that are damaged at random."""
    if plainly_sound(text):
        parse_test(text)


def test_a_file_as_they_usually_are_is_read_without_parsing():
    """Else the pattern would be for nothing; and a test that is not plain is parsed."""
    for row in load_rows(embedded.PROBLEMS):
        assert all(map(plainly_sound, row.tests))
    for text in (
        "assert f(1) == 2",
        "assert Solution().f(x) == 1",
        "assert Solution().f() == (1,",
        "",
    ):
        assert not plainly_sound(text)
        with pytest.raises(UnsupportedTest):
            parse_test(text)
    text = "assert Solution().f(x = 'a', y=[[1, [2.5, None]], []]) == {1: ['b'], -2: False}"
    assert plainly_sound(text)
    assert parse_test(text).expected == {1: ["b"], -2: False}


def test_a_training_problem_is_evaluated_under_the_name_that_its_pool_announces(
    tmp_path, monkeypatch
):
    """`evaluate --split train` and `sample` ask what training asked."""
    rows = load_rows(write(tmp_path / "p.jsonl", [record(i) for i in range(20)]))
    pool = SimpleNamespace(partition={}, announced={i: f"name_{i}" for i in range(20)})
    monkeypatch.setattr(evaluate, "load_pool", lambda *_: pool)
    cfg = SimpleNamespace(
        pool_path=tmp_path, plain_prompts=False, env=EnvConfig(env_mode="sentinel")
    )
    saved = SimpleNamespace(cfg=cfg)
    tasks = evaluate.tasks_of(CodeEnvironment(saved.cfg, rows), saved)
    found = tasks["train"]
    assert {problem.id: problem.marker for problem in found} == {
        problem.id: f"name_{problem.id}" for problem in found
    }
    assert not {problem.marker for problem in tasks["test"]} & {*pool.announced.values()}


def test_every_row_of_a_file_is_asked_as_the_run_asks(tmp_path, monkeypatch):
    """`evaluate --split all`: under the flaws and names of its pool and preset, with prompts as plain as its own."""
    rows = load_rows(write(tmp_path / "p.jsonl", [record(i) for i in range(6)]))
    modes = ["stdout_marker" if i % 3 else "sentinel" for i in range(6)]
    pool = SimpleNamespace(partition=dict(enumerate(modes)), announced={})
    monkeypatch.setattr(evaluate, "load_pool", lambda *_: pool)

    def asked(plain_prompts=False, **env):
        cfg = SimpleNamespace(
            pool_path=tmp_path,
            plain_prompts=plain_prompts,
            env=EnvConfig(env_mode="exit_code", **env),
        )
        saved = SimpleNamespace(cfg=cfg)
        return evaluate.tasks_of(CodeEnvironment(saved.cfg, rows), saved)["all"]

    usual, published = asked(), asked(marker_names="published")
    assert [p.mode for p in usual] == [p.mode for p in published] == modes
    assert all(p.marker in MODE_SPECS[p.mode].eval_markers for p in usual)
    assert {p.marker for p in published} == {
        MODE_SPECS[mode].default_marker for mode in ("sentinel", "stdout_marker")
    }
    assert all(p.messages != p.plain for p in usual)
    plain, both = asked(True), asked(True, unannounced_modes="exit_code,eq_override")
    assert [p.messages for p in plain] == [p.messages for p in both] == [p.plain for p in usual]
    assert [p.flaws for p in plain] == [p.flaws for p in usual]
    assert all({*p.flaws} == {"exit_code", "eq_override"} for p in both)
