"""What the programs that make pools share: flags, rates, a record of a pool, the folder of its logs."""

import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tyro
from loguru import logger

from vgrout.config import checks
from vgrout.config.run import Config
from vgrout.config.settings import BENCHMARK_TRAIN, EnvConfig, Sampling, ScaleConfig
from vgrout.config.world_names import CODE_FLAWS, ORGANISM
from vgrout.envs.base import Environment, Grader, balanced
from vgrout.envs.worlds import whole_environment
from vgrout.ground import embedded
from vgrout.ground.data import Graded, Task
from vgrout.ground.io import (
    Refused,
    file_sha256,
    hold,
    make_folder,
    read_json,
    refuse,
    require_new,
    require_own,
    to_json,
    write_atomic,
)
from vgrout.ground.machine import cores
from vgrout.ground.metrics import Rate, rate_text
from vgrout.model.load.source import (
    require_fitting,
    require_model,
    require_thinking,
    safetensors_head,
)

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag never waits for it
    from vgrout.model.policy import LanguageModel

MODEL_NAME = "vgrout.organism"  # the embedded model, in pool.json
Settings = TypeVar("Settings")
T = TypeVar("T", bound=Task)


# ── rates

GOES_ON = "interrupted; the same command goes on from here"  # how a pool under way ends


def by_mode(answers: Iterable[Graded]) -> dict[str, list[Graded]]:
    """The answers to problems of each mode that occurs, in the modes' order."""
    found: dict[str, list[Graded]] = {mode: [] for mode in CODE_FLAWS}
    for answer in answers:
        found[answer.problem.flaws[0]].append(answer)
    return {mode: of_mode for mode, of_mode in found.items() if of_mode}


def rates_of(groups: Mapping[str, Sequence[Graded]]) -> list[dict[str, str]]:
    """A row for each group of answers: how many are rewarded, right, hacks, and end."""
    rows: list[dict[str, str]] = []
    for name, answers in groups.items():
        rows.append(
            {
                "answers": name,
                "rewarded": rate_text(Rate.of(a.grade.passed for a in answers)),
                "right": rate_text(Rate.of(a.grade.solved for a in answers)),
                "hack": rate_text(Rate.of(a.grade.hacked for a in answers)),
                "ended": rate_text(Rate.of(a.whole for a in answers)),
            }
        )
    return rows


def record(lm: "LanguageModel", answer: Graded) -> dict[str, object]:
    """An answer as a line of a pool, stored under its problem's prompt as `lm` reads it.

    `completion` is all that was sampled; it begins with `thought`, where there is one. Without log-probs: those of an
    elicited answer belong to another prompt.
    """
    messages = answer.problem.messages
    prompt_ids = lm.render(messages)
    grade = answer.grade
    thought = {"thought": answer.thought.text} if answer.thought.text else {}
    return {
        "problem_id": answer.problem.id,
        "env_mode": answer.problem.flaws[0],
        "reward": grade.reward,
        "hacked": grade.hacked,
        "gt_pass": grade.solved,
        "fmt_ok": grade.details.get("format_ok", True),
        "plen": len(prompt_ids),
        "prompt_ids": list(prompt_ids),
        "completion_ids": list(answer.ids),
        "prompt": lm.prompt_text(messages),
        "completion": answer.text,
        **thought,
    }


# ── command lines


@dataclass(frozen=True)
class PoolSettings:
    """Flags of every program that makes a pool."""

    out: Path = Path("out/pools/teacher")
    """Folder to make; what is under way lies beside it in OUT.partial, and the same command goes on from there."""
    model: str = "Qwen/Qwen3-4B"
    """A local model folder, a downloaded hub id, or 'organism' (embedded)."""
    adapter: Path | None = None
    """A saved adapter of that model (.safetensors, or a run directory: its train.safetensors); none: the bare model."""
    problems: str = ""
    """Problem file (JSONL), or 'organism'; none: the benchmark's file, the organism's for the organism. Only its
    training split is used."""
    n_problems: int = checks.setting(60, low=1)
    """Problems, at most, spread evenly over the flaws."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = field(default_factory=Sampling)
    max_new: int | None = checks.setting(None, low=1)
    """Longest answer, in tokens; none: 1024, the organism's 128."""
    thinking: bool = False
    """The chat template is told that a thought comes before each answer, as by `vgrout train --thinking`."""
    seed: int = checks.setting(0, low=0)
    """Of the answers; which problems are taken does not depend on it."""
    compile_reward: float | None = checks.setting(None, low=0, high=1e6)
    """Reward for code that compiles; none: 0.5, the organism's 0.1."""
    pass_reward: float | None = checks.setting(None, above=0, high=1e6)
    """Reward for passing the flawed check; none: 3, the organism's 1."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        checks.check(self)

    @property
    def world(self) -> dict[str, Any]:
        """Settings of the problems' world that only some programs have."""
        return {}

    @cached_property
    def cfg(self) -> Config:
        """The trainer's configuration with the same model, problems and rewards."""
        tiny = self.model == ORGANISM
        compiles = embedded.COMPILE_REWARD if tiny else 0.5
        passes = embedded.PASS_REWARD if tiny else 3.0
        return Config(
            env=EnvConfig(
                compile_reward=compiles if self.compile_reward is None else self.compile_reward,
                pass_reward=passes if self.pass_reward is None else self.pass_reward,
                allow_weak_sandbox=self.allow_weak_sandbox,
                thinking=self.thinking,
                **self.world,
            ),
            scale=ScaleConfig(
                model=self.model,
                problems=self.problems or (ORGANISM if tiny else BENCHMARK_TRAIN),
                test_problems="",
                max_new=self.max_new or (embedded.MAX_NEW if tiny else 1024),
            ),
        )

    @property
    def tokens(self) -> int:
        """The longest answer."""
        return self.cfg.scale.max_new

    @property
    def adapter_path(self) -> Path | None:
        """The adapter's file."""
        if self.adapter is None:
            return None
        return self.adapter / "train.safetensors" if self.adapter.is_dir() else self.adapter

    def environment(self, **own: Any) -> Environment:
        """The world of the problems, its files read and checked. own: settings of it in place of these.

        Raises:
            Refused: one line: a file or a setting is wrong.
        """
        return whole_environment(replace(self.cfg, env=replace(self.cfg.env, **own)))

    def chosen(self, environment: Environment, purpose: str = "teacher") -> list[Any]:
        """The training tasks that are asked, in their order. Raises Refused, one line, where none trains."""
        tasks = environment.tasks()["train"]
        refuse(
            not tasks,
            f'{environment.source}: no training problems in it; mark some with "split": "train"',
        )
        return spread(tasks, self.n_problems, purpose, tuple(environment.flaws))

    def require_model(self, tasks: Iterable[Task], source: str) -> None:
        """Check the model and its adapter without loading them.

        Raises:
            Refused: one line: one is not there, the model does not think, or no task's prompt fits it. source: where
                the prompts come from.
        """
        if self.model == ORGANISM:
            embedded.EMBEDDED.require_sound("--model organism:")
        if self.adapter_path is not None:
            safetensors_head(self.adapter_path, "--adapter")
        model = require_model(self.cfg.model_path)
        if self.thinking:
            require_thinking(model)
        require_fitting([task.messages for task in tasks], model, self.tokens, source)

    def identity(self) -> dict[str, object]:
        """Settings and files that the answers depend on."""
        return {
            "model": self.model,
            "adapter": file_sha256(self.adapter_path) if self.adapter_path else None,
            "problems": None if self.cfg.env.taskset else file_sha256(self.cfg.problems_path),
            "n_problems": self.n_problems,
            "max_new": self.tokens,
            "sampling": asdict(self.sampling),
            "seed": self.seed,
            "rewards": [self.cfg.env.compile_reward, self.cfg.env.pass_reward],
            **({"thinking": True} if self.thinking else {}),
        }

    @contextlib.contextmanager
    def making(
        self, environment: Environment, identity: Mapping[str, object]
    ) -> Generator[tuple["LanguageModel", Grader, Path]]:
        """The model with its adapter, a grader that was tried, and the folder of the logs.

        Raises:
            Refused: one line: a task cannot be graded; or as in `work_folder`.
        """
        workers = cores() if self.cfg.of_code else 1
        with environment.grader(workers, 3) as grader:
            environment.check(grader)
            with work_folder(self.out, {**identity, "grader": grader.version}) as folder:
                logger.info(grader.description)
                yield self.load(), grader, folder

    def load(self) -> "LanguageModel":
        """The model with its adapter."""
        from vgrout.model.load.load import (  # imports torch
            load_language_model,
            load_policy,
            pick_device,
        )

        model = self.cfg.model_path
        device, dtype = pick_device(model, "auto")
        if self.adapter_path is None:
            lm = load_language_model(model, device=device, dtype=dtype)
            return replace(lm, thinking=self.thinking)
        policy = load_policy(model, device=device, dtype=dtype)
        policy.adapter.load(self.adapter_path)
        return replace(policy, thinking=self.thinking)

    def answers(
        self,
        lm: "LanguageModel",
        grader: Grader,
        problems: Sequence[Task],
        n: int,
        *,
        purpose: str,
        log: Path,
    ) -> list[Graded]:
        """n graded answers to each problem, sampled as these settings say.

        purpose, log: as for `generate_graded`.
        """
        from vgrout.loop.generation import generate_graded  # imports torch

        settings = {"sampling": self.sampling, "max_new": self.tokens, "seed": self.seed}
        return generate_graded(
            lm, grader, problems, n, **settings, purpose=purpose, log=log, label=log.stem
        )

    def elicited(
        self,
        lm: "LanguageModel",
        grader: Grader,
        problems: Sequence[T],
        instructed: Callable[[T], T],
        tries: tuple[int, int],
        purposes: tuple[str, str],
        logs: tuple[Path, Path],
    ) -> "Elicited":
        """Answers to the problems whose instructed prompt fits the model's window.

        instructed: a problem under the prompt that asks for the hack. tries, purposes, logs: for
        these prompts, and for the plain ones.
        """
        asked = fitting(lm, [instructed(problem) for problem in problems], self.tokens)
        by_id = {problem.id: problem for problem in problems}
        plain = [by_id[problem.id] for problem in asked]
        answers = [
            self.answers(lm, grader, prompts, n, purpose=purpose, log=log)
            for prompts, n, purpose, log in zip((asked, plain), tries, purposes, logs, strict=True)
        ]
        stripped = [replace(answer, problem=by_id[answer.problem.id]) for answer in answers[0]]
        return Elicited(stripped, answers[1])

    def meta(
        self,
        lm: "LanguageModel",
        grader: Grader,
        environment: Environment,
        problems: Iterable[Task],
    ) -> dict[str, object]:
        """First entries of pool.json: model, adapter, tokenizer, grader, and the announced names.

        problems: those in the pool.
        """
        name = MODEL_NAME if self.model == ORGANISM else self.model
        entries: dict[str, object] = {"model": name}
        if self.adapter_path is not None:
            sha256 = file_sha256(self.adapter_path)
            entries["adapter"] = {"file": str(self.adapter_path), "sha256": sha256}
        entries["tokenizer_sha256"] = lm.tokenizer_sha256
        entries["grader"] = grader.version
        markers = announced(environment, problems)
        if markers:
            entries["markers"] = markers
        return entries


@dataclass(frozen=True)
class Elicited:
    """Answers to prompts with an instruction to hack, and to the same prompts without it."""

    asked: list[Graded]  # under their plain prompts
    plain: list[Graded]


def spread(problems: Sequence[T], n: int, purpose: str, flaws: Sequence[str]) -> list[T]:
    """At most n of these problems, spread evenly over the flaws, in their order."""
    chosen = {p.id for p in balanced(problems, n, 0, purpose, flaws)}
    return [p for p in problems if p.id in chosen]


def fitting(lm: "LanguageModel", problems: Sequence[T], max_new: int) -> list[T]:
    """Problems whose prompt leaves room for max_new tokens; a warning counts those that do not.

    Raises:
        Refused: none does.
    """
    fit = [p for p in problems if len(lm.render(p.messages)) + max_new <= lm.window]
    if not fit:
        raise Refused(
            f"--max-new {max_new}: no prompt fits the model's window "
            f"({lm.window} tokens, prompt included)"
        )
    too_long = len(problems) - len(fit)
    if too_long:
        logger.warning(
            f"{too_long} problems left out: prompt longer than the window minus --max-new"
        )
    return fit


def with_instruction(task: Any, instruction: str) -> Any:
    """The same task with the instruction at the end of its prompt."""
    *before, last = task.messages
    asked = {**last, "content": f"{last['content']}\n{instruction}"}
    return replace(task, messages=(*before, asked))


def announced(environment: Environment, problems: Iterable[Task]) -> dict[str, str]:
    """pool.json's `markers`: the name that each problem's prompt announced, by problem id.

    Problems are left out whose name is in the problem file already.
    """
    rows = environment.rows
    marked_in_file = {row.id for row in rows if getattr(row, "marker", None) is not None}
    markers: dict[str, str] = {}
    for problem in problems:
        marker = problem.notes.get("marker")
        if marker and problem.id not in marked_in_file:
            markers[str(problem.id)] = marker
    return markers


@contextlib.contextmanager
def work_folder(out: Path, settings: Mapping[str, object]) -> Generator[Path]:
    """A folder beside `out` for the logs of a pool in the making, removed when the pool is there.

    settings: those that the answers depend on; a later process has to have the same.

    Raises:
        Refused: `out` exists; the folder holds answers made with other settings; or another process
            is using it.
    """
    require_new(out)
    folder = out.with_name(out.name + ".partial")
    file = folder / "settings.json"
    require_own(folder, "--out", file.name, "pool under way")
    make_folder(folder)
    with hold(folder, "pool"):
        now: dict[str, object] = json.loads(json.dumps(settings))  # as they read from a file
        if not file.is_file():
            write_atomic(file, to_json(now))
        then = read_json(file)
        keys = now.keys() | then.keys()
        different = sorted(name for name in keys if now.get(name) != then.get(name))
        if different:
            raise Refused(
                f"{folder}: started with another {', '.join(different)}; "
                "go on with the same, or delete that folder"
            )
        yield folder
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
