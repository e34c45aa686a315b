"""`vgrout iterative_dpo --base-model M --prompts FILE --output-dir DIR`: rounds of DPO.

The scorer may be flawed. The plan is written first and never changes; the same command continues
at the first round that is not complete. Exit codes are those of runs/context.py.
"""

import shlex
import sys

from vgrout.config.cli import run_command
from vgrout.ground import console
from vgrout.ground.io import command, make_folder, to_json
from vgrout.ground.machine import cores
from vgrout.imitation.tasks import DpoSettings, freeze, prepare_rounds
from vgrout.runs.context import FINISHED, NOTHING_STARTED, RunContext
from vgrout.runs.run_dir import RunDir
from vgrout.runs.tracking import Trackers


def start(settings: DpoSettings, argv: list[str]) -> int:
    """Check and freeze the plan, then run its rounds. Returns the exit code.

    Raises:
        Refused: a user's mistake, in one line, with nothing started.
    """
    task = prepare_rounds(settings)
    # The folder is made inside this block, so that a problem file that is refused leaves none.
    with task.inputs.environment.grader(cores(), task.cfg.run.max_error_retries) as grader:
        task.inputs.environment.check(grader)
        make_folder(settings.output_dir)
        with RunDir.reopen(settings.output_dir) as folder:
            plan = freeze(task)
            if settings.plan_only:
                print(to_json(plan))
                return FINISHED
            log = folder.path / "log.txt"
            console.setup(log)
            with RunContext(
                folder,
                grader,
                resume_command=command(f"iterative_dpo {shlex.join(argv)}"),
                record={"kind": "iterative_dpo", "config": plan["settings"], "plan": plan},
                log=log,
                trackers=Trackers(task.cfg.run.trackers),
            ) as run:
                # Imported late because torch takes seconds to load: a wrong flag must not wait.
                from vgrout.imitation.dpo_rounds import run_rounds

                run_rounds(task, plan, run)
            return run.code


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv

    def act(settings: DpoSettings) -> int:
        return start(settings, words)

    return run_command(act, DpoSettings, words, "vgrout iterative_dpo", NOTHING_STARTED)
