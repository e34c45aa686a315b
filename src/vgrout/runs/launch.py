"""From a command line to a run. No torch.

Everything that can be checked is checked, the sandbox starts, the run's folder is made, and the loop runs in it.
"""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from loguru import logger

from vgrout.config.presets import import_named, resumed
from vgrout.config.run import Config, from_dict
from vgrout.envs.base import Grader
from vgrout.ground import console, ranks
from vgrout.ground.io import Interrupted, Refused, probe_writable, read_json, spelled
from vgrout.ground.machine import cores
from vgrout.ground.table import StepRow
from vgrout.model.load.source import ITEMSIZE
from vgrout.runs import checkpoint
from vgrout.runs.context import FINISHED, INTERRUPTED, RunContext
from vgrout.runs.inputs import Inputs, file_hashes, require_own_labels
from vgrout.runs.peers import Peer, require_torchrun, resumed_by_torchrun
from vgrout.runs.plan import HEAD, beside_documents, dtype_of, first_lines, plan_lines, preflight
from vgrout.runs.run_dir import RUNS, has_checkpoint, require_same, run_to_resume
from vgrout.runs.tracking import Trackers

Loop = Callable[[Config, RunContext, Inputs], object]


def launch(
    train: Loop,
    requested: Config,
    on_run: Callable[[RunContext], object] | None = None,
    *,
    named: bool = True,
) -> int:
    """Check everything that can be checked without torch, start the sandbox, then train. Returns the exit code.

    train: the loop. It imports torch, and nothing does so before.
    on_run: called with the run as soon as it has a folder.
    named: somebody chose the intervention; else the plan and the first lines say that it is the preset's.

    Raises:
        Refused: a user's mistake, in one line, with nothing started.
    """
    require_torchrun()
    console.setup(None)  # what is said before the run has a log
    if not ranks.first():
        return FINISHED if requested.run.dry_run else follow(train)
    # path: the folder of the run that is resumed; None: a new run
    try:
        requested = resumed_by_torchrun(requested)
    except Interrupted as e:
        logger.warning(str(e))
        return INTERRUPTED
    path, cfg = find_resume(requested)
    named = named or path is not None
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
        folder = path or cfg.run.output_dir or RUNS
        plan = plan_lines(cfg, inputs, grader, folder, named=named, resumes=path is not None)
        if cfg.run.dry_run:
            print_plan(plan)
            return FINISHED
        run = begin_run(cfg, path, grader, hashes)
        if on_run:
            on_run(run)
        with run:
            run.announce(*first_lines(cfg, named=named))
            if cfg.guard_warning:
                logger.warning(cfg.guard_warning)
            for line in plan:
                logger.debug(line)
            with ranks.joined():
                ranks.from_first((cfg, inputs, run.resumes))
                train(cfg, run, inputs)
        return run.code


def find_resume(requested: Config) -> tuple[Path | None, Config]:
    """The run directory to continue (None: a new run), and the configuration: that of the run, under this command
    line's process settings.

    Raises:
        Refused: the run cannot be continued, or was started with other flags; one line.
    """
    if not requested.run.resume:
        return None, requested
    path, config, status = run_to_resume(requested.run.resume, "train", "preset", RUNS)
    stored = from_dict(config, f"--resume {path}: run.json")
    import_named(stored.code, trusted=requested.run.trust_code, where=f"--resume {path}: ")
    began = read_json(path / "run.json").get("dtype")
    # auto may mean another one on this machine
    named = requested.run.dtype != "auto" or began != dtype_of(stored)
    if stored.run.dtype == "auto" and began in ITEMSIZE and named:
        stored = replace(stored, run=replace(stored.run, dtype=began))
    cfg, differing = resumed(requested, stored)
    if status["state"] == "halted":
        if requested.guard.guard != "log":
            raise Refused(
                f"--resume {path}: halted ({status.get('reason')}); to go on all the same, add --guard log"
            )
        quiet = replace(cfg.detectors, reward_hack_halt=False, echo_trap_halt=False)
        cfg = replace(cfg, detectors=quiet)
    if not requested.run.dry_run and has_checkpoint(path):
        checkpoint.require_one(path, StepRow.from_json)
    probe_writable(path)
    if differing:
        raise Refused(f"--resume {path}: differs in {', '.join(differing)}; drop these flags")
    if cfg.run.threads != stored.run.threads:
        logger.warning(
            f"--threads {cfg.run.threads} (run: {stored.run.threads}): sums are rounded in another order, "
            "so what follows may differ from an uninterrupted run"
        )
    return path, cfg


def begin_run(
    cfg: Config,
    path: Path | None,
    grader: Grader,
    hashes: Mapping[str, str | None],
) -> RunContext:
    """Make the run's folder, or open that of the run to resume, and start its log. path: as in `launch`."""
    command = ["train", cfg.preset]
    if cfg.code:
        command.append("--trust-code")
    record = {
        "config": cfg.as_dict(),
        "beside_documents": beside_documents(cfg.method),
        "hashes": hashes,
    }
    return RunContext.begin(
        " ".join(command),
        path,
        cfg.run_id,
        grader,
        record=record,
        trackers=Trackers(cfg.run.trackers),
        given=cfg.run.output_dir,
    )


def print_plan(plan: list[str]) -> None:
    """Print what --dry-run shows."""
    lines = spelled("\n".join(plan)).split("\n")
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        lines = console.for_terminal(lines, columns, indent=HEAD)
    print("\n".join(lines))


def follow(train: Loop) -> int:
    """A rank beside rank 0: the same loop on rank 0's inputs, writing nothing. Returns the exit code."""
    logger.remove()  # rank 0 logs
    with ranks.joined():
        # receives rank 0's values; the ones given here are placeholders
        cfg, inputs, resumes = ranks.from_first((Config(), None, False))
        assert inputs is not None
        with grader_of(cfg, inputs) as grader, Peer(grader, resumes) as run:
            train(cfg, run, inputs)
    return run.code


def grader_of(cfg: Config, inputs: Inputs) -> Grader:
    """Start what grades this run's answers. Its workers are this machine's cores, divided among the ranks on it."""
    workers = max(1, cores() // ranks.here())
    return inputs.environment.grader(workers, cfg.run.max_error_retries)
