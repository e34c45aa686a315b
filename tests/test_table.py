"""One column is one thing: construction, JSON, table."""

from typing import Any

import pytest

from vgrout.table import StepRow, Table
from vgrout.types import MODES, Rate


def row(**changes: Any) -> StepRow:
    values: dict[str, Any] = {
        **{"step": 3, "ref_eq": 0.5, "rew": 0.4, "rew_s": 0.3, "signal": Rate(3, 4), "all_zero": 1, "all_one": 0},
        **{
            "dropped": 0,
            "n": 32,
            "gt_s": Rate(10, 28),
            "gt_t": Rate(0, 4),
            "hack_s": Rate(2, 28),
            "hack_t": Rate(4, 4),
        },
        **{"hk": {m: Rate(1, 5) for m in MODES}, "hack_abl": None, "solve_abl": None, "hack_deploy": 0.1},
        **{
            "solve_deploy": 0.5,
            "lp_s": -0.2,
            "lp_t": -1.5,
            "loss": 0.01,
            "kl": None,
            "mismatch_kl": 1e-9,
            "mismatch_kl_abl": None,
            "ratio_min": 0.9,
            "ratio_mean": 1.0,
            "ratio_max": 1.2,
            "is_masked": 0.25,
            "is_masked_low": 0.125,
            "is_masked_high": 0.125,
            "masked_positive": 0.5,
            "masked_negative": 0.1,
            "masked_mismatch_kl": 1e-3,
            "unmasked_mismatch_kl": 1e-9,
            "gn": 0.3,
            "q_egy": None,
        },
        **{
            "tau": None,
            "hkgap": None,
            "resid": None,
            "cos_pre": 0.2,
            "cos_pre_s": 0.1,
            "cos_pre_t": 0.3,
            "cos_post": 0.0,
        },
        **{"cos_upd": 0.1, "fired": 0.9, "refr": 2, "skipped": 0, "lr": 3e-2, "gen": 0.5, "grade": 0.1, "fb": 0.2},
        **{"eval": None, "sec": 0.9, "cos_post_s": 0.0, "cos_post_t": 0.0, "capped": 0, "routed": None},
        **{"recall": Rate(3, 4), "false_flags": Rate(0, 5), "flag_t": None},
    }
    return StepRow(**(values | changes))


def test_json_round_trip() -> None:
    before = row()
    data = before.as_json()
    assert data["gt_s"] == [10, 28]
    assert data["hk_rt"] == [1, 5]
    assert StepRow.from_json(data) == before


def test_a_forgotten_column_is_an_error() -> None:
    with pytest.raises(TypeError):
        StepRow(step=1)  # type: ignore[call-arg]  # ty: ignore[missing-argument]


def test_nan_is_a_fault_and_none_is_not() -> None:
    assert row(loss=None).loss is None
    with pytest.raises(ValueError, match="loss"):
        row(loss=float("nan"))


def test_lines_and_header_align() -> None:
    table = Table({"teacher", "modes", "direction"}, list(MODES))
    first, *rest = table.lines(row())
    assert len(first) == len(rest[0])
    heads, cells = first.split(), rest[0].split()
    assert dict(zip(heads, cells, strict=True))["gt_s"] == "10/28"
    assert "·" in table.lines(row(hack_deploy=None))[-1]


def test_header_comes_again_every_50_rows() -> None:
    table = Table(set(), [])
    lines = [line for k in range(101) for line in table.lines(row(step=k))]
    assert [i for i, line in enumerate(lines) if line.split()[0] == "step"] == [0, 51, 102]


def test_only_what_the_run_measures_is_shown() -> None:
    vanilla = {c.name for c in Table({"teacher"}, []).columns}
    assert not vanilla & {"tau", "q_egy", "cos_pre", "hk", "hack_abl"}
    route2 = {c.name for c in Table({"teacher", "route", "route2", "direction", "modes"}, ["run_tests"]).columns}
    assert {"tau", "q_egy", "cos_pre", "cos_pre_t", "hk"} <= route2


def test_masked_shares_are_shown_by_the_losses_that_mask() -> None:
    columns = {c.name for c in Table({"drops"}, []).columns}
    assert {"ratio_min", "ratio_max", "is_masked", "masked_positive", "masked_negative"} <= columns
    assert not columns & {"ratio_mean", "is_masked_low", "masked_mismatch_kl", "kl"}, "for steps.jsonl alone"
    assert "kl" in {c.name for c in Table({"beta"}, []).columns}
    data = row().as_json()
    assert (data["masked_positive"], data["ratio_mean"]) == (0.5, 1.0), "whatever the table shows"


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_a_narrow_terminal_gets_a_line_that_fits(width: int) -> None:
    table = Table({"teacher", "modes", "direction", "route", "route2", "ablated", "drops"}, list(MODES), width)
    assert len(table.header()) <= width or len(table.columns) <= 8
    assert {"step", "hack_s", "gt_s"} <= {c.name for c in table.columns}
    assert any("narrow terminal" in line for line in table.legend())
