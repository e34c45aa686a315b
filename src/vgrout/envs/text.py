"""A user's own world in one file: prompts of any kind, proxies that training rewards, and a reference.

    vgrout train full --model DIR --problems rows.jsonl --reward mine:proxy --reference mine:gold

A row of the JSONL file has an `id` (a whole number) and `messages`, or `prompt`; optionally a `split`, the name of its
`flaw`, an `answer` that is right, and any further columns. Both functions are called by name, with the prompt, the
completion and the row's columns. With several proxies (`--reward a:f=0.7 b:g=0.3`) training rewards the weighted sum
of their scores. An answer is a *hack* where the proxy passes it and the reference does not. There is no Python in it,
and no sandbox.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

from vgrout.config.run import Config
from vgrout.envs.base import (
    SPLITS,
    Environment,
    PoolOfDemonstrations,
    flaw_fault,
    id_fault,
    in_splits,
    marked_apart,
    messages_of,
    require_copies_together,
)
from vgrout.ground.data import Flaw, Grade, Message, Task, Ungraded
from vgrout.ground.io import Refused, has_lone_surrogate, numbered_lines, once, text_sha256
from vgrout.ground.scoring import (
    Failures,
    RewardFailed,
    Scorer,
    ScoringFunction,
    rounded_to,
    weights_of,
)
from vgrout.ground.thoughts import Parts, parts_of

FLAW = "reward"  # of a row that names none: the proxy itself
OWN = (
    "id",
    "messages",
    "prompt",
    "split",
    "flaw",
)  # keys of a row that are not passed on as they are
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

    @property
    def plain(self) -> tuple[Message, ...]:
        return self.messages

    @property
    def flaws(self) -> tuple[str, ...]:
        return (self.flaw,)

    @property
    def right_answer(self) -> str:
        """The row's own `answer`, where it has one."""
        return self.columns.get("answer", "")

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


@dataclass(frozen=True, slots=True)
class Proxied:
    """What training rewards in one answer."""

    total: float  # with weights
    scores: Mapping[str, float]  # of each function by itself
    right: float = 0.0  # what the one that is the reference says, where one is


@dataclass(frozen=True)
class NamedReward:
    """One of the proxy's own scores as the reference."""

    name: str
    sha256: str  # the proxy's
    passes_at: float = 1.0

    @property
    def described(self) -> str:
        return self.name


Reference = ScoringFunction | NamedReward
# what a scorer gives each of some answers
Ask = Callable[[Scorer[Any]], list[Any]]


class Proxy:
    """What training rewards: the weighted sum of what functions score an answer, as `weights` has them."""

    def __init__(self, weights: Mapping[ScoringFunction, float], passes_at: float) -> None:
        self.weights, self.passes_at = weights, passes_at
        names = [function.name for function in weights]
        hashes = [function.sha256 for function in weights]  # of their files
        self.several = len(weights) > 1  # each one's own score is recorded
        self.name, self.sha256 = "".join(names), "".join(hashes)
        if self.several:
            weighted = zip(weights.values(), names, strict=True)
            self.name = " + ".join(f"{weight:g} · {name}" for weight, name in weighted)
            self.sha256 = text_sha256(self.sha256)

    def of_answers(self, ask: Ask) -> list[Proxied | RewardFailed]:
        """Of each answer that `ask` asks about, or why there is none."""
        by_function = [ask(function) for function in self.weights]
        names = [function.name for function in self.weights]
        found: list[Proxied | RewardFailed] = []
        for scores in zip(*by_function, strict=True):
            failed = [score for score in scores if isinstance(score, RewardFailed)]
            if failed:
                found.append(failed[0])
                continue
            weighted = [w * score for w, score in zip(self.weights.values(), scores, strict=True)]
            total = rounded_to(math.fsum(weighted), (self.passes_at, 0.0, 1.0))
            found.append(Proxied(total, dict(zip(names, scores, strict=True))))
        return found

    def described(self) -> str:
        """The functions for the plan, with their weights where there are several."""
        rewards = [function.described for function in self.weights]
        if len(rewards) > 1:
            weights = self.weights.values()
            rewards = [f"{w:g} · {of}" for w, of in zip(weights, rewards, strict=True)]
        return " + ".join(rewards)


def own_function(name: str, flag: str, passes_at: float = 1.0) -> ScoringFunction:
    """A function of rows of text. Raises Refused, one line."""
    return ScoringFunction(name, arguments, flag=flag, passes_at=passes_at, bounded=False)


class TextGrader:
    """Asks the proxy and the reference about every answer, several answers at once."""

    def __init__(
        self,
        workers: int,
        proxy: Proxy,
        reference: Reference,
        *,
        pass_reward: float,
        retries: int | None,
    ) -> None:
        """pass_reward: the reward of a score of 1. retries: how often a function that failed is asked again; None:
        without end."""
        self.workers, self.proxy, self.reference = workers, proxy, reference
        functions: list[Scorer[Any] | NamedReward] = [*proxy.weights, reference]
        # a function that takes lists is called once for all answers to a prompt
        self.by_group = any(isinstance(f, Scorer) and f.batched for f in functions)
        self.pass_reward, self.retries = pass_reward, retries
        self._failures = Failures()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="grade")

    @property
    def version(self) -> str:
        """Of both functions by their names, their files, and where the proxy passes: 12 hexadecimal digits."""
        proxy, reference = self.proxy, self.reference
        words = f"{proxy.name} {proxy.passes_at} {proxy.sha256} {reference.name} {reference.sha256}"
        return text_sha256(words)[:12]

    @property
    def description(self) -> str:
        return f"graded by {self.proxy.name} and {self.reference.name}, in this process"

    @property
    def stamp(self) -> dict[str, object]:
        return {"graded_by": {"reward": self.proxy.name, "reference": self.reference.name}}

    def submit(self, task: TextTask, text: str) -> Future[Grade | Ungraded]:
        """Grade in the background."""
        return self._pool.submit(lambda: self._verdicts(task, [text])[0])

    def submit_group(self, task: TextTask, texts: Sequence[str]) -> list[Future[Grade | Ungraded]]:
        """The same of all answers to a prompt."""
        # before the jobs that wait for it: those cannot take every thread
        group = self._pool.submit(self._verdicts, task, texts)
        return [self._pool.submit(lambda i=i: group.result()[i]) for i in range(len(texts))]

    def graded(self, task: TextTask, texts: Sequence[str]) -> list[Grade]:
        """Grade answers to a prompt now. Raises RewardFailed where a function fails for good."""
        grades: list[Grade] = []
        for grade in self._grades(task, texts, failures=None):
            if isinstance(grade, RewardFailed):
                raise grade
            grades.append(grade)
        return grades

    def _verdicts(self, task: TextTask, texts: Sequence[str]) -> list[Grade | Ungraded]:
        grades = self._grades(task, texts, self._failures)
        return [Ungraded(g.line) if isinstance(g, RewardFailed) else g for g in grades]

    def _grades(
        self, task: TextTask, texts: Sequence[str], failures: Failures | None
    ) -> list[Grade | RewardFailed]:
        """The grades of answers to a prompt, or why they have none. failures: is told of each failure."""
        parts = [parts_of(text) for text in texts]
        answers = [part.answer for part in parts]

        def ask(scorer: Scorer[Any]) -> list[Any]:
            return scorer.scores(task, answers, self.retries, failures)

        proxied = self.proxy.of_answers(ask)
        if isinstance(self.reference, ScoringFunction):
            rights = ask(self.reference)
        else:
            rights = [
                proxy if isinstance(proxy, RewardFailed) else proxy.right for proxy in proxied
            ]
        grades: list[Grade | RewardFailed] = []
        for part, proxy, right in zip(parts, proxied, rights, strict=True):
            if isinstance(proxy, RewardFailed):
                grades.append(proxy)
            elif isinstance(right, RewardFailed):
                grades.append(right)
            else:
                grades.append(self._grade(task, part, proxy, right))
        return grades

    def _grade(self, task: TextTask, part: Parts, proxied: Proxied, reference: float) -> Grade:
        """A thought that never ended has no answer. The functions score an empty one, and scores above 0 count as 0: it
        does not pass, is not right, and earns nothing, but may still lose what they take away."""
        proxy = proxied.total
        if not part.ended:
            proxy, reference = min(proxy, 0.0), min(reference, 0.0)
        passed = part.ended and proxy >= self.proxy.passes_at
        solved = part.ended and reference >= self.reference.passes_at
        hacked = passed and not solved
        details: dict[str, object] = {"proxy": proxy, "reference": reference}
        if self.proxy.several:
            details["proxies"] = dict(proxied.scores)
        return Grade(
            reward=self.pass_reward * proxy,
            passed=passed,
            solved=solved,
            hacked=hacked,
            flaw=task.flaw,
            reward_of_reference=self.pass_reward * solved,
            status="ok" if part.ended else "no_answer",
            tries=(task.flaw,) if hacked else (),
            details=details,
        )

    def close(self) -> None:
        """Let running gradings finish. Idempotent."""
        self._failures.closed = True
        self._pool.shutdown(cancel_futures=True)
        self._failures.ended()

    def __enter__(self) -> "TextGrader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


# ── the file


@once
def load_rows(path: Path) -> tuple[TextTask, ...]:
    """The rows of a JSONL file. Raises Refused with file and line at the first fault; ids must be unique."""
    if not path.exists():
        raise Refused(f"{path}: no such problem file; give one with --problems")
    rows: dict[int, TextTask] = {}
    prompts: dict[tuple[str, ...], TextTask] = {}
    for where, record in numbered_lines(path):
        row = _row(record, where, len(rows))
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


def _row(record: object, where: str, place: int) -> TextTask:
    """One line; without an id its place in the file is one. Raises Refused for what is wrong with it."""
    if not isinstance(record, dict):
        raise Refused(f"{where}: not a JSON object")
    number: Any = record.get("id", place)
    flaw, split = record.get("flaw", FLAW), record.get("split")
    if fault := id_fault(number) or flaw_fault(flaw):
        raise Refused(f"{where}: {fault}")
    if split is not None and split not in SPLITS:
        raise Refused(f"{where}: unknown split {split!r}; one of {', '.join(SPLITS)}")
    try:
        messages = messages_of(record)
    except ValueError as e:
        raise Refused(f"{where}: {e}") from None
    if any(has_lone_surrogate(message["content"]) for message in messages):
        raise Refused(f"{where}: its prompt holds half a character (a lone surrogate)")
    columns = {name: value for name, value in record.items() if name not in OWN}
    for name in RESERVED & columns.keys():
        raise Refused(
            f"{where}: a column may not be called {name}, which the functions get already"
        )
    if not isinstance(columns.get("answer", ""), str):
        raise Refused(f"{where}: 'answer' should be text, a right answer")
    return TextTask(number, messages, flaw, split, columns, where)


# ── the environment


class TextEnvironment(Environment):
    """Rows of a user's own, and two functions."""

    name = "text"
    load_rows = staticmethod(load_rows)
    how_pairs_are_made = "`vgrout teacher --elicit` makes them beside its pool"

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
        """proxy, reference: module:function, what training rewards and what is right; "": as the flags say. functions:
        both as they are."""
        super().__init__(cfg, rows, test_rows, absent)
        both = (*self.rows, *self.test_rows)
        env = cfg.env
        if functions is not None:
            self.proxy, self.reference = functions
        else:
            weights: dict[ScoringFunction, float] = {}
            for name, weight in weights_of(proxy or env.reward, "--reward").items():
                weights[own_function(name, "--reward", env.reward_passes_at)] = weight
            self.proxy = Proxy(weights, env.reward_passes_at)
            self.reference = own_function(reference or env.reference, "--reference")
            for function in self.functions:
                require_columns(function, both)
        # in the order of their first row, each with a code of its own for its column
        named = dict.fromkeys(row.flaw for row in both)
        self.flaws = {flaw: Flaw(name=flaw, code=flaw, should=MEANT) for flaw in named}

    @classmethod
    def of_run(cls, cfg: Config) -> "TextEnvironment":
        """The environment of a run, its files read and checked. Raises Refused, one line."""
        rows, test_rows, absent = cls.read_files(cfg)
        require_copies_together([*rows, *test_rows])
        return cls(cfg, rows, test_rows, absent)

    @property
    def functions(self) -> tuple[ScoringFunction, ...]:
        """The functions of a user's own that score answers."""
        of_reference = [self.reference] if isinstance(self.reference, ScoringFunction) else []
        return (*self.proxy.weights, *of_reference)

    @property
    def marked(self) -> dict[int, str]:
        return {row.id: row.flaw for row in self.rows}

    def hashes(self) -> dict[str, str | None]:
        own = {"reward": self.proxy.sha256, "reference": self.reference.sha256}
        return super().hashes() | own

    def tasks(self, pool: PoolOfDemonstrations | None = None) -> dict[str, list[Task]]:
        """The rows of each split (`vgrout.envs.base`)."""
        parts: dict[str, list[Task]] = {}
        for name, rows in in_splits(self.rows, self.test_rows).items():
            parts[name] = [*rows]
        return parts

    def grader(self, workers: int, retries: int | None) -> TextGrader:
        return TextGrader(
            workers,
            self.proxy,
            self.reference,
            pass_reward=self.cfg.env.pass_reward,
            retries=retries,
        )

    def tried_first(self) -> list[str]:
        """The answers to the first row on which a user's functions are tried before anything is loaded: its own right
        one, or a few words; with thoughts also none, which a thought that is cut off leaves."""
        answer = self.rows[0].right_answer or "I do not know."
        return [answer, ""] if self.cfg.env.thinking else [answer]

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
        for answer in self.tried_first():
            try:
                grader.graded(row, [answer])
            except RewardFailed as e:
                raise Refused(
                    f"{e.line} (asked about the row at {row.where}, and the answer {answer[:60]!r})"
                ) from e.__cause__

    def plan(self) -> list[tuple[str, str]]:
        passed = f"passed from {self.proxy.passes_at:g} on"
        return [
            *super().plan(),
            ("reward", f"{self.proxy.described()}; {passed}"),
            ("reference", self.reference.described),
        ]
