"""The comparer is Python's == on builtins, whatever bytes it is given; the encoder strips every disguise."""

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgrout.grading.values import BadClaim, decode_line, encode, matches

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.complex_numbers(allow_nan=False)
)
hashables = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.sets(hashables, max_size=3)
    ),
    max_leaves=12,
)


def claim_of(value):
    return decode_line(encode(value).encode())


@settings(max_examples=400, deadline=None)
@given(values, values)
def test_matching_is_equality(expected, value):
    assert matches(expected, claim_of(expected))
    assert matches(expected, claim_of(value)) == (expected == value)


near = st.sampled_from([0, 1, 2, True, False, 0.0, 1.0, 2.0, -0.0, "1", b"1", None, (), (1,), 2**53 + 1, float(2**53)])


@settings(max_examples=400, deadline=None)
@given(st.lists(near, max_size=3), st.lists(near, max_size=3))
def test_matching_is_equality_for_near_misses(a, b):
    assert matches(a, claim_of(b)) == (a == b)
    assert matches(tuple(a), claim_of(tuple(b))) == (tuple(a) == tuple(b))
    assert matches(set(a), claim_of(set(b))) == (set(a) == set(b))
    assert matches({1: a}, claim_of({True: b})) == ({1: a} == {True: b})
    assert not matches(a, claim_of(tuple(b)))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from("fiqcbtsdxe") | st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(values, json_like)
def test_no_claim_makes_the_comparer_raise(expected, claim):
    assert matches(expected, claim) in (True, False)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='[]{}":,0123456789eE.-"tfn', max_size=40).map(str.encode))
def test_decoding_raises_nothing_but_bad_claim(line):
    with suppress(BadClaim):
        decode_line(line)


@pytest.mark.parametrize(
    "line", [b"[" * 3_000_000, b"1" * 3_000_000, b"NaN", b"[Infinity]", b"\xff\xfe", b"", b"{", b'{"a":' * 100_000]
)
def test_malformed_lines_are_bad_claims(line):
    with pytest.raises(BadClaim):
        decode_line(line)


def test_nan_equals_nothing():
    for claim in (math.nan, [math.nan], {"a": math.nan}, (math.nan,)):
        assert not matches(claim, claim_of(claim))


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (defaultdict(list, {1: [2]}), {1: [2]}),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (Colour.RED, 1),
        (Point(1, 2), (1, 2)),
        (Fraction(1, 2), 0.5),
        (Fraction(4, 2), 2),
        (Decimal("0.5"), 0.5),
        (frozenset({1}), {1}),
        (True, 1),
        (2, 2.0),
        (10**30, 1e30 if 10**30 == 1e30 else 10**30),
        (-0.0, 0),
        ("\ud800", "\ud800"),
    ],
)
def test_honest_relatives_match_as_under_equality(value, plain):
    assert plain == value
    assert matches(plain, claim_of(value))


class Liar(int):
    def __eq__(self, other):
        return True

    def __add__(self, other):
        return 7

    def __repr__(self):
        return "7"

    def __index__(self):
        return 7

    __str__ = __repr__
    __hash__ = int.__hash__


class LyingList(list):
    def __iter__(self):
        return iter([7])

    def __len__(self):
        return 1

    def __getitem__(self, i):
        return [7]


class Meta(type):
    @property
    def __mro__(cls):
        return (int, object)

    def __eq__(cls, other):
        return True

    __hash__ = type.__hash__


class Disguised(metaclass=Meta):
    __class__ = property(lambda self: int)  # type: ignore[assignment]

    def __eq__(self, other):
        return True

    __hash__ = None  # type: ignore[assignment]


def test_disguises_fall():
    assert encode(Liar(3)) == "3"
    assert encode([Liar(3), 4]) == "[3, 4]"
    assert encode(LyingList([1, 2])) == "[1, 2]"
    assert json.loads(encode(Disguised())) == {"x": "Disguised"}
    assert json.loads(encode(Disguised)) == {"x": "Meta"}
    assert not matches(7, claim_of(Disguised()))


def test_bombs_are_opaque_and_short():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    loop: list = []
    loop += [loop, loop]
    for bomb in (1 << 2**24, deep, loop, ["x" * 100] * 10**6, [*range(10**6), 2**70], "x" * (5 << 20)):
        text = encode(bomb)
        assert len(text) < 30
        assert "x" in json.loads(text)


def test_a_claim_cannot_smuggle_duplicates_past_the_size():
    assert not matches({1, 2}, {"s": [1, 1]})
    assert not matches({1: 1, 2: 2}, {"d": [[1, 1], [1, 1]]})
    assert not matches({1: 1, 2: 2}, {"d": [[1, 1], [True, 1]]})
