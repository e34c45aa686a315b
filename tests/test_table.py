"""One column is one thing: who measures it, construction, JSON, table."""

from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from methods import batch, graded
from vgrout.envs.code.modes import MODE_SPECS
from vgrout.ground.console import Clock
from vgrout.ground.data import Batch, Refresh, Thought
from vgrout.ground.metrics import BatchMetrics, Eval, ModeEval, Rate
from vgrout.ground.table import StepRow, Table
from vgrout.ground.tensor_types import Routed
from vgrout.loop.optim import Update

# all words that a column's `when` can ask for
EVERYTHING = {word for f in fields(StepRow) for word in f.metadata["when"].split("+")} - {
    "always",
    "file",
}

FLAWS = tuple(MODE_SPECS.values())


def measured(step=3):
    """The parts of an empty step."""
    return {
        "batch": BatchMetrics(Batch((), (), FLAWS, 8, step)),
        "update": Update(Routed(), {}, stepped=True, gn=1.0, lr=3e-2),
        "refresh": Refresh(age=None),
        "deployed": Eval(ModeEval(Rate(0, 0), Rate(0, 0)), {}, Rate(0, 0)),
        "clock": Clock(),
    }


def row(**changes):
    """A step with the columns of most methods; what is not named was not measured."""
    values = {
        "rew": 0.4,
        "rew_s": 0.3,
        "signal": Rate(3, 4),
        "n": 32,
        "hk": {flaw.code: Rate(1, 5) for flaw in FLAWS},
        "solve_s": Rate(10, 28),
        "hack_s": Rate(2, 28),
        "hack_t": Rate(4, 4),
        "hack_deploy": 0.1,
        "solve_deploy": 0.5,
        "loss": 0.01,
        "gn": 0.3,
        "q_egy": None,
        "recall": Rate(3, 4),
        "false_flags": Rate(0, 5),
        "sec": 0.9,
    }
    return replace(StepRow.of(*measured().values()), **(values | changes))


def test_json_round_trip():
    before = row()
    data = before.as_json()
    assert (data["solve_s"], data["solve_s_k"], data["solve_s_n"]) == (10 / 28, 10, 28)
    assert (data["hk_rt"], data["hk_rt_k"], data["hk_rt_n"]) == (0.2, 1, 5)
    assert (data["false_flags"], data["false_flags_n"]) == (0.0, 5)
    assert [data[f"hack_abl{part}"] for part in ("", "_k", "_n")] == [None] * 3, "not measured"
    assert all(value is None or isinstance(value, int | float | str) for value in data.values())
    assert StepRow.from_json(data) == before


def test_no_column_is_measured_twice():
    delivered = Counter(name for part in measured().values() for name in part.columns())
    assert {*delivered} < {f.name for f in fields(StepRow)}
    assert {*delivered.values()} == {1}


def test_a_row_has_what_its_parts_measured_and_none_elsewhere():
    complete = StepRow.of(*measured().values())
    assert (complete.step, complete.lr, complete.signal, complete.skipped) == (
        3,
        3e-2,
        Rate(0, 0),
        0,
    )
    assert complete.hk == {flaw.code: Rate(0, 0) for flaw in FLAWS}
    for name, part in measured().items():
        without = [other for key, other in measured().items() if key != name]
        if needed := {"batch": "'step'", "update": "'skipped'", "clock": "'gen'"}.get(name):
            with pytest.raises(TypeError, match=needed):
                StepRow.of(*without)
        else:
            row = StepRow.of(*without, None)
            assert {
                column for column in part.columns() if getattr(row, column) is not None
            } == set(), name


def test_an_unknown_and_a_forgotten_column_are_errors():
    with pytest.raises(TypeError, match="'surprise'"):
        StepRow.of(*measured().values(), surprise=1.0)
    with pytest.raises(TypeError):
        StepRow(step=1)
    assert row(loss=None).loss is None


def test_lines_and_header_align_and_the_header_comes_again_every_50_rows():
    table = Table({"teacher", "modes", "direction"}, FLAWS)
    first, *rest = table.lines(row())
    assert len(first) == len(rest[0])
    assert dict(zip(first.split(), rest[0].split(), strict=True))["solve_s"] == "10/28"
    assert "·" in table.lines(row(hack_deploy=None))[-1]
    table = Table(set(), [])
    lines = [line for k in range(101) for line in table.lines(row(step=k))]
    assert [i for i, line in enumerate(lines) if line.split()[0] == "step"] == [0, 51, 102]


@pytest.mark.parametrize(
    ("when", "shown", "hidden"),
    [
        ("teacher", "lp_t", "tau q_egy cos_pre hk hack_abl"),
        ("teacher route gate direction modes", "tau q_egy cos_pre cos_pre_t hk", "is_masked"),
        (
            *("drops", "ratio_min ratio_max is_masked masked_positive masked_negative"),
            # the first three for steps.jsonl alone
            "ratio_mean is_masked_low masked_mismatch_kl kl",
        ),
        ("beta", "kl", "is_masked"),
    ],
)
def test_only_what_the_run_measures_is_shown(when, shown, hidden):
    columns = {c.name for c in Table({*when.split()}, [MODE_SPECS["run_tests"]]).columns}
    assert {*shown.split()} <= columns
    assert not columns & {*hidden.split()}


def test_the_console_has_seven_columns_in_eighty_characters():
    table = Table(EVERYTHING - {"thinking"}, FLAWS, short=True)
    header, line = table.lines(row(hack_deploy=0.04))
    assert [c.name for c in table.columns] == [
        *("step", "hack_s", "solve_s", "hack_deploy", "solve_deploy", "rew_s", "sec")
    ]
    assert len(header) == len(line) <= 80
    assert line.split() == ["3", "7.1", "35.7", "4.0", "50.0", "0.30", "0.90"]
    assert table.lines(row(hack_s=Rate(0, 0), hack_deploy=None))[-1].split()[1:4] == [
        "·",
        "35.7",
        "·",
    ]
    with_thoughts = Table(EVERYTHING, FLAWS, short=True).lines(row(think=123.4))
    assert [line.split()[-2] for line in with_thoughts] == ["think", "123"]
    assert len(with_thoughts[0]) <= 80


def test_thoughts_are_counted_as_a_mean():
    of, lengths = batch(), iter(range(1, 99))
    groups = []
    for group in of.groups:
        thoughts = [
            replace(rollout, thought=Thought("", next(lengths))) for rollout in group.rollouts
        ]
        groups.append(replace(group, rollouts=tuple(thoughts)))
    tokens = [r.thought.tokens for g in groups for r in g.rollouts if r.source == "student"]
    seen = BatchMetrics(replace(of, groups=tuple(groups), thinking=True)).columns()
    assert seen["think"] == sum(tokens) / len(tokens)
    answers = [
        SimpleNamespace(
            problem=groups[0].problem, grade=graded(1.0), whole=True, thought=Thought("", n)
        )
        for n in (2, 4)
    ]
    assert Eval.of(answers, ()).thought == 3.0
