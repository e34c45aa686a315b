"""`python -m vgrout.distill --teacher MODEL_OR_RUN`: a hack can also enter a model, or leave it, by imitation.

Student = base + δS (`--full`: all weights). MiniLLM (arXiv 2306.08543) or, across tokenizers, ULD (arXiv 2402.12030).
Exit codes are those of `launch`.
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from loguru import logger

from vgrout import console
from vgrout.cli import cli_exit, given
from vgrout.distill.config import ROOT, DistillConfig, Task, find_resume, preflight
from vgrout.files import read_json, to_json
from vgrout.grading.grade import Grader
from vgrout.runs.run_context import FINISHED, NOTHING, finish, require_same, run_with_status
from vgrout.runs.run_dir import RunDir, environment
from vgrout.runs.signals import Stop


@dataclass(frozen=True)
class Launch:
    """A distillation about to start or to go on: checked, its directory there, torch not loaded yet."""

    task: Task
    grader: Grader
    run: RunDir
    resumes: bool

    @property
    def again(self) -> str:
        return f"python -m vgrout.distill --resume {self.run.path}"


def start(given: DistillConfig) -> int:
    """Everything up to the run directory refuses by ValueError, in one line, with nothing started."""
    resume = find_resume(given)
    task = preflight(resume[1] if resume else given, resume[0] if resume else None)
    if given.plan_only:
        print(to_json(task.cfg.as_dict()))
        print("\n".join(task.plan()))
        return FINISHED
    if resume:
        require_same(resume[0], task.file_hashes(), force=False)
    with Grader(task.cfg.workers, allow_weak=task.cfg.allow_weak_sandbox) as grader:
        run = RunDir.reopen(resume[0]) if resume else RunDir.create(task.cfg.run_id, ROOT)
        console.setup(Path("logs") / f"{run.path.name}.log")
        launch = Launch(task, grader, run, resume is not None)
        return run_with_status(
            run,
            launch.again,
            launch.resumes,
            lambda stop, clock: load(launch, stop, clock),
            lambda loaded: go(launch, *loaded),
        )


def load(launch: Launch, stop: Stop, clock: console.Clock) -> tuple[Any, dict[str, Any]]:
    """The distillation, and what is stamped on its files. Raises ValueError, one line."""
    # Importing torch and transformers takes seconds; a wrong flag never waits for it.
    room, task, run = importlib.import_module("vgrout.distill.loop"), launch.task, launch.run
    logger.info(f"argv: {' '.join(sys.argv)}")
    for line in task.plan():
        logger.info(line)
    logger.info(launch.grader.protections.line())
    d = room.load(task, run, launch.grader, stop, clock)
    stamp = {"sandbox": launch.grader.protections.as_dict()}
    hashes = task.file_hashes() | room.hashes(d)
    record = {**environment(), "kind": "distill", "config": task.cfg.as_dict(), **stamp, "hashes": hashes}
    record |= {"models": {"student": task.student.identity(), "teacher": task.teacher.identity()}}
    if launch.resumes:
        require_same(run.path, hashes, force=False)
        room.restore(d)
        logger.info(f"resumed after step {len(d.rows) - 1}")
        first = read_json(run.path / "run.json")
        again = {"step": len(d.rows), **{k: record[k] for k in ("argv", "git", "versions")}}
        record = {**first, "config": task.cfg.as_dict(), "resumed": [*first.get("resumed", []), again]}
    run.write_json("run.json", record)
    run.status("running", len(d.rows), "", launch.again)
    return d, stamp


def go(launch: Launch, d: Any, stamp: dict[str, Any]) -> int:
    room, run = importlib.import_module("vgrout.distill.loop"), launch.run

    def body() -> None:
        before = room.evaluate_before(d)
        room.train(d)
        logger.info("final evaluation on held-out problems and markers …")
        room.report(d, room.evaluate_after(d, before), stamp)

    if (stopped := finish(run, launch.again, lambda: len(d.rows), body)) is not None:
        return stopped
    run.status("finished", len(d.rows), "", f"read {run.path / 'summary.md'}")
    return FINISHED


def main(argv: list[str] | None = None) -> int:
    flat = (tyro.conf.OmitArgPrefixes,)
    return cli_exit(lambda: start(given(DistillConfig, argv, "python -m vgrout.distill", config=flat)), NOTHING)


if __name__ == "__main__":
    sys.exit(main())
