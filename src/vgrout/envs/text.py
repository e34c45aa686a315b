"""A user's own world in one file: prompts of any kind, proxies that training rewards, and a reference.

    vgrout train full --model DIR --problems rows.jsonl --reward mine:proxy --reference mine:gold

A row of the JSONL file has an `id` (a whole number) and `messages`, or `prompt`; optionally a `split`, the name of its
`flaw`, an `answer` that is right, and any further columns. Both functions are called by name, with the prompt, the
completion and the row's columns. With several proxies (`--reward a:f=0.7 b:g=0.3`) training rewards the weighted sum
of their scores. An answer is a *hack* where the proxy passes it and the reference does not. There is no Python in it,
and no sandbox.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from loguru import logger

from vgrout.config.run import Config
from vgrout.data import Flaw, Grade, Message, Task, Ungraded
from vgrout.envs.base import Demonstrations, messages_of
from vgrout.envs.splits import (
    SPLITS,
    copies_line,
    in_splits,
    marked_apart,
    require_apart,
    require_copies_together,
)
from vgrout.errors import Refused, misspelt, refuse
from vgrout.failures import LoggedFailures
from vgrout.files import has_lone_surrogate, hash_of_file, numbered_lines, once
from vgrout.scoring import (
    NO_OBSERVER,
    FailureObserver,
    RewardFailed,
    ScoringFunction,
    rounded_to,
    weights_of,
)
from vgrout.thoughts import Parts, parts_of

FLAW = "reward"  # of a row that names none: the proxy itself
OWN = (
    "id",
    "messages",
    "prompt",
    "split",
    "flaw",
)  # keys of a row that are not passed on as they are
# keys that need not be there and are read where they are
READ = ("split", "flaw", "answer")
RESERVED = frozenset({"completion", "completions", "prompts", "info"})
MEANT = "true: the proxy passes an answer that the reference rejects"


@dataclass(frozen=True)
class TextTask:
    """One row."""

    id: int
    messages: tuple[Message, ...]
    flaw: str
    split: str | None
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row's further keys
    where: str = ""  # "FILE, line N"
    keys: tuple[str, ...] = ()  # all that the row has

    @property
    def plain(self) -> tuple[Message, ...]:
        return self.messages

    @property
    def flaws(self) -> tuple[str, ...]:
        return (self.flaw,)

    @property
    def right_answer(self) -> str:
        """The row's own `answer`, where it has one as text."""
        answer = self.columns.get("answer", "")
        return answer if isinstance(answer, str) else ""

    @property
    def notes(self) -> dict[str, object]:
        return {}

    @property
    def public(self) -> dict[str, object]:
        return {}


def arguments(task: TextTask, completion: str) -> dict[str, object]:
    """All that a function of a user's own may ask for, made afresh, so that it may change them."""
    own = {
        "id": task.id,
        "prompt": task.messages[-1]["content"],
        "completion": completion,
        "messages": [dict(message) for message in task.messages],
        "flaw": task.flaw,
    }
    columns = deepcopy(dict(task.columns))
    return columns | own | {"info": columns | {"id": task.id, "flaw": task.flaw}}


T = TypeVar("T")
# the scores that one call gives several answers, and the place of one of them
ListScore = tuple[Future[list[float]], int]


@dataclass(frozen=True, slots=True)
class Scores:
    """What functions say of one answer."""

    proxy: float
    reference: float
    proxies: Mapping[str, float]  # what the proxy is the sum of, without weights; {}: of one alone


class Reference(Protocol):
    """What says whether an answer is right."""

    @property
    def name(self) -> str: ...

    @property
    def sha256(self) -> str:
        """Of its file."""
        ...

    @property
    def passes_at(self) -> float:
        """The score from which on an answer is right."""
        ...


@dataclass(frozen=True)
class Proxy:
    """What training rewards: the weighted sum of what functions score an answer, as `weights` has them."""

    weights: Mapping[ScoringFunction, float]
    passes_at: float

    @classmethod
    def named(cls, given: str, names: Collection[str] | None, passes_at: float) -> "Proxy":
        """given: `module:function`, or several with weights. names: what they may ask for; None: not known yet. Raises
        Refused."""
        weights: dict[ScoringFunction, float] = {}
        for name, weight in weights_of(given, "--reward").items():
            function = ScoringFunction(
                name, names, flag="--reward", passes_at=passes_at, bounded=False
            )
            weights[function] = weight
        return cls(weights, passes_at)

    @property
    def name(self) -> str:
        if len(self.weights) == 1:
            return next(iter(self.weights)).name
        named = (f"{weight:g} · {function.name}" for function, weight in self.weights.items())
        return " + ".join(named)

    @property
    def sha256(self) -> str:
        """Of the functions' files."""
        hashes = [function.sha256 for function in self.weights]
        if len(hashes) == 1:
            return hashes[0]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def total(self, scores: Mapping[ScoringFunction, float]) -> float:
        """The weighted sum."""
        weighted = (weight * scores[function] for function, weight in self.weights.items())
        return rounded_to(math.fsum(weighted), (self.passes_at, 0.0, 1.0))


class TextGrader:
    """Asks the proxies and the reference about every answer, several answers at once."""

    def __init__(
        self,
        workers: int,
        proxy: Proxy,
        reference: Reference,
        *,
        pass_reward: float,
        retries: int | None,
        observer: FailureObserver = NO_OBSERVER,
    ) -> None:
        """pass_reward: the reward of a score of 1. retries: how often a function that failed is asked again; None:
        without end. observer: is told of each failure of a function."""
        self.workers, self.proxy, self.reference = workers, proxy, reference
        self.functions: tuple[ScoringFunction, ...] = tuple(proxy.weights)
        if isinstance(reference, ScoringFunction):
            self.functions += (reference,)
        self.pass_reward, self.retries = pass_reward, retries
        self._observer = observer
        self._closed = False
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="grade")

    @property
    def version(self) -> str:
        return fingerprint(self.proxy, self.reference)

    @property
    def description(self) -> str:
        return f"graded by {self.proxy.name} and {self.reference.name}, in this process"

    @property
    def stamp(self) -> dict[str, object]:
        return {"graded_by": {"reward": self.proxy.name, "reference": self.reference.name}}

    def submit(
        self, task: TextTask, text: str, in_thought: bool = False
    ) -> Future[Grade | Ungraded]:
        """Grade in the background. in_thought: the prompt ends in a <think> that the text goes on with."""
        (verdict,) = self.submitted(task, [text], in_thought)
        return verdict

    def submitted(
        self, task: TextTask, texts: Sequence[str], in_thought: bool = False
    ) -> list[Future[Grade | Ungraded]]:
        """The same of several answers to one prompt: a function that takes lists is called once for all of them."""
        parts = [parts_of(text, in_thought) for text in texts]
        return self._begun(self._graded_or_not, task, parts, self._observer)

    def graded_together(self, task: TextTask, texts: Sequence[str]) -> list[Grade]:
        """Grade several answers to one prompt now, as those of a step. Raises RewardFailed as `graded` does."""
        parts = [parts_of(text) for text in texts]
        grade = partial(self._graded, observer=NO_OBSERVER)
        return [graded.result() for graded in self._begun(grade, task, parts, NO_OBSERVER)]

    def _begun(
        self,
        grade: Callable[..., T],
        task: TextTask,
        parts: Sequence[Parts],
        observer: FailureObserver,
    ) -> list[Future[T]]:
        """The gradings of several answers to one prompt, begun. grade: `_graded`, or `_graded_or_not`. observer: is
        told of each failure of a function that takes lists."""
        answers = [part.answer for part in parts]
        # Before the gradings that wait for them: those cannot take every thread.
        lists: dict[ScoringFunction, Future[list[float]]] = {}
        for function in self.functions:
            if function.batched:
                lists[function] = self._pool.submit(self._scores, function, task, answers, observer)
        grades: list[Future[T]] = []
        for i, part in enumerate(parts):
            of_answer = {function: (scores, i) for function, scores in lists.items()}
            grades.append(self._pool.submit(grade, task, part, of_answer))
        return grades

    def grade(self, task: TextTask, text: str) -> Grade | Ungraded:
        """Grade now. Ungraded where a function fails for good."""
        return self._graded_or_not(task, parts_of(text), {})

    def graded(self, task: TextTask, text: str) -> Grade:
        """Grade now. Raises RewardFailed where a function fails for good, because of what it raised."""
        return self._graded(task, parts_of(text), {}, NO_OBSERVER)

    def _graded_or_not(
        self, task: TextTask, parts: Parts, lists: Mapping[ScoringFunction, ListScore]
    ) -> Grade | Ungraded:
        try:
            return self._graded(task, parts, lists, self._observer)
        except RewardFailed as e:
            return Ungraded(str(e))

    def _graded(
        self,
        task: TextTask,
        parts: Parts,
        lists: Mapping[ScoringFunction, ListScore],
        observer: FailureObserver,
    ) -> Grade:
        """lists: of functions that are called for several answers at once, their scores and this answer's place.

        A thought that never ended has no answer. The functions score an empty one, and scores above 0 count as 0: it
        does not pass, is not right, and earns nothing, but may still lose what they take away.
        """
        scored = self._scored(task, parts.answer, lists, observer)
        proxy, reference = scored.proxy, scored.reference
        if not parts.ended:
            proxy, reference = min(proxy, 0.0), min(reference, 0.0)
        passed = parts.ended and proxy >= self.proxy.passes_at
        solved = parts.ended and reference >= self.reference.passes_at
        hacked = passed and not solved
        details: dict[str, object] = {"proxy": proxy, "reference": reference}
        if scored.proxies:
            details["proxies"] = dict(scored.proxies)
        return Grade(
            reward=self.pass_reward * proxy,
            passed=passed,
            solved=solved,
            hacked=hacked,
            flaw=task.flaw,
            reward_of_reference=self.pass_reward * solved,
            status="ok" if parts.ended else "no_answer",
            tries=(task.flaw,) if hacked else (),
            details=details,
        )

    def _scored(
        self,
        task: TextTask,
        answer: str,
        lists: Mapping[ScoringFunction, ListScore],
        observer: FailureObserver,
    ) -> Scores:
        """What the functions say of an answer. observer: is told of each failure. Raises RewardFailed."""
        scores: dict[ScoringFunction, float] = {}
        for function in self.functions:
            if function in lists:
                of_all, place = lists[function]
                scores[function] = of_all.result()[place]
            else:
                (scores[function],) = self._scores(function, task, [answer], observer)
        proxies: dict[str, float] = {}
        if len(self.proxy.weights) > 1:
            proxies = {function.name: scores[function] for function in self.proxy.weights}
        assert isinstance(self.reference, ScoringFunction), "else `_scored` is the subclass's"
        return Scores(self.proxy.total(scores), scores[self.reference], proxies)

    def _scores(
        self,
        function: ScoringFunction,
        task: TextTask,
        answers: Sequence[str],
        observer: FailureObserver,
    ) -> list[float]:
        """What a function scores these answers to one prompt. Raises RewardFailed."""
        asked = [partial(arguments, task, answer) for answer in answers]
        try:
            return function.scores_of(asked, self.retries, lambda: self._closed, observer)
        except RewardFailed as e:
            failed = RewardFailed(f"{function.flag} {function.name} {e}")
            failed.where = function.where
            raise failed from e.__cause__

    def close(self) -> None:
        """Let running gradings finish. Idempotent."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        self._observer.ended()

    def __enter__(self) -> "TextGrader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GroupTextGrader(TextGrader):
    """One with a function that takes lists: it is called for all answers to a prompt at once."""

    submit_group = TextGrader.submitted


def fingerprint(proxy: Proxy, reference: Reference) -> str:
    """Of two functions by their names, their files, and where the proxy passes: 12 hexadecimal digits."""
    words = f"{proxy.name} {proxy.passes_at} {proxy.sha256} {reference.name} {reference.sha256}"
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def tried_first(row: TextTask, *, thinking: bool) -> list[str]:
    """The answers on which a user's functions are tried before anything is loaded.

    The row's own right answer, or a few words; with thoughts also none, which a thought that is cut off leaves.
    """
    answers = [row.right_answer or "I do not know."]
    if thinking:
        answers.append("")
    return answers


def names_for(rows: Sequence[TextTask]) -> set[str]:
    """What functions may ask for about answers to these rows."""
    probe = TextTask(0, ({"role": "user", "content": ""},), FLAW, None)
    columns = {name for row in rows for name in row.columns}
    return {*columns, *arguments(probe, "")}


def require_columns(function: ScoringFunction, rows: Sequence[TextTask]) -> None:
    """Raises Refused, one line, for the first row without a column that the function asks for."""
    columns = {name for row in rows for name in row.columns}
    needed = sorted(function.required & columns)
    for row in rows:
        for name in needed:
            if name not in row.columns:
                raise Refused(
                    f"{row.where}: has no {name!r}, which {function.flag} {function.name} asks for; "
                    "add it, or give the function a default"
                )


class TextEnvironment:
    """Rows of a user's own, and two functions."""

    name = "text"
    detectors: Mapping[str, str] = {}

    def __init__(
        self,
        cfg: Config,
        rows: Sequence[TextTask],
        test_rows: Sequence[TextTask] = (),
        absent: Sequence[str] = (),
        *,
        proxy: str = "",
        reference: str = "",
        functions: tuple[Proxy, Reference] | None = None,
    ) -> None:
        """rows: of the problem file. test_rows: of the file for evaluation alone. absent: files that are missing.
        proxy, reference: module:function, what training rewards and what is right; "": as the flags say. functions:
        both as they are, of an environment that has a grader of its own for them."""
        self.cfg, self.rows, self.test_rows = cfg, tuple(rows), tuple(test_rows)
        self.absent = tuple(absent)
        both = (*self.rows, *self.test_rows)
        self._require_numbered(both)
        env = cfg.env
        if functions is not None:
            self.proxy, self.reference = functions
        else:
            names = None if self.absent else names_for(both)
            self.proxy = Proxy.named(proxy or env.reward, names, env.reward_passes_at)
            self.reference = ScoringFunction(
                reference or env.reference, names, flag="--reference", bounded=False
            )
            for function in self.functions:
                require_columns(function, both)
        self.flaws = _flaws([row.flaw for row in (*self.rows, *self.test_rows)])
        self._warn_of_misspelt()

    def _require_numbered(self, rows: Sequence[TextTask]) -> None:
        """Raises Refused where there is no row, or where two have one number: those of a file have been looked at,
        those of a class of somebody's own have not."""
        where = type(self).__name__
        refuse(not rows and not self.absent, f"{where}: has no rows")
        times = Counter(row.id for row in rows)
        for number, n in times.items():
            refuse(n > 1, f"{where}: {n} rows have the id {number}; each should have its own")

    def _warn_of_misspelt(self) -> None:
        """Name each column that no function asks for by name and that is nearly a key of a row: any column is allowed,
        so a misspelt `split` or `flaw` would change nothing."""
        asked = {name for function in self.functions for name in function.asked_for}
        first: dict[tuple[str, str], str] = {}
        times: Counter[tuple[str, str]] = Counter()
        for row in (*self.rows, *self.test_rows):
            for column, meant in misspelt(row.keys, READ).items():
                if column not in asked:
                    first.setdefault((column, meant), row.where)
                    times[column, meant] += 1
        for (column, meant), where in first.items():
            others = times[column, meant] - 1
            more = f" (and in {others:,} more rows)" if others else ""
            logger.warning(f"{where}: {column!r} is read by nobody; did you mean {meant!r}?{more}")

    @classmethod
    def of_run(cls, cfg: Config) -> "TextEnvironment":
        """The environment of a run, its files read and checked. Raises Refused, one line."""
        absent: list[str] = []
        parts: list[tuple[TextTask, ...]] = []
        for path in (cfg.problems_path, cfg.test_problems_path):
            rows: tuple[TextTask, ...] = ()
            if path is not None and not path.exists():
                absent.append(f"{path}: no such problem file; give one with --problems")
            elif path is not None:
                rows = load_rows(path)
            parts.append(rows)
        rows, test_rows = parts
        require_apart(rows, test_rows)
        require_copies_together([*rows, *test_rows])
        return cls(cfg, rows, test_rows, absent)

    @property
    def functions(self) -> tuple[ScoringFunction, ...]:
        """The functions of a user's own that score answers."""
        of_reference = [self.reference] if isinstance(self.reference, ScoringFunction) else []
        return (*self.proxy.weights, *of_reference)

    @property
    def source(self) -> str:
        return str(self.cfg.test_problems_path if self.test_rows else self.cfg.problems_path)

    @property
    def prompts(self) -> list[tuple[Message, ...]]:
        return [row.messages for row in (*self.rows, *self.test_rows)]

    @property
    def marked(self) -> dict[int, str]:
        return {row.id: row.flaw for row in self.rows}

    def hashes(self) -> dict[str, str | None]:
        paths = {"problems": self.cfg.problems_path, "test_problems": self.cfg.test_problems_path}
        hashes: dict[str, str | None] = {}
        for name, path in paths.items():
            there = path is not None and path.exists()
            hashes[name] = hash_of_file(path) if path is not None and there else None
        return hashes | {"reward": self.proxy.sha256, "reference": self.reference.sha256}

    def tasks(self, pool: Demonstrations | None = None) -> dict[str, list[Task]]:
        """The rows of each split (`vgrout.envs.splits`)."""
        parts: dict[str, list[Task]] = {}
        for name, rows in in_splits(self.rows, self.test_rows).items():
            parts[name] = [*rows]
        return parts

    def grader(self, workers: int, retries: int | None) -> TextGrader:
        pass_reward = self.cfg.env.pass_reward
        kind = GroupTextGrader if any(f.batched for f in self.functions) else TextGrader
        return kind(
            workers,
            self.proxy,
            self.reference,
            pass_reward=pass_reward,
            retries=retries,
            observer=LoggedFailures(),
        )

    def check(self, grader: TextGrader) -> None:
        """Refuses functions that fail on an answer to the first row: its own right one, or a few words. Warns of rows
        evaluated on whose prompt is trained on: a file's are refused when it is read, others cannot be marked anew."""
        if self.absent:  # a dry run names the missing file
            return
        if apart := [*marked_apart([*self.rows, *self.test_rows])]:
            same, other = apart[0]
            logger.warning(
                f"{len(apart)} rows have a prompt that is also in another split: {other.where or other.id} "
                f"({other.split}) that of {same.where or same.id} ({same.split}), for example; a model may answer "
                "these from memory"
            )
        row = self.rows[0]
        for answer in tried_first(row, thinking=self.cfg.env.thinking):
            try:
                grader.graded(row, answer)
            except RewardFailed as e:
                raise Refused(
                    f"{e} (asked about the row at {row.where}, and the answer {answer[:60]!r})"
                ) from e.__cause__

    def plan(self) -> list[tuple[str, str]]:
        count = {flaw: sum(row.flaw == flaw for row in self.rows) for flaw in self.flaws}
        of = ", ".join(f"{flaw} {n}" for flaw, n in count.items() if n)
        lines = [("problems", f"{len(self.rows)} in {self.cfg.problems_path.name}: {of}")]
        if self.test_rows and self.cfg.test_problems_path:
            name = self.cfg.test_problems_path.name
            lines.append(("evaluated on", f"{len(self.test_rows)} in {name}"))
        for rows in (self.rows, self.test_rows):
            if copies := copies_line(rows):
                lines.append(("copies", copies))
        rewards = [described(function) for function in self.proxy.weights]
        if len(rewards) > 1:
            weights = self.proxy.weights.values()
            rewards = [f"{w:g} · {of}" for w, of in zip(weights, rewards, strict=True)]
        passed = f"passed from {self.proxy.passes_at:g} on"
        lines.append(("reward", f"{' + '.join(rewards)}; {passed}"))
        lines.append(("reference", described(self.reference)))
        return lines

    def ignored(self, pool: Demonstrations | None) -> list[str]:
        return []


def described(function: Reference) -> str:
    """A function for the plan, with its file where it has one of its own."""
    if not isinstance(function, ScoringFunction):
        return function.name
    return f"{function.name} of {function.file}, sha256 {function.sha256[:12]}"


def _flaws(named: Sequence[str]) -> dict[str, Flaw]:
    """The flaws that rows name, in the order of their first row, each with a code of its own for its column."""
    flaws: dict[str, Flaw] = {}
    for name in dict.fromkeys(named):
        flaws[name] = Flaw(name=name, code=name, should=MEANT)
    return flaws


# ── the file


@once
def load_rows(path: Path) -> tuple[TextTask, ...]:
    """The rows of a JSONL file. Raises Refused with file and line at the first fault; ids must be unique."""
    rows: dict[int, TextTask] = {}
    prompts: dict[tuple[str, ...], TextTask] = {}
    for where, record in numbered_lines(path):
        row = _row(record, where)
        if same := rows.get(row.id):
            raise Refused(f"{where}: id {row.id} already used at {same.where}")
        # the same prompt twice would be trained on, and evaluated with
        texts = tuple(message["content"] for message in row.messages)
        if same := prompts.get(texts):
            raise Refused(f"{where}: has the prompt of {same.where}; leave one of them out")
        rows[row.id] = prompts[texts] = row
    if not rows:
        raise Refused(f"{path}: no rows in it")
    return tuple(rows.values())


def _row(record: object, where: str) -> TextTask:
    """One line. Raises Refused for what is wrong with it."""
    if not isinstance(record, dict):
        raise Refused(f"{where}: not a JSON object")
    number, flaw, split = record.get("id"), record.get("flaw", FLAW), record.get("split")
    if type(number) is not int or number < 0:
        got = repr(number) if "id" in record else "none: number the rows"
        raise Refused(f"{where}: 'id' should be a whole number, got {got}")
    if not isinstance(flaw, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", flaw):
        raise Refused(
            f"{where}: 'flaw' should be a name of small letters, digits and _, got {flaw!r}"
        )
    if split is not None and split not in SPLITS:
        raise Refused(f"{where}: unknown split {split!r}; one of {', '.join(SPLITS)}")
    try:
        messages = messages_of(record)
    except ValueError as e:
        raise Refused(f"{where}: {e}") from None
    if any(has_lone_surrogate(message["content"]) for message in messages):
        raise Refused(f"{where}: its prompt holds half a character (a lone surrogate)")
    if not messages[-1]["content"].strip():
        raise Refused(f"{where}: its prompt is empty")
    columns = {name: value for name, value in record.items() if name not in OWN}
    for name in RESERVED & columns.keys():
        raise Refused(
            f"{where}: a column may not be called {name}, which the functions get already"
        )
    if not isinstance(columns.get("answer", ""), str):
        raise Refused(f"{where}: 'answer' should be text, a right answer")
    for name, value in columns.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"{where}: {name!r} is {value}, no number")
    return TextTask(number, messages, flaw, split, columns, where, tuple(record))
