"""Claimed outputs: the child writes them as capped JSON, the judge compares them with what it expects.

The child strips with base-class methods, so a Counter is its items and an IntEnum is its number, and a lying subclass
is the value under the lie. The judge sees null, booleans, numbers, strings, arrays and one-key objects:

    {"f": hex} float   {"i": hex} large int   {"q": [n, d]} Fraction or Decimal   {"c": [re, im]} complex
    {"b": hex} bytes   {"t": […]} tuple   {"s": […]} set or frozenset   {"d": [[k, v], …]} dict
    {"x": type} a value that no literal equals   {"e": type} the call raised

`matches(expected, claim)` is then `expected == value`, as the benchmark's `==` has it: 2 == 2.0, True == 1, a tuple is
no list, and NaN equals nothing, not even itself inside a list.
"""

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from json.encoder import encode_basestring_ascii
from typing import Any, cast

MAX_DEPTH = 200
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
    except _Opaque:
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


def _encode(value: Any, depth: int, budget: list[int]) -> str:
    # The type's own MRO: isinstance would ask the object for __class__, which may lie.
    mro = _mro(type(value))
    if value is None:
        return "null"
    if bool in mro:
        return "true" if value is True else "false"
    if int in mro:
        return _int(value)
    if str in mro:
        plain = str.__add__(value, "")
        _spend(budget, 0, len(plain))
        return encode_basestring_ascii(str.__str__(plain))
    if float in mro:
        return f'{{"f": "{_float_hex(float.__add__(value, 0.0))}"}}'
    if depth >= MAX_DEPTH:
        raise _Opaque
    if list in mro:
        n = list.__len__(value)
        items = list.__getitem__(value, slice(0, n))
        # All of the exact type: their comparisons are int's own, and repr is valid JSON.
        if set(map(type, items)) == {int} and n * 20 <= budget[1] and -(1 << 60) < min(items) <= max(items) < 1 << 60:
            text = list.__repr__(items)
            _spend(budget, 0, len(text))
            return text
        return f"[{_items(items, depth, budget)}]"
    if tuple in mro:
        return f'{{"t": [{_items(list(tuple.__iter__(value)), depth, budget)}]}}'
    if dict in mro:
        pairs = list(dict.items(value))
        _spend(budget, 2 * len(pairs))
        body = ", ".join(f"[{_encode(k, depth + 1, budget)}, {_encode(v, depth + 1, budget)}]" for k, v in pairs)
        return f'{{"d": [{body}]}}'
    if set in mro:
        return f'{{"s": [{_items(list(set.__iter__(value)), depth, budget)}]}}'
    if frozenset in mro:
        return f'{{"s": [{_items(list(frozenset.__iter__(value)), depth, budget)}]}}'
    if bytes in mro:
        _spend(budget, 0, 2 * bytes.__len__(value))
        return f'{{"b": "{bytes.hex(value)}"}}'
    if complex in mro:
        plain = complex.__add__(value, 0)
        return f'{{"c": ["{_float_hex(plain.real)}", "{_float_hex(plain.imag)}"]}}'
    if Fraction in mro or Decimal in mro:
        return _ratio(value, Fraction if Fraction in mro else Decimal)
    raise _Opaque


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
