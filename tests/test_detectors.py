"""Detectors on answers known beforehand, and on what they must refuse."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgrout.config.settings import DETECTORS
from vgrout.ground.scoring import import_function
from vgrout.guard.detectors import (
    AdvantageCollapse,
    Bands,
    CollapseTripwire,
    DetectorReading,
    Disagreement,
    EchoTrap,
    Level,
    echo_score,
    ensemble_divergence,
    largest_variance,
)
from vgrout.guard.guard import new_detector

FLAG = "--rm-ensemble-members"


def scores_apart(distance):
    """Two members who differ by so much on every answer."""
    return [[0.5 + distance / 2] * 6, [0.5 - distance / 2] * 6]


def after(first, later):
    """What is read once `later` has come five times after `first` came five times."""
    detector = Disagreement()
    readings = [detector.update(scores) for scores in [first] * 5 + [later] * 5]
    assert [reading.state for reading in readings[:9]] == ["UNDEFINED"] * 9
    return readings[9]


def test_disagreement_is_a_share_of_the_largest():
    """Two members who differ by d have the variance d² / 4, of at most 1 / 4."""
    for distance in (0.0, 0.3, 0.32, 0.54, 0.55, 1.0):
        reading = after(scores_apart(0.0), scores_apart(distance))
        assert reading.value == pytest.approx(distance**2)
        assert reading.state == (
            "OK" if distance <= 0.3 else "WARN" if distance < 0.548 else "HACK"
        )
    assert after(scores_apart(0.6), scores_apart(0.2)).value == 0
    assert after(scores_apart(0.6), scores_apart(1.0)).value == pytest.approx(1)
    assert after(scores_apart(1.0), scores_apart(1.0)).state == "UNDEFINED"
    assert Disagreement().update([[], []]).state == "UNDEFINED"


@given(
    st.integers(2, 32),
    st.floats(-100, 100),
    st.floats(0.01, 1000),
    st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_total_disagreement_halts_whatever_the_members_and_their_unit(n, low, width, answers):
    """Half of the members give the lowest score and half the highest; every number between is less apart."""
    if width + abs(low) < 1:
        low, width = 0.0, 1.0  # the least range there is
    low, high = min(0.0, low), max(1.0, low + width)
    ends = [low if i % 2 else high for i in range(n)]
    apart = [[end if flipped else low + high - end for flipped in answers] for end in ends]
    reading = after([[high] * len(answers)] * n, apart)
    assert reading.value == pytest.approx(1)
    assert reading.state == "HACK"
    assert ensemble_divergence(apart) == pytest.approx(largest_variance(n, low, high))


@pytest.mark.parametrize(
    ("call", "of", "why"),
    [
        *(
            (lambda name: import_function(name, FLAG), name, f"{FLAG} {name}: ")
            for name in ("nowhere:f", "operator:nothing", "operator", "string:digits", ":f")
        ),
        (ensemble_divergence, [[1.0], [math.nan]], "member 1: nan is no finite number"),
        (Disagreement().update, [[math.inf], [1.0]], "member 0: inf"),
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
    assert EchoTrap().score(["a a a a a", "a"]) == 0.5


CODE = "def f(self, a, b):\n    if a < b:\n        return self.f(b, a)\n    return self.g(a, b)\n"


def test_honest_code_is_not_an_echo():
    """It repeats itself: measured against zero it would sit halfway to a HACK; against its own kind it is at 0."""
    trap = EchoTrap()
    assert trap.score([CODE]) > 0.15
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


# Each detector of the trainer, shown how bad a step is: 0 a healthy one, 1 the worst that its documentation allows.
# info_rm: in units of the base policy's CSI. advantage: no group has signal. echo: nothing but one word.
SHOWN = {
    "info_rm": lambda d, x: d.update(1 + x / 2),
    "rm_ensemble": lambda d, x: d.update([[1.0] * 6, [1 - x] * 6]),
    "advantage": lambda d, x: d.update(int(4 * x), 4),
    "echo": lambda d, x: d.update(["x " * int(40 * x)]),
    "collapse": lambda d, x: d.update(-1 - 6 * x),
}


def calibrated(name, threshold=0.6):
    detector = new_detector(name, threshold)
    if isinstance(detector, EchoTrap):
        detector.calibrate([CODE] * 4)
    return detector


@pytest.mark.parametrize("name", SHOWN)
@settings(max_examples=20, deadline=None)
@given(series=st.lists(st.floats(0, 1), min_size=1, max_size=15), cut=st.integers(0, 15))
def test_resuming_a_detector_changes_nothing(name, series, cut):
    show, whole = SHOWN[name], calibrated(name)
    expected = [show(whole, x) for x in series]
    first, second = calibrated(name), new_detector(name, 0.6)
    for x in series[:cut]:
        show(first, x)
    second.load_state_dict(first.state_dict())
    assert [show(second, x) for x in series[cut:]] == expected[cut:]
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("threshold", [1e-6, 1.0])
@pytest.mark.parametrize("name", [*DETECTORS, "echo", "collapse"])
def test_every_detector_can_say_hack(name, threshold):
    detector = calibrated(name, threshold)
    assert {SHOWN[name](detector, 0).state for _ in range(20)} <= {"UNDEFINED", "OK"}
    assert "HACK" in [SHOWN[name](detector, 1).state for _ in range(20)]


def test_a_base_policy_that_repeats_everything_leaves_nothing_to_read():
    trap = EchoTrap()
    trap.calibrate(["x x x x x"])
    assert trap.update(["x x x x x"]).state == "UNDEFINED"


def test_a_log_prob_that_is_not_finite_has_no_value():
    """steps.jsonl has null for it, since JSON has no infinity."""
    wire = CollapseTripwire()
    wire.update(-1.0)
    assert wire.update(-math.inf).value is None
