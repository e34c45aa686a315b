"""Claimed outputs: the child writes them as capped JSON, the verifier compares them with the expected values.

The child strips with base-class methods, so a Counter is its items and an IntEnum is its number, and a lying subclass
is the value under the lie. The verifier sees null, booleans, numbers, strings, arrays and one-key objects:

    {"f": hex} float   {"i": hex} large int   {"q": [n, d]} Fraction or Decimal   {"c": [re, im]} complex
    {"b": hex} bytes   {"t": […]} tuple   {"s": […]} set or frozenset   {"d": [[k, v], …]} dict
    {"x": type} a value that no literal equals   {"e": type} the call raised

`matches(expected, claim)` is then `expected == value`, as the benchmark's `==` has it: 2 == 2.0, True == 1, a tuple is
no list, and NaN equals nothing, not even itself inside a list.
"""

import builtins
import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from json.encoder import encode_basestring_ascii
from typing import Any, cast

# Functions below see this copy: an answer that replaces builtins.zip changes nothing here.
__builtins__ = dict(vars(builtins))

MAX_DEPTH = 100
MAX_ITEMS = 1_000_000  # containers' items in one claim; plain int lists are not counted
MAX_BITS = 1 << 16  # a literal has at most 4300 digits (14 300 bits): a longer int equals none
MAX_CHARS = 4 << 20  # one claim as JSON


_mro = type.__dict__["__mro__"].__get__  # a metaclass may override the attribute, not the slot
_float_hex = cast("Callable[[float], str]", float.hex)
_type_name = type.__dict__["__name__"].__get__


class _Opaque(Exception):
    """The value has no plain form, or none that any literal could equal."""


def encode(value: Any) -> str:
    """JSON text of one returned value. Runs in the child, on hostile objects: never calls an overridable method."""
    budget = [MAX_ITEMS, MAX_CHARS]
    try:
        return _encode(value, 0, budget)
    except (_Opaque, RecursionError):
        return f'{{"x": {encode_basestring_ascii(_type_name(type(value)))}}}'


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


_BASES = {
    id(t): t
    for t in (bool, int, str, float, list, tuple, dict, set, frozenset, bytes, complex, Fraction, Decimal, type(None))
}


def _base(kind: type) -> type | None:
    """The builtin that `kind` is or derives from. By identity in its own MRO: `__class__` may lie, and so may the
    `__eq__` and `__hash__` of a metaclass."""
    return next((_BASES[id(t)] for t in _mro(kind) if id(t) in _BASES), None)


def _encode(value: Any, depth: int, budget: list[int]) -> str:
    base = _base(type(value))
    if base is None or depth >= MAX_DEPTH:
        raise _Opaque
    if base is int:
        return _int(value)
    if base is str:
        plain = str.__add__(value, "")
        _spend(budget, 0, len(plain))
        return encode_basestring_ascii(str.__str__(plain))
    if base is list:
        items = list.__getitem__(value, slice(0, list.__len__(value)))
        return _ints(items, budget) or f"[{_items(items, depth, budget)}]"
    if base is float:
        return f'{{"f": "{_float_hex(float.__add__(value, 0.0))}"}}'
    if base is bool:
        return "true" if value is True else "false"
    if base is type(None):
        return "null"
    if base is tuple:
        return f'{{"t": [{_items(list(tuple.__iter__(value)), depth, budget)}]}}'
    if base is dict:
        pairs = list(dict.items(value))
        _spend(budget, 2 * len(pairs))
        body = ", ".join([f"[{_encode(k, depth + 1, budget)}, {_encode(v, depth + 1, budget)}]" for k, v in pairs])
        return f'{{"d": [{body}]}}'
    if base is set:
        return f'{{"s": [{_items(list(set.__iter__(value)), depth, budget)}]}}'
    if base is frozenset:
        return f'{{"s": [{_items(list(frozenset.__iter__(value)), depth, budget)}]}}'
    if base is bytes:
        _spend(budget, 0, 2 * bytes.__len__(value))
        return f'{{"b": "{bytes.hex(value)}"}}'
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


def _items(items: list[Any], depth: int, budget: list[int]) -> str:
    _spend(budget, len(items), 2 * len(items))
    return ", ".join([_encode(x, depth + 1, budget) for x in items])


class BadClaim(ValueError):
    """Bytes that our own encoder would not have written."""


def decode_line(line: bytes) -> Any:
    """JSON to builtins. Raises BadClaim on anything malformed: deep nesting, huge numbers, NaN, invalid UTF-8."""
    try:
        return json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as e:
        raise BadClaim(type(e).__name__) from None


def _refuse(name: str) -> None:
    raise ValueError(name)


_SCALARS = (bool, int, str, type(None))


def _plain(claim: Any, depth: int = 0) -> Any:
    """A claimed scalar or dict key as a builtin. Containers only as keys: tuples and frozensets."""
    if type(claim) in _SCALARS:
        return claim
    if type(claim) is not dict or len(claim) != 1 or depth > MAX_DEPTH:
        raise BadClaim("shape")
    ((tag, body),) = claim.items()
    try:
        match tag:
            case "f":
                return float.fromhex(body)
            case "i":
                return int(body, 16)
            case "q":
                return Fraction(int(body[0], 16), int(body[1], 16))
            case "c":
                return complex(float.fromhex(body[0]), float.fromhex(body[1]))
            case "b":
                return bytes.fromhex(body)
            case "t":
                return tuple(_plain(x, depth + 1) for x in body)
            case "s":
                return frozenset(_plain(x, depth + 1) for x in body)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, KeyError, IndexError) as e:
        raise BadClaim(type(e).__name__) from None
    raise BadClaim("tag")


def matches(expected: Any, claim: Any, depth: int = 0) -> bool:
    """`expected == value` for the value that `claim` stands for. Never raises; guided by `expected`, so the work is
    bounded by it and no table is built from the child's keys beyond its size."""
    if depth > MAX_DEPTH:
        return False
    kind = type(expected)
    if kind is list:
        if type(claim) is not list or len(claim) != len(expected):
            return False
        return all(matches(e, c, depth + 1) for e, c in zip(expected, claim, strict=True))
    body = next(iter(claim.values())) if type(claim) is dict and len(claim) == 1 else None
    tag = next(iter(claim)) if body is not None else None
    if kind is tuple:
        if tag != "t" or type(body) is not list or len(body) != len(expected):
            return False
        return all(matches(e, c, depth + 1) for e, c in zip(expected, body, strict=True))
    if kind is dict:
        if tag != "d" or type(body) is not list or len(body) != len(expected):
            return False
        left = dict(expected)
        for pair in body:
            if type(pair) is not list or len(pair) != 2:
                return False
            try:
                key = _plain(pair[0])
                if key not in left or not matches(left.pop(key), pair[1], depth + 1):
                    return False
            except (BadClaim, RecursionError):
                return False
        return not left
    if kind is set or kind is frozenset:
        if tag != "s" or type(body) is not list or len(body) != len(expected):
            return False
        left = set(expected)
        for item in body:
            try:
                key = _plain(item)
            except (BadClaim, RecursionError):
                return False
            if key not in left:
                return False
            left.discard(key)
        return not left
    try:
        return bool(expected == _plain(claim))
    except (BadClaim, RecursionError):
        return False
