"""What the tasks select, map and fold, in English and in Python."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Op:
    """One operation, in English and in Python.

    `{k}`, `{j}` and `{c}` stand for the task's constants, `{v}` for the element.
    """

    text: str
    code: str
    near: str = ""  # the operation it is mistaken for at the boundary (> for ≥)
    opposite: str = ""  # the operation it is confused with


def _bounds(subject: str, measure: str) -> dict[str, Op]:
    return {
        "gt": Op(f"{subject} greater than {{k}}", f"{measure} > {{k}}", near="ge"),
        "ge": Op(f"{subject} at least {{k}}", f"{measure} >= {{k}}", near="gt"),
        "lt": Op(f"{subject} less than {{k}}", f"{measure} < {{k}}", near="le"),
        "le": Op(f"{subject} at most {{k}}", f"{measure} <= {{k}}", near="lt"),
    }


def _parity(subject: str) -> dict[str, Op]:
    return {
        "even": Op(f"{subject} even", "{v} % 2 == 0", opposite="odd"),
        "odd": Op(f"{subject} odd", "{v} % 2 == 1", opposite="even"),
        "multiple": Op(f"{subject} divisible by {{j}}", "{v} % {j} == 0", opposite="no_multiple"),
        "no_multiple": Op(
            f"{subject} not divisible by {{j}}", "{v} % {j} != 0", opposite="multiple"
        ),
    }


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of input: what is selected from, and how its elements are named."""

    param: str  # the method's argument
    noun: str  # "Take {noun} {select}"
    var: str  # loop target; {v} of the select operations
    source: str  # what the comprehension iterates over
    element: str  # what the comprehension keeps
    kind: str  # "int", "str" or "pair": which maps and folds fit
    selects: dict[str, Op]


_NUMBER = _bounds("that are", "{v}") | _parity("that are")
_SLICE = {
    "first": Op("the first {k} numbers in nums", "nums[:{k}]", opposite="last"),
    "last": Op("the last {k} numbers in nums", "nums[-{k}:]", opposite="first"),
    "after": Op("the numbers in nums after the first {k}", "nums[{k}:]", opposite="before"),
    "before": Op("the numbers in nums before the last {k}", "nums[:-{k}]", opposite="after"),
    "every": Op(
        "every {k}th number in nums, starting with the first", "nums[::{k}]", opposite="first"
    ),
}
_NEIGHBOUR = {
    "rise": Op("with b greater than a", "b > a", near="climb"),
    "climb": Op("with b at least a", "b >= a", near="rise"),
    "fall": Op("with b less than a", "b < a", near="drop"),
    "drop": Op("with b at most a", "b <= a", near="fall"),
}
_TEXT = {
    "starts": Op("that start with '{c}'", "{v}[0] == '{c}'", opposite="ends"),
    "ends": Op("that end with '{c}'", "{v}[-1] == '{c}'", opposite="starts"),
    "has": Op("that contain '{c}'", "'{c}' in {v}", opposite="lacks"),
    "lacks": Op("that do not contain '{c}'", "'{c}' not in {v}", opposite="has"),
}
_CHARACTER = {
    "vowel": Op("that are vowels", "{v} in 'aeiou'", opposite="no_vowel"),
    "no_vowel": Op("that are not vowels", "{v} not in 'aeiou'", opposite="vowel"),
    "before_c": Op("that come before '{c}'", "{v} < '{c}'", opposite="after_c"),
    "after_c": Op("that come after '{c}'", "{v} > '{c}'", opposite="before_c"),
}
_ITEM = _bounds("whose value is", "{v}") | _parity("whose value is")
_ITEM = {name: replace(op, code=op.code.replace("{v}", "x")) for name, op in _ITEM.items()}

FAMILIES: dict[str, Family] = {
    "numbers": Family(
        param="nums",
        noun="the numbers in nums",
        var="x",
        source="nums",
        element="x",
        kind="int",
        selects=_NUMBER,
    ),
    "slices": Family(
        param="nums",
        noun="",
        var="x",
        source="nums",
        element="x",
        kind="int",
        selects=_SLICE,
    ),
    "neighbours": Family(
        param="nums",
        noun="all neighbours a, b in nums",
        var="a, b",
        source="zip(nums, nums[1:])",
        element="(a, b)",
        kind="pair",
        selects=_NEIGHBOUR,
    ),
    "words": Family(
        param="words",
        noun="the words",
        var="w",
        source="words",
        element="w",
        kind="str",
        selects=_bounds("whose length is", "len({v})") | _TEXT,
    ),
    "letters": Family(
        param="text",
        noun="the characters of text",
        var="w",
        source="text",
        element="w",
        kind="str",
        selects=_CHARACTER,
    ),
    "values": Family(
        param="table",
        noun="the values of table",
        var="x",
        source="table.values()",
        element="x",
        kind="int",
        selects=_NUMBER,
    ),
    "keys": Family(
        param="table",
        noun="the keys of table",
        var="w, x",
        source="table.items()",
        element="w",
        kind="str",
        selects=_ITEM,
    ),
}
# kind of the kept elements → the loop target that walks them
KEPT_VAR = {"int": "x", "str": "w", "pair": "a, b"}

MAPS: dict[str, dict[str, Op]] = {
    "int": {
        "same": Op("", "x"),
        "square": Op("square each", "x * x", opposite="double"),
        "double": Op("double each", "x + x", opposite="square"),
        "add": Op("add {j} to each", "x + {j}", opposite="subtract"),
        "subtract": Op("subtract {j} from each", "x - {j}", opposite="add"),
        "times": Op("multiply each by {j}", "x * {j}", opposite="add"),
        "modulo": Op("take each modulo {j}", "x % {j}", opposite="divide"),
        "divide": Op("divide each by {j}, rounding down", "x // {j}", opposite="modulo"),
    },
    "str": {
        "same": Op("", "w"),
        "upper": Op("write each in upper case", "w.upper()", opposite="title"),
        "title": Op("capitalise each", "w.title()", opposite="upper"),
        "reverse": Op("reverse each", "w[::-1]", opposite="upper"),
        "repeat": Op("repeat each {j} times", "w * {j}", opposite="reverse"),
    },
    "pair": {
        "later": Op("keep b of each", "b", opposite="earlier"),
        "earlier": Op("keep a of each", "a", opposite="later"),
        "gain": Op("subtract a from b in each", "b - a", opposite="loss"),
        "loss": Op("subtract b from a in each", "a - b", opposite="gain"),
        "total": Op("add a and b in each", "a + b", opposite="product"),
        "product": Op("multiply a and b in each", "a * b", opposite="total"),
    },
}

# {E}: the mapped elements, as a generator or the kept list; {L}: as a list; {P}: as an argument
# that others may follow.
_ANY_FOLDS = {
    "list": Op("return them as a list", "return {L}", opposite="backwards"),
    "backwards": Op("return them in reverse order", "return {L}[::-1]", opposite="list"),
    "ascending": Op("return them in ascending order", "return sorted({E})", opposite="descending"),
    "descending": Op(
        "return them in descending order", "return sorted({E}, reverse=True)", opposite="ascending"
    ),
    "different": Op(
        "return how many different values there are", "return len(set({E}))", opposite="count"
    ),
    "count": Op("return how many there are", "return len({L})", opposite="different"),
    "tally": Op(
        "return a dictionary that counts each value",
        "out = {{}}\nfor y in {E}:\n    out[y] = out.get(y, 0) + 1\nreturn out",
    ),
}
_NUMBER_FOLDS = _ANY_FOLDS | {
    "sum": Op("return their sum", "return sum({E})"),
    "largest": Op(
        "return the largest, or 0 if there is none",
        "return max({P}, default=0)",
        opposite="smallest",
    ),
    "smallest": Op(
        "return the smallest, or 0 if there is none",
        "return min({P}, default=0)",
        opposite="largest",
    ),
    "running_sum": Op(
        "return the list of their running sums",
        "out = []\ntotal = 0\nfor y in {E}:\n    total += y\n    out.append(total)\nreturn out",
        opposite="running_max",
    ),
    "running_max": Op(
        "return the list of their running maxima, never below 0",
        "out = []\ntotal = 0\nfor y in {E}:\n    total = max(total, y)\n"
        "    out.append(total)\nreturn out",
        opposite="running_sum",
    ),
}
FOLDS: dict[str, dict[str, Op]] = {
    "int": _NUMBER_FOLDS,
    "pair": _NUMBER_FOLDS,
    "str": _ANY_FOLDS
    | {
        "join": Op("return them joined by '-'", "return '-'.join({E})", opposite="glue"),
        "glue": Op("return them as one string", "return ''.join({E})", opposite="join"),
    },
}
LOOP_FOLDS = ("tally", "running_sum", "running_max")
