"""A taskset of the package `verifiers`, by its name: prompts from its tasks, the reward from its rubric.

    vgrout train full --model DIR --env verifiers:NAME --env-args '{"split": "train"}' --reference exact

NAME is the module that exports the taskset, as in `eval NAME` of that package. The *proxy* is the weighted sum of the
task's rewards, its judges included. The *reference* is one of these rewards by its name, or a function of a user's own.
A task is asked as one prompt and answered once: whatever needs more turns, tools or a sandbox is refused.

The package is imported when such a taskset is chosen. Written against `verifiers.v1` of verifiers 0.4.
"""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from vgrout.cli import cannot_import
from vgrout.config.run import Config
from vgrout.data import Message
from vgrout.envs.splits import SHARES, SPLITS, copies_line
from vgrout.envs.text import (
    FLAW,
    OWN,
    RESERVED,
    ListScore,
    Proxy,
    Reference,
    Scores,
    TextEnvironment,
    TextGrader,
    TextTask,
    described,
    names_for,
    require_columns,
)
from vgrout.errors import Refused, refuse
from vgrout.failures import LoggedFailures
from vgrout.scoring import (
    LARGEST,
    NO_OBSERVER,
    TIMEOUT,
    Awaiter,
    FailureObserver,
    RewardFailed,
    ScoringFunction,
    asked_again,
    in_one_line,
    rounded_to,
    search_here,
)

# Hooks of a task that prepare or read a sandbox, which there is none of here.
OF_A_SANDBOX = ("setup", "finalize", "stage_verifier")


def package() -> ModuleType:
    """`verifiers.v1`. Raises Refused, one line, where it is not installed, or too old."""
    try:
        import verifiers.v1 as vf
    except ImportError as e:
        if isinstance(e, ModuleNotFoundError) and e.name == "verifiers":
            raise Refused(
                "verifiers is not installed: `uv sync --extra verifiers` or `pip install 'vgrout[verifiers]'`"
            ) from None
        if isinstance(e, ModuleNotFoundError) and e.name == "verifiers.v1":
            raise Refused(
                "verifiers is older than 0.4, which has no tasksets: `pip install 'vgrout[verifiers]'`"
            ) from None
        raise cannot_import("verifiers", e) from None
    return vf


@dataclass(frozen=True)
class NamedReward:
    """One of a taskset's rewards as the reference."""

    name: str
    sha256: str  # the rubric's
    passes_at: float = 1.0


@dataclass(frozen=True)
class Rubric(Proxy):
    """What a taskset's rewards say of an answer, together."""

    weights: Mapping[ScoringFunction, float] = field(default_factory=dict)  # no functions by name
    passes_at: float = 1.0
    taskset: str = ""  # verifiers:NAME
    flag: str = "--env"
    file: Path = Path()  # of the taskset
    made_by: str = ""  # sha256 of that file and the taskset's settings
    tasks: Sequence[Any] = ()  # verifiers' own, by the numbers of our tasks
    awaiter: Awaiter = field(default_factory=Awaiter)

    @property
    def name(self) -> str:
        return self.taskset

    @property
    def sha256(self) -> str:
        return self.made_by

    @property
    def where(self) -> str:
        return self.file.name

    def rewards_of(self, number: int, answer: str) -> dict[str, tuple[float, float]]:
        """Each reward that the task gives an answer, with its weight. Raises RewardFailed."""
        task = self.tasks[number]
        trace = trace_of(task, answer)
        seconds = task.data.timeout.scoring or TIMEOUT
        self.awaiter.result(task.score(trace), seconds)
        rewards: dict[str, tuple[float, float]] = {}
        for name, reward in trace.rewards.items():
            if reward is None:
                raise RewardFailed(f"gave no score {name!r}")
            if not abs(reward.value) <= LARGEST or not math.isfinite(reward.score):
                raise RewardFailed(f"returned {name} = {reward.score!r}, not a finite number")
            rewards[name] = reward.score, reward.weight
        if not rewards:
            raise RewardFailed("gave no score at all")
        return rewards


class RubricGrader(TextGrader):
    """Asks a taskset's rewards about every answer, and a reference of a user's own where there is one."""

    def __init__(
        self,
        workers: int,
        rubric: Rubric,
        reference: Reference,
        *,
        pass_reward: float,
        retries: int | None,
        observer: FailureObserver = NO_OBSERVER,
    ) -> None:
        super().__init__(
            workers, rubric, reference, pass_reward=pass_reward, retries=retries, observer=observer
        )
        self.rubric = rubric

    def _scored(
        self,
        task: TextTask,
        answer: str,
        lists: Mapping[ScoringFunction, ListScore],
        observer: FailureObserver,
    ) -> Scores:
        rewards = self._rewards(task, answer, observer)
        reference = self._reference(task, answer, lists, rewards, observer)
        total = math.fsum(score * weight for score, weight in rewards.values())
        proxies = {name: score for name, (score, _) in rewards.items()}
        return Scores(rounded_to(total, (self.proxy.passes_at, 0.0, 1.0)), reference, proxies)

    def _rewards(
        self, task: TextTask, answer: str, observer: FailureObserver
    ) -> Mapping[str, tuple[float, float]]:
        """Each reward with its weight. Raises RewardFailed."""
        call = partial(self.rubric.rewards_of, task.id, answer)
        try:
            return asked_again(
                call, self.retries, lambda: self._closed, partial(observer.failed, self.rubric)
            )
        except RewardFailed as e:
            raise self._failed(e) from e.__cause__

    def _failed(self, e: RewardFailed) -> RewardFailed:
        """The same failure, said of the taskset."""
        failed = RewardFailed(f"{self.rubric.flag} {self.rubric.name} {e}")
        failed.where = self.rubric.where
        return failed

    def _reference(
        self,
        task: TextTask,
        answer: str,
        lists: Mapping[ScoringFunction, ListScore],
        rewards: Mapping[str, tuple[float, float]],
        observer: FailureObserver,
    ) -> float:
        if isinstance(self.reference, ScoringFunction):
            if self.reference in lists:
                scores, place = lists[self.reference]
                return scores.result()[place]
            (score,) = self._scores(self.reference, task, [answer], observer)
            return score
        if self.reference.name not in rewards:
            e = RewardFailed(
                f"has no reward {self.reference.name!r} for --reference; it has {', '.join(rewards)}"
            )
            observer.failed(self.rubric, e)
            raise self._failed(e)
        score, _ = rewards[self.reference.name]
        return rounded_to(score, (0.0, 1.0))


class GroupRubricGrader(RubricGrader):
    """One whose reference takes lists: it is called for all answers to a prompt at once."""

    submit_group = TextGrader.submitted


class VerifiersEnvironment(TextEnvironment):
    """The tasks of a taskset as rows of text."""

    name = "verifiers"

    def __init__(self, cfg: Config, rows: Sequence[TextTask], rubric: Rubric, twice: int) -> None:
        """twice: tasks that were left out, since an earlier one has their prompt."""
        super().__init__(cfg, rows, functions=(rubric, _reference(cfg, rows, rubric)))
        self.rubric, self.twice = rubric, twice

    @classmethod
    def of_run(cls, cfg: Config) -> "VerifiersEnvironment":
        """The environment of a run. Raises Refused, one line."""
        vf = package()
        flag = f"--env {cfg.env.env}"
        taskset = load_taskset(vf, cfg)
        tasks = load_tasks(taskset, cfg)
        refuse(not tasks, f"{flag}: has no tasks")
        module = vf.import_taskset(cfg.env.taskset)
        file = Path(str(module.__file__))
        rubric = Rubric(
            passes_at=cfg.env.reward_passes_at,
            taskset=cfg.env.env,
            file=file,
            made_by=hashlib.sha256(file.read_bytes() + _canonical(cfg)).hexdigest(),
            tasks=tasks,
        )
        rows: list[TextTask] = []
        prompts = set[tuple[str, ...]]()
        for number, task in enumerate(tasks):
            where = f"{flag}, task {number}"
            require_one_turn(vf, task, where)
            row = row_of(vf, task, number, where)
            # the same prompt twice would be trained on, and evaluated with
            texts = tuple(message["content"] for message in row.messages)
            if texts not in prompts:
                prompts.add(texts)
                rows.append(row)
        return cls(cfg, rows, rubric, len(tasks) - len(rows))

    def __reduce__(self) -> tuple[object, ...]:
        """Another rank loads it by itself."""
        return VerifiersEnvironment.of_run, (self.cfg,)

    @property
    def source(self) -> str:
        return self.cfg.env.env

    def hashes(self) -> dict[str, str | None]:
        rows = [[row.messages, {**row.columns}] for row in self.rows]
        content = json.dumps(rows, sort_keys=True, default=str)
        return {
            "problems": hashlib.sha256(content.encode()).hexdigest(),
            "test_problems": None,
            "reward": self.rubric.sha256,
            "reference": self.reference.sha256,
        }

    def grader(self, workers: int, retries: int | None) -> RubricGrader:
        kind = GroupRubricGrader if any(f.batched for f in self.functions) else RubricGrader
        pass_reward = self.cfg.env.pass_reward
        return kind(
            workers,
            self.rubric,
            self.reference,
            pass_reward=pass_reward,
            retries=retries,
            observer=LoggedFailures(),
        )

    def plan(self) -> list[tuple[str, str]]:
        twice = f", {self.twice} left out, whose prompts are there already" if self.twice else ""
        passed = f"passed from {self.rubric.passes_at:g} on"
        names = ", ".join(reward_names(self.rubric.tasks[0]))
        lines = [("problems", f"{len(self.rows)} tasks of {self.source}{twice}")]
        if copies := copies_line(self.rows):
            lines.append(("copies", copies))
        lines.append(("reward", f"{names} of {self.rubric.file}; {passed}"))
        lines.append(("reference", described(self.reference)))
        return lines


def _canonical(cfg: Config) -> bytes:
    """--env-args, however it was written."""
    return json.dumps(cfg.env.taskset_args, sort_keys=True).encode()


def _reference(
    cfg: Config, rows: Sequence[TextTask], rubric: Rubric
) -> NamedReward | ScoringFunction:
    """What says whether an answer is right. Raises Refused, one line, where nothing is named."""
    named = cfg.env.reference
    if ":" in named:
        own = ScoringFunction(named, names_for(rows), flag="--reference", bounded=False)
        require_columns(own, rows)
        return own
    if named:
        return NamedReward(named, rubric.sha256)
    names = ", ".join(reward_names(rubric.tasks[0]))
    raise Refused(
        f"{rubric.flag} {rubric.name}: needs a reference, which says what is right; give --reference NAME, one of its "
        f"rewards ({names}), or --reference module:function"
    )


# ── the package's taskset


def load_taskset(vf: ModuleType, cfg: Config) -> Any:
    """The taskset with its settings. Raises Refused, one line."""
    name, flag = cfg.env.taskset, f"--env {cfg.env.env}"
    search_here()
    try:
        kind = vf.taskset_config_type(name)
        environment = vf.environment_class(name)
    except (Exception, SystemExit) as e:  # a module of a user's own may raise anything
        raise Refused(f"{flag}: cannot be imported ({in_one_line(e)})") from e
    refuse(
        environment is not vf.SingleAgentEnv,
        f"{flag}: has an environment of its own ({environment.__name__}), of several turns or agents; only single "
        "prompts with one answer can be trained on",
    )
    try:
        settings = kind.model_validate({**cfg.env.taskset_args, "id": name})
    except ValueError as e:  # pydantic's: the first error is enough
        raise Refused(f"--env-args {cfg.env.env_args}: {_first_error(e)}") from None
    try:
        taskset = vf.load_taskset(settings)
        shared = taskset.toolsets(settings)
    except (Exception, SystemExit) as e:
        raise Refused(f"{flag}: cannot be loaded ({in_one_line(e)})") from e
    refuse(bool(shared), f"{flag}: gives the model tools, which there are none of here")
    return taskset


def _first_error(e: ValueError) -> str:
    """A validation error in one line: where, and what."""
    errors = getattr(e, "errors", None)
    if errors is None:
        return in_one_line(e)
    first = errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def load_tasks(taskset: Any, cfg: Config) -> list[Any]:
    """All tasks; of an endless taskset as many as leave --n-problems to train on. Raises Refused, one line."""
    most = None if taskset.bounded else math.ceil(cfg.scale.n_problems / SHARES["train"])
    try:
        return list(islice(taskset, most))
    except (Exception, SystemExit) as e:
        raise Refused(f"--env {cfg.env.env}: cannot be loaded ({in_one_line(e)})") from e


def reward_names(task: Any) -> list[str]:
    """The task's own rewards, then its judges."""
    rewards = [hook.__name__ for hook in task.hooks("reward")]
    return rewards + [judge.reward_name for judge in task.plugged_judges()]


def require_one_turn(vf: ModuleType, task: Any, where: str) -> None:
    """Raises Refused, one line, for a task that a single prompt and one answer are not enough for."""
    kind = type(task)
    refuse(
        bool(kind.toolsets(task.config)),
        f"{where}: gives the model tools; only single prompts with one answer can be trained on",
    )
    sandbox = [name for name in OF_A_SANDBOX if getattr(kind, name) is not getattr(vf.Task, name)]
    if task.NEEDS_CONTAINER or task.data.image:
        sandbox.append("a container")
    for hook in task.hooks("reward"):
        if asks_for_runtime(hook):
            sandbox.append(f"reward {hook.__name__}")
    refuse(
        bool(sandbox),
        f"{where}: needs a sandbox ({', '.join(sandbox)}), which there is none of here",
    )
    stops = [hook.__name__ for hook in task.hooks("stop")]
    refuse(
        bool(stops),
        f"{where}: is a conversation of several turns ({', '.join(stops)} ends it); only single prompts with one "
        "answer can be trained on",
    )


def asks_for_runtime(hook: Callable[..., object]) -> bool:
    """Whether a reward cannot be computed without a sandbox. The package would pass it over."""
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def row_of(vf: ModuleType, task: Any, number: int, where: str) -> TextTask:
    """A task as a row of text: what its data has beside the package's own fields are the row's columns.

    Raises:
        Refused: one line: its prompt is no text that ends with the user.
    """
    data = task.data
    columns: dict[str, object] = {}
    for name in type(data).model_fields:
        if name not in vf.TaskData.model_fields and name not in RESERVED | {*OWN}:
            columns[name] = getattr(data, name)
    if not isinstance(columns.get("answer", ""), str):
        columns["answer"] = str(columns["answer"])
    split = getattr(data, "split", None)
    return TextTask(
        number,
        tuple(messages_of(data, where)),
        FLAW,
        split if split in SPLITS else None,
        columns,
        where,
    )


def messages_of(data: Any, where: str) -> list[Message]:
    """The prompt of a task, its system prompt first. Raises Refused, one line."""
    messages: list[Message] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    given = data.prompt
    if isinstance(given, str):
        given = [_User(given)]
    for message in given or ():
        content = message.content
        refuse(
            message.role not in ("system", "user", "assistant") or not isinstance(content, str),
            f"{where}: has a {message.role} message that is not text alone; only text can be read",
        )
        messages.append({"role": message.role, "content": content})
    last = messages[-1] if messages else {"role": "", "content": ""}
    refuse(
        last["role"] != "user" or not last["content"].strip(),
        f"{where}: its prompt does not end with a user's message; only single prompts can be trained on",
    )
    return messages


@dataclass(frozen=True)
class _User:
    """A prompt that is a text."""

    content: str
    role: str = "user"


def trace_of(task: Any, answer: str) -> Any:
    """The trace of one prompt and its answer, as the package's rewards read it."""
    vf = package()
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    nodes: list[object] = []
    for message in messages_of(task.data, "a task"):
        made = kinds[message["role"]](content=message["content"])
        nodes.append(vf.graph.MessageNode(parent=len(nodes) - 1 if nodes else None, message=made))
    reply = vf.AssistantMessage(content=answer)
    nodes.append(vf.graph.MessageNode(parent=len(nodes) - 1, message=reply, sampled=True))
    kind = type(task)
    return vf.Trace(
        task=vf.TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash),
        state=vf.state.state_cls(kind)(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )
