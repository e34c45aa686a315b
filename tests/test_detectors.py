"""Detectors on answers known beforehand, and on what they must refuse."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgrout.guard.detectors import (
    AdvantageCollapse,
    Bands,
    CollapseTripwire,
    DetectorReading,
    Drop,
    EchoTrap,
    Level,
    Tracker,
    echo_score,
    ensemble_divergence,
    words,
)
from vgrout.scoring import import_function

FLAG = "--rm-ensemble-members"
FINITE = st.floats(-1e6, 1e6)


def test_drop_bands():
    def after(current: float) -> DetectorReading:
        detector = Drop(baseline=2, window=1)
        detector.update(2.0)
        detector.update(2.0)
        return detector.update(current)

    assert [after(x).state for x in (2.5, 1.81, 1.79, 1.41, 1.39)] == [
        "OK",
        "OK",
        "WARN",
        "WARN",
        "HACK",
    ]
    assert after(2.5).value == 0
    assert after(1.5).value == pytest.approx(0.25)
    # it needs both windows and a positive baseline
    detector = Drop(baseline=3, window=2)
    assert [detector.update(1.0).state for _ in range(5)] == ["UNDEFINED"] * 4 + ["OK"]
    detector = Drop(baseline=1, window=1)
    assert [detector.update(x).state for x in (-1.0, -5.0)] == ["UNDEFINED"] * 2


def test_divergence_by_hand():
    """Two members: variance of (0, 1) is 1/4, of (1, 1) is 0. Three: of (0, 0, 3) is 2."""
    assert ensemble_divergence([[0, 1], [1, 1]]) == pytest.approx(0.125)
    assert ensemble_divergence([[0], [0], [3]]) == pytest.approx(2)


@given(st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=2, max_size=6))
def test_divergence_is_a_variance(scores):
    value = ensemble_divergence(scores)
    assert value >= 0
    assert ensemble_divergence(scores[::-1]) == pytest.approx(value)
    assert ensemble_divergence([scores[0]] * 4) == 0


@pytest.mark.parametrize(
    ("call", "of", "why"),
    [
        *(
            (lambda name: import_function(name, FLAG), name, f"{FLAG} {name}: ")
            for name in ("nowhere:f", "operator:nothing", "operator", "string:digits", ":f")
        ),
        (ensemble_divergence, [[1.0], [math.nan]], "member 1: nan is no finite number"),
        (Drop().update, math.inf, "drop: inf"),
        (Level(Bands(0.3, 0.6)).update, math.nan, "level: nan"),
    ],
    ids=lambda x: "" if callable(x) else str(x)[:20],
)
def test_what_is_no_number_no_member_or_too_much_is_refused_with_a_reason(call, of, why):
    with pytest.raises(ValueError, match=why):
        call(of)


def test_echo_by_hand():
    """a b a b c: bigrams ab, ba, bc; ab twice."""
    assert echo_score(["a", "b", "a", "b", "c"]) == pytest.approx(1 / 3)
    assert echo_score(["a"] * 50) == 1.0
    assert echo_score(["a"]) == 0.0
    assert echo_score(list("abcabc"), n=3) == pytest.approx(1 / 3)
    assert EchoTrap().score(["a a a a a", "a"]) == 0.5


CODE = "def f(self, a, b):\n    if a < b:\n        return self.f(b, a)\n    return self.g(a, b)\n"


def test_honest_code_is_not_an_echo():
    """It repeats itself: measured against zero it would sit halfway to a HACK; against its own kind it is at 0."""
    assert echo_score(words(CODE)) > 0.15
    trap = EchoTrap()
    assert trap.update([CODE]).state == "UNDEFINED"
    trap.calibrate([CODE] * 4)
    assert trap.update([CODE] * 4) == DetectorReading("OK", 0.0)
    readings = [trap.update(["x = x " * 100]) for _ in range(5)]
    assert readings[-1].state == "HACK"
    assert [r.state for r in readings].index("WARN") < [r.state for r in readings].index("HACK")


@pytest.mark.parametrize(
    ("series", "states"),
    [
        ((-2.0, -1.0, -3.9, -4.1, -6.1, -1.0, -6.1, -7.0), "OK OK OK WARN WARN OK WARN HACK"),
        ((-1.0, -math.inf, None, math.nan), "OK WARN UNDEFINED HACK"),
    ],
)
def test_tripwire_warns_then_stops_after_two(series, states):
    wire = CollapseTripwire()
    assert [wire.update(x).state for x in series] == states.split()
    assert wire.best == -1.0


def test_advantage_collapse():
    detector = AdvantageCollapse(window=3, bands=Bands(0.5, 0.9))
    readings = [detector.update(dead, 4) for dead in (0, 1, 0, 4, 4, 4)]
    assert [r.state for r in readings] == ["UNDEFINED", "UNDEFINED", "OK", "OK", "WARN", "HACK"]
    assert readings[3].value == pytest.approx(5 / 12)


TRACKERS: dict[str, tuple[Any, Any]] = {
    "drop": (lambda: Drop(baseline=2, window=2), lambda d, x: d.update(x)),
    "level": (lambda: Level(Bands(0.3, 0.6), window=2), lambda d, x: d.update(x)),
    "echo": (lambda: EchoTrap(base=0.1), lambda d, x: d.update(["ab " * int(9 * x)])),
    "advantage": (lambda: AdvantageCollapse(window=2), lambda d, x: d.update(int(4 * x), 4)),
    "collapse": (CollapseTripwire, lambda d, x: d.update(-9 * x)),
}


@pytest.mark.parametrize("name", TRACKERS)
@given(series=st.lists(st.floats(0, 1), min_size=1, max_size=15), cut=st.integers(0, 15))
def test_resuming_a_tracker_changes_nothing(name, series, cut):
    make, feed = TRACKERS[name]
    whole: Tracker = make()
    expected = [feed(whole, x) for x in series]
    first, second = make(), make()
    for x in series[:cut]:
        feed(first, x)
    second.load_state_dict(first.state_dict())
    assert [feed(second, x) for x in series[cut:]] == expected[cut:]
    assert second.state_dict() == whole.state_dict()
