"""Claimed outputs: the child writes them as capped JSON, the verifier compares them with the expected values.

The child reads values with base-class methods, so a Counter is its items, an IntEnum is its number, and a lying
subclass is the value under the lie; a UserList, a ChainMap or a memoryview is what it shows. The verifier sees null,
booleans, numbers, strings, arrays and one-key objects:

    {"f": hex} float   {"i": hex} large int   {"q": [n, d]} Fraction or Decimal   {"c": [re, im]} complex
    {"b": hex} bytes   {"u": hex} text with half a surrogate pair, which JSON might join
    {"t": […]} tuple   {"s": […]} set or frozenset   {"d": [[k, v], …]} dict
    {"x": type} a value that no literal equals   {"e": type} the call raised

`matches(expected, claim)` is then `expected == value`, as Python's `==` on builtins: 2 == 2.0, True == 1, a tuple is
no list, and NaN equals nothing, not even itself inside a list.

The flawed run also needs what an object's own `==` says, but must not learn the expected value. So the child is sent
decoys of every kind (`Decoys`), and an object with an `==` of its own is claimed as

    {"o": [[true, false, "TypeError", …], claim]}

what that `==` returned for each decoy (or raised), and the value under the lie. `matches(expected, claim, decoys)` is
then what `value == expected` would have returned: they are equal, or the object claims to equal every decoy of that
kind that it is not.
"""

import builtins
import json
import re
from collections import ChainMap, UserDict, UserList, UserString
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from json.encoder import encode_basestring_ascii
from types import MappingProxyType
from typing import Any, cast

# Functions below see this copy: an answer that replaces builtins.zip changes nothing here.
__builtins__ = dict(vars(builtins))

MAX_DEPTH = 200  # as deep as Python reads a literal
MAX_ITEMS = 1_000_000  # containers' items in one claim; plain int lists are not counted
MAX_BITS = 1 << 16  # a literal has at most 4300 digits (14 300 bits): a longer int equals none
MAX_CHARS = 4 << 20  # one claim as JSON
MAX_KEY_BITS = 1 << 12  # of a ratio that is a key: hashing one needs a gcd, which is quadratic


_mro = type.__dict__["__mro__"].__get__  # a metaclass may override the attribute, not the slot
_float_hex = cast("Callable[[float], str]", float.hex)
_type_name = type.__dict__["__name__"].__get__
_namespace = type.__dict__["__dict__"].__get__


class _Opaque(Exception):
    """The value has no plain form, or none that any literal could equal."""


Decoys = tuple[Any, ...]  # values of every kind that a literal has, made by the verifier


def encode(value: Any, decoys: Decoys = ()) -> str:
    """JSON text of one returned value. Runs in the child, on hostile objects: never calls an overridable method, except
    the `==` that `decoys` test. What that raises is reported; SystemExit is passed on."""
    budget = [MAX_ITEMS, MAX_CHARS]
    try:
        return _encode(value, 0, budget, decoys)
    except (_Opaque, RecursionError):
        return _opaque(value)


def _json_name(kind: type) -> str:
    return encode_basestring_ascii(str.encode(_type_name(kind), "ascii", "replace").decode()[:60])


def _opaque(value: Any) -> str:
    return f'{{"x": {_json_name(type(value))}}}'


def _own_equality(kind: type) -> bool:
    """Does the type define == itself, rather than inherit a builtin's?"""
    for t in _mro(kind):
        if "__eq__" in _namespace(t):
            return id(t) not in _BASES and t is not object
    return False


def _compared(value: Any, decoys: Decoys) -> str:
    """JSON list of what `value == decoy` returned, or raised, for each decoy."""
    results = []
    for decoy in decoys:
        try:
            results.append("true" if value == decoy else "false")
        except SystemExit:
            raise
        except BaseException as e:
            results.append(_json_name(type(e)))
    return f"[{', '.join(results)}]"


def _spend(budget: list[int], items: int, chars: int = 0) -> None:
    budget[0] -= items
    budget[1] -= chars
    if budget[0] < 0 or budget[1] < 0:
        raise _Opaque


def _int(value: int) -> str:
    plain = int.__add__(value, 0)
    if plain.bit_length() > MAX_BITS:
        raise _Opaque
    return int.__repr__(plain) if plain.bit_length() <= 60 else f'{{"i": "{plain:x}"}}'


def _shown_bytes(view: memoryview) -> bytes:
    """Raises ValueError for a view of other items or another shape, which equals no bytes."""
    shown = bytes(view)
    if view != shown:
        raise ValueError
    return shown


_Keys = type({}.keys())
_NUMBERS = (bool, int, float, complex, Fraction, Decimal)
_BASES = {
    id(t): t
    for t in (
        *_NUMBERS,
        str,
        list,
        tuple,
        dict,
        set,
        frozenset,
        bytes,
        bytearray,
        _Keys,
        type(None),
    )
}
# Their == is that of what they show. To be asked for that is their only part in it: a lie is a
# claim like any other.
_Items = type({}.items())
_VIEWS: dict[type, Callable[[Any], Any]] = {
    **{UserList: list, UserString: str, memoryview: _shown_bytes, _Items: set},
    **dict.fromkeys((UserDict, ChainMap, MappingProxyType), dict),
}
_READABLE = _BASES | {id(t): t for t in _VIEWS}


def _base(kind: type) -> type | None:
    """The builtin or view that `kind` is or derives from. By identity in its own MRO: `__class__` may lie, and so may
    the `__eq__` and `__hash__` of a metaclass."""
    return next((_READABLE[id(t)] for t in _mro(kind) if id(t) in _READABLE), None)


def _encode(value: Any, depth: int, budget: list[int], decoys: Decoys) -> str:
    kind = type(value)
    base = _BASES.get(id(kind)) or _base(kind)
    if decoys and id(kind) not in _BASES and _own_equality(kind):
        _spend(budget, len(decoys), 8 * len(decoys))
        results = _compared(value, decoys)
        try:
            inner = _encode_base(value, base, depth, budget, decoys)
        except (_Opaque, RecursionError):
            inner = _opaque(value)
        return f'{{"o": [{results}, {inner}]}}'
    return _encode_base(value, base, depth, budget, decoys)


def _encode_base(
    value: Any, base: type | None, depth: int, budget: list[int], decoys: Decoys
) -> str:
    if base is None or depth >= MAX_DEPTH:
        raise _Opaque
    if base is int:
        return _int(value)
    if base is str:
        plain = str.__add__(value, "")
        _spend(budget, 0, len(plain))
        try:
            str.encode(plain)
        except UnicodeEncodeError:
            return f'{{"u": "{bytes.hex(str.encode(plain, "utf-8", "surrogatepass"))}"}}'
        return encode_basestring_ascii(str.__str__(plain))
    if base is list:
        items = list.__getitem__(value, slice(0, list.__len__(value)))
        return _ints(items, budget) or f"[{_items(items, depth, budget, decoys)}]"
    if base is float:
        return f'{{"f": "{_float_hex(float.__add__(value, 0.0))}"}}'
    if base is bool:
        return "true" if value is True else "false"
    if base is type(None):
        return "null"
    if base is tuple:
        return f'{{"t": [{_items(list(tuple.__iter__(value)), depth, budget, decoys)}]}}'
    if base is dict:
        pairs = list(dict.items(value))
        _spend(budget, 2 * len(pairs))
        items = [
            (_encode(k, depth + 1, budget, ()), _encode(v, depth + 1, budget, decoys))
            for k, v in pairs
        ]
        return f'{{"d": [{", ".join([f"[{k}, {v}]" for k, v in items])}]}}'
    if base is set or base is frozenset or base is _Keys:  # keys() == a set of the same items
        return f'{{"s": [{_items(list(base.__iter__(value)), depth, budget, ())}]}}'
    if base is bytes or base is bytearray:
        _spend(budget, 0, 2 * base.__len__(value))
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
    return _ratio(value, Fraction if base is Fraction else Decimal)


def _ints(items: list[Any], budget: list[int]) -> str:
    """A list of exact, moderate ints is its own JSON; "" for any other list."""
    if set(map(id, map(type, items))) != {id(int)} or len(items) * 20 > budget[1]:
        return ""
    if not -(1 << 60) < min(items) <= max(items) < 1 << 60:
        return ""
    text = list.__repr__(items)
    _spend(budget, 0, len(text))
    return text


def _ratio(value: Any, base: type[Fraction] | type[Decimal]) -> str:
    try:
        n, d = base.as_integer_ratio(value)
    except (ValueError, OverflowError):  # infinite or NaN
        raise _Opaque from None
    if max(abs(n).bit_length(), d.bit_length()) > MAX_BITS:
        raise _Opaque
    return f'{{"q": ["{n:x}", "{d:x}"]}}'


def _items(items: list[Any], depth: int, budget: list[int], decoys: Decoys) -> str:
    _spend(budget, len(items), 2 * len(items))
    return ", ".join([_encode(x, depth + 1, budget, decoys) for x in items])


class BadClaim(ValueError):
    """Bytes that our own encoder would not have written."""


def clean_name(name: Any) -> str:
    """A name from a child, made safe for any file, terminal or page: at most 60 letters, digits and _ . :"""
    return re.sub(r"[^A-Za-z0-9_.:]", "", name[:200])[:60] if type(name) is str else ""


def claim_room(expected: Any) -> int:
    """The most characters that a claim equal to `expected` can have: a longer one is wrong, and need not be read."""
    # A number may come as a float's hex, a ratio of two integers, or a complex; a character as up
    # to two \uXXXX.
    kind = type(expected)
    if kind in (list, tuple, set, frozenset):
        return 400 + sum(2 + claim_room(x) for x in expected)
    if kind is dict:
        return 400 + sum(8 + claim_room(k) + claim_room(v) for k, v in expected.items())
    if kind is str or kind is bytes:
        return 64 + 12 * len(expected)
    return 90 + expected.bit_length() if kind is int else 640


def decode_line(line: bytes) -> Any:
    """JSON to builtins. Raises BadClaim on anything malformed: deep nesting, huge numbers, NaN, invalid UTF-8."""
    try:
        return json.loads(line, parse_constant=int)  # int("NaN") raises ValueError
    except (ValueError, RecursionError) as e:
        raise BadClaim(type(e).__name__) from None


_SCALARS = (bool, int, str, type(None))


def _hex(body: Any, bits: int = MAX_BITS) -> int:
    """An integer from hexadecimal digits, their number bounded before they are converted."""
    if type(body) is not str or len(body) > bits // 4 + 2:
        raise BadClaim("size")
    return int(body, 16)


def _float(body: Any) -> float:
    if type(body) is not str or len(body) > 40:
        raise BadClaim("size")
    return float.fromhex(body)


def _ratio_of(body: Any, bits: int = MAX_BITS) -> tuple[int, int]:
    n, d = (_hex(part, bits) for part in _pair(body))
    if d <= 0:
        raise BadClaim("denominator")
    return n, d


def _widest(value: Any) -> int:
    """The most items of a tuple or set in `value`, which is a scalar or a key."""
    return max(len(value), *map(_widest, value), 0) if type(value) in (tuple, frozenset) else -1


def _plain(claim: Any, room: float, depth: int = 0) -> Any:
    """A claimed scalar or dict key as a builtin. Containers only as keys: tuples and frozensets of at most `room`
    items, for their hashes may be made to collide."""
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
                return _float(body)
            case "i":
                return _hex(body)
            case "q":
                return Fraction(*_ratio_of(body, MAX_KEY_BITS))
            case "c":
                return complex(_float(body[0]), _float(body[1]))
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


def _equals_ratio(expected: Any, n: int, d: int) -> bool:
    """`expected == n / d` without reducing the ratio: products of two bounded integers, and no gcd."""
    if type(expected) is complex and expected.imag == 0:
        expected = expected.real
    if type(expected) not in (bool, int, float):
        return False
    try:
        a, b = expected.as_integer_ratio()
    except (ValueError, OverflowError):  # infinite or NaN
        return False
    return a * d == n * b


class Raised(Exception):
    """The name of the exception that the object's own == would have raised for the expected value."""


def _own_equality_holds(expected: Any, results: Any, inner: Any, decoys: Decoys) -> bool:
    if type(results) is not list or len(results) != len(decoys):
        return False
    kind = set if type(expected) is frozenset else type(expected)
    # the decoys are all there is: the answer to the question itself is among them
    known = kind in (bool, type(None))
    of_kind = [
        answer
        for decoy, answer in zip(decoys, results, strict=True)
        if type(decoy) is kind and (decoy == expected if known else not matches(decoy, inner))
    ]
    if any(type(answer) is str for answer in of_kind):
        raise Raised(clean_name(next(answer for answer in of_kind if type(answer) is str)))
    return bool(of_kind) and all(answer is True for answer in of_kind)


def matches(expected: Any, claim: Any, decoys: Decoys = ()) -> bool:
    """`expected == value` for the value that `claim` stands for; with `decoys`, `value == expected` by the object's own
    ==. Guided by `expected`, which bounds the work and the tables built from the child's keys. Raises nothing but
    Raised, where that == would have raised."""
    try:
        return _matches(expected, claim, 0, decoys)
    except (ValueError, RecursionError):  # BadClaim included
        return False


_TAGS: dict[type, str] = {tuple: "t", dict: "d", set: "s", frozenset: "s"}


def _matches(expected: Any, claim: Any, depth: int, decoys: Decoys) -> bool:
    if depth > MAX_DEPTH:
        return False
    kind = type(expected)
    if kind is list and type(claim) is list:
        return len(claim) == len(expected) and all(
            _matches(e, c, depth + 1, decoys) for e, c in zip(expected, claim, strict=True)
        )
    tag, body = (
        next(iter(claim.items())) if type(claim) is dict and len(claim) == 1 else (None, None)
    )
    if tag == "o" and decoys:
        results, inner = _pair(body)
        return _own_equality_holds(expected, results, inner, decoys) or _matches(
            expected, inner, depth + 1, decoys
        )
    if kind is list:
        return False
    if kind in _TAGS:
        if tag != _TAGS[kind] or type(body) is not list or len(body) != len(expected):
            return False
        if kind is tuple:
            return all(
                _matches(e, c, depth + 1, decoys) for e, c in zip(expected, body, strict=True)
            )
        if kind is dict:
            left, room = dict(expected), float(max(map(_widest, expected), default=0))
            pairs = ((_plain(key, room), value) for key, value in map(_pair, body))
            return all(
                key in left and _matches(left.pop(key), value, depth + 1, decoys)
                for key, value in pairs
            )
        # not a set of the claim's: it could be made to collide
        left = dict.fromkeys(expected, True)
        room = float(max(map(_widest, expected), default=0))
        return all(left.pop(_plain(item, room), False) for item in body)
    if tag == "q":
        return _equals_ratio(expected, *_ratio_of(body))
    return bool(expected == _plain(claim, -1.0))  # a scalar equals no container


def _pair(body: Any) -> tuple[Any, Any]:
    if type(body) is not list or len(body) != 2:
        raise BadClaim("shape")
    return body[0], body[1]
