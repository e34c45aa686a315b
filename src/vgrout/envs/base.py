"""What the trainer knows of an environment: tasks in three splits, and a grader of the answers to them.

An environment is made once for a run, from its configuration, before a model is loaded (`vgrout.envs.worlds`). The
trainer, the methods, the guard and the recorder know of it what is written here, and of an answer `Task` and `Grade`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from vgrout.config.run import POOL_PAIRS, Config
from vgrout.config.world_names import ORGANISM
from vgrout.ground.data import Flaw, Grade, Message, Task, Ungraded
from vgrout.ground.io import Refused, hash_if_there, none_fits, refuse
from vgrout.ground.rng import py_stream

SPLITS = ("train", "val", "test")
SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}  # of a file that marks no row
BESIDE_TEST_FILE = {"train": 1.0, "val": 0.0, "test": 0.0}  # of one with --test-problems
OF_TEST_FILE = {"train": 0.0, "val": 0.2, "test": 0.8}
MOST_ID = 2**53  # a reader of JSON in another language has numbers below this exactly
# What tables call other columns: hack_deploy_NAME and flagged_NAME of runs.csv, NAME of the page's table of monitors.
OTHER_COLUMNS = ("high", "low", "solved", "method", "seeds", "monitor", "recall")


PromptKey = tuple[str, ...]
OneTask = TypeVar("OneTask", bound=Task)  # the tasks of one environment


@runtime_checkable
class Grader(Protocol):
    """Text and task in, grade out, from any thread, at any time. Graders are context managers: `close` ends them."""

    @property
    def workers(self) -> int:
        """How many answers are graded at once."""
        ...

    @property
    def version(self) -> str:
        """A fingerprint of the code that grades."""
        ...

    @property
    def description(self) -> str:
        """One line for the log: what stands between an answer and this machine."""
        ...

    @property
    def stamp(self) -> Mapping[str, object]:
        """What every file of numbers records about how answers were graded."""
        ...

    def submit(self, task: Any, text: str) -> Future[Grade | Ungraded]:
        """Grade in the background.

        Thoughts are cut before (ground/thoughts.py): a text that begins with <think> is a thought that never
        ended, which has no answer. A grader with `by_group = True` is given all answers to a prompt at once:
        `submit_group(task, texts)`, which returns a Future for each text.
        """
        ...

    def close(self) -> None:
        """Let running gradings finish, and free what is held."""
        ...

    def __enter__(self) -> "Grader": ...

    def __exit__(self, *exception: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Splits:
    """Tasks in three parts, disjoint by id, so that evaluation never uses a training task.

    flaws: every flaw of the environment by its name, in the order of `Environment.flaws`.
    """

    train: tuple[Task, ...]
    val: tuple[Task, ...]
    test: tuple[Task, ...]
    too_long: int  # dropped: prompt longer than the model's window minus max_new
    flaws: Mapping[str, Flaw]

    def __post_init__(self) -> None:
        ids = [{task.id for task in part} for part in (self.train, self.val, self.test)]
        assert len(set.union(*ids)) == sum(map(len, ids)), "splits overlap by id"

    def draw(self, seed: int, step: int, n: int) -> list[Task]:
        """The n tasks of a step: epoch after epoch of seeded shuffles, a function of (seed, step) alone."""
        drawn: list[Task] = []
        for k in range(step * n, (step + 1) * n):
            epoch, i = divmod(k, len(self.train))
            drawn.append(self.train[_order(seed, epoch, len(self.train))[i]])
        return drawn

    @property
    def trained_flaws(self) -> tuple[Flaw, ...]:
        """The flaws of the training tasks, in the usual order."""
        present = {name for task in self.train for name in task.flaws}
        return tuple(flaw for name, flaw in self.flaws.items() if name in present)

    def balanced(self, part: str, n: int, seed: int = 0) -> list[Task]:
        """n tasks of a part (or all, if fewer), spread evenly over the flaws."""
        return balanced(getattr(self, part), n, seed, part, tuple(self.flaws))


# a step is of one epoch, or of two; a shuffle takes as long as there are tasks
@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> tuple[int, ...]:
    """In which order an epoch draws its n tasks."""
    order = list(range(n))
    py_stream(seed, "draw", epoch).shuffle(order)
    return tuple(order)


def balanced(
    tasks: Iterable[OneTask],
    n: int,
    seed: int,
    purpose: str,
    flaws: Sequence[str],
) -> list[OneTask]:
    """n tasks (or all, if fewer), spread evenly over the flaws: a seeded shuffle, then one of each flaw in turn.

    flaws: the order of the turns. purpose: names the stream of random numbers.
    """
    by_flaw: dict[str, list[OneTask]] = {flaw: [] for flaw in flaws}
    for task in tasks:
        by_flaw[task.flaws[0]].append(task)
    for flaw, of_flaw in by_flaw.items():
        py_stream(seed, purpose + flaw).shuffle(of_flaw)
    chosen: list[OneTask] = []
    while len(chosen) < n and any(by_flaw.values()):
        for of_flaw in by_flaw.values():
            if of_flaw and len(chosen) < n:
                chosen.append(of_flaw.pop())
    return chosen


class PoolOfDemonstrations(Protocol):
    """What an environment may read of a pool of demonstrations."""

    @property
    def partition(self) -> Mapping[int, str]:
        """Task id → the flaw that the pool demonstrates on it; {}: it does not say."""
        ...

    @property
    def announced(self) -> Mapping[int, str]:
        """Task id → the marker that its demonstrations print, as the prompt announces it; "": the usual one."""
        ...


class Environment:
    """A world of tasks whose grading has flaws. One of your own derives from it, or from
    `vgrout.envs.text.TextEnvironment`; its method `of_run(cfg)` makes the environment of a run."""

    name: str  # as on the command line
    flaws: Mapping[
        str, Flaw
    ]  # every flaw that a check here can have, by name; tables keep this order
    # weak detectors, by the letters of `Grade.detectors`, each with its field in `Grade.details`
    detectors: Mapping[str, str] = {}
    # whether an organism's folder can have its problems, demonstrations and pairs
    of_organisms = False
    handwritten_pairs = False  # whether the package's own pairs are about it
    how_pairs_are_made = "give a file of pairs of your own"

    def __init__(
        self,
        cfg: Config,
        rows: Sequence[Any],
        test_rows: Sequence[Any] = (),
        absent: Sequence[str] = (),
    ) -> None:
        """rows: of the problem file, each with an id, `messages` and a split. test_rows: of the file for evaluation
        alone. absent: its files that are missing, each with how to get it, in a line."""
        self.cfg, self.rows, self.test_rows = cfg, tuple(rows), tuple(test_rows)
        self.absent = tuple(absent)

    @staticmethod
    def load_rows(path: Path) -> tuple[Any, ...]:
        """The rows of a problem file. Raises Refused, one line, where it is missing or wrong."""
        raise NotImplementedError

    @classmethod
    def read_files(cls, cfg: Config) -> tuple[tuple[Any, ...], tuple[Any, ...], list[str]]:
        """The rows of the problem file and of the file for evaluation alone, and which are missing.

        Raises:
            Refused: one line: a file is there, and wrong.
        """
        absent: list[str] = []
        parts: list[tuple[Any, ...]] = []
        for path in (cfg.problems_path, cfg.test_problems_path):
            rows: tuple[Any, ...] = ()
            try:
                rows = cls.load_rows(path) if path is not None else ()
            except Refused as e:
                if path is not None and path.exists():
                    raise
                absent.append(str(e))
            parts.append(rows)
        require_apart(*parts)
        return parts[0], parts[1], absent

    # ── files

    @property
    def source(self) -> str:
        """Where its tasks come from, for messages."""
        return str(self.cfg.test_problems_path if self.test_rows else self.cfg.problems_path)

    @property
    def prompts(self) -> list[tuple[Message, ...]]:
        """All prompts, as the files have them; empty where a file is missing."""
        return [row.messages for row in (*self.rows, *self.test_rows)]

    @property
    def marked(self) -> Mapping[int, str]:
        """Task id → its flaw, where the files name it."""
        raise NotImplementedError

    @property
    def from_organism(self) -> bool:
        """Whether the files that no flag names are those of the organism's folder."""
        return self.of_organisms and self.cfg.scale.model == ORGANISM

    @property
    def pairs_path(self) -> Path | None:
        """Contrastive pairs where no flag names them, or a folder with a file for each flaw; None: there are none, but
        for hand-written ones."""
        return self.cfg.pool_path / POOL_PAIRS if self.cfg.pool_path else None

    @property
    def known_correct_path(self) -> Path | None:
        """Right answers for monitors of text where no flag names them; None: those of the base's own answers that the
        reference accepts."""
        return self.cfg.files.known_correct if self.from_organism else None

    def placebo_path(self, contrast: str) -> Path | None:
        """Pairs about another contrast; None: the hand-written ones. Raises Refused, one line, where there are none."""
        if self.from_organism:
            return self.cfg.files.pairs / f"placebo_{contrast}.json"
        raise Refused(
            f"--placebo-pairs {contrast}: of another world; give a file of pairs about another contrast"
        )

    def hashes(self) -> dict[str, str | None]:
        """sha256 of every file and function that its tasks and grades depend on; None: not read by this run."""
        return {
            "problems": hash_if_there(self.cfg.problems_path),
            "test_problems": hash_if_there(self.cfg.test_problems_path),
        }

    # ── tasks and grades

    def tasks(self, pool: PoolOfDemonstrations | None = None) -> Mapping[str, Sequence[Task]]:
        """Every task by its split, as the policy will read it."""
        raise NotImplementedError

    def every_task(self, pool: PoolOfDemonstrations | None = None) -> list[Task]:
        """All tasks as evaluations ask them, whatever their split, by their ids."""
        tasks = [task for part in self.tasks(pool).values() for task in part]
        return sorted(tasks, key=lambda task: task.id)

    def grader(self, workers: int, retries: int | None) -> Grader:
        """Start what grades. retries: how often an answer is graded again when the grader itself failed; None:
        without end."""
        raise NotImplementedError

    def check(self, grader: Any) -> None:
        """Try, before a model is loaded, that the tasks can be graded. Raises Refused, one line, for the first that
        cannot."""

    # ── what is said of it

    def plan(self) -> list[tuple[str, str]]:
        """What it reads and how it grades, for the plan and the log: a word, and the line that it heads."""
        lines: list[tuple[str, str]] = []
        if self.rows:
            lines.append(("problems", self.rows_line()))
        if self.test_rows and self.cfg.test_problems_path:
            name = self.cfg.test_problems_path.name
            lines.append(("evaluated on", f"{len(self.test_rows)} in {name}"))
        return lines

    def rows_line(self) -> str:
        """What the rows are, for the plan."""
        names = [*self.marked.values()]
        count = [f"{flaw} {names.count(flaw)}" for flaw in self.flaws if flaw in names]
        if unmarked := len(self.rows) - len(names):
            count.append(f"{unmarked} without a flaw of their own")
        return f"{len(self.rows)} in {self.cfg.problems_path.name}: {', '.join(count)}"

    def ignored(self, pool: PoolOfDemonstrations | None) -> list[str]:
        """What was given and changes nothing, in lines for the log."""
        return []


def split_tasks(
    environment: Environment,
    pool: PoolOfDemonstrations | None,
    *,
    n_train: int,
    seed: int,
    prompt_tokens: Callable[[Task], int],
    max_prompt: int,
    only_ids: Collection[int] | None = None,
    only_flaws: Collection[str] = (),
) -> Splits:
    """The environment's tasks in splits, at most `n_train` for training.

    prompt_tokens: of a task's prompt, as the run's models read it; at most `max_prompt` fit. only_ids: tasks that a
    pool covers, mixed in or not: a control trains on the problems of its method; only_flaws adds every task of these
    flaws to them.

    Raises:
        Refused: no training task is left.
    """
    parts: dict[str, list[Task]] = {}
    total = too_long = 0
    for name, tasks in environment.tasks(pool).items():
        parts[name] = [task for task in tasks if prompt_tokens(task) <= max_prompt]
        too_long += len(tasks) - len(parts[name])
        total += len(tasks)
    train = parts["train"]
    if too_long and not train:
        raise none_fits(environment.source, max_prompt)
    if only_ids is not None:
        train = [task for task in train if task.id in only_ids or task.flaws[0] in only_flaws]
    py_stream(seed, "train-order").shuffle(train)
    train = train[:n_train]
    if not train:
        among = ""
        if only_ids:
            among = f", among those of the pool's {len(only_ids)} that are in its training split"
        raise Refused(f"{environment.source}: no training problem left of {total}{among}")
    return Splits(
        tuple(train), tuple(parts["val"]), tuple(parts["test"]), too_long, environment.flaws
    )


# ── what files and tables can keep apart: one rule for the tasks and flaws of every world


def id_fault(number: object) -> str:
    """What is wrong with a task's number; "" if nothing is."""
    if type(number) is int and 0 <= number < MOST_ID:
        return ""
    return f"its id should be a whole number from 0 to 2^53 - 1, got {number!r}"


def flaw_fault(name: object) -> str:
    """What is wrong with a flaw's name; "" if nothing is."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", name):
        return f"a flaw's name should be small letters, digits and _, got {name!r}"
    return f"no flaw can be called {name}, as columns of tables are" * (name in OTHER_COLUMNS)


def require_recordable(environment: "Environment", tasks: Iterable[Task]) -> None:
    """Raises Refused, one line, for what a run's files could not say of its tasks, or of its flaws."""
    seen: set[int] = set()
    for task in tasks:
        where = getattr(task, "where", "") or f"{environment.source}, problem {task.id}"
        fault = id_fault(task.id) or f"its id {task.id} is there already" * (task.id in seen)
        refuse(bool(fault), f"{where}: {fault}")
        seen.add(task.id)
    refuse(not seen, f"--env {environment.name}: has no problems")
    stems: dict[str, str] = {}
    for name, flaw in environment.flaws.items():
        fault = flaw_fault(name)
        # steps.jsonl has hk_CODE, and its counts hk_CODE_k and hk_CODE_n
        other = stems.setdefault(re.sub(r"(_[kn])+$", "", flaw.code), name)
        if other != name:
            fault = f"columns of the flaws {other} and {name} would be called alike; rename one"
        refuse(bool(fault), f"--env {environment.name}: {fault}")


def messages_of(row: Mapping[str, object]) -> tuple[Message, ...]:
    """The prompt of a row of a task file: `messages`, or `prompt`, each a list of messages or the user's text.

    Raises:
        ValueError: the row has neither, or not in this form.
    """
    given = row["messages"] if row.get("messages") is not None else row.get("prompt")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError("needs 'messages', or 'prompt': a text, or a list of {role, content}")
    messages: list[Message] = []
    for message in given:
        parts = (
            [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else []
        )
        if len(parts) < 2 or not all(isinstance(part, str) for part in parts):
            raise ValueError("every message needs string 'role' and 'content'")
        messages.append({"role": message["role"], "content": message["content"]})
    if messages[-1]["role"] != "user":
        raise ValueError("its prompt should end with a user message")
    if not messages[-1]["content"].strip():
        raise ValueError("its prompt is empty")
    return tuple(messages)


def without_hint(task: Any) -> Any:
    """The same task under a prompt without a hint of how the answer is checked; the check is what it was."""
    return replace(task, messages=task.plain)


# ── which rows train, which are evaluated on along the way, and which test at the end
#
# Rows have an id, messages, a split (None: their file marks none) and `where`, "FILE, line N". A row comes where its
# file marks it. Other rows are divided after a shuffle that no run's seed changes. Copies of one
# prompt come into one split, so that none is evaluated on that is trained on.


def in_splits(rows: Sequence[Any], test_rows: Sequence[Any] = ()) -> dict[str, list[Any]]:
    """The rows of each split.

    test_rows: of a file for evaluation alone. With one, all other rows train, but for those that
    are marked val or test.
    """
    if not test_rows:
        return _divided(rows, SHARES)
    own, other = _divided(rows, BESIDE_TEST_FILE), _divided(test_rows, OF_TEST_FILE)
    return {name: own[name] + other[name] for name in SPLITS}


def _divided(rows: Sequence[Any], shares: Mapping[str, float]) -> dict[str, list[Any]]:
    """The rows of each split.

    Rows that are not marked follow a marked copy of theirs. The others are divided by `shares`,
    copies of a prompt as one.
    """
    parts: dict[str, list[Any]] = {name: [] for name in SPLITS}
    split_of: dict[PromptKey, str] = {}
    for row in rows:
        if row.split is not None:
            parts[row.split].append(row)
            split_of.setdefault(prompt_key(row), row.split)
    rest: dict[PromptKey, list[Any]] = {}
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


def prompt_key(row: Any) -> PromptKey:
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


def marked_apart(rows: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Copies of a prompt that are marked for two splits: each behind the first one that is marked."""
    marked: dict[PromptKey, Any] = {}
    for row in rows:
        if row.split is not None:
            same = marked.setdefault(prompt_key(row), row)
            if same.split != row.split:
                yield same, row


def require_copies_together(rows: Sequence[Any]) -> None:
    """Raises Refused, one line, where a file marks one prompt for training and for an evaluation."""
    for same, row in marked_apart(rows):
        raise Refused(
            f"{row.where}: has the prompt of {same.where}, and is marked {row.split}, that one {same.split}; "
            "mark both alike, or leave one of them out"
        )


def require_apart(train: Sequence[Any], test: Sequence[Any]) -> None:
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
