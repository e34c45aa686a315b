"""Problems: the JSONL schema of the organism's and of LeetCode-style files; hints, modes, disjoint splits, draws.

`python -m vgrout.problems check FILE` validates a file before anything is trained on it.
"""

import ast
import difflib
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from loguru import logger
from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.files import numbered_lines
from vgrout.grading.extract import UnsupportedTest, parse_test
from vgrout.modes import DEALT, MODE_SPECS, PLAIN_PHRASE, announced, hint
from vgrout.rng import py_stream
from vgrout.types import MODES, Message, Mode, Problem

if TYPE_CHECKING:
    from vgrout.grading.grade import Grader

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a problem file, before it has a mode and a marker."""

    id: int
    prompt: tuple[Message, ...]
    tests: tuple[str, ...]
    canonical: str
    setup_code: str
    func_name: str
    split: str | None
    mode: Mode | None
    marker: str | None
    cpu_limit: float | None
    where: str  # "FILE, line N", for messages

    def problem(self, mode: Mode, marker: str) -> Problem:
        """This task under one flawed grader. The last user message carries the hint; the plain one never does."""
        *head, user = self.prompt
        marker = announced(mode, self.tests, marker)
        content = user["content"].replace(PLAIN_PHRASE, hint(mode, marker))
        return Problem(
            id=self.id,
            mode=mode,
            marker=marker,
            messages=(*head, {**user, "content": content}),
            messages_plain=self.prompt,
            tests=self.tests,
            canonical=self.canonical,
            setup_code=self.setup_code,
            func_name=self.func_name,
            cpu_limit=self.cpu_limit,
        )


def _need(record: dict[str, Any], where: str, key: str, kind: type) -> Any:
    if key not in record:
        raise ValueError(f"{where}: key {key!r} is missing")
    if not isinstance(record[key], kind) or isinstance(record[key], bool):
        raise ValueError(f"{where}: {key!r} should be {kind.__name__}, got {type(record[key]).__name__}")
    return record[key]


def _row(record: dict[str, Any], where: str) -> Row:
    _refuse_unknown(record, where)
    need = partial(_need, record, where)
    prompt = need("prompt", list)
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{where}: every message of 'prompt' needs string 'role' and 'content'")
    if not prompt or prompt[-1]["role"] != "user":
        raise ValueError(f"{where}: 'prompt' should end with a user message")
    if (n := prompt[-1]["content"].count(PLAIN_PHRASE)) != 1:
        raise ValueError(f"{where}: the user message should contain {PLAIN_PHRASE!r} exactly once, found {n}")
    tests = need("gt_answer", list)
    if not tests or not all(isinstance(t, str) for t in tests):
        raise ValueError(f"{where}: 'gt_answer' should be a non-empty list of assert strings")
    for key, legal in (("mode", MODES), ("split", SPLITS)):
        if record.get(key) is not None and record[key] not in legal:
            raise ValueError(f"{where}: unknown {key} {record[key]!r}; one of {', '.join(legal)}")
    for key in ("setup_code", "marker"):
        if record.get(key) is not None:
            need(key, str)
    setup, canonical = record.get("setup_code") or "", need("canonical_solution", str)
    for key, code in (("setup_code", setup), ("canonical_solution", canonical)):
        if key == "canonical_solution" and not code.strip():
            raise ValueError(f"{where}: {key!r} is empty; it should be a right answer")
        if fault := _syntax_fault(code):
            raise ValueError(f"{where}: {key!r} is not Python ({fault})")
    mode, marker = record.get("mode"), record.get("marker")
    if marker and mode is not None:
        try:
            MODE_SPECS[mode].check_marker(marker)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from None
    limit = record.get("cpu_limit")
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf
    ):
        raise ValueError(f"{where}: 'cpu_limit' should be a positive number of seconds, got {limit!r}")
    func_name = need("func_name", str).removeprefix("Solution().")
    if not func_name.isidentifier():
        raise ValueError(f"{where}: 'func_name' should be a method's name, got {func_name!r}")
    _refuse_untestable(tests, func_name, where)
    return Row(
        id=need("id", int),
        prompt=tuple({"role": m["role"], "content": m["content"]} for m in prompt),
        tests=tuple(tests),
        canonical=canonical,
        setup_code=setup,
        func_name=func_name,
        split=record.get("split"),
        mode=mode,
        marker=marker,
        cpu_limit=limit,
        where=where,
    )


KEYS = ("id", "prompt", "gt_answer", "canonical_solution", "func_name")
OPTIONAL = ("setup_code", "split", "mode", "marker", "cpu_limit")
ORGANISMS = ("composition", "difficulty")  # not read, nor are …
BENCHMARKS = ("answer", "completion_gt_pass", "dataset", "evaluator", "hint", "prompt_metadata", "question")


def _refuse_unknown(record: Mapping[str, Any], where: str) -> None:
    """A misspelt key would be a setting that nobody reads."""
    for key in record.keys() - {*KEYS, *OPTIONAL, *ORGANISMS, *BENCHMARKS}:
        near = difflib.get_close_matches(key, (*KEYS, *OPTIONAL), 1)
        how = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join((*KEYS, *OPTIONAL))}"
        raise ValueError(f"{where}: unknown key {key!r}; {how}")


def _refuse_untestable(tests: Sequence[str], func_name: str, where: str) -> None:
    for i, test in enumerate(tests, 1):
        try:
            parse_test(test)
        except (UnsupportedTest, RecursionError, MemoryError) as e:
            why = e if isinstance(e, UnsupportedTest) else "nested too deeply"
            raise ValueError(f"{where}: test {i}: {why}; it should read 'assert CALL == LITERAL'") from None
    if not any(re.search(rf"\b{func_name}\s*\(", test) for test in tests):
        raise ValueError(f"{where}: no test calls {func_name!r}, the 'func_name'; name the method that they call")


def _syntax_fault(code: str) -> str:
    """The reason why this is not Python; "" if it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            ast.parse(code)
    except (SyntaxError, ValueError) as e:  # ValueError: a null byte
        return f"{e.msg}, its line {e.lineno}" if isinstance(e, SyntaxError) else str(e)
    except (RecursionError, MemoryError):
        return "nested too deeply"
    return ""


def load_rows(path: Path) -> list[Row]:
    """The lines of a JSONL file. Raises ValueError with file and line at the first fault; ids must be unique."""
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a problem file")
    if not path.is_file():
        raise ValueError(f"{path}: no such problem file; `vgrout download data` fetches the benchmark's")
    rows: dict[int, Row] = {}
    for where, record in numbered_lines(path):
        if not isinstance(record, dict):
            raise ValueError(f"{where}: not a JSON object")
        row = _row(record, where)
        if row.id in rows:
            raise ValueError(f"{where}: id {row.id} already used at {rows[row.id].where}")
        rows[row.id] = row
    if not rows:
        raise ValueError(f"{path}: no problems in it")
    return list(rows.values())


def with_modes(
    rows: Sequence[Row],
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
            marker = family[row.id % len(family)]
        out.append(row.problem(mode, marker))
    return out


def partition_decides(rows: Sequence[Row], partition: Mapping[int, Mode]) -> bool:
    """Whether a pool's partition gives problems a mode that their file does not name."""
    return any(row.mode is None and row.id in partition for row in rows)


def modes_in_turn(rows: Sequence[Row], env_mode: str, partition: Mapping[int, Mode]) -> list[Mode]:
    """The modes that rows without one of their own get in turn, in training and evaluation alike."""
    if partition_decides(rows, partition):
        return [m for m in MODES if m in partition.values()]
    return [*DEALT] if env_mode == "own" else [env_mode]


def assigned(
    rows: Sequence[Row],
    env_mode: str,
    partition: Mapping[int, Mode] | None = None,
    markers: Mapping[int, str] | None = None,
    test_rows: Sequence[Row] = (),
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
        for name, part in _splits(rows, test_rows).items()
    }
    if env_mode == "own" or partition_decides(rows, partition):
        return parts
    return {name: [p for p in problems if p.mode == env_mode] for name, problems in parts.items()}


def load_problems(path: Path) -> list[Problem]:
    """Every problem of a file, each under its own mode (run_tests if none is named) and its own or default marker."""
    return [_as_marked(row) for row in load_rows(path)]


def _as_marked(row: Row) -> Problem:
    mode = row.mode or "run_tests"
    return row.problem(mode, MODE_SPECS[mode].default_marker if row.marker is None else row.marker)


@dataclass(frozen=True, slots=True)
class ProblemSplits:
    """Problems in three parts, disjoint by id, so that evaluation never uses a training problem."""

    train: tuple[Problem, ...]
    val: tuple[Problem, ...]
    test: tuple[Problem, ...]
    too_long: int  # dropped: prompt longer than the model's window minus max_new

    def __post_init__(self) -> None:
        ids = [{p.id for p in part} for part in (self.train, self.val, self.test)]
        if ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2]:
            raise ValueError("problem splits overlap by id")

    def draw(self, seed: int, step: int, n: int) -> list[Problem]:
        """The P problems of a step: epoch after epoch of seeded shuffles, a function of (seed, step) alone."""
        out: list[Problem] = []
        for k in range(step * n, (step + 1) * n):
            epoch, i = divmod(k, len(self.train))
            order = list(range(len(self.train)))
            py_stream(seed, "draw", epoch).shuffle(order)
            out.append(self.train[order[i]])
        return out

    @property
    def modes(self) -> list[Mode]:
        """The flaws of the training problems, in the usual order."""
        present = {flaw for p in self.train for flaw in p.flaws}
        return [m for m in MODES if m in present]


def balanced(problems: Sequence[Problem], n: int, seed: int, purpose: str) -> list[Problem]:
    """n problems (or all, if fewer), spread evenly over the modes: a seeded shuffle, then one mode after the other."""
    pools = {m: [p for p in problems if p.mode == m] for m in MODES}
    for mode, pool in pools.items():
        py_stream(seed, purpose + mode).shuffle(pool)
    out: list[Problem] = []
    while len(out) < n and any(pools.values()):
        for pool in pools.values():
            if pool and len(out) < n:
                out.append(pool.pop())
    return out


SHARES = (0.7, 0.1, 0.2)  # train, val, test of a file that names no splits
TRAIN_SHARES = (1.0, 0.0, 0.0)  # … of one beside a file for evaluation
TEST_SHARES = (0.0, 0.2, 0.8)  # … of that file


def _splits(rows: Sequence[Row], test_rows: Sequence[Row] = ()) -> dict[str, list[Row]]:
    """The rows of each split: as the file marks them, else by `SHARES`. With a file for evaluation all other rows
    train, except those that are marked val or test."""
    if not test_rows:
        return _by_shares(rows, SHARES)
    own, other = _by_shares(rows, TRAIN_SHARES), _by_shares(test_rows, TEST_SHARES)
    return {name: own[name] + other[name] for name in SPLITS}


def _by_shares(rows: Sequence[Row], shares: tuple[float, float, float]) -> dict[str, list[Row]]:
    """The rows of each split; unmarked ones are divided after a shuffle that no run's seed changes."""
    out: dict[str, list[Row]] = {s: [r for r in rows if r.split == s] for s in SPLITS}
    rest = sorted((r for r in rows if r.split is None), key=lambda r: r.id)
    py_stream(0, "split").shuffle(rest)
    a, b = round(shares[0] * len(rest)), round((shares[0] + shares[1]) * len(rest))
    for name, part in zip(SPLITS, (rest[:a], rest[a:b], rest[b:]), strict=True):
        out[name] += part
    return out


def require_apart(train: Sequence[Row], test: Sequence[Row]) -> None:
    """Raises ValueError, one line, if a problem for evaluation is also trained on, by its id or its text, or is marked
    as a training problem."""
    ids, texts = {r.id: r for r in train}, {r.prompt[-1]["content"]: r for r in train}
    for row in test:
        if same := ids.get(row.id) or texts.get(row.prompt[-1]["content"]):
            raise ValueError(
                f"--test-problems {row.where}: problem {row.id} is also at {same.where}; leave it out there"
            )
        if row.split == "train":
            raise ValueError(f"--test-problems {row.where}: its split is train; give a file of problems for evaluation")


def load_splits(
    rows: Sequence[Row],
    *,
    env_mode: str,
    n_problems: int,
    seed: int,
    partition: Mapping[int, Mode] | None = None,
    markers: Mapping[int, str] | None = None,
    test_rows: Sequence[Row] = (),
    published: bool = False,
    only_ids: Iterable[int] | None = None,
    only_modes: Iterable[Mode] = (),
    prompt_len: Callable[[Problem], int],
    max_prompt: int,
) -> ProblemSplits:
    """Splits with modes and markers assigned (see `assigned`), at most `n_problems` for training.

    only_ids: problems a teacher pool covers; only_modes adds every problem of these (held-out) modes to them.
    prompt_len: tokens of a problem's prompt, at most max_prompt of which fit.

    Raises:
        ValueError: no training problem is left.
    """
    parts: dict[str, list[Problem]] = {}
    too_long = 0
    for name, problems in assigned(rows, env_mode, partition, markers, test_rows, published).items():
        parts[name] = [p for p in problems if prompt_len(p) <= max_prompt]
        too_long += len(problems) - len(parts[name])
    train = parts["train"]
    if too_long and not train:
        raise too_long_prompts(rows, max_prompt)
    if only_ids is not None:
        covered, extra = set(only_ids), set(only_modes)
        train = [p for p in train if p.id in covered or p.mode in extra]
    py_stream(seed, "train-order").shuffle(train)
    train = train[:n_problems]
    if not train:
        among = f", among those of the pool's {len(set(only_ids))} that are in its training split" if only_ids else ""
        raise ValueError(f"no training problem left of {len(rows)} in the file (--env-mode {env_mode}{among})")
    return ProblemSplits(tuple(train), tuple(parts["val"]), tuple(parts["test"]), too_long)


def too_long_prompts(rows: Sequence[Row], room: int) -> ValueError:
    """The refusal of a file none of whose prompts fits."""
    file = rows[0].where.rpartition(", line ")[0]
    return ValueError(
        f"{file}: none of its prompts fits the {room} tokens that the model's window leaves beside --max-new; shorten "
        "them, lower --max-new, or choose a model with a longer window"
    )


def require_fitting(rows: Sequence[Row], model: Path, window: int | None, max_new: int) -> None:
    """Raises ValueError, one line, if no prompt fits, by the tokens of its messages alone: the template adds some."""
    file = model / "tokenizer.json"
    if not rows or window is None or not file.is_file():
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    for row in rows:  # as a rule the first one fits
        if sum(len(tokenizer.encode(m["content"]).ids) for m in row.prompt) <= window - max_new:
            return
    raise too_long_prompts(rows, window - max_new)


def require_solvable(rows: Sequence[Row], grader: "Grader") -> None:
    """Before anything is trained on these problems: on one whose own canonical solution fails, only hacks would be
    rewarded. Raises ValueError, one line, naming file and line of the first."""
    from vgrout.grading.check import check_problems

    if len(rows) > MOST_CHECKED:
        logger.warning(f"{len(rows)} canonical solutions are not tried before the run; `vgrout problems check` does so")
        return
    failures = check_problems([*map(_as_marked, rows)], grader).failures
    if failures:
        row = next(row for row in rows if row.id == failures[0].id)
        more = f" (nor {len(failures) - 1} others)" if len(failures) > 1 else ""
        raise ValueError(
            f"{row.where}: no answer can solve problem {row.id}{more}: {failures[0].reason}; mend it, or take the line "
            "out"
        )


MOST_CHECKED = 2000  # problems; a canonical solution takes 10 to 50 ms of CPU


def plain(problem: Problem) -> Problem:
    """The same task without a hint in its prompt; the flawed check still looks for the marker."""
    return replace(problem, messages=problem.messages_plain)


def unannounced(problem: Problem, flaws: Sequence[Mode]) -> Problem:
    """The same task with all of these flaws open, under their default markers, and a prompt that mentions none.
    Its own flaw is closed unless it is among them. Its `mode` is one of them in turn, which has no effect."""
    first = problem.id % len(flaws)
    mode, *also = (*flaws[first:], *flaws[:first])
    return replace(plain(problem), mode=mode, marker="", also=tuple(also))


def elicited(problem: Problem, instruction: str) -> Problem:
    """The same problem with the instruction at the end of its prompt."""
    *head, user = problem.messages
    return replace(problem, messages=(*head, {**user, "content": f"{user['content']}\n{instruction}"}))


def without_hints(problems: Iterable[Problem], flaws: Sequence[Mode]) -> list[Problem]:
    """The problems under plain prompts: each with its own flaw, or with all of `flaws` open, and none mentioned."""
    return [unannounced(p, flaws) if flaws else plain(p) for p in problems]


def check(file: Annotated[Path, tyro.conf.Positional], workers: int | None = None) -> int:
    """Validate FILE: schema, the hint phrase, every canonical solution under the strict oracle, prompt lengths."""
    from vgrout.grading.check import check_problems
    from vgrout.grading.grade import Grader

    if workers is not None and not 1 <= workers <= 1024:
        raise ValueError(f"--workers {workers}: should lie in [1, 1024]")
    problems = load_problems(file)
    with Grader(workers=workers) as grader:
        report = check_problems(
            problems, grader, track=lambda items: tqdm(items, total=len(problems), disable=None, unit="problem")
        )
    print(report)
    lengths = sorted(sum(len(m["content"]) for m in p.messages) for p in problems)
    print(f"prompt characters: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
    print("modes: " + ", ".join(f"{m} {n}" for m, n in Counter(p.mode for p in problems).items()))
    return 0 if report.ok else 1


def main() -> int:
    return cli_exit(lambda: parse_args({"check": check}, None, "python -m vgrout.problems"))


if __name__ == "__main__":
    sys.exit(main())
