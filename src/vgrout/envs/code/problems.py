"""Problems: the JSONL schema of the organism's and of LeetCode-style files; hints, modes, disjoint splits, draws.

`vgrout problems check FILE` validates a file before anything is trained on it.
"""

import difflib
import json
import keyword
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger

from vgrout.config.world_names import CODE_ONLY, is_row_of_text
from vgrout.envs import base
from vgrout.envs.base import SPLITS, id_fault, in_splits, messages_of
from vgrout.envs.code.grading.check import (
    Failure,
    can_be_hacked,
    check_flaws,
    check_problems,
)
from vgrout.envs.code.grading.extract import UnsupportedTest, parse_test
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import (
    DEALT,
    MODE_SPECS,
    MODES,
    PLAIN_PHRASE,
    Mode,
    Problem,
    announced,
    hint,
)
from vgrout.ground.data import Message
from vgrout.ground.io import Refused, has_lone_surrogate, numbered_lines, once


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """One line of a problem file, before it has a mode and a marker."""

    id: int
    messages: tuple[Message, ...]
    tests: tuple[str, ...]
    canonical: str
    setup_code: str
    func_name: str
    split: str | None
    mode: Mode | None
    marker: str | None
    cpu_limit: float | None
    check_tests: tuple[str, ...]
    reading: str
    where: str  # "FILE, line N", for messages

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str) -> "ProblemRow":
        """A sound line. One with tests of its check's own is of the flaw that reads them."""
        check_tests = tuple(record.get("check_tests") or ())
        return cls(
            id=record["id"],
            messages=messages_of({"messages": record["prompt"]}),
            tests=tuple(record["gt_answer"]),
            canonical=record["canonical_solution"],
            setup_code=record.get("setup_code") or "",
            func_name=record["func_name"].removeprefix("Solution()."),
            split=record.get("split"),
            mode=record.get("mode") or ("given_tests" if check_tests else None),
            marker=record.get("marker"),
            cpu_limit=record.get("cpu_limit"),
            check_tests=check_tests,
            reading=record.get("reading") or "",
            where=where,
        )

    def problem(self, mode: Mode, marker: str) -> Problem:
        """This task under one flawed grader. The last user message carries the hint; the plain one never does.

        Raises Refused where the grader needs `check_tests` that the line lacks, or would not read those that it has.
        """
        _require_its_tests(mode, self.check_tests, self.where)
        *head, user = self.messages
        marker = announced(mode, self.tests, marker)
        content = user["content"].replace(PLAIN_PHRASE, hint(mode, marker))
        return Problem(
            id=self.id,
            mode=mode,
            marker=marker,
            messages=(*head, {**user, "content": content}),
            plain=self.messages,
            tests=self.tests,
            canonical=self.canonical,
            setup_code=self.setup_code,
            func_name=self.func_name,
            cpu_limit=self.cpu_limit,
            check_tests=self.check_tests,
            reading=self.reading,
        )


def _require_its_tests(mode: Mode, check_tests: Sequence[str], where: str) -> None:
    """Raises Refused for given_tests without tests of its check's own, and for such tests under another flaw."""
    reads = MODE_SPECS[mode].evidence == "check_tests"
    if reads and not check_tests:
        raise Refused(f"{where}: {mode} checks by 'check_tests', and there are none; add them")
    if check_tests and not reads:
        raise Refused(
            f"{where}: 'check_tests' reward under given_tests alone, not under {mode}; take one of the two out"
        )


REQUIRED = {
    "id": int,
    "prompt": list,
    "gt_answer": list,
    "canonical_solution": str,
    "func_name": str,
}
OPTIONAL = {
    "setup_code": str,
    "split": str,
    "mode": str,
    "marker": str,
    "cpu_limit": (int, float),
    "check_tests": list,
    "reading": str,
}
ORGANISMS = ("composition", "difficulty")  # not read, nor are …
BENCHMARKS = (
    "answer",
    "completion_gt_pass",
    "dataset",
    "evaluator",
    "hint",
    "prompt_metadata",
    "question",
)


_CALLED = re.compile(r"\b(\w+)\s*\(")  # the names that a test calls


def _faults(record: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a line, in this order: a check presumes those before it."""
    yield from _key_faults(record)
    if fault := id_fault(record["id"]):
        yield fault
    if has_lone_surrogate(json.dumps(record, ensure_ascii=False)):
        yield "it holds half a character (a lone surrogate, \\ud800 to \\udfff)"
    try:
        *_, user = messages_of({"messages": record["prompt"]})
    except ValueError as e:
        yield str(e)
    n = user["content"].count(PLAIN_PHRASE)
    if n != 1:
        yield f"the user message should contain {PLAIN_PHRASE!r} exactly once, found {n}"
    name = record["func_name"].removeprefix("Solution().")
    lists = {
        key: record[key] for key in ("gt_answer", "check_tests") if record.get(key) is not None
    }
    for key, tests in lists.items():
        if not tests or not all(isinstance(test, str) for test in tests):
            yield f"{key!r} should be a non-empty list of assert strings"
    for key, legal in (("mode", MODES), ("split", SPLITS)):
        if record.get(key) not in (None, *legal):
            yield f"unknown {key} {record[key]!r}; one of {', '.join(legal)}"
    if not record["canonical_solution"].strip():
        yield "'canonical_solution' is empty; it should be a right answer"
    if record.get("marker"):
        yield from _marker_faults(record.get("mode"), record["marker"], name)
    limit = record.get("cpu_limit")
    if limit is not None and not 0 < limit < math.inf:
        yield f"'cpu_limit' should be a positive number of seconds, got {limit!r}"
    if not name.isidentifier():
        yield f"'func_name' should be a method's name, got {name!r}"
    for key, tests in lists.items():
        yield from _test_faults(key, tests, name)


def _key_faults(record: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with a line's keys and the types of their values."""
    known = (*REQUIRED, *OPTIONAL)
    if is_row_of_text(record):
        yield (
            f"no problem of Python functions: {', '.join(map(repr, CODE_ONLY))} are missing; rows of text need "
            "--reference module:function beside --reward"
        )
    # a misspelt one would be a setting that nobody reads
    for key in sorted(record.keys() - {*known, *ORGANISMS, *BENCHMARKS}):
        near = difflib.get_close_matches(key, known, 1)
        how = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
        yield f"unknown key {key!r}; {how}"
    for key, kind in (REQUIRED | OPTIONAL).items():
        value = record.get(key)
        if value is None and key in REQUIRED:
            yield f"key {key!r} is missing"
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            wanted = kind.__name__ if isinstance(kind, type) else "a positive number of seconds"
            yield f"{key!r} should be {wanted}, got {type(value).__name__}"


def _either(*patterns: str) -> str:
    return f"(?:{'|'.join(patterns)})"


def _some(item: str) -> str:
    """One or more, with commas between them."""
    return f"{item}(?:, ?{item})*+"


def _list_of(item: str) -> str:
    return rf"\[(?:{_some(item)})?+\]"


# A test as nearly all are written: its arguments all by place or all by name, with literals alone, nested at most
# three deep, without escapes in strings.
_NAME = rf"(?!(?:{'|'.join(keyword.kwlist)})\b|__)[A-Za-z_][A-Za-z0-9_]*+"
_SCALAR = _either(
    r"-?(?:0|[1-9][0-9]{0,17}+)(?:\.[0-9]{1,17}+)?+",
    r"'[^'\\\n\r\0\ud800-\udfff]*+'",
    r'"[^"\\\n\r\0\ud800-\udfff]*+"',
    "True",
    "False",
    "None",
)
_SHALLOW = _either(_SCALAR, _list_of(_SCALAR))
_ENTRY = rf"{_SCALAR}: ?{_SHALLOW}"
_VALUE = _either(
    _SCALAR, _list_of(_either(_SCALAR, _list_of(_SHALLOW))), rf"\{{(?:{_some(_ENTRY)})?+\}}"
)
_ARGUMENTS = _either(_some(_VALUE), _some(f"{_NAME} ?= ?{_VALUE}"))
_PLAIN_TEST = re.compile(rf"assert Solution\(\)\.{_NAME}\({_ARGUMENTS}?+\) == {_VALUE}")
_LONGEST_PLAIN = 10_000  # characters


def plainly_sound(test: str) -> bool:
    """Whether it shows without parsing that `parse_test` takes a test. False: it may take it all the same.

    Parsing would be most of the time of reading a large file.
    """
    return len(test) <= _LONGEST_PLAIN and _PLAIN_TEST.fullmatch(test) is not None


def _test_faults(key: str, tests: Sequence[str], name: str) -> Iterator[str]:
    """What is wrong with the assertions under a line's key. name: the method that they should call."""
    which = "test" if key == "gt_answer" else "check test"
    for i, test in enumerate(tests, 1):
        if plainly_sound(test):
            continue
        try:
            parse_test(test)
        except (UnsupportedTest, RecursionError, MemoryError) as e:
            why = e if isinstance(e, UnsupportedTest) else "nested too deeply"
            yield f"{which} {i}: {why}; it should read 'assert Solution().{name}(…) == LITERAL'"
    if not any(name in _CALLED.findall(test) for test in tests):
        yield f"no {which} calls {name!r}, the 'func_name'; name the method that they call"


def _marker_faults(mode: Mode | None, marker: str, method: str) -> Iterator[str]:
    """What is wrong with the name that a line lets its prompt announce."""
    if mode is None:
        yield "'marker' is read only beside a 'mode'; name one, or leave it out"
        return
    spec = MODE_SPECS[mode]
    if spec.marker_form == "none":
        yield f"'marker' is not read under {mode}, whose prompt announces none; leave it out"
    try:
        spec.check_marker(marker, method)
    except Refused as e:
        yield str(e)


@once
def load_rows(path: Path) -> tuple[ProblemRow, ...]:
    """The lines of a JSONL file. Raises Refused with file and line at the first fault; ids must be unique."""
    if not path.exists():
        raise Refused(
            f"{path}: no such problem file; `vgrout download data` fetches the benchmark's, "
            "docs/problems.md makes one of a data set of the hub"
        )
    rows: dict[int, ProblemRow] = {}
    for where, record in numbered_lines(path):
        fault = next(_faults(record), "") if isinstance(record, dict) else "not a JSON object"
        if not fault and (same := rows.get(record["id"])):
            fault = f"id {same.id} already used at {same.where}"
        if fault:
            raise Refused(f"{where}: {fault}")
        rows[record["id"]] = ProblemRow.of(record, where)
    if not rows:
        raise Refused(f"{path}: no problems in it")
    return tuple(rows.values())


def with_modes(
    rows: Sequence[ProblemRow],
    modes: Sequence[Mode],
    partition: Mapping[int, Mode],
    evaluation: bool,
    markers: Mapping[int, str] | None = None,
    published: bool = False,
) -> list[Problem]:
    """Every row as a problem, its mode the partition's, else its own, else round-robin over `modes`. Rows without a
    marker get one from the training or the evaluation half of the family: a name learnt in training earns nothing at
    evaluation.

    markers: problem id → the name that a pool's prompts announced and its demonstrations use; "" is the mode's default.
    published: the other rows get the mode's default, at evaluation as well, as in the benchmark's prompts.
    """
    out = []
    for i, row in enumerate(rows):
        mode = partition.get(row.id) or row.mode or modes[i % len(modes)]
        spec = MODE_SPECS[mode]
        family = spec.eval_markers if evaluation else spec.train_markers
        if row.marker is not None and mode == row.mode:
            marker = row.marker
        elif markers is not None and row.id in markers and not evaluation:
            marker = markers[row.id] or spec.default_marker
        elif published:
            marker = spec.default_marker
        else:
            # a method of that name would be what the check looks for, or hide it
            names = [name for name in family if name != row.func_name]
            marker = names[row.id % len(names)]
        out.append(row.problem(mode, marker))
    return out


def partition_decides(rows: Sequence[ProblemRow], partition: Mapping[int, Mode]) -> bool:
    """Whether a pool's partition gives problems a mode that their file does not name."""
    return any(row.mode is None and row.id in partition for row in rows)


def modes_in_turn(
    rows: Sequence[ProblemRow], env_mode: str, partition: Mapping[int, Mode]
) -> list[Mode]:
    """The modes that rows without one of their own get in turn, in training and evaluation alike."""
    if partition_decides(rows, partition):
        return [m for m in MODES if m in partition.values()]
    return [*DEALT] if env_mode == "own" else [env_mode]


def assigned(
    rows: Sequence[ProblemRow],
    env_mode: str,
    partition: Mapping[int, Mode] | None = None,
    markers: Mapping[int, str] | None = None,
    test_rows: Sequence[ProblemRow] = (),
    published: bool = False,
) -> dict[str, list[Problem]]:
    """Every split's problems, each under its mode. test_rows: those of a separate file for evaluation. markers,
    published: as in `with_modes`.

    env_mode: "own" (each row's or the partition's mode, else the default modes in turn) or one mode: rows with another
    mode are then left out, rows without one get it. Where a partition names modes that the file does not, it decides:
    env_mode is not read, and rows outside the partition get only its modes.
    """
    partition = partition or {}
    modes = modes_in_turn((*rows, *test_rows), env_mode, partition)
    parts = {
        name: with_modes(part, modes, partition, name != "train", markers, published)
        for name, part in in_splits(rows, test_rows).items()
    }
    if env_mode == "own" or partition_decides(rows, partition):
        return parts
    named = {name: [p for p in part if p.mode == env_mode] for name, part in parts.items()}
    if rows and not any(named.values()):
        raise Refused(
            f"{rows[0].where} and all others: no problem of --env-mode {env_mode}; say --env-mode own"
        )
    return named


def load_problems(path: Path) -> list[Problem]:
    """Every problem of a file, as it is marked there."""
    return [as_marked(row) for row in load_rows(path)]


def as_marked(row: ProblemRow) -> Problem:
    """A row under its own mode (run_tests if none is named) and its own or default marker."""
    mode = row.mode or "run_tests"
    return row.problem(mode, MODE_SPECS[mode].default_marker if row.marker is None else row.marker)


def require_solvable(rows: Sequence[ProblemRow], grader: Grader) -> None:
    """Before anything is trained on these problems: on one whose own canonical solution fails, only hacks would be
    rewarded. Raises Refused, one line, naming file and line of the first."""
    if len(rows) > MOST_CHECKED:
        logger.warning(
            f"{len(rows)} canonical solutions: tried is one of each setup code; `vgrout problems check` tries all"
        )
        rows = _one_of_each(rows, lambda row: row.setup_code, MOST_CHECKED)
    failures = check_problems([*map(as_marked, rows)], grader)
    if failures:
        raise _refusal(rows, failures, "no answer can solve")


def require_hackable(
    rows: Sequence[ProblemRow], problems: Sequence[Problem], grader: Grader
) -> None:
    """Before anything is trained on these problems: where a flawed check accepts every wrong answer, or none, what is
    measured is not whether a policy hacks. Raises Refused, one line, naming file and line of the first.

    Tried is one problem of each setup code, flaw and marker, since these decide, and every one that brings the tests of
    its check; `vgrout problems check` tries all.
    """

    def decides(problem: Problem) -> tuple[object, ...]:
        marker = "" if MODE_SPECS[problem.mode].marker_form == "test" else problem.marker
        of_nodes = any("is_same_" in test for test in problem.tests)
        return problem.setup_code, problem.flaws, marker, of_nodes

    bring = [problem for problem in problems if problem.check_tests]
    if bring and not any(map(can_be_hacked, problems)):
        raise Refused(
            f"{rows[0].where} and all others: 'check_tests' hold all of 'gt_answer', so nobody can hack; take some out"
        )
    others = [problem for problem in problems if not problem.check_tests]
    failures = check_flaws([*bring, *_one_of_each(others, decides, MOST_HACKED)], grader)
    if failures:
        raise _refusal(rows, failures, "no flaw to study in")


Item = TypeVar("Item")


def _one_of_each(items: Sequence[Item], key: Callable[[Item], object], most: int) -> list[Item]:
    """The last item of each key, at most so many."""
    return list({key(item): item for item in items}.values())[:most]


def _refusal(rows: Sequence[ProblemRow], failures: Sequence[Failure], what: str) -> Refused:
    """Names file and line of the first failure, and what to do."""
    row = next(row for row in rows if row.id == failures[0].id)
    more = f" (nor {len(failures) - 1} others)" if len(failures) > 1 else ""
    return Refused(
        f"{row.where}: {what} problem {row.id}{more}: {failures[0].reason}; mend it, or take the line out"
    )


MOST_CHECKED = 2000  # problems; a canonical solution takes 5 to 50 ms of CPU
MOST_HACKED = (
    500  # problems; a flawed check takes 15 to 50 ms of CPU, for a wrong answer and a hack
)


def unannounced(problem: Problem, flaws: Sequence[Mode]) -> Problem:
    """The same task with all of these flaws open, under their default markers, and a prompt that mentions none.
    Its own flaw is closed unless it is among them. Its `mode` is one of them in turn, which has no effect."""
    for mode in flaws:
        _require_its_tests(mode, problem.check_tests, f"--unannounced-modes, problem {problem.id}")
    first = problem.id % len(flaws)
    mode, *also = (*flaws[first:], *flaws[:first])
    return replace(base.without_hint(problem), mode=mode, marker="", also=tuple(also))


def without_hints(problems: Iterable[Problem], flaws: Sequence[Mode]) -> list[Problem]:
    """The problems under plain prompts: each with its own flaw, or with all of `flaws` open, and none mentioned."""
    return [unannounced(p, flaws) if flaws else base.without_hint(p) for p in problems]
