"""`vgrout problems check FILE`: a problem file, validated before anything is trained on it.

With --reward and --reference these are rows of a user's own: both functions are tried on answers of a model, or on the
rows' own right ones.
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from loguru import logger
from tabulate import tabulate

from vgrout import console, embedded, faults
from vgrout.cli import cli_exit
from vgrout.config.checks import check as require
from vgrout.config.checks import setting
from vgrout.config.env import OWN_REWARD, EnvConfig
from vgrout.config.groups import ORGANISM, ScaleConfig
from vgrout.config.names import parse_command
from vgrout.config.run import Config
from vgrout.console import Progress
from vgrout.data import Grade
from vgrout.envs.code.grading.check import (
    Failure,
    check_flaws,
    check_problems,
    one_value_line,
    shadowed_builtins,
)
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.problem import Problem
from vgrout.envs.code.problems import assigned, load_rows
from vgrout.envs.splits import copies_line, require_apart, require_copies_together
from vgrout.envs.text import TextEnvironment, TextTask, tried_first
from vgrout.errors import refuse
from vgrout.files import printable
from vgrout.metrics import Rate, rate_text
from vgrout.model.source import require_fitting, require_model, require_thinking
from vgrout.scoring import RewardFailed

FEW, MANY = 200, 2000  # problems
# split → what a run needs where it is empty
_WITHOUT = {
    "train": "a run is refused",
    "val": "a run is refused, unless it has --eval-ablate-every 0",
    "test": 'a run is refused; mark some with "split": "test", or add a file with --test-problems',
}
EXAMPLES = 3  # answers that are shown


@dataclass(frozen=True)
class CheckSettings:
    """Validate FILE as a run with --problems FILE would, and try every problem: its canonical solution under the
    reference tests, its flawed check with a wrong answer and with its hack. With --reward and --reference: rows of your
    own, both functions on a few answers."""

    file: Annotated[Path, tyro.conf.Positional]
    """Problem file (JSONL)."""
    test_problems: Path | None = None
    """A file for evaluation alone, as of a run with --test-problems."""
    workers: int | None = setting(None, low=1)
    """Grading processes; none: one per core."""
    reward: str = setting(
        "", form=rf"({OWN_REWARD}([\s,]+{OWN_REWARD})*)?", should="be module:function"
    )
    """What training would reward in rows of your own, as in `vgrout train`."""
    reference: str = setting("", form=r"([\w.]+:\w+)?", should="be module:function")
    """What says whether an answer to such a row is right."""
    reward_passes_at: float = setting(1.0, low=-1e6, high=1e6, needs="reward")
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
            bool(self.reward) != bool(self.reference),
            "--reward, --reference: the one is not read without the other; give both, or neither for Python functions",
        )


def check(settings: CheckSettings) -> int:
    """The exit code of the check that fits the file."""
    if settings.reference:
        return check_rows(settings)
    return check_code(settings.file, settings.test_problems, settings.workers)


def check_rows(settings: CheckSettings) -> int:
    """Try both functions on answers to rows of a user's own. Returns 1 where one fails.

    Raises:
        Refused: the rows, the functions or the model are wrong, or no answer is at hand.
    """
    env = EnvConfig(
        reward=settings.reward,
        reference=settings.reference,
        reward_passes_at=settings.reward_passes_at,
        pass_reward=1.0,
    )
    environment = TextEnvironment.of_run(
        Config(env=env, scale=ScaleConfig(problems=str(settings.file)))
    )
    refuse(bool(environment.absent), "".join(environment.absent[:1]))
    rows = environment.rows
    graded: list[tuple[TextTask, str, Grade]] = []
    with environment.grader(settings.workers or 1, 0) as grader:
        try:
            asked = rows[0]
            for answer in tried_first(asked, thinking=settings.thinking):
                grader.graded(asked, [answer])  # as a run does, before a model is loaded
            for asked, answers in _answers(settings, rows):
                grades = grader.graded(asked, answers)
                for answer, grade in zip(answers, grades, strict=True):
                    graded.append((asked, answer, grade))
        except RewardFailed as e:
            return _failed(e, asked)
    print("\n".join(_tried(graded, "model" if settings.model else "rows' answers")))
    print(_splits_line({name: len(part) for name, part in environment.tasks().items()}))
    return 0


def _answers(settings: CheckSettings, rows: Sequence[TextTask]) -> list[tuple[TextTask, list[str]]]:
    """Some rows, each with answers of the model, or where none is named with its own right one.

    Raises:
        Refused: no model is named, and no row has an answer.
    """
    if settings.model:
        return _of_model(settings, rows)
    given = [(row, [row.right_answer]) for row in rows if row.right_answer][: settings.answers]
    refuse(
        not given,
        f"{settings.file}: no row has an `answer` to try the functions on; name a --model that answers",
    )
    return given


def _failed(e: RewardFailed, row: TextTask) -> int:
    """Say which function failed, and where it was asked: its traceback, then a line."""
    if e.__cause__ is not None and faults.raised_by_own(e.__cause__):
        faults.show(e.__cause__)
    said = printable(f"{e.line} ({e.scorer.where}), asked about the row at {row.where}")
    print(f"E {said}", file=sys.stderr)
    return 1


def _of_model(
    settings: CheckSettings, rows: Sequence[TextTask]
) -> list[tuple[TextTask, list[str]]]:
    """A few rows, each with answers of the model."""
    is_organism = settings.model == ORGANISM
    model = embedded.MODEL_DIR if is_organism else settings.model
    folder = require_model(model)
    if settings.thinking:
        require_thinking(folder)
    require_fitting([row.messages for row in rows], folder, settings.max_new, str(settings.file))
    from vgrout import answering  # imports torch

    some = rows[: settings.answers]
    texts = answering.texts_of_model(
        model,
        [row.messages for row in some],
        math.ceil(settings.answers / len(some)),
        max_new=settings.max_new,
        thinks=settings.thinking,
    )
    return list(zip(some, texts, strict=True))


def _tried(graded: Sequence[tuple[TextTask, str, Grade]], whose: str) -> list[str]:
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


def check_code(file: Path, test_problems: Path | None, workers: int | None) -> int:
    """Check problems of the code world. Returns 1 where one is not sound.

    Problems without a flaw of their own are dealt theirs as by --env-mode own.
    """
    rows = load_rows(file)
    test_rows = load_rows(test_problems) if test_problems else ()
    require_apart(rows, test_rows)
    both = [*rows, *test_rows]
    if len(both) > MANY:
        logger.info(
            f"{len(both)} problems read; the solution of each is tried, then its flawed check …"
        )
    require_copies_together(both)
    parts = assigned(rows, "own", test_rows=test_rows, published=True)
    problems = [problem for part in parts.values() for problem in part]
    varied = assigned(rows, "own", test_rows=test_rows)
    with Grader(workers=workers) as grader:
        solutions = partial(Progress, desc="solutions", unit="problem")
        report = check_problems(problems, grader, track=solutions)
        tried = [*problems, *_named_otherwise(problems, varied)]
        flaws = check_flaws(tried, grader, track=partial(Progress, desc="flaws", unit="problem"))
    print(report)
    print(_flaws_lines(problems, flaws))
    lengths = sorted(sum(len(m["content"]) for m in p.messages) for p in problems)
    print(f"prompt characters: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
    sizes = {name: len(part) for name, part in parts.items()}
    print(_splits_line(sizes))
    shadowed: Counter[str] = Counter()
    for setup_code, n in Counter(row.setup_code for row in both).items():
        shadowed.update(dict.fromkeys(shadowed_builtins(setup_code), n))
    for name, n in shadowed.items():
        print(
            f"setup code replaces the builtin {name} in {n} problems; "
            "answers that call it get another function"
        )
    for line in (copies_line(rows), copies_line(test_rows), one_value_line(problems)):
        if line:
            print(line)
    return 0 if report.ok and not flaws and all(sizes.values()) else 1


def _named_otherwise(
    problems: Sequence[Problem], varied: Mapping[str, Sequence[Problem]]
) -> list[Problem]:
    """The problems under the names that --marker-names varied deals, where setup code may know these names."""
    markers = {problem.id: problem.marker for problem in problems}
    others: list[Problem] = []
    for part in varied.values():
        for problem in part:
            if problem.setup_code.strip() and problem.marker != markers[problem.id]:
                others.append(problem)
    return others


def _flaws_lines(problems: Sequence[Problem], failures: Sequence[Failure]) -> str:
    """How many flawed checks are sound, and what is wrong with the others."""
    modes = Counter(problem.mode for problem in problems)
    lines = [
        f"flawed checks: {len(problems) - len(failures)}/{len(problems)} accept their hack, "
        "and no answer that is only wrong",
        *(f"  problem {failure.id}: {failure.reason}" for failure in failures),
        "flaws: " + ", ".join(f"{mode} {n}" for mode, n in modes.items()),
    ]
    return "\n".join(lines)


def _splits_line(sizes: Mapping[str, int]) -> str:
    """The sizes of the splits, and what they are too small for."""
    line = "splits: " + " · ".join(f"{name} {n}" for name, n in sizes.items())
    empty = [name for name, n in sizes.items() if not n]
    for name in empty:
        line += f"; no {name} problem: {_WITHOUT[name]}"
    if not empty and sum(sizes.values()) < FEW:
        line += "; enough to try a run, few for a number"
    return line


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 sound · 1 not, or a function failed · 2 refused, in one line."""

    def run() -> int:
        return check(parse_command({"check": CheckSettings}, argv, "vgrout problems"))

    console.setup(None)
    return cli_exit(run)


if __name__ == "__main__":
    sys.exit(main())
