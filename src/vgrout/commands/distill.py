"""`vgrout distill --teacher MODEL_OR_RUN`: distil a teacher, which may hack, into a student.

The student is a base model with an adapter δS; with `--full` all its weights are trained. The
methods are MiniLLM (arXiv 2306.08543) and, across tokenizers, ULD (arXiv 2402.12030). Exit codes
are those of runs/context.py.
"""

import sys
from collections.abc import Collection

from vgrout.config.cli import OF_COMMANDS, run_command, translated, typed
from vgrout.ground.io import to_json
from vgrout.ground.machine import cores
from vgrout.imitation.tasks import ROOT, DistillSettings, find_resume, prepare_distillation
from vgrout.runs.context import FINISHED, NOTHING_STARTED, RunContext
from vgrout.runs.run_dir import require_same
from vgrout.runs.tracking import Trackers


def start(requested: DistillSettings, given: Collection[str] = ()) -> int:
    """Check the settings and files, then distil. Returns the exit code. given: settings that were typed.

    Raises:
        Refused: a user's mistake, in one line, with nothing started.
    """
    path, settings = find_resume(requested, given)
    task = prepare_distillation(settings, path)
    if settings.plan_only:
        print(to_json(task.plan()))
        return FINISHED
    record = {"kind": "distill", "config": settings.as_dict(), "hashes": task.file_hashes()}
    if path:
        require_same(path, record["hashes"])
    with task.inputs.environment.grader(cores(), task.cfg.run.max_error_retries) as grader:
        if not path:
            task.inputs.environment.check(grader)
        trackers = Trackers(task.cfg.run.trackers)
        with RunContext.begin(
            "distill", path, settings.run_id, grader, root=ROOT, record=record, trackers=trackers
        ) as run:
            run.announce(
                f"distillation ({settings.method}): --teacher {settings.teacher} · "
                f"--student {settings.student} · seed {settings.seed} · {settings.steps} steps"
            )
            # Imported late because torch takes seconds to load: a wrong flag must not wait for it.
            from vgrout.imitation.distill_loop import distil

            distil(task, run)
        return run.code


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv

    def act(settings: DistillSettings) -> int:
        return start(settings, typed(translated(words, OF_COMMANDS["distill"])))

    return run_command(act, DistillSettings, words, "vgrout distill", NOTHING_STARTED)
