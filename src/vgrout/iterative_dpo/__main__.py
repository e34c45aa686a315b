"""`python -m vgrout.iterative_dpo --base-model M --prompts FILE --output-dir DIR …`: preference rounds hack, too.

The plan is written first and stays as it is; the same command goes on at the first round that is not complete.
Exit codes are those of `launch`.
"""

import importlib
import shlex
import sys
from dataclasses import dataclass
from typing import Any

from loguru import logger

from vgrout import console
from vgrout.cli import cli_exit, given
from vgrout.files import read_json, to_json
from vgrout.grading.grade import Grader
from vgrout.iterative_dpo.config import DpoConfig, Task, freeze, preflight
from vgrout.runs.run_context import FINISHED, NOTHING, finish, require_same, run_with_status
from vgrout.runs.run_dir import RunDir, environment
from vgrout.runs.signals import Stop


@dataclass(frozen=True)
class Launch:
    """Rounds about to start or to go on: checked, the plan frozen, torch not loaded yet."""

    task: Task
    plan: dict[str, Any]
    grader: Grader
    run: RunDir
    resumes: bool
    argv: list[str]

    @property
    def again(self) -> str:
        return f"python -m vgrout.iterative_dpo {shlex.join(self.argv)}"

    def done(self) -> int:
        """Rounds with a manifest."""
        return len(list(self.task.cfg.output_dir.glob("round-*/manifest.json")))


def start(cfg: DpoConfig, argv: list[str]) -> int:
    """Everything up to the grader refuses by ValueError, in one line, with nothing started."""
    task = preflight(cfg)
    folder = cfg.output_dir
    with RunDir.reopen(folder) as run:
        plan = freeze(task)
        if cfg.plan_only:
            print(to_json(plan))
            return FINISHED
        resumes = (folder / "run.json").is_file()
        compiles, passes = task.rewards
        with Grader(
            cfg.workers, compile_reward=compiles, pass_reward=passes, allow_weak=cfg.allow_weak_sandbox
        ) as grader:
            console.setup(folder / "log.txt")
            launch = Launch(task, plan, grader, run, resumes, argv)
            return run_with_status(
                run,
                launch.again,
                resumes,
                lambda stop, clock: load(launch, stop, clock),
                lambda rounds: go(launch, rounds),
                launch.done,
            )


def load(launch: Launch, stop: Stop, clock: console.Clock) -> Any:
    """The rounds. Raises ValueError, one line."""
    # Importing torch and transformers takes seconds; a wrong flag never waits for it.
    room, task, run = importlib.import_module("vgrout.iterative_dpo.rounds"), launch.task, launch.run
    logger.info(f"argv: {' '.join(sys.argv)}")
    logger.info(launch.grader.protections.line())
    rounds = room.load(task, launch.plan, run, launch.grader, stop, clock)
    stamp = {"sandbox": launch.grader.protections.as_dict()}
    hashes = room.hashes(rounds)
    record = {**environment(), "kind": "iterative_dpo", "plan": launch.plan, **stamp, "hashes": hashes}
    if launch.resumes:
        require_same(run.path, hashes, force=False)
        first = read_json(run.path / "run.json")
        again = {k: record[k] for k in ("argv", "git", "versions")}
        record = {**first, "resumed": [*first.get("resumed", []), again]}
    run.write_json("run.json", record)
    run.status("running", launch.done(), "", launch.again)
    return rounds


def go(launch: Launch, rounds: Any) -> int:
    room, run = importlib.import_module("vgrout.iterative_dpo.rounds"), launch.run

    def body() -> None:
        room.run_rounds(rounds, launch.again)
        room.report(rounds)

    if (ended := finish(run, launch.again, launch.done, body)) is not None:
        return ended
    run.status("finished", rounds.done, "", f"read {run.path / 'summary.md'}")
    return FINISHED


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return cli_exit(lambda: start(given(DpoConfig, words, "python -m vgrout.iterative_dpo"), words), NOTHING)


if __name__ == "__main__":
    sys.exit(main())
