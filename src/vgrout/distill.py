"""Distillation of a teacher, which may hack, into a student: `python -m vgrout.distill --teacher MODEL_OR_RUN`.

Student = base + δS (`--full`: all weights). MiniLLM (arXiv 2306.08543) or, across tokenizers, ULD (arXiv 2402.12030).
Exit codes are those of runs/run_context.py.
"""

import sys

import tyro

from vgrout.cli import cli_exit, parse_args
from vgrout.grading.grade import Grader
from vgrout.imitation.distill_config import ROOT, DistillConfig, find_resume, preflight
from vgrout.runs.run_context import FINISHED, NOTHING, RunContext, require_same
from vgrout.tracking import Trackers


def start(requested: DistillConfig) -> int:
    """Check, then distil. Returns the exit code.

    Raises:
        ValueError: a user's mistake, in one line, with nothing started.
    """
    path, cfg = find_resume(requested)
    task = preflight(cfg, path)
    if requested.plan_only:
        print("\n".join(task.plan()))
        return FINISHED
    record = {"kind": "distill", "config": task.cfg.as_dict(), "hashes": task.file_hashes()}
    if path:
        require_same(path, record["hashes"], force=False)
    with Grader(cfg.workers, allow_weak=cfg.allow_weak_sandbox) as grader:
        if not path:
            task.require_solvable(grader)
        trackers = Trackers(cfg.trackers)
        with RunContext.begin("distill", path, cfg.run_id, grader, root=ROOT, record=record, trackers=trackers) as run:
            given = f"--teacher {cfg.teacher} · --student {cfg.student} · seed {cfg.seed} · {cfg.steps} steps"
            run.announce(f"distillation ({cfg.method}): {given}")
            # Here and not above: torch takes seconds to import, and a wrong flag never waits for it.
            from vgrout.imitation.distill_loop import distil

            distil(task, run)
        return run.code


def main(argv: list[str] | None = None) -> int:
    flat = (tyro.conf.OmitArgPrefixes,)
    return cli_exit(lambda: start(parse_args(DistillConfig, argv, "python -m vgrout.distill", config=flat)), NOTHING)


if __name__ == "__main__":
    sys.exit(main())
