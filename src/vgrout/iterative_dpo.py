"""`python -m vgrout.iterative_dpo --base-model M --prompts FILE --output-dir DIR …`: rounds of DPO on a flawed scorer.

The plan is written first and never changes; the same command continues at the first round that is not complete.
Exit codes are those of runs/run_context.py.
"""

import shlex
import sys

from vgrout import console
from vgrout.cli import cli_exit, parse_args
from vgrout.files import to_json
from vgrout.grading.grade import Grader
from vgrout.imitation.dpo_config import DpoConfig, freeze, preflight
from vgrout.runs.run_context import FINISHED, NOTHING, RunContext
from vgrout.runs.run_dir import RunDir
from vgrout.tracking import Trackers


def start(cfg: DpoConfig, argv: list[str]) -> int:
    """Check and freeze the plan, then run its rounds. Returns the exit code.

    Raises:
        ValueError: a user's mistake, in one line, with nothing started.
    """
    task = preflight(cfg)
    compiles, passes = task.rewards
    # The folder inside, not outside: a problem file that is refused leaves none behind.
    with Grader(cfg.workers, compile_reward=compiles, pass_reward=passes, allow_weak=cfg.allow_weak_sandbox) as grader:
        task.require_solvable(grader)
        cfg.output_dir.mkdir(parents=True, exist_ok=True)
        with RunDir.reopen(cfg.output_dir) as folder:
            plan = freeze(task)
            if cfg.plan_only:
                print(to_json(plan))
                return FINISHED
            console.setup(log := folder.path / "log.txt")
            with RunContext(
                folder,
                grader,
                resume_command=f"python -m vgrout.iterative_dpo {shlex.join(argv)}",
                resumes=(folder.path / "run.json").is_file(),
                record={"kind": "iterative_dpo", "config": plan["settings"], "plan": plan},
                log=log,
                steps_done=lambda: len(list(folder.path.glob("round-*/manifest.json"))),
                owns_folder=False,
                trackers=Trackers(cfg.trackers),
            ) as run:
                # Here and not above: torch takes seconds to import, and a wrong flag never waits for it.
                from vgrout.imitation.dpo_rounds import run_rounds

                run_rounds(task, plan, run)
            return run.code


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return cli_exit(lambda: start(parse_args(DpoConfig, words, "python -m vgrout.iterative_dpo"), words), NOTHING)


if __name__ == "__main__":
    sys.exit(main())
