"""Which rows of a problem file train, which are evaluated on along the way, and which test at the end.

A row comes where its file marks it. Other rows are divided after a shuffle that no run's seed
changes. Copies of one prompt come into one split, so that none is evaluated on that is trained on.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from vgrout.ground.data import Message
from vgrout.ground.errors import Refused
from vgrout.ground.rng import py_stream

SPLITS = ("train", "val", "test")
SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}  # of a file that marks no row
BESIDE_TEST_FILE = {"train": 1.0, "val": 0.0, "test": 0.0}  # of one with --test-problems
OF_TEST_FILE = {"train": 0.0, "val": 0.2, "test": 0.8}


class Row(Protocol):
    """A problem as its file has it."""

    @property
    def id(self) -> int: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def split(self) -> str | None:
        """As the file marks it; None: it does not."""
        ...

    @property
    def where(self) -> str:
        """FILE, line N."""
        ...


R = TypeVar("R", bound=Row)
PromptKey = tuple[str, ...]


def in_splits(rows: Sequence[R], test_rows: Sequence[R] = ()) -> dict[str, list[R]]:
    """The rows of each split.

    test_rows: of a file for evaluation alone. With one, all other rows train, but for those that
    are marked val or test.
    """
    if not test_rows:
        return _divided(rows, SHARES)
    own, other = _divided(rows, BESIDE_TEST_FILE), _divided(test_rows, OF_TEST_FILE)
    return {name: own[name] + other[name] for name in SPLITS}


def _divided(rows: Sequence[R], shares: Mapping[str, float]) -> dict[str, list[R]]:
    """The rows of each split.

    Rows that are not marked follow a marked copy of theirs. The others are divided by `shares`,
    copies of a prompt as one.
    """
    parts: dict[str, list[R]] = {name: [] for name in SPLITS}
    split_of: dict[PromptKey, str] = {}
    for row in rows:
        if row.split is not None:
            parts[row.split].append(row)
            split_of.setdefault(prompt_key(row), row.split)
    rest: dict[PromptKey, list[R]] = {}
    for row in sorted(rows, key=lambda row: row.id):
        if row.split is not None:
            continue
        key = prompt_key(row)
        if key in split_of:
            parts[split_of[key]].append(row)
        else:
            rest.setdefault(key, []).append(row)
    prompts = list(rest.values())
    py_stream(0, "split").shuffle(prompts)
    train_ends = round(shares["train"] * len(prompts))
    val_ends = round((shares["train"] + shares["val"]) * len(prompts))
    divided = (prompts[:train_ends], prompts[train_ends:val_ends], prompts[val_ends:])
    for name, part in zip(SPLITS, divided, strict=True):
        for copies in part:
            parts[name] += copies
    return parts


# ── copies of a prompt


def prompt_key(row: Row) -> PromptKey:
    """What copies of a prompt share: the texts of all messages but the system's, whatever their
    blanks, line ends and case.

    A model answers such a copy from memory. Two problems that are no copies lose nothing where
    these are all that differs: they only come into the same split.
    """
    texts: list[str] = []
    for message in row.messages:
        if message["role"] != "system":
            texts.append(" ".join(message["content"].split()).casefold())
    return tuple(texts)


def copies_line(rows: Sequence[Row]) -> str:
    """How many rows repeat the prompt of another; "" if none does."""
    first: dict[PromptKey, Row] = {}
    copies: list[tuple[Row, Row]] = []
    for row in rows:
        same = first.setdefault(prompt_key(row), row)
        if same is not row:
            copies.append((same, row))
    if not copies:
        return ""
    (same, row), *_ = copies
    return (
        f"{len(copies)} of {len(rows)} problems have the prompt of another, the first problem {row.id} that of "
        f"{same.id}; copies stay in one split"
    )


def marked_apart(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Copies of a prompt that are marked for two splits: each behind the first one that is marked."""
    marked: dict[PromptKey, Row] = {}
    for row in rows:
        if row.split is not None:
            same = marked.setdefault(prompt_key(row), row)
            if same.split != row.split:
                yield same, row


def require_copies_together(rows: Sequence[Row]) -> None:
    """Raises Refused, one line, where a file marks one prompt for training and for an evaluation."""
    for same, row in marked_apart(rows):
        raise Refused(
            f"{row.where}: has the prompt of {same.where}, and is marked {row.split}, that one {same.split}; "
            "mark both alike, or leave one of them out"
        )


def require_apart(train: Sequence[Row], test: Sequence[Row]) -> None:
    """Raises Refused, one line, for a row of --test-problems that is also trained on, by its prompt or its id, or that
    is marked for training."""
    if not test:
        return
    ids = {row.id: row for row in train}
    prompts = {prompt_key(row): row for row in train}
    for row in test:
        where = f"--test-problems {row.where}"
        if same := prompts.get(prompt_key(row)):
            raise Refused(f"{where}: has the prompt of {same.where}; leave it out there")
        if same := ids.get(row.id):
            raise Refused(
                f"{where}: its id {row.id} is also at {same.where}; number the rows of both files apart"
            )
        if row.split == "train":
            raise Refused(f"{where}: its split is train")
