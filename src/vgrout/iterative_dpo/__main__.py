"""`python -m vgrout.iterative_dpo --base-model M --prompts FILE --output-dir DIR …`: rounds of DPO on a flawed scorer.

The plan is written first and never changes; the same command goes on at the first round that is not complete.
Exit codes are those of runs/run_context.py.
"""

import shlex
import sys
from typing import Any

from loguru import logger

from vgrout import console
from vgrout.cli import cli_exit, parse_args
from vgrout.files import read_json, to_json
from vgrout.grading.grade import Grader
from vgrout.iterative_dpo.config import DpoConfig, Task, freeze, preflight
from vgrout.runs.run_context import FINISHED, NOTHING, RunContext, require_same
from vgrout.runs.run_dir import RunDir, environment


def start(cfg: DpoConfig, argv: list[str]) -> int:
    """Everything up to the grader refuses by ValueError, in one line, with nothing started."""
    task = preflight(cfg)
    cfg.output_dir.mkdir(parents=True, exist_ok=True)
    folder = RunDir.reopen(cfg.output_dir)
    with folder:
        plan = freeze(task)
        if cfg.plan_only:
            print(to_json(plan))
            return FINISHED
        compiles, passes = task.rewards
        with Grader(
            cfg.workers, compile_reward=compiles, pass_reward=passes, allow_weak=cfg.allow_weak_sandbox
        ) as grader:
            console.setup(log := folder.path / "log.txt")

            def done() -> int:
                """Rounds with a manifest."""
                return len(list(folder.path.glob("round-*/manifest.json")))

            again = f"python -m vgrout.iterative_dpo {shlex.join(argv)}"
            resumes = (folder.path / "run.json").is_file()
            with RunContext(folder, grader, again=again, resumes=resumes, done=done, log=log, owned=False) as run:
                run_plan(task, plan, run)
            return run.code


def run_plan(task: Task, plan: dict[str, Any], run: RunContext) -> None:
    """Load, record, every round that is missing, report. Raises ValueError, one line, before the first round."""
    # Importing torch and transformers takes seconds; a wrong flag never waits for it.
    from vgrout.iterative_dpo import rounds

    logger.info(f"argv: {' '.join(sys.argv)}")
    logger.info(run.grader.protections.line())
    r = rounds.load(task, plan, run)
    hashes = rounds.hashes(r)
    record = {**environment(), "kind": "iterative_dpo", "plan": plan, **run.stamp, "hashes": hashes}
    if run.resumes:
        require_same(run.path, hashes, force=False)
        first = read_json(run.path / "run.json")
        again = {k: record[k] for k in ("argv", "git", "versions")}
        record = {**first, "resumed": [*first.get("resumed", []), again]}
    run.dir.write_json("run.json", record)
    run.started()
    rounds.run_rounds(r)
    rounds.report(r)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return cli_exit(lambda: start(parse_args(DpoConfig, words, "python -m vgrout.iterative_dpo"), words), NOTHING)


if __name__ == "__main__":
    sys.exit(main())
