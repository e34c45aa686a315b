"""GRPO against a flawed grader, with gradient routing: `vgrout train PRESET [--flag value …]`.

This file is the command: it checks all that can be checked without torch, starts the sandbox, and opens the run's
folder. The loop over the steps is in loop.py.

Exit codes are those of runs/context.py. Every exit after the run directory was made leaves `status.json` in it.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from loguru import logger

from vgrout import console, ranks
from vgrout.cli import cli_exit, spelled
from vgrout.config.presets import resolve
from vgrout.config.run import Config
from vgrout.cores import cores
from vgrout.envs.base import Grader
from vgrout.inputs import Inputs, file_hashes, require_own_labels
from vgrout.runs.context import FINISHED, NOTHING, RUNS, RunContext, leave, require_same
from vgrout.runs.peers import Peer, require_torchrun, resumed_by_torchrun
from vgrout.runs.preflight import (
    beside_documents,
    brought,
    find_resume,
    first_lines,
    plan_lines,
    preflight,
)
from vgrout.table import StepRow
from vgrout.tracking import Trackers


def train(cfg: Config, run: RunContext, inputs: Inputs) -> list[StepRow]:
    """Every remaining step, then the final evaluation and the report: `vgrout.loop.loop`, which says what is raised."""
    run.clock.begin("importing torch")
    from vgrout.loop import loop  # it takes seconds, and a wrong flag never waits for it

    return loop(cfg, run, inputs)


def launch(
    requested: Config, on_run: Callable[[RunContext], object] | None = None, *, named: bool = True
) -> int:
    """Check everything that can be checked without torch, start the sandbox, then train. Returns the exit code.

    on_run: called with the run as soon as it has a folder. named: somebody chose the intervention.

    Raises:
        Refused: a user's mistake, in one line, with nothing started.
    """
    require_torchrun()
    console.setup(None)  # what is said before the run has a log
    if not ranks.first():
        return FINISHED if requested.run.dry_run else follow()
    path, cfg = find_resume(resumed_by_torchrun(requested))
    inputs = preflight(cfg, path)
    hashes = file_hashes(cfg, inputs)
    if path:
        require_same(path, hashes)
    # The sandbox starts before torch is imported: its fork servers stay small, and are ready by the
    # time the model is.
    with grader_of(cfg, inputs) as grader:
        if not path:
            inputs.environment.check(grader)
            require_own_labels(cfg, inputs, grader)
        if cfg.run.dry_run:
            print_plan(cfg, inputs, grader, path, named=named or bool(path))
            return FINISHED
        run = RunContext.begin(
            " ".join(["train", cfg.preset, *cfg.repeated]),
            path,
            cfg.run_id,
            grader,
            record={
                "config": cfg.as_dict(),
                "beside_documents": beside_documents(cfg.method),
                "hashes": hashes,
            },
            trackers=Trackers(cfg.run.trackers),
            given=cfg.run.output_dir,
        )
        if on_run:
            on_run(run)
        with run:
            run.announce(*first_lines(cfg, named=named or bool(path)))
            if cfg.guard_warning:
                logger.warning(cfg.guard_warning)
            for line in brought(cfg.method):
                logger.debug(f"method: {line}")
            with ranks.joined():
                ranks.from_first((cfg, inputs, run.resumes))
                train(cfg, run, inputs)
        return run.code


def print_plan(
    cfg: Config, inputs: Inputs, grader: Grader, path: Path | None, *, named: bool
) -> None:
    """Print what --dry-run shows. path: the folder of the run that is resumed. named: as in `launch`."""
    there = path or cfg.run.output_dir or RUNS
    plan = plan_lines(cfg, inputs, grader, there, named=named, resumes=bool(path))
    print(spelled("\n".join(plan)))


def follow() -> int:
    """A rank beside rank 0: the same loop on rank 0's inputs, writing nothing. Returns the exit code."""
    logger.remove()  # rank 0 logs
    with ranks.joined():
        cfg, inputs, resumes = ranks.from_first((Config(), None, False))
        assert inputs is not None
        with grader_of(cfg, inputs) as grader, Peer(grader, resumes) as run:
            train(cfg, run, inputs)
    return run.code


def grader_of(cfg: Config, inputs: Inputs) -> Grader:
    """What grades this run's answers. Its workers are this machine's cores, divided among the ranks on it."""
    workers = max(1, cores() // ranks.here())
    return inputs.environment.grader(workers, cfg.run.max_error_retries)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    named = any(word.partition("=")[0] == "--intervention" for word in words)
    return cli_exit(lambda: launch(resolve(words), named=named), NOTHING)


if __name__ == "__main__":
    leave(main())
