"""`vgrout grade ANSWERS.jsonl --problems FILE --out GRADES.jsonl`: the trainer's grader, offline.

Lines {problem_id, env_mode, text} in; the same lines, in order, with every field of a Grade out. A
line that cannot be graded gets an `error` field, and the exit code is 1. Without `env_mode` a
problem is checked by its own mode.
"""

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from vgrout.cli import cli_exit
from vgrout.config.checks import check, setting
from vgrout.config.names import parse_command
from vgrout.data import Grade, Ungraded
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import MODES
from vgrout.envs.code.problem import Problem
from vgrout.envs.code.problems import load_problems
from vgrout.errors import Refused, refuse
from vgrout.files import atomic_open, from_json, require_new

AHEAD = 64  # answers in flight per worker: enough to keep it busy, few enough to keep memory flat

Record = dict[str, object]  # a line of the answers' or the grades' file


@dataclass(frozen=True)
class GradeSettings:
    """Grade a file of answers."""

    answers: Annotated[Path, tyro.conf.Positional]
    """JSONL with problem_id, text and (optionally) env_mode and marker; a file, or a pipe as /dev/stdin."""
    problems: Path
    """The problems of the answers."""
    out: Path
    """Where the grades go; written under another name first."""
    workers: int | None = setting(None, low=1, high=1024)
    """Grading processes; default one per core."""
    compile_reward: float = setting(0.5, low=0, high=1e6)
    pass_reward: float = setting(3.0, above=0, high=1e6)
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        there = self.answers.exists() and not self.answers.is_dir()
        refuse(not there, f"{self.answers}: no such file; give a JSONL file")
        require_new(self.out)
        check(self)


def _parse(line: bytes, problems: Mapping[int, Problem]) -> tuple[Record, Problem, str]:
    """A line's record, its problem, and the answer's text. Raises Refused with what is wrong."""
    record = from_json(line, "the line")
    if not isinstance(record, dict):
        raise Refused("not a JSON object")
    record.pop("error", None)  # of an earlier grading
    number = record.get("problem_id")
    problem = problems.get(number) if type(number) is int else None
    mode = record.get("env_mode") or (problem and problem.mode)
    marker = record.get("marker", problem.marker if problem and mode == problem.mode else "")
    refuse(not isinstance(record.get("text"), str), "'text' should be a string")
    if problem is None:
        raise Refused(f"no problem with id {number!r}")
    refuse(mode not in MODES, f"unknown env_mode {mode!r}; one of {', '.join(MODES)}")
    refuse(not isinstance(marker, str), "'marker' should be a string")
    return record, replace(problem, mode=mode, marker=marker), record["text"]


def _verdict(grade: Grade | Ungraded) -> Record:
    """The fields that a graded line gets."""
    if isinstance(grade, Ungraded):
        return {"error": f"could not be graded: {grade.reason}"}
    return {
        "reward": grade.reward,
        "passed": grade.passed,
        "solved": grade.solved,
        "hacked": grade.hacked,
        "mechanism": grade.mechanism,
        "mode": grade.flaw,
        "exit_status": grade.status,
        **grade.details,
    }


def grade_lines(
    lines: Iterable[bytes], problems: Mapping[int, Problem], grader: Grader
) -> Iterator[Record]:
    """One record for every line, in order.

    One that could not be graded has `error`, and only `line` beside it if it could not be read.
    """
    # a record with its grade on the way, or with what is wrong with it
    waiting: deque[tuple[Record, Future[Grade | Ungraded] | str]] = deque()
    for line in lines:
        try:
            record, problem, text = _parse(line, problems)
            waiting.append((record, grader.submit(problem, text)))
        except Refused as e:
            waiting.append(({"line": line.decode(errors="backslashreplace")}, str(e)))
        while len(waiting) > AHEAD * grader.workers:
            yield _finished(*waiting.popleft())
    while waiting:
        yield _finished(*waiting.popleft())


def _finished(record: Record, outcome: Future[Grade | Ungraded] | str) -> Record:
    """The record with its grade, once that is there, or with its error."""
    if isinstance(outcome, str):
        return {**record, "error": outcome}
    try:
        return {**record, **_verdict(outcome.result())}
    except Refused as e:  # the problem itself is at fault
        return {**record, "error": str(e)}


def run(config: GradeSettings) -> int:
    """Grade the file. Returns the number of lines that have an error instead of a grade."""
    problems = {p.id: p for p in load_problems(config.problems)}
    expected = None  # a pipe can be read only once, so its lines are not counted beforehand
    if config.answers.is_file():
        with open(config.answers, "rb") as f:
            expected = sum(1 for line in f if line.strip())
    config.out.parent.mkdir(parents=True, exist_ok=True)
    n = errors = 0
    with (
        Grader(
            config.workers,
            compile_reward=config.compile_reward,
            pass_reward=config.pass_reward,
            allow_weak=config.allow_weak_sandbox,
        ) as grader,
        open(config.answers, "rb") as source,
        atomic_open(config.out) as target,
        tqdm(total=expected, desc="grading", disable=None) as bar,
    ):
        lines = (line.rstrip(b"\n") for line in source if line.strip())
        for record in grade_lines(lines, problems, grader):
            n += 1
            errors += "error" in record
            target.write((json.dumps(record) + "\n").encode())
            bar.update()
        refuse(not n, f"{config.answers}: no answers in it")
        print(grader.protections.line())
    with_errors = f"; {errors} lines have an error instead" if errors else ""
    print(f"{n - errors}/{n} graded -> {config.out}{with_errors}")
    return errors


def main() -> int:
    """Exit codes: 0 every line graded · 1 some have an error instead · 2 refused, in one line."""
    return cli_exit(lambda: 1 if run(parse_command(GradeSettings, None, "vgrout grade")) else 0)


if __name__ == "__main__":
    sys.exit(main())
