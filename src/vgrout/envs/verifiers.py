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
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from vgrout.config.run import Config
from vgrout.envs.base import SHARES, SPLITS, messages_of
from vgrout.envs.text import (
    FLAW,
    OWN,
    RESERVED,
    Ask,
    NamedReward,
    Proxied,
    Proxy,
    Reference,
    TextEnvironment,
    TextTask,
    own_function,
    require_columns,
)
from vgrout.ground.io import Refused, cannot_import, refuse, text_sha256
from vgrout.ground.scoring import (
    LARGEST,
    TIMEOUT,
    Awaiter,
    RewardFailed,
    Scorer,
    in_one_line,
    rounded_to,
    search_here,
)

# Hooks of a task that prepare or read a sandbox, which there is none of here.
OF_A_SANDBOX = ("setup", "finalize", "stage_verifier")


def package() -> ModuleType:
    """`verifiers.v1`. Raises Refused, one line, where it is not installed, too old, or broken."""
    try:
        import verifiers.v1 as vf
    except ImportError as e:
        old = "verifiers is older than 0.4, without tasksets: `uv sync --inexact --extra verifiers`"
        refuse(e.name == "verifiers.v1", old)
        raise cannot_import("verifiers", e) from None
    return vf


class Rubric(Proxy, Scorer[Proxied]):
    """What a taskset's rewards say of an answer, together."""

    flag = "--env"

    def __init__(self, cfg: Config, file: Path, tasks: Sequence[Any]) -> None:
        """tasks: verifiers' own, by the numbers of our tasks."""
        super().__init__({}, cfg.env.reward_passes_at)
        self.name = cfg.env.env
        self.several = True
        self.file, self.tasks = file, tasks
        # the reward of the task's own that is the reference; "": a function of a user's own is
        self.reference = "" if ":" in cfg.env.reference else cfg.env.reference
        # of the taskset's file and settings
        settings = json.dumps(cfg.env.taskset_args, sort_keys=True)
        self.sha256 = hashlib.sha256(file.read_bytes() + settings.encode()).hexdigest()
        self._awaiter = Awaiter()

    @property
    def where(self) -> str:
        return self.file.name

    def of_answers(self, ask: Ask) -> list[Proxied | RewardFailed]:
        return ask(self)

    def called(self, task: TextTask, answers: Sequence[str]) -> list[Proxied]:
        (answer,) = answers
        of_package = self.tasks[task.id]
        trace = trace_of(of_package, answer)
        seconds = of_package.data.timeout.scoring or TIMEOUT
        self._awaiter.result(of_package.score(trace), seconds)
        scores: dict[str, float] = {}
        weighted: list[float] = []
        for name, reward in trace.rewards.items():
            if reward is None:
                raise RewardFailed(f"gave no score {name!r}")
            if not abs(reward.value) <= LARGEST or not math.isfinite(reward.score):
                raise RewardFailed(f"returned {name} = {reward.score!r}, not a finite number")
            scores[name] = reward.score
            weighted.append(reward.score * reward.weight)
        if not scores:
            raise RewardFailed("gave no score at all")
        if self.reference and self.reference not in scores:
            there = ", ".join(scores)
            raise RewardFailed(f"has no reward {self.reference!r} for --reference; it has {there}")
        total = rounded_to(math.fsum(weighted), (self.passes_at, 0.0, 1.0))
        return [Proxied(total, scores, rounded_to(scores.get(self.reference, 0.0), (0.0, 1.0)))]

    def described(self) -> str:
        return f"{', '.join(reward_names(self.tasks[0]))} of {self.file}"


class VerifiersEnvironment(TextEnvironment):
    """The tasks of a taskset as rows of text. Of tasks with the same prompt the first is taken."""

    name = "verifiers"

    def __init__(self, cfg: Config, rows: Sequence[TextTask], rubric: Rubric) -> None:
        super().__init__(cfg, rows, functions=(rubric, _reference(cfg, rows, rubric)))
        self.rubric = rubric

    @classmethod
    def of_run(cls, cfg: Config) -> "VerifiersEnvironment":
        """The environment of a run. Raises Refused, one line."""
        vf = package()
        tasks = load_tasks(vf, cfg)
        file = Path(str(vf.import_taskset(cfg.env.taskset).__file__))
        rows: dict[tuple[str, ...], TextTask] = {}
        for number, task in enumerate(tasks):
            where = f"--env {cfg.env.env}, task {number}"
            require_one_turn(vf, task, where)
            row = row_of(vf, task, number, where)
            # the same prompt twice would be trained on, and evaluated with
            rows.setdefault(tuple(message["content"] for message in row.messages), row)
        return cls(cfg, [*rows.values()], Rubric(cfg, file, tasks))

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
            "problems": text_sha256(content),
            "test_problems": None,
            "reward": self.rubric.sha256,
            "reference": self.reference.sha256,
        }

    def rows_line(self) -> str:
        twice = len(self.rubric.tasks) - len(self.rows)
        left_out = f", {twice} left out, whose prompts are there already" if twice else ""
        return f"{len(self.rows)} tasks of {self.source}{left_out}"


def _reference(cfg: Config, rows: Sequence[TextTask], rubric: Rubric) -> Reference:
    """What says whether an answer is right. Raises Refused, one line, where nothing is named."""
    named = cfg.env.reference
    if ":" in named:
        own = own_function(named, "--reference")
        require_columns(own, rows)
        return own
    names = ", ".join(reward_names(rubric.tasks[0]))
    refuse(
        not named,
        f"{rubric.flag} {rubric.name}: needs a reference, which says what is right; give --reference NAME, one of its "
        f"rewards ({names}), or --reference module:function",
    )
    return NamedReward(named, rubric.sha256)


# ── the package's taskset


def load_tasks(vf: ModuleType, cfg: Config) -> list[Any]:
    """All tasks; of an endless taskset as many as leave --n-problems to train on. Raises Refused, one line."""
    name, flag = cfg.env.taskset, f"--env {cfg.env.env}"
    search_here()
    try:
        kind = vf.taskset_config_type(name)
        environment = vf.environment_class(name)
        try:
            settings = kind.model_validate({**cfg.env.taskset_args, "id": name})
        except ValueError as e:  # pydantic's
            raise Refused(f"--env-args {cfg.env.env_args}: {in_one_line(e)}") from None
        taskset = vf.load_taskset(settings)
        tools = taskset.toolsets(settings)
        most = None if taskset.bounded else math.ceil(cfg.scale.n_problems / SHARES["train"])
        tasks = list(islice(taskset, most))
    except Refused:
        raise
    except (Exception, SystemExit) as e:  # a module of a user's own may raise anything
        raise Refused(f"{flag}: cannot be loaded ({in_one_line(e)})") from e
    refuse(
        environment is not vf.SingleAgentEnv,
        f"{flag}: has an environment of its own ({environment.__name__}), of several turns or agents; only single "
        "prompts with one answer can be trained on",
    )
    refuse(bool(tools), f"{flag}: gives the model tools, which there are none of here")
    refuse(not tasks, f"{flag}: has no tasks")
    return tasks


def reward_names(task: Any) -> list[str]:
    """The task's own rewards, then its judges."""
    rewards = [hook.__name__ for hook in task.hooks("reward")]
    return rewards + [judge.reward_name for judge in task.plugged_judges()]


def require_one_turn(vf: ModuleType, task: Any, where: str) -> None:
    """Raises Refused, one line, for a task that a single prompt and one answer are not enough for."""
    kind = type(task)
    needs: list[str] = []
    if kind.toolsets(task.config):
        needs.append("tools")
    if stops := [hook.__name__ for hook in task.hooks("stop")]:
        needs.append(f"several turns ({', '.join(stops)} ends them)")
    sandbox = [name for name in OF_A_SANDBOX if getattr(kind, name) is not getattr(vf.Task, name)]
    if task.NEEDS_CONTAINER or task.data.image:
        sandbox.append("a container")
    sandbox += [
        f"reward {hook.__name__}" for hook in task.hooks("reward") if asks_for_runtime(hook)
    ]
    if sandbox:
        needs.append(f"a sandbox ({', '.join(sandbox)})")
    refuse(
        bool(needs),
        f"{where}: needs {' and '.join(needs)}; only single prompts with one answer can be trained on",
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
    try:
        messages = messages_of({"messages": prompt_of(data)})
    except ValueError as e:
        raise Refused(f"{where}: {e}; only text can be read") from None
    return TextTask(number, messages, FLAW, split if split in SPLITS else None, columns, where)


def prompt_of(data: Any) -> list[dict[str, object]]:
    """The prompt of a task, its system prompt first."""
    messages: list[dict[str, object]] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [{"role": m.role, "content": m.content} for m in data.prompt or ()]
    return messages


def trace_of(task: Any, answer: str) -> Any:
    """The trace of one prompt and its answer, as the package's rewards read it."""
    vf = package()
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    nodes: list[object] = []
    for message in prompt_of(task.data):
        made = kinds[str(message["role"])](content=message["content"])
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
