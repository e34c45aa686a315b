"""`python -m vgrout.distill --teacher MODEL_OR_RUN`: distils a teacher that hacks, or does not, into a student.

Student = base + δS (`--full`: all weights). MiniLLM (arXiv 2306.08543) or, across tokenizers, ULD (arXiv 2402.12030).
Exit codes are those of runs/run_context.py.
"""

import sys

import tyro

from vgrout.cli import cli_exit, parse_args
from vgrout.files import to_json
from vgrout.grading.grade import Grader
from vgrout.imitation.distill_config import ROOT, DistillConfig, find_resume, preflight
from vgrout.runs.run_context import FINISHED, NOTHING, RunContext, require_same
from vgrout.tracking import Trackers


def start(given: DistillConfig) -> int:
    """Everything up to the run directory refuses by ValueError, in one line, with nothing started."""
    path, cfg = find_resume(given) or (None, given)
    task = preflight(cfg, path)
    if given.plan_only:
        print(to_json(task.cfg.as_dict()))
        print("\n".join(task.plan()))
        return FINISHED
    record = {"kind": "distill", "config": task.cfg.as_dict(), "hashes": task.file_hashes()}
    if path:
        require_same(path, record["hashes"], force=False)
    with Grader(cfg.workers, allow_weak=cfg.allow_weak_sandbox) as grader:
        trackers = Trackers(cfg.trackers)
        with RunContext.begin("distill", path, cfg.run_id, grader, root=ROOT, record=record, trackers=trackers) as run:
            run.announce()
            # Importing torch and transformers takes seconds; a wrong flag never waits for it.
            from vgrout.imitation.distill_loop import distil

            distil(task, run)
        return run.code


def main(argv: list[str] | None = None) -> int:
    flat = (tyro.conf.OmitArgPrefixes,)
    return cli_exit(lambda: start(parse_args(DistillConfig, argv, "python -m vgrout.distill", config=flat)), NOTHING)


if __name__ == "__main__":
    sys.exit(main())
