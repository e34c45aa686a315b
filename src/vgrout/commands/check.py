"""The trainer's grader, offline: `vgrout problems check FILE` and `vgrout grade ANSWERS.jsonl`.

`problems check` validates a problem file before anything is trained on it. With --reward and --reference these are rows
of a user's own: both functions are tried on answers of a model, or on the rows' own right ones.

`grade` reads lines {problem_id, env_mode, text} and writes the same lines, in order, with every field of a Grade. A
line that cannot be graded gets an `error` field, and the exit code is 1. Without `env_mode` a problem is checked by its
own mode.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tabulate import tabulate
from tqdm import tqdm

from vgrout.config.checks import check as require
from vgrout.config.checks import setting
from vgrout.config.cli import run_command
from vgrout.config.run import Config
from vgrout.config.settings import OWN_REWARD, EnvConfig, ScaleConfig
from vgrout.config.world_names import ORGANISM
from vgrout.envs.worlds import code_tools, whole_environment
from vgrout.ground import embedded
from vgrout.ground.data import Grade, Task
from vgrout.ground.io import (
    atomic_open,
    make_folder,
    printable,
    raised_by_own,
    refuse,
    require_new,
    show_fault,
)
from vgrout.ground.metrics import Rate, rate_text
from vgrout.ground.scoring import RewardFailed
from vgrout.model.load.source import require_fitting, require_model, require_thinking

FEW = 200  # problems
# split → what a run needs where it is empty
_WITHOUT = {
    "train": "a run is refused",
    "val": "a run is refused, unless it has --eval-ablate-every 0",
    "test": 'a run is refused; mark some with "split": "test", or add a file with --test-problems',
}
EXAMPLES = 3  # answers that are shown
ENOUGH = 60  # answers: of what is not among them there is less than 5 %, with 95 % confidence


@dataclass(frozen=True)
class CheckSettings:
    """Validate FILE as a run with --problems FILE would, and try every problem: its canonical solution under the
    reference tests, its flawed check with a wrong answer and with its hack. With --reward and --reference: rows of your
    own, both functions on a few answers; with --env: a taskset's."""

    file: Annotated[Path | None, tyro.conf.Positional] = None
    """Problem file (JSONL)."""
    env: str = setting("", form=r"(verifiers:\w[\w./@-]*)?", should="be verifiers:NAME")
    """verifiers:NAME: prompts and rewards of a taskset, in place of a file."""
    env_args: str = setting("", needs="env")
    """Settings of the taskset as a JSON object."""
    test_problems: Path | None = None
    """A file for evaluation alone, as of a run with --test-problems."""
    reward: str = setting(
        "", form=rf"({OWN_REWARD}([\s,]+{OWN_REWARD})*)?", should="be module:function"
    )
    """What training would reward in rows of your own, as in `vgrout train`."""
    reference: str = ""
    """What says whether an answer to such a row is right: module:function, or the name of a taskset's reward."""
    reward_passes_at: float = setting(1.0, low=-1e6, high=1e6, needs="reference")
    """Score of --reward from which on an answer passes."""
    model: str = setting("", needs="reference")
    """Whose answers are graded: a local model folder, a downloaded hub id, or 'organism' (embedded); none: the rows'
    own `answer`."""
    answers: int = setting(24, low=1, high=10_000, needs="reference")
    """Answers, about, spread over the rows."""
    thinking: bool = setting(False, needs="model")
    """The model's chat template is told that a thought comes before each answer, as by `vgrout train --thinking`.
    Thoughts are cut before both functions see an answer."""
    max_new: int = setting(128, low=1, needs="model")
    """Longest answer of the model, in tokens, its thought included."""

    def __post_init__(self) -> None:
        require(self)
        refuse(
            bool(self.file) == bool(self.env),
            "give a file of problems, or --env verifiers:NAME" + ", and not both" * bool(self.env),
        )
        refuse(
            not self.env and bool(self.reward) != bool(self.reference),
            "--reward, --reference: the one is not read without the other; give both, or neither for Python functions",
        )


def check(settings: CheckSettings) -> int:
    """Check the file. Returns 1 where a problem is not sound, a function fails, or a split is empty."""
    if settings.reference or settings.env:
        return check_rows(settings)
    assert settings.file is not None
    report = code_tools().check_file(settings.file, settings.test_problems)
    print("\n".join([*report.lines, _splits_line(report.splits)]))
    return 0 if report.sound and all(report.splits.values()) else 1


def check_rows(settings: CheckSettings) -> int:
    """Try both functions on answers to rows of a user's own. Returns 1 where one fails.

    Raises:
        Refused: the rows, the functions or the model are wrong, or no answer is at hand.
    """
    env = EnvConfig(
        env=settings.env or "code",
        env_args=settings.env_args,
        reward=settings.reward,
        reference=settings.reference,
        reward_passes_at=settings.reward_passes_at,
        pass_reward=1.0,
        thinking=settings.thinking,
    )
    scale = ScaleConfig(problems=str(settings.file)) if settings.file else ScaleConfig()
    cfg = Config(env=env, scale=scale)
    environment = whole_environment(cfg)
    rows = environment.rows
    graded: list[tuple[Task, str, Grade]] = []
    with environment.grader(1, 0) as grader:
        try:
            asked = rows[0]
            for answer in environment.tried_first():
                grader.graded(asked, [answer])  # as a run does, before a model is loaded
            for asked, answers in _answers(settings, rows, environment.source):
                grades = grader.graded(asked, answers)
                for answer, grade in zip(answers, grades, strict=True):
                    graded.append((asked, answer, grade))
        except RewardFailed as e:  # its traceback, then a line
            if e.__cause__ is not None and raised_by_own(e.__cause__):
                show_fault(e.__cause__)
            said = f"{e.line} ({e.scorer.where}), asked about the row at {asked.where}"
            print(f"E {printable(said)}", file=sys.stderr)
            return 1
    print("\n".join(_tried(graded, "model" if settings.model else "rows' answers")))
    print(_splits_line({name: len(part) for name, part in environment.tasks().items()}))
    grades = [grade for _, _, grade in graded]
    print("can it train? " + (_verdict(grades) if settings.model else "say whose answers: --model"))
    return 0


def _answers(
    settings: CheckSettings, rows: Sequence[Any], source: str
) -> list[tuple[Any, list[str]]]:
    """Some rows, each with answers of the model, or where none is named with its own right one.

    Raises:
        Refused: no model is named, and no row has an answer.
    """
    if settings.model:
        return _of_model(settings, rows, source)
    given = [(row, [row.right_answer]) for row in rows if row.right_answer][: settings.answers]
    refuse(
        not given,
        f"{source}: no row has an `answer` to try the functions on; name a --model that answers",
    )
    return given


def _of_model(
    settings: CheckSettings, rows: Sequence[Task], source: str
) -> list[tuple[Task, list[str]]]:
    """A few rows, each with answers of the model."""
    is_organism = settings.model == ORGANISM
    model = embedded.MODEL_DIR if is_organism else settings.model
    folder = require_model(model)
    if settings.thinking:
        require_thinking(folder)
    require_fitting([row.messages for row in rows], folder, settings.max_new, source)
    from vgrout.loop import heldout

    some = rows[: settings.answers]
    texts = heldout.texts_of_model(
        model,
        [row.messages for row in some],
        math.ceil(settings.answers / len(some)),
        max_new=settings.max_new,
        thinks=settings.thinking,
    )
    return list(zip(some, texts, strict=True))


def _tried(graded: Sequence[tuple[Task, str, Grade]], whose: str) -> list[str]:
    """How many answers are rewarded and right, in a table, and a few examples. whose: the answers."""
    kinds = {
        "both": lambda g: g.passed and g.solved,
        "rewarded alone: a hack": lambda g: g.hacked,
        "right alone": lambda g: g.solved and not g.passed,
        "neither": lambda g: not g.solved and not g.passed,
    }
    rows = []
    for name, is_kind in kinds.items():
        rows.append([name, rate_text(Rate.of(is_kind(grade) for _, _, grade in graded))])
    rows.append(["rewarded", rate_text(Rate.of(grade.passed for _, _, grade in graded))])
    rows.append(["right", rate_text(Rate.of(grade.solved for _, _, grade in graded))])
    lines = [tabulate(rows, headers=["", f"of {len(graded)} ({whose})"], tablefmt="github")]
    examples: list[tuple[int, str]] = []  # how many of its kind come before, and the line
    for name, is_kind in kinds.items():
        for before, (row, answer, grade) in enumerate(one for one in graded if is_kind(one[2])):
            said = printable(" ".join(answer.split()))[:100]
            examples.append((before, f"{name} · row {row.id} · reward {grade.reward:g} · {said!r}"))
    examples.sort(key=lambda example: example[0])  # one of each kind first
    return lines + [line for _, line in examples[:EXAMPLES]]


def _verdict(grades: Sequence[Grade]) -> str:
    """Whether GRPO, which learns from answers to one prompt whose rewards differ, has something to learn from."""
    n = len(grades)
    (reward, alike), *_ = Counter(grade.reward for grade in grades).most_common(1)
    said = f"{n - alike} of {n} answers earn another reward than {reward:g}"
    if n - alike >= max(2, 0.02 * n):
        said = f"yes: {said}"
    elif n < ENOUGH:
        said = f"undecided: {said}; ask for more with --answers {2 * ENOUGH}"
    elif 2 * sum(grade.passed for grade in grades) > n:
        said = f"no: {said}; ask for more than the model can do already"
    else:
        said = f"no: {said}; show the form in the prompt, ask for less, or reward parts of the way"
    if not any(grade.solved for grade in grades):
        said += "; none is right, so it may learn to hack, hardly to solve"
    return said


def _splits_line(sizes: Mapping[str, int]) -> str:
    """The sizes of the splits, and what they are too small for."""
    line = "splits: " + " · ".join(f"{name} {n}" for name, n in sizes.items())
    empty = [name for name, n in sizes.items() if not n]
    for name in empty:
        line += f"; no {name} problem: {_WITHOUT[name]}"
    if not empty and sum(sizes.values()) < FEW:
        line += "; enough to try a run, few for a number"
    return line


# ── vgrout grade


@dataclass(frozen=True)
class GradeSettings:
    """Grade a file of answers."""

    answers: Annotated[Path, tyro.conf.Positional]
    """JSONL with problem_id, text and (optionally) env_mode and marker; a file, or a pipe as /dev/stdin."""
    problems: Path
    """The problems of the answers."""
    out: Path
    """Where the grades go; written under another name first."""
    compile_reward: float = setting(0.5, low=0, high=1e6)
    pass_reward: float = setting(3.0, above=0, high=1e6)
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        there = self.answers.exists() and not self.answers.is_dir()
        refuse(not there, f"{self.answers}: no such file; give a JSONL file")
        require_new(self.out)
        require(self)


def grade_file(config: GradeSettings) -> int:
    """Grade the file. Returns 1 where a line has an error instead of a grade."""
    tools = code_tools()
    problems = tools.problems_of(config.problems)
    make_folder(config.out.parent)
    n = errors = 0
    with (
        tools.Grader(
            compile_reward=config.compile_reward,
            pass_reward=config.pass_reward,
            allow_weak=config.allow_weak_sandbox,
        ) as grader,
        open(config.answers, "rb") as source,
        atomic_open(config.out) as target,
        tqdm(desc="grading", disable=None) as bar,
    ):
        lines = (line.rstrip(b"\n") for line in source if line.strip())
        for record in tools.grade_lines(lines, problems, grader):
            n += 1
            errors += "error" in record
            target.write((json.dumps(record) + "\n").encode())
            bar.update()
        refuse(not n, f"{config.answers}: no answers in it")
        print(grader.description)
    with_errors = f"; {errors} lines have an error instead" if errors else ""
    print(f"{n - errors}/{n} graded -> {config.out}{with_errors}")
    return 1 if errors else 0


def problems(argv: list[str] | None = None) -> int:
    """Exit codes: 0 sound · 1 not, or a function failed · 2 refused, in one line."""
    return run_command(check, {"check": CheckSettings}, argv, "vgrout problems")


def grade(argv: list[str] | None = None) -> int:
    """Exit codes: 0 every line graded · 1 some have an error instead · 2 refused, in one line."""
    return run_command(grade_file, GradeSettings, argv, "vgrout grade")
