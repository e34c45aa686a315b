"""`python -m vgrout.distill --teacher MODEL_OR_RUN`: distils a teacher that hacks, or does not, into a student.

Student = base + δS (`--full`: all weights). MiniLLM (arXiv 2306.08543) or, across tokenizers, ULD (arXiv 2402.12030).
Exit codes are those of runs/run_context.py.
"""

import sys
from pathlib import Path

import tyro
from loguru import logger

from vgrout import console
from vgrout.cli import cli_exit, parse_args
from vgrout.distill.config import ROOT, DistillConfig, Task, find_resume, preflight
from vgrout.files import read_json, to_json
from vgrout.grading.grade import Grader
from vgrout.runs.run_context import FINISHED, NOTHING, RunContext, require_same
from vgrout.runs.run_dir import RunDir, environment


def start(given: DistillConfig) -> int:
    """Everything up to the run directory refuses by ValueError, in one line, with nothing started."""
    path, cfg = find_resume(given) or (None, given)
    task = preflight(cfg, path)
    if given.plan_only:
        print(to_json(task.cfg.as_dict()))
        print("\n".join(task.plan()))
        return FINISHED
    hashes = task.file_hashes()
    if path:
        require_same(path, hashes, force=False)
    with Grader(task.cfg.workers, allow_weak=task.cfg.allow_weak_sandbox) as grader:
        folder = RunDir.reopen(path) if path else RunDir.create(task.cfg.run_id, ROOT)
        console.setup(log := Path("logs") / f"{folder.path.name}.log")
        again = f"python -m vgrout.distill --resume {folder.path}"
        with RunContext(folder, grader, again=again, resumes=bool(path), hashes=hashes, log=log) as run:
            distil(task, run)
        return run.code


def distil(task: Task, run: RunContext) -> None:
    """Load, record, evaluate, train, evaluate, report. Raises ValueError, one line, before the first step."""
    # Importing torch and transformers takes seconds; a wrong flag never waits for it.
    from vgrout.distill import loop

    logger.info(f"argv: {' '.join(sys.argv)}")
    for line in task.plan():
        logger.info(line)
    logger.info(run.grader.protections.line())
    d = loop.load(task, run)
    hashes = run.hashes | loop.hashes(d)
    record = {**environment(), "kind": "distill", "config": task.cfg.as_dict(), **run.stamp, "hashes": hashes}
    record |= {"models": {"student": task.student.identity(), "teacher": task.teacher.identity()}}
    if run.resumes:
        require_same(run.path, hashes, force=False)
        loop.restore(d)
        logger.info(f"resumed after step {len(d.rows) - 1}")
        first = read_json(run.path / "run.json")
        again = {"step": len(d.rows), **{k: record[k] for k in ("argv", "git", "versions")}}
        record = {**first, "config": task.cfg.as_dict(), "resumed": [*first.get("resumed", []), again]}
    run.dir.write_json("run.json", record)
    run.started()
    before = loop.evaluate_before(d)
    loop.train(d)
    logger.info("final evaluation on held-out problems and markers …")
    loop.report(d, loop.evaluate_after(d, before))


def main(argv: list[str] | None = None) -> int:
    flat = (tyro.conf.OmitArgPrefixes,)
    return cli_exit(lambda: start(parse_args(DistillConfig, argv, "python -m vgrout.distill", config=flat)), NOTHING)


if __name__ == "__main__":
    sys.exit(main())
