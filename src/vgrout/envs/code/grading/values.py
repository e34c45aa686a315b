"""Claimed outputs: the child writes them as JSON of bounded size, the verifier compares them with
the expected values.

The child reads values with base-class methods. So a Counter is its items, an IntEnum is its number,
and a subclass that lies about itself is the value below the lie. A UserList, a ChainMap or a
memoryview is what it shows. The verifier sees null, booleans, numbers, strings, arrays and one-key
objects:

    {"f": hex}           float
    {"i": hex}           large int
    {"q": [n, d]}        Fraction or Decimal
    {"c": [re, im]}      complex
    {"b": hex}           bytes
    {"u": hex}           text with half a surrogate pair, which JSON might join
    {"t": […]}           tuple
    {"s": […]}           set or frozenset
    {"d": [[k, v], …]}   dict
    {"x": type}          a value that no literal equals
    {"e": type}          the call raised

`matches(expected, claim)` is then `expected == value`, as Python's `==` on builtins: 2 == 2.0 and
True == 1, a tuple never equals a list, and NaN equals nothing, not even itself inside a list.

The flawed run also needs what an object's own `==` says, but must not learn the expected value.
So the child is sent decoys of every kind (`Decoys`), and an object with an `==` of its own is
claimed as

    {"o": [[true, false, "TypeError", …], claim]}

The first list holds what that `==` returned (or raised) for each decoy; the claim is the value
below the lie. `matches(expected, claim, decoys)` is then what `value == expected` would have
returned. It holds if the two are equal, or if the object claims to equal every decoy of the
expected value's kind that it does not equal.
"""

import builtins
import json
from collections import ChainMap, UserDict, UserList, UserString
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from json.encoder import encode_basestring_ascii
from types import MappingProxyType, NoneType
from typing import Any, cast

from vgrout.envs.code.grading.messages import clean_name

# Functions below see this copy: an answer that replaces builtins.zip changes nothing here.
__builtins__ = dict(vars(builtins))

MAX_DEPTH = 200  # as deep as Python reads a literal
MAX_ITEMS = 1_000_000  # containers' items in one claim; plain int lists are not counted
MAX_BITS = 1 << 16  # a literal has at most 4300 digits (14 300 bits): a longer int equals none
MAX_CHARS = 4 << 20  # one claim as JSON
MAX_KEY_BITS = 1 << 12  # of a ratio that is a key: hashing one needs a gcd, which is quadratic
SHORT_BITS = 60  # ints up to this size are plain JSON numbers

Decoys = tuple[object, ...]  # values of every kind that a literal has, made by the verifier

# --- reading a value in the child

# A metaclass may override these attributes, but not the slots behind them.
_mro = type.__dict__["__mro__"].__get__
_type_name = type.__dict__["__name__"].__get__
_namespace = type.__dict__["__dict__"].__get__
_float_hex = cast("Callable[[float], str]", float.hex)


class _Opaque(Exception):
    """The value has no plain form, or none that any literal could equal."""


class _Budget:
    """The items and characters that one claim may still use."""

    __slots__ = ("chars", "items")

    def __init__(self) -> None:
        self.items = MAX_ITEMS
        self.chars = MAX_CHARS

    def spend(self, items: int, chars: int = 0) -> None:
        self.items -= items
        self.chars -= chars
        if self.items < 0 or self.chars < 0:
            raise _Opaque


def encode(value: object, decoys: Decoys = ()) -> str:
    """Return the JSON text of one returned value.

    This runs in the child, on hostile objects. It never calls a method that a class can override,
    except the `==` that `decoys` test. If that `==` raises, the claim says so; only SystemExit is
    passed on.
    """
    try:
        return _encode(value, 0, _Budget(), decoys)
    except (_Opaque, RecursionError):
        return _opaque(value)


def _json_name(kind: type) -> str:
    name = str.encode(_type_name(kind), "ascii", "replace").decode()
    return encode_basestring_ascii(name[:60])


def _opaque(value: object) -> str:
    return f'{{"x": {_json_name(type(value))}}}'


def _shown_bytes(view: memoryview) -> bytes:
    """Raises ValueError for a view of other items or another shape, which equals no bytes."""
    shown = bytes(view)
    if view != shown:
        raise ValueError
    return shown


_Keys = type({}.keys())
_Items = type({}.items())

_NUMBERS = (bool, int, float, complex, Fraction, Decimal)
_TEXTS = (str, bytes, bytearray)
_CONTAINERS = (list, tuple, dict, set, frozenset, _Keys)
_BASES = {id(kind): kind for kind in (*_NUMBERS, *_TEXTS, *_CONTAINERS, NoneType)}

# A view equals what it shows, so it is read by calling the function here, which the view can cheat.
# A lie gains nothing: it is a claim like any other.
_VIEWS: dict[type, Callable[[Any], object]] = {
    UserList: list,
    UserString: str,
    UserDict: dict,
    ChainMap: dict,
    MappingProxyType: dict,
    memoryview: _shown_bytes,
    _Items: set,
}
_READABLE = _BASES | {id(kind): kind for kind in _VIEWS}


def _base(kind: type) -> type | None:
    """Return the builtin or view that `kind` is or derives from.

    Found by identity in the type's own MRO: `__class__` may lie, and so may the `__eq__` and
    `__hash__` of a metaclass.
    """
    for ancestor in _mro(kind):
        if id(ancestor) in _READABLE:
            return _READABLE[id(ancestor)]
    return None


def _own_equality(kind: type) -> bool:
    """Say whether the type has an `==` of its own, rather than a builtin's."""
    for ancestor in _mro(kind):
        if "__eq__" in _namespace(ancestor):
            return id(ancestor) not in _BASES and ancestor is not object
    return False


def _compared(value: object, decoys: Decoys) -> str:
    """Return a JSON list of what `value == decoy` returned, or raised, for each decoy."""
    results = []
    for decoy in decoys:
        try:
            results.append("true" if value == decoy else "false")
        except SystemExit:
            raise
        except BaseException as e:
            results.append(_json_name(type(e)))
    return f"[{', '.join(results)}]"


def _encode(value: object, depth: int, budget: _Budget, decoys: Decoys) -> str:
    kind = type(value)
    base = _BASES.get(id(kind)) or _base(kind)
    asked = decoys and id(kind) not in _BASES and _own_equality(kind)
    if not asked:
        return _encode_base(value, base, depth, budget, decoys)
    budget.spend(len(decoys), 8 * len(decoys))
    results = _compared(value, decoys)
    try:
        inner = _encode_base(value, base, depth, budget, decoys)
    except (_Opaque, RecursionError):
        inner = _opaque(value)
    return f'{{"o": [{results}, {inner}]}}'


def _encode_base(value: Any, base: type | None, depth: int, budget: _Budget, decoys: Decoys) -> str:
    """Encode a value as the builtin or view `base`. Frequent types come first.

    Keys and the items of sets are not asked about the decoys: Python compares them by their hashes.
    """
    if base is None or depth >= MAX_DEPTH:
        raise _Opaque
    if base is int:
        return _encode_int(value)
    if base is str:
        return _encode_str(value, budget)
    if base is list:
        items = list.__getitem__(value, slice(0, list.__len__(value)))
        return _encode_int_list(items, budget) or f"[{_encode_items(items, depth, budget, decoys)}]"
    if base is float:
        return f'{{"f": "{_float_hex(float.__add__(value, 0.0))}"}}'
    if base is bool:
        return "true" if value is True else "false"
    if base is NoneType:
        return "null"
    if base is tuple:
        items = list(tuple.__iter__(value))
        return f'{{"t": [{_encode_items(items, depth, budget, decoys)}]}}'
    if base is dict:
        pairs = list(dict.items(value))
        budget.spend(2 * len(pairs))
        texts = []
        for key, item in pairs:
            key_text = _encode(key, depth + 1, budget, ())
            texts.append(f"[{key_text}, {_encode(item, depth + 1, budget, decoys)}]")
        return f'{{"d": [{", ".join(texts)}]}}'
    if base is set or base is frozenset or base is _Keys:  # keys() == a set of the same items
        items = list(base.__iter__(value))
        return f'{{"s": [{_encode_items(items, depth, budget, ())}]}}'
    if base is bytes or base is bytearray:
        budget.spend(0, 2 * base.__len__(value))
        return f'{{"b": "{base.hex(value)}"}}'
    if base in _VIEWS:
        try:
            shown = _VIEWS[base](value)
        except Exception:
            raise _Opaque from None
        return _encode(shown, depth + 1, budget, decoys)
    if base is complex:
        plain = complex.__add__(value, 0)
        return f'{{"c": ["{_float_hex(plain.real)}", "{_float_hex(plain.imag)}"]}}'
    return _encode_ratio(value, Fraction if base is Fraction else Decimal)


def _encode_items(items: list[object], depth: int, budget: _Budget, decoys: Decoys) -> str:
    budget.spend(len(items), 2 * len(items))
    return ", ".join([_encode(item, depth + 1, budget, decoys) for item in items])


def _encode_int_list(items: list[Any], budget: _Budget) -> str:
    """Encode a list of exact, short ints at once; return "" for any other list."""
    kinds = set(map(id, map(type, items)))  # by identity: a metaclass may lie
    if kinds != {id(int)} or len(items) * 20 > budget.chars:
        return ""
    if not -(1 << SHORT_BITS) < min(items) <= max(items) < 1 << SHORT_BITS:
        return ""
    text = list.__repr__(items)
    budget.spend(0, len(text))
    return text


def _encode_int(value: int) -> str:
    plain = int.__add__(value, 0)
    if plain.bit_length() > MAX_BITS:
        raise _Opaque
    if plain.bit_length() > SHORT_BITS:
        return f'{{"i": "{plain:x}"}}'
    return int.__repr__(plain)


def _encode_str(value: str, budget: _Budget) -> str:
    plain = str.__add__(value, "")
    budget.spend(0, len(plain))
    try:
        str.encode(plain)
    except UnicodeEncodeError:
        data = str.encode(plain, "utf-8", "surrogatepass")
        return f'{{"u": "{bytes.hex(data)}"}}'
    return encode_basestring_ascii(str.__str__(plain))


def _encode_ratio(value: Any, base: type[Fraction] | type[Decimal]) -> str:
    try:
        n, d = base.as_integer_ratio(value)
    except (ValueError, OverflowError):  # infinite or NaN
        raise _Opaque from None
    if max(abs(n).bit_length(), d.bit_length()) > MAX_BITS:
        raise _Opaque
    return f'{{"q": ["{n:x}", "{d:x}"]}}'


# --- reading a claim in the verifier


class BadClaim(ValueError):
    """Bytes that our own encoder would not have written."""


class Raised(Exception):
    """Names the exception that the object's own == would have raised for the expected value."""


def claim_room(expected: Any) -> int:
    """Return the most characters that a claim equal to `expected` can have.

    A longer claim is wrong, and need not be read. A number may come as a float's hex, a ratio of
    two integers, or a complex; a character as up to two \\uXXXX.
    """
    kind = type(expected)
    if kind in (list, tuple, set, frozenset):
        room = 400
        for item in expected:
            room += 2 + claim_room(item)
        return room
    if kind is dict:
        room = 400
        for key, value in expected.items():
            room += 8 + claim_room(key) + claim_room(value)
        return room
    if kind is str or kind is bytes:
        return 64 + 12 * len(expected)
    if kind is int:
        return 90 + expected.bit_length()
    return 640


def decode_line(line: bytes) -> object:
    """Decode JSON to builtins.

    Raises BadClaim on anything malformed: deep nesting, huge numbers, NaN, invalid UTF-8.
    """
    try:
        return json.loads(line, parse_constant=int)  # int("NaN") raises ValueError
    except (ValueError, RecursionError) as e:
        raise BadClaim(type(e).__name__) from None


def _pair(body: object) -> tuple[object, object]:
    if type(body) is not list or len(body) != 2:
        raise BadClaim("shape")
    return body[0], body[1]


def _int_of(body: object, bits: int = MAX_BITS) -> int:
    """Read an integer from hexadecimal digits, after checking how many there are."""
    if type(body) is not str or len(body) > bits // 4 + 2:
        raise BadClaim("size")
    return int(body, 16)


def _float_of(body: object) -> float:
    if type(body) is not str or len(body) > 40:
        raise BadClaim("size")
    return float.fromhex(body)


def _ratio_of(body: object, bits: int = MAX_BITS) -> tuple[int, int]:
    numerator, denominator = _pair(body)
    n, d = _int_of(numerator, bits), _int_of(denominator, bits)
    if d <= 0:
        raise BadClaim("denominator")
    return n, d


_SCALARS = (bool, int, str, NoneType)
NO_CONTAINERS = -1  # room for no tuple and no frozenset, not even an empty one


def _plain(claim: Any, room: int, depth: int = 0) -> object:
    """Turn a claimed scalar or dict key into a builtin.

    Containers occur only as keys: tuples and frozensets of at most `room` items, because their
    hashes may be made to collide. Raises BadClaim.
    """
    if type(claim) in _SCALARS:
        return claim
    if type(claim) is not dict or len(claim) != 1 or depth > MAX_DEPTH:
        raise BadClaim("shape")
    ((tag, body),) = claim.items()
    if tag in ("t", "s") and (type(body) is not list or len(body) > room):
        raise BadClaim("size")
    try:
        match tag:
            case "f":
                return _float_of(body)
            case "i":
                return _int_of(body)
            case "q":
                return Fraction(*_ratio_of(body, MAX_KEY_BITS))
            case "c":
                return complex(_float_of(body[0]), _float_of(body[1]))
            case "b":
                return bytes.fromhex(body)
            case "u":
                return bytes.fromhex(body).decode("utf-8", "surrogatepass")
            case "t":
                return tuple(_plain(x, room, depth + 1) for x in body)
            case "s":
                return frozenset(_plain(x, room, depth + 1) for x in body)
    except (TypeError, ValueError, OverflowError, KeyError, IndexError) as e:
        raise BadClaim(type(e).__name__) from None
    raise BadClaim("tag")


def _widest(value: Any) -> int:
    """Return the most items of a tuple or frozenset in `value`, a scalar or a key."""
    if type(value) not in (tuple, frozenset):
        return NO_CONTAINERS
    widest = len(value)
    for item in value:
        widest = max(widest, _widest(item))
    return widest


def _room_for_keys(expected: Any) -> int:
    """Return the most items of a tuple or frozenset in a key that can equal one of `expected`."""
    return max(map(_widest, expected), default=0)


# --- comparing


def matches(expected: object, claim: object, decoys: Decoys = ()) -> bool:
    """Return `expected == value` for the value that `claim` stands for.

    With `decoys`, return `value == expected` by the object's own ==. `expected` guides the
    comparison, and so bounds the work and the tables built from the child's keys. Raises nothing
    but Raised, where that == would have raised.
    """
    try:
        return _matches(expected, claim, 0, decoys)
    except (ValueError, RecursionError):  # BadClaim included
        return False


def _matches(expected: Any, claim: object, depth: int, decoys: Decoys) -> bool:
    if depth > MAX_DEPTH:
        return False
    kind = type(expected)
    if kind is list and type(claim) is list:
        return _items_match(expected, claim, depth, decoys)
    tag = body = None
    if type(claim) is dict and len(claim) == 1:
        ((tag, body),) = claim.items()
    if tag == "o" and decoys:
        results, inner = _pair(body)
        if _own_equality_holds(expected, results, inner, decoys):
            return True
        return _matches(expected, inner, depth + 1, decoys)
    if kind is list:
        return False
    if kind is tuple:
        return tag == "t" and type(body) is list and _items_match(expected, body, depth, decoys)
    if kind is dict:
        return tag == "d" and type(body) is list and _dict_matches(expected, body, depth, decoys)
    if kind is set or kind is frozenset:
        return tag == "s" and type(body) is list and _set_matches(expected, body)
    if tag == "q":
        return _equals_ratio(expected, *_ratio_of(body))
    return bool(expected == _plain(claim, NO_CONTAINERS))


def _items_match(expected: Any, claims: Sequence[object], depth: int, decoys: Decoys) -> bool:
    if len(claims) != len(expected):
        return False
    pairs = zip(expected, claims, strict=True)
    return all(_matches(item, claim, depth + 1, decoys) for item, claim in pairs)


def _dict_matches(
    expected: dict[object, object], claims: Sequence[object], depth: int, decoys: Decoys
) -> bool:
    if len(claims) != len(expected):
        return False
    left = dict(expected)
    room = _room_for_keys(expected)
    for pair in claims:
        key_claim, value_claim = _pair(pair)
        key = _plain(key_claim, room)
        if key not in left or not _matches(left.pop(key), value_claim, depth + 1, decoys):
            return False
    return True


def _set_matches(expected: Any, claims: Sequence[object]) -> bool:
    """Look the claimed items up among the expected ones.

    A table of the claimed items could be made slow, by items whose hashes collide.
    """
    if len(claims) != len(expected):
        return False
    left = dict.fromkeys(expected, True)
    room = _room_for_keys(expected)
    return all(left.pop(_plain(claim, room), False) for claim in claims)


def _equals_ratio(expected: Any, n: int, d: int) -> bool:
    """Return `expected == n / d` without reducing the ratio, which would need a gcd.

    It takes two products of bounded integers instead.
    """
    if type(expected) is complex and expected.imag == 0:
        expected = expected.real
    if type(expected) not in (bool, int, float):
        return False
    try:
        a, b = expected.as_integer_ratio()
    except (ValueError, OverflowError):  # infinite or NaN
        return False
    return a * d == n * b


def _own_equality_holds(expected: object, results: object, inner: object, decoys: Decoys) -> bool:
    """Say whether the object's own == would hold for `expected`, from its `results` for the decoys.

    Only decoys of the expected value's kind count, and of these only the ones that the value below
    the lie (the claim `inner`) does not equal. Raises Raised, if that == raised for one of them.
    """
    if type(results) is not list or len(results) != len(decoys):
        return False
    kind = set if type(expected) is frozenset else type(expected)
    # The decoys hold every value of these two kinds, so the expected one was itself asked about.
    was_asked = kind is bool or kind is NoneType
    answers = []
    for decoy, answer in zip(decoys, results, strict=True):
        if type(decoy) is not kind:
            continue
        counts = decoy == expected if was_asked else not matches(decoy, inner)
        if counts:
            answers.append(answer)
    for answer in answers:
        if type(answer) is str:
            raise Raised(clean_name(answer))
    return bool(answers) and all(answer is True for answer in answers)
